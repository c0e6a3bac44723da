"""One answer serves both sockets of a connection, and none of them twice."""

from __future__ import annotations

import asyncio
import threading
from datetime import timedelta

import pytest

from acemq.clock import MovableClock
from acemq.errors import SecurityError
from acemq.security import Credentials, CredentialsSource
from acemq.transport import NotConnected
from acemq.transports.rabbitmq.address import parse
from acemq.transports.rabbitmq.login import Login


class Vault:
    """Counts how often it is asked, and answers when it may."""

    def __init__(self) -> None:
        self.asked = 0
        self.open = asyncio.Event()
        self.open.set()

    async def __call__(self) -> Credentials:
        self.asked += 1
        answer = Credentials("svc", f"{self.asked}")
        await self.open.wait()
        return answer


def login(source: CredentialsSource | None, clock: MovableClock | None = None) -> Login:
    return Login(parse("amqp://url-user:url-password@h"), source, None, clock or MovableClock())


async def test_without_a_source_the_url_counts() -> None:
    assert await login(None).credentials("publish") == Credentials("url-user", "url-password")


async def test_an_answer_serves_each_link_once() -> None:
    vault = Vault()
    one = login(vault)
    first = await asyncio.gather(one.credentials("publish"), one.credentials("consume"))
    assert [each.password for each in first] == ["1", "1"]
    assert [(await one.credentials(link)).password for link in ("consume", "publish")] == ["2", "2"]
    assert (await one.credentials("publish")).password == "3"
    assert (await one.credentials("publish")).password == "4"


async def test_an_answer_that_is_old_serves_nobody() -> None:
    vault, clock = Vault(), MovableClock()
    one = login(vault, clock)
    await one.credentials("publish")
    await clock.advance(timedelta(seconds=2))
    assert (await one.credentials("consume")).password == "2"


async def test_a_link_that_gives_up_takes_the_answer_from_nobody() -> None:
    vault, clock = Vault(), MovableClock()
    vault.open.clear()
    one = login(vault, clock)
    publish = asyncio.create_task(one.credentials("publish"))
    await clock.advance(timedelta(seconds=5))
    consume = asyncio.create_task(one.credentials("consume"))  # still being asked: joined
    await clock.rest()
    publish.cancel()
    again = asyncio.create_task(one.credentials("publish"))  # served already: asked anew
    await clock.rest()
    vault.open.set()
    assert ((await consume).password, (await again).password) == ("1", "2")
    assert publish.cancelled() or publish.cancelling()
    assert vault.asked == 2


async def test_closing_leaves_no_question_behind() -> None:
    vault = Vault()
    vault.open.clear()
    one = login(vault)
    waiting = asyncio.create_task(one.credentials("publish"))
    await asyncio.sleep(0)
    one.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_plain_function_is_asked_in_a_thread() -> None:
    threads: list[threading.Thread] = []

    def plain() -> Credentials:
        threads.append(threading.current_thread())
        return Credentials("svc", "pw")

    assert await login(plain).credentials("publish") == Credentials("svc", "pw")
    assert threads != [threading.main_thread()]


async def test_a_source_that_says_no_is_believed_and_one_that_fails_is_named_without_its_text() -> None:
    def says_no() -> Credentials:
        raise SecurityError("no such secret", setting="credentials")

    def fails() -> Credentials:
        raise ValueError("s3cret")

    with pytest.raises(SecurityError, match="no such secret"):
        await login(says_no).credentials("publish")
    with pytest.raises(NotConnected, match="raised ValueError") as failed:
        await login(fails).credentials("publish")
    assert failed.value.__context__ is None
