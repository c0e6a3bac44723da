"""The table of outcomes, row by row and on both transports: queues, headers, counters and what a listener hears."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from acemq import AceMQ, Ack, Diagnostic, Envelope, FatalError, Handled, Message, RetryPolicy
from acemq import headers as h
from acemq.consuming.settling import TABLE, Case
from tests.waiting import until


class CarrierDown(Exception):
    pass


class NoSuchOrder(Exception):
    pass


def raising(error: Exception) -> Callable[[Message[Any]], Any]:
    def fail(message: Message[Any]) -> Any:
        raise error

    return fail


AT_ONCE = RetryPolicy.fixed(3, timedelta())


@dataclass(frozen=True)
class Expected:
    case: Case
    handler: Callable[[Message[Any]], Any]
    error: str | None = None
    policy: RetryPolicy = AT_ONCE
    how: str | None = None
    failed_with: str | None = None
    attempt: int = 1


ROWS = [
    Expected(Case.ACCEPTED, lambda message: None),
    Expected(Case.ACCEPTED, lambda message: Ack.accept()),
    Expected(
        Case.EXHAUSTED,
        raising(CarrierDown("boom")),
        "exhausted 1 attempt: boom",
        RetryPolicy.none(),
        "exhausted",
        f"{__name__}.CarrierDown",
    ),
    Expected(
        Case.EXHAUSTED, lambda m: Ack.retry("no luck"), "exhausted 3 attempts: no luck", how="exhausted", attempt=3
    ),
    Expected(
        Case.TOO_OLD,
        raising(CarrierDown("boom")),
        "exceeded the maximum message age of 60 s: boom",
        RetryPolicy.fixed(3, timedelta()).give_up_after(timedelta(minutes=1)),
        "too_old",
        f"{__name__}.CarrierDown",
    ),
    Expected(
        Case.FATAL,
        raising(FatalError("never")),
        "the handler reported an unprocessable message: never",
        how="fatal",
        failed_with="acemq.errors.FatalError",
    ),
    Expected(
        Case.FATAL,
        lambda m: Ack.retry(FatalError("never")),
        "the handler reported an unprocessable message: never",
        how="fatal",
        failed_with="acemq.errors.FatalError",
    ),
    Expected(
        Case.FATAL,
        raising(NoSuchOrder("o-1")),
        "the handler reported an unprocessable message: o-1",
        RetryPolicy.fixed(3, timedelta()).except_for(NoSuchOrder),
        "fatal",
        f"{__name__}.NoSuchOrder",
    ),
    Expected(
        Case.BAD_ANSWER,
        lambda m: {"no": "ack"},
        "the handler reported an unprocessable message: '<lambda>' returned dict, expected Ack or None",
        how="fatal",
    ),
    Expected(Case.REJECTED, lambda m: Ack.reject("bad"), "the handler rejected it: bad", how="rejected"),
    Expected(Case.REJECTED, lambda m: Ack.reject(), "the handler rejected it: no reason given", how="rejected"),
    Expected(Case.PARKED, lambda m: Ack.park("why"), "the handler parked it: why", how="parked"),
]


@pytest.mark.parametrize("expected", ROWS, ids=lambda row: f"{row.case}-{row.error}")
async def test_each_outcome_has_its_fate(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic], expected: Expected
) -> None:
    row, heard = TABLE[expected.case], list[Handled]()

    def handle(message: Message[Any]) -> Any:
        message.when_settled(heard.append)
        return expected.handler(message)

    handle.__name__ = "<lambda>"
    two_minutes_old = Envelope.of(
        "order",
        now=datetime.now(UTC) - timedelta(minutes=2),
        id="m-1",
        correlation_id="c-1",
        headers={"x-tenant": "acme"},
    )
    await mq.send(queue, {"id": "o-1"}, envelope=two_minutes_old)
    async with mq.consume(queue, object, handle, retry=expected.policy) as consumer:
        await until(lambda: bool(heard) and heard[-1].outcome == row.counted)
        assert getattr(consumer.counters, row.counted) == 1
        # The confirm of a copy may come behind the copy itself.
        await until(lambda: consumer.counters.retried == expected.attempt - 1)
    assert heard[-1].attempt == expected.attempt
    assert heard[-1].landed
    assert (await mq.depth(queue)).ready == 0
    for suffix in (".dlq", ".parked"):
        assert (await mq.depth(queue + suffix)).ready == (1 if row.copy == suffix else 0)
    assert [each.name for each in diagnostics] == ([row.diagnostic] if row.diagnostic else [])
    if row.copy not in (".dlq", ".parked"):
        return
    assert heard[-1].target == queue + row.copy
    letter = await mq.pull(queue + row.copy, object)
    assert letter is not None
    assert letter.payload == {"id": "o-1"}
    assert (letter.id, letter.correlation_id, letter.attempt) == ("m-1", "c-1", expected.attempt)
    assert letter.headers == {"x-tenant": "acme"} | {k: v for k, v in letter.headers.items() if k.startswith("x-death")}
    assert letter.wire_headers[h.ERROR] == expected.error
    failure = letter.failure
    assert failure is not None
    assert (failure.queue, failure.how, failure.by) == (queue, expected.how, mq.origin)
    assert failure.error_type == expected.failed_with
    assert failure.at is not None
    await letter.accept()


async def test_in_progress_comes_back_with_its_attempt_unchanged(mq: AceMQ, queue: str) -> None:
    attempts: list[int] = []

    async def handle(message: Message[int]) -> Ack | None:
        attempts.append(message.attempt)
        return Ack.in_progress(timedelta(milliseconds=30)) if len(attempts) < 3 else None

    async with mq.consume(queue, int, handle) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.acked == 1)
    assert attempts == [1, 1, 1]
    assert consumer.counters.in_progress == 2


async def test_release_gives_back_at_once_for_anybody(mq: AceMQ, queue: str) -> None:
    seen: list[bool] = []

    async def handle(message: Message[int]) -> Ack | None:
        seen.append(message.redelivered)
        return Ack.release() if len(seen) == 1 else None

    async with mq.consume(queue, int, handle) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.acked == 1)
    assert seen == [False, True]
    assert consumer.counters.released == 1


async def test_m028_o18_an_undecodable_body_is_parked_with_its_bytes_and_stops_nothing(mq: AceMQ, queue: str) -> None:
    handled: list[str] = []

    async def handle(message: Message[dict[str, str]]) -> None:
        handled.append(message.payload["a"])

    for n in range(5):
        await mq.send(queue, {"a": f"good{n}"})
    await mq.send(queue, b'{"a": \xff', content_type="application/json", headers={"x-tenant": "acme"})
    for n in range(5, 10):
        await mq.send(queue, {"a": f"good{n}"})
    async with mq.consume(queue, dict[str, str], handle, concurrency=1) as consumer:
        await until(lambda: consumer.counters.acked == 10 and consumer.counters.parked == 1)
    assert handled == [f"good{n}" for n in range(10)]
    parked = await mq.pull(f"{queue}.parked", bytes)
    assert parked is not None
    assert parked.payload == b'{"a": \xff'
    assert parked.headers["x-tenant"] == "acme"
    assert parked.attempt == 1
    assert str(parked.wire_headers[h.ERROR]).startswith("could not be decoded: ")
    await parked.accept()


async def test_a_content_type_that_no_codec_reads_is_parked_by_name(mq: AceMQ, queue: str) -> None:
    async with mq.consume(queue, dict, lambda message: None) as consumer:
        await mq.send(queue, b"\x08\x01", content_type="application/x-protobuf")
        await until(lambda: consumer.counters.parked == 1)
    parked = await mq.pull(f"{queue}.parked", bytes)
    assert parked is not None
    assert parked.wire_headers[h.ERROR] == "could not be decoded: no codec reads 'application/x-protobuf'"
    await parked.accept()


async def test_m029_malformed_headers_take_their_defaults_and_the_message_is_handled(mq: AceMQ, queue: str) -> None:
    from acemq.transport import Outgoing, Published

    foreign = Outgoing(
        exchange="",
        routing_key=queue,
        body=b"1",
        headers={h.ATTEMPT: "three", h.VERSION: 0, h.FIRST_SEEN: -1, h.CORRELATION: b"\xff\xfe"},
        message_id="foreign-1",
        content_type="application/json",
    )
    assert (await mq.outbound.move(foreign)).outcome is Published.ROUTED
    seen: list[Message[int]] = []
    async with mq.consume(queue, int, seen.append) as consumer:
        await until(lambda: consumer.counters.acked == 1)
    (message,) = seen
    assert (message.attempt, message.envelope.version, message.age) == (1, 1, None)
    assert message.correlation_id == "\ufffd\ufffd"
    assert message.id == "foreign-1"


async def test_m030_o12_a_copy_that_does_not_land_leaves_the_original(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    heard: list[Handled] = []

    async def reject(message: Message[int]) -> Ack:
        message.when_settled(heard.append)
        return Ack.reject("bad")

    async with mq.consume(queue, int, reject) as consumer:
        await mq.delete(f"{queue}.dlq")
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.move_failed == 1)
        assert not heard[0].landed
        assert diagnostics[0].name == "acemq.move.failed"
        assert diagnostics[0].destination == f"{queue}.dlq"
        from acemq import Topology

        await mq.declare(Topology().queue(f"{queue}.dlq", type="classic"))
        await until(lambda: any(each.landed for each in heard))
    assert (await mq.depth(f"{queue}.dlq")).ready == 1
    assert (await mq.depth(queue)).ready == 0


async def test_a_listener_that_raises_is_reported_and_changes_nothing(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    def listener(handled: Handled) -> None:
        raise RuntimeError("listener")

    async with mq.consume(queue, int, lambda message: message.when_settled(listener)) as consumer:
        await mq.send(queue, 1)
        await until(lambda: bool(diagnostics))
    assert diagnostics[0].name == "acemq.interceptor.failed"
    assert consumer.counters.acked == 1


async def test_a_sink_that_raises_is_ignored(url: str, queue: str) -> None:
    import acemq

    def sink(diagnostic: Diagnostic) -> None:
        raise RuntimeError("sink")

    async with acemq.connect(url, on_diagnostic=sink) as mq, mq.consume(queue, int, lambda m: Ack.reject()) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.rejected == 1)


async def test_a_second_round_does_not_grow_a_dead_letter(mq: AceMQ, queue: str) -> None:
    answers = iter([Ack.reject("first"), Ack.park("second")])
    async with mq.consume(queue, int, lambda message: next(answers)) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.rejected == 1)
        first = await mq.pull(f"{queue}.dlq", int)
        assert first is not None
        names = set(first.wire_headers)
        await first.release()
        await mq.replay(f"{queue}.dlq").run()
        await until(lambda: consumer.counters.parked == 1)
    second = await mq.pull(f"{queue}.parked", int)
    assert second is not None
    assert second.failure is not None
    assert (second.failure.how, second.failure.text) == ("parked", "the handler parked it: second")
    stamps = {h.REPLAYED_FROM, h.REPLAYED_AT, h.REPLAY_COUNT}
    assert set(second.wire_headers) - stamps == names - {h.FAILED_WITH}
    await second.accept()


async def test_expired_before_it_was_handled_goes_to_the_dead_letters_or_is_dropped(mq: AceMQ, queue: str) -> None:
    from acemq.transport import Outgoing

    async def send_expired() -> None:
        headers = acemq_headers | {h.EXPIRES_AT: 1}
        await mq.outbound.move(
            Outgoing(
                exchange="",
                routing_key=queue,
                body=b"1",
                headers=headers,
                message_id="m",
                content_type="application/json",
            )
        )

    acemq_headers: dict[str, Any] = {h.ID: "m", h.TYPE: "t"}
    handled: list[int] = []
    async with mq.consume(queue, int, lambda m: handled.append(m.payload)) as consumer:
        await send_expired()
        await until(lambda: consumer.counters.dead_lettered == 1)
        assert consumer.counters.expired == 1
    letter = await mq.pull(f"{queue}.dlq", int)
    assert letter is not None
    assert letter.failure is not None
    assert letter.failure.how == "expired"
    assert h.EXPIRES_AT not in letter.wire_headers
    await letter.accept()
    async with mq.consume(queue, int, lambda m: handled.append(m.payload), expired="drop") as consumer:
        await send_expired()
        await until(lambda: consumer.counters.acked == 1)
        assert consumer.counters.expired == 1
    assert handled == []
    assert (await mq.depth(f"{queue}.dlq")).ready == 0
