-- Schedules: their fires, the history of their versions, changes of one schedule, and runs that must not overlap.

-- Applies fire plans. p_plans: [{schedule_id, version, expected, fires: [instant], last_fire, skipped: {first_at,
-- last_at, count, reason}, missing: the same, next_due, overlap, has_deadlines, partitions: [[instant, key, date]]}];
-- skipped, missing and the last three may be absent. The cursor advances and its runs are created in one transaction
-- (V1); a plan whose schedule has advanced, changed or been paused is left out. p_even_held: also what was due while it
-- was paused. Returns the applied ones.
create function apply_fire_plans(p_plans jsonb, p_even_held boolean, fx effects)
returns fire_result language plpgsql as $$
begin
    perform 1 from schedule_state s
    where s.schedule_id = any(array(select (x->>'schedule_id')::int from jsonb_array_elements(p_plans) x))
    order by s.schedule_id for no key update;
    return apply_locked_plans(p_plans, p_even_held, fx);
end $$;

-- The due fires of schedules that are about to change, where they are too many for the change itself.
create function apply_due_fires(p_plans jsonb) returns fire_result language plpgsql as $$
declare
    fx effects;
    done fire_result;
begin
    done := apply_fire_plans(p_plans, false, fx);
    fx := apply_effects(done.fx);
    return done;
end $$;

-- The same for a caller that holds the locks of these schedules.
create function apply_locked_plans(p_plans jsonb, p_even_held boolean, fx effects)
returns fire_result language plpgsql as $$
declare
    done fire_result;
    resolved overlap_result;
    made bigint[];
    t timestamptz := clock();
begin
    done.canceled := 0;
    if jsonb_path_exists(p_plans, '$[*].overlap') then
        resolved := resolve_overlap(p_plans, fx);
        p_plans := resolved.plans;
        done.canceled := resolved.canceled;
        fx := resolved.fx;
    end if;
    -- Every row is found by its key. "is not true": the index of due schedules fits "not paused" as well, and a plan
    -- that was made while they were few takes it and compares each with each (80 ms for a thousand).
    with plan as materialized (
        select *
        from jsonb_to_recordset(p_plans) as x(schedule_id int, version int, expected timestamptz, next_due timestamptz,
            last_fire timestamptz, fires timestamptz[], skipped jsonb, overlapped jsonb, missing jsonb)
    ), moved as (
        update schedule_state s set next_due = p.next_due, last_fired = coalesce(p.last_fire, s.last_fired)
        from plan p
        where s.schedule_id = p.schedule_id and s.version = p.version and s.next_due = p.expected
          and (p_even_held or (s.is_paused is not true and s.error is null))
        returning s.schedule_id, p.fires, p.skipped, p.overlapped, p.missing
    ), created as (
        insert into run as r (dag_id, version_id, kind, schedule_id, fire_at, params, triggered_by, created_at)
        select d.dag_id, d.version_id, 'scheduled', f.schedule_id, f.fire_at, c.params, 'schedule', t
        from (select m.schedule_id, unnest(m.fires) as fire_at from moved m) f
        cross join lateral (select * from schedule c where c.schedule_id = f.schedule_id offset 0) c
        cross join lateral (select * from dag d where d.dag_id = c.dag_id offset 0) d
        where d.deleted_at is null order by f.fire_at, f.schedule_id
        on conflict (schedule_id, fire_at) where schedule_id is not null do nothing
        returning r.run_id
    ), passed as (
        insert into skip_record (schedule_id, first_at, last_at, count, reason, recorded_at)
        select m.schedule_id, k.first_at, k.last_at, k.count, k.reason, t from moved m
        cross join lateral (values (m.skipped), (m.overlapped), (m.missing)) v(skipped)
        cross join lateral jsonb_to_record(v.skipped) as k(first_at timestamptz, last_at timestamptz, count bigint,
                                                           reason text)
        where jsonb_typeof(v.skipped) = 'object'
        on conflict (schedule_id, first_at) do nothing
    )
    select array(select m.schedule_id from moved m), array(select c.run_id from created c),
           coalesce((select sum((m.overlapped->>'count')::int) from moved m where m.overlapped is not null), 0)
    into done.won, made, done.overlapped;
    if done.overlapped > 0 then
        perform merge_overlap_skips(done.won);
    end if;
    done.fx := open_runs(made, fx);
    if jsonb_path_exists(p_plans, '$[*].has_deadlines') then
        perform set_deadlines(made);
    end if;
    if jsonb_path_exists(p_plans, '$[*].partitions') then
        perform record_partitions(p_plans, made, done.won);
    end if;
    return done;
