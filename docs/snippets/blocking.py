import os
from datetime import timedelta

import acemq
from acemq import Topology

URL = os.environ.get("ACEMQ_URL", "memory://")

with acemq.blocking.connect(URL) as mq:
    mq.declare(Topology().queue("orders", dead_letter=True))
    mq.send("orders", {"order": 1})
    order = mq.pull("orders", dict[str, int], wait=timedelta(seconds=1))
    if order:
        print(order.payload, "set aside:", order.reject("there is no such street"))
    print(mq.replay("orders.dlq").run(limit=100).replayed, "replayed,", mq.depth("orders").ready, "waiting")
