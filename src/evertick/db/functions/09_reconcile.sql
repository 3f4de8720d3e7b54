-- The round over the open runs: everything that can be derived from the tasks is derived again, and runs beyond repair
-- are ended. The fast paths keep all of this right already, so every repair is counted and recorded.

-- The upstream counters of the given waiting tasks, computed from the tasks themselves.
create function recount_upstream(p_run_id bigint, p_idxs int[]) returns int language plpgsql as $$
declare
    changed int;
begin
    update task k
    set n_success = c.success, n_failed = c.failed, n_upstream_failed = c.upstream_failed, n_skipped = c.skipped,
        n_setup_success = c.setup_success, n_setup_skipped = c.setup_skipped, n_extra = c.more
    from count_upstream(p_run_id, p_idxs) c
    where k.run_id = p_run_id and k.idx = c.idx and k.map_index = c.map_index and k.state = 'waiting'
      and (coalesce(k.n_success, 0), coalesce(k.n_failed, 0), coalesce(k.n_upstream_failed, 0),
           coalesce(k.n_skipped, 0), coalesce(k.n_setup_success, 0), coalesce(k.n_setup_skipped, 0),
               coalesce(k.n_extra, 0))
          is distinct from
          (c.success, c.failed, c.upstream_failed, c.skipped, c.setup_success, c.setup_skipped, c.more);
    get diagnostics changed = row_count;
    return changed;
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
        where x.run_id = p_run_id
        group by v.task_count
    ) c
    where r.run_id = p_run_id and r.state in ('queued', 'running') and c.open_tasks > 0
      and (r.open_tasks, r.failed_leaves, r.extra_tasks) is distinct from (c.open_tasks, c.failed_leaves, c.extra);
    return found;
end $$;

create function reconcile_run(p_run_id bigint) returns text[] language plpgsql as $$
declare
    status run_status;
    repairs text[] := '{}';
    n int;
    lost task_ref[];
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

    -- a run without its first tasks, or a waiting task that was never evaluated
    n := recount_upstream(p_run_id, array(
        select k.idx from task k where k.run_id = p_run_id and k.state = 'waiting'));
    if n > 0 then
        repairs := array_append(repairs, 'upstream_counter_drift');
    end if;
    if exists (select 1 from task_spec s where s.version_id = status.version_id and s.is_root
               and (select true from task k where k.run_id = p_run_id and k.idx = s.idx limit 1) is null) then
        repairs := array_append(repairs, 'run_without_tasks');
        perform complete_tasks(start_runs(array[p_run_id]));
    else
        lost := evaluate_waiting_tasks(array[p_run_id]);
        if coalesce(cardinality(lost), 0) > 0 then
            repairs := array_append(repairs, 'undecided_task');
            perform complete_tasks(lost);
        end if;
    end if;

    -- a task whose upstream ended without being counted, so that it has no row at all
    with missing as (
        insert into task (run_id, idx, version_id, state)
        select distinct p_run_id, g.dst, status.version_id, 'waiting'::task_state
        from task k
        cross join lateral (select x.dst, x.leaves_group from edge x where x.version_id = status.version_id
                            and x.src = k.idx offset 0) g
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
        perform complete_tasks(evaluate_waiting_tasks(array[p_run_id]));
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
        perform enqueue_tasks(lost);
    end if;

    -- pending until a time without a timer
    insert into task_timer (shard, due_at, run_id, idx, map_index)
    select d.shard, k.not_before, k.run_id, k.idx, k.map_index
    from task k join dag d on d.dag_id = status.dag_id
    where k.run_id = p_run_id and k.state = 'pending' and k.not_before is not null and not waits_for_time(k)
    on conflict do nothing;
    get diagnostics n = row_count;
    if n > 0 then
        repairs := array_append(repairs, 'timer_missing');
    end if;

    -- pending although nothing holds it
    lost := array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref from task k
                  where k.run_id = p_run_id and k.state = 'pending' and k.not_before is null and not exists (
                      select 1 from gate_waiter w where w.run_id = k.run_id and w.idx = k.idx
                          and w.map_index = k.map_index));
    if cardinality(lost) > 0 and not (select d.is_paused from dag d where d.dag_id = status.dag_id) then
        repairs := array_append(repairs, 'pending_without_gate');
        perform release_pending_tasks(lost);
    end if;

    -- deferred without a row that wakes it
    lost := array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref from task k
                  where k.run_id = p_run_id and k.state = 'deferred' and not exists (
                      select 1 from deferral w
                      where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index and w.epoch = k.epoch));
    if cardinality(lost) > 0 then
        perform begin_waits(lost);
        repairs := array_append(repairs, 'deferral_missing');
    end if;

    -- queued, and on no work list, so that no runner would submit it. Whatever an executor has of it must not begin any
    -- more
    unlisted := (
        select jsonb_agg(jsonb_build_object('r', k.run_id, 'i', k.idx, 'm', k.map_index, 'e', k.epoch, 's', k.session,
                                            'kind', 'given_back', 'reason', 'dispatch_lost: nobody looked after it'))
        from task k where k.run_id = p_run_id and k.state = 'queued' and not exists (
            select 1 from dispatch w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index
                and w.epoch = k.epoch));
    if unlisted is not null then
        perform end_dispatches(unlisted, 0);
        repairs := array_append(repairs, 'dispatch_missing');
    end if;

    -- running without a lease: no runner could report or lose it
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
    perform close_run_if_done(p_run_id);
    if found and exists (select 1 from run_status r where r.run_id = p_run_id and r.state <> 'running')
       and cardinality(repairs) = 0 then
        repairs := array_append(repairs, 'run_not_closed');
    end if;
    if cardinality(repairs) > 0 then
        insert into audit_log (occurred_at, action, actor, run_id, detail)
        values (t, 'reconcile', 'evertick', p_run_id, jsonb_build_object('repairs', repairs));
    end if;
    return repairs;
