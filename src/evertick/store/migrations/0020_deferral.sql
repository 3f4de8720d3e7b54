-- Waiting without a slot. A deferred task is a row in `deferral`: with when it is looked at by time alone, with when it fails, and with the
-- key under which word from elsewhere wakes it. No runner knows of it; the leader of the shard looks at what is due. Why so:
-- docs/decisions/0018-deferral.md.
--
-- Who waits so becomes pending like a task with gates, and deferred where these are passed. Here: a task that starts another DAG. What waits
-- for a time, an event, a person or a condition is in 0023_waiting.sql.

-- What is waited for: a DAG that is yet to be started, the run of it; an instant, a time of day that is yet to become one, an event, a
-- person's decision, the next poll.
create type wait_kind as enum ('start', 'run', 'time', 'clock', 'event', 'approval', 'poll');

create table task_child (
    version_id int not null,
    idx        int not null,
    dag        text not null,
    params     jsonb not null,
    given      jsonb,   -- params that are results of tasks, or parameters of its own run; null for none
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

-- The epoch is the task's while it waits so: a row whose task waits with another one, or not at all, is left over from before.
create table deferral (
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    epoch     int not null,
    shard     smallint not null,
    kind      wait_kind not null,
    key       text,
    wake_at   timestamptz not null,
    deadline  timestamptz,
    primary key (run_id, idx, map_index)
) with (fillfactor = 70, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index deferral_due on deferral (shard, wake_at);
create index deferral_key on deferral (key) where key is not null;

-- Pending tasks that wait for something outside become deferred. The caller holds the runs' locks.
create function defer(p_tasks ended[]) returns void language plpgsql as $$
declare
    t timestamptz := clock();
    deferred ended[];
begin
    with moved as (
        update task k set state = 'deferred', epoch = k.epoch + 1, attempt = 1, started_at = t, reason = null
        from unnest(p_tasks) p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'pending' and k.not_before is null
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into deferred from moved m;
    perform begin_waits(deferred);
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
    run_id bigint, idx int, map_index int, epoch int, dag text, params jsonb, depth int, parent_dag text, given jsonb, own jsonb, results jsonb)
language sql stable as $$
    select f.run_id, f.idx, f.map_index, f.epoch, c.dag, c.params,
           coalesce((select x.depth from child_run x where x.run_id = f.run_id), 0), d.name, coalesce(c.given, '{}'),
           case when c.given is null then '{}' else (select x.params from run x where x.run_id = f.run_id) end,
           case when c.given is null then '{}' else coalesce((
               select jsonb_object_agg(s.name, case when s.is_mapped then results_of(f.run_id, i.src) else v.value end)
               from task_input i
               join task_spec s on s.version_id = i.version_id and s.idx = i.src
               left join result v on v.run_id = f.run_id and v.idx = i.src and v.map_index = -1
               where i.version_id = c.version_id and i.idx = f.idx), '{}') end
    from (select * from deferral x where x.shard = p_shard and x.wake_at <= clock() and x.kind = 'start' order by x.wake_at limit p_limit) f
    join run_status r on r.run_id = f.run_id join dag d on d.dag_id = r.dag_id
    join task_child c on c.version_id = r.version_id and c.idx = f.idx
$$;

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
        perform end_waits(array[row(p_run_id, p_idx, p_map_index, p_task_epoch, 'failed', p_reason, null)::wait_end]);
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
        update deferral d set kind = 'run', key = 'run:' || child, wake_at = least(d.deadline, clock() + interval '10 minutes')
        where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_task_epoch;
    else
        perform end_waits(array[row(p_run_id, p_idx, p_map_index, p_task_epoch, 'success', null, to_jsonb(child))::wait_end]);
    end if;
    perform pass_gates();
    return child;
end $$;
