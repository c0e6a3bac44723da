"""The commands. Each reads its options, asks the ops layer, and shows what that returns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated

import typer

from acemq import __version__
from acemq.cli.options import TEN_SECONDS, Json, Names, Timeout, TopologyName, Url, Wide, Yes, duration
from acemq.cli.outbox import outbox
from acemq.cli.running import ExitCode, PartlyDone, confirm, connected, ending
from acemq.cli.showing import Output, bar, body_of, clean
from acemq.cli.target import required_topology, topology_of, url_of
from acemq.errors import AcemqError, ReplayError
from acemq.health import without_secrets
from acemq.ops import doctor as doctors
from acemq.ops import letters, queues, replays
from acemq.ops.making import made_between
from acemq.ops.replays import ReplayOrder
from acemq.ops.words import counted
from acemq.patterns.replay import ReplayResult, StopReason
from acemq.plan import Plan
from acemq.topology import Declaration

app = typer.Typer(
    name="acemq",
    help="Look at a broker, and put right what went wrong.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
dlq = typer.Typer(help="What was given up or parked, and why.", no_args_is_help=True, rich_markup_mode=None)
topology_app = typer.Typer(
    help="What should be on the broker, and what is.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(dlq, name="dlq")
app.add_typer(outbox, name="outbox")
app.add_typer(topology_app, name="topology")


def _version(asked: bool) -> None:
    if asked:
        print(f"acemq {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and end.")
    ] = False,
) -> None:
    pass


# Looking


@app.command("queues", epilog="Example: acemq queues orders shipping.  Exit codes: 0, 2, 4.")
def show_queues(
    names: Names = None,
    url: Url = None,
    topology: TopologyName = None,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """How much waits in each queue, in its dead letters and among its parked messages."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        known = topology_of(topology)
        lines = connected(url_of(url), timeout, lambda mq: queues.look_at_queues(mq, names or (), known))
        output.items("queues", lines)
        output.table(
            ("QUEUE", "READY", "DEAD", "PARKED"),
            [(line.queue, line.ready, line.dead, line.parked) for line in lines],
            right=("READY", "DEAD", "PARKED"),
        )


