-- The pass that makes it true: whatever an interrupted step left is rebuilt from the tasks themselves. The fast paths
-- keep all of this right already, so every repair is counted and written down.

create function reconcile_run(p_run_id bigint) returns text[] language plpgsql as $$
declare
    status run_status;
    repairs text[] := '{}';
    n int;
    lost ended[];
    t timestamptz := clock();
begin
    select * into status from run_status r
    where r.run_id = p_run_id and r.state = 'running' for no key update skip locked;
    if not found then
        return repairs;
    end if;

    -- a run without its first tasks, or a waiting task that nobody decided
    n := recount_upstream(p_run_id, array(
        select k.idx from task k where k.run_id = p_run_id and k.state = 'waiting'));
    if n > 0 then
        repairs := array_append(repairs, 'upstream_counter_drift');
    end if;
    if exists (select 1 from task_spec s where s.version_id = status.version_id and s.starts_at_once
               and not exists (select 1 from task k where k.run_id = p_run_id and k.idx = s.idx)) then
        repairs := array_append(repairs, 'run_without_tasks');
        perform settle(start_runs(array[p_run_id]));
    else
        lost := decide_waiting(array[p_run_id]);
        if coalesce(cardinality(lost), 0) > 0 then
            repairs := array_append(repairs, 'undecided_task');
            perform settle(lost);
        end if;
    end if;

    -- a task whose upstream ended without being counted, so that it has no row at all
    with missing as (
        insert into task (run_id, idx, version_id, state)
        select distinct p_run_id, g.dst, status.version_id, 'waiting'::task_state
        from task k join edge g on g.version_id = status.version_id and g.src = k.idx
        where k.run_id = p_run_id and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
        on conflict (run_id, idx, map_index) do nothing
        returning idx
    )
    select count(*) into n from missing;
    if n > 0 then
        repairs := array_append(repairs, 'uncounted_upstream');
        perform recount_upstream(p_run_id, array(
            select k.idx from task k where k.run_id = p_run_id and k.state = 'waiting'));
        perform settle(decide_waiting(array[p_run_id]));
    end if;

    -- available but not in line; in line but not available is removed by the claim that meets it
    lost := array(
        select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended
        from task k join task_spec s on s.version_id = k.version_id and s.idx = k.idx
        where k.run_id = p_run_id and k.state = 'available'
          and not exists (select 1 from ready q where q.queue = s.queue and q.rank = 9 - s.priority
                          and q.run_id = k.run_id and q.idx = k.idx and q.map_index = k.map_index)
        for update of k skip locked);
    if cardinality(lost) > 0 then
        repairs := array_append(repairs, 'available_not_offered');
        perform offer(lost);
    end if;

    -- pending until a time that nobody watches
    insert into timer (shard, due_at, run_id, idx, map_index)
    select d.shard, k.not_before, k.run_id, k.idx, k.map_index
    from task k join dag d on d.dag_id = status.dag_id
    where k.run_id = p_run_id and k.state = 'pending' and k.not_before is not null
    on conflict do nothing;
    get diagnostics n = row_count;
    if n > 0 then
        repairs := array_append(repairs, 'timer_missing');
    end if;

    -- pending although nothing holds it
    n := release(array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended from task k
                       where k.run_id = p_run_id and k.state = 'pending' and k.not_before is null));
    if n > 0 then
        repairs := array_append(repairs, 'pending_without_gate');
    end if;

    -- running without a lease: nobody could ever report or lose it
    insert into lease (session, run_id, idx, map_index, epoch)
    select k.session, k.run_id, k.idx, k.map_index, k.epoch from task k
    where k.run_id = p_run_id and k.state = 'running'
    on conflict do nothing;
    get diagnostics n = row_count;
    if n > 0 then
        repairs := array_append(repairs, 'lease_missing');
    end if;

    if recount_run(p_run_id) then
        repairs := array_append(repairs, 'run_counter_drift');
    end if;
    perform close_if_done(p_run_id);
    if found and exists (select 1 from run_status r where r.run_id = p_run_id and r.state <> 'running')
       and cardinality(repairs) = 0 then
        repairs := array_append(repairs, 'run_not_closed');
    end if;
    if cardinality(repairs) > 0 then
        insert into journal (occurred_at, verb, actor, run_id, detail)
        values (t, 'reconcile', 'evertick', p_run_id, jsonb_build_object('repairs', repairs));
    end if;
    return repairs;
