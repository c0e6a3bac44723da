"""Publishing: from messages to rows, and the rows into their queues, all of a call in one transaction.

Which queues a message goes to is read from the routes that this process knows, and the version of these is compared as
part of the write: a binding that was made before the call is seen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
import sqlalchemy as sa

from acemq.errors import AcemqError, CapabilityError, ConfigurationError
from acemq.headers import ID, Headers, to_text
from acemq.topology import check_key
from acemq.transport import (
    ROUTED,
    BadHeader,
    Delivery,
    ExchangeMissing,
    MessageTooLarge,
    Outgoing,
    Published,
    PublishResult,
    Unroutable,
)

from .dialects import Dialect, Statements, text_of
from .routes import Place, Routes, load

T = TypeVar("T")

_MICROSECOND = timedelta(microseconds=1)
BATCH_BYTES = 16 * 1024 * 1024
"""Of what one statement carries, unless a single message is larger."""
BATCH_ROWS = 1_000


class Properties(msgspec.Struct, frozen=True, omit_defaults=True, rename={"message_id": "id", "content_type": "type"}):
    """What is no header, in one column."""

    message_id: str | None = None
    """Left out where a header has it."""
    content_type: str | None = None
    reply_to: str | None = None
    priority: int | None = None
    expires_in: int | None = None
    """Microseconds."""
    ordering_key: str | None = None


_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Properties).decode


def properties_of(message: Outgoing | Delivery, headers: Headers) -> str:
    """The column, for a row with these headers."""
    message_id = None if headers.get(ID) == message.message_id else message.message_id
    expires_in = None if message.expires_in is None else max(message.expires_in // _MICROSECOND, 0)
    rest = message.reply_to, message.priority, expires_in, message.ordering_key
    if message_id is None and rest == _NOTHING:
        return _of_type(message.content_type)
    return _encode(Properties(message_id, message.content_type, *rest)).decode()


_NOTHING = (None, None, None, None)


@lru_cache(maxsize=64)
def _of_type(content_type: str | None) -> str:
    """Of most messages, which have nothing else to say: one text, written once and read once."""
    return _encode(Properties(content_type=content_type)).decode()


@lru_cache(maxsize=256)
def read_properties(text: str | bytes) -> Properties:
    return _decode(text)


class Prepared(msgspec.Struct):
    """A message ready to be a row."""

    exchange: str
    key: str
    body: bytes
    headers: str
    properties: str
    priority: int | None
    delay: int
    life: int | None
    mandatory: bool
    size: int
    message: Outgoing


class Written(msgspec.Struct):
    """What became of the messages of one statement, and the queues that have something new."""

    results: list[PublishResult]
    touched: set[int]
    told: set[int]
    """Those that other processes were told of."""
    routes: Routes


class Notice(msgspec.Struct, frozen=True):
    """How other processes are told, where the database can do that."""

    channel: str
    sender: str
    """Who need not be told; empty where it must be, because it does not see the commit."""
    hushed: frozenset[int] = frozenset()
    """Queues that they were told of a moment ago."""


def prepare(out: Outgoing, limit: int) -> Prepared | PublishResult:
    """Refuses what cannot be stored as it is, before any I/O."""
    try:
        headers = to_text(out.headers)
        check_key("routing key", out.routing_key)
        if out.exchange:
            check_key("exchange", out.exchange)
    except ConfigurationError as error:
        name = next((name for name in out.headers if repr(name[:40]) in str(error)), "")
        return _refused(BadHeader(str(error), name=name))
    expires_in = None if out.expires_in is None else max(out.expires_in // _MICROSECOND, 0)
    properties = properties_of(out, out.headers)
    beside = headers if headers.isascii() else headers.encode()
    size = len(out.body) + len(beside) + len(properties) + len(out.exchange) + len(out.routing_key)
    if size > limit:
        text = f"message {out.message_id} has {size:,} bytes with its headers; {limit:,} are allowed"
        return _refused(MessageTooLarge(text, size=size, limit=limit))
    delay = 0 if out.delay is None else max(out.delay // _MICROSECOND, 0)
    return Prepared(
        out.exchange,
        out.routing_key,
        out.body,
        headers,
        properties,
        out.priority,
        delay,
        expires_in,
        out.mandatory,
        size,
        out,
    )


def portions(prepared: Sequence[Prepared]) -> Iterator[Sequence[Prepared]]:
    """In order, so that no statement carries too much."""
    begin, size = 0, 0
    for number, each in enumerate(prepared):
        if number > begin and (size + each.size > BATCH_BYTES or number - begin >= BATCH_ROWS):
            yield prepared[begin:number]
            begin, size = number, 0
        size += each.size
    if begin < len(prepared):
        yield prepared[begin:]


def write(
    connection: sa.Connection,
    now: int,
    dialect: Dialect,
    statements: Statements,
    routes: Routes,
    batch: Sequence[Prepared],
    *,
    notice: Notice | None = None,
) -> Written:
    """Write a batch by the routes known, and by fresh ones if these have changed."""
    put = _put_arrays if dialect.array_statements else _put_rows
    sure = False
    for _ in range(10):
        results, copies = _resolve(batch, routes)
        if not sure and any(result is not ROUTED for result in results):
            # Before a message is told to be unroutable it is certain that the routes are of now.
            routes, sure = load(connection, statements, routes), True
            continue
        touched = {place.id for _, place in copies}
        told: set[int] = touched - notice.hushed if notice is not None else set()
        if not copies or put(connection, now, statements, routes, batch, copies, told, notice):
            return Written(results, touched, told, routes)
        routes, sure = load(connection, statements), True
    raise TimeoutError("the topology changes faster than it can be read")


Copies = list[tuple[int, Place]]
"""The number of a message in its batch, and a queue that it goes to."""


def _resolve(batch: Sequence[Prepared], routes: Routes) -> tuple[list[PublishResult], Copies]:
    results: list[PublishResult] = []
    copies: Copies = []
    for number, each in enumerate(batch):
        places = routes.to(each.exchange, each.key)
        if not places or each.priority is not None:  # nothing else is ever refused, and most have neither
            refusal = _refusal(each, places)
            if refusal is not None:
                results.append(refusal)
                continue
        results.append(ROUTED)
        for place in places or ():
            copies.append((number, place))
    return results, copies


def _refusal(each: Prepared, places: tuple[Place, ...] | None) -> PublishResult | None:
    if places is None:
        return _refused(ExchangeMissing(f"there is no exchange {each.exchange!r}; declare it first"))
    if not places and each.mandatory:
        where = f"key {each.key!r} of exchange {each.exchange!r}" if each.exchange else f"queue {each.key!r}"
        what = "matches no binding" if each.exchange else "does not exist; declare it first"
        return PublishResult(Published.UNROUTABLE, Unroutable(f"{where} {what}"))
    if each.priority is not None and not each.exchange and places and each.priority >= max(places[0].levels, 1):
        levels = f"{each.priority + 1} priority levels"
        where = f"sql, queue {each.key!r}"
        return _refused(CapabilityError(where, levels, f"priority={each.priority}"))
    return None


def _refused(error: AcemqError) -> PublishResult:
    return PublishResult(Published.REFUSED, error)


def _rank(each: Prepared, place: Place) -> int:
    return -min(each.priority or 0, place.levels - 1) if place.levels else 0


def _life(each: Prepared, place: Place) -> int | None:
    """Microseconds until it expires. A queue whose ttl is shorter than the delay still delivers it."""
    if not place.ttl:
        return each.life
    life = each.delay + place.ttl
    return life if each.life is None else min(each.life, life)


def _put_arrays(
    connection: sa.Connection,
    now: int,
    statements: Statements,
    routes: Routes,
    batch: Sequence[Prepared],
    copies: Copies,
    told: set[int],
    notice: Notice | None,
) -> bool:
    """One statement and one trip. False: the routes have changed, and nothing was written."""
    numbers = [number for number, _ in copies]
    one_each = numbers == list(range(len(batch)))
    parameters: dict[str, Any] = {
        "bodies": [each.body for each in batch],
        "headers": [each.headers for each in batch],
        "properties": _once_if_all([each.properties for each in batch]),
        "exchanges": _once_if_all([each.exchange for each in batch]),
        "keys": _once_if_all([each.key for each in batch]),
        "queues": [place.id for _, place in copies],
        "ranks": unless_all([_rank(batch[number], place) for number, place in copies], 0),
        "delays": unless_all([batch[number].delay for number in numbers], 0),
        "lives": unless_all([_life(batch[number], place) for number, place in copies], None),
        "topology": routes.version,
        "told": list(told),
        "channel": "" if notice is None else notice.channel,
        "sender": "" if notice is None else notice.sender,
    }
    if not one_each:
        parameters["numbers"] = [number + 1 for number in numbers]
    written, _ = connection.execute(statements["publish_each" if one_each else "publish"], parameters).one()
    return bool(written == len(copies))


def _once_if_all(column: list[T]) -> list[T]:
    """The first alone where it is the same for all of them."""
    return column[:1] if column.count(column[0]) == len(column) else column


def unless_all(column: list[T], usual: T) -> list[T]:
    """Nothing for a column of nothing special: a driver looks at each number in it, and that is much of its work."""
    return [] if column.count(usual) == len(column) else column


def _put_rows(
    connection: sa.Connection,
    now: int,
    statements: Statements,
    routes: Routes,
    batch: Sequence[Prepared],
    copies: Copies,
    told: set[int],
    notice: Notice | None,
) -> bool:
    version, at = connection.execute(statements["topology"], {"now": now}).one()
    if text_of(version) != routes.version:
        return False
    rows: list[tuple[object, ...]] = []
    for number, place in copies:
        each = batch[number]
        life = _life(each, place)
        rows.append(
            (
                place.id,
                2 if each.delay else 0,
                _rank(each, place),
                at + each.delay,
                None if life is None else at + life,
                at,
                each.exchange,
                each.key,
                each.headers,
                each.properties,
                each.body,
            )
        )
    statements.put(connection, "insert", rows)
    return True
