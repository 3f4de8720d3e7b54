-- Notifications that wait, and the results of those sent.

-- name: tend
select given_up, waiting, oldest_seconds
  from tend_outbox(%(shard)s::smallint, %(epoch)s::bigint, %(defaults)s::jsonb, %(give_up_seconds)s::double precision,
                   %(batch)s::int,
                   %(most)s::int)

-- name: take
select delivery_id, sink, event, fact, attempts, created_at
  from take_deliveries(%(shard)s::smallint, %(epoch)s::bigint, %(passed_over)s::text[], %(each)s::int, %(batch)s::int,
                       %(seconds)s::double precision)

-- name: record
-- Not fenced: that it was sent is true, whichever scheduler leads now. If another attempt took over, this changes nothing.
update outbox o
   set state = %(state)s::text, answer = left(%(answer)s::text, 1000),
       due_at = clock() + make_interval(secs => %(rest_seconds)s::double precision),
       ended_at = case when %(state)s::text = 'waiting' then null else clock() end
 where o.delivery_id = %(delivery_id)s::bigint and o.attempts = %(attempts)s::int and o.state = 'waiting'
returning o.delivery_id

-- name: retry
select retry_deliveries(%(ids)s::bigint[], %(sink)s::text, %(batch)s::int, %(actor)s::text)

-- name: list
select o.delivery_id, o.sink, o.event, o.run_id, o.fact, o.created_at, o.state, o.attempts, o.due_at, o.ended_at,
    o.answer
  from outbox o
 where (%(state)s::text is null or o.state = %(state)s) and (%(sink)s::text is null or o.sink = %(sink)s)
   and (%(dag)s::text is null or o.fact->>'dag' = %(dag)s) and (%(run_id)s::bigint is null or o.run_id = %(run_id)s)
   and (%(before)s::bigint is null or o.delivery_id < %(before)s)
 order by o.delivery_id desc limit %(limit)s

-- name: find
select o.delivery_id, o.sink, o.event, o.run_id, o.fact, o.created_at, o.state, o.attempts, o.due_at, o.ended_at,
    o.answer
  from outbox o where o.delivery_id = %(delivery_id)s::bigint
