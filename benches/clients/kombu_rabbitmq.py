"""kombu, which stands on py-amqp."""

from __future__ import annotations

from typing import Any

import kombu
import msgspec

from benches.clients.py_amqp import pump_windowed
from benches.order import Order, new_order
from benches.running import Figures, Task, meter_of, serve


async def publish(task: Task) -> Figures:
    order, encoder = new_order(task.size), msgspec.json.Encoder()
    with kombu.Connection(task.url, transport_options={"confirm_publish": task.window == 1}) as connection:
        channel = connection.channel()
        producer = kombu.Producer(channel, auto_declare=False)

        def send() -> None:
            producer.publish(
                encoder.encode(order.stamped()),
                routing_key=task.queue,
                delivery_mode=2,
                content_type="application/json",
                content_encoding="utf-8",
            )

        return pump_windowed(send, connection, channel, task)


async def consume(task: Task) -> Figures:
    meter, decoder = meter_of(task), msgspec.json.Decoder(Order)

    def handle(message: Any) -> None:
        meter.hit(decoder.decode(message.body).t)
        message.ack()

    with kombu.Connection(task.url) as connection:
        queue = kombu.Queue(task.queue, no_declare=True)
        channel = connection.channel()
        with kombu.Consumer(
            channel, [queue], on_message=handle, prefetch_count=task.prefetch, accept=["json"], auto_declare=False
        ):
            while not meter.over.is_set():
                connection.drain_events(timeout=task.limit)
    return meter.figures()


if __name__ == "__main__":
    serve({"publish": publish, "consume": consume})
