-- Events sent from outside, for tasks that wait for them.

-- name: list_events
-- The newest first.
select event_id, name, key, payload, sent_at, sent_by, is_delivered
  from event where (%(name)s::text is null or name = %(name)s::text) and event_id < %(before)s::bigint
 order by event_id desc limit %(limit)s

-- Approvals: questions to people, and their answers.

-- name: list_approvals
-- The oldest first. Open means that the task still waits for it; a cancel, a mark or a clear leaves the row unchanged.
select * from listed_approval where is_open and (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s::int[]))
   and (asked_at, run_id, idx, map_index)
     > (%(after_asked)s::timestamptz, %(run_id)s::bigint, %(idx)s::int, %(map_index)s::int)
 order by asked_at, run_id, idx, map_index limit %(limit)s

-- name: of_task
-- The approvals of one instance of a task of a run (map_index -1: it is not mapped), the newest first.
select * from listed_approval
 where run_id = %(run_id)s and task = %(task)s::text and map_index = %(map_index)s::int
 order by epoch desc limit %(limit)s

-- name: questions
-- Each task's newest approval, open or answered, with the columns of the task list.
with found as not materialized (
    select t.*, a.title, a.asked_at, a.decided_at, a.decided_by, a.is_approved, a.fields,
           a.chosen, coalesce(a.request, v.spec->'tasks'->a.idx->'wait') as wait,
           split_part(a.decided_by, ':', 2) as answerer,
           %(names)s::jsonb->>t.phase as shown, %(kinds)s::jsonb->>t.kind as operator
      from approval a join listed_task t on t.run_id = a.run_id and t.idx = a.idx and t.map_index = a.map_index
      join dag_version v on v.version_id = t.version_id
     where not exists (select 1 from approval x
                        where x.run_id = a.run_id and x.idx = a.idx and x.map_index = a.map_index and x.epoch > a.epoch)
       and (%(run_id)s::bigint is null or a.run_id = %(run_id)s) and (%(dag_id)s::int is null or t.dag_id = %(dag_id)s)
       and (%(dag_ids)s::int[] is null or t.dag_id = any(%(dag_ids)s))
       and (%(dag_like)s::text[] is null or t.dag ilike any(%(dag_like)s))
       and (%(dag_heads)s::text[] is null or t.dag ^@ any(%(dag_heads)s))
       and (%(task)s::text is null or t.task = %(task)s) and (%(like)s::text[] is null or t.task ilike any(%(like)s))
       and (%(heads)s::text[] is null or t.task ^@ any(%(heads)s))
       and (%(map_index)s::int is null or a.map_index = %(map_index)s)
       and (%(states)s::text[] is null or coalesce(%(names)s::jsonb->>t.phase, 'none') = any(%(states)s))
       and (%(is_answered)s::boolean is null or (a.decided_at is not null) = %(is_answered)s)
       and (%(answerers)s::text[] is null or split_part(a.decided_by, ':', 2) = any(%(answerers)s))
       and (%(title_like)s::text[] is null or a.title ilike any(%(title_like)s))
       and (%(body_like)s::text[] is null or a.request->>'body' ilike any(%(body_like)s))
       and (%(asked)s::tstzrange is null or a.asked_at <@ %(asked)s)
)
select t.total, f.* from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (select run_id, dag_id, dag, version_id, version, version_created_at, text_id, fire_at, due_at, idx,
                            map_index, task, queue, priority, max_attempts, phase, attempt, tries, started_at,
                            finished_at, seconds, reason, host, note, pool, slots, map_name, title, asked_at,
                            decided_at, decided_by, is_approved, fields, chosen, wait
                       from found order by /* order */ run_id, idx, map_index limit %(limit)s offset %(offset)s) f
      on true

-- Tasks that wait without a slot.
