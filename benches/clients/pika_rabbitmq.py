"""pika with its blocking connection, which awaits each confirm by itself."""

from __future__ import annotations

import msgspec
import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.spec import Basic, BasicProperties

from benches.order import Order, new_order
from benches.running import Figures, Task, meter_of, pump_blocking, serve


async def publish(task: Task) -> Figures:
    order, encoder = new_order(task.size), msgspec.json.Encoder()
    properties = BasicProperties(delivery_mode=2, content_type="application/json")
    connection = pika.BlockingConnection(pika.URLParameters(task.url))
    channel = connection.channel()
    channel.confirm_delivery()
    figures = pump_blocking(
        lambda: channel.basic_publish("", task.queue, encoder.encode(order.stamped()), properties), task
    )
    connection.close()
    return figures


async def consume(task: Task) -> Figures:
    meter, decoder = meter_of(task), msgspec.json.Decoder(Order)

    def handle(channel: BlockingChannel, method: Basic.Deliver, properties: BasicProperties, body: bytes) -> None:
        meter.hit(decoder.decode(body).t)
        channel.basic_ack(method.delivery_tag or 0)
        if meter.over.is_set():
            channel.stop_consuming()

    connection = pika.BlockingConnection(pika.URLParameters(task.url))
    channel = connection.channel()
    channel.basic_qos(prefetch_count=task.prefetch)
    channel.basic_consume(task.queue, handle)
    channel.start_consuming()
    connection.close()
    return meter.figures()


if __name__ == "__main__":
    serve({"publish": publish, "consume": consume})
