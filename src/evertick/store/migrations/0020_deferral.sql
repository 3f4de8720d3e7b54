-- Waiting without a slot. A deferred task is a row in `deferral`: with when it is looked at by time alone, with when it fails, and with the
-- key under which word from elsewhere wakes it. No runner knows of it; the leader of the shard looks at what is due. Why so:
-- docs/decisions/0018-deferral.md.
--
-- The first that waits so: a task that starts another DAG. It becomes pending like a task with gates, and deferred where these are passed.

create table task_child (
    version_id int not null,
    idx        int not null,
    dag        text not null,
    params     jsonb not null,
    waits      boolean not null,
    timeout    double precision check (timeout > 0),
    primary key (version_id, idx)
);

-- Which run was started by which task, and how many stand above it.
create table child_run (
    run_id        bigint primary key,
    parent_run_id bigint not null,
    idx           int not null,
    map_index     int not null,
    depth         int not null check (depth > 0)
);

-- The epoch is the task's while it waits so: a task that was canceled, marked or cleared meanwhile does not clean up behind itself.
create table deferral (
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    epoch     int not null,
    shard     smallint not null,
    key       text,
    wake_at   timestamptz not null,
    deadline  timestamptz,
    primary key (run_id, idx, map_index)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index deferral_due on deferral (shard, wake_at);
create index deferral_key on deferral (key) where key is not null;

-- Pending tasks that start a DAG become deferred, and are due at once. The caller holds the runs' locks.
create function defer_children(p_tasks ended[]) returns void language plpgsql as $$
declare
    t timestamptz := clock();
begin
    with moved as (
        update task k set state = 'deferred', epoch = k.epoch + 1, attempt = 1, started_at = t, reason = null
        from unnest(p_tasks) p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'pending' and k.not_before is null
        returning k.run_id, k.idx, k.map_index, k.version_id, k.epoch
    )
    insert into deferral (run_id, idx, map_index, epoch, shard, wake_at, deadline)
    select m.run_id, m.idx, m.map_index, m.epoch, d.shard, t, t + make_interval(secs => c.timeout)
    from moved m
    join task_child c on c.version_id = m.version_id and c.idx = m.idx
    join run_status r on r.run_id = m.run_id join dag d on d.dag_id = r.dag_id
    on conflict (run_id, idx, map_index) do update
        set epoch = excluded.epoch, key = null, wake_at = excluded.wake_at, deadline = excluded.deadline;
    perform set_config('evertick.arrived', 'yes', true);
end $$;

-- Runs that have just been closed wake who waits for them. Only noted: whoever ends a task holds its run's lock, and the other's would
-- come out of order.
create function note_closed(p_closed bigint[]) returns void language plpgsql as $$
begin
    update deferral d set wake_at = clock() where d.key = any(array(select 'run:' || x from unnest(p_closed) x));
    if found then
        perform set_config('evertick.arrived', 'yes', true);
    end if;
end $$;

-- What is due and has not started its run yet: the leader reads the other DAG, and starts it or says why not.
create function children_due(p_shard smallint, p_limit int) returns table (
    run_id bigint, idx int, map_index int, epoch int, dag text, params jsonb, depth int, parent_dag text) language sql stable as $$
    select f.run_id, f.idx, f.map_index, f.epoch, c.dag, c.params,
           coalesce((select x.depth from child_run x where x.run_id = f.run_id), 0), d.name
    from (select * from deferral x where x.shard = p_shard and x.wake_at <= clock() and x.key is null order by x.wake_at limit p_limit) f
    join run_status r on r.run_id = f.run_id join dag d on d.dag_id = r.dag_id
    join task_child c on c.version_id = r.version_id and c.idx = f.idx
$$;

-- Ends a deferred task, if it still waits with that epoch. The caller holds its run's lock.
create function end_deferred(p_run_id bigint, p_idx int, p_map_index int, p_epoch int, p_state task_state, p_reason text, p_result jsonb)
returns void language plpgsql as $$
declare
    over ended;
begin
    delete from deferral d where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_epoch;
    update task k set state = p_state, finished_at = clock(), reason = p_reason
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.state = 'deferred' and k.epoch = p_epoch
    returning k.run_id, k.idx, k.map_index, k.version_id, k.state into over;
    if not found then
        return;
    end if;
    if p_result is not null then
        insert into result (run_id, idx, map_index, epoch, value) values (p_run_id, p_idx, p_map_index, p_epoch, p_result)
        on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value;
    end if;
    perform settle(array[over]);
end $$;

-- Starts the run that a deferred task is there for. p_dag_id null: it cannot, and p_reason says why. One run for each time that the task
-- becomes ready, by its key, however often this is called. Returns that run; null when the task waits no more or fails.
create function start_child(p_shard smallint, p_epoch bigint, p_run_id bigint, p_idx int, p_map_index int, p_task_epoch int, p_dag_id int,
                            p_params jsonb, p_depth int, p_reason text) returns bigint language plpgsql as $$
declare
    child bigint;
    spec task_child;
    made text := format('run %s, task %s, %s', p_run_id, p_idx, p_task_epoch);
begin
    perform fence(p_shard, p_epoch);
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    select c.* into spec from task k join task_child c on c.version_id = k.version_id and c.idx = k.idx
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.state = 'deferred' and k.epoch = p_task_epoch;
    if not found then
        delete from deferral d where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_task_epoch;
        return null;
    end if;
    if p_dag_id is null then
        perform end_deferred(p_run_id, p_idx, p_map_index, p_task_epoch, 'failed', p_reason, null);
        perform pass_gates();
        return null;
    end if;
    insert into run as r (dag_id, version_id, kind, key, params, triggered_by, created_at)
    select d.dag_id, d.version_id, 'manual', made, p_params, 'run ' || p_run_id, clock()
    from dag d where d.dag_id = p_dag_id and d.deleted_at is null and d.version_id is not null
    on conflict (dag_id, key) where key is not null do nothing
    returning r.run_id into child;
    if child is not null then
        insert into child_run (run_id, parent_run_id, idx, map_index, depth) values (child, p_run_id, p_idx, p_map_index, p_depth);
        update dag d set is_awaited = true where d.dag_id = p_dag_id and not d.is_awaited and spec.waits;
        perform open_runs(array[child]);
    else
        select r.run_id into child from run r where r.dag_id = p_dag_id and r.key = made;
    end if;
    if spec.waits then
        -- Word of its end comes at once; a look in between, in case that word is lost.
        update deferral d set key = 'run:' || child, wake_at = least(d.deadline, clock() + interval '10 minutes')
        where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_task_epoch;
    else
        perform end_deferred(p_run_id, p_idx, p_map_index, p_task_epoch, 'success', null, to_jsonb(child));
    end if;
    perform pass_gates();
    return child;
end $$;

-- Tasks whose run has ended, end as it did; those past their deadline fail. Runs that somebody works on are passed by. Returns how many
-- were looked at.
create function wake_parents(p_shard smallint, p_epoch bigint, p_limit int) returns int language plpgsql as $$
declare
    due deferral[];
    one deferral;
    child record;
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    due := array(
        select x.whole from (
            select d as whole, d.run_id from deferral d where d.shard = p_shard and d.wake_at <= t and d.key is not null
            order by d.wake_at limit p_limit) x
        cross join lateral (select from run_status r where r.run_id = x.run_id for no key update skip locked) locked
        order by x.run_id);
    foreach one in array due loop
        select r.run_id, r.state, r.reason, g.name into child
        from run_status r join dag g on g.dag_id = r.dag_id where r.run_id = substr(one.key, 5)::bigint;
        if child.state = 'success' then
            perform end_deferred(one.run_id, one.idx, one.map_index, one.epoch, 'success', null, to_jsonb(child.run_id));
        elsif child.state is null or child.state in ('failed', 'canceled') then
            perform end_deferred(one.run_id, one.idx, one.map_index, one.epoch, 'failed', case when child.state is null
                then format('%s that it waited for was pruned', replace(one.key, ':', ' ')) else
                format('run %s of %s %s%s', child.run_id, child.name, case child.state when 'failed' then 'failed' else 'was canceled' end,
                       ': ' || child.reason) end, null);
        elsif one.deadline <= t then
            perform end_deferred(one.run_id, one.idx, one.map_index, one.epoch, 'failed',
                                 format('run %s of %s did not end in time', child.run_id, child.name), null);
        elsif exists (select 1 from task k where k.run_id = one.run_id and k.idx = one.idx and k.map_index = one.map_index
                      and k.state = 'deferred' and k.epoch = one.epoch) then
            update deferral d set wake_at = least(d.deadline, t + interval '10 minutes')
            where d.run_id = one.run_id and d.idx = one.idx and d.map_index = one.map_index;
        else
            -- Not by its place alone: a clear may have deferred it anew after the list was read and before the run was locked.
            delete from deferral d
            where d.run_id = one.run_id and d.idx = one.idx and d.map_index = one.map_index and d.epoch = one.epoch;
        end if;
    end loop;
    perform pass_gates();
    return cardinality(due);
end $$;
