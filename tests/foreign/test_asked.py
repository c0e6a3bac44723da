"""Requests and answers between us and another client: CONTRACT.md section 9."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from acemq import AceMQ, Message, ResponderError, Topology
from tests.foreign.client import Foreign, Letter, Refused
from tests.waiting import until


async def asked(mq: AceMQ, foreign: Foreign, queue: str, payload: object = 1) -> tuple[asyncio.Task[Any], Letter]:
    """A request of ours, and the letter in which another client finds it."""
    asking = asyncio.create_task(mq.request("", queue, payload, dict[str, int], type="quote.requested"))
    await until(lambda: foreign.depth(queue) == 1)
    return asking, foreign.take_one(queue)


async def test_another_client_reads_the_address_twice_and_one_id(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    asking, letter = await asked(mq, foreign, queue)
    address = letter.properties["reply_to"]
    assert address.startswith("acemq.reply.")
    assert letter.headers["acemq-reply-to"] == address
    assert letter.headers["x-acemq-correlation"] == letter.headers["x-acemq-id"] == letter.properties["message_id"]
    assert letter.headers["x-acemq-type"] == "quote.requested"
    assert "correlation_id" not in letter.properties
    foreign.declare(address, **{"x-expires": 600_000})  # durable and classic, with this argument and no other
    with pytest.raises(Refused, match="PRECONDITION_FAILED"):
        foreign.declare(address)
    asking.cancel()


async def test_an_answer_of_another_client_matches_by_its_correlation_header_alone(
    mq: AceMQ, foreign: Foreign, queue: str
) -> None:
    asking, letter = await asked(mq, foreign, queue)
    address = letter.properties["reply_to"]
    foreign.put(address, b'{"pence":1}', {"x-acemq-correlation": "somebody-elses"}, correlation_id=letter.id)
    foreign.put(
        address,
        b'{"pence":5}',
        {"x-acemq-correlation": letter.headers["x-acemq-correlation"], "x-acemq-id": "their-own"},
        content_type="application/json",
    )
    assert await asking == {"pence": 5}
    assert mq.requests.unmatched == 1
    assert foreign.depth(address) == 0


async def test_an_error_answer_of_another_client_is_an_error_here(mq: AceMQ, foreign: Foreign, queue: str) -> None:
    asking, letter = await asked(mq, foreign, queue)
    headers = {"x-acemq-correlation": letter.id, "acemq-error": "LookupError: no such sku"}
    foreign.put(letter.headers["acemq-reply-to"], b"null", headers, content_type="application/json")
    with pytest.raises(ResponderError, match="no such sku"):
        await asking


@pytest.mark.parametrize("where", ["header", "property"])
async def test_another_client_is_answered_with_its_correlation_and_its_id_as_the_cause(
    mq: AceMQ, foreign: Foreign, queue: str, name: str, where: str
) -> None:
    theirs = f"{name}-theirs"
    await mq.declare(Topology().queue(theirs, type="classic"))
    headers = {"x-acemq-id": "req-1", "x-acemq-correlation": "corr-9", "x-acemq-type": "quote.requested"}
    properties: dict[str, Any] = {"content_type": "application/json", "correlation_id": "not read"}
    if where == "header":
        headers["acemq-reply-to"] = theirs
    else:
        properties["reply_to"] = theirs

    async def quote(message: Message[dict[str, str]]) -> dict[str, int]:
        return {"pence": len(message.payload["sku"])}

    async with mq.respond(queue, dict[str, str], quote) as responder:
        foreign.put(queue, b'{"sku":"abc"}', headers, **properties)
        await until(lambda: responder.answered == 1 and foreign.depth(theirs) == 1)
    answer = foreign.take_one(theirs)
    assert answer.body == b'{"pence":3}'
    assert (answer.exchange, answer.routing_key) == ("", theirs)
    assert answer.properties == {
        "content_type": "application/json",
        "delivery_mode": 2,
        "message_id": answer.id,
    }
    assert answer.headers["x-acemq-correlation"] == "corr-9"
    assert answer.headers["x-acemq-causation"] == "req-1"
    assert answer.id not in ("req-1", "corr-9")
    assert "acemq-error" not in answer.headers
    foreign.delete(theirs)


async def test_another_client_reads_the_text_of_a_failure(mq: AceMQ, foreign: Foreign, queue: str, name: str) -> None:
    theirs = f"{name}-theirs"
    await mq.declare(Topology().queue(theirs, type="classic"))

    async def fail(message: Message[int]) -> int:
        raise ValueError("no such sku")

    async with mq.respond(queue, int, fail) as responder:
        foreign.put(queue, b"1", {"x-acemq-id": "req-1"}, reply_to=theirs, content_type="application/json")
        await until(lambda: responder.counters.dead_lettered == 1)
    answer = foreign.take_one(theirs)
    assert answer.body == b"null"
    assert answer.headers["acemq-error"] == "no such sku"
    assert (answer.headers["x-acemq-correlation"], answer.headers["x-acemq-causation"]) == ("req-1", "req-1")
    letter = foreign.take_one(f"{queue}.dlq")
    assert letter.headers["x-acemq-error"] == "exhausted 1 attempt: no such sku"
    foreign.delete(theirs)
