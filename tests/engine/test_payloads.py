"""Ten kinds of payload, written and read by two codecs over both transports: what comes out is what went in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypedDict
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest

from acemq import AceMQ, Codecs, EncodeError, JsonCodec, Message, MsgpackCodec, TextCodec, one_of
from tests.waiting import until


@dataclass
class Order:
    id: str
    placed: datetime
    total: Decimal
    customer: UUID


class Priced(msgspec.Struct, rename="camel"):
    total_cents: int


class Created(msgspec.Struct, tag="created"):
    id: str


class Cancelled(msgspec.Struct, tag="cancelled"):
    why: str


class Row(TypedDict):
    id: str
    n: int


@attrs.define
class Parcel:
    weight: float


class Invoice(pydantic.BaseModel):
    id: str
    lines: list[int]


ORDER = Order(
    "o-1",
    datetime(2026, 2, 3, 4, 5, 6, 789, tzinfo=UTC),
    Decimal("12.30"),
    UUID("12345678-1234-4234-8234-123456789abc"),
)
PAYLOADS: dict[str, tuple[Any, Any]] = {
    "dataclass": (Order, ORDER),
    "struct with other names": (Priced, Priced(1230)),
    "tagged structs": (one_of(Created, Cancelled), Cancelled("late")),
    "TypedDict": (Row, {"id": "o-1", "n": 2}),
    "attrs": (Parcel, Parcel(1.5)),
    "pydantic": (Invoice, Invoice(id="i-1", lines=[1, 2])),
    "list of a class": (list[Order], [ORDER]),
    "dict of a class": (dict[str, Priced], {"a": Priced(1)}),
    "optional, with None": (one_of(Order, None), None),
    "text": (str, "grüße"),
    "whole numbers": (int, 2**62),
    "anything": (object, {"a": [1, 2.5, None, True]}),
}


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=["JSON", "MessagePack"])
@pytest.mark.parametrize("kind", PAYLOADS)
async def test_a_payload_arrives_equal(mq: AceMQ, queue: str, kind: str, codec: JsonCodec | MsgpackCodec) -> None:
    payload_class, payload = PAYLOADS[kind]
    seen: list[Any] = []
    async with mq.consume(queue, payload_class, lambda message: seen.append(message.payload)) as consumer:
        await mq.send(queue, payload, codec=Codecs(codec))
        await until(lambda: consumer.counters.acked + consumer.counters.parked == 1)
    assert seen == [payload]


async def test_null_is_parked_where_a_class_is_expected(mq: AceMQ, queue: str) -> None:
    async with mq.consume(queue, Order, lambda message: None) as consumer:
        await mq.send(queue, None)
        await until(lambda: consumer.counters.parked == 1)


async def test_bytes_travel_and_arrive_as_they_are_whatever_their_content_type(mq: AceMQ, queue: str) -> None:
    seen: list[tuple[bytes, str | None]] = []
    note = lambda m: seen.append((m.payload, m.content_type))  # noqa: E731
    async with mq.consume(queue, bytes, note, concurrency=1) as consumer:
        await mq.send(queue, b"\x00\xff")
        await mq.send(queue, {"n": 1})
        await mq.send(queue, b"", content_type="image/png")
        await until(lambda: consumer.counters.acked == 3)
    assert seen == [(b"\x00\xff", "application/octet-stream"), (b'{"n":1}', "application/json"), (b"", "image/png")]


@pytest.mark.parametrize(
    "content_type",
    [
        *("text/json", "Application/JSON;charset=UTF-8", "application/problem+json", "application/json"),
        *("APPLICATION/JSON", "application/vnd.shop+json; charset=utf-8"),
    ],
)
async def test_m063_every_spelling_of_json_is_read(mq: AceMQ, queue: str, content_type: str) -> None:
    seen: list[Message[Row]] = []
    async with mq.consume(queue, Row, seen.append) as consumer:
        await mq.send(queue, b'{"id":"o-1","n":2}', content_type=content_type)
        await until(lambda: consumer.counters.acked == 1)
    assert seen[0].payload == {"id": "o-1", "n": 2}


async def test_m062_classes_are_told_apart_by_the_envelopes_type(mq: AceMQ, queue: str) -> None:
    either = one_of(Parcel, Invoice, names={"parcel.sent": Parcel, "invoice.issued": Invoice})
    seen: list[object] = []
    async with mq.consume(queue, either, lambda m: seen.append(m.payload), concurrency=1) as consumer:
        await mq.send(queue, Parcel(1.5), type="parcel.sent")
        await mq.send(queue, Invoice(id="i", lines=[]), type="invoice.issued")
        await mq.send(queue, Parcel(1.5), type="parcel.lost")
        await until(lambda: consumer.counters.acked == 2 and consumer.counters.parked == 1)
    assert seen == [Parcel(1.5), Invoice(id="i", lines=[])]
    parked = await mq.pull(f"{queue}.parked", bytes)
    assert parked is not None
    assert "'parcel.lost'" in str(parked.wire_headers["x-acemq-error"])
    await parked.accept()


async def test_m063_a_charset_that_is_not_read_is_parked(mq: AceMQ, queue: str) -> None:
    async with mq.consume(queue, str, lambda message: None) as consumer:
        await mq.send(queue, b"caf\xe9", content_type="text/plain; charset=latin-1")
        await until(lambda: consumer.counters.parked == 1)


@dataclass
class AsDataclass:
    id: str


class AsStruct(msgspec.Struct):
    id: str


class AsTypedDict(TypedDict):
    id: str


@attrs.define
class AsAttrs:
    id: str


class AsPydantic(pydantic.BaseModel):
    id: str


@pytest.mark.parametrize("kind", [AsDataclass, AsStruct, AsTypedDict, AsAttrs, AsPydantic])
async def test_m061_what_is_too_much_is_left_out_and_what_is_of_another_type_is_parked_naming_it(
    mq: AceMQ, queue: str, kind: type[Any]
) -> None:
    seen: list[Any] = []
    async with mq.consume(queue, kind, lambda message: seen.append(message.payload), concurrency=1) as consumer:
        await mq.send(queue, {"id": "1", "extra": 2})
        await mq.send(queue, {"id": 1})
        await until(lambda: consumer.counters.acked == consumer.counters.parked == 1)
    assert seen == ([{"id": "1"}] if kind is AsTypedDict else [kind(id="1")])
    parked = await mq.pull(f"{queue}.parked", bytes)
    assert parked is not None
    assert "id" in str(parked.wire_headers["x-acemq-error"]).removeprefix("could not be decoded")
    await parked.accept()


async def test_m064_what_no_codec_writes_is_refused_before_anything_is_written(mq: AceMQ, queue: str) -> None:
    with pytest.raises(EncodeError, match="object") as refused:
        await mq.send(queue, object())
    assert refused.value.outcome == "refused"
    with pytest.raises(EncodeError, match="not int"):
        await mq.send(queue, 5, codec=TextCodec())
    assert (await mq.depth(queue)).ready == 0
