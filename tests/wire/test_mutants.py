"""Whether the cases would notice: each mutant breaks one rule of the library, and some case has to turn red."""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import pytest
from msgspec import structs
from msgspec.structs import replace

from acemq import (
    ack,
    claim_check,
    clock,
    connection,
    encryption,
    headers,
    ladder,
    retry,
    telemetry,
    topology,
)
from acemq import envelope as envelopes
from acemq import message as messages
from acemq.consuming import consumer as consuming
from acemq.consuming import moving, settling
from acemq.consuming.settling import TABLE, Case
from acemq.envelope import Envelope
from acemq.errors import ClaimStoreError, RouteError
from acemq.patterns import pipeline, replay, request_reply, routing_slip, scheduler
from acemq.patterns.ordered import keys as partition
from acemq.patterns.routing_slip import Itinerary, RoutingSlip
from acemq.publishing import encoding as publishing
from acemq.retry import RetryPolicy
from acemq.topology import Queue
from acemq.transport import Settlement, Verb
from tests.wire.suite import Suite
from tests.wire.test_claim_check import CLAIM_CHECK
from tests.wire.test_encrypted import ENCRYPTED
from tests.wire.test_envelope import ENVELOPE
from tests.wire.test_partition import PARTITION
from tests.wire.test_replay import REPLAY
from tests.wire.test_request_reply import REQUEST_REPLY
from tests.wire.test_retry import RETRY
from tests.wire.test_scheduler import SCHEDULER
from tests.wire.test_slip_declared import DECLARED
from tests.wire.test_slip_itinerary import ITINERARY
from tests.wire.test_telemetry import TELEMETRY
from tests.wire.test_topology import TOPOLOGY

Patch: TypeAlias = pytest.MonkeyPatch
SUITES = (
    *(CLAIM_CHECK, DECLARED, ENCRYPTED, ENVELOPE, ITINERARY, PARTITION, REPLAY, REQUEST_REPLY, RETRY, SCHEDULER),
    *(TELEMETRY, TOPOLOGY),
)
MUTANTS: dict[str, tuple[Suite, Callable[[Patch], None]]] = {}


def mutant(suite: Suite) -> Callable[[Callable[[Patch], None]], None]:
    def register(apply: Callable[[Patch], None]) -> None:
        assert apply.__name__ not in MUTANTS
        MUTANTS[apply.__name__] = suite, apply

    return register


@pytest.fixture(scope="module")
def red_already() -> dict[str, set[str]]:
    """By file: the cases that fail without any mutant, and so say nothing about one. Filled at first use."""
    return {}


@pytest.mark.parametrize("name", [pytest.param(suite.name, id=suite.name) for suite in SUITES])
async def test_without_a_mutant_every_case_is_green(name: str) -> None:
    assert await Suite.known[name].red() == []


# Section 1: the envelope


def _written(patch: Patch, change: Callable[[dict[str, Any], dict[str, Any]], None]) -> None:
    """Let `change` have what an envelope has become, and the fields that it became that from."""
    write = envelopes.write

    def mutated(**fields: Any) -> dict[str, Any]:
        out: dict[str, Any] = write(**fields)
        change(out, fields)
        return out

    patch.setattr(envelopes, "write", mutated)
    patch.setattr(publishing, "write", mutated)


@mutant(ENVELOPE)
def correlation_is_not_written(patch: Patch) -> None:
    _written(patch, lambda out, fields: out.pop(headers.CORRELATION))


@mutant(ENVELOPE)
def an_empty_causation_is_written(patch: Patch) -> None:
    _written(patch, lambda out, fields: out.update({headers.CAUSATION: fields.get("causation_id") or ""}))


