-- The figures of DAGs and tasks, added up from the runs that ended, each once. The leader of shard 0 does it.

-- The next runs that ended, in the order in which they ended, after a position and not later than an instant: of each
-- DAG by its index.
create function next_ended_runs(p_ended_at timestamptz, p_run_id bigint, p_until timestamptz, p_limit int)
returns table (run_id bigint, finished_at timestamptz) language sql stable as $$
    select x.run_id, x.finished_at from dag d
    cross join lateral (select s.run_id, s.finished_at from run_status s
                        where s.dag_id = d.dag_id and s.finished_at is not null and s.finished_at <= p_until
                          and (s.finished_at, s.run_id) > (p_ended_at, p_run_id)
                        order by s.finished_at, s.run_id limit p_limit) x
    order by x.finished_at, x.run_id limit p_limit
$$;

-- Adds the next p_limit ended runs, in the order in which they ended, and moves the position in the same transaction.
-- Returns what was added, by DAG and task ('': the run as a whole). Runs that ended within p_settle_seconds are left to
-- the next call: a commit may be late. Tasks that a clear left as they were are counted already.
create function count_figures(p_shard smallint, p_epoch bigint, p_limit int, p_settle_seconds double precision)
returns table (dag text, task text, succeeded bigint, failed bigint, other bigint, retries bigint,
               duration_seconds double precision, wait_seconds double precision, landed bigint,
               landing_seconds double precision, cpu_seconds double precision, peak_memory_bytes bigint, runs int)
language plpgsql as $$
#variable_conflict use_column
declare
    t timestamptz := clock();
    position figure_cursor;
    until timestamptz := t - make_interval(secs => p_settle_seconds);
    chosen bigint[];
    last_at timestamptz;
