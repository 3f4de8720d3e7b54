-- Events sent from outside, for tasks that wait for them.

-- name: send
select event_id, is_new, sent_at, sent_by
    from send_event(%(name)s::text, %(key)s::text, %(payload)s::jsonb, %(actor)s::text)

-- name: list_events
-- The newest first.
select event_id, name, key, payload, sent_at, sent_by, is_delivered as is_heard
  from event where (%(name)s::text is null or name = %(name)s::text) and event_id < %(before)s::bigint
 order by event_id desc limit %(limit)s

-- Approvals: questions to people, and their answers.

-- name: list_approvals
-- The oldest first. Open means that the task still waits for it; a cancel, a mark or a clear leaves the row unchanged.
select a.run_id, a.idx, a.map_index, a.epoch, d.name as dag, s.name as task, d.dag_id, a.title, a.asked_at, w.deadline,
    a.decided_at,
       a.decided_by, a.is_approved, a.note, a.fields, v.spec->'tasks'->a.idx->'wait' as wait,
       k.state = 'deferred' and k.epoch = a.epoch and a.decided_at is null as is_open
  from approval a
  join run_status r on r.run_id = a.run_id join dag d on d.dag_id = r.dag_id
      join dag_version v on v.version_id = r.version_id
  join task_spec s on s.version_id = r.version_id and s.idx = a.idx
  left join task k on k.run_id = a.run_id and k.idx = a.idx and k.map_index = a.map_index
  left join deferral w on w.run_id = a.run_id and w.idx = a.idx and w.map_index = a.map_index and w.epoch = a.epoch
 where a.decided_at is null and k.state = 'deferred' and k.epoch = a.epoch
   and (%(dag_ids)s::int[] is null or r.dag_id = any(%(dag_ids)s::int[]))
 order by a.asked_at, a.run_id, a.idx limit %(limit)s

-- name: of_task
-- The approvals of one instance of a task of a run (map_index -1: it is not mapped), the newest first.
select a.run_id, a.idx, a.map_index, a.epoch, d.name as dag, s.name as task, d.dag_id, a.title, a.asked_at, w.deadline,
    a.decided_at,
       a.decided_by, a.is_approved, a.note, a.fields, v.spec->'tasks'->a.idx->'wait' as wait,
       k.state = 'deferred' and k.epoch = a.epoch and a.decided_at is null as is_open
  from approval a
  join run_status r on r.run_id = a.run_id join dag d on d.dag_id = r.dag_id
      join dag_version v on v.version_id = r.version_id
  join task_spec s on s.version_id = r.version_id and s.idx = a.idx
  left join task k on k.run_id = a.run_id and k.idx = a.idx and k.map_index = a.map_index
  left join deferral w on w.run_id = a.run_id and w.idx = a.idx and w.map_index = a.map_index and w.epoch = a.epoch
 where a.run_id = %(run_id)s and s.name = %(task)s::text and a.map_index = %(map_index)s::int
 order by a.epoch desc limit %(limit)s

-- name: questions
-- Each task's newest approval, open or answered, with the columns of the task list.
with found as not materialized (
    select t.*, a.title, a.asked_at, a.decided_at, a.decided_by, a.is_approved, a.fields,
        v.spec->'tasks'->a.idx->'wait' as wait,
           split_part(a.decided_by, ':', 2) as answerer, %(names)s::jsonb->>t.phase as shown,
               %(kinds)s::jsonb->>t.kind as operator
      from approval a join listed_task t on t.run_id = a.run_id and t.idx = a.idx and t.map_index = a.map_index
      join dag_version v on v.version_id = t.version_id
     where not exists (select 1 from approval x where x.run_id = a.run_id and x.idx = a.idx
                       and x.map_index = a.map_index and x.epoch > a.epoch)
       and (%(run_id)s::bigint is null or a.run_id = %(run_id)s) and (%(dag_id)s::int is null or t.dag_id = %(dag_id)s)
       and (%(dag_ids)s::int[] is null or t.dag_id = any(%(dag_ids)s))
       and (%(dag_like)s::text[] is null or t.dag ilike any(%(dag_like)s))
           and (%(dag_heads)s::text[] is null or t.dag ^@ any(%(dag_heads)s))
       and (%(task)s::text is null or t.task = %(task)s)
       and (%(like)s::text[] is null or t.task ilike any(%(like)s))
           and (%(heads)s::text[] is null or t.task ^@ any(%(heads)s))
       and (%(map_index)s::int is null or a.map_index = %(map_index)s)
       and (%(states)s::text[] is null or coalesce(%(names)s::jsonb->>t.phase, 'none') = any(%(states)s))
       and (%(is_answered)s::boolean is null or (a.decided_at is not null) = %(is_answered)s)
       and (%(answerers)s::text[] is null or split_part(a.decided_by, ':', 2) = any(%(answerers)s))
       and (%(title_like)s::text[] is null or a.title ilike any(%(title_like)s))
       and (%(asked)s::tstzrange is null or a.asked_at <@ %(asked)s)
)
select t.total, f.*
  from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (
    select run_id, dag_id, dag, version_id, version, version_created_at, text_id, fire_at, due_at, idx, map_index, task,
        queue, priority,
           max_attempts, phase, attempt, tries, started_at, finished_at, seconds, reason, host, note, pool, slots,
           title, asked_at, decided_at, decided_by, is_approved, fields, wait
      from found order by /* order */ run_id, idx, map_index limit %(limit)s offset %(offset)s) f on true

-- name: decide
select decide_approval(%(run_id)s::bigint, %(idx)s::int, %(map_index)s::int, %(epoch)s::int, %(is_approved)s::boolean,
                       %(actor)s::text,
                       %(note)s::text, %(fields)s::jsonb)

-- Tasks that wait without a slot.

-- name: children_due
select run_id, idx, map_index, epoch, dag, params, depth, parent_dag, given, own, results
    from child_runs_due(%(shard)s::smallint, %(batch)s::int) limit %(batch)s

-- name: start_child
select start_child_run(%(shard)s::smallint, %(epoch)s::bigint, %(run_id)s::bigint, %(idx)s::int, %(map_index)s::int,
                   %(task_epoch)s::int,
                   %(dag_id)s::int, %(params)s::jsonb, %(depth)s::int, %(reason)s::text)

-- name: clocks_due
select run_id, idx, map_index, epoch, at, timezone, since from clock_waits_due(%(shard)s::smallint, %(batch)s::int)
    limit %(batch)s

-- name: set_clocks
select set_clock_waits(%(shard)s::smallint, %(epoch)s::bigint, %(instants)s::jsonb)

-- name: wake_waits
select looked_at, refused, next_wake from wake_deferred_tasks(%(shard)s::smallint, %(epoch)s::bigint, %(batch)s::int)
