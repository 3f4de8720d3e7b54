-- Alerts: deadlines that were missed.

-- name: list_alerts
select a.alert_id, a.kind, d.name as dag, c.name as schedule, nullif(a.task, '') as task, a.run_id, a.due_at,
    a.last_due_at, a.count, a.raised_at, a.ended_at
  from alert a join schedule c on c.schedule_id = a.schedule_id join dag d on d.dag_id = c.dag_id
 where (a.ended_at is null or %(ended)s::boolean) and (%(dag)s::text is null or d.name = %(dag)s)
   and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s::int[]))
   and (a.ended_at is not null, -a.alert_id) > (%(is_over)s::boolean, -%(before)s::bigint)
 order by a.ended_at is not null, a.alert_id desc limit %(limit)s

-- Notifications that wait, and the results of those sent.

-- name: record
-- Not fenced: that it was sent is true under any leader. If another attempt took over, this changes nothing.
update outbox o
   set state = %(state)s::text, response = left(%(answer)s::text, 1000),
       due_at = clock() + make_interval(secs => %(rest_seconds)s::double precision),
       ended_at = case when %(state)s::text = 'waiting' then null else clock() end
 where o.delivery_id = %(delivery_id)s::bigint and o.attempts = %(attempts)s::int and o.state = 'waiting'
returning o.delivery_id

-- name: list_deliveries
select o.delivery_id, o.sink, o.event, o.run_id, o.payload as fact, o.created_at, o.state, o.attempts, o.due_at,
       o.ended_at, o.response as answer
  from outbox o
 where (%(state)s::text is null or o.state = %(state)s) and (%(sink)s::text is null or o.sink = %(sink)s)
   and (%(dag)s::text is null or o.payload->>'dag' = %(dag)s) and (%(run_id)s::bigint is null or o.run_id = %(run_id)s)
   and (%(before)s::bigint is null or o.delivery_id < %(before)s) order by o.delivery_id desc limit %(limit)s

-- name: find_delivery
select o.delivery_id, o.sink, o.event, o.run_id, o.payload as fact, o.created_at, o.state, o.attempts, o.due_at,
       o.ended_at, o.response as answer
  from outbox o where o.delivery_id = %(delivery_id)s::bigint

-- Quarantined rows, for people.

-- name: list_quarantined
-- Schedules still out of planning, and rows that will be retried; the oldest first.
select q.kind, q.subject_id, q.verb, q.reason, q.failures, q.since, q.failed_at, q.retry_at,
       coalesce(d.name, ds.name, dr.name) as dag, c.name as schedule
  from quarantine q left join dag d on q.kind = 'dag' and d.dag_id = q.subject_id
  left join schedule c on q.kind = 'schedule' and c.schedule_id = q.subject_id left join dag ds on ds.dag_id = c.dag_id
  left join run r on q.kind = 'run' and r.run_id = q.subject_id left join dag dr on dr.dag_id = r.dag_id
 where (%(kind)s::text is null or (q.kind = %(kind)s and q.subject_id = %(subject_id)s::bigint))
   and (q.since, q.kind, q.subject_id) > (%(after_since)s::timestamptz, %(after_kind)s::text, %(after_id)s::bigint)
 order by q.since, q.kind, q.subject_id limit %(limit)s
