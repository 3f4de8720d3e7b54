-- The figures of DAGs and tasks, which the leader adds up (functions/30_figures.sql).

-- name: of_dags
-- Of runs as a whole, by the name of the DAG.
select d.name as dag, f.task, f.succeeded, f.failed, f.other, f.retries, f.duration_seconds, f.wait_seconds, f.landed,
       f.landing_seconds, f.cpu_seconds, f.peak_memory_bytes, f.durations, f.counted_at
  from dag d join task_figure f on f.dag_id = d.dag_id and f.task = ''
 where d.name > %(after)s and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s)) and d.deleted_at is null
 order by d.name limit %(limit)s

-- name: of_tasks
-- Of the tasks of one DAG, by name, and first of its runs as a whole.
select d.name as dag, f.task, f.succeeded, f.failed, f.other, f.retries, f.duration_seconds, f.wait_seconds, f.landed,
       f.landing_seconds, f.cpu_seconds, f.peak_memory_bytes, f.durations, f.counted_at
  from task_figure f join dag d on d.dag_id = f.dag_id
 where f.dag_id = %(dag_id)s::int and (f.task > %(after)s or %(is_first)s) order by f.task limit %(limit)s

-- What a forecast reads. Each is bounded; times are seconds from now.

-- name: open_runs
select s.run_id, s.dag_id, s.version_id, d.name as dag, c.schedule_id, c.name as schedule,
       s.state = 'running' as is_started,
       d.is_paused, d.max_active_runs,
       extract(epoch from coalesce(r.fire_at + make_interval(secs => coalesce(c.delay_seconds, 0)), r.created_at)
               - clock())::double precision as due, c.finish_within
  from run_status s join run r on r.run_id = s.run_id join dag d on d.dag_id = s.dag_id
  left join schedule c on c.schedule_id = r.schedule_id
 where s.state in ('queued', 'running') order by s.run_id limit %(limit)s

-- name: progress
-- The tasks of open runs that have a row and do not wait for others, with their place in their queue.
with k as materialized (
    select x.run_id, x.idx, x.map_index, x.state, x.started_at, x.not_before, x.finished_at from run_status s
      cross join lateral (select * from task t where t.run_id = s.run_id and t.state <> 'waiting' offset 0) x
     where s.run_id = any(%(run_ids)s::bigint[])
), place as materialized (
    select q.run_id, q.idx, min(q.seq) as seq from ready_task q where q.run_id = any(%(run_ids)s) group by 1, 2
)
select k.run_id, k.idx,
       count(*) filter (where k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed'))::int as ended,
       coalesce(array_agg(extract(epoch from clock() - k.started_at)::double precision)
                    filter (where k.state = 'running'), '{}') as elapsed,
       count(*) filter (where k.state in ('pending', 'available', 'queued', 'deferred'))::int as waiting,
       min(extract(epoch from coalesce(k.not_before, w.wake_at) - clock())::double precision)
           filter (where k.state in ('pending', 'deferred')) as wakes_in, min(coalesce(p.seq, 0)) as place
  from k left join deferral w on k.state = 'deferred' and w.run_id = k.run_id and w.idx = k.idx
                             and w.map_index = k.map_index and w.kind in ('time', 'clock')
  left join place p on p.run_id = k.run_id and p.idx = k.idx
 group by k.run_id, k.idx order by k.run_id, k.idx limit 200000

-- name: version_tasks
-- The tasks of these versions with their gates of a fixed name, and what is known of past ones.
select s.version_id, s.idx, s.name, s.queue, 9 - s.priority as rank,
       not s.is_wait and not exists (select 1 from trigger_dag_task x where x.version_id = s.version_id
                                        and x.idx = s.idx) as needs_slot,
       coalesce(f.durations, '{}') as durations,
       case when f.succeeded + f.failed > 0
            then f.other::double precision / (f.succeeded + f.failed + f.other) else 0 end as skip_share,
       case when s.is_mapped and h.succeeded + h.failed > 0
            then (f.succeeded + f.failed + f.other)::double precision / (h.succeeded + h.failed)
            else 1 end as instances,
       case when s.is_gated then (
           select jsonb_agg(jsonb_build_array(format('%%s %%s', g.kind, g.name), g.weight,
                                              coalesce(x.capacity, g.capacity, 1)))
             from task_gate g left join gate x on x.kind = g.kind and x.name = g.name
            where g.version_id = s.version_id and g.idx = s.idx and g.name is not null
              and g.kind not in ('order', 'rate', 'past')) end as gates
  from unnest(%(version_ids)s::int[]) v(version_id) join dag_version b on b.version_id = v.version_id
  join task_spec s on s.version_id = v.version_id
  left join task_figure f on f.dag_id = b.dag_id and f.task = s.name
  left join task_figure h on h.dag_id = b.dag_id and h.task = ''
 order by s.version_id, s.idx limit 200000

-- name: version_edges
select g.version_id, g.src, g.dst from edge g where g.version_id = any(%(version_ids)s::int[])
 order by g.version_id, g.src, g.dst limit 500000

-- name: serving
-- The slots of the live runners that claim work, by the queues that they serve.
select r.queues, sum(r.slots)::int as slots from runner r where r.ended_at is null and r.request is null
 group by r.queues order by r.queues limit 1000

-- name: due_schedules
-- Active schedules that fire before an instant.
select c.schedule_id, c.name as schedule, d.dag_id, d.name as dag, d.version_id, d.max_active_runs,
       c.spec::text as spec, c.delay_seconds, c.finish_within, s.next_due
  from shard h
  cross join lateral (select x.schedule_id, x.next_due from schedule_state x
                       where x.shard = h.shard and x.next_due <= %(until)s::timestamptz and x.next_due is not null
                         and not x.is_paused and x.error is null order by x.next_due limit %(limit)s) s
  join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
 where d.version_id is not null
 order by s.next_due, c.schedule_id limit %(limit)s

-- name: accuracy
-- Of the forecasts whose runs have ended: how many, how many ends were in the band, and the sum of the relative errors.
select a.judged, a.inside, a.error_sum from forecast_accuracy a
