"""Test hosts: Debian roots with real engines, entered as machines of their own on the machine that runs the tests.

`rows` says which Debian, `roots` builds and caches it, `host` enters it, `images` and `project` fill it.
Refuses to stand in for anything: podman, runc, crun, containerd and CRIU in a test host are Debian's own.
"""
