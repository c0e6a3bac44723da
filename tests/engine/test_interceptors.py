"""Six places where a hook may raise, one rule each; what passes through the chain, in which order, what beside it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import (
    AceMQ,
    Ack,
    Batch,
    BatchPublishError,
    ConfigurationError,
    ConsumeInterceptor,
    Diagnostic,
    Draft,
    EncodeError,
    Handled,
    Message,
    PublishingPausedError,
    PublishInterceptor,
    Receipt,
    RetryPolicy,
    Topology,
    UnroutableError,
)
from tests.waiting import until

MIDDLE = 2


class Told(PublishInterceptor, ConsumeInterceptor):
    """Notes what it is told, and raises at one place, be it only for one payload."""

    def __init__(self, name: str, book: list[tuple[Any, ...]], raises_at: str = "", only: object = None) -> None:
        self.name, self.book, self._raises_at, self._only = name, book, raises_at, only

    def note(self, place: str, payload: object) -> None:
        self.book.append((place, self.name, payload))
        if place == self._raises_at and (self._only is None or payload == self._only):
            raise RuntimeError("no tenant")

    async def before_publish(self, draft: Draft) -> None:
        self.note("before_publish", draft.payload)

    async def after_publish(self, draft: Draft, receipt: Receipt) -> None:
        assert receipt.message_id == draft.envelope.id
        self.note("after_publish", draft.payload)

    def publish_failed(self, draft: Draft, error: BaseException) -> None:
        self.note("publish_failed", draft.payload)

    def before_handle(self, message: Message[Any]) -> None:
        self.note("before_handle", message.payload)

    async def after_handle(self, message: Message[Any], decision: Ack) -> None:
        self.note("after_handle", message.payload)

    async def handle_failed(self, message: Message[Any], error: BaseException) -> None:
        self.note("handle_failed", message.payload)

    def when_settled(self, message: Message[Any], handled: Handled) -> None:
        self.note("when_settled", message.payload)


@pytest.fixture
def book() -> list[tuple[Any, ...]]:
    return []


def places(book: list[tuple[Any, ...]], *wanted: str) -> list[tuple[str, str, object]]:
    return [(place, name, payload) for place, name, payload in book if not wanted or place in wanted]


async def test_m056_before_runs_first_to_last_and_all_others_last_to_first(
    url: str, queue: str, book: list[tuple[Any, ...]]
) -> None:
    async with acemq.connect(url, interceptors=[Told("a", book)]) as mq:
        mq.intercept(Told("b", book))
        async with mq.consume(queue, int, lambda message: None, interceptors=[Told("c", book)]) as consumer:
            await mq.send(queue, 1)
            await until(lambda: len(places(book, "when_settled")) == 3)
        assert consumer.counters.acked == 1
    order = {place: [name for each, name, _ in book if each == place] for place, _, _ in book}
    assert order == {
        "before_publish": ["a", "b"],
        "after_publish": ["b", "a"],
        "before_handle": ["a", "b", "c"],
        "after_handle": ["c", "b", "a"],
        "when_settled": ["c", "b", "a"],
    }


# 1. before_publish


async def test_place_1_before_publish_stops_the_publish_with_its_own_error(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]], diagnostics: list[Diagnostic]
) -> None:
    mq.intercept(Told("a", book), Told("b", book, "before_publish"), Told("c", book))
    with pytest.raises(RuntimeError, match="no tenant"):
        await mq.send(queue, object())  # what no codec could write: nothing is encoded
    assert [name for _, name, _ in book] == ["a", "b"]
    assert {place for place, _, _ in book} == {"before_publish"}
    assert diagnostics == []
    assert (await mq.depth(queue)).ready == 0


async def test_place_1_in_a_batch_only_that_message_ends(mq: AceMQ, queue: str, book: list[tuple[Any, ...]]) -> None:
    mq.intercept(Told("a", book), Told("b", book, "before_publish", only=MIDDLE))
    with pytest.raises(BatchPublishError) as failed:
        await mq.send_many(queue, [1, MIDDLE, 3])
    batch = failed.value
    assert (batch.confirmed, batch.failed, batch.safe_to_resend) == (2, 1, True)
    assert isinstance(batch.results[1], RuntimeError)
    assert batch.__cause__ is batch.results[1]
    assert [pulled.payload for pulled in await mq.pull_many(queue, int)] == [1, 3]
    assert [payload for place, name, payload in book if (place, name) == ("after_publish", "a")] == [1, 3]
    assert places(book, "publish_failed") == []


async def test_one_of_ten_refused_by_a_hook_nine_arrive(mq: AceMQ, queue: str, book: list[tuple[Any, ...]]) -> None:
    mq.intercept(Told("a", book, "before_publish", only=4))
    with pytest.raises(BatchPublishError) as failed:
        await mq.send_many(queue, range(10))
    assert failed.value.confirmed == 9
    assert failed.value.safe_to_resend
    assert [pulled.payload for pulled in await mq.pull_many(queue, int)] == [n for n in range(10) if n != 4]


# 2. after_publish


async def test_place_2_after_publish_is_swallowed_and_the_caller_has_its_receipt(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]], diagnostics: list[Diagnostic]
) -> None:
    mq.intercept(Told("a", book), Told("b", book, "after_publish"))
    receipt = await mq.send(queue, 1)
    assert receipt.routed
    assert (await mq.depth(queue)).ready == 1
    (told,) = diagnostics
    assert (told.name, told.level, told.destination) == ("acemq.interceptor.failed", "warning", queue)
    assert told.message == "Told.after_publish raised RuntimeError: no tenant"
    assert told.message_id == receipt.message_id
    assert isinstance(told.failure, RuntimeError)
    assert places(book, "after_publish") == [("after_publish", "b", 1), ("after_publish", "a", 1)]


async def test_place_2_a_hook_whose_own_task_was_cancelled_is_reported_and_the_caller_has_its_receipt(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    class Impatient(PublishInterceptor):
        async def after_publish(self, draft: Draft, receipt: Receipt) -> None:
            waiting = asyncio.ensure_future(asyncio.sleep(60))
            waiting.cancel()
            await waiting

    mq.intercept(Impatient())
    receipt = await mq.send(queue, 1)
    pulled = await mq.pull(queue, int, wait=timedelta(seconds=2))
    assert pulled is not None
    assert pulled.id == receipt.message_id
    (told,) = diagnostics
    assert told.message.startswith("Impatient.after_publish raised CancelledError")


async def test_place_2_a_caller_that_is_cancelled_while_a_hook_runs_stays_cancelled(mq: AceMQ, queue: str) -> None:
    runs = asyncio.Event()

    class Slow(PublishInterceptor):
        async def after_publish(self, draft: Draft, receipt: Receipt) -> None:
            runs.set()
            await asyncio.sleep(60)

    mq.intercept(Slow())
    sending = asyncio.ensure_future(mq.send(queue, 1))
    await runs.wait()
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending


async def test_place_2_in_a_batch_changes_no_result(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]], diagnostics: list[Diagnostic]
) -> None:
    mq.intercept(Told("a", book, "after_publish", only=MIDDLE))
    receipts = await mq.send_many(queue, [1, MIDDLE, 3])
    assert [receipt.routed for receipt in receipts] == [True, True, True]
    assert [told.message_id for told in diagnostics] == [receipts[1].message_id]
    assert [pulled.payload for pulled in await mq.pull_many(queue, int)] == [1, MIDDLE, 3]


# 3. publish_failed


async def test_place_3_publish_failed_is_swallowed_and_the_caller_gets_the_failure_of_the_publish(
    mq: AceMQ, name: str, book: list[tuple[Any, ...]], diagnostics: list[Diagnostic]
) -> None:
    mq.intercept(Told("a", book), Told("b", book, "publish_failed"))
    with pytest.raises(UnroutableError):
        await mq.send(f"nowhere-{name}", 1)
    assert [told.message for told in diagnostics] == ["Told.publish_failed raised RuntimeError: no tenant"]
    assert places(book, "publish_failed") == [("publish_failed", "b", 1), ("publish_failed", "a", 1)]
    assert places(book, "after_publish") == []


async def test_place_3_in_a_batch_changes_no_result(
    mq: AceMQ, queue: str, name: str, book: list[tuple[Any, ...]], diagnostics: list[Diagnostic]
) -> None:
    mq.intercept(Told("a", book, "publish_failed", only=MIDDLE))
    drafts = [Draft("", queue, 1), Draft("", f"nowhere-{name}", MIDDLE), Draft("", queue, 3)]
    with pytest.raises(BatchPublishError) as failed:
        await mq.publish_batch(drafts)
    assert [type(result) for result in failed.value.results] == [Receipt, UnroutableError, Receipt]
    assert [told.name for told in diagnostics] == ["acemq.interceptor.failed"]
    assert [pulled.payload for pulled in await mq.pull_many(queue, int)] == [1, 3]


# 4. before_handle


async def test_place_4_m059_before_handle_refuses_the_message_which_goes_to_its_dead_letters(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]], diagnostics: list[Diagnostic]
) -> None:
    handled: list[int] = []

    class Blocks(Told):
        def before_handle(self, message: Message[Any]) -> None:
            super().before_handle(message)
            if message.attempt == 2:
                raise PermissionError("blocked")

    async def handle(message: Message[int]) -> Ack:
        handled.append(message.attempt)
        return Ack.retry("again")

    mq.intercept(Told("a", book), Blocks("b", book), Told("c", book))
    async with mq.consume(queue, int, handle, retry=RetryPolicy.fixed(5, timedelta())) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.dead_lettered == 1)
    assert handled == [1]
    letter = await mq.pull(f"{queue}.dlq", int)
    assert letter is not None
    assert letter.failure is not None
    assert (letter.attempt, letter.failure.text) == (2, "an interceptor refused it: blocked")
    assert (letter.failure.how, letter.failure.error_type) == ("refused", "builtins.PermissionError")
    await letter.accept()
    assert [name for _, name, _ in places(book, "before_handle")] == ["a", "b", "c", "a", "b"]
    # The second time, only one hook had let it through.
    assert [name for _, name, _ in places(book, "when_settled")] == ["c", "b", "a", "a"]
    assert places(book, "handle_failed") == []
    assert len(places(book, "after_handle")) == 3
    assert [told.name for told in diagnostics] == ["acemq.message.dead.lettered"]


async def test_place_4_of_three_only_the_middle_one_is_refused(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]]
) -> None:
    handled: list[int] = []
    await mq.send_many(queue, [1, MIDDLE, 3])
    refuses = Told("a", book, "before_handle", only=MIDDLE)
    async with mq.consume(
        queue, int, lambda message: handled.append(message.payload), interceptors=[refuses]
    ) as consumer:
        await until(lambda: consumer.counters.acked == 2 and consumer.counters.dead_lettered == 1)
    assert handled == [1, 3]
    assert (await mq.depth(f"{queue}.dlq")).ready == 1


# 5. after_handle and 6. handle_failed


def boom(message: Message[Any]) -> None:
    raise ValueError("boom")


@pytest.mark.parametrize(
    ("place", "handler", "counted"),
    [("after_handle", lambda message: None, "acked"), ("handle_failed", boom, "dead_lettered")],
    ids=["place 5 after_handle", "place 6 handle_failed"],
)
async def test_places_5_and_6_are_swallowed_and_what_the_handler_did_stands(
    mq: AceMQ,
    queue: str,
    book: list[tuple[Any, ...]],
    diagnostics: list[Diagnostic],
    place: str,
    handler: Callable[[Message[Any]], None],
    counted: str,
) -> None:
    other = {"after_handle": "handle_failed", "handle_failed": "after_handle"}[place]
    calls: list[int] = []

    def handle(message: Message[int]) -> None:
        calls.append(message.payload)
        handler(message)

    await mq.send_many(queue, [1, MIDDLE, 3])
    around = [Told("a", book), Told("b", book, place, only=MIDDLE)]
    async with mq.consume(queue, int, handle, retry=RetryPolicy.none(), interceptors=around, concurrency=1) as consumer:
        await until(lambda: getattr(consumer.counters, counted) == 3)
    assert calls == [1, MIDDLE, 3]
    failed = [told for told in diagnostics if told.name == "acemq.interceptor.failed"]
    assert [told.message for told in failed] == [f"Told.{place} raised RuntimeError: no tenant"]
    assert (failed[0].queue, failed[0].attempt) == (queue, 1)
    assert [(name, payload) for _, name, payload in places(book, place)] == [
        (name, payload) for payload in (1, MIDDLE, 3) for name in "ba"
    ]
    assert places(book, other) == []


# 4, 5 and 6 where messages are handled in batches


async def test_place_4_in_a_batch_of_three_the_middle_one_never_enters_it(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]]
) -> None:
    batches: list[list[int]] = []

    async def load(batch: Batch[int]) -> None:
        batches.append([message.payload for message in batch])
        assert acemq.current_message() is None

    class Current(Told):
        def note(self, place: str, payload: object) -> None:
            current = acemq.current_message()
            assert place == "when_settled" or (current is not None and current.payload == payload)
            super().note(place, payload)

    await mq.send_many(queue, [1, MIDDLE, 3])
    around = [Current("a", book), Current("b", book, "before_handle", only=MIDDLE)]
    async with mq.consume_batches(queue, int, load, most=3, interceptors=around) as consumer:
        await until(lambda: consumer.counters.acked == 2 and consumer.counters.dead_lettered == 1)
        await until(lambda: len(places(book, "when_settled")) == 5)
    assert batches == [[1, 3]]
    letter = await mq.pull(f"{queue}.dlq", int)
    assert letter is not None
    assert letter.failure is not None
    assert (letter.payload, letter.failure.how) == (MIDDLE, "refused")
    await letter.accept()
    assert places(book, "before_handle") == [("before_handle", name, n) for n in (1, MIDDLE, 3) for name in "ab"]
    assert places(book, "after_handle") == [("after_handle", name, n) for n in (1, 3) for name in "ba"]
    assert places(book, "handle_failed") == []
    settled = places(book, "when_settled")
    assert [name for _, name, n in settled if n == MIDDLE] == ["a"]
    assert [name for _, name, n in settled if n == 1] == ["b", "a"]


async def test_a_batch_that_is_refused_whole_calls_no_handler(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]]
) -> None:
    batches: list[Batch[int]] = []
    await mq.send_many(queue, [1, 2])
    refuses = Told("a", book, "before_handle")
    async with mq.consume_batches(queue, int, batches.append, most=2, interceptors=[refuses]) as consumer:
        await until(lambda: consumer.counters.dead_lettered == 2)
    assert batches == []


@pytest.mark.parametrize("place", ["after_handle", "handle_failed"])
async def test_places_5_and_6_in_a_batch_are_swallowed_and_tell_what_became_of_each(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]], diagnostics: list[Diagnostic], place: str
) -> None:
    async def load(batch: Batch[int]) -> None:
        batch.settle(batch[0], Ack.accept())
        if place == "handle_failed":
            raise ValueError("boom")

    await mq.send_many(queue, [1, MIDDLE, 3])
    around = [Told("a", book), Told("b", book, place, only=MIDDLE)]
    async with mq.consume_batches(queue, int, load, most=3, retry=RetryPolicy.none(), interceptors=around) as consumer:
        await until(lambda: consumer.counters.acked + consumer.counters.dead_lettered == 3)
    failed = [told for told in diagnostics if told.name == "acemq.interceptor.failed"]
    assert [told.message for told in failed] == [f"Told.{place} raised RuntimeError: no tenant"]
    told = (1,) if place == "handle_failed" else (1, MIDDLE, 3)
    assert [n for _, name, n in places(book, "after_handle") if name == "a"] == list(told)
    assert [n for _, name, n in places(book, "handle_failed") if name == "a"] == [n for n in (1, 2, 3) if n not in told]


async def test_closing_a_batch_consumer_from_a_hook_does_not_wait_for_itself(mq: AceMQ, queue: str) -> None:
    class Closes(ConsumeInterceptor):
        async def before_handle(self, message: Message[Any]) -> None:
            await consumer.close()

    await mq.send(queue, 1)
    consumer = await mq.consume_batches(queue, int, lambda batch: None, most=1, interceptors=[Closes()])
    await until(lambda: consumer.state == "closed", within=5)


async def test_a_hook_that_cancels_itself_is_reported_and_ends_no_consumer(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic]
) -> None:
    class Cancels(ConsumeInterceptor):
        async def after_handle(self, message: Message[Any], decision: Ack) -> None:
            raise asyncio.CancelledError

    mq.intercept(Cancels())
    async with mq.consume_batches(queue, int, lambda batch: None, most=1) as consumer:
        await mq.send_many(queue, [1, 2])
        await until(lambda: consumer.counters.acked == 2)
    async with mq.consume(queue, int, lambda message: None) as single:
        await mq.send(queue, 3)
        await until(lambda: single.counters.acked == 1)
    assert [told.name for told in diagnostics] == ["acemq.interceptor.failed"] * 3


@pytest.mark.parametrize("raised", [RuntimeError("deaf"), asyncio.CancelledError("deaf")])
async def test_when_settled_says_what_happened_and_what_it_raises_is_reported(
    mq: AceMQ, queue: str, diagnostics: list[Diagnostic], raised: BaseException
) -> None:
    heard: list[Handled] = []

    class Listens(ConsumeInterceptor):
        def when_settled(self, message: Message[Any], handled: Handled) -> None:
            heard.append(handled)
            raise raised

    async with mq.consume(
        queue, int, lambda message: Ack.retry("no"), interceptors=[Listens()], retry=RetryPolicy.none()
    ) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.dead_lettered == 1 and len(diagnostics) == 2)
    assert [(each.outcome, each.target) for each in heard] == [("dead_lettered", f"{queue}.dlq")]
    assert diagnostics[1].message == f"Listens.when_settled raised {type(raised).__name__}: deaf"


# What a hook may change, and what passes through


async def test_m060_payload_key_and_headers_may_change_until_the_last_hook_has_returned(
    mq: AceMQ, queue: str, name: str
) -> None:
    other = f"{name}-other"
    await mq.declare(Topology().queue(other, type="classic"))

    class Redirects(PublishInterceptor):
        def before_publish(self, draft: Draft) -> None:
            draft.routing_key, draft.payload = other, {"was": draft.payload}
            draft.envelope = draft.envelope.replace(headers={**draft.envelope.headers, "x-tenant": "acme"})

    mq.intercept(Redirects())
    receipt = await mq.send(queue, 1, headers={"x-given": 1}, message_id="m-1", correlation_id="c-1")
    assert (receipt.routing_key, receipt.message_id) == (other, "m-1")
    pulled = await mq.pull(other, dict)
    assert pulled is not None
    assert pulled.payload == {"was": 1}
    assert (pulled.id, pulled.type, pulled.correlation_id) == ("m-1", queue, "c-1")
    assert {"x-given": 1, "x-tenant": "acme"}.items() <= pulled.headers.items()
    await pulled.accept()
    await mq.delete(other)


async def test_a_reserved_header_by_name_is_refused(mq: AceMQ, queue: str) -> None:
    class Forges(PublishInterceptor):
        def before_publish(self, draft: Draft) -> None:
            draft.envelope = draft.envelope.replace(headers={"x-acemq-id": "mine"})

    mq.intercept(Forges())
    with pytest.raises(ConfigurationError, match="x-acemq-id"):
        await mq.send(queue, 1)
    assert (await mq.depth(queue)).ready == 0


async def test_what_cannot_be_encoded_tells_the_hooks_that_it_failed(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]]
) -> None:
    unwritable = object()
    mq.intercept(Told("a", book))
    with pytest.raises(EncodeError):
        await mq.send(queue, unwritable)
    assert places(book) == [("before_publish", "a", unwritable), ("publish_failed", "a", unwritable)]


async def test_the_librarys_own_copies_pass_beside_the_chain_and_an_undecodable_body_never_enters_it(
    mq: AceMQ, queue: str, book: list[tuple[Any, ...]]
) -> None:
    mq.intercept(Told("a", book))
    async with mq.consume(
        queue, int, lambda message: Ack.retry("again"), retry=RetryPolicy.fixed(2, timedelta())
    ) as consumer:
        await mq.send(queue, 1)
        await mq.send(queue, b"{", content_type="application/json")
        await until(lambda: consumer.counters.dead_lettered + consumer.counters.parked == 2)
    await mq.replay(f"{queue}.dlq").run()
    assert len(places(book, "before_publish")) == len(places(book, "after_publish")) == 2
    assert [payload for _, _, payload in places(book, "before_handle")] == [1, 1]


async def test_a_hop_of_a_pipeline_passes_through_the_chain(mq: AceMQ, name: str, book: list[tuple[Any, ...]]) -> None:
    async def double(n: int) -> int:
        return 2 * n

    async def note(n: int) -> None: ...

    mq.intercept(Told("a", book))
    async with mq.pipeline(name, int).step("double", double).step("note", note).start() as running:
        await running.send(21)
        await until(lambda: running.counters.completed == 1)
    assert [payload for _, _, payload in places(book, "before_publish")] == [21, 42]


async def test_state_is_carried_to_the_handler_and_a_registration_counts_from_then_on(mq: AceMQ, queue: str) -> None:
    seen: list[object] = []

    class Tenant(ConsumeInterceptor):
        async def before_handle(self, message: Message[Any]) -> None:
            message.state["tenant"] = "acme"

    async with mq.consume(queue, int, lambda message: seen.append(message.state.get("tenant"))) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.acked == 1)
        mq.intercept(Tenant())
        await mq.send(queue, 2)
        await until(lambda: consumer.counters.acked == 2)
    assert seen == [None, "acme"]


async def test_a_time_limit_is_the_handlers_and_its_end_is_told_as_a_failure(mq: AceMQ, queue: str) -> None:
    import asyncio

    errors: list[BaseException] = []

    class Patient(ConsumeInterceptor):
        async def before_handle(self, message: Message[Any]) -> None:
            await asyncio.sleep(0.1)

        def handle_failed(self, message: Message[Any], error: BaseException) -> None:
            errors.append(error)

    async with mq.consume(
        queue,
        int,
        lambda message: asyncio.sleep(30),
        handler_timeout=timedelta(milliseconds=50),
        retry=RetryPolicy.none(),
        interceptors=[Patient()],
    ) as consumer:
        await mq.send(queue, 1)
        await until(lambda: consumer.counters.dead_lettered == 1)
    assert [type(error) for error in errors] == [acemq.HandlerTimeoutError]


def test_what_is_no_interceptor_is_refused() -> None:
    wrong: Any = [PublishInterceptor]
    with pytest.raises(ConfigurationError, match="an instance of a PublishInterceptor or ConsumeInterceptor"):
        acemq.connect("memory://", interceptors=wrong)


def test_a_publish_interceptor_of_one_consumer_is_refused() -> None:
    wrong: Any = [PublishInterceptor()]
    with pytest.raises(ConfigurationError, match="an instance of a ConsumeInterceptor"):
        AceMQ("memory://").consume("q", int, lambda message: None, interceptors=wrong)


# Drafts without hooks


async def test_a_batch_of_drafts_goes_where_each_says(mq: AceMQ, queue: str, name: str) -> None:
    await mq.declare(Topology().exchange(name, "topic").queue(queue, type="classic").bind(queue, name, "order.*"))
    receipts = await mq.publish_batch(
        Draft(exchange, key, n, headers={"x-n": n}, message_id=f"m-{n}")
        for n, (exchange, key) in enumerate([(name, "order.placed"), ("", queue), (name, "order.lost")])
    )
    assert [(receipt.message_id, receipt.exchange) for receipt in receipts] == [
        ("m-0", name),
        ("m-1", ""),
        ("m-2", name),
    ]
    pulled = await mq.pull_many(queue, int)
    assert [(each.payload, each.headers["x-n"], each.type) for each in pulled] == [
        (0, 0, "order.placed"),
        (1, 1, queue),
        (2, 2, "order.lost"),
    ]
    assert {each.envelope.origin for each in pulled} == {mq.origin}
    await mq.delete(name, "exchange")


async def test_one_draft_that_cannot_be_sent_ends_alone(mq: AceMQ, queue: str) -> None:
    drafts = [Draft("", queue, 1), Draft("", queue, 2, priority=300), Draft("", "", 3), Draft("", queue, 4)]
    with pytest.raises(BatchPublishError) as failed:
        await mq.publish_batch(drafts)
    assert [type(result).__name__ for result in failed.value.results] == [
        "Receipt",
        "ConfigurationError",
        "ConfigurationError",
        "Receipt",
    ]
    assert failed.value.safe_to_resend
    assert [pulled.payload for pulled in await mq.pull_many(queue, int)] == [1, 4]


async def test_a_draft_is_read_as_there_is_room(url: str, queue: str, book: list[tuple[Any, ...]]) -> None:
    taken: list[int] = []

    def drafts() -> Any:
        for n in range(30):
            taken.append(n)
            yield Draft("", queue, n)

    class Counts(PublishInterceptor):
        most = 0

        def after_publish(self, draft: Draft, receipt: Receipt) -> None:
            self.most = max(self.most, len(taken) - int(str(draft.payload)))

    counts = Counts()
    async with acemq.connect(url, max_outstanding=5, interceptors=[counts]) as mq:
        assert len(await mq.publish_batch(drafts())) == 30
        assert mq.outbound.permits.in_use == 0
    assert 0 < counts.most <= 5


async def test_a_hook_may_publish_while_its_batch_waits_for_it(url: str, queue: str, name: str) -> None:
    audit = f"{name}-audit"

    class Audits(PublishInterceptor):
        async def before_publish(self, draft: Draft) -> None:
            if draft.routing_key != audit:
                await mq.send(audit, draft.payload)

    async with acemq.connect(url, max_outstanding=3, publish_timeout=timedelta(seconds=5)) as mq:
        await mq.declare(Topology().queue(audit, type="classic"))
        mq.intercept(Audits())
        await mq.send_many(queue, range(9))
        assert (await mq.depth(audit)).ready == 9
        await mq.delete(audit)


def test_a_draft_refuses_what_is_not_one_messages() -> None:
    with pytest.raises(ConfigurationError, match="publish_batch"):
        Draft("", "q", 1, timeout=timedelta(seconds=1))
    unknown: Any = {"prioriy": 1}
    with pytest.raises(TypeError, match="prioriy"):
        Draft("", "q", 1, **unknown)


def test_a_draft_has_an_envelope_before_it_is_handed_over() -> None:
    draft = Draft("", "q", 1, message_id="m-1", headers={"x": 1}, type="order", version=2)
    assert (draft.envelope.id, draft.envelope.type, draft.envelope.version) == ("m-1", "order", 2)
    assert draft.envelope.headers == {"x": 1}
    assert draft.envelope.correlation_id == "m-1"


async def test_a_cancelled_batch_gives_its_permits_back(url: str, queue: str) -> None:
    import asyncio

    async with acemq.connect(url, max_outstanding=10) as mq:
        for _ in range(5):
            sending = asyncio.create_task(mq.send_many(queue, range(1_000)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
        await until(lambda: mq.outbound.permits.in_use == 0)
        await mq.send(queue, 1)


async def test_a_pause_in_the_middle_of_a_batch_refuses_the_rest_as_it_does_without_hooks(url: str, queue: str) -> None:
    class Pauses(PublishInterceptor):
        def after_publish(self, draft: Draft, receipt: Receipt) -> None:
            mq.pause_publishing()

    async with acemq.connect(url, max_outstanding=4, interceptors=[Pauses()]) as mq:
        with pytest.raises(BatchPublishError) as failed:
            await mq.send_many(queue, range(10))
        kinds = [type(result) for result in failed.value.results]
        assert kinds == [Receipt] * 4 + [PublishingPausedError] * 6
        assert failed.value.safe_to_resend
        assert (await mq.depth(queue)).ready == 4