end $$;

-- Closes a running run all of whose tasks have ended, whatever its counter says.
create function close_if_done(p_run_id bigint) returns boolean language plpgsql as $$
begin
    update run_status r
    set open_tasks = 0, failed_leaves = c.bad, finished_at = clock(),
        state = case when r.cancel_requested then 'canceled' when c.bad > 0 then 'failed' else 'success' end::run_state
    from (
        select count(*) as n, count(*) filter (where s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed')) as bad
        from task k join task_spec s on s.version_id = k.version_id and s.idx = k.idx
        where k.run_id = p_run_id and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
    ) c, dag_version v
    where r.run_id = p_run_id and r.state = 'running' and v.version_id = r.version_id and c.n >= v.task_count;
    return found;
end $$;

-- One bounded slice of the running runs, in the order of the index of open runs, so that history costs nothing. Returns
-- where to go on; nothing means from the beginning, and then queued runs that were passed over are admitted, too.
create function reconcile(p_shard smallint, p_epoch bigint, p_after_dag int, p_after_run bigint, p_limit int,
                          out last_dag_id int, out last_run_id bigint, out repaired text[]) language plpgsql as $$
declare
    r record;
    seen int := 0;
begin
    perform fence(p_shard, p_epoch);
    repaired := '{}';
    for r in
        select s.dag_id, s.run_id from run_status s join dag d on d.dag_id = s.dag_id
        where s.state in ('queued', 'running') and s.state = 'running' and d.shard = p_shard
          and (s.dag_id, s.state, s.run_id) > (p_after_dag, 'running'::run_state, p_after_run)
        order by s.dag_id, s.state, s.run_id limit p_limit
    loop
        repaired := repaired || reconcile_run(r.run_id);
        last_dag_id := r.dag_id;
        last_run_id := r.run_id;
        seen := seen + 1;
    end loop;
    if seen < p_limit then
        last_dag_id := null;
        last_run_id := null;
        perform admit_runs(array(
            select d.dag_id from dag d where d.shard = p_shard and not d.paused and exists (
                select 1 from run_status q where q.dag_id = d.dag_id and q.state = 'queued') limit 100));
    end if;
end $$;

-- What people read: one row per task of each run, the ones without a row included.
create view tasks as
select r.run_id, s.idx, coalesce(k.map_index, -1) as map_index, r.dag_id, d.name as dag, r.version_id, s.name as task,
       s.queue, s.priority, s.max_attempts,
       coalesce(k.state, 'waiting') as state, coalesce(k.epoch, 0) as epoch, coalesce(k.attempt, 0) as attempt,
       k.losses, k.session, k.request, k.not_before, k.started_at, k.finished_at, k.exit_code, k.reason
from run r
join dag d on d.dag_id = r.dag_id
join task_spec s on s.version_id = r.version_id
left join task k on k.run_id = r.run_id and k.idx = s.idx;

create view attempts as
select k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.session, k.state::text as outcome, k.reason, k.exit_code,
       k.started_at, k.finished_at
from task k
where k.started_at is not null and not exists (
    select 1 from attempt a where a.run_id = k.run_id and a.idx = k.idx and a.map_index = k.map_index and a.epoch = k.epoch)
union all
select a.run_id, a.idx, a.map_index, a.epoch, a.attempt, a.session, a.outcome, a.reason, a.exit_code, a.started_at,
       a.finished_at
from attempt a;
