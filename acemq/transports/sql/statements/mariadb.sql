-- Rows are named by their key, and must be looked up by it: a scan of a small table, which the optimiser prefers, would
-- wait for every row that somebody's open transaction has written.

-- look
SELECT CASE WHEN EXISTS (SELECT 1 FROM {t}message WHERE queue_id = :queue AND state = 0)
         OR EXISTS (SELECT 1 FROM {t}message WHERE queue_id = :queue AND state = 1 AND visible_at <= {now})
         OR EXISTS (SELECT 1 FROM {t}message WHERE queue_id = :queue AND state = 2 AND visible_at <= {now})
       THEN 1 ELSE 0 END,
       nullif(least(
         coalesce((SELECT min(visible_at) FROM {t}message WHERE queue_id = :queue AND state = 1 AND visible_at > {now}), 9223372036854775807),
         coalesce((SELECT min(visible_at) FROM {t}message WHERE queue_id = :queue AND state = 2 AND visible_at > {now}), 9223372036854775807)
       ), 9223372036854775807) - {now},
       (SELECT value FROM {t}meta WHERE name = 'topology')

-- clock
SELECT {now}

-- candidates_due
SELECT seq FROM {t}message WHERE queue_id = :queue AND state = :state AND visible_at <= :now
ORDER BY visible_at, seq LIMIT :most

-- candidates
SELECT seq FROM {t}message WHERE queue_id = :queue AND state = 0 ORDER BY rank_key, seq LIMIT :most

-- chosen
SELECT seq, token + 1, expires_at, enqueued_at, exchange, routing_key, headers, properties, body, rank_key
FROM {t}message FORCE INDEX (PRIMARY) WHERE seq IN :seqs AND (state = 0 OR visible_at <= :now)
FOR UPDATE SKIP LOCKED

-- others
SELECT seq, token + 1, expires_at, enqueued_at, exchange, routing_key, headers, properties, body, rank_key
FROM {t}message WHERE queue_id = :queue AND state = 0 AND seq NOT IN :seqs ORDER BY rank_key, seq LIMIT :most
FOR UPDATE SKIP LOCKED

-- take
UPDATE {t}message FORCE INDEX (PRIMARY)
SET state = 1, token = token + 1, visible_at = {now} + :lease, holder = :call WHERE seq IN :seqs

-- held
SELECT seq, token FROM {t}message FORCE INDEX (PRIMARY) WHERE seq IN :seqs AND state = 1 FOR UPDATE

-- remove
DELETE m FROM {t}message AS m FORCE INDEX (PRIMARY) WHERE m.seq IN :seqs

-- remove_ours
DELETE m FROM {t}message AS m FORCE INDEX (PRIMARY)
WHERE m.seq IN :seqs AND (m.seq, m.token) IN :pairs AND m.state = 1

-- put_back
UPDATE {t}message FORCE INDEX (PRIMARY)
SET state = CASE WHEN :delay > 0 THEN 2 ELSE 0 END, visible_at = {now} + :delay, holder = NULL WHERE seq IN :seqs

-- prolong
UPDATE {t}message FORCE INDEX (PRIMARY) SET visible_at = {now} + :lease WHERE seq IN :seqs

-- some_ready
SELECT seq FROM {t}message WHERE queue_id = :queue AND state = 0 ORDER BY seq LIMIT :most FOR UPDATE SKIP LOCKED

-- count_waiting
SELECT state, due, count(*) FROM (
  SELECT state, CASE WHEN visible_at <= {now} THEN 1 ELSE 0 END AS due
  FROM {t}message WHERE queue_id = :queue AND state IN (1, 2) LIMIT :most) AS counted
GROUP BY state, due

-- some_due
SELECT seq FROM {t}message WHERE queue_id = :queue AND state = 2 AND visible_at <= {now}
ORDER BY visible_at, seq LIMIT :most FOR UPDATE SKIP LOCKED
