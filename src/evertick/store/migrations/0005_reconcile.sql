-- The pass that makes it true: whatever an interrupted step left is rebuilt from the tasks themselves. The fast paths
-- keep all of this right already, so every repair is counted and written down.

create function reconcile_run(p_run_id bigint) returns text[] language plpgsql as $$
declare
    status run_status;
    repairs text[] := '{}';
    n int;
    lost ended[];
    unlisted jsonb;
    t timestamptz := clock();
begin
    select * into status from run_status r
    where r.run_id = p_run_id and r.state = 'running' for no key update skip locked;
    if not found then
        return repairs;
    end if;

    if recount_groups(p_run_id) > 0 then
        repairs := array_append(repairs, 'group_counter_drift');
    end if;

    -- a run without its first tasks, or a waiting task that nobody decided
    n := recount_upstream(p_run_id, array(
        select k.idx from task k where k.run_id = p_run_id and k.state = 'waiting'));
    if n > 0 then
        repairs := array_append(repairs, 'upstream_counter_drift');
    end if;
    if exists (select 1 from task_spec s where s.version_id = status.version_id and s.starts_at_once
               and (select true from task k where k.run_id = p_run_id and k.idx = s.idx limit 1) is null) then
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
        from task k
        cross join lateral (select x.dst, x.out_of from edge x where x.version_id = status.version_id and x.src = k.idx offset 0) g
        where k.run_id = p_run_id and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
          and (g.out_of is null or is_over(p_run_id, status.version_id, g.out_of))
          and not has_instances(p_run_id, g.dst)
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
        from task k
        where k.run_id = p_run_id and k.state = 'available'
          -- one walk along the line, kept as a hash
          and (k.idx, k.map_index) not in (select q.idx, q.map_index from ready q where q.run_id = p_run_id)
        for update of k skip locked);
    if cardinality(lost) > 0 then
        repairs := array_append(repairs, 'available_not_offered');
        perform offer(lost);
    end if;

    -- pending until a time that nobody watches
    insert into timer (shard, due_at, run_id, idx, map_index)
    select d.shard, k.not_before, k.run_id, k.idx, k.map_index
    from task k join dag d on d.dag_id = status.dag_id
    where k.run_id = p_run_id and k.state = 'pending' and k.not_before is not null and not is_timed(k)
    on conflict do nothing;
    get diagnostics n = row_count;
    if n > 0 then
        repairs := array_append(repairs, 'timer_missing');
    end if;

    -- pending although nothing holds it
    lost := array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended from task k
                  where k.run_id = p_run_id and k.state = 'pending' and k.not_before is null and not exists (
                      select 1 from gate_wait w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index));
    if cardinality(lost) > 0 and not (select d.paused from dag d where d.dag_id = status.dag_id) then
        repairs := array_append(repairs, 'pending_without_gate');
        perform release(lost);
    end if;

    -- deferred, and nobody would ever look at it
    lost := array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended from task k
                  where k.run_id = p_run_id and k.state = 'deferred' and not exists (
                      select 1 from deferral w
                      where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index and w.epoch = k.epoch));
    if cardinality(lost) > 0 then
        perform begin_waits(lost);
        repairs := array_append(repairs, 'deferral_missing');
    end if;

    -- queued, and on nobody's list: nobody would ever hand it over. Whatever an executor has of it may not begin any more
    unlisted := (
        select jsonb_agg(jsonb_build_object('r', k.run_id, 'i', k.idx, 'm', k.map_index, 'e', k.epoch, 's', k.session,
                                            'kind', 'given_back', 'reason', 'dispatch_lost: nobody looked after it'))
        from task k where k.run_id = p_run_id and k.state = 'queued' and not exists (
            select 1 from dispatch w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index and w.epoch = k.epoch));
    if unlisted is not null then
        perform end_dispatches(unlisted, 0);
        repairs := array_append(repairs, 'dispatch_missing');
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
        select count(*) filter (where k.state not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')) as open,
               count(distinct k.idx) as planned, count(*) filter (where s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed')) as bad
        from task k
        left join lateral (select x.is_leaf from task_spec x where x.version_id = k.version_id and x.idx = k.idx offset 0) s on true
        where k.run_id = p_run_id
    ) c, dag_version v
    where r.run_id = p_run_id and r.state = 'running' and v.version_id = r.version_id and c.open = 0 and c.planned >= v.task_count;
    if not found then
        return false;
    end if;
    perform tell_ends(null, array[p_run_id]);
    return true;
end $$;
