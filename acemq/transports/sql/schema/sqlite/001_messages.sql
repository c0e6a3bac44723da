CREATE TABLE {prefix}meta (
  name TEXT PRIMARY KEY,
  value TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE {prefix}exchange (
  name TEXT PRIMARY KEY,
  kind TEXT NOT NULL
) WITHOUT ROWID;
CREATE TABLE {prefix}queue (
  id INTEGER PRIMARY KEY AUTOINCREMENT,
  name TEXT NOT NULL UNIQUE,
  spec TEXT NOT NULL
);
CREATE TABLE {prefix}binding (
  exchange TEXT NOT NULL,
  pattern TEXT NOT NULL,
  queue_id INTEGER NOT NULL,
  PRIMARY KEY (exchange, queue_id, pattern)
) WITHOUT ROWID;
CREATE TABLE {prefix}owner (
  queue_id INTEGER NOT NULL,
  holder TEXT NOT NULL,
  until_at INTEGER NOT NULL,
  PRIMARY KEY (queue_id, holder)
) WITHOUT ROWID;
CREATE TABLE {prefix}exclusive (
  queue_id INTEGER PRIMARY KEY,
  holder TEXT NOT NULL,
  token INTEGER NOT NULL,
  until_at INTEGER NOT NULL
);
CREATE TABLE {prefix}message (
  seq INTEGER PRIMARY KEY AUTOINCREMENT,
  queue_id INTEGER NOT NULL,
  state INTEGER NOT NULL,
  rank_key INTEGER NOT NULL,
  visible_at INTEGER NOT NULL,
  token INTEGER NOT NULL DEFAULT 0,
  expires_at INTEGER,
  enqueued_at INTEGER NOT NULL,
  holder TEXT,
  exchange TEXT NOT NULL,
  routing_key TEXT NOT NULL,
  headers TEXT NOT NULL,
  properties TEXT NOT NULL,
  body BLOB NOT NULL
);
CREATE INDEX {index}message_ready ON {prefix}message (queue_id, rank_key, seq) WHERE state = 0;
CREATE INDEX {index}message_waiting ON {prefix}message (queue_id, visible_at, seq) WHERE state <> 0;
CREATE INDEX {index}message_expiry ON {prefix}message (expires_at) WHERE expires_at IS NOT NULL;
INSERT INTO {prefix}meta (name, value) VALUES ('schema', '1'), ('topology', '');
