"""Celery: confirmed sends, and a worker in this process that acknowledges after the task."""

from __future__ import annotations

import os
from typing import Any

import msgspec
from celery import Celery
from kombu import Queue

from benches.order import new_order
from benches.running import Figures, Meter, Task, meter_of, pump_blocking, serve


def _job_of(task: Task, meter: Meter) -> tuple[Any, Any]:
    app: Any = Celery("bench", broker=task.url)
    app.conf.update(
        broker_connection_retry_on_startup=False,
        broker_transport_options={"confirm_publish": True},
        task_acks_late=True,
        task_default_queue=task.queue,
        task_ignore_result=True,
        task_queues=[Queue(task.queue, durable=True, queue_arguments={"x-queue-type": "classic"})],
        task_send_sent_event=False,
        worker_enable_remote_control=False,
        worker_hijack_root_logger=False,
        worker_prefetch_multiplier=task.prefetch,
        worker_redirect_stdouts=False,
        worker_send_task_events=False,
    )

    def job(document: dict[str, Any]) -> None:
        meter.hit(document["t"])
        if meter.over.is_set():
            # It has no way to end from within a task, so it ends here, with what it was to print.
            print(msgspec.json.encode(meter.figures()).decode(), flush=True)
            os._exit(0)

    return app, app.task(name="job")(job)


async def publish(task: Task) -> Figures:
    order = new_order(task.size)
    document = msgspec.to_builtins(order)
    _, job = _job_of(task, meter_of(task))

    def send() -> None:
        document["t"] = order.stamped().t
        job.apply_async((document,))

    return pump_blocking(send, task)


async def consume(task: Task) -> Figures:
    app, _ = _job_of(task, meter_of(task))
    quiet = ["--without-gossip", "--without-mingle", "--without-heartbeat"]
    app.worker_main(["--quiet", "worker", "--pool", "solo", "--loglevel", "ERROR", *quiet])
    raise AssertionError("the worker ended by itself")


if __name__ == "__main__":
    serve({"publish": publish, "consume": consume})
