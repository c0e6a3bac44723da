"""aio-pika as its documentation shows it, with msgspec for the JSON, so that its codec costs what ours does."""

from __future__ import annotations

from collections.abc import Awaitable

import aio_pika
import msgspec
from aio_pika.abc import AbstractIncomingMessage

from benches.order import Order, new_order
from benches.running import Figures, Task, meter_of, pump, serve


async def publish(task: Task) -> Figures:
    order, encoder = new_order(task.size), msgspec.json.Encoder()
    async with await aio_pika.connect_robust(task.url) as connection:
        exchange = (await connection.channel()).default_exchange

        def send_one() -> Awaitable[object]:
            message = aio_pika.Message(
                encoder.encode(order.stamped()),
                delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
                content_type="application/json",
            )
            return exchange.publish(message, task.queue)

        return await pump(send_one, task)


async def consume(task: Task) -> Figures:
    meter, decoder = meter_of(task), msgspec.json.Decoder(Order)

    async def handle(message: AbstractIncomingMessage) -> None:
        meter.hit(decoder.decode(message.body).t)
        await message.ack()

    async with await aio_pika.connect_robust(task.url) as connection:
        channel = await connection.channel()
        await channel.set_qos(task.prefetch)
        queue = await channel.get_queue(task.queue, ensure=False)
        await queue.consume(handle)
        await meter.over.wait()
    return meter.figures()


if __name__ == "__main__":
    serve({"publish": publish, "consume": consume, "receive": consume})
