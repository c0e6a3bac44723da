"""What a URL can do, and what is wrong with it. It creates nothing and publishes nothing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Literal
from urllib.parse import urlsplit

import msgspec

from acemq.errors import (
    AcemqError,
    AuthenticationError,
    ConfigurationError,
    ConnectionFailedError,
    MissingExtraError,
    SecurityError,
)
from acemq.health import without_secrets
from acemq.mq import AceMQ, connect
from acemq.ops.abilities import ABILITIES, shown
from acemq.ops.queues import look_at_queues
from acemq.ops.words import counted
from acemq.security import is_loopback
from acemq.topology import Topology

Verdict = Literal["ok", "look", "wrong"]

_NOWHERE = "acemq.doctor"
"""A queue that nobody declares: asking for it makes the broker answer."""


class Symptom(msgspec.Struct, frozen=True):
    """One thing that was looked at. `look`: it works, and a person should know; `wrong`: it does not."""

    what: str
    verdict: Verdict
    detail: str


class Examination(msgspec.Struct, frozen=True):
    """What the doctor found."""

    symptoms: tuple[Symptom, ...]
    abilities: dict[str, str]
    """What the transport can do, in words; empty where it could not be asked."""
    notes: tuple[str, ...]
    """What should be known about the topology, and what the transport says of itself."""
    answered: bool
    """Somebody took the connection."""

    @property
    def is_well(self) -> bool:
        return all(symptom.verdict == "ok" for symptom in self.symptoms)


async def examine(url: str, topology: Topology | None = None, *, within: timedelta) -> Examination:
    """Dial, ask, compare with the topology if there is one, hang up. What it finds is no error; no secret is in it."""
    symptoms: list[Symptom] = []
    try:
        opening = connect(url, connect_timeout=within, name="acemq doctor")
    except ConfigurationError as error:
        what = "driver" if isinstance(error, MissingExtraError) else "URL"
        return Examination((Symptom(what, "wrong", without_secrets(str(error))),), {}, (), answered=False)
    began = time.monotonic()
    try:
        async with opening as mq:
            symptoms.append(Symptom("connection", "ok", f"{mq.state.endpoint}, in {_ms(time.monotonic() - began)}"))
            symptoms += _safety(url, mq)
            symptoms += await _answers(mq)
            advice: tuple[str, ...] = ()
            if topology is not None:
                found, advice = await _topology(mq, topology)
                symptoms += found
            can = mq.capabilities
            abilities = {what.replace("`", ""): shown(value(can)) for what, value in ABILITIES.items()}
            return Examination(tuple(symptoms), abilities, (*advice, *can.notes), answered=True)
    except (ConnectionFailedError, SecurityError) as error:
        detail = f"{without_secrets(str(error)).rstrip('.')}. {_advice(error)}"
        return Examination((*symptoms, Symptom("connection", "wrong", detail)), {}, (), answered=False)


def _advice(error: AcemqError) -> str:
    if isinstance(error, AuthenticationError):
        return "Are user, password and virtual host those of this broker?"
    if isinstance(error, SecurityError):
        return f"Mend {error.setting}"
    return "Does the broker run, are host, port and virtual host right, does a firewall stand between?"


def _safety(url: str, mq: AceMQ) -> list[Symptom]:
    scheme = url.partition("://")[0].lower()
    if not scheme.startswith("amqp"):
        return []
    hosts = [host.rpartition(":")[0].strip("[]") for host in mq.state.endpoint.partition("/")[0].split(",")]
    if scheme == "amqps":
        encrypted = Symptom("encryption", "ok", "TLS, and the certificate is checked")
    elif all(map(is_loopback, hosts)):
        encrypted = Symptom("encryption", "ok", "none, and nothing leaves this machine")
    else:
        encrypted = Symptom("encryption", "look", "none: passwords and messages can be read on the way; use amqps://")
    symptoms = [encrypted]
    if urlsplit(url).username in (None, "guest") and not all(map(is_loopback, hosts)):
        symptoms.append(Symptom("user", "look", "guest, whose password everybody knows; make a user of your own"))
    return symptoms


async def _answers(mq: AceMQ) -> list[Symptom]:
    took: list[float] = []
    for _ in range(5):
        began = time.monotonic()
        await mq.exists(_NOWHERE)
        took.append(time.monotonic() - began)
    health = await mq.health()
    symptoms = [Symptom("answers", "ok", f"within {_ms(max(took))}")]
    for part in health.parts:
        if part.status != "up" or part.detail:
            symptoms.append(Symptom(part.name, "look" if part.status == "up" else "wrong", part.detail))
    return symptoms


async def _topology(mq: AceMQ, topology: Topology) -> tuple[list[Symptom], tuple[str, ...]]:
    plan = await mq.plan(topology)
    symptoms = [
        Symptom(
            f"{finding.kind} {finding.name}",
            "wrong",
            "is missing; `acemq topology apply` makes it"
            if finding.verdict == "missing"
            else f"{finding.argument} is {finding.found!r}, and {finding.wanted!r} is described",
        )
        for finding in plan.findings
        if finding.verdict in ("missing", "drift")
    ]
    if not symptoms:
        symptoms.append(Symptom("topology", "ok", f"as described: {counted(len(plan.findings), 'object')}"))
    missing = {finding.name for finding in plan.findings if finding.verdict == "missing"}
    there = Topology(queues=tuple(queue for queue in topology.queues if queue.name not in missing))
    for line in await look_at_queues(mq, (), there) if there.queues else ():
        if line.needs_somebody:
            dead = counted(line.dead or 0, "dead letter")
            detail = f"{dead}, {line.parked or 0:,} parked; `acemq dlq ls {line.queue}`"
            symptoms.append(Symptom(f"queue {line.queue}", "look", detail))
    return symptoms, plan.advice


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f} ms"
