CREATE TABLE {prefix}meta (
  name text COLLATE "C" PRIMARY KEY,
  value text NOT NULL
);
CREATE TABLE {prefix}exchange (
  name text COLLATE "C" PRIMARY KEY,
  kind text NOT NULL
);
CREATE TABLE {prefix}queue (
  id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  name text COLLATE "C" NOT NULL UNIQUE,
  spec text NOT NULL
);
CREATE TABLE {prefix}binding (
  exchange text COLLATE "C" NOT NULL,
  pattern text COLLATE "C" NOT NULL,
  queue_id integer NOT NULL,
  PRIMARY KEY (exchange, queue_id, pattern)
);
CREATE TABLE {prefix}owner (
  queue_id integer NOT NULL,
  holder text NOT NULL,
  until_at bigint NOT NULL,
  PRIMARY KEY (queue_id, holder)
);
CREATE TABLE {prefix}exclusive (
  queue_id integer PRIMARY KEY,
  holder text NOT NULL,
  token bigint NOT NULL,
  until_at bigint NOT NULL
);
CREATE TABLE {prefix}message (
  seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  queue_id integer NOT NULL,
  state smallint NOT NULL,
  rank_key smallint NOT NULL,
  visible_at bigint NOT NULL,
  token bigint NOT NULL DEFAULT 0,
  expires_at bigint,
  enqueued_at bigint NOT NULL,
  holder text,
  exchange text NOT NULL,
  routing_key text NOT NULL,
  headers text NOT NULL,
  properties text NOT NULL,
  body bytea NOT NULL
) WITH (fillfactor = 85, autovacuum_vacuum_scale_factor = 0.02);
CREATE INDEX {index}message_ready ON {prefix}message (queue_id, rank_key, seq) WHERE state = 0;
CREATE INDEX {index}message_waiting ON {prefix}message (queue_id, visible_at, seq) WHERE state <> 0;
CREATE INDEX {index}message_expiry ON {prefix}message (expires_at) WHERE expires_at IS NOT NULL;
INSERT INTO {prefix}meta (name, value) VALUES ('schema', '1'), ('topology', '');
