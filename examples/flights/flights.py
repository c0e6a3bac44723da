"""A flight on its way through the three steps: a row of text, a departure, an arrival.

Nothing here knows of queues. A step takes a value and returns the next one, `None` to end the run, or raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta

from examples.flights.tables import Airport, known


@dataclass(frozen=True)
class Row:
    """A line of the file, all of it text and none of it checked."""

    year: str
    month: str
    day: str
    dep_time: str
    sched_dep_time: str
    dep_delay: str
    arr_time: str
    sched_arr_time: str
    arr_delay: str
    carrier: str
    flight: str
    tailnum: str
    origin: str
    dest: str
    air_time: str
    distance: str
    hour: str
    minute: str
    time_hour: str

    @property
    def key(self) -> str:
        """Names one flight of the file: `B6 725 of 2013-01-01`."""
        return f"{self.carrier} {self.flight} of {self.year}-{self.month:>02}-{self.day:>02}"


@dataclass(frozen=True)
class Departure:
    """A flight that took off."""

    key: str
    carrier: str
    plane: str | None
    origin: str
    destination: str
    """The airport's code."""
    scheduled: datetime
    late: timedelta
    """Negative when it left early."""
    arrived_late: timedelta | None
    """`None` when it landed elsewhere, or when nobody knows."""


@dataclass(frozen=True)
class Arrival:
    """A departure whose destination is known by more than its code."""

    departure: Departure
    airport: Airport


class UnknownAirport(Exception):
    """The airport table does not have the code. Trying again changes nothing until somebody completes the table."""

    def __init__(self, flight: str, code: str) -> None:
        self.flight, self.code = flight, code
        super().__init__(
            f"{flight} flies to {code}, which the airport table lacks; add {code} to it, then replay the dead letters"
        )


Note = Callable[[str, str, Arrival | None], None]
"""Told of each step that has run: its name, the flight, and what was recorded."""


class Desk:
    """The three steps. It counts, flight by flight, how often each has run, so that a flight handled twice shows."""

    def __init__(self, airports: Mapping[str, Airport], note: Note = lambda step, flight, arrival: None) -> None:
        self._airports, self._note = airports, note
        self._earlier: set[tuple[str, str]] = set()
        self.again = 0
        """Steps that ran a second time, since an earlier run of the program was killed while they were under way."""
        self.parsed, self.cancelled, self.enriched, self.recorded = (Counter[str]() for _ in range(4))
        self.arrivals: dict[str, Arrival] = {}
        """What was recorded, by flight: recording the same one again would change nothing."""

    def remember(self, step: str, flight: str, arrival: Arrival | None) -> None:
        """What an earlier run of the program has done."""
        self._earlier.add((step, flight))
        self._count(step)[flight] += 1
        if arrival is not None:
            self.arrivals[flight] = arrival

    def _ran(self, step: str, flight: str, arrival: Arrival | None = None) -> None:
        if (step, flight) in self._earlier and step != "enrich":  # enriching is done again by the replay
            self.again += 1
            return
        self._count(step)[flight] += 1
        self._note(step, flight, arrival)

    def _count(self, step: str) -> Counter[str]:
        return {
            "parse": self.parsed,
            "cancel": self.cancelled,
            "enrich": self.enriched,
            "record": self.recorded,
        }[step]

    async def parse(self, row: Row) -> Departure | None:
        """`None` for a cancelled flight."""
        self._ran("parse", row.key)
        if known(row.dep_time) is None:
            self._ran("cancel", row.key)
            return None
        arrived_late = known(row.arr_delay)
        return Departure(
            key=row.key,
            carrier=row.carrier,
            plane=known(row.tailnum),
            origin=row.origin,
            destination=row.dest,
            # `time_hour` is UTC and stops at the hour; the other times are local, and of which day they do not say.
            scheduled=datetime.fromisoformat(row.time_hour) + timedelta(minutes=int(row.minute)),
            late=timedelta(minutes=int(row.dep_delay)),
            arrived_late=timedelta(minutes=int(arrived_late)) if arrived_late is not None else None,
        )

    async def enrich(self, departure: Departure) -> Arrival:
        """Raises `UnknownAirport`."""
        self._ran("enrich", departure.key)
        airport = self._airports.get(departure.destination)
        if airport is None:
            raise UnknownAirport(departure.key, departure.destination)
        return Arrival(departure, airport)

    async def record(self, arrival: Arrival) -> None:
        self._ran("record", arrival.departure.key, arrival)
        self.arrivals[arrival.departure.key] = arrival
