"""The error tree is the one that is drawn at the top of `acemq/errors.py`, and every error keeps its facts."""

from __future__ import annotations

import builtins
import copy
import pickle
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest

import acemq
from acemq import errors, transport
from acemq.plan import Finding, Plan

WHERE: dict[str, Any] = {"exchange": "ex", "routing_key": "k", "message_id": "m-1", "code": 312}

SAMPLES: dict[str, errors.AcemqError] = {
    type(sample).__name__: sample
    for sample in (
        errors.AcemqError("something"),
        errors.ConfigurationError("a bad argument"),
        errors.MissingExtraError("redis://", "redis"),
        errors.CapabilityError("aws", "exclusive consumers", "exclusive=True", "Leave it out"),
        errors.SecurityError("ca_file cannot be read", setting="ca_file"),
        errors.TopologyError("no such queue", "no such exchange"),
        errors.DriftError(Plan((Finding(verdict="drift", kind="queue", name="q"),)), "q has x-max-length 10, not 20"),
        errors.HandlerTypeError("a handler of the wrong shape"),
        errors.PipelineTypeError("price", "Order", "Invoice", "'price' takes Order, but 'check' gives Invoice"),
        errors.PartitionCountError("keys would move", name="ledger", wanted=8, found=4),
        errors.IdempotencyConflictError("m-1"),
        errors.LeaseLostError("m-1", 7),
        errors.ConnectionFailedError("nobody there", hosts=["a:5672", "b:5672"], last="refused"),
        errors.AuthenticationError("not you", hosts=["a:5672"], last="403"),
        errors.ClosedError("closed"),
        errors.LoopError("another loop"),
        errors.PublishError("not there", **WHERE),
        errors.PublishRefusedError("not written", **WHERE),
        errors.BlockedError("blocked", reason="low on memory", **WHERE),
        errors.PublishingPausedError("paused", **WHERE),
        errors.MessageTooLargeError("too large", size=11, limit=10, **WHERE),
        errors.UnroutableError("nowhere", reason="NO_ROUTE", **WHERE),
        errors.PublishFailedError("perhaps", nacked=True, **WHERE),
        errors.ReplayError("stopped", result=("orders.dlq", 3), **WHERE),
        errors.BatchPublishError(["receipt", errors.PublishRefusedError("not written", **WHERE)]),
        errors.CodecError("between payload and bytes"),
        errors.EncodeError("cannot be written"),
        errors.DecodeError("cannot be read", content_type="application/json"),
        errors.FatalError("never"),
        errors.RouteError("leads nowhere"),
        errors.ClaimStoreError("the store is down"),
        errors.DecryptError("cannot be decrypted", key_id="k-1", content_type="application/vnd.acemq.encrypted"),
        errors.HandlerTimeoutError(timedelta(seconds=5)),
        errors.RequestTimeoutError("no answer", message_id="m-1", after=timedelta(seconds=5)),
        errors.ResponderError("no such sku"),
    )
}


# The drawing


@dataclass(frozen=True)
class Drawn:
    name: str
    parent: str | None
    also: str | None
    attributes: tuple[str, ...]


LINE = re.compile(r"(?P<indent>[│├└─ ]*)(?P<name>\w+)(?: \((?:also )?(?P<also>\w+)\))?(?:  +(?P<said>.*))?")


def drawn() -> Iterator[Drawn]:
    assert errors.__doc__ is not None
    above: list[str] = []
    for line in errors.__doc__.splitlines():
        found = LINE.fullmatch(line)
        if not found or not (line.startswith(("│", "├", "└")) or line == "AcemqError"):
            continue
        depth = len(found["indent"]) // 4
        del above[depth:]
        attributes = tuple(re.findall(r"(?<=\s)\.(\w+)", f" {found['said'] or ''}"))
        yield Drawn(found["name"], above[-1] if above else None, found["also"], attributes)
        above.append(found["name"])


TREE = {row.name: row for row in drawn()}


def test_the_drawing_has_every_error_and_no_other() -> None:
    defined = {
        name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, BaseException)
    }
    assert TREE.keys() == defined == set(errors.__all__) == SAMPLES.keys()


