"""`python -m docs`: writes every generated part of the documentation, or with `--check` fails when one is out of date.

Only calls the generators in `tools`. Called by `make docs` and CI.
"""

from __future__ import annotations

import sys

from tools import cli_help, errors_page, measurements


def main(argv: list[str]) -> int:
    """Run all generators; the worst status counts."""
    return max(errors_page.main(argv), cli_help.main(argv), measurements.main(argv))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