@dlq.command("ls", epilog="Example: acemq dlq ls orders.  Exit codes: 0, 2, 4.")
def list_set_aside(
    names: Names = None,
    url: Url = None,
    topology: TopologyName = None,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """The dead-letter and parked queues of these queues, and how much lies there."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        known = topology_of(topology)
        lines = connected(url_of(url), timeout, lambda mq: queues.look_at_set_aside(mq, names or (), known))
        output.items("dlq", lines)
        if lines:
            output.table(
                ("SOURCE", "WAITING", "OF"),
                [(line.source, line.waiting, line.of) for line in lines],
                right=("WAITING",),
            )
        else:
            output.say("None of these queues has a .dlq or a .parked: nothing was ever set aside.")


@dlq.command(
    "show",
    epilog="Example: acemq dlq show orders.dlq.  Exit codes: 0, 2, 4. "
    "Looking holds the messages for a moment and gives them back in their place; "
    "the broker marks them as redelivered, and may count it.",
)
def show_letters(
    source: Annotated[str, typer.Argument(help="The queue, such as orders.dlq.")],
    id: Annotated[str | None, typer.Argument(help="One message: its id, or the beginning of it.")] = None,
    most: Annotated[int, typer.Option(help="So many from the head of the queue, 1 to 1,000.")] = 20,
    url: Url = None,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """What lies in a dead-letter or parked queue and why, or one message with its headers and body."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        letters.check_most(most)
        if id is not None:
            found = connected(url_of(url), timeout, lambda mq: letters.find(mq, source, id))
            output.items("dlq.message", [found])
            _show_letter(found, output)
            return
        several = connected(url_of(url), timeout, lambda mq: letters.look(mq, source, most=most))
        output.items("dlq.messages", several)
        if not several:
            output.say(f"{source} is empty.")
            return
        output.table(
            ("#", "ID", "TYPE", "ATTEMPT", "REPLAYS", "SET ASIDE AT", "HOW", "ERROR"),
            [
                (
                    letter.place,
                    letter.id if wide else letter.id[:12],
                    letter.type,
                    letter.attempt,
                    letter.replays,
                    letter.failed_at,
                    letter.how,
                    letter.error if wide else _short(letter),
                )
                for letter in several
            ],
            right=("#", "ATTEMPT", "REPLAYS"),
            a_line_each=True,
        )


def _short(letter: letters.Letter) -> str:
    """Without the words that say again how it was set aside."""
    said, _, reason = letter.error.partition(": ")
    return reason if reason and letter.how is not None else said


def _show_letter(letter: letters.Letter, output: Output) -> None:
    facts: list[tuple[str, object]] = [
        ("id", letter.id),
        ("type", letter.type),
        ("correlation", letter.correlation_id),
        ("attempt", letter.attempt),
        ("replays", letter.replays),
        ("first seen", letter.first_seen),
        ("set aside at", letter.failed_at),
        ("how", letter.how),
        ("error", letter.error),
        ("error type", letter.error_type),
        ("failed in", letter.failed_queue),
        ("failed by", letter.failed_by),
        ("content type", letter.content_type),
        ("size", f"{letter.size:,} bytes"),
    ]
    output.table(("MESSAGE", f"{letter.place} in the queue"), facts)
    output.say()
    output.table(("HEADER", "VALUE"), [(name, str(value)) for name, value in sorted(letter.headers.items())])
    output.say()
    output.say(body_of(letter.body))


# Putting back


@app.command(
    epilog="Example: acemq replay orders.dlq --where error~timeout --limit 100 --rate 50.  "
    "Exit codes: 0, 2, 3, 4, 5. Ctrl-C finishes the message in hand, gives the rest back, and shows the numbers.",
)
def replay(
    source: Annotated[str, typer.Argument(metavar="QUEUE", help="The queue, such as orders.dlq.")],
    into: Annotated[str | None, typer.Option(metavar="QUEUE", help="Else where they came from, by its name.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            metavar="FILTER",
            help="FIELD=VALUE, FIELD!=VALUE or FIELD~TEXT; several must all hold. "
            "Fields: id, type, correlation, attempt, replays, error, how, error-type, queue, by, body, header.NAME.",
        ),
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Replay so many at most.")] = None,
    rate: Annotated[float | None, typer.Option(help="So many a second at most. A dry run looks at once.")] = None,
    within: Annotated[
        timedelta | None, typer.Option(parser=duration, metavar="TIME", help="Stop after so long.")
    ] = None,
    batch: Annotated[int, typer.Option(help="Copy so many at a time: quicker, and a crash may double as many.")] = 1,
    keep_attempts: Annotated[bool, typer.Option("--keep-attempts", help="Leave the attempt as it is.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Look only, and say how many would go.")] = False,
    yes: Yes = False,
    url: Url = None,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
) -> None:
    """Put the messages of a dead-letter or parked queue back where they came from."""
    output = Output(as_json=as_json)
    with ending(output):
        order = ReplayOrder(
            source=source,
            into=into,
            where=tuple(where or ()),
            limit=limit,
            rate=rate,
            within=within,
            keep_attempts=keep_attempts,
            batch=batch,
            dry_run=dry_run,
        )
        broker = url_of(url)
        # Looked at on a connection of its own: a person who thinks it over must not keep one waiting.
        before = connected(broker, timeout, lambda mq: replays.preview(mq, order))
        if not dry_run and before.waiting:
            confirm(_question(order, before), yes=yes)
        told: list[ReplayResult] = []
        code = ExitCode.DONE
        try:
            with bar(f"{source} → {order.target}", before.most, output) as moved:

                def progress(result: ReplayResult) -> None:
                    told[:] = [result]
                    moved(result)

                connected(broker, timeout, lambda mq: replays.carry_out(mq, order, progress))
        except KeyboardInterrupt:
            if not told:
                raise
            code = ExitCode.PARTLY
        except ReplayError as error:
            output.error(type(error).__name__, str(error))
            code = ExitCode.PARTLY
        result = told[-1]
        output.acted(result.replayed, skipped=replays.skipped(result), took=result.took, replay=result)
        output.say(_account(result))
        if dry_run and rate is not None:
            output.say("A dry run puts nothing back, so --rate did not slow it down.")
        if code or result.stopped is StopReason.HELD:
            raise typer.Exit(ExitCode.PARTLY)


def _question(order: ReplayOrder, before: replays.ReplayPreview) -> str:
    # How many a filter accepts is not known yet: only the dry run looks.
    those = f"what has {' and '.join(order.where)} among " if order.where else ""
    most = f", {before.most:,} at most" if before.most < before.waiting else ""
    those += f"the {counted(before.waiting, 'message')} of {order.source}"
    return clean(f"Replay {those} into {order.target}{most}?")


def _account(result: ReplayResult) -> str:
    would = "would go" if result.dry else "replayed"
    parts = [
        f"{result.replayed:,} of {result.looked_at:,} {would} into {result.target}",
        f"{result.put_back:,} put back",
        f"stopped: {result.stopped}",
        f"{result.took.total_seconds():.1f} s",
    ]
    if result.in_doubt:
        parts.append(f"{result.in_doubt:,} may be in both queues")
    return "; ".join(parts)


# Topology


@topology_app.command("show", epilog="Example: acemq topology show --topology shop:topology.  Exit codes: 0, 2.")
def show_topology(topology: TopologyName = None, as_json: Json = False, wide: Wide = False) -> None:
    """What your topology describes, object by object. It needs no broker."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        described = required_topology(topology)
        described.validate()
        objects = described.describe()
        output.items("topology", objects)
        output.table(("KIND", "NAME", "IS"), [(each.kind, each.name, _described(each)) for each in objects])


def _described(declared: Declaration) -> str:
    if declared.kind == "binding":
        return f"of {declared.exchange} on {declared.routing_key!r}"
    given = (f"{name}={value!r}" for name, value in sorted(declared.arguments.items()) if name != "x-queue-type")
    return " ".join((declared.type, *given))


@topology_app.command("plan", epilog="Example: acemq topology plan --topology shop:topology.  Exit codes: 0, 1, 2, 4.")
def plan_topology(
    topology: TopologyName = None,
    url: Url = None,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """What the broker has of your topology, what it lacks, and what differs. It changes nothing."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        described = required_topology(topology)
        plan = connected(url_of(url), timeout, lambda mq: mq.plan(described))
        _show_plan("topology.plan", plan, output)
        if plan.drifted or plan.missing:
            raise typer.Exit(ExitCode.ATTENTION)


@topology_app.command(
    "apply",
    epilog="Example: acemq topology apply --topology shop:topology.  Exit codes: 0, 2, 3, 4, 5. "
    "Stopped in the middle, by Ctrl-C or a failure, it looks once more and says what was made.",
)
def apply_topology(
    topology: TopologyName = None,
    yes: Yes = False,
    url: Url = None,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """Make what is missing. What is there otherwise is never changed: then nothing is made at all."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        described = required_topology(topology)
        broker = url_of(url)
        plan = connected(broker, timeout, lambda mq: mq.plan(described))
        missing = sum(finding.verdict == "missing" for finding in plan.findings)
        if missing and not plan.drifted:
            confirm(f"Make what is missing, {counted(missing, 'object')}?", yes=yes)
        try:
            made = connected(broker, timeout, lambda mq: mq.declare(described))
        except (KeyboardInterrupt, AcemqError) as error:
            if missing and not plan.drifted:
                _say_what_was_made(error, plan, lambda: connected(broker, timeout, lambda mq: mq.plan(described)))
            raise
        _show_plan("topology.applied", made, output)


def _say_what_was_made(error: BaseException, before: Plan, look_again: Callable[[], Plan]) -> None:
    """Raise `PartlyDone` unless nothing was."""
    kind, text = type(error).__name__, without_secrets(str(error))
    if isinstance(error, KeyboardInterrupt):
        kind, text = "Interrupted", "interrupted"
    try:
        found = made_between(before, look_again())
    except (KeyboardInterrupt, AcemqError):
        text += "; some of it may be made: `acemq topology plan` shows what is there"
        raise PartlyDone(kind, text) from error
    if found.made:
        raise PartlyDone(kind, f"{text}; {found}. The same command makes the rest", found=found) from error


def _show_plan(kind: str, plan: Plan, output: Output) -> None:
    output.items(kind, plan.findings, advice=plan.advice)
    rows = [
        (
            finding.verdict,
            finding.kind,
            finding.name,
            f"{finding.argument}: wanted {finding.wanted!r}, found {finding.found!r}"
            if finding.argument
            else finding.note,
        )
        for finding in plan.findings
    ]
    output.table(("VERDICT", "KIND", "NAME", "NOTE"), rows)
    for sentence in plan.advice:
        output.say(f"Advice: {sentence}")


# How it is


@app.command(epilog="Example: acemq health.  Exit codes: 0, 1, 2, 4.")
def health(url: Url = None, timeout: Timeout = TEN_SECONDS, as_json: Json = False, wide: Wide = False) -> None:
    """Whether the broker answers and takes messages, seen from here."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        found = connected(url_of(url), timeout, lambda mq: mq.health())
        output.items("health", found.parts, status=found.status)
        output.table(("PART", "STATUS", "DETAIL"), [(part.name, part.status, part.detail) for part in found.parts])
        if found.status != "up":
            raise typer.Exit(ExitCode.ATTENTION)


@app.command(epilog="Example: acemq doctor --topology shop:topology.  Exit codes: 0, 1, 2, 4.")
def doctor(
    url: Url = None,
    topology: TopologyName = None,
    timeout: Timeout = TEN_SECONDS,
    as_json: Json = False,
    wide: Wide = False,
) -> None:
    """What this URL can do, and what is wrong with it. It creates nothing and publishes nothing."""
    output = Output(as_json=as_json, wide=wide)
    with ending(output):
        described = topology_of(topology)
        found = asyncio.run(doctors.examine(url_of(url), described, within=timeout))
        output.items("doctor", found.symptoms, answered=found.answered, abilities=found.abilities, notes=found.notes)
        output.table(
            ("LOOKED AT", "VERDICT", "DETAIL"), [(each.what, each.verdict, each.detail) for each in found.symptoms]
        )
        if found.abilities:
            output.say()
            output.table(("THIS TRANSPORT", "CAN"), list(found.abilities.items()))
            for note in found.notes:
                output.say(f"Note: {note}")
        if not found.is_well:
            raise typer.Exit(ExitCode.ATTENTION if found.answered else ExitCode.UNREACHABLE)
