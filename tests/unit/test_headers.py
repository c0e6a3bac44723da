"""What a header may be called and may hold, and how one that arrives is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta, timezone
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from acemq import headers as h
from acemq.errors import ConfigurationError

WHOLE = datetime(2027, 1, 2, 3, 4, 5, tzinfo=UTC)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        0,
        2**63 - 1,
        -(2**63),
        1.5,
        float("nan"),
        float("-inf"),
        "",
        "grüße 😀",
        b"\xff\x00",
        WHOLE,
        WHOLE.astimezone(timezone(timedelta(hours=5, minutes=30))),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(2105, 12, 31, 23, 59, 59, tzinfo=UTC),
        ["a", 1, [None, {"k": b"v"}]],
        ("a", "tuple"),
        {"deep": {"deeper": [WHOLE]}},
    ],
)
def test_every_kind_of_value_that_travels_unchanged_is_taken(value: Any) -> None:
    assert h.check_application({"k": value}) == {"k": value}


@pytest.mark.parametrize(
    ("value", "why"),
    [
        (2**63, "signed 64-bit"),
        (-(2**63) - 1, "signed 64-bit"),
        ("half \ud83d", "surrogate"),
        (datetime(2027, 1, 1), "naive"),
        (WHOLE.replace(microsecond=1), "whole second"),
        (datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC), "1970"),
        (datetime(2106, 1, 1, tzinfo=UTC), "2105"),
        ({"a", "b"}, "holds a set"),
        (Decimal(1), "holds a Decimal"),
        (bytearray(b"x"), "holds a bytearray"),
        (object(), "holds a object"),
    ],
)
@pytest.mark.parametrize(
    "wrap", [lambda v: v, lambda v: [v], lambda v: {"inner": ({"x": v},)}], ids=["", "list", "dict"]
)
def test_a_value_that_would_not_arrive_as_it_was_sent_is_refused_by_the_name_of_its_header(
    value: object, why: str, wrap: Any
) -> None:
    with pytest.raises(ConfigurationError, match=why) as refused:
        h.check_application({"tenant": wrap(value)})
    assert "'tenant'" in str(refused.value)


def test_lists_may_be_nested_but_not_without_end() -> None:
    endless: list[Any] = []
    endless.append(endless)
    with pytest.raises(ConfigurationError, match="nested more than 16 deep"):
        h.check("k", endless)


def test_a_name_has_128_bytes_at_most() -> None:
    h.check("n" * 128, 1)
    h.check("ü" * 64, 1)
    for name in ("n" * 129, "ü" * 65, ""):
        with pytest.raises(ConfigurationError, match="1 to 128 bytes"):
            h.check(name, 1)


def test_names_inside_a_value_follow_the_same_rule() -> None:
    with pytest.raises(ConfigurationError, match="1 to 128 bytes"):
        h.check("k", {"n" * 129: 1})
    with pytest.raises(ConfigurationError, match="must be text"):
        h.check("k", {1: "one"})


def test_a_name_that_no_utf8_can_carry_is_refused() -> None:
    with pytest.raises(ConfigurationError):
        h.check("half \ud83d", 1)


@pytest.mark.parametrize("name", ["x-acemq-shiny", "x-acemq-id", "x-acemq-"])
def test_a_reserved_name_is_refused_known_or_not(name: str) -> None:
    with pytest.raises(ConfigurationError, match="reserved"):
        h.check_application({name: "v"})


@pytest.mark.parametrize("name", ["X-AceMQ-Shiny", "x-acemq", "acemq-reply-to", "my-x-acemq-id", "traceparent"])
def test_what_only_looks_reserved_is_the_applications_own(name: str) -> None:
    assert h.check_application({name: "v"}) == {name: "v"}
    assert h.application({name: "v", "x-acemq-shiny": "hidden"}) == {name: "v"}


def test_checked_headers_are_a_copy() -> None:
    given_headers = {"k": "v"}
    checked = h.check_application(given_headers)
    given_headers["k"] = "changed"
    assert checked == {"k": "v"}


@pytest.mark.parametrize(
    ("value", "read"),
    [
        ("a", "a"),
        (b"\xc3\xbc", "ü"),
        (b"\xffA", "�A"),
        ("", None),
        (b"", None),
        (None, None),
        (True, None),
        (7, "7"),
        ([1], None),
    ],
)
def test_text_reads_leniently(value: object, read: str | None) -> None:
    assert h.text(value) == read


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (7, 7),
        ("7", 7),
        (" -7 ", -7),
        (b"7", 7),
        ("seven", None),
        ("", None),
        (True, None),
        (1.5, None),
        (None, None),
        ([], None),
    ],
)
def test_integers_read_leniently(value: object, read: int | None) -> None:
    assert h.integer(value) == read


@pytest.mark.parametrize("value", ["9" * 20, b"-" + b"9" * 20, str(2**63), "9" * 5_000])
def test_an_integer_that_could_not_be_written_again_does_not_read(value: object) -> None:
    # Read as it stands, it could be put on no copy: the message could never leave its queue.
    assert h.integer(value) is None


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()) | st.binary() | st.datetimes(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@settings(max_examples=50)
@given(VALUES)
@example("١٢")
@example("1_000")
@example("half \ud83d")
def test_nothing_that_arrives_is_an_error_to_read(value: object) -> None:
    text, number = h.text(value), h.integer(value)
    assert text is None or (isinstance(text, str) and text)
    assert number is None or type(number) is int


@given(st.dictionaries(st.text(max_size=200), VALUES, max_size=4))
def test_a_check_refuses_or_leaves_as_it_is(given_headers: Mapping[str, Any]) -> None:
    try:
        checked = h.check_application(given_headers)
    except ConfigurationError:
        return
    assert list(checked) == list(given_headers)
    assert all(checked[name] is given_headers[name] for name in checked)


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)
SIMPLE = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | TEXT
    | st.binary(max_size=20)
    | st.datetimes(datetime(1970, 1, 1), datetime(2105, 1, 1), timezones=st.just(UTC)).map(
        lambda moment: moment.replace(microsecond=0)
    )
)
VALUES = st.recursive(
    SIMPLE, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3), max_leaves=8
)


def same(found: Any, sent: Any) -> bool:
    """Equal in value and type, all the way down."""
    if type(found) is not type(sent):
        return False
    if isinstance(sent, dict):
        return found.keys() == sent.keys() and all(same(found[name], value) for name, value in sent.items())
    if isinstance(sent, list):
        return len(found) == len(sent) and all(map(same, found, sent))
    return bool(found == sent)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_header_text_comes_back_equal_and_of_the_same_types(headers: dict[str, Any]) -> None:
    assert same(h.from_text(h.to_text(headers)), headers)


HARD: dict[str, Any] = {
    "$t": {"$t": 5, "beside": 1},
    "bytes": {"$b": "not base64"},
    "one": {"$o": {"$f": "nan"}},
    "deep": [{"$x": [b"\0", {"$": None}]}],
    "text": "a\0b\N{CLINKING BEER MUGS}",
}


def test_header_text_keeps_what_looks_like_its_own_marks() -> None:
    assert same(h.from_text(h.to_text(HARD)), HARD)
    read: Any = h.from_text(h.to_text({"n": math.nan}))
    assert math.isnan(read["n"])
    assert h.from_text(h.to_text({"n": -math.inf})) == {"n": -math.inf}


@pytest.mark.parametrize("bad", [{"n": 2**63}, {"n": {1}}, {"n": "\ud800"}, {"n" * 129: 1}, {"": 1}, {"n": [2**64]}])
def test_header_text_refuses_what_no_transport_carries(bad: Any) -> None:
    with pytest.raises(ConfigurationError):
        h.to_text(bad)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": {"$b": "?"}}', "null"])
def test_text_that_is_no_headers_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 whoever has found it out says what it is
        h.from_text(text)
