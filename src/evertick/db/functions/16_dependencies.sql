-- Schedules that wait for runs, tasks or assets instead of a time, and the updates of assets.

-- `updates`: which updates of an asset count: all, only those without a key, or only those of a partition.
create function condition_sources(p_condition jsonb) returns table (kind text, name text, updates text)
language sql immutable as $$
    with recursive part as (
        select p_condition as c
        union all
        select x from part p cross join lateral jsonb_array_elements(coalesce(p.c->'all', p.c->'any')) x
        where p.c ? 'all' or p.c ? 'any'
    )
    select k.key, k.value, case when p.c ? 'mapper' then 'keyed' when p.c ? 'is_unkeyed' then 'unkeyed' else 'all' end
    from part p cross join lateral jsonb_each_text(p.c) k
    where k.key in ('dag', 'end', 'asset', 'alias')
$$;

-- Whether a schedule hears of an update, of this partition or of the whole asset.
create function is_heard(p_updates text, p_key text) returns boolean language sql immutable as $$
    select p_updates = 'all' or (p_updates = 'keyed') = (p_key is not null)
$$;

-- Whether the received events ({"dag:a", "asset:b"}) satisfy the condition.
create function is_condition_met(p_condition jsonb, p_heard text[]) returns boolean language plpgsql immutable as $$
begin
    if p_condition ? 'all' then
        return (select bool_and(is_condition_met(x, p_heard)) from jsonb_array_elements(p_condition->'all') x);
    elsif p_condition ? 'any' then
        return (select bool_or(is_condition_met(x, p_heard)) from jsonb_array_elements(p_condition->'any') x);
    end if;
    return (select k.key || ':' || k.value = any(p_heard) from jsonb_each_text(p_condition - 'is_unkeyed') k);
end $$;

-- Records that tasks have updated assets: those described by their attempts, and the rest of their outlets. They are of
-- the partition that the attempt names, or that its run is for.
create function record_task_updates(p_ended task_ref[], p_at timestamptz) returns asset_update[] language plpgsql as $$
declare
    made asset_update[];
begin
    if p_ended is null then
        return '{}';
    end if;
    with ended as materialized (
        select e.run_id, e.idx, e.map_index, k.epoch, s.outlets,
               (select p.key from run_partition p where p.run_id = e.run_id) as partition_key
        from unnest(p_ended) e join task_spec s on s.version_id = e.version_id and s.idx = e.idx
        join task k on k.run_id = e.run_id and k.idx = e.idx and k.map_index = e.map_index
        where e.state = 'success' and s.outlets is not null
    ), described as (
        update asset_update u
        set occurred_at = p_at, partition_key = coalesce(u.partition_key, e.partition_key) from ended e
        where u.run_id = e.run_id and u.idx = e.idx and u.map_index = e.map_index and u.epoch = e.epoch
          and u.occurred_at is null
        returning u
    ), linked as (
        insert into asset_alias (alias, asset)
        select distinct (d.u).alias, (d.u).asset from described d where (d.u).alias is not null order by 1, 2
        on conflict (alias, asset) do nothing
    ), plain as (
        insert into asset_update as y (asset, extra, updated_by, occurred_at, run_id, idx, map_index, epoch,
                                       partition_key)
        select o.name, '{}', format('run %s', e.run_id), p_at, e.run_id, e.idx, e.map_index, e.epoch, e.partition_key
        from ended e cross join lateral unnest(e.outlets) o(name)
        where (e.run_id, e.idx, e.map_index, o.name) not in (
            select (d.u).run_id, (d.u).idx, (d.u).map_index, (d.u).asset from described d where (d.u).alias is null)
        returning y as u
    )
    select array_agg(x.u) into made from (select d.u from described d union all select p.u from plain p) x;
    return coalesce(made, '{}');
end $$;

-- Records the closed runs and ended tasks that a schedule waits for. They are only recorded: the verb holds its run's
-- lock, and schedules are locked before runs. The runner's step reports it, so that the leader is notified.
-- p_ended: null if none of them has updated an asset.
create function record_dependency_events(p_closed bigint[], p_ended task_ref[], inout fx effects) language plpgsql as $$
declare
    t timestamptz := clock();
    updates asset_update[] := record_task_updates(p_ended, t);