end $$;

-- Closes a running run whose tasks have all ended, whatever its counter says.
create function close_run_if_done(p_run_id bigint) returns boolean language plpgsql as $$
begin
    update run_status r
    set open_tasks = 0, failed_leaves = c.bad, finished_at = clock(),
        state = case when r.cancel_requested then 'canceled' when c.bad > 0 then 'failed' else 'success' end::run_state
    from (
        select count(*) filter (where k.state not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')) as
            open,
               count(distinct k.idx) as planned,
                   count(*) filter (where s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed')) as bad
        from task k
        left join lateral (select x.is_leaf from task_spec x where x.version_id = k.version_id
                           and x.idx = k.idx offset 0) s on true
        where k.run_id = p_run_id
    ) c, dag_version v
    where r.run_id = p_run_id and r.state = 'running' and v.version_id = r.version_id and c.open = 0
        and c.planned >= v.task_count;
    if not found then
        return false;
    end if;
    perform notify_ends(null, array[p_run_id]);
    return true;
end $$;

-- A text that changes with everything that can happen in a run: an attempt, an end, a task that started, a request of
-- an operator.
create function run_fingerprint(p_run_id bigint) returns text language sql stable as $$
    select concat_ws(' ', r.open_tasks, count(k.*), sum(k.epoch), max(k.finished_at),
                     (select max(j.entry_id) from audit_log j where j.run_id = p_run_id and j.action <> 'quarantine'))
    from run_status r left join task k on k.run_id = r.run_id where r.run_id = p_run_id group by r.open_tasks
$$;

-- The condition of a running run, by one query that locks nothing: 'sound', 'drifted' (reconcile_run would repair
-- something) or 'stuck' (nothing can move, and no final state follows). Stable, so that all its subqueries see one
-- snapshot: every move is one transaction, and no snapshot shows half of one. p_in_line: how many of its tasks are
-- queued, counted a moment before; null if they were not counted.
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
        ended,
           count(*) filter (where s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed'))::int as bad,
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
    end if;
    if exists (
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
                select 1 from deferral w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index)
            else false end)
       or exists (
        -- without one of its first tasks
        select 1 from task_spec s where s.version_id = status.version_id and s.is_root
        and (select true from task k where k.run_id = p_run_id and k.idx = s.idx limit 1) is null)
       or exists (
        -- an end that was not counted, so that what follows has no row at all
        select 1 from task k
        cross join lateral (select x.dst, x.leaves_group from edge x where x.version_id = status.version_id
                            and x.src = k.idx offset 0) g
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
               coalesce(w.n_skipped, 0),
               coalesce(w.n_setup_success, 0), coalesce(w.n_setup_skipped, 0), coalesce(w.n_extra, 0))
              is distinct from (u.success, u.failed, u.upstream_failed, u.skipped, u.setup_success, u.setup_skipped,
                                u.more)
           or evaluate_trigger_rule(s.trigger_rule, s.upstream_total + u.more, u.success, u.failed, u.upstream_failed,
               u.skipped,
                     s.setup_total,
                     u.setup_success, u.setup_skipped) <> 'wait')) then
        return 'drifted';
    end if;
    return case when seen.moving = 0 then 'stuck' else 'sound' end;
