"""acemq with some of its promises left out: on its transport alone, and below that on the lane."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import timedelta

import msgspec

import acemq
from acemq import Message
from acemq.clock import SYSTEM
from acemq.ids import new_id
from acemq.opening import transport_for
from acemq.transport import Delivery, LostBy, Outgoing, Published, Settlement, SubscriptionState, Transport, Verb
from acemq.transports.rabbitmq import session
from acemq.transports.rabbitmq.address import parse
from acemq.transports.rabbitmq.frames import PublishFrames
from acemq.transports.rabbitmq.lane import End
from acemq.transports.rabbitmq.login import Login
from benches.order import Order, new_order, orders
from benches.running import Figures, Meter, Task, pump, serve

CONFIRMS, MANDATORY, ENVELOPE, TRACING, METRICS = "confirms", "mandatory", "envelope", "tracing", "metrics"
WITHIN = timedelta(seconds=30)


async def publish(task: Task) -> Figures:
    if CONFIRMS not in task.promises:
        return await _unconfirmed(task)
    _watch(task.promises)
    order, encoder = new_order(), msgspec.json.Encoder()
    if ENVELOPE in task.promises:
        async with acemq.connect(task.url) as mq:
            return await pump(lambda: mq.send(task.queue, order.stamped()), task)

    async def send() -> None:
        message = _outgoing(task, encoder.encode(order.stamped()))
        (result,) = await transport.publish((message,), within=WITHIN)
        assert result.outcome is Published.ROUTED, result.error

    transport = await _opened(task)
    try:
        return await pump(send, task)
    finally:
        await transport.close(grace=timedelta(seconds=1))


def _outgoing(task: Task, body: bytes) -> Outgoing:
    return Outgoing(
        exchange="",
        routing_key=task.queue,
        body=body,
        headers={},
        message_id=new_id(),
        content_type="application/json",
        mandatory=MANDATORY in task.promises,
    )


async def _unconfirmed(task: Task) -> Figures:
    """Frames on a channel without confirms. The clock stops when the broker has read the last of them."""
    order, encoder, meter = new_order(), msgspec.json.Encoder(), Meter(task.count, task.limit)
    address = parse(task.url)
    login = Login(address, None, None, SYSTEM)
    link = await session.dial(address, address.hosts[0], "bench", login, lambda _: None)
    channel = await link.channel(_Deaf())
    frames = PublishFrames(channel.number, link.frame_max)
    meter.start()
    while meter.messages < task.count and not meter.late:
        for _ in range(task.window):
            link.lane.gathered(frames.append_to(link.lane.out, _outgoing(task, encoder.encode(order.stamped()))))
        meter.messages += task.window
        await asyncio.sleep(0)
        while link.lane.is_congested:
            await link.lane.writable.heard()
    link.lane.flush()
    await channel.queue_declare(task.queue, passive=True)
    meter.stop()
    await link.close(1)
    login.close()
    return meter.figures()


class _Deaf:
    """The taker of a channel on which nothing comes."""

    def method(self, method: int, arguments: bytes) -> bool:
        return False

    def content(self, properties: bytes, body: bytes) -> None: ...

    def ended(self, end: End) -> None: ...


async def fill(task: Task) -> Figures:
    _watch(task.promises)
    async with acemq.connect(task.url) as mq:
        receipts = await mq.send_many(task.queue, orders(task.count))
    return {"messages": len(receipts)}


async def consume(task: Task) -> Figures:
    meter = Meter(task.count, task.limit)
    if ENVELOPE not in task.promises:
        return await _deliveries(task, meter)
    _watch(task.promises)

    async def handle(message: Message[Order]) -> None:
        assert message.id
        meter.hit(message.payload.t)

    async with acemq.connect(task.url) as mq:
        async with mq.consume(task.queue, Order, handle, prefetch=task.prefetch):
            await meter.over.wait()
    return meter.figures()


async def _deliveries(task: Task, meter: Meter) -> Figures:
    """What the transport hands out, decoded and acknowledged, and nothing else."""
    transport = await _opened(task)
    sink = _Sink(transport, meter)
    subscription = await transport.subscribe(task.queue, sink, prefetch=task.prefetch)
    try:
        await sink.work()
    finally:
        await subscription.close()
        await transport.close(grace=timedelta(seconds=1))
    return meter.figures()


class _Sink:
    def __init__(self, transport: Transport, meter: Meter) -> None:
        self._transport, self._meter = transport, meter
        self._arrived: asyncio.Queue[Delivery] = asyncio.Queue()
        self._decoder = msgspec.json.Decoder(Order)

    def deliver(self, batch: Sequence[Delivery], /) -> None:
        for delivery in batch:
            self._arrived.put_nowait(delivery)

    async def work(self) -> None:
        while not self._meter.over.is_set():
            delivery = await self._arrived.get()
            self._meter.hit(self._decoder.decode(delivery.body).t)
            await self._transport.settle((Settlement(delivery, Verb.ACCEPT),))

    def lost(self, batch: Sequence[Delivery], by: LostBy, /) -> None: ...

    def changed(self, state: SubscriptionState, /) -> None: ...


async def _opened(task: Task) -> Transport:
    transport = transport_for(task.url)
    await transport.open(within=WITHIN)
    return transport


def _watch(promises: Sequence[str]) -> None:
    """With an SDK that keeps all spans and metrics, exported in batches by its own thread, to nowhere."""
    if TRACING in promises:
        from opentelemetry import trace
        from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

        class Nowhere(SpanExporter):
            def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
                return SpanExportResult.SUCCESS

        tracing = TracerProvider()
        tracing.add_span_processor(BatchSpanProcessor(Nowhere(), max_queue_size=100_000))
        trace.set_tracer_provider(tracing)
    if METRICS in promises:
        from opentelemetry import metrics
        from opentelemetry.sdk.metrics import MeterProvider
        from opentelemetry.sdk.metrics.export import InMemoryMetricReader

        metrics.set_meter_provider(MeterProvider([InMemoryMetricReader()]))


if __name__ == "__main__":
    serve({"publish": publish, "fill": fill, "consume": consume})
