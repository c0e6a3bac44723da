-- What is held is found by its number: `state + 0` keeps the planner from the index of all that waits, which it would
-- take, and go through, as long as its statistics are of a moment at which nothing waited.

-- written
-- What both kinds of publishing end with. One exchange, key or properties alone are those of all; an empty array stands for
-- what is usual of copies: no rank, no delay, no end.
clock AS (SELECT {now} AS now),
 written AS (
  INSERT INTO {t}message (queue_id, state, rank_key, visible_at, expires_at, enqueued_at, exchange, routing_key,
                          headers, properties, body)
  SELECT copy.queue_id, CASE WHEN copy.delay > 0 THEN 2 ELSE 0 END, coalesce(copy.rank_key, 0),
         clock.now + coalesce(copy.delay, 0), clock.now + copy.life, clock.now,
         coalesce(copy.exchange, (CAST(:exchanges AS text[]))[1]), coalesce(copy.routing_key, (CAST(:keys AS text[]))[1]),
         copy.headers, coalesce(copy.properties, (CAST(:properties AS text[]))[1]), copy.body
  FROM copy CROSS JOIN clock
  WHERE (SELECT value FROM {t}meta WHERE name = 'topology') = CAST(:topology AS text)
  ORDER BY copy.place
  RETURNING 1)
SELECT count(*), (SELECT count(told.it) FROM (
    SELECT CAST(pg_notify(CAST(:channel AS text), CAST(queue AS text) || '@' || CAST(:sender AS text)) AS text) AS it
    FROM unnest(CAST(:told AS integer[])) AS queue) AS told)
FROM written

-- publish_each
-- A copy of each message in turn, without a join, which was a quarter of the statement's time.
WITH copy AS (
  SELECT * FROM unnest(CAST(:queues AS integer[]), CAST(:ranks AS smallint[]), CAST(:delays AS bigint[]),
                       CAST(:lives AS bigint[]), CAST(:exchanges AS text[]), CAST(:keys AS text[]),
                       CAST(:headers AS text[]), CAST(:properties AS text[]), CAST(:bodies AS bytea[]))
    WITH ORDINALITY AS c (queue_id, rank_key, delay, life, exchange, routing_key, headers, properties, body, place)),
 {written}

-- publish
-- Some messages go to several queues, or to none: `numbers` says of which message a copy is.
WITH message AS (
  SELECT * FROM unnest(CAST(:exchanges AS text[]), CAST(:keys AS text[]), CAST(:headers AS text[]),
                       CAST(:properties AS text[]), CAST(:bodies AS bytea[]))
    WITH ORDINALITY AS m (exchange, routing_key, headers, properties, body, number)),
 copy AS (
  SELECT * FROM unnest(CAST(:numbers AS bigint[]), CAST(:queues AS integer[]), CAST(:ranks AS smallint[]),
                       CAST(:delays AS bigint[]), CAST(:lives AS bigint[]))
    WITH ORDINALITY AS c (number, queue_id, rank_key, delay, life, place)
  JOIN message USING (number)),
 {written}

