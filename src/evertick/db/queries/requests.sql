-- name: inbox
-- The oldest requests. A transaction that began earlier may still add older ones: they are read later.
select i.inbox_id, i.dag, i.params from inbox i order by i.inbox_id limit %(limit)s

-- name: enqueue
-- For the client of applications, whose connections find Evertick's functions only by the name of their schema.
select evertick.enqueue(%(dag)s, %(params)s::jsonb, %(key)s, %(run_at)s::timestamptz, %(unique_for)s::interval)

-- name: dead_letters
select l.letter_id, l.dag, l.params, l.key, l.run_at, extract(epoch from l.unique_for)::double precision
       as unique_for_seconds, l.sent_at, l.sent_by, l.reason, l.failed_at, l.replayed_at, l.replayed_by
  from dead_letter l
 where l.letter_id < %(before)s::bigint and (%(is_all)s::boolean or l.replayed_at is null)
 order by l.letter_id desc limit %(limit)s

-- name: find_letter
select l.letter_id, l.dag, l.params, l.key, l.run_at, extract(epoch from l.unique_for)::double precision
       as unique_for_seconds, l.sent_at, l.sent_by, l.reason, l.failed_at, l.replayed_at, l.replayed_by
  from dead_letter l where l.letter_id = %(letter_id)s::bigint

-- name: start_of_run
select w.start_at from delayed_run w where w.run_id = %(run_id)s::bigint