begin
    fx := wake_run_waiters(p_closed, fx);
    insert into dependency_event (kind, name, run_id, occurred_at, update_id, partition_key)
    select k.kind, k.name, k.run_id, t, k.update_id, k.partition_key
    from (select e.kind, d.name, s.run_id, null::bigint as update_id, null::text as partition_key
          from run_status s join dag d on d.dag_id = s.dag_id
          cross join (values ('end'), ('dag')) e(kind)
          where s.run_id = any(p_closed) and (e.kind = 'end' or s.state = 'success')
          union all
          select distinct n.kind, n.name, u.run_id, case when u.partition_key is not null then u.update_id end,
                 u.partition_key
          from unnest(updates) u
          cross join lateral (select 'asset' as kind, u.asset as name
                              union all select 'alias', u.alias where u.alias is not null
                              union all select 'alias', a.alias from asset_alias a where a.asset = u.asset) n) k
    where exists (select 1 from schedule_dependency w
                  where w.kind = k.kind and w.name = k.name and is_heard(w.updates, k.partition_key))
    order by k.run_id, k.kind, k.name;
    if found then
        fx.wakes_planner := true;
    end if;
end $$;

-- Delivers events to the schedules that wait for them; a schedule whose condition is met is due now. The same event
-- several times before it fires counts once: the run has not begun and will find it. Returns how many became due, and
-- whether updates of partitions are still to be mapped: they wait in a table of their own.
create function deliver_dependencies(p_shard smallint, p_epoch bigint, p_limit int, out became_due int,
                                     out has_more boolean, out has_partitions boolean) language plpgsql as $$
declare
    taken jsonb;
    concerned int[];
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    with gone as (
        delete from dependency_event a where a.event_id = any(array(
            select x.event_id from dependency_event x order by x.event_id limit p_limit for update skip locked))
        returning a.*
    )
    select jsonb_agg(to_jsonb(g) order by g.event_id), count(*) = p_limit into taken, has_more from gone g;
    if jsonb_path_exists(taken, '$[*].partition_key ? (@ != null)') then
        insert into partition_arrival (schedule_id, update_id, asset, key, occurred_at)
        select y.schedule_id, x.update_id, x.name, x.partition_key, x.occurred_at
        from jsonb_to_recordset(taken) as x(event_id bigint, kind text, name text, update_id bigint,
                                            occurred_at timestamptz, partition_key text)
        join schedule_dependency y on y.kind = x.kind and y.name = x.name and y.updates = 'keyed'
        where x.partition_key is not null order by x.event_id, y.schedule_id;
    end if;
    has_partitions := exists (select 1 from partition_arrival);
    concerned := array(
        select distinct w.schedule_id
        from jsonb_to_recordset(coalesce(taken, '[]')) as x(kind text, name text, partition_key text)
        cross join lateral (select y.schedule_id from schedule_dependency y
                            where y.kind = x.kind and y.name = x.name and y.updates <> 'keyed'
                              and is_heard(y.updates, x.partition_key) offset 0) w);
    became_due := 0;
    if cardinality(concerned) = 0 then
        return;
    end if;
    perform 1 from schedule_state s where s.schedule_id = any(concerned) order by s.schedule_id for no key update;
    insert into dependency_state as h (schedule_id, kind, name, run_id, occurred_at, update_id)
    select distinct on (w.schedule_id, x.kind, x.name) w.schedule_id, x.kind, x.name, x.run_id, x.occurred_at,
        case when x.run_id is null then x.update_id end
    from jsonb_to_recordset(taken) as x(event_id bigint, kind text, name text, run_id bigint, occurred_at timestamptz,
                                        update_id bigint, partition_key text)
    cross join lateral (select y.schedule_id from schedule_dependency y
                        where y.kind = x.kind and y.name = x.name and y.updates <> 'keyed'
                          and is_heard(y.updates, x.partition_key) offset 0) w
    order by w.schedule_id, x.kind, x.name, x.event_id desc
    on conflict (schedule_id, kind, name) do update
        set run_id = excluded.run_id, occurred_at = excluded.occurred_at, update_id = excluded.update_id;
    with met as (
        select s.schedule_id, s.next_due, greatest(t, s.last_fired + interval '1 microsecond') as due
        from unnest(concerned) n(id)
        cross join lateral (select * from schedule_state y where y.schedule_id = n.id offset 0) s
        cross join lateral (select * from schedule y where y.schedule_id = n.id and y.deleted_at is null offset 0) c
        where is_condition_met((c.spec->>'after')::jsonb, array(
            select h.kind || ':' || h.name from dependency_state h where h.schedule_id = n.id))
    ), moved as (
        update schedule_state s set next_due = m.due from met m
        where s.schedule_id = m.schedule_id and s.next_due is null
        returning s.schedule_id
    ), told as (
        delete from dependency_state h using met m where h.schedule_id = m.schedule_id
        returning h.*, coalesce(m.next_due, m.due) as fire_at
    ), written as (
        insert into run_trigger (schedule_id, fire_at, kind, name, run_id, occurred_at, update_id)
        select d.schedule_id, d.fire_at, d.kind, d.name, d.run_id, d.occurred_at, d.update_id from told d
        on conflict (schedule_id, fire_at, kind, name) do update
            set run_id = excluded.run_id, occurred_at = excluded.occurred_at, update_id = excluded.update_id
    )
    select count(*) into became_due from moved;
