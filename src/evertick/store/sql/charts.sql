-- The data of charts. Each query reads a bounded number of the newest rows by their key.

-- name: attempts_of_run
-- Every attempt of a run's tasks, with the end of each wait. An attempt that polled has the start of its polling.
select a.idx, a.map_index, s.name as task, a.epoch, a.attempt, a.outcome, a.reason, a.let_in_at, a.taken_at,
    a.started_at, a.start_seconds,
       a.finished_at, a.retry_at, q.since as polled_since
  from run r join task_spec s on s.version_id = r.version_id join attempts a on a.run_id = r.run_id and a.idx = s.idx
  left join poll q on q.run_id = a.run_id and q.idx = a.idx and q.map_index = a.map_index
 where r.run_id = %(run_id)s and a.run_id = %(run_id)s
 order by a.idx, a.map_index, a.epoch limit %(limit)s

-- name: open_tasks_of_run
-- The progress of tasks without a recorded attempt.
select k.idx, k.map_index, k.let_in_at, k.taken_at
  from task k where k.run_id = %(run_id)s and k.state in ('available', 'queued')
 order by k.idx, k.map_index limit %(limit)s

-- name: runs_by_hour
-- The states of the newest runs of a DAG, by the hour in which they were due.
select date_trunc('hour', coalesce(r.fire_at, r.created_at), %(timezone)s) as hour, s.state::text as state,
    count(*) as runs
  from (select n.run_id from run n where n.dag_id = %(dag_id)s order by n.run_id desc limit %(newest)s) w
  join run r on r.run_id = w.run_id join run_status s on s.run_id = w.run_id
 where coalesce(r.fire_at, r.created_at) >= %(since)s
 group by 1, 2 order by 1, 2 limit 100000

-- name: durations
-- The durations of the newest runs of a DAG, the newest first.
select r.run_id, s.state::text as state, coalesce(r.fire_at, r.created_at) as due_at, r.created_at, s.started_at,
    s.finished_at
  from (select n.run_id from run n where n.dag_id = %(dag_id)s order by n.run_id desc limit %(newest)s) w
  join run r on r.run_id = w.run_id join run_status s on s.run_id = w.run_id
 order by r.run_id desc limit %(newest)s

-- name: states_of_run
-- One row per task of the version and state; a mapped task has as many as its instances have states.
select t.idx, t.state::text as state, count(*) as instances, max(t.map_index) >= 0 as is_mapped
  from tasks t where t.run_id = %(run_id)s group by t.idx, t.state order by t.idx, t.state limit %(limit)s
