-- The round over the open runs: what follows from the tasks is derived again, and runs beyond repair end. Every repair
-- is recorded, because the fast paths keep all of this right already.

-- The upstream counters of the given waiting tasks, computed from the tasks themselves.
create function recount_upstream(p_run_id bigint, p_idxs int[], out changed int) language plpgsql as $$
begin
    update task k
    set n_success = c.success, n_failed = c.failed, n_upstream_failed = c.upstream_failed, n_skipped = c.skipped,
        n_setup_success = c.setup_success, n_setup_skipped = c.setup_skipped, n_extra = c.more
    from count_upstream(p_run_id, p_idxs) c
    where k.run_id = p_run_id and k.idx = c.idx and k.map_index = c.map_index and k.state = 'waiting'
      and (coalesce(k.n_success, 0), coalesce(k.n_failed, 0), coalesce(k.n_upstream_failed, 0),
           coalesce(k.n_skipped, 0), coalesce(k.n_setup_success, 0), coalesce(k.n_setup_skipped, 0),
               coalesce(k.n_extra, 0)) is distinct from
          (c.success, c.failed, c.upstream_failed, c.skipped, c.setup_success, c.setup_skipped, c.more);
    get diagnostics changed = row_count;
end $$;

-- The counters of a run, computed from its tasks. Returns whether they had drifted.
create function recount_run(p_run_id bigint) returns boolean language plpgsql as $$
begin
    update run_status r
    set open_tasks = c.open_tasks, failed_leaves = c.failed_leaves, extra_tasks = c.extra
    from (
        select (v.task_count + count(k.idx) - count(distinct k.idx) - count(*) filter (where k.state in
                   ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')))::int as open_tasks,
               (count(k.idx) - count(distinct k.idx))::int as extra,
               count(*) filter (where s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed'))::int
                   as failed_leaves
        from run_status x
        join dag_version v on v.version_id = x.version_id
        left join task k on k.run_id = x.run_id
        left join lateral (select y.is_leaf from task_spec y where y.version_id = k.version_id
                           and y.idx = k.idx offset 0) s on true
        where x.run_id = p_run_id group by v.task_count
    ) c
    where r.run_id = p_run_id and r.state in ('queued', 'running') and c.open_tasks > 0
      and (r.open_tasks, r.failed_leaves, r.extra_tasks) is distinct from (c.open_tasks, c.failed_leaves, c.extra);
    return found;
end $$;

create function reconcile_run(p_run_id bigint, fx effects) returns reconcile_result language plpgsql as $$
declare
    status run_status;
    repairs text[] := '{}';
    n int;
    lost task_ref[];
    evaluated move_result;
    unlisted jsonb;
begin
    select * into status from run_status r
    where r.run_id = p_run_id and r.state = 'running' for no key update skip locked;
    if not found then
        return row(repairs, fx)::reconcile_result;
    end if;

    repairs := case when recount_groups(p_run_id) > 0 then array['group_counter_drift'] else '{}' end;

    -- a run without its first tasks, or a waiting task that was never evaluated
    n := recount_upstream(p_run_id, array(select k.idx from task k where k.run_id = p_run_id and k.state = 'waiting'));
    repairs := repairs || case when n > 0 then array['upstream_counter_drift'] end;
    if exists (select 1 from task_spec s where s.version_id = status.version_id and s.is_root
               and (select true from task k where k.run_id = p_run_id and k.idx = s.idx limit 1) is null) then
        repairs := array_append(repairs, 'run_without_tasks');
        fx := start_runs(array[p_run_id], false, fx);
    else
        evaluated := evaluate_waiting_tasks(array[p_run_id], null, fx);
        fx := complete_tasks(evaluated.tasks, evaluated.fx);
        repairs := repairs || case when cardinality(evaluated.tasks) > 0 then array['undecided_task'] end;
    end if;

    -- a task whose upstream ended without being counted, so that it has no row at all
    with missing as (
        insert into task (run_id, idx, version_id, state)
        select distinct p_run_id, g.dst, status.version_id, 'waiting'::task_state from task k
        cross join lateral (select x.dst, x.leaves_group from edge x
                            where x.version_id = status.version_id and x.src = k.idx
                                and coalesce(x.scope, 'list') = 'list' offset 0) g
        where k.run_id = p_run_id and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
          and (g.leaves_group is null or is_group_finished(p_run_id, status.version_id, g.leaves_group))
          and not has_instances(p_run_id, g.dst)
        on conflict (run_id, idx, map_index) do nothing
        returning idx
    )
    select count(*) into n from missing;
    if n > 0 then
        repairs := array_append(repairs, 'uncounted_upstream');
        perform recount_upstream(p_run_id, array(
            select k.idx from task k where k.run_id = p_run_id and k.state = 'waiting'));
        evaluated := evaluate_waiting_tasks(array[p_run_id], null, fx);
        fx := complete_tasks(evaluated.tasks, evaluated.fx);
    end if;

    -- available but not queued; queued but not available is removed by the claim that meets it
    lost := array(
        select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref
        from task k
        where k.run_id = p_run_id and k.state = 'available'
          -- one walk along the line, kept as a hash
          and (k.idx, k.map_index) not in (select q.idx, q.map_index from ready_task q where q.run_id = p_run_id)
        for update of k skip locked);
    if cardinality(lost) > 0 then
        repairs := array_append(repairs, 'available_not_offered');
        fx := enqueue_tasks(lost, fx);
    end if;

    -- pending until a time without a timer
    insert into task_timer (shard, due_at, run_id, idx, map_index)
    select d.shard, k.not_before, k.run_id, k.idx, k.map_index from task k join dag d on d.dag_id = status.dag_id
    where k.run_id = p_run_id and k.state = 'pending' and k.not_before is not null and not waits_for_time(k)
    on conflict do nothing;
    get diagnostics n = row_count;
    repairs := repairs || case when n > 0 then array['timer_missing'] end;

    -- pending although nothing holds it
    lost := array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref from task k
                  where k.run_id = p_run_id and k.state = 'pending' and k.not_before is null and not exists (
                      select 1 from gate_waiter w where w.run_id = k.run_id and w.idx = k.idx
                          and w.map_index = k.map_index));
    if cardinality(lost) > 0 and not (select d.is_paused from dag d where d.dag_id = status.dag_id) then
        repairs := array_append(repairs, 'pending_without_gate');
        fx := release_pending_tasks(lost, fx);
    end if;

    -- deferred for a trigger that is not there: the task begins again
    delete from deferral w
    where w.run_id = p_run_id and w.kind = 'trigger' and not exists (
        select 1 from task_trigger g where g.run_id = w.run_id and g.idx = w.idx and g.map_index = w.map_index
            and g.epoch = w.epoch and g.event is null);

    -- deferred without a row that wakes it
    lost := array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref from task k
                  where k.run_id = p_run_id and k.state = 'deferred' and not exists (
                      select 1 from deferral w
                      where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index and w.epoch = k.epoch));
    if cardinality(lost) > 0 then
        fx := begin_waits(lost, fx);
        repairs := array_append(repairs, 'deferral_missing');
    end if;

    -- queued, and on no work list, so that no runner would submit it; what an executor has of it must not begin
    unlisted := (
        select jsonb_agg(jsonb_build_object('r', k.run_id, 'i', k.idx, 'm', k.map_index, 'e', k.epoch, 's', k.session,
                                            'kind', 'given_back', 'reason', 'dispatch_lost: no runner observed it'))
        from task k where k.run_id = p_run_id and k.state = 'queued' and not exists (
            select 1 from dispatch w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index
                and w.epoch = k.epoch));
    if unlisted is not null then
        fx := (end_dispatches(unlisted, 0, fx)).fx;
        repairs := array_append(repairs, 'dispatch_missing');
    end if;

    -- running without a lease: no runner could report or lose it
    insert into lease (session, run_id, idx, map_index, epoch)
    select k.session, k.run_id, k.idx, k.map_index, k.epoch from task k
    where k.run_id = p_run_id and k.state = 'running'
    on conflict do nothing;
    get diagnostics n = row_count;
    repairs := repairs || case when n > 0 then array['lease_missing'] end;

    repairs := repairs || case when recount_run(p_run_id) then array['run_counter_drift'] end;
    perform close_run_if_done(p_run_id);
    if found and exists (select 1 from run_status r where r.run_id = p_run_id and r.state <> 'running')
       and cardinality(repairs) = 0 then
        repairs := array_append(repairs, 'run_not_closed');
    end if;
    if cardinality(repairs) > 0 then
        perform write_audit(system_actor(), 'reconcile', jsonb_build_object('repairs', repairs), p_run_id => p_run_id);
    end if;
    return row(repairs, fx)::reconcile_result;
end $$;

-- Closes a running run whose tasks have all ended, whatever its counter says.
create function close_run_if_done(p_run_id bigint) returns boolean language plpgsql as $$
begin
    update run_status r
    set open_tasks = 0, failed_leaves = c.bad, finished_at = clock(),
        state = case when r.cancel_requested then 'canceled' when c.bad > 0 then 'failed' else 'success' end::run_state
    from (select count(*) filter (where k.state not in ('success', 'failed', 'skipped', 'canceled',
                                                        'upstream_failed')) as open, count(distinct k.idx) as planned,
                 count(*) filter (where s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed')) as bad
          from task k
          left join lateral (select x.is_leaf from task_spec x where x.version_id = k.version_id and x.idx = k.idx
                             offset 0) s on true
          where k.run_id = p_run_id) c, dag_version v
    where r.run_id = p_run_id and r.state = 'running' and v.version_id = r.version_id and c.open = 0
      and c.planned >= v.task_count;
    if not found then
        return false;
    end if;
    perform notify_ends(null, array[p_run_id]);
    return true;
end $$;

-- A text that changes with everything that happens in a run: an attempt, an end, a start, a request of an operator.
create function run_fingerprint(p_run_id bigint) returns text language sql stable as $$
    select concat_ws(' ', r.open_tasks, count(k.*), sum(k.epoch), max(k.finished_at),
                     (select max(j.entry_id) from audit_log j where j.run_id = p_run_id and j.action <> 'quarantine'))
    from run_status r left join task k on k.run_id = r.run_id where r.run_id = p_run_id group by r.open_tasks
$$;

-- The condition of a running run, by one query that locks nothing: 'sound', 'drifted' (reconcile_run would repair
-- something) or 'stuck' (nothing can move, and no final state follows). Stable: its subqueries see one snapshot, and no
-- half of a move. p_in_line: how many of its tasks are queued, counted a moment before; null if not counted.
create function inspect_run(p_run_id bigint, p_in_line int) returns text language plpgsql stable as $$
declare
    status run_status;
    planned int;
    is_paused boolean;
    seen record;
begin
    select r.* into status from run_status r where r.run_id = p_run_id and r.state = 'running';
    if not found then
        return 'sound';
    end if;
    select v.task_count + status.extra_tasks into planned from dag_version v where v.version_id = status.version_id;
    select d.is_paused into is_paused from dag d where d.dag_id = status.dag_id;
    select count(*) filter (where k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed'))::int as
        ended, count(*) filter (where s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed'))::int as bad,
           count(*) filter (where k.state in ('pending', 'available', 'queued', 'running', 'deferred'))::int as moving,
           count(*) filter (where k.state = 'available')::int as available,
           count(*) filter (where k.state = 'waiting')::int as waiting
    into seen
    from task k
    left join lateral (select x.is_leaf from task_spec x where x.version_id = k.version_id and x.idx = k.idx offset 0) s
        on true
    where k.run_id = p_run_id;
    if seen.ended >= planned or (planned - seen.ended, seen.bad) <> (status.open_tasks, status.failed_leaves)
       or seen.available > p_in_line then
        return 'drifted';
    elsif exists (
        -- running without a lease, queued and on no work list, or pending for a time without a timer, or for nothing
        select 1 from task k
        where k.run_id = p_run_id and case k.state
            when 'running' then not exists (
                select 1 from lease l where l.session = k.session and l.run_id = k.run_id and l.idx = k.idx
                    and l.map_index = k.map_index)
            when 'queued' then not exists (
                select 1 from dispatch w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index
                    and w.epoch = k.epoch)
            when 'pending' then case when k.not_before is null then not is_paused and not exists (
                select 1 from gate_waiter w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index)
                                     else not waits_for_time(k) end
            when 'deferred' then not exists (
                select 1 from deferral w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index
                    and (w.kind <> 'trigger' or exists (
                        select 1 from task_trigger g where g.run_id = w.run_id and g.idx = w.idx
                            and g.map_index = w.map_index and g.epoch = w.epoch and g.event is null)))
            else false end)
       or exists (
        -- without one of its first tasks
        select 1 from task_spec s where s.version_id = status.version_id and s.is_root
        and (select true from task k where k.run_id = p_run_id and k.idx = s.idx limit 1) is null)
       or exists (
        -- an end that was not counted, so that what follows has no row at all
        select 1 from task k
        cross join lateral (select x.dst, x.leaves_group from edge x where x.version_id = status.version_id
                            and x.src = k.idx and coalesce(x.scope, 'list') = 'list' offset 0) g
        where k.run_id = p_run_id and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
          and (g.leaves_group is null or is_group_finished(p_run_id, status.version_id, g.leaves_group))
          and (select true from task n where n.run_id = p_run_id and n.idx = g.dst limit 1) is null)
       or exists (select 1 from drifted_groups(p_run_id))
       or (seen.waiting > 0 and exists (
        -- counted wrongly, or counted and not decided
        select 1 from count_upstream(p_run_id, null) u
        cross join lateral (select * from task x where x.run_id = p_run_id and x.idx = u.idx
                            and x.map_index = u.map_index offset 0) w
        cross join lateral (select * from task_spec x where x.version_id = w.version_id and x.idx = w.idx offset 0) s
        where (coalesce(w.n_success, 0), coalesce(w.n_failed, 0), coalesce(w.n_upstream_failed, 0),
               coalesce(w.n_skipped, 0), coalesce(w.n_setup_success, 0), coalesce(w.n_setup_skipped, 0),
                coalesce(w.n_extra, 0))
              is distinct from (u.success, u.failed, u.upstream_failed, u.skipped, u.setup_success, u.setup_skipped,
                                u.more)
           or (evaluate_trigger_rule(
                   case when s.map_head is null or w.map_index >= 0 then s.trigger_rule else 'all_done' end,
                   case when s.map_head is null or w.map_index >= 0 then s.upstream_total else s.lists_total end
                       + u.more, u.success, u.failed, u.upstream_failed, u.skipped, s.setup_total, u.setup_success,
                   u.setup_skipped) <> 'wait'
               and (s.map_head is null
                   or is_group_decidable(p_run_id, w.version_id, s.map_head, w.map_index))))) then
        return 'drifted';
    end if;
    return case when seen.moving = 0 then 'stuck' else 'sound' end;
end $$;

-- Whether a pending task has its timer, or its place in a retry queue: of any shard, because its DAG may be moving.
create function waits_for_time(p_task task) returns boolean language sql stable as $$
    select exists (select 1 from shard h
                   join task_timer w on w.shard = h.shard and w.due_at = p_task.not_before and w.run_id = p_task.run_id
                       and w.idx = p_task.idx and w.map_index = p_task.map_index)
           or exists (select 1 from shard h join task_spec s on s.version_id = p_task.version_id and s.idx = p_task.idx
                      join retry_queue l on l.shard = h.shard and l.queue = s.queue and l.due_at = p_task.not_before
                          and l.run_id = p_task.run_id and l.idx = p_task.idx and l.map_index = p_task.map_index)
$$;

-- One bounded slice of the running runs, by the index of open runs. A run is locked only when there is something to
-- repair, and set aside when it cannot be repaired. p_tasks bounds the slice by size, too: a large run is processed
-- alone. p_counts_line: whether to look for tasks that should be queued, which reads the whole ready queue. p_elapsed:
-- seconds since the last round. Returns where to continue; null: at the beginning, after the work of once per round.
create function reconcile_runs(p_shard smallint, p_epoch bigint, p_after_dag int, p_after_run bigint, p_limit int,
                               p_counts_line boolean default true, p_elapsed double precision default 0,
                               p_tasks int default 20000, out last_dag_id int, out last_run_id bigint,
                               out repaired text[], out refused int) language plpgsql set enable_hashjoin = on as $$
declare
    fx effects;
    done reconcile_result;
    r record;
    verdict text;
begin
    perform fence(p_shard, p_epoch);
    repaired := '{}';
    refused := 0;
    for r in
        with slice as (
            select s.dag_id, s.run_id,
                   sum(v.task_count + s.extra_tasks) over (order by s.dag_id, s.run_id) - v.task_count
                       - s.extra_tasks as before
            from (select x.dag_id, x.run_id, x.version_id, x.extra_tasks from run_status x
                  join dag d on d.dag_id = x.dag_id
                  where x.state in ('queued', 'running') and x.state = 'running' and d.shard = p_shard
                    and (x.dag_id, x.state, x.run_id) > (p_after_dag, 'running'::run_state, p_after_run)
                  order by x.dag_id, x.state, x.run_id limit p_limit) s
            join dag_version v on v.version_id = s.version_id
        )
        select s.dag_id, s.run_id, case when p_counts_line then coalesce(l.tasks, 0) end as in_line
        from slice s left join (select q.run_id, count(*)::int as tasks from ready_task q where p_counts_line
                                group by q.run_id) l
             on l.run_id = s.run_id
        where s.before < p_tasks order by s.dag_id, s.run_id
    loop
        last_dag_id := r.dag_id;
        last_run_id := r.run_id;
        continue when is_quarantined('run', r.run_id);
        begin
            verdict := inspect_run(r.run_id, r.in_line);
            done := null;
            if verdict = 'drifted' then
                done := reconcile_run(r.run_id, fx);
            end if;
            if verdict = 'stuck' then
                insert into orphan_watch as w (run_id, fingerprint, watched_seconds)
                values (r.run_id, run_fingerprint(r.run_id), 0)
                on conflict (run_id) do update set fingerprint = excluded.fingerprint,
                    watched_seconds = case when w.fingerprint = excluded.fingerprint then w.watched_seconds + p_elapsed
                                           else 0 end;
            else
                delete from orphan_watch w where w.run_id = r.run_id;
            end if;
        exception when others then
            if not is_poison(sqlstate) then
                raise;
            end if;
            perform quarantine_row('run', r.run_id, 'reconcile', sqlerrm, true);
            refused := refused + 1;
            continue;
        end;
        if verdict = 'drifted' then
            repaired := repaired || done.repairs;
            fx := done.fx;
        end if;
    end loop;
    if last_run_id is null or not exists (
        select 1 from run_status x join dag d on d.dag_id = x.dag_id
        where x.state in ('queued', 'running') and x.state = 'running' and d.shard = p_shard
          and (x.dag_id, x.state, x.run_id) > (last_dag_id, 'running'::run_state, last_run_id)) then
        last_dag_id := null;
        last_run_id := null;
        delete from orphan_watch w where (
            select true from run_status x where x.run_id = w.run_id and x.state = 'running') is null;
        perform release_quarantine(p_shard);
        fx := (admit_skipped_runs(p_shard, fx)).fx;
        if p_shard = 0 then
            perform reopen_shards();
        end if;
    end if;
    fx := apply_effects(fx);
end $$;

-- Sets the next run of the round aside: checking it alone takes longer than the time limit. Returns which one it was.
create function skip_run_once(p_shard smallint, p_epoch bigint, p_after_dag int, p_after_run bigint,
                              out skipped_dag_id int, out skipped_run_id bigint) language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    select x.dag_id, x.run_id into skipped_dag_id, skipped_run_id from run_status x join dag d on d.dag_id = x.dag_id
    where x.state in ('queued', 'running') and x.state = 'running' and d.shard = p_shard
      and (x.dag_id, x.state, x.run_id) > (p_after_dag, 'running'::run_state, p_after_run)
    order by x.dag_id, x.state, x.run_id limit 1;
    if found then
        perform quarantine_row('run', skipped_run_id, 'reconcile', 'looking at it takes too long', true);
    end if;
end $$;

-- Admits skipped runs. A DAG whose runs cannot start blocks no other. Returns how many started, or were set aside.
create function admit_skipped_runs(p_shard smallint, fx effects) returns admission_result language plpgsql as $$
declare
    d int;
    done admission_result;
    admitted int := 0;
    refused int := 0;
begin
    foreach d in array array(select x from dags_with_free_slots(p_shard) x order by x) loop
        begin
            done := admit_runs(array[d], fx);
            fx := done.fx;
            admitted := admitted + done.admitted;
        exception when others then
            if not is_poison(sqlstate) then
                raise;
            end if;
            perform quarantine_row('dag', d, 'admit', sqlerrm, true);
            refused := refused + 1;
        end;
    end loop;
    return row(admitted, refused, fx)::admission_result;
end $$;

create function admit_queued_runs(p_shard smallint, p_epoch bigint, out admitted int, out refused int)
language plpgsql as $$
declare
    fx effects;
    done admission_result;
begin
    perform fence(p_shard, p_epoch);
    done := admit_skipped_runs(p_shard, fx);
    fx := apply_effects(done.fx);
    admitted := done.admitted;
    refused := done.refused;
end $$;

-- A run in which nothing could move for the threshold, and which cannot be repaired, fails with the tasks that wait in
-- it. Returns 'reaped', 'moved' (not an orphan after all) or 'refused'.
create function fail_orphaned_run(p_shard smallint, p_epoch bigint, p_run_id bigint, p_after double precision)
returns text language plpgsql as $$
declare
    fx effects;
    done reconcile_result;
    status run_status;
    is_stuck boolean;
    why text := format('orphaned: nothing in it could move for %s s', round(p_after));
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    begin
        select r.* into status from run_status r where r.run_id = p_run_id and r.state = 'running' for no key update;
        is_stuck := found;
        if is_stuck then
            done := reconcile_run(p_run_id, fx);
            fx := done.fx;
            is_stuck := cardinality(done.repairs) = 0 and inspect_run(p_run_id, 0) = 'stuck' and exists (
                select 1 from orphan_watch w where w.run_id = p_run_id and w.watched_seconds >= p_after
                   and w.fingerprint = run_fingerprint(p_run_id));
        end if;
        if not is_stuck then
            delete from orphan_watch w where w.run_id = p_run_id;
            fx := apply_effects(fx);
            return 'moved';
        end if;
        insert into task as k (run_id, idx, version_id, state, finished_at, reason)
        select p_run_id, s.idx, status.version_id, 'failed', t, why from task_spec s
        where s.version_id = status.version_id and not (s.is_mapped and has_instances(p_run_id, s.idx)) order by s.idx
        on conflict (run_id, idx, map_index) do update set state = 'failed', finished_at = t, reason = why
            where k.state = 'waiting';
        update task k set state = 'failed', finished_at = t, reason = why
        where k.run_id = p_run_id and k.map_index >= 0 and k.state = 'waiting';
        update run_status r
        set state = 'failed', open_tasks = 0, finished_at = t, reason = why, failed_leaves = (
                select count(*) from task k join task_spec s on s.version_id = k.version_id and s.idx = k.idx
                where k.run_id = p_run_id and s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed'))
        where r.run_id = p_run_id and r.state = 'running';
        perform write_audit(system_actor(), 'reap', jsonb_build_object('reason', why), p_run_id => p_run_id);
        delete from orphan_watch w where w.run_id = p_run_id;
        perform notify_ends(null, array[p_run_id]);
        fx := (admit_runs(array[status.dag_id], fx)).fx;
        fx := apply_effects(fx);
        return 'reaped';
    exception when others then
        if not is_poison(sqlstate) then
            raise;
        end if;
        perform quarantine_row('run', p_run_id, 'reap', sqlerrm, true);
        return 'refused';
    end;
end $$;

-- The groups of a run whose counters differ from its tasks.
create function drifted_groups(p_run_id bigint) returns table (group_id int, ended int, more int)
language sql stable as $$
    select w.group_id, c.ended, c.more from run_status r join retry_group w on w.version_id = r.version_id
    cross join lateral (select count(*) filter (where k.state in ('success', 'failed', 'skipped', 'canceled',
                                                'upstream_failed'))::int as ended,
                               (count(k.idx) - count(distinct k.idx))::int as more
                        from unnest(w.members) m(idx)
                        cross join lateral (select x.idx, x.state from task x
                                            where x.run_id = p_run_id and x.idx = m.idx offset 0) k) c
    left join run_group g on g.run_id = r.run_id and g.group_id = w.group_id
    where r.run_id = p_run_id and (coalesce(g.ended, 0), coalesce(g.more, 0)) <> (c.ended, c.more)
$$;

-- Counts a run's groups again from its tasks. Returns how many had drifted.
create function recount_groups(p_run_id bigint, out drifted int) language plpgsql as $$
begin
    insert into run_group as g (run_id, group_id, ended, more)
    select p_run_id, d.group_id, d.ended, d.more from drifted_groups(p_run_id) d
    on conflict (run_id, group_id) do update set ended = excluded.ended, more = excluded.more;
    get diagnostics drifted = row_count;
end $$;