end $$;

-- Records an update of an asset that is reported from outside, for the schedules that wait for it.
create function update_asset(p_asset text, p_extra jsonb, p_key text, p_actor actor, out update_id bigint,
                             out occurred_at timestamptz) language plpgsql as $$
begin
    insert into asset_update as u (asset, extra, updated_by, occurred_at, partition_key)
    values (p_asset, p_extra, p_actor.name, clock(), p_key)
    returning u.update_id, u.occurred_at into update_asset.update_id, update_asset.occurred_at;
    insert into dependency_event (kind, name, update_id, occurred_at, partition_key)
    select n.kind, n.name, update_asset.update_id, update_asset.occurred_at, p_key
    from (select 'asset' as kind, p_asset as name
          union all select 'alias', a.alias from asset_alias a where a.asset = p_asset) n
    where exists (select 1 from schedule_dependency w
                  where w.kind = n.kind and w.name = n.name and is_heard(w.updates, p_key));
    perform write_audit(p_actor, 'update_asset', jsonb_strip_nulls(jsonb_build_object(
        'asset', p_asset, 'update', update_asset.update_id, 'partition', p_key)));
end $$;

-- Discards the updates that schedules of these DAGs (null: of all) have received. Returns how many.
create function discard_asset_events(p_dag_ids int[], p_asset text, p_before timestamptz, p_actor actor, out n int)
language plpgsql as $$
declare
    meant int[] := array(
        select c.schedule_id from schedule c
        where (p_dag_ids is null or c.dag_id = any(p_dag_ids))
          and (exists (select 1 from dependency_state h where h.schedule_id = c.schedule_id
                       and h.kind in ('asset', 'alias'))
               or exists (select 1 from partition_update u where u.schedule_id = c.schedule_id and u.fire_at is null)));
begin
    perform 1 from schedule_state s where s.schedule_id = any(meant) order by s.schedule_id for no key update;
    delete from dependency_state h
    where h.schedule_id = any(meant) and h.kind in ('asset', 'alias')
      and (p_asset is null or (h.kind = 'asset' and h.name = p_asset))
      and (p_before is null or h.occurred_at < p_before);
    get diagnostics n = row_count;
    n := n + discard_partition_updates(meant, p_asset, p_before);
    if n > 0 then
        perform write_audit(p_actor, 'unhear', jsonb_strip_nulls(jsonb_build_object('asset', p_asset, 'updates', n)),
                            p_dag_id => case when cardinality(p_dag_ids) = 1 then p_dag_ids[1] end);
    end if;
end $$;
