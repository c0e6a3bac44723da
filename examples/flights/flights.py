"""A flight on its way through the three steps: a row of text, a departure, an arrival.

Nothing here knows of queues. A step takes a value and returns the next one, `None` to end the run, or raises.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
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


class Desk:
    """The three steps. It counts, flight by flight, how often each has run, so that a flight handled twice shows."""

    def __init__(self, airports: Mapping[str, Airport]) -> None:
        self._airports = airports
        self.parsed, self.cancelled, self.enriched, self.recorded = (Counter[str]() for _ in range(4))
        self.arrivals: dict[str, Arrival] = {}
        """What was recorded, by flight: recording the same one again would change nothing."""

    async def parse(self, row: Row) -> Departure | None:
        """`None` for a cancelled flight."""
        self.parsed[row.key] += 1
        if known(row.dep_time) is None:
            self.cancelled[row.key] += 1
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
        self.enriched[departure.key] += 1
        airport = self._airports.get(departure.destination)
        if airport is None:
            raise UnknownAirport(departure.key, departure.destination)
        return Arrival(departure, airport)

    async def record(self, arrival: Arrival) -> None:
        self.recorded[arrival.departure.key] += 1
        self.arrivals[arrival.departure.key] = arrival
