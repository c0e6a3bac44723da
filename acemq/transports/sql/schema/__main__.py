"""`python -m acemq.transports.sql.schema postgresql`: print the statements that make the tables."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from acemq.errors import ConfigurationError

from ..dialects import DIALECTS
from . import sql


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m acemq.transports.sql.schema", description="Print the tables' SQL.")
    parser.add_argument("database", choices=tuple(DIALECTS))
    parser.add_argument(
        "--from", dest="since", type=int, default=0, metavar="N", help="the version that is there; 0: none"
    )
    parser.add_argument("--prefix", default="acemq_", help="what the names of the tables begin with")
    parser.add_argument("--schema", default="", help="PostgreSQL's schema, where it is not on the search path")
    options = parser.parse_args(arguments)
    try:
        print(sql(options.database, since=options.since, prefix=options.prefix, schema=options.schema), end="")
    except ConfigurationError as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
