"""`acemq outbox`: what could not be published, and what becomes of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Annotated

import typer

from acemq.cli.databases import OutboxAt
from acemq.cli.options import TEN_SECONDS, Json, Timeout, Wide, Yes
from acemq.cli.running import ExitCode, confirm, ending
from acemq.cli.showing import Output, body_of, clean
from acemq.cli.target import database_of
from acemq.errors import ConfigurationError, ConnectionFailedError
from acemq.ops import outbox as outboxes
from acemq.ops.letters import check_most
from acemq.ops.outbox import OutboxActed, Progress
from acemq.stores import MAX_ATTEMPTS, OutboxKeeper

outbox = typer.Typer(
    help="What an outbox holds, and what of it could not be published.", no_args_is_help=True, rich_markup_mode=None
)

Database = Annotated[
    str | None,
    typer.Option(
        "--database",
        metavar="URL",
        help="Where the outbox is. Else ACEMQ_DATABASE_URL, which no list of processes shows.",
    ),
]
Table = Annotated[str, typer.Option("--table", metavar="NAME", help="Its table.")]
Schema = Annotated[str | None, typer.Option("--schema", metavar="NAME", help="Where that is, on PostgreSQL.")]
Ceiling = Annotated[
    int,
    typer.Option(
        "--max-attempts", help="Failures after which a record is retired: as your program makes its DbOutboxStore."
    ),
]
Ids = Annotated[list[str] | None, typer.Argument(metavar="[ID]...", help="Their ids, or the beginnings of them.")]

TABLE = "acemq_outbox"


@outbox.command("status", epilog="Example: acemq outbox status --table shop_outbox.  Exit codes: 0, 1, 2, 4.")
def show_status(
    database: Database = None,
    table: Table = TABLE,
    schema: Schema = None,
    max_attempts: Ceiling = MAX_ATTEMPTS,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """How much waits to be published, how old that is, and how much was given up."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        at = _at(database, table, schema, max_attempts, timeout)
        line = at.run(outboxes.look)
        output.items("outbox", [line])
        output.table(
            ("OUTBOX", "PENDING", "RETIRED", "OLDEST THAT IS TRIED"),
            [(line.outbox, line.pending, line.retired, line.oldest)],
            right=("PENDING", "RETIRED"),
        )
        if line.retired:
            output.say("What is retired is tried no more; `acemq outbox retired` shows it, and why.")
        elif line.needs_somebody:
            output.say("No relay publishes from it: none runs, or it has no link to its broker.")
        if line.needs_somebody:
            raise typer.Exit(ExitCode.ATTENTION)


