-- Forecasts: what was predicted of a run, to be compared with its end, and deadlines that will be missed.

-- p_bands: [{run, low, middle, high}] in seconds from now; a run keeps its first band. p_misses: [{schedule, run,
-- due}]: one alert per schedule, which ends when the miss is no longer expected, or the deadline has passed: then the
-- alert of the missed deadline follows. Returns the alerts that began or ended.
create function record_forecast(p_shard smallint, p_epoch bigint, p_bands jsonb, p_misses jsonb)
returns table (dag text, schedule text, run_id bigint, due_at timestamptz, has_ended boolean)
language plpgsql as $$
#variable_conflict use_column
declare
    t timestamptz := clock();
    raised bigint[];
    ended bigint[];
begin
    perform fence(p_shard, p_epoch);
    insert into run_forecast (run_id, made_at, low_at, middle_at, high_at)
    select x.run, t, t + make_interval(secs => x.low), t + make_interval(secs => x.middle),
           t + make_interval(secs => x.high)
    from jsonb_to_recordset(p_bands) as x(run bigint, low double precision, middle double precision,
                                          high double precision)
    join run_status s on s.run_id = x.run and s.state = 'running' order by x.run
    on conflict do nothing;
    with expected as (
        select distinct on (x.schedule) x.schedule, x.run, x.due
        from jsonb_to_recordset(p_misses) as x(schedule int, run bigint, due timestamptz)
        where x.due > t order by x.schedule, x.due
    ), written as (
        insert into alert as a (kind, schedule_id, task, run_id, due_at, last_due_at, raised_at)
        select 'will_miss', e.schedule, '', e.run, e.due, e.due, t from expected e
        on conflict (schedule_id, kind, task) where ended_at is null do nothing
        returning a.alert_id
    ), over as (
        update alert a set ended_at = t
        where a.kind = 'will_miss' and a.ended_at is null
          and (a.due_at <= t or not exists (select 1 from expected e where e.schedule = a.schedule_id))
        returning a.alert_id
    )
    select (select array_agg(w.alert_id) from written w), (select array_agg(o.alert_id) from over o)
    into raised, ended;
    if raised is not null then
        perform notify_alerts(array(
            select row(a.kind, a.schedule_id, a.run_id, a.task, a.due_at)::missed_deadline from alert a
            where a.alert_id = any(raised) order by a.alert_id));
    end if;
    return query select d.name, c.name, a.run_id, a.due_at, coalesce(a.alert_id = any(ended), false) from alert a
    join schedule c on c.schedule_id = a.schedule_id join dag d on d.dag_id = c.dag_id
    where a.alert_id = any(raised || ended) order by a.alert_id;
end $$;

-- Compares the bands of ended runs with their ends, each once. A run that failed or was cleared says nothing.
create function judge_forecasts(p_run_ids bigint[]) returns void language plpgsql as $$
begin
    with judged as (
        delete from run_forecast f where f.run_id = any(p_run_ids) returning *
    ), sums as (
        select count(*) as judged, count(*) filter (where s.finished_at between f.low_at and f.high_at) as inside,
               sum(abs(extract(epoch from s.finished_at - f.middle_at))
                   / greatest(extract(epoch from s.finished_at - f.made_at), 1))::double precision as error_sum
        from judged f join run_status s on s.run_id = f.run_id
        where s.state = 'success' and s.started_at <= f.made_at and s.finished_at > f.made_at
    )
    insert into forecast_accuracy as a (judged, inside, error_sum)
    select x.judged, x.inside, x.error_sum from sums x where x.judged > 0
    on conflict (is_only) do update set judged = a.judged + excluded.judged, inside = a.inside + excluded.inside,
                                        error_sum = a.error_sum + excluded.error_sum;
end $$;
