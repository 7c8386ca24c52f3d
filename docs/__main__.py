"""`python -m docs`: writes every generated part of the documentation, or with `--check` fails when one is out of date.

Only calls the generators in `tools`; man pages are made where they are installed (packaging/install.py). Called by `make docs` and CI.
"""

from __future__ import annotations

import sys

from tools import cli_help, errors_page, measurements, support_matrix


def main(argv: list[str]) -> int:
    """Run all generators; the worst status counts."""
    return max(main(argv) for main in (errors_page.main, cli_help.main, measurements.main, support_matrix.main))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