@outbox.command("retired", epilog="Example: acemq outbox retired o-1001.  Exit codes: 0, 2, 4.")
def show_retired(
    id: Annotated[str | None, typer.Argument(help="One record: its id, or the beginning of it.")] = None,
    most: Annotated[int, typer.Option(help="So many of the oldest, 1 to 1,000.")] = 20,
    database: Database = None,
    table: Table = TABLE,
    schema: Schema = None,
    max_attempts: Ceiling = MAX_ATTEMPTS,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """What failed as often as it may and why, or one record with its headers and body."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        check_most(most)
        at = _at(database, table, schema, max_attempts, timeout)
        if id is not None:
            found = at.run(lambda store: outboxes.find(store, id))
            output.items("outbox.record", [found])
            _show_record(found, output)
            return
        several = at.run(lambda store: outboxes.look_at_retired(store, most=most))
        output.items("outbox.retired", several)
        if not several:
            output.say(f"No record of {table} is retired.")
            return
        output.table(
            ("ID", "TO", "KEY", "ATTEMPTS", "WRITTEN AT", "ERROR"),
            [
                (
                    record.id if wide else record.id[:12],
                    record.target,
                    record.key,
                    record.attempts,
                    record.written_at,
                    record.error if wide else _short(record),
                )
                for record in several
            ],
            right=("ATTEMPTS",),
        )


def _short(record: outboxes.RetiredLine) -> str:
    """Without the words that say again which message it was, and where it should have gone."""
    said, _, reason = record.error.partition(": ")
    return reason if reason and said.startswith(f"message {record.id} to ") else record.error


def _show_record(record: outboxes.RetiredLine, output: Output) -> None:
    facts: list[tuple[str, object]] = [
        ("id", record.id),
        ("type", record.type),
        ("to", record.target),
        ("key", record.key),
        ("attempts", record.attempts),
        ("written at", record.written_at),
        ("error", record.error),
        ("content type", record.content_type),
        ("size", f"{record.size:,} bytes"),
    ]
    output.table(("RECORD", ""), facts)
    output.say()
    output.table(("HEADER", "VALUE"), [(name, str(value)) for name, value in sorted(record.headers.items())])
    output.say()
    output.say(body_of(record.body))


@outbox.command(
    "release", epilog="Example: acemq outbox release o-1001 o-1004.  Exit codes: 0, 2, 3, 4, 5, and 130 by Ctrl-C."
)
def release_records(
    ids: Ids = None,
    everything: Annotated[
        bool, typer.Option("--all", help="All that are retired; of more than 1,000 the oldest.")
    ] = False,
    yes: Yes = False,
    database: Database = None,
    table: Table = TABLE,
    schema: Schema = None,
    max_attempts: Ceiling = MAX_ATTEMPTS,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
) -> None:
    """Have retired records tried again, from attempt 1. Mend first what kept them: else they are here again."""
    output = Output(as_json=as_json)
    with ending(output):
        if bool(ids) is everything:
            raise ConfigurationError("name the records to release, or give --all; not both")
        at = _at(database, table, schema, max_attempts, timeout)
        # Looked up on a connection of its own: a person who thinks it over must not hold one.
        named = at.run(outboxes.ids_of_all if everything else lambda store: outboxes.ids_of(store, ids or ()))
        if named:
            confirm(f"Release {_those(named)} of {table}?", yes=yes)
        _act(output, at, "released", named, lambda store, told: outboxes.release(store, named, told))


@outbox.command(
    "discard",
    epilog='Example: acemq outbox discard o-1001 --reason "made by mistake".  '
    "Exit codes: 0, 2, 3, 4, 5, and 130 by Ctrl-C.",
)
def discard_records(
    ids: Annotated[list[str], typer.Argument(metavar="ID...", help="Their ids, or the beginnings of them.")],
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Why; it is kept with the record.")],
    yes: Yes = False,
    database: Database = None,
    table: Table = TABLE,
    schema: Schema = None,
    max_attempts: Ceiling = MAX_ATTEMPTS,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
) -> None:
    """Give retired records up: they are never published, and what waits behind them goes."""
    output = Output(as_json=as_json)
    with ending(output):
        if not reason.strip():
            raise ConfigurationError("--reason is empty; say why, as it is kept with the record")
        at = _at(database, table, schema, max_attempts, timeout)
        named = at.run(lambda store: outboxes.ids_of(store, ids))
        confirm(f"Discard {_those(named)} of {table}, never to be published?", yes=yes)
        _act(output, at, "discarded", named, lambda store, told: outboxes.discard(store, named, reason, told))


def _at(database: str | None, table: str, schema: str | None, max_attempts: int, timeout: timedelta) -> OutboxAt:
    return OutboxAt(url=database_of(database), table=table, schema=schema, max_attempts=max_attempts, within=timeout)


def _those(ids: list[str]) -> str:
    return clean(f"the record {ids[0]}" if len(ids) == 1 else f"{len(ids):,} records")


def _act(
    output: Output,
    at: OutboxAt,
    done: str,
    ids: list[str],
    act: Callable[[OutboxKeeper, Progress], Awaitable[OutboxActed]],
) -> None:
    """Do it, and say how far it came, however it ended."""
    result = OutboxActed(len(ids))

    def progress(so_far: OutboxActed) -> None:
        nonlocal result
        result = so_far

    try:
        at.run(lambda store: act(store, progress))
    except ConnectionFailedError as error:
        if not result.affected:
            raise
        output.error(type(error).__name__, str(error))
    except KeyboardInterrupt:
        if not result.affected:
            raise
        output.error("Interrupted", "interrupted; the rest is as it was")
    output.acted(result.affected, skipped=result.skipped, took=result.took, outbox=at.table)
    left = f"; {result.not_retired:,} were not retired any more" if result.not_retired else ""
    output.say(f"{result.affected:,} of {result.asked:,} {done}{left}")
    if not result.is_whole:
        raise typer.Exit(ExitCode.PARTLY)