begin
    perform fence(p_shard, p_epoch);
    select * into position from figure_cursor for update;
    if position.ended_at is null then
        insert into figure_cursor (ended_at, run_id) values (until, 0);
        return;
    end if;
    select array_agg(e.run_id order by e.finished_at, e.run_id), max(e.finished_at) into chosen, last_at
    from next_ended_runs(position.ended_at, position.run_id, until, p_limit) e;
    if chosen is null then
        return;
    end if;
    update figure_cursor set ended_at = last_at, run_id = chosen[cardinality(chosen)];
    perform judge_forecasts(chosen);
    return query with ended as materialized (
        select s.run_id, s.dag_id, s.state, s.started_at, s.finished_at, s.retried, r.created_at,
               case when r.kind <> 'backfill' and not exists (select 1 from audit_log j where j.run_id = s.run_id
                                                                and j.action = 'clear')
                    then coalesce(r.fire_at, r.created_at) end as due_at
        from unnest(chosen) c(run_id) join run_status s on s.run_id = c.run_id join run r on r.run_id = c.run_id
        where s.started_at is not null and s.finished_at is not null
    ), done as materialized (
        select e.run_id, e.dag_id, e.started_at as run_started_at, e.due_at, k.idx, k.map_index, k.version_id, k.state,
               k.started_at, k.finished_at, k.cpu_seconds, k.peak_memory_bytes
        from ended e cross join lateral (select * from task x where x.run_id = e.run_id offset 0) k
        where k.finished_at >= e.started_at
    ), last_end as materialized (
        select d.run_id, d.version_id, d.idx, max(d.finished_at) as finished_at from done d group by 1, 2, 3
    ), upstream_end as materialized (
        select u.run_id, g.dst as idx, max(u.finished_at) as finished_at
        from last_end u join edge g on g.version_id = u.version_id and g.src = u.idx group by 1, 2
    ), retried as materialized (
        select a.run_id, a.idx, a.map_index, max(a.retry_at) as retry_at, min(a.started_at) as started_at,
               count(*) filter (where a.outcome in ('failed', 'timed_out', 'killed', 'lost')) as retries,
               sum(a.cpu_seconds) as cpu_seconds, max(a.peak_memory_bytes) as peak_memory_bytes
        from ended e cross join lateral (select * from attempt x where x.run_id = e.run_id
                                            and x.finished_at >= e.started_at offset 0) a group by 1, 2, 3
    ), measured as (
        select d.dag_id, p.name as task, d.state::text as state, d.finished_at, coalesce(y.retries, 0) as retries,
               coalesce(d.cpu_seconds, 0)::double precision + coalesce(y.cpu_seconds, 0) as cpu_seconds,
               greatest(d.peak_memory_bytes, y.peak_memory_bytes) as peak_memory_bytes,
               extract(epoch from d.finished_at - d.started_at)::double precision as duration_seconds,
               extract(epoch from d.finished_at - case
                           when p.is_wait then greatest(d.run_started_at, u.finished_at)
                           else least(d.started_at, y.started_at) end)::real as span_seconds,
               greatest(0, extract(epoch from d.started_at - greatest(d.run_started_at, u.finished_at, y.retry_at))
                        )::double precision as wait_seconds,
               extract(epoch from d.finished_at - d.due_at)::double precision as landing_seconds
        from done d join task_spec p on p.version_id = d.version_id and p.idx = d.idx
        left join upstream_end u on u.run_id = d.run_id and u.idx = d.idx
        left join retried y on y.run_id = d.run_id and y.idx = d.idx and y.map_index = d.map_index
        union all
        select e.dag_id, '', e.state::text, e.finished_at, e.retried, 0, null,
               extract(epoch from e.finished_at - e.started_at)::double precision,
               extract(epoch from e.finished_at - e.started_at)::real,
               greatest(0, extract(epoch from e.started_at - e.created_at))::double precision,
               extract(epoch from e.finished_at - e.due_at)::double precision
        from ended e
    ), added as materialized (
        select m.dag_id, m.task, count(*) filter (where m.state = 'success') as succeeded,
               count(*) filter (where m.state = 'failed') as failed,
               count(*) filter (where m.state not in ('success', 'failed')) as other, sum(m.retries)::bigint as retries,
               coalesce(sum(m.duration_seconds) filter (where m.state = 'success'), 0) as duration_seconds,
               coalesce(sum(m.wait_seconds) filter (where m.state = 'success'), 0) as wait_seconds,
               count(m.landing_seconds) filter (where m.state = 'success') as landed,
               coalesce(sum(m.landing_seconds) filter (where m.state = 'success'), 0) as landing_seconds,
               sum(m.cpu_seconds) as cpu_seconds, max(m.peak_memory_bytes) as peak_memory_bytes,
               (array_agg(m.span_seconds order by m.finished_at desc)
                    filter (where m.state = 'success' and m.span_seconds is not null))[:50] as durations
        from measured m group by m.dag_id, m.task
    ), stored as (
        insert into task_figure as f (dag_id, task, succeeded, failed, other, retries, duration_seconds, wait_seconds,
                                      landed, landing_seconds, cpu_seconds, peak_memory_bytes, durations, counted_at)
        select a.dag_id, a.task, a.succeeded, a.failed, a.other, a.retries, a.duration_seconds, a.wait_seconds,
               a.landed, a.landing_seconds, a.cpu_seconds, a.peak_memory_bytes, coalesce(a.durations, '{}'), t
        from added a order by a.dag_id, a.task
        on conflict (dag_id, task) do update
            set succeeded = f.succeeded + excluded.succeeded, failed = f.failed + excluded.failed,
                other = f.other + excluded.other, retries = f.retries + excluded.retries,
                duration_seconds = f.duration_seconds + excluded.duration_seconds,
                wait_seconds = f.wait_seconds + excluded.wait_seconds, landed = f.landed + excluded.landed,
                landing_seconds = f.landing_seconds + excluded.landing_seconds,
                cpu_seconds = f.cpu_seconds + excluded.cpu_seconds,
                peak_memory_bytes = greatest(f.peak_memory_bytes, excluded.peak_memory_bytes),
                durations = (excluded.durations || f.durations)[:50], counted_at = t
    )
    select g.name, a.task, a.succeeded, a.failed, a.other, a.retries, a.duration_seconds, a.wait_seconds, a.landed,
           a.landing_seconds, a.cpu_seconds, a.peak_memory_bytes, cardinality(chosen)
    from added a join dag g on g.dag_id = a.dag_id order by g.name, a.task;
end $$;
