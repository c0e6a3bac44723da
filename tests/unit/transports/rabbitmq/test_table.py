"""Header tables, with pamqp as the oracle for what both can carry."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any, cast

import pamqp.decode
import pamqp.encode
import pytest
from hypothesis import given
from hypothesis import strategies as st

from acemq.headers import Headers, HeaderValue
from acemq.transport import BadHeader
from acemq.transports.rabbitmq.table import NO_HEADERS, Table, decode, encode

integers = st.integers(-(2**63), 2**63 - 1)
texts = st.text(st.characters(codec="utf-8"), max_size=40)
names = texts.filter(lambda name: 1 <= len(name.encode()) <= 128)
moments = st.integers(0, 4_291_747_199).map(lambda at: datetime.fromtimestamp(at, UTC))
scalars = (
    st.none()
    | st.booleans()
    | integers
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
    | st.binary(max_size=40)
    | moments
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)
tables = st.dictionaries(names, values, max_size=8)

# What pamqp writes and reads back as it was: no bytes, and floats only of 32 bits.
plain = st.none() | st.booleans() | integers | texts | moments
plain_values = st.recursive(
    plain, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4), max_leaves=12
)
plain_tables = st.dictionaries(names, plain_values, max_size=8)


def read_by_pamqp(raw: bytes) -> Any:
    size, found = pamqp.decode.field_table(raw)
    assert size == len(raw)
    return found


def with_types(value: object) -> object:
    """Equality that knows True from 1 and 1 from 1.0."""
    if isinstance(value, Mapping):
        return {name: with_types(item) for name, item in cast("Mapping[str, object]", value).items()}
    if isinstance(value, list):
        return [with_types(item) for item in cast("list[object]", value)]
    return type(value).__name__, value


@given(tables)
def test_every_value_comes_back_equal_and_of_its_type(headers: dict[str, HeaderValue]) -> None:
    assert with_types(decode(encode(headers)[4:])) == with_types(headers)


@given(plain_tables)
def test_pamqp_reads_what_we_write(headers: dict[str, HeaderValue]) -> None:
    assert with_types(read_by_pamqp(encode(headers))) == with_types(headers)


@given(plain_tables)
def test_we_read_what_pamqp_writes(headers: dict[str, HeaderValue]) -> None:
    raw = pamqp.encode.field_table(cast("Any", headers))
    assert with_types(decode(raw[4:])) == with_types(headers)


@given(tables)
def test_the_length_stands_in_front(headers: dict[str, HeaderValue]) -> None:
    raw = encode(headers)
    assert struct.unpack(">I", raw[:4])[0] == len(raw) - 4


@pytest.mark.parametrize(
    ("value", "raw"),
    [
        (5, b"l" + struct.pack(">q", 5)),
        (0.1, b"d" + struct.pack(">d", 0.1)),
        (True, b"t\x01"),
        (None, b"V"),
        (b"\xff", b"x\0\0\0\x01\xff"),
        ("é", b"S\0\0\0\x02\xc3\xa9"),
        (datetime(1970, 1, 2, tzinfo=UTC), b"T" + struct.pack(">Q", 86400)),
        ([1], b"A\0\0\0\x09l" + struct.pack(">q", 1)),
        ({"a": None}, b"F\0\0\0\x03\x01aV"),
    ],
)
def test_each_type_is_written_as_the_contract_says(value: HeaderValue, raw: bytes) -> None:
    assert encode({"n": value})[4:] == b"\x01n" + raw


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        (b"b\xff", -1),
        (b"B\xff", 255),
        (b"s\xff\xfe", -2),
        (b"U\xff\xfe", -2),
        (b"u\xff\xfe", 65534),
        (b"I\xff\xff\xff\xfd", -3),
        (b"i\xff\xff\xff\xfd", 4294967293),
        (b"l" + b"\xff" * 8, -1),
        (b"L" + b"\xff" * 8, -1),
        (b"f" + struct.pack(">f", 0.5), 0.5),
        (b"D\x02" + struct.pack(">I", 12345), Decimal("123.45")),
        (b"S\0\0\0\x02\xff\xfe", b"\xff\xfe"),
    ],
)
def test_every_type_that_a_broker_knows_is_read(raw: bytes, value: object) -> None:
    found = decode(b"\x01n" + raw + b"\x04last" + b"t\x01")
    assert with_types(found) == with_types({"n": value, "last": True})


@pytest.mark.parametrize("seconds", [2**40, 2**63, 2**64 - 1])
def test_a_timestamp_that_no_datetime_reaches_is_a_number_and_leaves_as_it_came(seconds: int) -> None:
    raw = b"\x01n" + b"T" + struct.pack(">Q", seconds)
    assert decode(raw) == {"n": seconds}
    assert encode(decode(raw))[4:] == raw


def test_a_table_nested_beyond_reason_stops_nothing() -> None:
    raw = b"t\x01"
    for _ in range(5_000):
        raw = b"F" + struct.pack(">I", len(raw) + 2) + b"\x01n" + raw
    assert set(decode(b"\x01n" + raw)) <= {"n"}


def test_what_others_wrote_is_carried_on() -> None:
    foreign = {"money": Decimal("1.50"), "late": datetime(9999, 12, 31, tzinfo=UTC), "raw": b"\xff"}
    assert decode(encode(cast("Headers", foreign))[4:]) == foreign


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, [math.nan], {"n": math.inf}])
def test_what_is_no_finite_number_is_refused_by_name(value: HeaderValue) -> None:
    with pytest.raises(BadHeader, match=r"'n'.*finite") as refused:
        encode({"n": value})
    assert refused.value.name == "n"


@pytest.mark.parametrize(
    "value",
    [
        2**63,
        -(2**63) - 1,
        {1, 2},
        object(),
        "\ud800",
        datetime(2027, 1, 1),
        datetime(2027, 1, 1, microsecond=1, tzinfo=UTC),
        datetime(1969, 12, 31, tzinfo=UTC),
        [2**63],
        {"deep": {"deeper": 2**63}},
    ],
)
def test_what_amqp_cannot_carry_is_refused_by_name(value: Any) -> None:
    with pytest.raises(BadHeader) as refused:
        encode({"good": 1, "bad": value})
    assert refused.value.name in ("bad", "deep", "deeper")
    assert refused.value.name in str(refused.value)


@pytest.mark.parametrize("name", ["n" * 256, "é" * 128, "\ud800"])
def test_a_name_that_would_be_cut_is_refused(name: str) -> None:
    with pytest.raises(BadHeader):
        encode({name: 1})


@given(tables, texts)
def test_a_lazy_table_is_the_dict_it_stands_for(headers: dict[str, HeaderValue], other: str) -> None:
    raw = encode(headers)[4:]
    for name in [*headers, other]:
        table = Table(raw)
        assert (name in table) == (name in headers)
        assert with_types(Table(raw).get(name, "none")) == with_types(headers.get(name, "none"))
        if name in headers:
            assert with_types(Table(raw)[name]) == with_types(headers[name])
        else:
            with pytest.raises(KeyError):
                Table(raw)[name]
    assert Table(raw) == headers
    assert list(Table(raw)) == list(headers)
    assert len(Table(raw)) == len(headers)
    assert repr(Table(raw)) == repr(headers)


def test_asking_for_what_is_absent_takes_nothing_apart() -> None:
    table = Table(b"\x04name" + b"?")  # broken behind the name
    assert "other" not in table
    assert table.get("other", 1) == 1
    assert cast("Any", 5) not in table
    assert len(NO_HEADERS) == 0


def test_entries_before_a_broken_one_are_there() -> None:
    raw = encode({"first": 1, "second": "two"})[4:]
    for cut in range(len(raw)):
        found = decode(raw[:cut])
        assert set(found) <= {"first", "second"}
        assert all(found[name] == {"first": 1, "second": "two"}[name] for name in found)
    assert decode(raw + b"\x01x?") == {"first": 1, "second": "two"}


def test_x_death_as_a_broker_writes_it_is_read() -> None:
    death = {
        "count": 1,
        "reason": "expired",
        "queue": "q",
        "time": datetime(2027, 1, 1, tzinfo=UTC),
        "routing-keys": ["q"],
    }
    raw = pamqp.encode.field_table(cast("Any", {"x-death": [death], "x-first-death-reason": "expired"}))
    assert decode(raw[4:]) == {"x-death": [death], "x-first-death-reason": "expired"}
