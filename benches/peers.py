"""The rest of the libraries that a Python program could take for RabbitMQ. Measured now and then, for the page."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from msgspec.structs import replace

from benches.rabbitmq import AIO_PIKA, AWAITED, CONSUME, OURS, OUTSTANDING, PREFETCH, Candidate, consume, publish
from benches.rabbitmq import candidates as usual
from benches.rounds import Measure
from benches.running import Task, python_client
from benches.targets import Target

TARGETS: Sequence[Target] = ()
"""Nothing is promised beside these."""


def _client(module: str, *, declares: bool = False) -> Candidate:
    return Candidate(command=partial(python_client, module), declares=declares)


CLIENTS = {
    **{name: usual(None)[name] for name in (OURS, AIO_PIKA)},
    "py-amqp": _client("py_amqp"),
    "kombu": _client("kombu_rabbitmq"),
    "pika, blocking": _client("pika_rabbitmq"),
    "Taskiq": _client("taskiq_rabbitmq", declares=True),
    "Celery, solo": _client("celery_rabbitmq", declares=True),
    "Dramatiq, one thread": _client("dramatiq_rabbitmq", declares=True),
}
CAN_KEEP_MANY_OUTSTANDING = (OURS, AIO_PIKA, "py-amqp", "kombu", "Taskiq")


def measures(url: str, *, quick: bool = False) -> Sequence[Measure]:
    limit = 3.0 if quick else 8.0
    base = Task(job="publish", url=url, queue="bench", prefetch=PREFETCH, count=300 if quick else 2_000, limit=limit)
    outstanding = replace(base, count=3_000 if quick else 20_000, window=256)
    consuming = replace(base, job="consume", count=3_000 if quick else 30_000)
    return (
        Measure(name=AWAITED, candidates={name: partial(publish, each, base) for name, each in CLIENTS.items()}),
        Measure(
            name=OUTSTANDING,
            candidates={name: partial(publish, CLIENTS[name], outstanding) for name in CAN_KEEP_MANY_OUTSTANDING},
        ),
        Measure(name=CONSUME, candidates={name: partial(consume, each, consuming) for name, each in CLIENTS.items()}),
    )