end $$;

-- Whether a pending task has its timer, or its place in the line of retries: in whatever shard, because its DAG may
-- just be moving.
create function waits_for_time(p_task task) returns boolean language sql stable as $$
    select exists (select 1 from shard h
                   join task_timer w on w.shard = h.shard and w.due_at = p_task.not_before and w.run_id = p_task.run_id
                                and w.idx = p_task.idx and w.map_index = p_task.map_index)
        or exists (select 1 from shard h
                   join task_spec s on s.version_id = p_task.version_id and s.idx = p_task.idx
                   join retry_queue l on l.shard = h.shard and l.queue = s.queue and l.due_at = p_task.not_before
                                     and l.run_id = p_task.run_id and l.idx = p_task.idx
                                         and l.map_index = p_task.map_index)
$$;

-- One bounded slice of the running runs, in the order of the index of open runs, so that history costs nothing. A run
-- is locked only when a check shows something to repair, and set aside when it cannot be repaired. p_tasks bounds the
-- slice by size, too: a large run is processed alone. p_counts_line: whether to check for tasks that should be queued,
-- which reads the whole ready queue and so is not done in every round. p_elapsed: seconds since the round before, for
-- stuck runs. Returns where to continue; null means from the beginning, and the work of once per round is done then.
create function reconcile_runs(p_shard smallint, p_epoch bigint, p_after_dag int, p_after_run bigint, p_limit int,
                               p_counts_line boolean default true, p_elapsed double precision default 0,
                               p_tasks int default 20000, out last_dag_id int, out last_run_id bigint,
                               out repaired text[], out refused int)
language plpgsql set enable_hashjoin = on as $$
declare
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
        where s.before < p_tasks
        order by s.dag_id, s.run_id
    loop
        last_dag_id := r.dag_id;
        last_run_id := r.run_id;
        continue when is_quarantined('run', r.run_id);
        begin
            verdict := inspect_run(r.run_id, r.in_line);
            if verdict = 'drifted' then
                repaired := repaired || reconcile_run(r.run_id);
            end if;
            if verdict = 'stuck' then
                insert into orphan_watch as w (run_id, fingerprint, watched_seconds)
                    values (r.run_id, run_fingerprint(r.run_id), 0)
                on conflict (run_id) do update
                    set fingerprint = excluded.fingerprint,
                        watched_seconds = case when w.fingerprint = excluded.fingerprint
                                               then w.watched_seconds + p_elapsed else 0 end;
            else
                delete from orphan_watch w where w.run_id = r.run_id;
            end if;
        exception when others then
            if not is_poison(sqlstate) then
                raise;
            end if;
            perform quarantine_row('run', r.run_id, 'reconcile', sqlerrm, true);
            refused := refused + 1;
        end;
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
        perform admit_skipped_runs(p_shard);
        if p_shard = 0 then
            perform reopen_shards();
        end if;
    end if;
    perform apply_effects();
end $$;

-- Sets the next run of the round aside: checking it alone takes longer than the time limit. Returns which one it was.
create function skip_run_once(p_shard smallint, p_epoch bigint, p_after_dag int, p_after_run bigint,
                              out skipped_dag_id int, out skipped_run_id bigint)
language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    select x.dag_id, x.run_id into skipped_dag_id, skipped_run_id
    from run_status x join dag d on d.dag_id = x.dag_id
    where x.state in ('queued', 'running') and x.state = 'running' and d.shard = p_shard
      and (x.dag_id, x.state, x.run_id) > (p_after_dag, 'running'::run_state, p_after_run)
    order by x.dag_id, x.state, x.run_id limit 1;
    if found then
        perform quarantine_row('run', skipped_run_id, 'reconcile', 'looking at it takes too long', true);
    end if;
end $$;

-- Admits queued runs that were skipped when room became free. One DAG whose runs cannot start does not block any other.
-- Returns how many runs started and how many DAGs were set aside.
create function admit_skipped_runs(p_shard smallint, out admitted int, out refused int) language plpgsql as $$
declare
    d int;