@pytest.mark.parametrize("name", TREE)
def test_an_error_stands_in_the_tree_where_it_is_drawn(name: str) -> None:
    row, kind = TREE[name], getattr(errors, name)
    if row.parent is None:
        assert kind.__bases__ == (Exception,)
        return
    expected = {getattr(errors, row.parent)}
    if row.also:
        expected.add(getattr(errors, row.also, None) or getattr(builtins, row.also))
    assert set(kind.__bases__) == expected


@pytest.mark.parametrize("name", TREE)
def test_an_error_has_the_facts_that_are_drawn(name: str) -> None:
    sample = SAMPLES[name]
    for attribute in TREE[name].attributes:
        assert getattr(sample, attribute) is not None


def test_the_facts_are_read_from_the_drawing_at_all() -> None:
    assert TREE["PublishError"].attributes == ("exchange", "routing_key", "message_id", "outcome", "code")
    assert TREE["BatchPublishError"].attributes == ("results", "confirmed", "failed", "safe_to_resend")
    assert TREE["DecodeError"].also == "FatalError"


@pytest.mark.parametrize("name", TREE)
def test_an_error_is_public(name: str) -> None:
    assert getattr(acemq, name) is getattr(errors, name)


# Each error


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
def test_an_error_can_be_raised_caught_by_the_root_and_printed(sample: errors.AcemqError) -> None:
    with pytest.raises(errors.AcemqError) as raised:
        raise sample
    assert raised.value is sample
    assert str(sample)
    assert type(sample).__name__ in "".join(traceback.format_exception(sample))


@pytest.mark.parametrize("sample", SAMPLES.values(), ids=SAMPLES)
@pytest.mark.parametrize(
    "again", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
def test_an_error_survives_pickling_with_all_its_facts(sample: errors.AcemqError, again: Any) -> None:
    other = again(sample)
    assert type(other) is type(sample)
    assert str(other) == str(sample)
    assert other.args == sample.args
    assert _shown(vars(other)) == _shown(vars(sample))


def _shown(facts: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in facts.items()}


def test_every_error_of_the_port_survives_pickling_too() -> None:
    more: dict[str, dict[str, Any]] = {
        "BadHeader": {"name": "tenant"},
        "MessageTooLarge": {"size": 11, "limit": 10},
        "ServerTooOld": {"found": "3.8", "wanted": "3.13"},
    }
    kinds = [k for k in vars(transport).values() if isinstance(k, type) and issubclass(k, transport.TransportError)]
    assert len(kinds) > 10
    for kind in kinds:
        error = kind("text", **more.get(kind.__name__, {"code": 404}))
        other = pickle.loads(pickle.dumps(error))
        assert (type(other), str(other), vars(other)) == (kind, "text", vars(error))


def test_a_publish_error_says_in_a_word_how_it_ended() -> None:
    outcomes = {name: sample.outcome for name, sample in SAMPLES.items() if isinstance(sample, errors.PublishError)}
    assert {name for name, word in outcomes.items() if word == "refused"} == {
        "PublishRefusedError",
        "BlockedError",
        "PublishingPausedError",
        "MessageTooLargeError",
    }
    assert outcomes["UnroutableError"] == "unroutable"
    assert outcomes["PublishFailedError"] == outcomes["ReplayError"] == "failed"


def test_a_batch_says_whether_sending_the_failed_ones_again_is_safe() -> None:
    refused, failed = SAMPLES["PublishRefusedError"], SAMPLES["PublishFailedError"]
    safe = errors.BatchPublishError(["receipt", refused, SAMPLES["EncodeError"]])
    assert (safe.confirmed, safe.failed, safe.safe_to_resend) == (1, 2, True)
    unsafe = errors.BatchPublishError([refused, failed])
    assert (unsafe.confirmed, unsafe.failed, unsafe.safe_to_resend) == (0, 2, False)
    assert "2 of 2" in str(unsafe)


def test_a_missing_extra_says_what_to_install() -> None:
    assert 'pip install "acemq[redis]"' in str(SAMPLES["MissingExtraError"])