@mutant(ENVELOPE)
def first_seen_is_written_in_seconds(patch: Patch) -> None:
    _written(patch, lambda out, fields: out.update({headers.FIRST_SEEN: fields["first_seen_ms"] // 1000}))


@mutant(ENVELOPE)
def the_version_is_written_as_text(patch: Patch) -> None:
    _written(patch, lambda out, fields: out.update({headers.VERSION: str(fields.get("version", 1))}))


@mutant(DECLARED)
def route_position_0_is_not_written(patch: Patch) -> None:
    def change(out: dict[str, Any], fields: dict[str, Any]) -> None:
        if out.get(headers.ROUTE_POSITION) == 0:
            del out[headers.ROUTE_POSITION]

    _written(patch, change)


def _read(patch: Patch, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` have the arguments with which an envelope is read."""
    read = Envelope.from_headers

    def mutated(headers: Any, **arguments: Any) -> Envelope:
        change(arguments)
        return read(headers, **arguments)

    patch.setattr(Envelope, "from_headers", staticmethod(mutated))


@mutant(ENVELOPE)
def the_id_does_not_fall_back_to_the_message_id(patch: Patch) -> None:
    _read(patch, lambda arguments: arguments.update(message_id=None))


@mutant(ENVELOPE)
def the_type_does_not_fall_back_to_the_routing_key(patch: Patch) -> None:
    _read(patch, lambda arguments: arguments.update(routing_key=""))


@mutant(ENVELOPE)
def a_boolean_reads_as_an_integer(patch: Patch) -> None:
    integer = headers.integer
    # 2 and not 1, which would be the default.
    patch.setattr(headers, "integer", lambda value: 2 if value is True else integer(value))


@mutant(ENVELOPE)
def bytes_do_not_read_as_text(patch: Patch) -> None:
    text = headers.text
    patch.setattr(headers, "text", lambda value: None if isinstance(value, bytes) else text(value))


@mutant(ENVELOPE)
def the_reserved_prefix_is_compared_without_case(patch: Patch) -> None:
    class AnyCase(str):
        def startswith(self, prefix: Any, *args: Any) -> bool:
            return str(self).lower().startswith(prefix, *args)

    application = headers.application
    patch.setattr(headers, "application", lambda given: application({AnyCase(name): v for name, v in given.items()}))


# Section 2: retry, dead letters, parking


def _row(patch: Patch, case: Case, **change: Any) -> None:
    patch.setitem(TABLE, case, replace(TABLE[case], **change))


@mutant(RETRY)
def a_retry_does_not_raise_the_attempt(patch: Patch) -> None:
    _row(patch, Case.RETRY, attempt="unchanged")


@mutant(RETRY)
def a_dead_letter_raises_the_attempt(patch: Patch) -> None:
    _row(patch, Case.EXHAUSTED, attempt="+1")


@mutant(RETRY)
def waiting_for_a_claim_costs_an_attempt(patch: Patch) -> None:
    _row(patch, Case.IN_PROGRESS, attempt="+1")


@mutant(RETRY)
def what_cannot_be_decoded_is_dead_lettered(patch: Patch) -> None:
    _row(patch, Case.UNDECODABLE, copy=".dlq")


@mutant(RETRY)
def a_release_accepts(patch: Patch) -> None:
    _row(patch, Case.RELEASED, original="accepted")


@mutant(RETRY)
def a_rejection_says_only_the_reason(patch: Patch) -> None:
    _row(patch, Case.REJECTED, text="{reason}")


@mutant(RETRY)
def a_fatal_error_is_retried(patch: Patch) -> None:
    patch.setattr(settling, "FatalError", ())


@mutant(RETRY)
def no_reason_is_an_empty_text(patch: Patch) -> None:
    patch.setattr(settling, "reason_of", lambda why: "" if why is None else str(why))


@mutant(RETRY)
def the_default_wait_for_a_claim_is_a_minute(patch: Patch) -> None:
    in_progress = ack.Ack.in_progress
    patch.setattr(ack.Ack, "in_progress", staticmethod(lambda: in_progress(12 * timedelta(seconds=5))))


@mutant(RETRY)
def a_wait_in_the_broker_is_jittered(patch: Patch) -> None:
    decide = settling.decide

    def mutated(answer: Any, attempt: int, policy: RetryPolicy, *rest: Any) -> settling.Decision:
        decided = decide(answer, attempt, policy, *rest)
        return replace(decided, delay=policy.jittered(decided.delay)) if decided.rung else decided

    patch.setattr(consuming, "decide", mutated)


@mutant(RETRY)
def jitter_only_lengthens(patch: Patch) -> None:
    patch.setattr(retry, "jitter_bounds", lambda delay, factor: (delay, delay * (1 + factor)))


@mutant(RETRY)
def a_copy_is_not_mandatory(patch: Patch) -> None:
    copy_of = moving.copy_of

    def mutated(*args: Any, **kwargs: Any) -> Any:
        return structs.replace(copy_of(*args, **kwargs), mandatory=False)

    patch.setattr(moving, "copy_of", mutated)


@mutant(RETRY)
def the_original_is_accepted_before_its_copy_is_confirmed(patch: Patch) -> None:
    move = moving.Mover._move

    async def hasty(mover: moving.Mover, decision: Any, delivery: Any, *rest: Any, **more: Any) -> Any:
        await mover.accept(delivery)
        return await move(mover, decision, delivery, *rest, **more)

    patch.setattr(moving.Mover, "_move", hasty)


def _decided(patch: Patch, change: Callable[[int, Any], tuple[int, Any]]) -> None:
    """Let `change` have what a policy is asked: attempt and age."""
    decide = RetryPolicy.decide
    patch.setattr(RetryPolicy, "decide", lambda policy, attempt, age: decide(policy, *change(attempt, age)))


@mutant(RETRY)
def one_attempt_more_than_allowed(patch: Patch) -> None:
    decide = RetryPolicy.decide

    def mutated(policy: RetryPolicy, attempt: int, age: Any) -> retry.AfterFailure:
        more = None if policy.max_attempts is None else policy.max_attempts + 1
        return decide(replace(policy, max_attempts=more), attempt, age)

    patch.setattr(RetryPolicy, "decide", mutated)


@mutant(RETRY)
def an_age_equal_to_the_limit_still_retries(patch: Patch) -> None:
    def younger(attempt: int, age: Any) -> tuple[int, Any]:
        return attempt, age and age - timedelta(milliseconds=1)

    _decided(patch, younger)


@mutant(RETRY)
def an_unknown_age_gives_up(patch: Patch) -> None:
    _decided(patch, lambda attempt, age: (attempt, timedelta(days=999) if age is None else age))


@mutant(RETRY)
def threshold_0_sends_every_wait_to_the_broker(patch: Patch) -> None:
    patch.setattr(retry, "waits_in_broker", lambda delay, threshold: threshold <= delay)


# Sections 2 and 3: names and arguments


def _arguments(patch: Patch, change: Callable[[Queue, dict[str, Any]], None]) -> None:
    arguments = Queue.arguments

    def mutated(queue: Queue) -> dict[str, Any]:
        out: dict[str, Any] = arguments(queue)
        change(queue, out)
        return out

    patch.setattr(Queue, "arguments", mutated)


@mutant(TOPOLOGY)
def a_rung_has_a_fourth_argument(patch: Patch) -> None:
    _arguments(patch, lambda queue, out: out.update({"x-expires": 86_400_000}) if ".retry." in queue.name else None)


@mutant(TOPOLOGY)
def the_dead_letter_queue_has_an_argument(patch: Patch) -> None:
    _arguments(patch, lambda queue, out: out.update({"x-max-length": 1}) if queue.name.endswith(".dlq") else None)


@mutant(TOPOLOGY)
def dead_letters_keep_the_name_of_their_queue(patch: Patch) -> None:
    def change(queue: Queue, out: dict[str, Any]) -> None:
        if queue.dead_letter:
            out["x-dead-letter-routing-key"] = queue.name

    _arguments(patch, change)


@mutant(TOPOLOGY)
def the_classic_type_is_written(patch: Patch) -> None:
    _arguments(patch, lambda queue, out: out.setdefault("x-queue-type", queue.type))


@mutant(TOPOLOGY)
def a_rung_is_always_named_in_seconds(patch: Patch) -> None:
    patch.setattr(topology, "rung_of", lambda queue, delay: f"{queue}.retry.{delay // timedelta(seconds=1)}s")


@mutant(RETRY)
def the_way_home_of_a_rung_is_not_bound(patch: Patch) -> None:
    rungs = topology.rungs
    patch.setattr(connection, "rungs", lambda queue, delays: replace(rungs(queue, delays), bindings=()))


@mutant(TOPOLOGY)
def an_exclusive_queue_is_a_quorum_queue(patch: Patch) -> None:
    patch.setattr(topology, "default_type", lambda options: "quorum")


@mutant(TOPOLOGY)
def a_pipeline_joins_its_names_with_a_dash(patch: Patch) -> None:
    patch.setattr(pipeline, "queue_for", lambda name, step: f"{name}-{step}")


# Section 3: the declared slip


@mutant(DECLARED)
def a_forwarded_message_keeps_a_stale_itinerary(patch: Patch) -> None:
    patch.setattr(routing_slip, "_without_itinerary", lambda envelope: dict(envelope.headers))


@mutant(DECLARED)
def step_names_are_not_trimmed(patch: Patch) -> None:
    class Untrimmed(str):
        def strip(self, *args: Any) -> Untrimmed:
            return self

        def split(self, sep: Any = None, maxsplit: Any = -1) -> list[Any]:
            return [Untrimmed(part) for part in super().split(sep, maxsplit)]

    text = headers.text
    patch.setattr(headers, "text", lambda value: Untrimmed(text(value) or ""))


@mutant(DECLARED)
def the_slip_beats_the_queue(patch: Patch) -> None:
    advanced = pipeline.advanced

    def mutated(slip: Any, at: str, *rest: Any, **more: Any) -> Any:
        return slip.advance() if isinstance(slip, RoutingSlip) else advanced(slip, at, *rest, **more)

    patch.setattr(pipeline, "advanced", mutated)


@mutant(DECLARED)
def resuming_advances(patch: Patch) -> None:
    resumed = pipeline.resumed
    patch.setattr(pipeline, "resumed", lambda *args: resumed(*args).advance())


@mutant(DECLARED)
def a_run_starts_at_step_1(patch: Patch) -> None:
    start_of = RoutingSlip.start_of

    def mutated(*steps: str) -> RoutingSlip:
        return start_of(*steps).advance()

    patch.setattr(RoutingSlip, "start_of", staticmethod(mutated))


# Section 4: the itinerary


@mutant(ITINERARY)
def an_itinerary_is_written_with_spaces(patch: Patch) -> None:
    write = Itinerary.__str__
    patch.setattr(Itinerary, "__str__", lambda slip: write(slip).replace('":', '": ').replace(',"', ', "'))


@mutant(ITINERARY)
def an_empty_done_is_written(patch: Patch) -> None:
    write = Itinerary.__str__
    patch.setattr(Itinerary, "__str__", lambda slip: write(slip) if slip.done else f'{write(slip)[:-1]},"done":[]}}')


@mutant(ITINERARY)
def completed_at_has_microseconds(patch: Patch) -> None:
    patch.setattr(routing_slip, "whole_seconds", lambda at: at.astimezone(UTC).isoformat(timespec="microseconds"))


@mutant(ITINERARY)
def completed_at_is_rounded(patch: Patch) -> None:
    def rounded(at: datetime) -> str:
        return clock.whole_seconds(at + timedelta(milliseconds=500))

    patch.setattr(routing_slip, "whole_seconds", rounded)


@mutant(ITINERARY)
def a_malformed_itinerary_falls_back_on_the_declared_slip(patch: Patch) -> None:
    parse = Itinerary.parse

    def lenient(text: Any) -> Itinerary:
        try:
            return parse(text)
        except RouteError:
            return Itinerary()

    patch.setattr(Itinerary, "parse", staticmethod(lenient))


@mutant(ITINERARY)
def a_finished_itinerary_does_not_win(patch: Patch) -> None:
    from_headers = Itinerary.from_headers

    def mutated(wire_headers: Any) -> Itinerary | None:
        slip = from_headers(wire_headers)
        return None if slip is not None and slip.is_finished else slip

    patch.setattr(Itinerary, "from_headers", staticmethod(mutated))


@mutant(ITINERARY)
def the_label_leaves_the_exchange_out(patch: Patch) -> None:
    patch.setattr(routing_slip.Stop, "label", property(lambda stop: stop.name or stop.routing_key))


# Section 5: partitions


@mutant(PARTITION)
def the_hash_has_31_bits(patch: Patch) -> None:
    fnv1a = partition.fnv1a
    patch.setattr(partition, "fnv1a", lambda key: fnv1a(key) & 0x7FFFFFFF)


@mutant(PARTITION)
def the_hash_is_reduced_with_its_sign(patch: Patch) -> None:
    def signed(key: str, count: int) -> int:
        unsigned = partition.fnv1a(key)
        return (unsigned - 2**32 if unsigned >= 2**31 else unsigned) % partition.check_count(count)

    patch.setattr(partition, "partition_of", signed)


@mutant(PARTITION)
def the_hash_runs_over_utf_16(patch: Patch) -> None:
    fnv1a = partition.fnv1a
    patch.setattr(partition, "fnv1a", lambda key: fnv1a(key.encode("utf-16-le", "surrogatepass").decode("latin-1")))


@mutant(PARTITION)
def partitions_are_named_as_in_java(patch: Patch) -> None:
    patch.setattr(partition, "queue_of", lambda name, number: f"{name}.p{number}")


# Section 7: replay


@mutant(REPLAY)
def a_replay_keeps_the_error(patch: Patch) -> None:
    patch.setattr(replay, "_TAKEN_OFF", replay._TAKEN_OFF - {headers.ERROR})


@mutant(REPLAY)
def a_replay_keeps_the_legacy_names(patch: Patch) -> None:
    kept = set(headers.LEGACY_REPLAY)
    patch.setattr(replay, "_TAKEN_OFF", replay._TAKEN_OFF - kept)


@mutant(REPLAY)
def the_count_does_not_continue_the_legacy_one(patch: Patch) -> None:
    patch.setattr(headers, "LEGACY_REPLAY_COUNT", "x-no-such-header")


@mutant(REPLAY)
def an_unreadable_count_falls_back_on_the_legacy_one(patch: Patch) -> None:
    stamped = replay.stamped

    def mutated(given: Any, **options: Any) -> Any:
        readable = headers.integer(given.get(headers.REPLAY_COUNT)) is not None
        kept = given if readable else {name: v for name, v in given.items() if name != headers.REPLAY_COUNT}
        return stamped(kept, **options)

    patch.setattr(replay, "stamped", mutated)


@mutant(REPLAY)
def a_replay_drops_unknown_reserved_headers(patch: Patch) -> None:
    stamped = replay.stamped
    known = {value for name, value in vars(headers).items() if name.isupper() and isinstance(value, str)}

    def mutated(given: Any, **options: Any) -> Any:
        out = stamped(given, **options)
        return {name: v for name, v in out.items() if not name.startswith(headers.RESERVED) or name in known}

    patch.setattr(replay, "stamped", mutated)


@mutant(REPLAY)
def a_replay_is_stamped_with_microseconds(patch: Patch) -> None:
    patch.setattr(replay, "whole_seconds", lambda at: at.astimezone(UTC).isoformat(timespec="microseconds"))


@mutant(REPLAY)
def the_suffix_is_found_in_any_case(patch: Patch) -> None:
    target_of = replay.target_of

    def mutated(queue: str) -> str:
        stem, dot, suffix = queue.rpartition(".")
        return target_of(f"{stem}{dot}{suffix.lower()}")

    patch.setattr(replay, "target_of", mutated)


@mutant(REPLAY)
def every_suffix_is_taken_off(patch: Patch) -> None:
    target_of = replay.target_of

    def mutated(queue: str) -> str:
        while queue.endswith(replay.SUFFIXES):
            queue = target_of(queue)
        return queue

    patch.setattr(replay, "target_of", mutated)


@mutant(REPLAY)
def a_dead_letter_is_accepted_before_its_copy_is_confirmed(patch: Patch) -> None:
    look_at = replay._Run._look_at

    async def hasty(run: Any, delivery: Any) -> Any:
        await run._transport.settle((Settlement(delivery, Verb.ACCEPT),))
        return await look_at(run, delivery)

    patch.setattr(replay._Run, "_look_at", hasty)


# Section 6: the scheduler


@mutant(SCHEDULER)
def the_shortest_rung_is_taken(patch: Patch) -> None:
    patch.setattr(ladder, "RUNGS", ladder.RUNGS[::-1])


@mutant(SCHEDULER)
def a_second_that_is_left_is_not_waited_for(patch: Patch) -> None:
    rung_for = ladder.rung_for
    patch.setattr(ladder, "rung_for", lambda remaining: rung_for(remaining - 1))


def _onward(patch: Patch, change: Callable[[Any, Any], Any]) -> None:
    """Let `change` have each copy on its way, and what it says of itself."""
    onward = ladder.onward

    def mutated(waiting: Any, body: bytes, **rest: Any) -> Any:
        return change(onward(waiting, body, **rest), waiting)

    patch.setattr(ladder, "onward", mutated)


@mutant(SCHEDULER)
def a_delivery_keeps_the_headers_of_the_ladder(patch: Patch) -> None:
    _onward(patch, lambda copy, waiting: structs.replace(copy, headers={**copy.headers, **waiting.to_headers()}))


@mutant(SCHEDULER)
def a_message_on_its_way_has_its_own_content_type(patch: Patch) -> None:
    _onward(patch, lambda copy, waiting: structs.replace(copy, content_type=waiting.content_type))


@mutant(SCHEDULER)
def a_copy_on_its_way_is_not_mandatory(patch: Patch) -> None:
    _onward(patch, lambda copy, waiting: structs.replace(copy, mandatory=False))


@mutant(SCHEDULER)
def a_moment_is_written_in_seconds(patch: Patch) -> None:
    to_headers = ladder.Waiting.to_headers

    def mutated(waiting: ladder.Waiting) -> dict[str, Any]:
        return {**to_headers(waiting), headers.SCHEDULE_DUE_AT: waiting.due_ms // 1000}

    patch.setattr(ladder.Waiting, "to_headers", mutated)


@mutant(SCHEDULER)
def a_default_exchange_counts_as_no_exchange(patch: Patch) -> None:
    patch.setattr(ladder, "_text", headers.text)


@mutant(SCHEDULER)
def a_missing_content_type_is_bytes(patch: Patch) -> None:
    patch.setattr(ladder, "_IF_NOT_SAID", "application/octet-stream")


@mutant(SCHEDULER)
def what_nobody_takes_is_tried_again_after_a_minute(patch: Patch) -> None:
    patch.setattr(scheduler, "AGAIN", timedelta(minutes=1))


@mutant(SCHEDULER)
def a_foreign_message_is_kept(patch: Patch) -> None:
    move = scheduler.Scheduler._move

    async def mutated(scheduler: Any, message: Any) -> Any:
        await move(scheduler, message)
        return ack.Ack.retry() if ladder.Waiting.from_headers(message.wire_headers) is None else None

    patch.setattr(scheduler.Scheduler, "_move", mutated)


@mutant(SCHEDULER)
def the_control_queue_is_consumed_with_the_default_prefetch(patch: Patch) -> None:
    patch.setattr(scheduler, "PREFETCH", 20)


# Section 9: request and reply


@mutant(REQUEST_REPLY)
def the_property_comes_before_the_header(patch: Patch) -> None:
    def mutated(message: Any) -> str | None:
        return message.delivery.reply_to or headers.text(message.delivery.headers.get(headers.REPLY_TO)) or None

    patch.setattr(messages.Message, "reply_to", property(mutated))


@mutant(REQUEST_REPLY)
def an_answer_carries_the_id_as_its_correlation(patch: Patch) -> None:
    patch.setattr(messages.Message, "correlation_id", property(lambda message: message.id))


def _request(patch: Patch, change: Callable[[dict[str, Any]], None]) -> None:
    """Let `change` have the options with which a request is published."""
    with_address = request_reply.Requests._with_address

    def mutated(requests: Any, *rest: Any) -> Any:
        given: dict[str, Any] = dict(with_address(requests, *rest))
        change(given)
        return given

    patch.setattr(request_reply.Requests, "_with_address", mutated)


@mutant(REQUEST_REPLY)
def a_request_has_a_correlation_of_its_own(patch: Patch) -> None:
    _request(patch, lambda given: given.update(correlation_id="another"))


@mutant(REQUEST_REPLY)
def the_address_is_not_written_as_a_property(patch: Patch) -> None:
    _request(patch, lambda given: given.pop("reply_to"))


@mutant(REQUEST_REPLY)
def the_address_is_written_as_a_property_alone(patch: Patch) -> None:
    _request(patch, lambda given: given.pop("headers"))


@mutant(REQUEST_REPLY)
def an_error_is_said_under_a_reserved_name(patch: Patch) -> None:
    patch.setattr(headers, "REPLY_ERROR", "x-acemq-error")


@mutant(REQUEST_REPLY)
def a_reply_queue_never_expires(patch: Patch) -> None:
    patch.setattr(request_reply, "reply_queue", lambda name: Queue(name, type="classic"))


@mutant(REQUEST_REPLY)
def a_request_without_an_address_is_an_error(patch: Patch) -> None:
    reply = request_reply.Responder._reply

    async def mutated(responder: Any, message: Any, answer: object) -> Any:
        if message.reply_to is None:
            raise LookupError("no address")
        return await reply(responder, message, answer)

    patch.setattr(request_reply.Responder, "_reply", mutated)


# Section 10: claim check


@mutant(CLAIM_CHECK)
def what_is_exactly_as_long_as_the_threshold_travels(patch: Patch) -> None:
    init = claim_check.ClaimCheckCodec.__init__

    def mutated(codec: Any, inner: Any, store: Any, *, threshold: int = claim_check.THRESHOLD, **rest: Any) -> None:
        init(codec, inner, store, threshold=threshold + 1 if threshold else 0, **rest)

    patch.setattr(claim_check.ClaimCheckCodec, "__init__", mutated)


@mutant(CLAIM_CHECK)
def what_travels_is_not_framed(patch: Patch) -> None:
    patch.setattr(claim_check, "INLINE", b"")


@mutant(CLAIM_CHECK)
def another_version_counts_as_framed(patch: Patch) -> None:
    decode = claim_check.ClaimCheckCodec.decode

    async def mutated(codec: Any, body: bytes, into: Any) -> Any:
        framed = len(body) >= 4 and body[:1] == b"\xac" and body[1] != 1
        return await decode(codec, body[4:] if framed else body, into)

    patch.setattr(claim_check.ClaimCheckCodec, "decode", mutated)


@mutant(CLAIM_CHECK)
def a_key_that_is_missing_is_tried_again(patch: Patch) -> None:
    patch.setattr(claim_check, "DecodeError", lambda text, content_type: ClaimStoreError(text))


@mutant(CLAIM_CHECK)
def a_key_may_have_129_characters(patch: Patch) -> None:
    patch.setattr(claim_check, "_KEY", re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,128}"))


@mutant(CLAIM_CHECK)
def a_key_may_end_with_a_newline(patch: Patch) -> None:
    class Matching:
        def fullmatch(self, key: str) -> object:
            return re.match(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}$", key)

    patch.setattr(claim_check, "_KEY", Matching())


# Section 11: encrypted bodies


@mutant(ENCRYPTED)
def the_head_of_a_body_is_not_authenticated(patch: Patch) -> None:
    cipher = encryption.EncryptedCodec._cipher

    class Careless:
        def __init__(self, aes: Any) -> None:
            self._aes = aes

        def encrypt(self, nonce: bytes, plaintext: bytes, head: bytes) -> bytes:
            return bytes(self._aes.encrypt(nonce, plaintext, None))

        def decrypt(self, nonce: bytes, sealed: bytes, head: bytes) -> bytes:
            return bytes(self._aes.decrypt(nonce, sealed, None))

    patch.setattr(encryption.EncryptedCodec, "_cipher", lambda codec, key: Careless(cipher(codec, key)))


@mutant(ENCRYPTED)
def another_version_is_opened(patch: Patch) -> None:
    open_ = encryption.EncryptedCodec.open
    patch.setattr(
        encryption.EncryptedCodec,
        "open",
        lambda codec, body: open_(codec, b"\xae\x01" + body[2:] if body[:2] == b"\xae\x02" else body),
    )


@mutant(ENCRYPTED)
def the_length_of_a_key_id_is_counted_in_characters(patch: Patch) -> None:
    class Counted(bytes):
        def __len__(self) -> int:
            return len(self.decode())

    class Text(str):
        def encode(self, encoding: str = "utf-8", errors: str = "strict") -> bytes:
            return Counted(str(self).encode(encoding, errors))

    current: Any = vars(encryption.Keyring)["current"].fget
    patch.setattr(encryption.Keyring, "current", property(lambda keyring: Text(current(keyring))))


@mutant(ENCRYPTED)
def an_encrypted_body_is_bytes_by_its_content_type(patch: Patch) -> None:
    patch.setattr(encryption.EncryptedCodec, "content_type", "application/octet-stream")


@mutant(ENCRYPTED)
def the_content_type_is_compared_with_its_case(patch: Patch) -> None:
    patch.setattr(encryption, "media_type", lambda content_type: content_type)


# Section 14: telemetry


@mutant(TELEMETRY)
def what_a_handler_rejected_counts_as_dead_lettered(patch: Patch) -> None:
    patch.setitem(TABLE, Case.REJECTED, structs.replace(TABLE[Case.REJECTED], counted="dead_lettered"))


@mutant(TELEMETRY)
def what_an_interceptor_refused_counts_as_rejected(patch: Patch) -> None:
    patch.setitem(TABLE, Case.REFUSED, structs.replace(TABLE[Case.REFUSED], counted="rejected"))


@mutant(TELEMETRY)
def the_message_type_is_left_out_of_publishes(patch: Patch) -> None:
    def published(telemetry: Any, exchange: str, routing_key: str, type: str, outcome: str, seconds: float) -> None:
        telemetry._publish_total.add(1, {"exchange": exchange, "routing.key": routing_key, "outcome": outcome})

    patch.setattr(telemetry.Telemetry, "published", published)


@mutant(TELEMETRY)
def the_attempt_is_left_out_of_a_process_span(patch: Patch) -> None:
    process_span = telemetry.Telemetry.process_span

    def mutated(*arguments: Any) -> Any:
        span: Any = process_span(*arguments)
        del span._attributes["messaging.acemq.attempt"]
        return span

    patch.setattr(telemetry.Telemetry, "process_span", mutated)


@mutant(TELEMETRY)
def a_move_that_failed_is_a_warning(patch: Patch) -> None:
    call = telemetry.Reporter.__call__

    def mutated(reporter: Any, told: Any) -> None:
        call(reporter, structs.replace(told, level="warning"))

    patch.setattr(telemetry.Reporter, "__call__", mutated)


@pytest.mark.parametrize("name", MUTANTS)
async def test_some_case_notices_that(name: str, monkeypatch: Patch, red_already: dict[str, set[str]]) -> None:
    suite, apply = MUTANTS[name]
    if suite.name not in red_already:
        red_already[suite.name] = set(await suite.red())
    apply(monkeypatch)
    noticed = await suite.red(beside=red_already[suite.name], most=1)
    assert noticed, f"no case of {suite.name}.json notices that {name.replace('_', ' ')}"
