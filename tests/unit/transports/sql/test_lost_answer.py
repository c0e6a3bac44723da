"""A settlement whose answer was lost: what is known of it, and what is not."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from acemq.clock import MovableClock
from acemq.topology import Topology
from acemq.transport import ApplyMode, NotConnected, Outgoing, Settled, Settlement, Verb
from acemq.transports.sql import transport

SOON = timedelta(seconds=5)


@pytest.mark.parametrize(("later", "answer"), [(0, Settled.DONE), (31, Settled.STALE)])
async def test_within_its_lease_what_is_gone_was_settled_by_us_and_after_it_nobody_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, later: int, answer: Settled
) -> None:
    clock = MovableClock()
    port: Any = transport(f"sqlite:///{tmp_path / 'mq.db'}?lease=30", clock=clock)
    await port.open(within=SOON)
    await port.apply(Topology().queue("q"), ApplyMode.CREATE)
    message = Outgoing(exchange="", routing_key="q", body=b"x", headers={}, message_id="1", content_type=None)
    await port.publish([message], within=SOON)
    (delivery,) = await port.pull("q", most=1, wait=timedelta(0))
    start, answers = port._running.link.start, 0

    async def lossy(*work: Any, **how: Any) -> Any:
        nonlocal answers
        done, answers = await start(*work, **how), answers + 1
        if answers == 1:
            raise NotConnected("the answer was lost")
        return done

    monkeypatch.setattr(port._running.link, "start", lossy)
    await clock.advance(timedelta(seconds=later))
    assert await port.settle([Settlement(delivery, Verb.ACCEPT)]) == [answer]
    assert (await port.depth("q")).held == 0
    await port.close(SOON)
