"""The broker's words on what it has otherwise, as findings."""

from __future__ import annotations

import pytest

from acemq.errors import DriftError
from acemq.plan import Finding, refuse_drift
from acemq.topology import Declaration
from acemq.transports.rabbitmq.drift import drift_of

QUEUE = Declaration("queue", "it's: a queue")
HEAD = "PRECONDITION_FAILED - inequivalent arg"


@pytest.mark.parametrize(
    ("text", "argument", "wanted", "found"),
    [
        (
            f"{HEAD} 'x-message-ttl' for queue 'it's: a queue' in vhost '/': "
            "received the value '2000' of type 'signedint' but current is the value '1000' of type 'signedint'",
            "x-message-ttl",
            2000,
            1000,
        ),
        (
            f"{HEAD} 'x-max-length' for queue 'q' in vhost '/': "
            "received none but current is the value '5' of type 'long'",
            "x-max-length",
            None,
            5,
        ),
        (
            f"{HEAD} 'x-dead-letter-routing-key' for queue 'q' in vhost '/': received the value '17' of type 'longstr' "
            "but current is the value 'other' of type 'longstr'",
            "x-dead-letter-routing-key",
            "17",
            "other",
        ),
        (
            f"{HEAD} 'x-queue-type' for queue 'q' in vhost '/': "
            "received the value 'quorum' of type 'longstr' but current is none",
            "x-queue-type",
            "quorum",
            "classic",
        ),
        (
            f"{HEAD} 'durable' for queue 'q' in vhost '/': received 'false' but current is 'true'",
            "durable",
            False,
            True,
        ),
        (
            f"{HEAD} 'type' for exchange 'e' in vhost '/': received 'topic' but current is 'direct'",
            "type",
            "topic",
            "direct",
        ),
    ],
)
def test_argument_wanted_and_found_are_read(text: str, argument: str, wanted: object, found: object) -> None:
    drift = drift_of(QUEUE, text)
    assert (drift.argument, drift.wanted, drift.found) == (argument, wanted, found)
    with pytest.raises(DriftError, match=argument) as refused:
        refuse_drift([Finding(verdict="present", kind="queue", name="other"), drift])
    assert len(refused.value.problems) == 1
    assert len(refused.value.plan.findings) == 2


def test_words_that_are_not_known_are_shown_as_they_are() -> None:
    drift = drift_of(QUEUE, "PRECONDITION_FAILED - something new")
    assert (drift.verdict, drift.argument, drift.note) == ("drift", None, "PRECONDITION_FAILED - something new")
    with pytest.raises(DriftError, match="something new"):
        refuse_drift([drift])
