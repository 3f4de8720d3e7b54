-- Lineage: the events of OpenLineage for runs that ended, and their attempts, as notifications in the outbox.

-- Writes the events of the next p_limit ended runs, and moves the position in the same transaction: each event once.
-- Runs that ended within p_settle_seconds are left to the next call: a commit may be late. Returns how many events.
create function enqueue_lineage(p_shard smallint, p_epoch bigint, p_sink text, p_limit int,
                                p_settle_seconds double precision, out events int, out runs int) language plpgsql as $$
declare
    t timestamptz := clock();
    position lineage_cursor;
    until timestamptz := t - make_interval(secs => p_settle_seconds);
    chosen bigint[];
    last_at timestamptz;
begin
    perform fence(p_shard, p_epoch);
    events := 0;
    runs := 0;
    select * into position from lineage_cursor for update;
    if position.ended_at is null then
        insert into lineage_cursor (ended_at, run_id) values (until, 0);
        return;
    end if;
    select array_agg(e.run_id order by e.finished_at, e.run_id), max(e.finished_at) into chosen, last_at
    from next_ended_runs(position.ended_at, position.run_id, until, p_limit) e;
    if chosen is null then
        return;
    end if;
    update lineage_cursor set ended_at = last_at, run_id = chosen[cardinality(chosen)];
    runs := cardinality(chosen);
    with ended as materialized (
        select s.run_id, s.version_id, d.name as dag, s.state::text as outcome, s.started_at, s.finished_at, s.reason,
               r.schedule_id, r.fire_at, v.spec
        from unnest(chosen) c(run_id) join run_status s on s.run_id = c.run_id join run r on r.run_id = c.run_id
        join dag d on d.dag_id = s.dag_id join dag_version v on v.version_id = s.version_id
        where s.started_at is not null and s.finished_at is not null
    ), work as (
        select e.run_id, e.dag, e.started_at as run_started_at, null::text as task, null::int as idx,
               -1 as map_index, 0 as epoch, e.outcome, e.reason, e.started_at, e.finished_at, e.fire_at,
               (select jsonb_agg(jsonb_build_object('name', c.name, 'uri', coalesce(a.uri, c.name)) order by c.name)
                from run_trigger c left join asset a on a.name = c.name
                where c.schedule_id = e.schedule_id and c.fire_at = e.fire_at and c.kind = 'asset') as inputs,
               null::jsonb as outputs
        from ended e
        union all
        select e.run_id, e.dag, e.started_at, p.name, k.idx, k.map_index, k.epoch, k.outcome, k.reason, k.started_at,
               k.finished_at, null,
               (select jsonb_agg(jsonb_build_object('name', n.name, 'uri', coalesce(a.uri, n.name)) order by n.name)
                from jsonb_array_elements_text(e.spec->'tasks'->k.idx->'inlets') n(name)
                left join asset a on a.name = n.name),
               (select jsonb_agg(distinct jsonb_build_object('name', u.asset, 'uri', coalesce(a.uri, u.asset)))
                from asset_update u left join asset a on a.name = u.asset
                where u.run_id = k.run_id and u.idx = k.idx and u.map_index = k.map_index and u.epoch = k.epoch)
        from ended e
        cross join lateral (
            select x.run_id, x.idx, x.map_index, x.epoch, x.state::text as outcome, x.reason, x.started_at,
                   x.finished_at
            from task x
            where x.run_id = e.run_id and not exists (
                select 1 from attempt a where a.run_id = x.run_id and a.idx = x.idx and a.map_index = x.map_index
                    and a.epoch = x.epoch)
            union all
            select a.run_id, a.idx, a.map_index, a.epoch, a.outcome, a.reason, a.started_at, a.finished_at
            from attempt a where a.run_id = e.run_id) k
        join task_spec p on p.version_id = e.version_id and p.idx = k.idx
        where k.started_at is not null and k.finished_at >= e.started_at and k.outcome not in ('deferred', 'given_back')
    ), told as (
        insert into outbox (shard, sink, event, run_id, payload, created_at, waiting_since, due_at)
        select 0, p_sink, 'lineage', w.run_id, jsonb_strip_nulls(jsonb_build_object(
                   'event', 'lineage', 'type', m.type, 'at', m.at, 'run', w.run_id, 'dag', w.dag, 'task', w.task,
                   'idx', w.idx, 'map_index', nullif(w.map_index, -1), 'epoch', w.epoch,
                   'run_started_at', w.run_started_at, 'due_at', w.fire_at, 'inputs', w.inputs,
                   'installation', (select min(g.applied_at) from migration g),
                   'outputs', case when m.type = 'COMPLETE' then w.outputs end,
                   'reason', case when m.type in ('FAIL', 'ABORT') then w.reason end)), t, t, t
        from work w
        cross join lateral (values ('START', w.started_at), (
            case when w.outcome in ('success', 'skipped') then 'COMPLETE' when w.outcome = 'canceled' then 'ABORT'
                 else 'FAIL' end, w.finished_at)) m(type, at)
        order by m.at, m.type desc, w.run_id, w.idx nulls first
        returning 1
    )
    select count(*)::int into events from told;
end $$;