end $$;

-- A schedule that another transaction is changing is skipped: that transaction applies what is due. So is one that is
-- not due by the database's clock: it was planned ahead, by a leader whose own clock is fast.
create function fire_schedules(p_shard smallint, p_epoch bigint, p_plans jsonb)
returns fire_result language plpgsql as $$
declare
    fx effects;
    free int[];
    done fire_result;
begin
    perform fence(p_shard, p_epoch);
    free := array(
        select s.schedule_id from schedule_state s
        where s.schedule_id = any(array(select (x->>'schedule_id')::int from jsonb_array_elements(p_plans) x))
          and (s.next_due > clock()) is not true and s.shard = p_shard   -- one that has moved is its new leader's
        order by s.schedule_id for no key update skip locked);
    if cardinality(free) < jsonb_array_length(p_plans) then
        p_plans := (select coalesce(jsonb_agg(x), '[]') from jsonb_array_elements(p_plans) x
                    where (x->>'schedule_id')::int = any(free));
    end if;
    done := apply_locked_plans(p_plans, false, fx);
    fx := apply_effects(done.fx);
    return done;
end $$;

-- Writes down the version that the given schedules have just got.
create function record_schedule_versions(p_ids int[], p_change text) returns void language sql as $$
    insert into schedule_version (schedule_id, version, change, changed_by, changed_at, origin, is_paused_directly,
                                  settings)
    select c.schedule_id, c.version, p_change, c.changed_by, c.changed_at, c.origin, s.is_paused_directly,
           jsonb_build_object('spec', c.spec, 'params', c.params, 'misfire', c.misfire,
                              'window_seconds', c.window_seconds, 'catchup_limit', c.catchup_limit,
                              'overlap', c.overlap, 'start_within', c.start_within, 'finish_within', c.finish_within)
    from schedule c join schedule_state s on s.schedule_id = c.schedule_id where c.schedule_id = any(p_ids)
    on conflict (schedule_id, version) do nothing;
    -- The events that they wait for from now on; events that were received before no longer count.
    delete from dependency_state h where h.schedule_id = any(p_ids);
    select forget_partitions(p_ids);
    delete from schedule_dependency w where w.schedule_id = any(p_ids);
    insert into schedule_dependency (kind, name, schedule_id, updates)
    select distinct on (c.schedule_id, x.kind, x.name) x.kind, x.name, c.schedule_id, x.updates
    from schedule c cross join lateral condition_sources((c.spec->>'after')::jsonb) x
    where c.schedule_id = any(p_ids) and c.deleted_at is null and c.spec ? 'after'
    order by c.schedule_id, x.kind, x.name, x.updates;
    update dag d set has_dependents = true
    where not d.has_dependents and d.name in (
        select w.name from schedule_dependency w where w.schedule_id = any(p_ids) and w.kind in ('dag', 'end'));
$$;

-- A change is planned from what was read before. After a fire or another change it is planned again: no due fire is
-- lost. p_seen: [[schedule_id, version, next_due]] of the DAG, or of its schedule p_name; the caller holds their locks.
create function check_unchanged(p_dag text, p_name text, p_seen jsonb) returns void language plpgsql as $$
begin
    if p_seen is distinct from (
        select coalesce(jsonb_agg(jsonb_build_array(s.schedule_id, s.version, extract(epoch from s.next_due) * 1000000,
                                                    s.is_paused, s.error is not null) order by s.schedule_id), '[]')
        from dag d join schedule c on c.dag_id = d.dag_id join schedule_state s on s.schedule_id = c.schedule_id
        where d.name = p_dag and c.deleted_at is null and (p_name is null or c.name = p_name)) then
        raise exception 'the schedules of % have moved on', p_dag using errcode = 'EV002';
    end if;
