-- Alerts: deadlines that were missed.

-- name: raise
select kind, dag, schedule, run_id, nullif(task, '') as task, has_ended
  from raise_alerts(%(shard)s::smallint, %(epoch)s::bigint, %(unfired_seconds)s::double precision, %(batch)s::int)

-- name: list
select a.alert_id, a.kind, d.name as dag, c.name as schedule, nullif(a.task, '') as task, a.run_id, a.due_at,
    a.last_due_at, a.count, a.raised_at, a.ended_at
  from alert a join schedule c on c.schedule_id = a.schedule_id join dag d on d.dag_id = c.dag_id
 where (a.ended_at is null or %(ended)s::boolean) and (%(dag)s::text is null or d.name = %(dag)s)
   and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s::int[]))
   and (a.ended_at is not null, -a.alert_id) > (%(is_over)s::boolean, -%(before)s::bigint)
 order by a.ended_at is not null, a.alert_id desc limit %(limit)s
