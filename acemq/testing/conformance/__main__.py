"""`python -m acemq.testing.conformance table *.json`: reports side by side, as one table."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from acemq.testing.conformance.guarantees import table


def main(arguments: list[str]) -> int:
    match arguments:
        case ["table", *paths] if paths:
            print(table([json.loads(Path(path).read_text()) for path in paths]))
            return 0
        case _:
            print("usage: python -m acemq.testing.conformance table REPORT.json …", file=sys.stderr)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
