"""Dramatiq: confirmed sends, and a worker of one thread in this process."""

from __future__ import annotations

import os
import threading
from typing import Any

import msgspec

from benches.order import new_order
from benches.running import Figures, Meter, Task, meter_of, pump_blocking, serve


def _job_of(task: Task, meter: Meter, over: threading.Event) -> tuple[Any, Any]:
    os.environ["dramatiq_queue_prefetch"] = str(task.prefetch)  # noqa: SIM112 - read so, on import
    import dramatiq
    from dramatiq.brokers.rabbitmq import RabbitmqBroker

    def job(document: dict[str, Any]) -> None:
        meter.hit(document["t"])
        if meter.messages >= task.count or meter.late:
            if not meter.over.is_set():
                meter.stop()
            over.set()

    broker: Any = RabbitmqBroker(url=task.url, confirm_delivery=True)
    dramatiq.set_broker(broker)
    return broker, dramatiq.actor(queue_name=task.queue, max_retries=0)(job)


async def publish(task: Task) -> Figures:
    order = new_order(task.size)
    document = msgspec.to_builtins(order)
    broker, job = _job_of(task, meter_of(task), threading.Event())

    def send() -> None:
        document["t"] = order.stamped().t
        job.send(document)

    figures = pump_blocking(send, task)
    broker.close()
    return figures


async def consume(task: Task) -> Figures:
    import dramatiq

    meter, over = meter_of(task), threading.Event()
    broker, _ = _job_of(task, meter, over)
    worker = dramatiq.Worker(broker, worker_threads=1)
    worker.start()
    over.wait()
    figures = meter.figures()
    worker.stop()
    broker.close()
    return figures


if __name__ == "__main__":
    serve({"publish": publish, "consume": consume})
