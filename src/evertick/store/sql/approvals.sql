-- Questions to people, and their answers.

-- name: list_approvals
-- The oldest first. Open is what its task still waits for; a cancel, a mark or a clear leaves the question as it was.
select a.run_id, a.idx, a.map_index, a.epoch, d.name as dag, s.name as task, d.dag_id, a.title, a.asked_at, w.deadline, a.decided_at,
       a.decided_by, a.is_approved, a.note, a.fields, v.spec->'tasks'->a.idx->'wait' as wait,
       k.state = 'deferred' and k.epoch = a.epoch and a.decided_at is null as is_open
  from approval a
  join run_status r on r.run_id = a.run_id join dag d on d.dag_id = r.dag_id join dag_version v on v.version_id = r.version_id
  join task_spec s on s.version_id = r.version_id and s.idx = a.idx
  left join task k on k.run_id = a.run_id and k.idx = a.idx and k.map_index = a.map_index
  left join deferral w on w.run_id = a.run_id and w.idx = a.idx and w.map_index = a.map_index and w.epoch = a.epoch
 where a.decided_at is null and k.state = 'deferred' and k.epoch = a.epoch
   and (%(dag_ids)s::int[] is null or r.dag_id = any(%(dag_ids)s::int[]))
 order by a.asked_at, a.run_id, a.idx limit %(limit)s

-- name: of_task
-- Those of one task of a run, the newest first.
select a.run_id, a.idx, a.map_index, a.epoch, d.name as dag, s.name as task, d.dag_id, a.title, a.asked_at, w.deadline, a.decided_at,
       a.decided_by, a.is_approved, a.note, a.fields, v.spec->'tasks'->a.idx->'wait' as wait,
       k.state = 'deferred' and k.epoch = a.epoch and a.decided_at is null as is_open
  from approval a
  join run_status r on r.run_id = a.run_id join dag d on d.dag_id = r.dag_id join dag_version v on v.version_id = r.version_id
  join task_spec s on s.version_id = r.version_id and s.idx = a.idx
  left join task k on k.run_id = a.run_id and k.idx = a.idx and k.map_index = a.map_index
  left join deferral w on w.run_id = a.run_id and w.idx = a.idx and w.map_index = a.map_index and w.epoch = a.epoch
 where a.run_id = %(run_id)s and s.name = %(task)s::text
 order by a.epoch desc, a.map_index limit %(limit)s

-- name: decide
select decide_approval(%(run_id)s::bigint, %(idx)s::int, %(map_index)s::int, %(epoch)s::int, %(is_approved)s::boolean, %(actor)s::text,
                       %(note)s::text, %(fields)s::jsonb)
