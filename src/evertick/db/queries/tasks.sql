-- Tasks, in the order of a task's life.

-- name: promote
select promoted, refused, next_due, has_line
  from promote_due_tasks(%(shard)s::smallint, %(epoch)s::bigint, %(batch)s::int, %(bound)s::int)

-- name: time_out_waits
select failed, refused from time_out_queued_tasks(%(shard)s::smallint, %(epoch)s::bigint, %(batch)s::int)

-- name: step
-- The one hot statement: records what ended and claims what is free, in one round trip and one commit.
select kind, run_id, idx, map_index, epoch, attempt, version_id, fire_at, params, inputs, place, seq
  from finish_and_claim(%(session)s::bigint, %(reports)s::jsonb, %(infra_retries)s::int, %(queues)s::text[],
      %(free)s::int,
            %(low)s::bigint[], %(aging_seconds)s::double precision)

-- name: claim_rows
select kind, run_id, idx, map_index, epoch, attempt, version_id, fire_at, params, inputs, place, seq
  from claim_selected(%(session)s::bigint, %(queues)s::text[], %(places)s::int[], %(seqs)s::bigint[])

-- name: extend
select kind, run_id, idx, map_index, epoch from extend_leases(%(session)s::bigint, %(held)s::jsonb)

-- name: clear
-- No row where there is no such run.
select reopened, asked
  from clear_tasks(%(run_id)s::bigint, %(idxs)s::int[], %(instances)s::jsonb, %(actor)s::text, %(version_id)s::int)
 where reopened is not null

-- name: mark
select mark_task(%(run_id)s::bigint, %(idx)s::int, %(map_index)s::int, %(state)s::task_state, %(actor)s::text)

-- name: list_of_run
-- The tasks view shows tasks without a row as waiting.
select idx, map_index, task, state, attempt, max_attempts, epoch, queue, priority, not_before, started_at, finished_at,
    exit_code, reason,
       request
  from all_tasks where run_id = %(run_id)s order by idx, map_index limit %(limit)s

-- name: find
select idx, map_index, task, state, attempt, max_attempts, epoch, queue, priority, not_before, started_at, finished_at,
    exit_code, reason,
       request
  from all_tasks where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s

-- name: liveliest_of_run
-- The tasks that matter first in the view of a large run: running, then failed, then upcoming ones.
select idx, map_index, task, state, attempt, max_attempts, epoch, queue, priority, not_before, started_at, finished_at,
    exit_code, reason,
       request
  from all_tasks where run_id = %(run_id)s
 order by array_position(array['running', 'queued', 'failed', 'canceled', 'available', 'pending',
                               'deferred']::task_state[], state),
       finished_at desc nulls last, idx, map_index
 limit %(limit)s

-- name: count_by_state
select state, count(*) as count from all_tasks where run_id = %(run_id)s group by state order by state limit 100

-- name: attempts
select a.epoch, a.attempt, a.outcome, a.reason, a.exit_code, a.started_at, a.finished_at, r.runner_id, r.host,
    r.executor
  from all_attempts a left join runner r on r.session = a.session
 where a.run_id = %(run_id)s and a.idx = %(idx)s and a.map_index = %(map_index)s order by a.epoch limit 1000

-- name: result
select value from result where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s

-- name: has_result
-- A result may be null.
select exists (select 1 from result where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s)

-- name: downstream
-- All tasks downstream of the given ones in this version.
with recursive below as (
    select g.dst from edge g where g.version_id = %(version_id)s and g.src = any(%(idxs)s::int[])
    union
    select g.dst from below b join edge g on g.version_id = %(version_id)s and g.src = b.dst
)
select dst from below order by dst

-- name: page_of_run
-- In their order, from after one.
select idx, map_index, task, state, attempt, max_attempts, epoch, queue, priority, not_before, started_at, finished_at,
    exit_code, reason,
       request
  from all_tasks where run_id = %(run_id)s and (idx, map_index) > (%(idx)s::int, %(map_index)s::int)
   and (%(state)s::task_state is null or state = %(state)s)
 order by idx, map_index limit %(limit)s

-- name: by_name
-- All tasks of that name in a run: one, or one per map index.
select t.idx, t.map_index, t.task, t.state, t.attempt, t.max_attempts, t.epoch, t.queue, t.priority, t.not_before,
    t.started_at,
       t.finished_at, t.exit_code, t.reason, t.request
  from run_status r join task_spec s on s.version_id = r.version_id and s.name = %(task)s
  join all_tasks t on t.run_id = r.run_id and t.idx = s.idx
 where r.run_id = %(run_id)s order by t.map_index limit %(limit)s
