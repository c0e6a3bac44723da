"""The parts of the documentation that are made from the code.

A page asks for one by a line of its own, such as `<!-- made: outcomes -->`. mkdocs calls `on_page_markdown`; the tests
call `fill`.
"""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from typer.main import get_command

import acemq
from acemq import errors, telemetry, topology
from acemq.cli.commands import app as cli
from acemq.cli.running import ExitCode
from acemq.connect_options import ConnectOptions
from acemq.consuming.options import ConsumeOptions
from acemq.consuming.settling import TABLE
from acemq.opening import transport_for
from acemq.ops.abilities import ABILITIES, shown
from acemq.ops.filters import FIELDS, HEADER
from acemq.publishing.options import PublishOptions
from acemq.testing.conformance import guarantees as proved
from acemq.testing.conformance.report import counts
from acemq.transports.sql.address import IN_QUERY
from acemq.transports.sql.address import Options as DatabaseOptions
from benches import page
from benches.page import table

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "docs" / "reports"

MARK = re.compile(r"^<!-- made: ([a-z-]+) -->$", re.MULTILINE)


def on_page_markdown(markdown: str, **_: object) -> str:
    return fill(markdown)


def fill(markdown: str) -> str:
    """The page with every mark replaced by what it asks for. `KeyError`: nobody makes that."""
    return MARK.sub(lambda mark: MADE[mark[1]](), markdown)


# What becomes of a message


def outcomes() -> str:
    rows = [
        (
            row.when,
            {"none": "–", "own queue": "the queue itself"}.get(row.copy, f"`{{queue}}{row.copy}`"),
            row.attempt,
            row.original,
            f"`{row.counted}`" + (f", `{row.also}`" if row.also else ""),
            f"`{row.text}`" if row.text else "–",
        )
        for row in TABLE.values()
    ]
    return table(("what happened", "copy to", "attempt on it", "original", "counted as", "text on the copy"), rows)


# Errors


def error_tree() -> str:
    """One row an error, children below their parent and set in by one mark more."""
    names, facts = errors.__all__, _facts()

    def walk(kind: type[Exception], depth: int) -> Iterator[tuple[str, str, str]]:
        said = paragraph_of(kind.__dict__["__doc__"])
        yield ("·\u2002" * depth + f"`{kind.__name__}`", said, facts.get(kind.__name__, "–"))
        for child in sorted(kind.__subclasses__(), key=_place):
            if child.__name__ in names and child.__bases__[0] is kind:
                yield from walk(child, depth + 1)

    return table(("error", "means", "facts"), walk(errors.AcemqError, 0))


def _place(kind: type[Exception]) -> int:
    """Where it stands in the drawing at the head of errors.py."""
    assert errors.__doc__ is not None
    found = re.search(rf"── {kind.__name__}\b", errors.__doc__)
    return found.start() if found else len(errors.__doc__)


def _facts() -> dict[str, str]:
    """The attributes of each error, as the drawing at the head of errors.py names them."""
    assert errors.__doc__ is not None
    lines = re.findall(r"── (\w+)(.*)", errors.__doc__)
    return {name: ", ".join(f"`{fact}`" for fact in found) for name, rest in lines if (found := _NAMED.findall(rest))}


_NAMED = re.compile(r"(?<=\s)\.(\w+)")


# What a transport can do


def capabilities() -> str:
    memory = transport_for("memory://").capabilities
    rabbitmq = transport_for("amqp://localhost").capabilities
    sql = transport_for("sqlite:///messages.db").capabilities
    rows = [(what, *(shown(value(can)) for can in (memory, sql, rabbitmq))) for what, value in ABILITIES.items()]
    told = "\n".join(f"- {note}" for note in rabbitmq.notes)
    return f"{table(('', '`memory://`', 'a database', '`amqp://`'), rows)}\n\nOf RabbitMQ, in its own words:\n\n{told}"


# What each transport has shown


def guarantees() -> str:
    """The table of the conformance kit, from the last reports."""
    return proved.table(reports())


def conformance_runs() -> str:
    rows = (
        (
            f"`{report['transport']}`",
            report["server"] or "in the process",
            report["when"][:10],
            *(str(counts(report)[outcome]) for outcome in ("passed", "gap", "skipped", "failed")),
        )
        for report in reports()
    )
    return table(("transport", "server", "run on", "passed", "gaps", "do not apply", "failed"), rows)