end $$;

-- Ends schedules. The caller has applied what was due.
create function delete_schedules(p_ids int[], p_actor actor) returns void language plpgsql as $$
begin
    if cardinality(p_ids) = 0 then
        return;
    end if;
    update schedule c
    set deleted_at = clock(), version = c.version + 1, changed_by = p_actor.name, changed_at = clock()
    where c.schedule_id = any(p_ids) and c.deleted_at is null;
    update schedule_state s set next_due = null, version = c.version, is_paused_directly = false,
        is_paused = d.is_paused
    from schedule c join dag d on d.dag_id = c.dag_id
    where c.schedule_id = s.schedule_id and s.schedule_id = any(p_ids);
    perform record_schedule_versions(p_ids, 'delete');
end $$;

-- Pauses, unpauses or deletes one schedule by compare-and-set (V12) on p_expected (null: any version). From then on it
-- is the user's: publishing leaves it as it is. Returns its version, or null when it is not at the expected one.
create function change_schedule(p_dag_id int, p_name text, p_change text, p_expected int, p_seen jsonb, p_settle jsonb,
                                p_actor actor, out changed int) language plpgsql as $$
declare
    fx effects;
    id int;
begin
    perform lock_schedules(d.name) from dag d where d.dag_id = p_dag_id;
    perform check_unchanged(d.name, p_name, p_seen) from dag d where d.dag_id = p_dag_id;
    select c.schedule_id into id from schedule c
    where c.dag_id = p_dag_id and c.name = p_name and c.deleted_at is null
        and (p_expected is null or c.version = p_expected);
    if not found then
        return;
    end if;
    -- A schedule that already is in the wanted state stays as it is: the leader applies what is due.
    select c.version into changed from schedule c join schedule_state s on s.schedule_id = c.schedule_id
    where c.schedule_id = id and p_change <> 'delete' and s.is_paused_directly = (p_change = 'pause');
    if found then
        return;
    elsif p_change <> 'unpause' then
        fx := (apply_fire_plans(p_settle, p_change = 'delete', fx)).fx;
    end if;
    update schedule c set origin = 'user' where c.schedule_id = id;
    if p_change = 'delete' then
        perform delete_schedules(array[id], p_actor);
    else
        update schedule c set version = c.version + 1, changed_by = p_actor.name, changed_at = clock()
        where c.schedule_id = id;
        update schedule_state s
        set version = c.version, is_paused_directly = p_change = 'pause', is_paused = p_change = 'pause' or d.is_paused
        from schedule c join dag d on d.dag_id = c.dag_id where c.schedule_id = s.schedule_id and s.schedule_id = id;
        perform record_schedule_versions(array[id], p_change);
    end if;
    select c.version into changed from schedule c where c.schedule_id = id;
    if p_change = 'unpause' then
        -- The plans are for the version that it has from now on.
        fx := (apply_fire_plans(p_settle, false, fx)).fx;
    end if;
    perform write_audit(p_actor, p_change || '_schedule', jsonb_build_object('name', p_name, 'version', changed),
                        p_dag_id => p_dag_id);
    fx := apply_effects(fx);
end $$;

-- Decides the fires of schedules whose runs must not overlap, by the runs that are open now. "skip" allows one open
-- run, "queue_one" two, "queue_all" any number; "cancel" ends what is open in favor of the newest fire. A fire without
-- a run moves to the plan's `overlapped`, a range like its `skipped`. The caller holds the schedules' locks.
create function resolve_overlap(p_plans jsonb, fx effects) returns overlap_result language plpgsql as $$
declare
    plans jsonb;
    canceled int := 0;
    live jsonb;
    doomed bigint[];
    one bigint;
    stopped stop_result;
