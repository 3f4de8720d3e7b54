-- Schedules as people change them: the history of their versions, changes of one schedule, and runs that must not overlap.

-- Every version that a schedule had, with who made it and why. Grows with changes, not with fires.
create table schedule_version (
    schedule_id int not null,
    version     int not null,
    change      text not null check (change in ('publish', 'put', 'pause', 'unpause', 'delete')),
    changed_by  text not null,
    changed_at  timestamptz not null,
    origin      text not null,
    is_held     boolean not null,
    settings    jsonb not null,   -- spec, params and rules
    primary key (schedule_id, version)
);

create function read_schedules(p_schedules jsonb) returns table (
    name text, spec jsonb, params jsonb, misfire text, window_seconds double precision, catchup_limit int, overlap text,
    start_within double precision, finish_within double precision, delay_seconds double precision, next_due timestamptz,
    skipped jsonb) language sql stable as $$
    select * from jsonb_to_recordset(p_schedules) as x(
        name text, spec jsonb, params jsonb, misfire text, window_seconds double precision, catchup_limit int, overlap text,
        start_within double precision, finish_within double precision, delay_seconds double precision, next_due timestamptz,
        skipped jsonb)
$$;

-- After other work: who waits for what, what has happened and nobody has looked at yet, what each schedule has heard of since
-- its last run, and what a fire was caused by.
create table awaited (
    kind        text not null check (kind in ('dag', 'end', 'asset')),
    name        text not null,
    schedule_id int not null,
    primary key (kind, name, schedule_id)
);
create index awaited_of on awaited (schedule_id);
-- Updates of assets that somebody told of. Those that tasks make are known by the tasks.
create table asset_update (
    update_id   bigint generated always as identity primary key,
    asset       text not null,
    extra       jsonb not null,
    updated_by  text not null,
    occurred_at timestamptz not null
);
-- Each of a run that ended or has updated it, or of an asset_update.
create table arrival (
    arrival_id  bigint generated always as identity primary key,
    kind        text not null,
    name        text not null,
    run_id      bigint,
    occurred_at timestamptz not null,
    update_id   bigint,
    check (num_nonnulls(run_id, update_id) = 1)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create table heard (
    schedule_id int not null,
    kind        text not null,
    name        text not null,
    run_id      bigint,
    occurred_at timestamptz not null,
    update_id   bigint,
    check (num_nonnulls(run_id, update_id) = 1),
    primary key (schedule_id, kind, name)
);
create table cause (
    schedule_id int not null,
    fire_at     timestamptz not null,
    kind        text not null,
    name        text not null,
    run_id      bigint,
    occurred_at timestamptz not null,
    update_id   bigint,
    check (num_nonnulls(run_id, update_id) = 1),
    primary key (schedule_id, fire_at, kind, name)
);

create function sources_of(p_condition jsonb) returns table (kind text, name text) language sql immutable as $$
    with recursive part as (
        select p_condition as c
        union all
        select x from part p cross join lateral jsonb_array_elements(coalesce(p.c->'all', p.c->'any')) x
        where p.c ? 'all' or p.c ? 'any'
    )
    select k.key, k.value from part p cross join lateral jsonb_each_text(p.c) k where k.key in ('dag', 'end', 'asset')
$$;

-- Whether what was heard of ({"dag:a", "asset:b"}) is all that the condition asks for.
create function is_met(p_condition jsonb, p_heard text[]) returns boolean language plpgsql immutable as $$
begin
    if p_condition ? 'all' then
        return (select bool_and(is_met(x, p_heard)) from jsonb_array_elements(p_condition->'all') x);
    elsif p_condition ? 'any' then
        return (select bool_or(is_met(x, p_heard)) from jsonb_array_elements(p_condition->'any') x);
    end if;
    return (select k.key || ':' || k.value = any(p_heard) from jsonb_each_text(p_condition) k);
end $$;

-- Runs that have just been closed, and tasks that have just ended: what somebody waits for is noted, in the transaction of that
-- end. Only noted: whoever ends a task holds its run's lock, and schedules are locked before runs. The runner's step tells it,
-- so that the leader is woken.
create function note_arrivals(p_closed bigint[], p_ended ended[]) returns void language plpgsql as $$
begin
    perform note_closed(p_closed);
    insert into arrival (kind, name, run_id, occurred_at)
    select k.kind, k.name, k.run_id, clock()
    from (
        select e.kind, d.name, s.run_id
        from run_status s join dag d on d.dag_id = s.dag_id cross join (values ('end'), ('dag')) e(kind)
        where s.run_id = any(p_closed) and (e.kind = 'end' or s.state = 'success')
        union all
        select distinct 'asset', o.name, e.run_id
        from unnest(p_ended) e join task_spec s on s.version_id = e.version_id and s.idx = e.idx
        cross join lateral unnest(s.outlets) o(name)
        where e.state = 'success'
    ) k
    where exists (select 1 from awaited w where w.kind = k.kind and w.name = k.name)
    order by k.run_id, k.kind, k.name;
    if found then
        perform set_config('evertick.arrived', 'yes', true);
    end if;
end $$;

-- What has arrived is told to the schedules that wait for it; those that have heard of everything are due now. More of the same
-- before they fire is one and the same: the run has not begun and will find it. Returns how many became due.
create function hear_arrivals(p_shard smallint, p_epoch bigint, p_limit int, out became_due int, out has_more boolean)
language plpgsql as $$
declare
    taken jsonb;
    concerned int[];
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    with gone as (
        delete from arrival a where a.arrival_id = any(array(
            select x.arrival_id from arrival x order by x.arrival_id limit p_limit for update skip locked))
        returning a.*
    )
    select jsonb_agg(to_jsonb(g) order by g.arrival_id), count(*) = p_limit into taken, has_more from gone g;
    concerned := array(
        select distinct w.schedule_id from jsonb_to_recordset(coalesce(taken, '[]')) as x(kind text, name text)
        cross join lateral (select y.schedule_id from awaited y where y.kind = x.kind and y.name = x.name offset 0) w);
    became_due := 0;
    if cardinality(concerned) = 0 then
        return;
    end if;
    perform 1 from schedule_state s where s.schedule_id = any(concerned) order by s.schedule_id for no key update;
    insert into heard as h (schedule_id, kind, name, run_id, occurred_at, update_id)
    select distinct on (w.schedule_id, x.kind, x.name) w.schedule_id, x.kind, x.name, x.run_id, x.occurred_at, x.update_id
    from jsonb_to_recordset(taken)
        as x(arrival_id bigint, kind text, name text, run_id bigint, occurred_at timestamptz, update_id bigint)
    cross join lateral (select y.schedule_id from awaited y where y.kind = x.kind and y.name = x.name offset 0) w
    order by w.schedule_id, x.kind, x.name, x.arrival_id desc
    on conflict (schedule_id, kind, name) do update
        set run_id = excluded.run_id, occurred_at = excluded.occurred_at, update_id = excluded.update_id;
    with met as (
        select s.schedule_id, s.next_due, greatest(t, s.last_fired + interval '1 microsecond') as due
        from unnest(concerned) n(id)
        cross join lateral (select * from schedule_state y where y.schedule_id = n.id offset 0) s
        cross join lateral (select * from schedule y where y.schedule_id = n.id and y.deleted_at is null offset 0) c
        where is_met((c.spec->>'after')::jsonb, array(
            select h.kind || ':' || h.name from heard h where h.schedule_id = n.id))
    ), moved as (
        update schedule_state s set next_due = m.due from met m
        where s.schedule_id = m.schedule_id and s.next_due is null
        returning s.schedule_id
    ), told as (
        delete from heard h using met m where h.schedule_id = m.schedule_id
        returning h.*, coalesce(m.next_due, m.due) as fire_at
    ), written as (
        insert into cause (schedule_id, fire_at, kind, name, run_id, occurred_at, update_id)
        select d.schedule_id, d.fire_at, d.kind, d.name, d.run_id, d.occurred_at, d.update_id from told d
        on conflict (schedule_id, fire_at, kind, name) do update
            set run_id = excluded.run_id, occurred_at = excluded.occurred_at, update_id = excluded.update_id
    )
    select count(*) into became_due from moved;
end $$;

-- Writes down the version that the given schedules have just got.
create function note_schedules(p_ids int[], p_change text) returns void language sql as $$
    insert into schedule_version (schedule_id, version, change, changed_by, changed_at, origin, is_held, settings)
    select c.schedule_id, c.version, p_change, c.changed_by, c.changed_at, c.origin, s.is_held,
           jsonb_build_object('spec', c.spec, 'params', c.params, 'misfire', c.misfire, 'window_seconds', c.window_seconds,
                              'catchup_limit', c.catchup_limit, 'overlap', c.overlap, 'start_within', c.start_within,
                              'finish_within', c.finish_within)
    from schedule c join schedule_state s on s.schedule_id = c.schedule_id
    where c.schedule_id = any(p_ids)
    on conflict (schedule_id, version) do nothing;
    -- What they wait for from now on; what they have heard of before counts no more.
    delete from heard h where h.schedule_id = any(p_ids);
    delete from awaited w where w.schedule_id = any(p_ids);
    insert into awaited (kind, name, schedule_id)
    select distinct x.kind, x.name, c.schedule_id
    from schedule c cross join lateral sources_of((c.spec->>'after')::jsonb) x
    where c.schedule_id = any(p_ids) and c.deleted_at is null and c.spec ? 'after';
    update dag d set is_awaited = true
    where not d.is_awaited and d.name in (
        select w.name from awaited w where w.schedule_id = any(p_ids) and w.kind in ('dag', 'end'));
$$;

-- A change is planned from what was read before. If a fire or somebody else's change came between, it is planned anew: so that
-- nothing is left out that has become due, and nothing is passed that was not. p_seen: [[schedule_id, version, next_due]] of the
-- DAG, or of its one schedule p_name; the caller holds their locks.
create function refuse_moved(p_dag text, p_name text, p_seen jsonb) returns void language plpgsql as $$
begin
    if p_seen is distinct from (
        select coalesce(jsonb_agg(jsonb_build_array(s.schedule_id, s.version, extract(epoch from s.next_due) * 1000000,
                                                    s.paused, s.error is not null) order by s.schedule_id), '[]')
        from dag d join schedule c on c.dag_id = d.dag_id join schedule_state s on s.schedule_id = c.schedule_id
        where d.name = p_dag and c.deleted_at is null and (p_name is null or c.name = p_name)) then
        raise exception 'the schedules of % have moved on', p_dag using errcode = 'EV002';
    end if;
end $$;

-- Schedules end. What was due is settled before, by the caller.
create function remove_schedules(p_ids int[], p_actor text) returns void language plpgsql as $$
begin
    if cardinality(p_ids) = 0 then
        return;
    end if;
    update schedule c set deleted_at = clock(), version = c.version + 1, changed_by = p_actor, changed_at = clock()
    where c.schedule_id = any(p_ids) and c.deleted_at is null;
    update schedule_state s set next_due = null, version = c.version, is_held = false, paused = d.paused
    from schedule c join dag d on d.dag_id = c.dag_id
    where c.schedule_id = s.schedule_id and s.schedule_id = any(p_ids);
    perform note_schedules(p_ids, 'delete');
end $$;

-- Pauses, unpauses or deletes one schedule by compare-and-set (V12), on p_expected or, where that is null, on any version. Not
-- the code's any more: publishing leaves it as it is. Returns its version, or null when it is not at the expected one.
create function change_schedule(p_dag_id int, p_name text, p_change text, p_expected int, p_seen jsonb, p_settle jsonb,
                                p_actor text) returns int language plpgsql as $$
declare
    id int;
    changed int;
    t timestamptz := clock();
begin
    perform lock_schedules(d.name) from dag d where d.dag_id = p_dag_id;
    perform refuse_moved(d.name, p_name, p_seen) from dag d where d.dag_id = p_dag_id;
    select c.schedule_id into id from schedule c
    where c.dag_id = p_dag_id and c.name = p_name and c.deleted_at is null and (p_expected is null or c.version = p_expected);
    if not found then
        return null;
    end if;
    -- One that is paused already, or is not, stays as it is: what is due of it is the leader's.
    select c.version into changed from schedule c join schedule_state s on s.schedule_id = c.schedule_id
    where c.schedule_id = id and p_change <> 'delete' and s.is_held = (p_change = 'pause');
    if found then
        return changed;
    end if;
    if p_change <> 'unpause' then
        perform settle_schedules(p_settle, p_change = 'delete');
    end if;
    update schedule c set origin = 'user' where c.schedule_id = id;
    if p_change = 'delete' then
        perform remove_schedules(array[id], p_actor);
    else
        update schedule c set version = c.version + 1, changed_by = p_actor, changed_at = t where c.schedule_id = id;
        update schedule_state s set version = c.version, is_held = p_change = 'pause', paused = p_change = 'pause' or d.paused
        from schedule c join dag d on d.dag_id = c.dag_id
        where c.schedule_id = s.schedule_id and s.schedule_id = id;
        perform note_schedules(array[id], p_change);
    end if;
    select c.version into changed from schedule c where c.schedule_id = id;
    if p_change = 'unpause' then
        -- The plans are for the version that it has from now on.
        perform settle_schedules(p_settle);
    end if;
    insert into journal (occurred_at, verb, actor, dag_id, detail)
    values (t, p_change || '_schedule', p_actor, p_dag_id, jsonb_build_object('name', p_name, 'version', changed));
    perform pass_gates();
    return changed;
end $$;

-- Overlap ----------------------------------------------------------------------------------------------------------------

-- What becomes of fires of schedules whose runs must not overlap, judged by the runs that are open now. "skip" lets one run be
-- open, "queue_one" two, "queue_all" any number; "cancel" ends what is open in favour of the newest fire. What gets no run is
-- taken out of the plan's fires, and becomes its `overlapped`, a range like its `skipped`. The caller holds the schedules' locks.
create function resolve_overlap(p_plans jsonb, out plans jsonb, out canceled int) language plpgsql as $$
declare
    live jsonb;
    doomed bigint[];
    one bigint;
begin
    with due as materialized (
        select p.schedule_id, p.overlap, c.dag_id
        from jsonb_to_recordset(p_plans) as p(schedule_id int, version int, expected timestamptz, overlap text, fires jsonb)
        cross join lateral (select x.dag_id from schedule x where x.schedule_id = p.schedule_id offset 0) c
        cross join lateral (select * from schedule_state x where x.schedule_id = p.schedule_id offset 0) s
        where p.overlap is not null and jsonb_array_length(p.fires) > 0
          and s.version = p.version and s.next_due = p.expected and s.paused is not true and s.error is null
    ), open as (
        select a.run_id, r.schedule_id
        from (select distinct d.dag_id from due d) d
        cross join lateral (select y.run_id from run_status y
                            where y.dag_id = d.dag_id and y.state in ('queued', 'running') offset 0) a
        cross join lateral (select y.schedule_id from run y where y.run_id = a.run_id offset 0) r
    )
    select (select jsonb_object_agg(o.schedule_id, o.runs)
            from (select x.schedule_id, count(*) as runs from open x where x.schedule_id is not null group by 1) o),
           (select array_agg(x.run_id order by x.run_id) from open x
            where x.schedule_id = any(array(select d.schedule_id from due d where d.overlap = 'cancel')))
    into live, doomed;
    canceled := 0;
    if doomed is not null then
        perform 1 from run_status s where s.run_id = any(doomed) order by s.run_id for no key update;
        foreach one in array doomed loop
            canceled := canceled + coalesce(stop_run(one, 'schedule', 'the next fire of its schedule is due, and overlap is cancel'), 0);
        end loop;
    end if;
    select jsonb_agg(case when k.first is null then x.plan else x.plan || jsonb_build_object(
               'fires', coalesce((select jsonb_agg(f.v order by f.n) from jsonb_array_elements(x.plan->'fires')
                                  with ordinality f(v, n) where f.n not between k.first and k.last), '[]'),
               'overlapped', jsonb_build_object('first_at', x.plan->'fires'->(k.first - 1), 'last_at', x.plan->'fires'->(k.last - 1),
                                                'count', k.last - k.first + 1, 'reason', 'overlap_' || (x.plan->>'overlap')),
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
end $$;

-- A long backlog is settled in parts. What was skipped in one part and goes on in the next is one range, and one record: nothing
-- fired between, nobody changed the schedule, and all of it was due already when the first part was written down.
create function join_overlapped(p_ids int[]) returns void language sql as $$
    with part as (
        select n.schedule_id, b.first_at as begins_at, n.first_at, n.last_at, n.count
        from unnest(p_ids) i(id)
        cross join lateral (select * from skip_record x where x.schedule_id = i.id order by x.first_at desc limit 1) n
        cross join lateral (select * from skip_record x where x.schedule_id = i.id and x.first_at < n.first_at
                            order by x.first_at desc limit 1) b
        cross join lateral (select x.delay_seconds, x.changed_at from schedule x where x.schedule_id = i.id offset 0) c
        where b.reason = n.reason and c.changed_at < b.recorded_at
          and n.last_at + make_interval(secs => c.delay_seconds) <= b.recorded_at
          and not exists (select 1 from run r where r.schedule_id = i.id and r.fire_at > b.last_at and r.fire_at < n.first_at)
    ), gone as (
        delete from skip_record k using part p where k.schedule_id = p.schedule_id and k.first_at = p.first_at
    )
    update skip_record k set last_at = p.last_at, count = k.count + p.count
    from part p where k.schedule_id = p.schedule_id and k.first_at = p.begins_at
$$;

-- Deadlines and alerts ---------------------------------------------------------------------------------------------------

-- By when a run must have started or finished, or one of its tasks finished: one row each, gone when the time has come. Only of
-- schedules and tasks that say so.
create table deadline (
    shard  smallint not null,
    due_at timestamptz not null,
    run_id bigint not null,
    kind   text not null check (kind in ('start', 'finish', 'task')),
    idx    int not null default -1,   -- of a task: which one
    primary key (shard, due_at, run_id, kind, idx)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);

-- Within how many seconds of when its run was due a task must have ended.
create table task_deadline (
    version_id int not null,
    idx        int not null,
    seconds    double precision not null check (seconds > 0),
    primary key (version_id, idx)
);

-- What did not happen in time. One row per episode: it begins with the first miss, counts the further ones, and ends when the
-- schedule fires again or a later run is in time, or when there is no such deadline any more.
create table alert (
    alert_id    bigint generated always as identity primary key,
    kind        text not null check (kind in ('not_fired', 'not_started', 'not_finished')),
    schedule_id int not null,
    task        text not null default '',   -- by its name; '' of a run as a whole
    run_id      bigint,                 -- the first that was late
    due_at      timestamptz not null,   -- by when it should have been, the first time
    last_due_at timestamptz not null,
    count       int not null default 1,
    raised_at   timestamptz not null,
    ended_at    timestamptz
);
create unique index alert_open on alert (schedule_id, kind, task) where ended_at is null;

-- Something that was late for the first time of its episode, and of whom: of a schedule, or of a run that belongs to none.
create type late as (kind text, schedule_id int, run_id bigint, task text, due_at timestamptz);

create function set_deadlines(p_run_ids bigint[]) returns void language sql as $$
    insert into deadline (shard, due_at, run_id, kind)
    select d.shard, r.fire_at + make_interval(secs => c.delay_seconds + k.within), r.run_id, k.kind
    from run r
    cross join lateral (select * from schedule c where c.schedule_id = r.schedule_id offset 0) c
    cross join lateral (select * from dag d where d.dag_id = r.dag_id offset 0) d
    cross join lateral (values ('start', c.start_within), ('finish', c.finish_within)) k(kind, within)
    where r.run_id = any(p_run_ids) and k.within is not null
    on conflict do nothing
$$;

-- Deadlines of tasks count from when their run was due, and of a run that somebody started from then. A backfill is late anyway.
create function set_task_deadlines(p_run_ids bigint[]) returns void language sql as $$
    insert into deadline (shard, due_at, run_id, kind, idx)
    select d.shard, coalesce(r.fire_at + make_interval(secs => c.delay_seconds), r.created_at) + make_interval(secs => x.seconds),
           r.run_id, 'task', x.idx
    from run r
    cross join lateral (select y.idx, y.seconds from task_deadline y where y.version_id = r.version_id offset 0) x
    cross join lateral (select y.shard from dag y where y.dag_id = r.dag_id offset 0) d
    left join lateral (select y.delay_seconds from schedule y where y.schedule_id = r.schedule_id offset 0) c on true
    where r.run_id = any(p_run_ids) and r.kind <> 'backfill'
    on conflict do nothing
$$;

-- Whether a schedule still has the deadline that it missed: of its runs, or of a task of its DAG's version of now.
create function has_deadline(a alert) returns boolean language sql stable as $$
    select exists (
        select 1 from schedule c where c.schedule_id = a.schedule_id and c.deleted_at is null and case
            when a.task <> '' then exists (
                select 1 from dag d join task_deadline x on x.version_id = d.version_id
                join task_spec s on s.version_id = x.version_id and s.idx = x.idx
                where d.dag_id = c.dag_id and s.name = a.task)
            when a.kind = 'not_started' then c.start_within is not null
            else c.finish_within is not null end)
$$;

-- Whether a run was in time. One that is pruned is nobody's concern any more.
create function was_in_time(p_run_id bigint, p_kind text, p_due_at timestamptz) returns boolean language sql stable as $$
    select coalesce((
        select (s.state in ('success', 'failed', 'canceled') and s.finished_at <= p_due_at)
            or (p_kind = 'start' and (
                exists (select 1 from task k where k.run_id = p_run_id and k.started_at <= p_due_at)
                or exists (select 1 from attempt a where a.run_id = p_run_id and a.started_at <= p_due_at)))
        from run_status s where s.run_id = p_run_id), true)
$$;

-- Whether a task had ended, with all of its instances, however: a failure is told as one. One without a row has not begun.
create function was_task_in_time(p_run_id bigint, p_idx int, p_due_at timestamptz) returns boolean language sql stable as $$
    select was_in_time(p_run_id, 'finish', p_due_at) or coalesce((
        select bool_and(k.state in ('success', 'failed', 'skipped', 'upstream_failed', 'canceled') and k.finished_at <= p_due_at)
        from task k where k.run_id = p_run_id and k.idx = p_idx), false)
$$;

create function is_unfired(s schedule_state, t timestamptz, p_seconds double precision) returns boolean language sql stable as $$
    select s.next_due < t - make_interval(secs => p_seconds) and not s.paused
$$;

-- Raises what is late and ends what is over, each once per episode. By the indexes of what is due: nothing here grows with the
-- number of schedules. Returns what changed.
create function raise_alerts(p_shard smallint, p_epoch bigint, p_unfired_seconds double precision, p_limit int)
returns table (kind text, dag text, schedule text, run_id bigint, task text, has_ended boolean) language plpgsql as $$
#variable_conflict use_column
declare
    t timestamptz := clock();
    judged jsonb;
    raised bigint[];
    of_no_schedule late[];
    ended bigint[];
    newest bigint;
begin
    perform fence(p_shard, p_epoch);
    select coalesce(max(alert_id), 0) into newest from alert;
    with due as (
        delete from deadline x where x.ctid = any(array(
            select y.ctid from deadline y where y.shard = p_shard and y.due_at <= t
            order by y.due_at limit p_limit for update skip locked))
        returning x.run_id, x.kind, x.idx, x.due_at
    )
    select jsonb_agg(jsonb_build_object('schedule_id', r.schedule_id, 'run_id', d.run_id, 'due_at', d.due_at,
                     'task', coalesce(s.name, ''),
                     'kind', case d.kind when 'start' then 'not_started' else 'not_finished' end,
                     'in_time', case d.kind when 'task' then was_task_in_time(d.run_id, d.idx, d.due_at)
                                            else was_in_time(d.run_id, d.kind, d.due_at) end))
    into judged
    from due d
    cross join lateral (select y.schedule_id, y.version_id from run y where y.run_id = d.run_id offset 0) r
    left join lateral (select y.name from task_spec y where y.version_id = r.version_id and y.idx = d.idx offset 0) s on true;
    of_no_schedule := array(
        select row(x.kind, x.schedule_id, x.run_id, x.task, x.due_at)::late
        from jsonb_to_recordset(coalesce(judged, '[]')) as x(schedule_id int, kind text, run_id bigint, due_at timestamptz, task text,
             in_time boolean)
        where not x.in_time and x.schedule_id is null);
    with missed as (
        select x.schedule_id, x.kind, x.task, min(x.run_id) as run_id, min(x.due_at) as due_at, max(x.due_at) as last_due_at,
               count(*)::int as count
        from jsonb_to_recordset(coalesce(judged, '[]')) as x(schedule_id int, kind text, run_id bigint, due_at timestamptz, task text,
             in_time boolean)
        where not x.in_time and x.schedule_id is not null group by 1, 2, 3
        union all
        select s.schedule_id, 'not_fired', '', null, s.next_due, s.next_due, 1
        from (select y.schedule_id, y.next_due from schedule_state y
              where y.shard = p_shard and y.next_due < t - make_interval(secs => p_unfired_seconds) and y.next_due is not null
                and not y.paused and y.error is null
              order by y.next_due limit p_limit) s
        union all
        select s.schedule_id, 'not_fired', '', null, s.next_due, s.next_due, 1
        from quarantine q
        cross join lateral (select * from schedule_state y where y.schedule_id = q.subject_id offset 0) s
        where q.kind = 'schedule' and s.shard = p_shard and is_unfired(s, t, p_unfired_seconds)
    ), written as (
        insert into alert as a (kind, schedule_id, task, run_id, due_at, last_due_at, count, raised_at)
        select m.kind, m.schedule_id, m.task, min(m.run_id), min(m.due_at), max(m.last_due_at), max(m.count), t from missed m
        group by 1, 2, 3
        on conflict (schedule_id, kind, task) where ended_at is null do update
            set count = a.count + excluded.count, last_due_at = excluded.last_due_at
            where a.kind <> 'not_fired'
        returning a.alert_id
    )
    select array_agg(w.alert_id) filter (where w.alert_id > newest) into raised from written w;
    if raised is not null or cardinality(of_no_schedule) > 0 then
        perform tell_alerts(of_no_schedule || array(
            select row(a.kind, a.schedule_id, a.run_id, a.task, a.due_at)::late from alert a
            where a.alert_id = any(raised) order by a.alert_id));
    end if;
    with over as (
        update alert a set ended_at = t
        where a.ended_at is null and case a.kind
            when 'not_fired' then not exists (
                select 1 from schedule_state s where s.schedule_id = a.schedule_id and is_unfired(s, t, p_unfired_seconds))
            else not has_deadline(a) or exists (
                select 1 from jsonb_to_recordset(coalesce(judged, '[]')) as x(schedule_id int, kind text, due_at timestamptz, task text,
                     in_time boolean)
                where x.schedule_id = a.schedule_id and x.kind = a.kind and x.task = a.task and x.in_time
                  and x.due_at > a.last_due_at) end
        returning a.alert_id
    )
    select array_agg(o.alert_id) into ended from over o;
    return query
    select a.kind, d.name, c.name, a.run_id, a.task, coalesce(a.alert_id = any(ended), false)
    from alert a join schedule c on c.schedule_id = a.schedule_id join dag d on d.dag_id = c.dag_id
    where a.alert_id = any(raised || ended)
    union all
    select o.kind, d.name, null, o.run_id, o.task, false
    from unnest(of_no_schedule) o join run r on r.run_id = o.run_id join dag d on d.dag_id = r.dag_id;
end $$;
