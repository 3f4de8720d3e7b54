-- The overview for the home page: each part by an index and bounded, whatever the history.

-- name: activity
-- One row. Open runs and late schedules are counted up to the cap. Fire lag: how late the newest runs were.
with open as materialized (
    select s.state from run_status s
     where s.state in ('queued', 'running') and (%(dag_ids)s::int[] is null or s.dag_id = any(%(dag_ids)s))
     limit %(cap)s
), late as materialized (
    select s.next_due from shard h
      cross join lateral (select x.next_due from schedule_state x
                           where x.shard = h.shard and x.next_due <= clock() - interval '2 seconds'
                             and x.next_due is not null and not x.is_paused and x.error is null
                           order by x.next_due limit %(cap)s) s
     order by s.next_due limit %(cap)s
), lag as materialized (
    select extract(epoch from r.created_at - r.fire_at)::double precision - c.delay_seconds as seconds
      from (select n.kind, n.schedule_id, n.created_at, n.fire_at from run n order by n.run_id desc limit 300) r
      cross join lateral (select x.delay_seconds from schedule x where x.schedule_id = r.schedule_id offset 0) c
     where r.kind = 'scheduled'
)
select clock() as read_at, (select count(*) from open o where o.state = 'running') as running,
       (select count(*) from open o where o.state = 'queued') as queued,
       (select count(*) from (select 1 from lease limit %(cap)s) l) as tasks,
       (select count(*) from (select 1 from ready_task limit %(cap)s) l) as ready, (select count(*) from late) as late,
       (select min(l.next_due) from late l) as late_since,
       (select percentile_cont(0.5) within group (order by l.seconds) from lag l) as lag_median,
       (select percentile_cont(0.95) within group (order by l.seconds) from lag l) as lag_most,
       (select count(*) from (select 1 from import_error limit %(cap)s) l) as broken_files,
       (select count(*) from (select 1 from dag d where d.deleted_at is null limit %(cap)s) l) as dags

-- name: running
-- The longest-running come first: they are the most likely to hang.
select o.run_id, d.name as dag, o.state, o.started_at, o.open_tasks, v.task_count + o.extra_tasks as task_count, f.kind,
    f.fire_at
  from (select s.run_id, s.dag_id, s.version_id, s.state, s.started_at, s.open_tasks, s.extra_tasks from run_status s
         where s.state = 'running' and s.state in ('queued', 'running')
           and (%(dag_ids)s::int[] is null or s.dag_id = any(%(dag_ids)s)) limit %(cap)s) o
  join dag d on d.dag_id = o.dag_id join dag_version v on v.version_id = o.version_id join run f on f.run_id = o.run_id
 order by o.started_at, o.run_id limit %(limit)s

-- name: failing
-- DAGs with a failure among their newest runs, the latest first, with the states of their newest runs. Newest by key
-- alone: joined, the planner reads every failure there ever was.
with recent as materialized (
    select n.run_id, n.dag_id, n.state from run_status n order by n.run_id desc limit %(window)s
), bad as materialized (
    select r.dag_id, count(*) as failures, max(r.run_id) as run_id from recent r
     where r.state = 'failed' and (%(dag_ids)s::int[] is null or r.dag_id = any(%(dag_ids)s)) group by r.dag_id
     order by max(r.run_id) desc limit %(limit)s
)
select d.name as dag, b.failures, b.run_id, s.finished_at, s.reason,
       array(select e.state::text
               from (select n.run_id from run n where n.dag_id = b.dag_id order by n.run_id desc limit 20) w
               join run_status e on e.run_id = w.run_id order by w.run_id desc) as newest
  from bad b join dag d on d.dag_id = b.dag_id join run_status s on s.run_id = b.run_id order by b.run_id desc

-- name: late
-- Open alerts and quarantined schedules.
(select a.kind, d.name as dag, c.name as schedule, nullif(a.task, '') as task, a.run_id, a.due_at as since, a.count,
    null as reason
   from alert a join schedule c on c.schedule_id = a.schedule_id join dag d on d.dag_id = c.dag_id
  where a.ended_at is null and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s))
  order by a.alert_id desc limit %(limit)s)
union all
(select 'set_aside', d.name, c.name, null, null, s.next_due, 1, s.error
   from schedule_state s join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
  where s.error is not null and c.deleted_at is null and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s))
  order by c.schedule_id limit %(limit)s)

