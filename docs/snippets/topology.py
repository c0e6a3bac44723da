from datetime import timedelta

from acemq import RetryPolicy, Topology

CARRIER = RetryPolicy.delays(timedelta(seconds=5), timedelta(seconds=40), timedelta(minutes=10))
TOPOLOGY = (
    Topology()
    .exchange("orders-events", "topic")
    .queue("shipping.orders", retry=CARRIER)
    .bind("shipping.orders", "orders-events", "order.*")
)

if __name__ == "__main__":
    TOPOLOGY.validate()  # without a broker: everything that can be wrong, at once
    print(TOPOLOGY)
