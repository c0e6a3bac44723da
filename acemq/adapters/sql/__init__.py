"""Stores in PostgreSQL, MySQL, MariaDB and SQLite, on SQLAlchemy 2."""

from acemq.adapters.sql.idempotency import DbIdempotencyStore as DbIdempotencyStore
from acemq.adapters.sql.outbox import DbOutboxStore as DbOutboxStore