-- name: upcoming
-- By the index of live cursors: the next fires within the requested time.
select d.name as dag, c.name as schedule, s.next_due, c.spec, c.delay_seconds
  from (select y.schedule_id, y.next_due from shard h
          cross join lateral (select x.schedule_id, x.next_due from schedule_state x
                               where x.shard = h.shard and x.next_due <= clock() + make_interval(secs => %(seconds)s)
                                 and x.next_due is not null and not x.is_paused and x.error is null
                               order by x.next_due limit %(cap)s) y
         order by y.next_due limit %(cap)s) s
  join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
 where %(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s) order by s.next_due, c.schedule_id limit %(limit)s

-- name: lines
-- Every queue with waiting tasks: how many, since when, and whether a runner serves it.
select l.queue,
       (select count(*) from (select 1 from ready_task r where r.queue = l.queue limit %(cap)s) counted) as depth,
       (select min(h.enqueued_at) from generate_series(0, 9) n(rank)
          cross join lateral (select r.enqueued_at from ready_task r
                               where r.queue = l.queue and r.rank = n.rank order by r.seq limit 1) h) as oldest_at,
       exists (select 1 from runner r where r.ended_at is null and l.queue = any(r.queues)) as is_served
  from ready_queue l limit %(limit)s

-- The data of charts. Each query reads a bounded number of the newest rows by their key.

-- name: attempts_of_run
-- Every attempt of a run's tasks, with the end of each wait. An attempt that polled has the start of its polling.
select a.idx, a.map_index, s.name as task, a.epoch, a.attempt, a.outcome, a.reason, a.let_in_at, a.taken_at,
       a.started_at, a.start_seconds, a.finished_at, a.retry_at, q.since as polled_since
  from run r join task_spec s on s.version_id = r.version_id
  join all_attempts a on a.run_id = r.run_id and a.idx = s.idx
  left join sensor_poll q on q.run_id = a.run_id and q.idx = a.idx and q.map_index = a.map_index
 where r.run_id = %(run_id)s and a.run_id = %(run_id)s order by a.idx, a.map_index, a.epoch limit %(limit)s

-- name: open_tasks_of_run
-- The progress of tasks without a recorded attempt.
select k.idx, k.map_index, k.admitted_at as let_in_at, k.queued_at as taken_at from task k
 where k.run_id = %(run_id)s and k.state in ('available', 'queued') order by k.idx, k.map_index limit %(limit)s

-- name: runs_by_hour
-- The states of the newest runs of a DAG, by the hour in which they were due.
select date_trunc('hour', coalesce(r.fire_at, r.created_at), %(timezone)s) as hour, s.state::text as state,
       count(*) as runs
  from (select n.run_id from run n where n.dag_id = %(dag_id)s order by n.run_id desc limit %(newest)s) w
  join run r on r.run_id = w.run_id join run_status s on s.run_id = w.run_id
 where coalesce(r.fire_at, r.created_at) >= %(since)s group by 1, 2 order by 1, 2 limit 100000

-- name: durations
-- The durations of the newest runs of a DAG, the newest first. A cleared run starts again long after its creation.
select r.run_id, s.state::text as state, coalesce(r.fire_at, r.created_at) as due_at, r.created_at, s.started_at,
       s.finished_at, (select max(a.occurred_at) from audit_log a
                        where a.run_id = r.run_id and a.action = 'clear'
                          and a.occurred_at <= s.started_at) as cleared_at
  from (select n.run_id from run n where n.dag_id = %(dag_id)s order by n.run_id desc limit %(newest)s) w
  join run r on r.run_id = w.run_id join run_status s on s.run_id = w.run_id order by r.run_id desc limit %(newest)s

-- name: task_durations
-- The durations of one task in the newest runs of a DAG, the newest first; of a mapped task, of all instances together.
select r.run_id, x.state, coalesce(r.fire_at, r.created_at) as due_at, x.started_at as created_at, x.started_at,
       x.finished_at, null::timestamptz as cleared_at
  from (select n.run_id from run n where n.dag_id = %(dag_id)s order by n.run_id desc limit %(newest)s) w
  join run r on r.run_id = w.run_id join run_status s on s.run_id = w.run_id
 cross join lateral (select case when bool_or(t.state = 'failed') then 'failed' else max(t.state::text) end as state,
                            min(t.started_at) as started_at,
                            case when bool_and(t.finished_at is not null) then max(t.finished_at) end as finished_at
                       from task_spec p join task t on t.run_id = s.run_id and t.idx = p.idx
                      where p.version_id = s.version_id and p.name = %(task)s) x
 where x.started_at is not null order by r.run_id desc limit %(newest)s

-- name: states_of_run
-- One row per task of the version and state; a mapped task has as many as its instances have states.
select t.idx, t.state::text as state, count(*) as instances, max(t.map_index) >= 0 as is_mapped
  from all_tasks t where t.run_id = %(run_id)s group by t.idx, t.state order by t.idx, t.state limit %(limit)s
