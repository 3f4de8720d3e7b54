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

-- name: arrivals
select a.event_id, e.name, e.key, e.payload, e.sent_at, clock() as read_at
  from event_arrival a join event e on e.event_id = a.event_id order by a.event_id limit %(limit)s

-- name: sent_events
select e.event_id, e.name, e.key, e.payload, e.sent_at, clock() as read_at
  from event e where e.event_id = any(%(event_ids)s::bigint[])

-- name: event_schedules
select c.schedule_id, c.name, d.name as dag, d.dag_id, c.params, c.spec->>'event' as event,
       is_schedule_held(c.schedule_id) as is_held
  from schedule c join dag d on d.dag_id = c.dag_id and d.deleted_at is null
 where c.spec->>'kind' = 'event' and c.deleted_at is null order by c.schedule_id limit 10000

-- name: due_windows
select w.schedule_id, w.group_key, w.event_ids, w.first_at, w.last_at, w.run_id,
       coalesce(is_run_open(w.run_id), false) as is_run_open, clock() as read_at
  from event_window w where w.due_at <= clock() and not is_schedule_held(w.schedule_id)
   order by w.due_at limit %(limit)s

-- name: windows
select w.schedule_id, w.group_key, w.event_ids, w.first_at, w.last_at, w.run_id,
       coalesce(is_run_open(w.run_id), false) as is_run_open, clock() as read_at
  from event_window w join unnest(%(schedule_ids)s::int[], %(group_keys)s::text[]) x(schedule_id, group_key)
    on w.schedule_id = x.schedule_id and w.group_key = x.group_key

-- name: webhooks
select w.name, w.kind, w.secret, w.event, w.tolerance_seconds, w.headers, w.changed_by, w.changed_at
  from webhook w order by w.name limit 10000

-- name: find_webhook
select w.name, w.kind, w.secret, w.event, w.tolerance_seconds, w.headers, w.changed_by, w.changed_at
  from webhook w where w.name = %(name)s