-- claim
-- Where another's old snapshot keeps what is dead, to go through it is all the work: so the next of a full claim begins
-- at its place, `floor`, and looks for nothing that is `due`.
WITH clock AS MATERIALIZED (SELECT {now} AS now),
 due AS (
  SELECT seq, rank_key FROM {t}message
  WHERE CAST(:due AS boolean) AND queue_id = :queue AND state <> 0 AND visible_at <= (SELECT now FROM clock)
    AND (CAST(:fence AS bigint) IS NULL OR EXISTS (SELECT 1 FROM {t}exclusive
         WHERE queue_id = :queue AND holder = :holder AND token = :fence))
  ORDER BY visible_at, seq LIMIT :most FOR UPDATE SKIP LOCKED),
 fresh AS (
  SELECT seq, rank_key FROM {t}message
  WHERE queue_id = :queue AND state = 0 AND (rank_key, seq) >= (CAST(:rank AS smallint), CAST(:floor AS bigint))
    AND (CAST(:fence AS bigint) IS NULL OR EXISTS (SELECT 1 FROM {t}exclusive
         WHERE queue_id = :queue AND holder = :holder AND token = :fence))
  ORDER BY rank_key, seq LIMIT :most FOR UPDATE SKIP LOCKED),
 pick AS (
  SELECT seq FROM (SELECT * FROM due UNION ALL SELECT * FROM fresh) AS both_kinds ORDER BY rank_key, seq LIMIT :most),
 taken AS (
  UPDATE {t}message SET state = 1, token = token + 1, visible_at = (SELECT now FROM clock) + :lease, holder = :call
  WHERE seq = ANY (ARRAY(SELECT seq FROM pick))
  RETURNING seq, token, expires_at, enqueued_at, exchange, routing_key, headers, properties, body, rank_key)
SELECT clock.now,
       (SELECT value FROM {t}meta WHERE name = 'topology'),
       (SELECT count(*) FROM due),
       (SELECT min(visible_at) FROM {t}message
        WHERE CAST(:due AS boolean) AND queue_id = :queue AND state <> 0
          AND visible_at > (SELECT now FROM clock)) - clock.now,
       taken.*
FROM clock LEFT JOIN taken ON true

-- settle
-- Empty arrays, of delays and what comes behind them, where all are accepted.
WITH told AS (
  SELECT * FROM unnest(CAST(:seqs AS bigint[]), CAST(:tokens AS bigint[]), CAST(:delays AS bigint[]),
                       CAST(:headers AS text[]), CAST(:properties AS text[]))
    AS told (seq, token, delay, headers, properties)),
 removed AS (
  DELETE FROM {t}message AS m USING told
  WHERE told.delay IS NULL AND m.seq = told.seq AND m.token = told.token AND m.state + 0 = 1 RETURNING m.seq),
 returned AS (
  UPDATE {t}message AS m SET state = CASE WHEN told.delay > 0 THEN 2 ELSE 0 END, visible_at = {now} + told.delay,
         holder = NULL, headers = coalesce(told.headers, m.headers), properties = coalesce(told.properties, m.properties)
  FROM told
  WHERE told.delay IS NOT NULL AND m.seq = told.seq AND m.token = told.token AND m.state + 0 = 1 RETURNING m.seq)
SELECT seq FROM removed UNION ALL SELECT seq FROM returned

-- renew
UPDATE {t}message AS m SET visible_at = {now} + :lease
FROM unnest(CAST(:seqs AS bigint[]), CAST(:tokens AS bigint[])) AS told (seq, token)
WHERE m.seq = told.seq AND m.token = told.token AND m.state + 0 = 1 RETURNING m.seq

-- bury
WITH gone AS (
  DELETE FROM {t}message AS m USING unnest(CAST(:seqs AS bigint[]), CAST(:tokens AS bigint[])) AS told (seq, token)
  WHERE m.seq = told.seq AND m.token = told.token AND m.state + 0 = 1
  RETURNING m.seq, m.exchange, m.routing_key, m.headers, m.properties, m.body)
INSERT INTO {t}message (queue_id, state, rank_key, visible_at, expires_at, enqueued_at, exchange, routing_key, headers,
                        properties, body)
SELECT CAST(:letters AS integer), 0, 0, {now}, NULL, {now}, exchange, routing_key, headers, properties, body
FROM gone WHERE CAST(:letters AS integer) IS NOT NULL ORDER BY seq

-- notify
SELECT pg_notify(CAST(:channel AS text), CAST(:payload AS text))

-- oldest_snapshot
SELECT CAST(extract(epoch FROM max(clock_timestamp() - xact_start)) AS bigint) FROM pg_stat_activity
WHERE backend_xmin IS NOT NULL AND datname = current_database() AND pid <> pg_backend_pid()
