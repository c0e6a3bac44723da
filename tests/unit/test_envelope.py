"""The envelope as a value: what it holds, and that what is written reads back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from acemq import headers as h
from acemq.envelope import ERROR_LIMIT, Envelope, from_millis, to_millis
from acemq.errors import ConfigurationError
from acemq.headers import HeaderValue
from acemq.message import Message
from acemq.transport import Delivery

NOW = datetime(2027, 1, 1, 12, 0, tzinfo=UTC)

TEXT = st.text(min_size=1, max_size=20)
OPTIONAL = st.none() | TEXT
INT64 = st.integers(1, 2**63 - 1)
PLAIN = st.booleans() | st.integers(-(2**63), 2**63 - 1) | TEXT | st.binary(max_size=10) | st.none()
NAMES = TEXT.filter(lambda name: not name.startswith(h.RESERVED) and len(name.encode()) <= h.NAME_LIMIT)


@st.composite
def envelopes(draw: st.DrawFn) -> Envelope:
    route = draw(OPTIONAL)
    return Envelope(
        id=draw(TEXT),
        type=draw(TEXT),
        version=draw(INT64),
        correlation_id=draw(TEXT),
        causation_id=draw(OPTIONAL),
        attempt=draw(INT64),
        first_seen=from_millis(draw(st.integers(1, 253_402_300_799_999))),
        origin=draw(OPTIONAL),
        error=draw(OPTIONAL),
        claim=draw(OPTIONAL),
        route=route,
        route_position=draw(st.integers(0, 2**31)) if route else 0,
        route_id=draw(OPTIONAL) if route else None,
        headers=draw(st.dictionaries(NAMES, PLAIN, max_size=3)),
    )


@given(envelopes())
def test_what_is_written_reads_back(envelope: Envelope) -> None:
    written = envelope.to_headers()
    assert Envelope.from_headers(written, routing_key="elsewhere", message_id="other", now=NOW) == envelope


@given(envelopes())
def test_nothing_empty_is_written_and_nothing_but_text_and_integers(envelope: Envelope) -> None:
    for name, value in envelope.to_headers().items():
        if name.startswith(h.RESERVED) and name != h.ROUTE_ID:
            assert type(value) in (str, int)
            assert value or type(value) is int


HOSTILE = st.dictionaries(
    st.sampled_from([value for name, value in vars(h).items() if name.isupper() and isinstance(value, str)]) | TEXT,
    PLAIN | st.integers() | st.floats() | st.integers().map(str) | st.lists(st.integers(), max_size=2),
    max_size=8,
)


@given(HOSTILE, TEXT, OPTIONAL)
def test_no_malformed_header_stops_a_delivery(wire: dict[str, Any], key: str, message_id: str | None) -> None:
    envelope = Envelope.from_headers(wire, routing_key=key, message_id=message_id, now=NOW)
    assert envelope.id
    assert envelope.attempt >= 1
    assert envelope.version >= 1
    assert envelope.route_position >= 0
    assert not any(name.startswith(h.RESERVED) for name in envelope.headers)


@given(HOSTILE)
def test_whatever_was_read_can_be_written_on_a_copy(wire: dict[str, Any]) -> None:
    envelope = Envelope.from_headers(wire, routing_key="q", message_id=None, now=NOW)
    for name, value in envelope.replace(headers={}).to_headers().items():
        h.check(name, value)


def test_no_headers_at_all_are_a_first_attempt_named_after_the_routing_key() -> None:
    envelope = Envelope.from_headers(None, routing_key="orders.placed", message_id="m-1", now=NOW)
    assert (envelope.id, envelope.type, envelope.attempt) == ("m-1", "orders.placed", 1)
    assert envelope.correlation_id == "m-1"
    assert envelope.age(NOW + timedelta(days=1)) is None


@pytest.mark.parametrize("message_id", ["property", "", None])
@pytest.mark.parametrize("header", ["header", b"bytes", "", 7, None])
def test_the_id_that_a_message_tells_is_the_one_of_its_envelope(header: HeaderValue, message_id: str | None) -> None:
    headers = {} if header is None else {h.ID: header}
    delivery = Delivery(
        queue="q", body=b"", headers=headers, message_id=message_id, content_type=None, exchange="", routing_key="q"
    )
    message = Message(None, delivery)
    before = message.id
    assert before == message.envelope.id == message.id != ""


def test_a_new_envelope_is_its_own_correlation() -> None:
    first, second = Envelope.of("t", now=NOW), Envelope.of("t", now=NOW)
    assert first.correlation_id == first.id != second.id
    assert first.first_seen == NOW
    assert Envelope.of("t", id="m-1").correlation_id == "m-1"
    assert Envelope.of("t", id="m-1", correlation_id="c-1").correlation_id == "c-1"


def test_age_is_never_negative_and_none_when_it_is_not_known() -> None:
    envelope = Envelope.of("t", now=NOW)
    assert envelope.age(NOW + timedelta(seconds=3)) == timedelta(seconds=3)
    assert envelope.age(NOW - timedelta(seconds=3)) == timedelta()
    assert envelope.replace(age_known=False).age(NOW) is None


@pytest.mark.parametrize("seen", [0, -1, 253_402_300_800_000, 2**80, "soon", None, True])
def test_a_first_seen_that_is_no_instant_is_now_and_of_unknown_age(seen: Any) -> None:
    envelope = Envelope.from_headers({h.FIRST_SEEN: seen}, routing_key="q", message_id=None, now=NOW)
    assert envelope.first_seen == NOW
    assert not envelope.age_known


def test_first_seen_is_in_utc_and_of_whole_milliseconds() -> None:
    given_in = datetime(2027, 1, 1, 13, 0, 0, 123_987, tzinfo=timezone(timedelta(hours=1)))
    seen = Envelope.of("t", first_seen=given_in).first_seen
    assert seen == datetime(2027, 1, 1, 12, 0, 0, 123_000, tzinfo=UTC)
    assert seen.tzinfo is UTC


def test_a_naive_first_seen_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="naive"):
        Envelope.of("t", first_seen=datetime(2027, 1, 1))


@pytest.mark.parametrize("fields", [{"version": 0}, {"attempt": 0}, {"attempt": -1}])
def test_version_and_attempt_count_from_one(fields: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be 1 or more"):
        Envelope.of("t", **fields)


def test_a_reserved_header_is_refused_also_on_an_envelope() -> None:
    with pytest.raises(ConfigurationError, match="reserved"):
        Envelope.of("t", headers={"x-acemq-shiny": "v"})
    with pytest.raises(ConfigurationError, match="reserved"):
        Envelope.of("t").replace(headers={"x-acemq-error": "v"})


def test_headers_are_read_only_and_those_of_the_moment() -> None:
    mine = {"k": "v"}
    envelope = Envelope.of("t", headers=mine)
    mine["k"] = "changed"
    assert envelope.headers == {"k": "v"}
    with pytest.raises(TypeError):
        envelope.headers["k"] = "w"  # type: ignore[index]  # pyright: ignore[reportIndexIssue]


def test_an_envelope_is_frozen_and_replace_gives_another() -> None:
    envelope = Envelope.of("t")
    with pytest.raises(AttributeError):
        envelope.attempt = 2  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]
    assert envelope.replace(attempt=2).attempt == 2
    assert envelope.attempt == 1


def test_a_long_error_text_is_cut() -> None:
    assert Envelope.of("t", error="x" * 5_000).to_headers()[h.ERROR] == "x" * ERROR_LIMIT


def test_the_three_route_headers_travel_together_position_0_included() -> None:
    written = Envelope.of("t", route="a,b").to_headers()
    assert (written[h.ROUTE], written[h.ROUTE_POSITION], written[h.ROUTE_ID]) == ("a,b", 0, "")
    assert not {h.ROUTE, h.ROUTE_POSITION, h.ROUTE_ID} & Envelope.of("t", route_position=3).to_headers().keys()


@given(st.integers(-(2**40), 253_402_300_799_999))
def test_milliseconds_survive_both_ways(millis: int) -> None:
    assert to_millis(from_millis(millis)) == millis
