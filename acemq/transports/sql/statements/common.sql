-- topology
SELECT value, {now} FROM {t}meta WHERE name = 'topology'

-- schema_version
SELECT value FROM {t}meta WHERE name = 'schema'

-- lock_topology
SELECT value FROM {t}meta WHERE name = 'topology' FOR UPDATE

-- set_topology
UPDATE {t}meta SET value = :value WHERE name = 'topology'

-- exchanges
SELECT name, kind FROM {t}exchange

-- queues
SELECT id, name, spec FROM {t}queue

-- bindings
SELECT exchange, pattern, queue_id FROM {t}binding ORDER BY exchange, queue_id, pattern

-- add_exchange
INSERT INTO {t}exchange (name, kind) VALUES (:name, :kind)

-- add_queue
INSERT INTO {t}queue (name, spec) VALUES (:name, :spec)

-- add_binding
INSERT INTO {t}binding (exchange, pattern, queue_id) VALUES (:exchange, :pattern, :queue)

-- delete_exchange
DELETE FROM {t}exchange WHERE name = :name

-- delete_exchange_bindings
DELETE FROM {t}binding WHERE exchange = :name

-- delete_queue
DELETE FROM {t}queue WHERE id = :queue

-- delete_queue_bindings
DELETE FROM {t}binding WHERE queue_id = :queue

-- delete_queue_exclusive
DELETE FROM {t}exclusive WHERE queue_id = :queue

-- delete_queue_owners
DELETE FROM {t}owner WHERE queue_id = :queue

-- add_tombstone
INSERT INTO {t}meta (name, value) VALUES (:name, :value)

-- tombstones
SELECT name, value FROM {t}meta WHERE name LIKE 'gone:%'

-- delete_meta
DELETE FROM {t}meta WHERE name = :name

-- owners
SELECT holder, until_at - {now} FROM {t}owner WHERE queue_id = :queue

-- owned
SELECT queue_id, holder, until_at - {now} FROM {t}owner

-- add_owner
INSERT INTO {t}owner (queue_id, holder, until_at) VALUES (:queue, :holder, {now} + :lease)

-- renew_owner
UPDATE {t}owner SET until_at = {now} + :lease WHERE holder = :holder

-- delete_owner
DELETE FROM {t}owner WHERE queue_id = :queue AND holder = :holder

-- owner_queues
SELECT queue_id FROM {t}owner WHERE holder = :holder

-- any_message
SELECT 1 FROM {t}message WHERE queue_id = :queue LIMIT 1

-- look
SELECT CASE WHEN EXISTS (SELECT 1 FROM {t}message WHERE queue_id = :queue AND state = 0)
         OR EXISTS (SELECT 1 FROM {t}message WHERE queue_id = :queue AND state <> 0 AND visible_at <= {now})
       THEN 1 ELSE 0 END,
       (SELECT min(visible_at) FROM {t}message WHERE queue_id = :queue AND state <> 0 AND visible_at > {now}) - {now},
       (SELECT value FROM {t}meta WHERE name = 'topology')

-- again
SELECT seq, token, expires_at, enqueued_at, exchange, routing_key, headers, properties, body, rank_key
FROM {t}message WHERE queue_id = :queue AND state = 1 AND holder = :call ORDER BY rank_key, seq

-- insert
INSERT INTO {t}message (queue_id, state, rank_key, visible_at, expires_at, enqueued_at, exchange, routing_key,
headers, properties, body) VALUES (:queue_id, :state, :rank_key, :visible_at, :expires_at, :enqueued_at, :exchange,
:routing_key, :headers, :properties, :body)

-- held
SELECT seq, token FROM {t}message WHERE seq IN :seqs AND state = 1 FOR UPDATE

-- present
SELECT seq FROM {t}message WHERE seq IN :seqs

-- remove
DELETE FROM {t}message WHERE seq IN :seqs

-- remove_ours
DELETE FROM {t}message WHERE seq IN :seqs AND (seq, token) IN :pairs AND state = 1

-- put_back
UPDATE {t}message SET state = CASE WHEN :delay > 0 THEN 2 ELSE 0 END, visible_at = {now} + :delay, holder = NULL
WHERE seq IN :seqs

-- put_back_changed
UPDATE {t}message SET state = CASE WHEN :delay > 0 THEN 2 ELSE 0 END, visible_at = {now} + :delay, holder = NULL,
headers = :headers, properties = :properties WHERE seq = :seq

-- prolong
UPDATE {t}message SET visible_at = {now} + :lease WHERE seq IN :seqs

-- letters
INSERT INTO {t}message (queue_id, state, rank_key, visible_at, expires_at, enqueued_at, exchange, routing_key, headers,
properties, body)
SELECT :letters, 0, 0, {now}, NULL, {now}, exchange, routing_key, headers, properties, body
FROM {t}message WHERE seq IN :seqs ORDER BY seq

-- count_ready
SELECT count(*) FROM (SELECT 1 AS one FROM {t}message WHERE queue_id = :queue AND state = 0 LIMIT :most) AS counted

-- count_waiting
SELECT state, due, count(*) FROM (
  SELECT state, CASE WHEN visible_at <= {now} THEN 1 ELSE 0 END AS due
  FROM {t}message WHERE queue_id = :queue AND state <> 0 LIMIT :most) AS counted
GROUP BY state, due

-- some_ready
SELECT seq FROM {t}message WHERE queue_id = :queue AND state = 0 ORDER BY seq LIMIT :most FOR UPDATE

-- some_due
SELECT seq FROM {t}message WHERE queue_id = :queue AND state <> 0 AND state = 2 AND visible_at <= {now}
ORDER BY visible_at, seq LIMIT :most FOR UPDATE

-- some_of
SELECT seq FROM {t}message WHERE queue_id = :queue LIMIT :most

-- some_expired
SELECT seq, queue_id FROM {t}message WHERE expires_at IS NOT NULL AND expires_at <= {now} AND (state <> 1 OR visible_at <= {now})
ORDER BY expires_at LIMIT :most FOR UPDATE SKIP LOCKED

-- some_old
SELECT seq FROM {t}message WHERE queue_id = :queue AND state = 0 AND enqueued_at <= {now} - :age
ORDER BY seq LIMIT :most FOR UPDATE SKIP LOCKED

-- holder
SELECT holder, token, until_at - {now} FROM {t}exclusive WHERE queue_id = :queue FOR UPDATE

-- first_holder
INSERT INTO {t}exclusive (queue_id, holder, token, until_at) VALUES (:queue, :holder, 1, {now} + :lease)

-- next_holder
UPDATE {t}exclusive SET holder = :holder, token = token + 1, until_at = {now} + :lease WHERE queue_id = :queue

-- held_by_the_last
UPDATE {t}message SET state = 0 WHERE queue_id = :queue AND state = 1

-- same_holder
UPDATE {t}exclusive SET until_at = {now} + :lease WHERE queue_id = :queue AND holder = :holder AND token = :fence

-- no_holder
UPDATE {t}exclusive SET until_at = 0 WHERE queue_id = :queue AND holder = :holder AND token = :fence

-- is_holder
SELECT 1 FROM {t}exclusive WHERE queue_id = :queue AND holder = :holder AND token = :fence
