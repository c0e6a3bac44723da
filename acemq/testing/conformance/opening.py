"""Group A: opening, state, closing."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta

import pytest

from acemq.errors import ClosedError, ConfigurationError
from acemq.testing.conformance.bench import SOON, Bench, out
from acemq.testing.conformance.hooks import NOW, Hooks
from acemq.testing.conformance.scenario import scenario
from acemq.topology import Topology
from acemq.transport import (
    AccessDenied,
    ApplyMode,
    NotConnected,
    Phase,
    Published,
    Settled,
    Settlement,
    Transport,
    Verb,
    WrongLoop,
)

AT_ONCE = 0.1
"""Seconds for what needs no broker."""
CONTACT = timedelta(seconds=10)
MOST_OF_A_CORE = 0.05
_SECOND = timedelta(seconds=1)


def verbs(t: Transport, queue: str, sink: object) -> dict[str, Callable[[], Awaitable[object]]]:
    """Every verb that asks something of the broker, but `settle`."""
    return {
        "apply": lambda: t.apply(Topology().queue(queue), ApplyMode.REPORT),
        "publish": lambda: t.publish([out(queue)], within=SOON),
        "subscribe": lambda: t.subscribe(queue, sink, prefetch=1),  # type: ignore[arg-type]  # pyright: ignore
        "pull": lambda: t.pull(queue, most=1, wait=NOW),
        "renew": lambda: t.renew([], timedelta(seconds=30)),
        "depth": lambda: t.depth(queue),
        "exists": lambda: t.exists(queue),
        "delete": lambda: t.delete(queue),
        "purge": lambda: t.purge(queue),
    }


async def _share_of_a_core(idling: Awaitable[None]) -> float:
    """That the process has used meanwhile."""
    busy, began = time.process_time(), time.monotonic()
    await idling
    return (time.process_time() - busy) / (time.monotonic() - began)


async def _waking() -> None:
    for _ in range(50):
        await asyncio.sleep(0.02)


class Opening(Hooks):
    @scenario("C-001", "a fresh transport says how it is", small=True)
    async def test_c001_what_is_open_says_how_it_is(self, bench: Bench) -> None:
        state, can = bench.t.state, bench.can
        assert (state.phase, state.generation, state.outstanding) == (Phase.CONNECTED, 1, 0)
        assert state.since.utcoffset() is not None
        assert "@" not in state.endpoint
        assert hash(can) == hash(bench.t.capabilities)
        with pytest.raises(AttributeError):
            can.durable = not can.durable  # type: ignore[misc]  # pyright: ignore[reportAttributeAccessIssue]

    @scenario("C-002", "an address where nobody listens")
    async def test_c002_an_address_where_nobody_listens(self, bench: Bench) -> None:
        t = bench.make()
        async with bench.refused():
            before, began = asyncio.all_tasks(), bench.now()
            with pytest.raises(NotConnected) as refusal:
                await t.open(within=timedelta(seconds=1))
            took = bench.now() - began
        assert 0.5 <= took <= 2 + bench.late.total_seconds()
        assert t.state.endpoint in str(refusal.value)
        await bench.eventually(lambda: asyncio.all_tasks() <= before, "no task is left", within=bench.late)

    @scenario("C-003", "a wrong password ends it at once")
    async def test_c003_a_wrong_password_ends_it_at_once(self, bench: Bench) -> None:
        t, _ = bench.suite.no_access()
        began = bench.now()
        with pytest.raises(AccessDenied):
            await t.open(within=timedelta(seconds=10))
        assert bench.now() - began <= bench.late.total_seconds()

    @scenario("C-004", "closing twice at once and once more", small=True)
    async def test_c004_closing_twice(self, bench: Bench) -> None:
        t, queue = await bench.open(), await bench.queue()
        await bench.send(queue, b"held")
        sink, _ = await bench.consume(queue, t=t)
        await bench.has(sink, 1)
        await asyncio.gather(t.close(timedelta(seconds=1)), t.close(timedelta(seconds=1)))
        await t.close(timedelta(seconds=1))
        for verb, call in verbs(t, queue, sink).items():
            began = time.monotonic()
            with pytest.raises(ClosedError):
                await call()
            assert time.monotonic() - began < AT_ONCE, verb
        assert await bench.accept(sink.got, t=t) == [Settled.STALE]

    @scenario("C-005", "opened three times, the third on another loop")
    async def test_c005_opened_three_times(self, bench: Bench) -> None:
        t, queue = bench.make(), await bench.queue()

        async def use() -> None:
            await t.open(within=SOON)
            (result,) = await t.publish([out(queue)], within=SOON)
            assert result.outcome is Published.ROUTED
            delivered = await t.pull(queue, most=1, wait=SOON)
            assert [each.body for each in delivered] == [b"x"]
            assert list(await t.settle([Settlement(delivered[0], Verb.ACCEPT)])) == [Settled.DONE]
            await t.close(timedelta(seconds=1))
            assert t.state.phase is Phase.CLOSED

        await use()
        await use()
        await bench.pace.elsewhere(lambda: asyncio.run(use()))

    @scenario("C-006", "called from another loop")
    async def test_c006_called_from_another_loop(self, bench: Bench) -> None:
        queue, sink = await bench.queue(), bench.sink()

        async def call() -> None:
            for verb, ask in verbs(bench.t, queue, sink).items():
                began = time.monotonic()
                with pytest.raises(WrongLoop):
                    await ask()
                assert time.monotonic() - began < AT_ONCE, verb

        await bench.pace.elsewhere(lambda: asyncio.run(call()))
        await bench.send(queue, b"x")
        await bench.drain(queue, 1)

    @scenario("C-007", "of two transports one closes")
    async def test_c007_one_of_two_closes(self, bench: Bench) -> None:
        other, queue = await bench.open(), await bench.queue()
        mine, _ = await bench.consume(queue, accept=True)
        await bench.send(queue, b"1", t=other)
        await bench.has(mine, 1)
        await other.close(timedelta(seconds=1))
        await bench.send(queue, b"2")
        await bench.has(mine, 2)

    @scenario("C-008", "a password is printed nowhere")
    async def test_c008_a_password_is_printed_nowhere(self, bench: Bench) -> None:
        t, secret = bench.suite.no_access()
        logging.getLogger().setLevel(logging.DEBUG)
        with pytest.raises(Exception) as refusal:  # noqa: PT011 (whatever it raises is searched)
            await t.open(within=timedelta(seconds=1))
        said = [repr(t), repr(t.state), str(refusal.value), repr(refusal.value), repr(refusal.value.__cause__)]
        said += map(bench.logs.whole, bench.logs.records)
        assert not [text for text in said if secret in text]

    @scenario("C-009", "wrong arguments are refused by name")
    async def test_c009_wrong_arguments_are_refused_by_name(self, bench: Bench) -> None:
        queue, sink = await bench.queue(), bench.sink()
        with pytest.raises((ConfigurationError, TypeError), match="nonsense"):
            bench.make(nonsense=1)
        with pytest.raises(ConfigurationError, match="prefetch"):
            await bench.t.subscribe(queue, sink, prefetch=0)
        with pytest.raises(ConfigurationError, match="mode"):
            await bench.t.apply(Topology(), "create")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]

    @scenario("C-010", "idle with one subscription")
    async def test_c010_idle(self, bench: Bench) -> None:
        _, subscription = await bench.consume(await bench.queue())
        first = subscription.state.last_contact
        assert first is not None

        def moved() -> bool:
            return (subscription.state.last_contact or 0) > first

        await bench.eventually(moved, "last_contact moves", within=max(CONTACT, 3 * bench.step))
        await bench.quiet()
        assert subscription.state.error is None
        if not bench.pace.is_moved:
            # What turns in vain does so in each of them. A machine that has begun to idle is slow at all it does, so
            # it is measured beside what this one makes of a loop that does nothing but wake up.
            most = max(MOST_OF_A_CORE, 4 * await _share_of_a_core(_waking()))
            shares = [await _share_of_a_core(bench.sleep(_SECOND))]
            while shares[-1] >= most and len(shares) < 5:
                shares.append(await _share_of_a_core(bench.sleep(_SECOND)))
            bench.measured["share of a core while idle"] = round(min(shares), 4)
            assert min(shares) < most
        assert not bench.logs.of(logging.WARNING)
