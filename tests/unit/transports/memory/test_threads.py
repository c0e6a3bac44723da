from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

from acemq.clock import SYSTEM
from acemq.topology import Topology
from acemq.transport import ApplyMode, Delivery, Settled, Settlement, Transport, Verb
from acemq.transports.memory import transport
from tests.unit.transports.memory.playing import SECOND, Calling, outgoing

COUNT = 2000


async def play(port: Transport, sends: str, receives: str) -> list[bytes]:
    """Send to one queue and consume another, at once; what was received, in order."""
    thread = threading.get_ident()
    done, received = asyncio.Event(), list[bytes]()
    await port.open(within=SECOND)
    await port.apply(Topology().queue(sends).queue(receives), ApplyMode.CREATE)

    def accept(delivery: Delivery) -> None:
        assert threading.get_ident() == thread
        received.append(delivery.body)
        settling.add(asyncio.ensure_future(port.settle([Settlement(delivery, Verb.ACCEPT)])))
        if len(received) == COUNT:
            done.set()

    settling = set[asyncio.Future[Sequence[Settled]]]()
    await port.subscribe(receives, Calling(accept), prefetch=50)
    for n in range(COUNT):
        await port.publish([outgoing(b"%d" % n, to=sends)], within=SECOND)
        if not n % 10:
            await asyncio.sleep(0)
    await asyncio.wait_for(done.wait(), 10)
    await asyncio.gather(*settling)
    await port.close()
    return received


def test_two_loops_share_a_broker_and_nothing_is_lost_doubled_or_called_on_a_foreign_one() -> None:
    ports = [transport("memory://threads") for _ in range(2)]
    results: list[list[bytes]] = []

    def run(port: Transport, sends: str, receives: str) -> None:
        results.append(asyncio.run(play(port, sends, receives)))

    threads = [
        threading.Thread(target=run, args=(ports[0], "there", "back")),
        threading.Thread(target=run, args=(ports[1], "back", "there")),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert results == [[b"%d" % n for n in range(COUNT)]] * 2


def test_the_timer_moves_to_another_loop_when_its_own_ends() -> None:
    port, other = transport("memory://timers"), transport("memory://timers")

    async def first() -> None:
        await port.open(within=SECOND)
        await port.apply(Topology().queue("orders"), ApplyMode.CREATE)
        waiting = asyncio.ensure_future(port.pull("orders", most=1, wait=10 * SECOND))
        await asyncio.to_thread(asyncio.run, second())
        began = SYSTEM.monotonic()
        assert len(await waiting) == 1
        assert SYSTEM.monotonic() - began < 5
        await port.close()

    async def second() -> None:
        await other.open(within=SECOND)
        await other.publish([outgoing(delay=SECOND / 50)], within=SECOND)
        await other.close()

    asyncio.run(first())
