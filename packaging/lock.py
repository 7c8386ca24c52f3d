"""Writes requirements.lock and requirements-dev.lock: the exact versions of the environment it runs in.

The first is the closure of pyproject.toml's dependencies, the second adds the extra `dev`. Packages that only other
Python versions need are asked for by their marker and keep it. Called by `make lock`, in .venv, after an upgrade.
"""

from __future__ import annotations

import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

REPOSITORY = Path(__file__).resolve().parents[1]
# Not installed on the Python that locks (3.11), needed by newer ones: versions are kept here by hand.
ELSEWHERE = {"pyasyncore": "1.0.5"}
HEADER = "# Made by 'make lock' from pyproject.toml; do not edit.\n"


def main() -> None:
    """Write both files."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = closure([Requirement(line) for line in project["dependencies"]])
    wanted = closure([Requirement(line) for line in project["optional-dependencies"]["dev"]])
    write("requirements.lock", needed)
    write("requirements-dev.lock", {**wanted, **needed})


def closure(requirements: list[Requirement]) -> dict[str, str]:
    """Every package that the requirements lead to -> its line."""
    lines: dict[str, str] = {}
    queue = [(requirement, "") for requirement in requirements]
    while queue:
        requirement, extra = queue.pop()
        name = canonical(requirement.name)
        if name in ELSEWHERE:
            lines[name] = f"{name}=={ELSEWHERE[name]} ; {requirement.marker}"
        if name in lines or (requirement.marker and not requirement.marker.evaluate({"extra": extra})):
            continue
        found = metadata.distribution(requirement.name)
        lines[name] = f"{name}=={found.version}"
        parts = [Requirement(line) for line in found.requires or []]
        queue += [(part, "") for part in parts if not part.marker or "extra" not in str(part.marker)]
        queue += [(part, chosen) for chosen in requirement.extras for part in parts if "extra" in str(part.marker)]
    return lines


def canonical(name: str) -> str:
    """The spelling the index uses."""
    return name.lower().replace("_", "-").replace(".", "-")


def write(name: str, lines: dict[str, str]) -> None:
    """Sorted, one package a line."""
    (REPOSITORY / name).write_text(HEADER + "".join(f"{lines[key]}\n" for key in sorted(lines)), encoding="utf-8")


if __name__ == "__main__":
    main()