begin
    admitted := 0;
    refused := 0;
    foreach d in array array(select x from dags_with_free_slots(p_shard) x order by x) loop
        begin
            admitted := admitted + admit_runs(array[d]);
        exception when others then
            if not is_poison(sqlstate) then
                raise;
            end if;
            perform quarantine_row('dag', d, 'admit', sqlerrm, true);
            refused := refused + 1;
        end;
    end loop;
end $$;

create function admit_queued_runs(p_shard smallint, p_epoch bigint, out admitted int, out refused int)
language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    select a.admitted, a.refused into admitted, refused from admit_skipped_runs(p_shard) a;
    perform apply_effects();
end $$;

-- A run in which nothing has been able to move for as long as the threshold says, and which cannot be repaired either,
-- fails; so do the tasks that wait in it. Returns whether it was failed: 'reaped', 'moved' (not an orphan after all),
-- 'refused'.
create function fail_orphaned_run(p_shard smallint, p_epoch bigint, p_run_id bigint, p_after double precision)
returns text language plpgsql as $$
declare
    status run_status;
    why text := format('orphaned: nothing in it could move for %s s', round(p_after));
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    begin
        select r.* into status from run_status r where r.run_id = p_run_id and r.state = 'running' for no key update;
        if not found or cardinality(reconcile_run(p_run_id)) > 0 or inspect_run(p_run_id, 0) <> 'stuck' or not exists (
            select 1 from orphan_watch w where w.run_id = p_run_id and w.watched_seconds >= p_after
               and w.fingerprint = run_fingerprint(p_run_id)) then
            delete from orphan_watch w where w.run_id = p_run_id;
            perform apply_effects();
            return 'moved';
        end if;
        insert into task as k (run_id, idx, version_id, state, finished_at, reason)
        select p_run_id, s.idx, status.version_id, 'failed', t, why
        from task_spec s where s.version_id = status.version_id and not (s.is_mapped and has_instances(p_run_id, s.idx))
        order by s.idx
        on conflict (run_id, idx, map_index) do update set state = 'failed', finished_at = t, reason = why
            where k.state = 'waiting';
        update task k set state = 'failed', finished_at = t, reason = why
        where k.run_id = p_run_id and k.map_index >= 0 and k.state = 'waiting';
        update run_status r
        set state = 'failed', open_tasks = 0, finished_at = t, reason = why,
            failed_leaves = (select count(*) from task k join task_spec s on s.version_id = k.version_id
                             and s.idx = k.idx
                             where k.run_id = p_run_id and s.is_leaf
                                 and k.state in ('failed', 'canceled', 'upstream_failed'))
        where r.run_id = p_run_id and r.state = 'running';
        insert into audit_log (occurred_at, action, actor, run_id, detail)
        values (t, 'reap', 'evertick', p_run_id, jsonb_build_object('reason', why));
        delete from orphan_watch w where w.run_id = p_run_id;
        perform notify_ends(null, array[p_run_id]);
        perform admit_runs(array[status.dag_id]);
        perform apply_effects();
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
create function drifted_groups(p_run_id bigint)
returns table (grp int, ended int, more int) language sql stable as $$
    select w.grp, c.ended, c.more
    from run_status r
    join retry_group w on w.version_id = r.version_id
    cross join lateral (
        select count(*) filter (where k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed'))::int
            as ended,
               (count(k.idx) - count(distinct k.idx))::int as more
        from unnest(w.members) m(idx)
        cross join lateral (select x.idx, x.state from task x where x.run_id = p_run_id and x.idx = m.idx offset 0) k) c
    left join run_group g on g.run_id = r.run_id and g.grp = w.grp
    where r.run_id = p_run_id and (coalesce(g.ended, 0), coalesce(g.more, 0)) <> (c.ended, c.more)
$$;

-- Counts a run's groups again from its tasks. Returns how many had drifted.
create function recount_groups(p_run_id bigint) returns int language plpgsql as $$
declare
    drifted int;
begin
    insert into run_group as g (run_id, grp, ended, more)
    select p_run_id, d.grp, d.ended, d.more from drifted_groups(p_run_id) d
    on conflict (run_id, grp) do update set ended = excluded.ended, more = excluded.more;
    get diagnostics drifted = row_count;
    return drifted;
end $$;
