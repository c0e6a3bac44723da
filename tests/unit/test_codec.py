"""From payload to body and back, for every kind of payload class and every content type that is read."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, TypedDict
from uuid import UUID

import attrs
import msgspec
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acemq.codec import (
    BytesCodec,
    Codec,
    Codecs,
    JsonCodec,
    MsgpackCodec,
    PayloadType,
    Reader,
    TextCodec,
    media_type,
    one_of,
)
from acemq.errors import ConfigurationError, DecodeError, EncodeError, FatalError, HandlerTypeError

DEFAULT = Codecs.default()


@dataclass
class Order:
    id: str
    total: int = 0


class Invoice(msgspec.Struct):
    number: int
    lines: list[str] = []


class Placed(msgspec.Struct, tag=True):
    id: str


class Cancelled(msgspec.Struct, tag=True):
    id: str
    why: str


class Address(TypedDict):
    street: str
    zip: str


@attrs.define
class Parcel:
    weight: float
    to: str


class Customer(pydantic.BaseModel):
    name: str
    full_name: str = pydantic.Field(alias="fullName")


@dataclass
class Refund:
    id: str
    total: int = 0


# Ten payload classes


TABLE: dict[str, tuple[Any, Any]] = {
    "dataclass": (Order, Order("o-1", 5)),
    "struct": (Invoice, Invoice(7, ["a", "b"])),
    "tagged union": (one_of(Placed, Cancelled), Cancelled("o-1", "changed my mind")),
    "TypedDict": (Address, {"street": "Hauptstraße 1", "zip": "10115"}),
    "attrs": (Parcel, Parcel(1.5, "Berlin")),
    "pydantic": (Customer, Customer(name="Eva", fullName="Eva Grün")),
    "list of class": (list[Order], [Order("o-1"), Order("o-2", 2)]),
    "dict of class": (dict[str, Invoice], {"a": Invoice(1)}),
    "builtin": (int, 42),
    "class or None": (one_of(Order, None), None),
}


@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=lambda codec: codec.content_type)
@pytest.mark.parametrize(("payload", "value"), TABLE.values(), ids=TABLE)
def test_every_kind_of_payload_class_comes_back_equal(payload: Any, value: Any, codec: Codec) -> None:
    body, content_type = Codecs(codec).write(value)
    assert content_type == codec.content_type
    # Read by a connection as it comes, which takes the codec from the content type.
    assert Reader(DEFAULT, payload).read(body, content_type) == value


def test_there_are_ten() -> None:
    assert len(TABLE) == 10


@pytest.mark.parametrize(
    ("payload", "value"),
    [(str, "text"), (float, 1.5), (bool, True), (dict, {"a": [1, None]}), (list, [1, "a"]), (object, {"k": 1})],
)
@pytest.mark.parametrize("codec", [JsonCodec(), MsgpackCodec()], ids=lambda codec: codec.content_type)
def test_builtins_come_back_equal(payload: Any, value: Any, codec: Codec) -> None:
    body, content_type = Codecs(codec).write(value)
    assert Reader(DEFAULT, payload).read(body, content_type) == value


TEXT = st.text()
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT,
    lambda inner: st.lists(inner) | st.dictionaries(TEXT, inner),
    max_leaves=8,
)

ANYTHING: Any = Any


@given(PLAIN)
def test_object_gives_what_the_codec_makes_by_itself(value: Any) -> None:
    for codec in (JsonCodec(), MsgpackCodec()):
        body, content_type = Codecs(codec).write(value)
        assert Reader(DEFAULT, object).read(body, content_type) == value
        assert Reader[Any](DEFAULT, ANYTHING).read(body, content_type) == value


def test_null_is_no_order_but_may_be_one_of_order_and_none() -> None:
    with pytest.raises(DecodeError):
        Reader(DEFAULT, Order).read(b"null", "application/json")
    assert Reader(DEFAULT, one_of(Order, None)).read(b"null", "application/json") is None


# Which codec reads


@pytest.mark.parametrize(
    "content_type",
    [
        "application/json",
        "text/json",
        "application/vnd.shop+json; charset=utf-8",
        "APPLICATION/JSON",
        "Text/Json ; Charset=UTF-8",
        'application/json; charset="utf-8"',
        "application/json;charset=us-ascii",
        " application/json ",
        None,
        "",
    ],
)
def test_what_is_read_as_json(content_type: str | None) -> None:
    assert Reader(DEFAULT, Order).read(b'{"id":"o-1"}', content_type) == Order("o-1")


@pytest.mark.parametrize("content_type", ["application/msgpack", "application/x-msgpack", "Application/MsgPack; v=1"])
def test_what_is_read_as_messagepack(content_type: str) -> None:
    assert Reader(DEFAULT, Order).read(MsgpackCodec().encode(Order("o-1")), content_type) == Order("o-1")


@pytest.mark.parametrize("content_type", ["text/plain", "text/plain; charset=utf-8", "TEXT/PLAIN"])
def test_what_is_read_as_text(content_type: str) -> None:
    assert Reader(DEFAULT, str).read("grüße".encode(), content_type) == "grüße"
    assert Reader(DEFAULT, object).read(b"5", content_type) == "5"
    assert Reader(DEFAULT, int).read(b"5", content_type) == 5


@pytest.mark.parametrize("content_type", ["application/x-protobuf", "application/yaml", "image/png", "nonsense"])
def test_what_no_codec_reads_is_named_in_the_reason(content_type: str) -> None:
    with pytest.raises(DecodeError, match=f"no codec reads '{content_type}'") as unread:
        Reader(DEFAULT, Order).read(b"{}", content_type)
    assert unread.value.content_type == content_type
    assert isinstance(unread.value, FatalError)


def test_octets_are_bytes_and_no_order() -> None:
    assert Reader(DEFAULT, object).read(b"\xff", "application/octet-stream") == b"\xff"
    with pytest.raises(DecodeError, match="gives bytes, not Order"):
        Reader(DEFAULT, Order).read(b"{}", "application/octet-stream")


@pytest.mark.parametrize(
    "content_type", ["application/json", "application/x-protobuf", "text/plain; charset=latin-1", None]
)
def test_bytes_as_payload_class_get_the_body_whatever_its_content_type(content_type: str | None) -> None:
    assert Reader(DEFAULT, bytes).read(b"\xff\x00", content_type) == b"\xff\x00"


@pytest.mark.parametrize("content_type", ["text/plain; charset=latin-1", "application/json; charset=utf-16"])
def test_a_charset_other_than_utf8_is_not_read(content_type: str) -> None:
    with pytest.raises(DecodeError, match="charset"):
        Reader(DEFAULT, str).read(b'"a"', content_type)


class Upper:
    """A codec from outside."""

    content_type = "text/upper"

    def can_decode(self, content_type: str | None) -> bool:
        return media_type(content_type) == "text/upper"

    def encode(self, payload: object) -> bytes:
        return str(payload).upper().encode()

    def decode(self, body: bytes, into: Any) -> Any:
        if body == b"BROKEN":
            raise KeyError("what a stranger's codec may raise")
        return body.decode().lower()


def test_a_codec_added_to_the_others_reads_its_own_content_type() -> None:
    codecs = DEFAULT.with_codec(Upper())
    assert Reader(codecs, str).read(b"ABC", "text/upper") == "abc"
    assert Reader(codecs, Order).read(b'{"id":"o-1"}', None) == Order("o-1")
    assert codecs.write(Order("o-1"))[1] == "application/json"
    assert codecs.write("abc", "text/upper") == (b"ABC", "text/upper")
    with pytest.raises(DecodeError):
        Reader(DEFAULT, str).read(b"ABC", "text/upper")


def test_whatever_a_codec_raises_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match="KeyError"):
        Reader(DEFAULT.with_codec(Upper()), str).read(b"BROKEN", "text/upper")


@given(
    st.binary(max_size=40),
    st.none() | st.sampled_from(["application/json", "application/msgpack", "text/plain", "a/b", "; charset="]),
)
def test_no_body_raises_anything_but_a_decode_error(body: bytes, content_type: str | None) -> None:
    for payload in (Order, Customer, int, one_of(Placed, Cancelled)):
        reader: Reader[Any] = Reader(DEFAULT, payload)
        try:
            reader.read(body, content_type)
        except DecodeError:
            continue


# What is read into


def test_unknown_fields_are_ignored_and_defaults_are_taken() -> None:
    assert Reader(DEFAULT, Order).read(b'{"id":"o-1","colour":"red"}', None) == Order("o-1", 0)


@pytest.mark.parametrize(
    ("payload", "body", "path"),
    [
        (Order, b"{}", "id"),
        (Order, b'{"id":5}', r"\$.id"),
        (list[Order], b'[{"id":"a"},{"id":"b","total":"x"}]', r"\$\[1\].total"),
        (dict[str, Invoice], b'{"k":{"number":"x"}}', r"\$\[...\].number"),
        (Customer, b'{"name":"Eva"}', "fullName"),
    ],
)
def test_what_is_missing_or_of_another_type_is_a_decode_error_with_its_path(
    payload: Any, body: bytes, path: str
) -> None:
    with pytest.raises(DecodeError, match=path):
        Reader(DEFAULT, payload).read(body, None)


@pytest.mark.parametrize(
    ("body", "content_type"),
    [
        (b"", "application/json"),
        (b"{", "application/json"),
        (b'{"id":"o-1"} x', "application/json"),
        (b'{"id":"\xff"}', "application/json"),
        (b"\xc1", "application/msgpack"),
        (b"\xff", "text/plain"),
        (b"[" * 100_000, "application/json"),
        (b"\x91" * 100_000, "application/msgpack"),
    ],
)
def test_a_broken_body_is_a_decode_error(body: bytes, content_type: str) -> None:
    for payload in (Order, object):
        with pytest.raises(DecodeError):
            Reader[Any](DEFAULT, payload).read(body, content_type)


# Unions


BY_TYPE = one_of(Order, Refund, names={"order.placed": Order, "order.refunded": Refund})


def test_classes_that_look_alike_are_told_apart_by_the_envelope_type() -> None:
    reader = Reader(DEFAULT, BY_TYPE)
    assert reader.by_name
    assert reader.read(b'{"id":"o-1"}', None, "order.placed") == Order("o-1")
    assert reader.read(b'{"id":"o-1"}', None, "order.refunded") == Refund("o-1")


def test_an_envelope_type_that_names_does_not_have_is_a_decode_error() -> None:
    with pytest.raises(DecodeError, match=r"'order.lost' is none of \['order.placed', 'order.refunded'\]"):
        Reader(DEFAULT, BY_TYPE).read(b'{"id":"o-1"}', None, "order.lost")


@pytest.mark.parametrize("payload", [one_of(Order, Refund), one_of(Order, Address)], ids=repr)
def test_classes_that_look_alike_need_names_when_the_consumer_is_made(payload: PayloadType[Any]) -> None:
    with pytest.raises(HandlerTypeError, match="names="):
        Reader(DEFAULT, payload)


def test_names_of_a_class_that_is_not_one_of_them_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="names="):
        one_of(Order, Refund, names={"invoice": Invoice})


class Odd:
    def __init__(self, callback: Any) -> None: ...


def test_a_class_that_no_decoder_can_be_built_for_is_refused_when_the_consumer_is_made() -> None:
    @dataclass
    class Holder:
        what: dict[int, Order] | dict[str, Order]

    with pytest.raises(HandlerTypeError, match="Holder"):
        Reader(DEFAULT, Holder)


def test_a_name_that_exists_only_for_the_type_checker_is_named() -> None:
    broken: Any = dataclass(type("Broken", (), {"__annotations__": {"when": "Moment"}, "__module__": __name__}))
    with pytest.raises(HandlerTypeError, match="'when' of Broken"):
        Reader(DEFAULT, broken)


# Writing


@pytest.mark.parametrize("payload", [b"\xff", bytearray(b"\xff"), memoryview(b"\xff")], ids=lambda p: type(p).__name__)
def test_bytes_travel_as_they_are(payload: Any) -> None:
    assert DEFAULT.write(payload) == (b"\xff", "application/octet-stream")
    assert DEFAULT.write(payload, "image/png") == (b"\xff", "image/png")


def test_the_content_type_picks_the_codec_that_writes_it() -> None:
    body, content_type = DEFAULT.write(Order("o-1"), "application/x-msgpack")
    assert content_type == "application/x-msgpack"
    assert MsgpackCodec().decode(body, Order) == Order("o-1")
    assert DEFAULT.write("grüße", "text/plain")[0] == "grüße".encode()
    assert DEFAULT.write(Order("o-1"), "application/vnd.shop+json")[1] == "application/vnd.shop+json"


@pytest.mark.parametrize("content_type", ["application/x-protobuf", "application/octet-stream"])
def test_a_content_type_that_no_codec_writes_is_refused(content_type: str) -> None:
    with pytest.raises(ConfigurationError, match="no codec of this connection writes it"):
        DEFAULT.write(Order("o-1"), content_type)


@pytest.mark.parametrize(
    "codec", [JsonCodec(), MsgpackCodec(), TextCodec(), BytesCodec()], ids=lambda codec: codec.content_type
)
def test_what_cannot_be_written_is_an_encode_error_that_names_the_class(codec: Codec) -> None:
    with pytest.raises(EncodeError, match="Odd"):
        codec.encode(Odd(print))


@pytest.mark.parametrize("payload", [5, None, b"x", Order("o-1")], ids=repr)
def test_text_is_str_alone(payload: object) -> None:
    with pytest.raises(EncodeError, match="carries str"):
        TextCodec().encode(payload)


def test_half_of_a_surrogate_pair_is_an_encode_error() -> None:
    for codec in (JsonCodec(), MsgpackCodec(), TextCodec()):
        with pytest.raises(EncodeError):
            codec.encode("half \ud83d")


class Camel(msgspec.Struct, rename="camel"):
    order_id: str


def test_names_are_written_as_the_class_declares_them() -> None:
    assert JsonCodec().encode(Camel("o-1")) == b'{"orderId":"o-1"}'
    assert json.loads(JsonCodec().encode(Customer(name="Eva", fullName="Eva Grün"))) == {
        "name": "Eva",
        "fullName": "Eva Grün",
    }
    assert JsonCodec().encode(Placed("o-1")) == b'{"type":"Placed","id":"o-1"}'


def test_moments_decimals_and_uuids_are_text() -> None:
    @dataclass
    class Facts:
        at: datetime
        price: Decimal
        id: UUID

    facts = Facts(datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC), Decimal("1.10"), UUID(int=1))
    body = JsonCodec().encode(facts)
    assert json.loads(body) == {
        "at": "2027-01-02T03:04:05Z",
        "price": "1.10",
        "id": "00000000-0000-0000-0000-000000000001",
    }
    assert JsonCodec().decode(body, Facts) == facts


def test_a_nested_pydantic_model_reads_and_writes_itself() -> None:
    body = JsonCodec().encode([Customer(name="Eva", fullName="Eva Grün")])
    assert JsonCodec().decode(body, list[Customer]) == [Customer(name="Eva", fullName="Eva Grün")]
    with pytest.raises(DecodeError):
        JsonCodec().decode(b'[{"name":5}]', list[Customer])
