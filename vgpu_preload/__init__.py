"""libvgpu.so, the library that GPU processes are started with: its C sources and what builds them.

Holds no Python that runs on a node: `build.py` makes the library, `elf_facts.py` says what is in it. See README.md.
"""
