"""Group H: leases."""

from __future__ import annotations

from datetime import timedelta

import pytest

from acemq.errors import ConfigurationError
from acemq.testing.conformance.bench import Bench
from acemq.testing.conformance.hooks import NOW, Hooks
from acemq.testing.conformance.receiving import numbered
from acemq.testing.conformance.scenario import scenario
from acemq.transport import FOREVER, Delivery, LeaseTerms, LostBy, Settled, Verb

DONE, STALE = Settled.DONE, Settled.STALE


def terms(bench: Bench) -> LeaseTerms:
    lease = bench.can.lease
    assert lease is not None
    return lease


def short(bench: Bench, steps: int = 4) -> timedelta:
    """A lease of so many steps of the scenario's, as far as the broker takes one so short."""
    return max(terms(bench).shortest, steps * max(bench.step, terms(bench).step))


async def lapsed(bench: Bench, queue: str) -> tuple[Delivery, Delivery]:
    """One message, whose lease has passed with the first and which the second holds."""
    await bench.send(queue, b"x")
    (first,) = await bench.t.pull(queue, most=1, wait=bench.settling, lease=short(bench))
    (second,) = await bench.t.pull(queue, most=1, wait=short(bench) + bench.late, lease=terms(bench).default)
    return first, second


class Leases(Hooks):
    @scenario("C-079", "a lease that is not renewed", "lease")
    async def test_c079_not_renewed(self, bench: Bench) -> None:
        queue, other, lease = await bench.queue(), await bench.open(), short(bench)
        await bench.send(queue, b"x")
        first, subscription = await bench.consume(queue, prefetch=1, lease=lease)
        await bench.has(first, 1)
        subscription.pause()
        second, _ = await bench.consume(queue, prefetch=1, t=other)
        await bench.has(second, 1, within=lease + bench.late)
        took = second.at[0] - first.at[0]
        assert lease.total_seconds() * 0.999 <= took <= (lease + bench.late).total_seconds()
        await bench.quiet()
        assert {by for _, by in first.losses} <= {LostBy.LEASE}
        assert await bench.accept(first.got) == [STALE]
        bench.measured["lease, s"] = terms(bench).default.total_seconds()

    @scenario("C-080", "a lease that is renewed", "lease")
    async def test_c080_renewed(self, bench: Bench) -> None:
        queue, other, lease = await bench.queue(), await bench.open(), short(bench)
        await bench.send(queue, b"x")
        (held,) = await bench.t.pull(queue, most=1, wait=bench.settling, lease=lease)
        sink, _ = await bench.consume(queue, t=other)
        for _ in range(6):
            await bench.sleep(lease / 2)
            (renewal,) = await bench.t.renew([held], lease)
            assert renewal.outcome == "renewed"
            assert renewal.until is not None
        assert await bench.accept([held]) == [DONE]
        await bench.sleep(2 * lease)
        assert sink.got == []

    @scenario("C-081", "a stale settlement changes nothing", "lease", "fenced")
    async def test_c081_a_stale_settlement(self, bench: Bench) -> None:
        queue = await bench.queue()
        first, second = await lapsed(bench, queue)
        for verb in Verb:
            assert await bench.settle([first], verb) == [STALE]
        assert await bench.t.pull(queue, most=1, wait=NOW) == []
        assert await bench.accept([second]) == [DONE]
        await bench.drain(queue, 0)

    @scenario("C-082", "a lease of somebody else's", "lease")
    async def test_c082_of_somebody_else(self, bench: Bench) -> None:
        queue = await bench.queue()
        first, second = await lapsed(bench, queue)
        (renewal,) = await bench.t.renew([first], 10 * terms(bench).default)
        assert renewal.outcome == "lost"
        left = (second.lease_until or 0) - bench.now()
        assert left <= terms(bench).default.total_seconds()
        await bench.sleep(timedelta(seconds=left) + bench.late)
        assert len(await bench.t.pull(queue, most=1, wait=bench.late)) == 1

    @scenario("C-083", "the fence grows", "lease", "fenced")
    async def test_c083_the_fence_grows(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, b"x")
        fences: list[int] = []
        for _ in range(5):
            (got,) = await bench.t.pull(queue, most=1, wait=short(bench) + bench.late, lease=short(bench))
            assert got.fence is not None
            fences.append(got.fence)
        assert fences == sorted(set(fences))

    @scenario("C-084", "lapsed, and nobody else took it", "lease", "fenced")
    async def test_c084_nobody_else_took_it(self, bench: Bench) -> None:
        queue, lease = await bench.queue(), short(bench)
        await bench.send(queue, b"x")
        (held,) = await bench.t.pull(queue, most=1, wait=bench.settling, lease=lease)
        await bench.sleep(2 * lease)
        (answer,) = await bench.accept([held])
        assert answer in (DONE, STALE)
        await bench.drain(queue, 0 if answer is DONE else 1)

    @scenario("C-085", "a lease begins with the message", "lease")
    async def test_c085_begins_with_the_message(self, bench: Bench) -> None:
        queue, other, lease = await bench.queue(), await bench.open(), short(bench)

        async def send_later() -> None:
            await bench.sleep(2 * lease)
            await bench.send(queue, b"x", t=other)

        bench.soon(send_later())
        (held,) = await bench.t.pull(queue, most=1, wait=3 * lease + bench.late, lease=lease)
        began = bench.now()
        (again,) = await bench.t.pull(queue, most=1, wait=lease + bench.late, lease=lease)
        assert bench.now() - began >= lease.total_seconds() * 0.99
        assert again.message_id == held.message_id

    @scenario("C-086", "25 renewed at once, one of them lost", "lease")
    async def test_c086_renewed_at_once(self, bench: Bench) -> None:
        queue, lease = await bench.queue(), terms(bench).default
        await bench.send(queue, *numbered(25))
        held = await bench.take(queue, 25)
        assert await bench.requeue(held[7]) == [DONE]
        await bench.sleep(2 * bench.step)
        renewals = list(await bench.t.renew(held, lease))
        assert [renewal.outcome for renewal in renewals] == ["renewed"] * 7 + ["lost"] + ["renewed"] * 17
        for got, renewal in zip(held, renewals, strict=True):
            if renewal.outcome == "renewed":
                assert renewal.until is not None
                assert got.lease_until is not None
                assert renewal.until > got.lease_until

    @scenario("C-087", "a lease too short or too long", "lease")
    async def test_c087_too_short_or_too_long(self, bench: Bench) -> None:
        queue = await bench.queue()
        await bench.send(queue, b"x")
        held = await bench.take_one(queue)
        wrong = [terms(bench).shortest / 2] + [
            longest + terms(bench).step for longest in [terms(bench).longest] if longest != FOREVER
        ]
        bench.measured["longest lease"] = (
            "any" if terms(bench).longest == FOREVER else terms(bench).longest.total_seconds()
        )
        for lease in wrong:
            with pytest.raises(ConfigurationError, match="lease"):
                await bench.t.subscribe(queue, bench.sink(), prefetch=1, lease=lease)
            with pytest.raises(ConfigurationError, match="lease"):
                await bench.t.pull(queue, most=1, wait=NOW, lease=lease)
            with pytest.raises(ConfigurationError, match="lease"):
                await bench.t.renew([held], lease)

    @scenario("C-088", "two leases, each in its own time", "lease")
    async def test_c088_each_in_its_own_time(self, bench: Bench) -> None:
        queue, short_one, long_one = await bench.queue(), short(bench, 2), short(bench, 6)
        await bench.send(queue, b"long", b"short")
        began = bench.now()
        await bench.t.pull(queue, most=1, wait=bench.settling, lease=long_one)
        await bench.t.pull(queue, most=1, wait=bench.settling, lease=short_one)
        sink, _ = await bench.consume(queue)
        await bench.has(sink, 2, within=long_one + bench.late)
        assert sink.bodies == [b"short", b"long"]
        for at, lease in zip(sink.at, (short_one, long_one), strict=True):
            assert lease.total_seconds() * 0.99 <= at - began <= (lease + bench.late).total_seconds()
