"""Many rows at once, by the database's own hand: for what depends on how many there are."""

from __future__ import annotations

import sqlalchemy as sa

COLUMNS = "queue_id, state, rank_key, visible_at, enqueued_at, exchange, routing_key, headers, properties, body"
_NUMBERS = {
    "postgresql": "generate_series(1, {count}) AS n",
    "mariadb": "(SELECT seq AS n FROM seq_1_to_{count}) AS n",
    "sqlite": "(WITH RECURSIVE g (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM g WHERE n < {count}) SELECT n FROM g)",
}
_ANALYZE = {"postgresql": "ANALYZE acemq_message", "mariadb": "ANALYZE TABLE acemq_message", "sqlite": "ANALYZE"}


def fill(connection: sa.Connection, queue: str, count: int, *, state: int = 0, visible_at: int = 0) -> None:
    """Copies of the one message that is in this queue, as if they had been sent after it."""
    database = connection.dialect.name
    copied = COLUMNS.replace("state", str(state)).replace("visible_at", str(visible_at))
    connection.exec_driver_sql(
        f"INSERT INTO acemq_message ({COLUMNS}) SELECT {copied} "
        f"FROM acemq_message CROSS JOIN {_NUMBERS[database].format(count=count)} "
        f"WHERE queue_id = (SELECT id FROM acemq_queue WHERE name = '{queue}')"
    )


def analyze(connection: sa.Connection) -> None:
    """As the database does by itself within a minute."""
    connection.exec_driver_sql(_ANALYZE[connection.dialect.name])
