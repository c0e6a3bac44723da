-- lock_topology
SELECT value FROM {t}meta WHERE name = 'topology'

-- held
SELECT seq, token FROM {t}message WHERE seq IN :seqs AND state = 1

-- holder
SELECT holder, token, until_at - {now} FROM {t}exclusive WHERE queue_id = :queue

-- some_ready
SELECT seq FROM {t}message WHERE queue_id = :queue AND state = 0 ORDER BY seq LIMIT :most

-- some_due
SELECT seq FROM {t}message WHERE queue_id = :queue AND state <> 0 AND state = 2 AND visible_at <= {now}
ORDER BY visible_at, seq LIMIT :most

-- some_expired
SELECT seq, queue_id FROM {t}message WHERE expires_at IS NOT NULL AND expires_at <= {now} AND (state <> 1 OR visible_at <= {now})
ORDER BY expires_at LIMIT :most

-- some_old
SELECT seq FROM {t}message WHERE queue_id = :queue AND state = 0 AND enqueued_at <= {now} - :age ORDER BY seq LIMIT :most

-- claim
UPDATE {t}message SET state = 1, token = token + 1, visible_at = {now} + :lease, holder = :call
WHERE seq IN (
  SELECT seq FROM (
    SELECT seq, rank_key FROM (
      SELECT seq, rank_key FROM {t}message WHERE queue_id = :queue AND state <> 0 AND visible_at <= {now}
      ORDER BY visible_at, seq LIMIT :most)
    UNION ALL
    SELECT seq, rank_key FROM (
      SELECT seq, rank_key FROM {t}message WHERE queue_id = :queue AND state = 0 ORDER BY rank_key, seq LIMIT :most))
  ORDER BY rank_key, seq LIMIT :most)
RETURNING seq, token, expires_at, enqueued_at, exchange, routing_key, headers, properties, body, rank_key

-- remove_ours
DELETE FROM {t}message WHERE seq IN (
  SELECT m.seq FROM json_each(:told) AS told CROSS JOIN {t}message AS m
  ON m.seq = CAST(told.key AS INTEGER) WHERE m.token = told.value AND m.state = 1)
RETURNING seq
