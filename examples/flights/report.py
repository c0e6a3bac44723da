"""What is shown: a progress bar, and tables of an account."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from examples.flights.account import Account, DeadLetter, Sums
from examples.flights.flights import Arrival, Row
from examples.flights.ledger import Kept

console = Console(highlight=False)


class WrongSums(Exception):
    """A flight is lost or was handled twice, or the file is not the one that the sums belong to."""


def check(title: str, account: Account, expected: Sums) -> None:
    """Show the account; raises `WrongSums` unless every flight is in the one place where it should be."""
    console.print(f"\n[bold]{title}")
    steps = _table("step", "ran", "waiting", "dead letters", "parked")
    for name, step in account.steps.items():
        steps.add_row(name, f"{step.ran:,}", f"{step.waiting:,}", f"{step.dead:,}", f"{step.parked:,}")
    sums = _table("flights", "found", "expected", "")
    for what, wanted, found in account.sums(expected):
        sums.add_row(what, f"{found:,}", f"{wanted:,}", "[green]right" if found == wanted else "[red]wrong")
    console.print(steps, sums)
    faults = list(account.faults(expected))
    if faults:
        raise WrongSums("\n".join(faults))


def show_dead_letters(letters: Sequence[DeadLetter]) -> None:
    table = _table("unknown airport", "dead letters")
    for code, count in Counter(letter.departure.destination for letter in letters).most_common():
        table.add_row(code, f"{count:,}")
    console.print(table)
    say(f"One of them: {letters[0].reason}")


def show_arrivals(arrivals: Iterable[Arrival], airlines: Mapping[str, str]) -> None:
    """What was recorded: the five airlines with the most arrivals, and how late those were."""
    late: dict[str, list[timedelta]] = {}
    for arrival in arrivals:
        if arrival.departure.arrived_late is not None:
            late.setdefault(arrival.departure.carrier, []).append(arrival.departure.arrived_late)
    table = _table("airline", "arrivals", "minutes late")
    for carrier in sorted(late, key=lambda carrier: -len(late[carrier]))[:5]:
        mean = sum(late[carrier], timedelta()) / len(late[carrier])
        table.add_row(airlines[carrier], f"{len(late[carrier]):,}", f"{mean / timedelta(minutes=1):.1f}")
    console.print(table)


def check_ledger(title: str, kept: Kept, rows: Sequence[Row]) -> None:
    """Show it; raises `WrongSums` unless each aircraft has its flights, all of them and in order."""
    console.print(f"\n[bold]{title}")
    ledger = _table("ledger", "rows")
    for process, count in kept.by_process.items():
        ledger.add_row(f"applied by process {process}", f"{count:,}")
    ledger.add_row("in hand when it was killed, and so applied twice", f"{kept.repeated:,}")
    ledger.add_row("aircraft in order", f"{len(kept.applied):,}")
    ledger.add_row("refused at the send", f"{len(kept.refused):,}")
    console.print(ledger)
    for why in kept.refused:
        say(f"Refused: {why}")
    say(f"Until it was released: {kept.halted}")
    faults = list(kept.faults(rows))
    if faults:
        raise WrongSums("\n".join(faults))


@contextmanager
def progress(what: str, total: int) -> Generator[Callable[[int], None], None, None]:
    """A bar; what it gives is called with how much is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def say(text: str) -> None:
    console.print(text, markup=False, soft_wrap=True)


def _table(first: str, *numbers: str) -> Table:
    table = Table(first, box=box.SIMPLE_HEAD)
    for name in numbers:
        table.add_column(name, justify="right")
    return table
