CREATE TABLE {prefix}meta (
  name varbinary(255) PRIMARY KEY,
  value varbinary(255) NOT NULL
) ENGINE = InnoDB;
CREATE TABLE {prefix}exchange (
  name varbinary(255) PRIMARY KEY,
  kind varbinary(16) NOT NULL
) ENGINE = InnoDB;
CREATE TABLE {prefix}queue (
  id integer AUTO_INCREMENT PRIMARY KEY,
  name varbinary(255) NOT NULL UNIQUE,
  spec longtext CHARACTER SET utf8mb4 NOT NULL
) ENGINE = InnoDB;
CREATE TABLE {prefix}binding (
  exchange varbinary(255) NOT NULL,
  pattern varbinary(255) NOT NULL,
  queue_id integer NOT NULL,
  PRIMARY KEY (exchange, queue_id, pattern)
) ENGINE = InnoDB;
CREATE TABLE {prefix}owner (
  queue_id integer NOT NULL,
  holder varbinary(255) NOT NULL,
  until_at bigint NOT NULL,
  PRIMARY KEY (queue_id, holder)
) ENGINE = InnoDB;
CREATE TABLE {prefix}exclusive (
  queue_id integer PRIMARY KEY,
  holder varbinary(255) NOT NULL,
  token bigint NOT NULL,
  until_at bigint NOT NULL
) ENGINE = InnoDB;
CREATE TABLE {prefix}message (
  seq bigint AUTO_INCREMENT PRIMARY KEY,
  queue_id integer NOT NULL,
  state smallint NOT NULL,
  rank_key smallint NOT NULL,
  visible_at bigint NOT NULL,
  token bigint NOT NULL DEFAULT 0,
  expires_at bigint,
  enqueued_at bigint NOT NULL,
  holder varbinary(255),
  exchange varbinary(255) NOT NULL,
  routing_key varbinary(255) NOT NULL,
  headers longtext CHARACTER SET utf8mb4 NOT NULL,
  properties longtext CHARACTER SET utf8mb4 NOT NULL,
  body longblob NOT NULL,
  KEY {index}message_ready (queue_id, state, rank_key, seq),
  KEY {index}message_waiting (queue_id, state, visible_at, seq),
  KEY {index}message_expiry (expires_at)
) ENGINE = InnoDB;
INSERT INTO {prefix}meta (name, value) VALUES ('schema', '1'), ('topology', '');
