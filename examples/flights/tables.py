"""The tables that go with the flights, read from CSV files in which nothing, or `NA`, means unknown."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Airport:
    code: str
    name: str
    latitude: float
    longitude: float
    time_zone: str | None


def read_airports(path: Path) -> dict[str, Airport]:
    """By their codes."""
    airports = (
        Airport(line["faa"], line["name"], float(line["lat"]), float(line["lon"]), known(line["tzone"]))
        for line in read(path)
    )
    return {airport.code: airport for airport in airports}


def read_airlines(path: Path) -> dict[str, str]:
    """Their names, by their codes."""
    return {line["carrier"]: line["name"] for line in read(path)}


def read(path: Path) -> Iterator[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        yield from csv.DictReader(file)


def known(text: str) -> str | None:
    return None if text in ("", "NA") else text
