"""py-amqp, which blocks. With a window its confirms are counted as they come, since it has nothing to wait for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import amqp
import msgspec

from benches.order import Order, new_order
from benches.running import Figures, Task, meter_of, pump_blocking, serve


async def publish(task: Task) -> Figures:
    order, encoder = new_order(task.size), msgspec.json.Encoder()
    connection = _connect(task, confirm_publish=task.window == 1)
    channel = connection.channel()

    def send() -> None:
        message = amqp.Message(encoder.encode(order.stamped()), delivery_mode=2, content_type="application/json")
        channel.basic_publish(message, "", task.queue)

    figures = pump_windowed(send, connection, channel, task)
    connection.close()
    return figures


def pump_windowed(send: Callable[[], None], connection: Any, channel: Any, task: Task) -> Figures:
    """At most `task.window` unconfirmed. With a window of 1 `send` waits by itself."""
    if task.window == 1:
        return pump_blocking(send, task)
    sent = confirmed = 0

    def on_ack(tag: int, multiple: bool) -> None:
        nonlocal confirmed
        confirmed += tag - confirmed if multiple else 1

    def send_in_window() -> None:
        nonlocal sent
        send()
        sent += 1
        while sent - confirmed >= task.window or (sent == task.count and confirmed < sent):
            connection.drain_events()

    channel.confirm_select()
    channel.events["basic_ack"].add(on_ack)
    return pump_blocking(send_in_window, task)


async def consume(task: Task) -> Figures:
    meter, decoder = meter_of(task), msgspec.json.Decoder(Order)
    connection = _connect(task)
    channel = connection.channel()

    def handle(message: Any) -> None:
        meter.hit(decoder.decode(message.body).t)
        channel.basic_ack(message.delivery_tag)

    channel.basic_qos(0, task.prefetch, False)
    channel.basic_consume(task.queue, callback=handle)
    while not meter.over.is_set():
        connection.drain_events(timeout=task.limit)
    connection.close()
    return meter.figures()


def _connect(task: Task, **options: object) -> Any:
    url = urlsplit(task.url)
    connection = amqp.Connection(f"{url.hostname}:{url.port}", userid=url.username, password=url.password, **options)
    connection.connect()
    return connection


if __name__ == "__main__":
    serve({"publish": publish, "consume": consume})