def reports() -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(REPORTS.glob("*.json"))]


# Options, of which the classes say everything once


def connect_options() -> str:
    return options_of(ConnectOptions)


def publish_options() -> str:
    return options_of(PublishOptions)


def consume_options() -> str:
    return options_of(ConsumeOptions)


def queue_options() -> str:
    return options_of(topology.QueueOptions)


def database_options() -> str:
    """Those of a database that are keys of its URL's query, with what holds where they are not given."""
    body = ast.parse(inspect.getsource(DatabaseOptions)).body[0]
    assert isinstance(body, ast.ClassDef)
    rows: list[tuple[str, str, str]] = []
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
            if name in IN_QUERY:
                rows.append(
                    (f"`{name}`", _in_query(DatabaseOptions.__struct_defaults__, name), text_of(following) or "")
                )
    return table(("key", "unless given", "meaning"), rows)


def _in_query(defaults: Sequence[object], name: str) -> str:
    match defaults[DatabaseOptions.__struct_fields__.index(name)]:
        case None | "":
            return "–"
        case timedelta() as length:
            return f"`{length.total_seconds():g}` s"
        case bool() as switch:
            return f"`{str(switch).lower()}`"
        case value:
            return f"`{value}`"


def options_of(group: type[Any]) -> str:
    """Each field of a TypedDict with its type and the text below it."""
    body = ast.parse(inspect.getsource(group)).body[0]
    assert isinstance(body, ast.ClassDef)
    rows: list[tuple[str, str, str]] = []
    for statement, following in zip(body.body, [*body.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kind = ast.unparse(statement.annotation)
            rows.append((f"`{statement.target.id}`", f"`{kind}`", text_of(following) or ""))
    return table(("option", "type", "default and meaning"), rows)


def text_of(statement: ast.stmt | None) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        return paragraph_of(str(statement.value.value))
    return None


# What it tells of itself. The names are the code's; a name without a sentence here ends the build.


def diagnostics() -> str:
    return table(("name", "level", "says that"), ((f"`{name}`", *DIAGNOSTICS[name]) for name in diagnostic_names()))


def diagnostic_names() -> list[str]:
    return [
        value
        for name, value in vars(telemetry).items()
        if name.isupper() and isinstance(value, str) and value.startswith("acemq.")
    ]


DIAGNOSTICS = {
    telemetry.MOVE_FAILED: ("error", "a copy did not land; the original stays where it was"),
    telemetry.DEAD_LETTERED: ("warning", "a message went to its dead letters, and why"),
    telemetry.PARKED: ("warning", "a message was parked, and why"),
    telemetry.RUNG_MISSING: ("warning", "there is no queue for a long wait, which is spent in the consumer instead"),
    telemetry.CONNECTION_LOST: ("warning", "the link is gone; it is dialled again"),
    telemetry.CONNECTION_RECOVERED: ("info", "the link is back"),
    telemetry.CONSUMER_LOST: ("warning", "the broker has ended a subscription, or refuses it; it is tried again"),
    telemetry.SETTLE_STALE: ("warning", "a message was settled too late: the broker had taken it back already"),
    telemetry.HANDLER_STUCK: ("error", "a handler still runs at twice its time limit, and keeps its place"),
    telemetry.WORKER_ENDED: (
        "error",
        "a handler raised what is no `Exception`, such as `SystemExit`: its worker has ended, and its consumer is down",
    ),
    telemetry.LISTENER_FAILED: (
        "warning",
        "a hook or a `when_settled` listener raised where that changes nothing; what it was told of stands",
    ),
    telemetry.LEASE_LOST: (
        "error",
        "a claim ran out while its handler ran, which was cancelled; another may have the message in hand",
    ),
    telemetry.CLAIM_FAILED: (
        "error",
        "the store of claims cannot be asked; messages wait, and none is taken for a duplicate",
    ),
    telemetry.OUTBOX_RETIRED: (
        "error",
        "a record of an outbox failed too often, and is tried no more until it is released",
    ),
    telemetry.OUTBOX_FAILED: ("error", "the store of an outbox cannot be asked; the relay asks again"),
    telemetry.PARTITION_HALTED: (
        "error",
        "a partition of an ordered queue stands at a message that failed, and how to go on",
    ),
    telemetry.OWNER_CHANGED: ("info", "this process has begun to consume a partition, or has lost it to another"),
    telemetry.REPLAY_STOPPED: ("info", "a replay has ended, why, and after how many"),
    telemetry.REPLY_UNDELIVERED: (
        "warning",
        "an answer found no reply queue: whoever asked is gone. Said once for each address",
    ),
    telemetry.SAGA_COMPENSATING: ("warning", "a saga has failed, or was stopped; what it had done is being undone"),
    telemetry.SAGA_UNRESOLVED: ("error", "a step of a saga could not be undone; somebody has to do it by hand"),
    telemetry.SCHEDULE_FOREIGN: (
        "error",
        "a message in the scheduler's control queue does not say where it is to go, or when; it was dropped",
    ),
}


def metrics() -> str:
    source = inspect.getsource(telemetry.Telemetry) + inspect.getsource(telemetry.Gauges)
    made = re.findall(r"meter\.create_(\w+)\(\"([\w.]+)\"(?:, \"(\w+)\")?[,)]", source)
    rows = (
        (
            f"`{name}`",
            f"{kind.removeprefix('observable_').replace('_', '-')}{f', {unit}' if unit else ''}",
            METRICS[name],
        )
        for kind, name, unit in made
    )
    return table(("metric", "kind", "counts"), rows)


METRICS = {
    "acemq.publish.duration": "from the call to the confirm",
    "acemq.publish.total": "publishes, by outcome",
    "acemq.consume.duration": "how long handlers took",
    "acemq.consume.total": "handled messages, by outcome",
    "acemq.consume.attempts": "the attempt at which messages were handled",
    "acemq.consume.in.flight": "handlers that run",
    "acemq.messages.retried.total": "retries",
    "acemq.messages.dead.lettered.total": "messages dead-lettered or parked; what a handler rejected is not among them",
    "acemq.messages.set.aside.failed": "copies that did not land",
    "acemq.retry.rung.missing": "waits that found no rung",
    "acemq.pipeline.run.duration": "the age of a message when its run through a pipeline ended",
    "acemq.pipeline.run.total": "runs that ended, by outcome",
    "acemq.replay.total": "messages replayed, put back, failed",
    "acemq.request.duration": "from a request to its answer, or to its end without one",
    "acemq.request.total": "requests, by outcome: answered, timed out, failed",
    "acemq.schedule.total": "messages scheduled here; on the ladder also those moved on, by what became of them",
    "acemq.idempotency.total": "claims by their answer: claimed, duplicate, in_progress, failed, confirm_failed",
    "acemq.lease.renewals.total": "tries to renew the lease of a delivery, by outcome: renewed, lost, failed",
    "acemq.lease.lost.total": "leases that ran out while their handler ran; `of` says of what: delivery or claim",
    "acemq.outbox.lag": "from the writing of a record to its publish; records that are out only",
    "acemq.outbox.total": "publishes of a relay, published or failed",
    "acemq.outbox.oldest": "how long the oldest record has waited, retired ones left out, as last asked for",
    "acemq.settle.total": "what the broker was told of deliveries, by verb, and whether it still held them",
    "acemq.transport.connected": "1 while the link is there; of several connections to one kind of broker the worst",
    "acemq.transport.blocked": "1 while the broker takes no publishes",
    "acemq.publish.outstanding": "publishes that the broker has not answered",
    "acemq.ordered.halted": "1 while a partition that is consumed here is halted, else 0",
    "acemq.queue.depth": "the broker's last word about each consumed queue; left out when it is older than 60 s",
}


# The command line


def exit_codes() -> str:
    body = ast.parse(inspect.getsource(ExitCode)).body[0]
    assert isinstance(body, ast.ClassDef)
    said = [text for statement in body.body[1:] if (text := text_of(statement))]
    return table(("code", "means"), ((f"{code.value}", text) for code, text in zip(ExitCode, said, strict=True)))


def filter_fields() -> str:
    return "The fields are " + ", ".join(f"`{field}`" for field in (*FIELDS, f"{HEADER}NAME")) + "."


def commands() -> str:
    """Every command with its arguments and options, as its `--help` has them."""
    return "\n\n".join(_command(words, command) for words, command in command_tree())


def command_tree() -> Iterator[tuple[str, Any]]:
    """Each command by its words, groups left out."""

    def walk(words: str, node: Any) -> Iterator[tuple[str, Any]]:
        if not hasattr(node, "commands"):
            yield words, node
            return
        for name, child in node.commands.items():
            yield from walk(f"{words} {name}", child)

    yield from walk("acemq", get_command(cli))


def _command(words: str, command: Any) -> str:
    said = re.fullmatch(r"Example: (.+?)\.  (Exit codes: .*)", command.epilog, re.DOTALL)
    assert said is not None, f"{words} has no example and no codes in its epilog"
    example, codes = said.groups()
    rows = [
        (
            f"`{_called(parameter)}`",
            " ".join(filter(None, (parameter.help, _default(parameter)))),
        )
        for parameter in command.params
        if parameter.name != "help"
    ]
    return "\n\n".join(
        (f"### {words}", paragraph_of(command.help), table(("", "is"), rows), f"Example: `{example}`. {codes}")
    )


def _called(parameter: Any) -> str:
    if parameter.param_type_name == "argument":
        return str(parameter.metavar or parameter.name.upper())
    return ", ".join(parameter.opts)


def _default(parameter: Any) -> str:
    if parameter.required:
        return "Required."
    shown = parameter.show_default if isinstance(parameter.show_default, str) else parameter.default
    return f"Default: {shown}." if shown and parameter.default is not None else ""


# Every public name


def names() -> str:
    return table(("name", "what it is"), ((f"`{name}`", described(name)) for name in acemq.__all__))


ALIASES = {
    "AnyCodec": "Type alias: a `Codec` or an `AsyncCodec`.",
    "BatchHandler": "Type alias: what `consume_batches()` calls, from `Batch[T]` to `Ack` or `None`, `async` or not.",
    "CredentialsSource": "Type alias: `Credentials`, or a function that returns them, `async` or not.",
    "Handler": "Type alias: what `consume()` calls, a function from `Message[T]` to `Ack` or `None`, `async` or not.",
    "HeaderValue": "Type alias: what a header may hold.",
    "Responding": "Type alias: what `respond()` calls, from `Message[T]` to the answer, `async` or not.",
    "Payload": "Type alias: a payload class, or what `one_of()` made of several.",
}


def described(name: str) -> str:
    """Its first sentence, and nothing for a name that says nothing of itself."""
    return ALIASES.get(name) or first_sentence(getattr(acemq, name))


def first_sentence(thing: Any) -> str:
    text = thing.__dict__.get("__doc__") if isinstance(thing, type) else thing.__doc__
    # A dataclass without a docstring is given its signature by Python.
    if not text or text.startswith(f"{thing.__name__}("):
        return ""
    first, *more = re.split(r"(?<=[.!?])\s+(?=[A-Z`])", paragraph_of(text))
    return f"{first} {more[0]}" if len(first) < SHORT and more else first


SHORT = 40
"""Characters; a sentence as short as "Nothing was written." is given the one after it."""


def paragraph_of(text: str) -> str:
    """The first one, on one line, without references to the contract, which readers of the pages do not have."""
    paragraph = " ".join(inspect.cleandoc(text).split("\n\n")[0].split())
    return re.sub(r" \(CONTRACT\.md[^)]*\)", "", paragraph)


MADE: dict[str, Callable[[], str]] = {
    "outcomes": outcomes,
    "errors": error_tree,
    "capabilities": capabilities,
    "connect-options": connect_options,
    "publish-options": publish_options,
    "consume-options": consume_options,
    "queue-options": queue_options,
    "database-options": database_options,
    "diagnostics": diagnostics,
    "metrics": metrics,
    "names": names,
    "commands": commands,
    "exit-codes": exit_codes,
    "filter-fields": filter_fields,
    "benchmarks": page.benchmarks,
    "costs": page.costs,
    "beside-peers": page.beside_peers,
    "guarantees": guarantees,
    "conformance-runs": conformance_runs,
}