begin
    with due as materialized (
        select p.schedule_id, p.overlap, c.dag_id
        from jsonb_to_recordset(p_plans) as p(schedule_id int, version int, expected timestamptz, overlap text,
                                              fires jsonb)
        cross join lateral (select x.dag_id from schedule x where x.schedule_id = p.schedule_id offset 0) c
        cross join lateral (select * from schedule_state x where x.schedule_id = p.schedule_id offset 0) s
        where p.overlap is not null and jsonb_array_length(p.fires) > 0 and s.version = p.version
          and s.next_due = p.expected and s.is_paused is not true and s.error is null
    ), open as (
        select a.run_id, r.schedule_id from (select distinct d.dag_id from due d) d
        cross join lateral (select y.run_id from run_status y
                            where y.dag_id = d.dag_id and y.state in ('queued', 'running') offset 0) a
        cross join lateral (select y.schedule_id from run y where y.run_id = a.run_id offset 0) r
    )
    select (select jsonb_object_agg(o.schedule_id, o.runs)
            from (select x.schedule_id, count(*) as runs from open x where x.schedule_id is not null group by 1) o),
           (select array_agg(x.run_id order by x.run_id) from open x
            where x.schedule_id = any(array(select d.schedule_id from due d where d.overlap = 'cancel')))
    into live, doomed;
    if doomed is not null then
        perform 1 from run_status s where s.run_id = any(doomed) order by s.run_id for no key update;
        foreach one in array doomed loop
            stopped := stop_run(one, row('schedule', null, null)::actor,
                                'the next fire of its schedule is due, and overlap is cancel', fx);
            fx := stopped.fx;
            canceled := canceled + coalesce(stopped.asked, 0);
        end loop;
    end if;
    select jsonb_agg(case when k.first is null then x.plan else x.plan || jsonb_build_object(
               'fires', coalesce((select jsonb_agg(f.v order by f.n) from jsonb_array_elements(x.plan->'fires')
                                  with ordinality f(v, n) where f.n not between k.first and k.last), '[]'),
               'overlapped', jsonb_build_object('first_at', x.plan->'fires'->(k.first - 1), 'last_at',
                                                x.plan->'fires'->(k.last - 1), 'count', k.last - k.first + 1, 'reason',
                                                    'overlap_' || (x.plan->>'overlap')),
               'last_fire', case when k.last < x.fires then x.plan->'fires'->(x.fires - 1)
                                 when k.first > 1 then x.plan->'fires'->(k.first - 2) end) end order by x.n)
    into plans
    from (select p.plan, p.n, jsonb_array_length(p.plan->'fires') as fires,
                 coalesce((live->>(p.plan->>'schedule_id'))::int, 0) as runs
          from jsonb_array_elements(p_plans) with ordinality p(plan, n)) x
    -- From where to where its fires get no run.
    cross join lateral (select case x.plan->>'overlap' when 'skip' then greatest(1 - x.runs, 0) + 1
                                                       when 'queue_one' then greatest(2 - x.runs, 0) + 1
                                                       when 'cancel' then 1 end as first,
                               case when x.plan->>'overlap' = 'cancel' then x.fires - 1 else x.fires end as last) w
    left join lateral (select w.first, w.last where w.first <= w.last) k on true;
    return row(plans, canceled, fx)::overlap_result;
end $$;

-- A long backlog is applied in parts. A range that is skipped in two parts becomes one record: nothing fired between,
-- the schedule did not change, and all of it was due when the first part was recorded.
create function merge_overlap_skips(p_ids int[]) returns void language sql as $$
    with part as (
        select n.schedule_id, b.first_at as begins_at, n.first_at, n.last_at, n.count from unnest(p_ids) i(id)
        cross join lateral (select * from skip_record x where x.schedule_id = i.id order by x.first_at desc limit 1) n
        cross join lateral (select * from skip_record x where x.schedule_id = i.id and x.first_at < n.first_at
                            order by x.first_at desc limit 1) b
        cross join lateral (select x.delay_seconds, x.changed_at from schedule x where x.schedule_id = i.id offset 0) c
        where b.reason = n.reason and c.changed_at < b.recorded_at
          and n.last_at + make_interval(secs => c.delay_seconds) <= b.recorded_at
          and not exists (select 1 from run r
                          where r.schedule_id = i.id and r.fire_at > b.last_at and r.fire_at < n.first_at)
    ), gone as (
        delete from skip_record k using part p where k.schedule_id = p.schedule_id and k.first_at = p.first_at
    )
    update skip_record k set last_at = p.last_at, count = k.count + p.count
    from part p where k.schedule_id = p.schedule_id and k.first_at = p.begins_at
$$;
