-- Tasks, in the order of a task's life.

-- name: list_of_run
-- The tasks view shows tasks without a row as waiting.
select idx as task_index, map_index, task, state, attempt, max_attempts, epoch, queue, priority, not_before, started_at,
       finished_at, exit_code, reason, request, map_name
  from all_tasks where run_id = %(run_id)s order by idx, map_index limit %(limit)s

-- name: find
select idx as task_index, map_index, task, state, attempt, max_attempts, epoch, queue, priority, not_before, started_at,
       finished_at, exit_code, reason, request, map_name
  from all_tasks where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s

-- name: count_by_state
select state, count(*) as count from all_tasks where run_id = %(run_id)s group by state order by state limit 100

-- name: attempts
select a.epoch, a.attempt, a.outcome, a.reason, a.exit_code, a.started_at, a.finished_at, r.runner_id, r.host,
    r.executor, a.cpu_seconds, a.peak_memory_bytes
  from all_attempts a left join runner r on r.session = a.session
 where a.run_id = %(run_id)s and a.idx = %(idx)s and a.map_index = %(map_index)s order by a.epoch limit 1000

-- name: triggers
-- What deferred tasks wait for, without the arguments, which may be secrets.
select w.run_id, w.idx, w.map_index, w.trigger_id, w.classpath, w.since, w.queue, r.runner_id, r.started_at, r.host,
       r.heartbeat_at
  from unnest(%(run_ids)s::bigint[], %(idxs)s::int[], %(map_indexes)s::int[]) as x(run_id, idx, map_index)
  join task_trigger w on w.run_id = x.run_id and w.idx = x.idx and w.map_index = x.map_index and w.event is null
  left join runner r on r.session = w.session limit 10000

-- name: sensor_polls
-- Each poll is a short attempt, so the start of the task is the start of its last poll.
select since, polls from sensor_poll
 where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s

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
select idx as task_index, map_index, task, state, attempt, max_attempts, epoch, queue, priority, not_before, started_at,
       finished_at, exit_code, reason, request, map_name
  from all_tasks where run_id = %(run_id)s and (idx, map_index) > (%(idx)s::int, %(map_index)s::int)
   and (%(state)s::task_state is null or state = %(state)s) order by idx, map_index limit %(limit)s

-- name: folded_page_of_run
-- The same with only the first instance of each mapped task.
select idx as task_index, map_index, task, state, attempt, max_attempts, epoch, queue, priority, not_before, started_at,
       finished_at, exit_code, reason, request, map_name
  from all_tasks where run_id = %(run_id)s and idx > %(idx)s::int and map_index <= 0 order by idx limit %(limit)s

-- name: instances_of_run
-- The instances of each mapped task of a run by state. A run has as many rows as its tasks have states.
select t.idx, t.state::text as state, count(*) as instances, min(t.started_at) as started_at,
       max(t.finished_at) as finished_at
  from task t where t.run_id = %(run_id)s and t.map_index >= 0 group by t.idx, t.state
 order by t.idx, t.state limit 10000

-- name: by_name
-- All tasks of that name in a run: one, or one per map index.
select t.idx as task_index, t.map_index, t.task, t.state, t.attempt, t.max_attempts, t.epoch, t.queue, t.priority,
       t.not_before, t.started_at, t.finished_at, t.exit_code, t.reason, t.request, t.map_name
  from run_status r join task_spec s on s.version_id = r.version_id and s.name = %(task)s
  join all_tasks t on t.run_id = r.run_id and t.idx = s.idx where r.run_id = %(run_id)s order by t.map_index
 limit %(limit)s
