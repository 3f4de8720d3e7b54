-- Quarantined rows, for people.

-- name: list
-- Schedules still out of planning, and rows that will be retried; the oldest first.
select q.kind, q.subject_id, q.verb, q.reason, q.failures, q.since, q.failed_at, q.retry_at,
       coalesce(d.name, ds.name, dr.name) as dag, c.name as schedule
  from quarantine q
  left join dag d on q.kind = 'dag' and d.dag_id = q.subject_id
  left join schedule c on q.kind = 'schedule' and c.schedule_id = q.subject_id
  left join dag ds on ds.dag_id = c.dag_id
  left join run r on q.kind = 'run' and r.run_id = q.subject_id
  left join dag dr on dr.dag_id = r.dag_id
 where (%(kind)s::text is null or (q.kind = %(kind)s and q.subject_id = %(subject_id)s::bigint))
   and (q.since, q.kind, q.subject_id) > (%(after_since)s::timestamptz, %(after_kind)s::text, %(after_id)s::bigint)
 order by q.since, q.kind, q.subject_id limit %(limit)s
