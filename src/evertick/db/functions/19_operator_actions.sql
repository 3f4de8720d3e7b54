-- What operators ask for: trigger, cancel, clear, mark, pause. A running task is never moved from here: it gets a
-- request, and moves when its owner confirms that the process group is dead, or when the owner is declared dead.

create function trigger_run(p_dag_id int, p_params jsonb, p_key text, p_actor text, p_fire_at timestamptz default null,
                            p_note text default null)
returns table (run_id bigint, is_new boolean, defers boolean) language plpgsql as $$
declare
    made bigint;
begin
    -- An explicit instant is a key as well: no other run has it, triggered or scheduled.
    insert into run as r (dag_id, version_id, kind, key, fire_at, params, triggered_by, created_at)
    select d.dag_id, d.version_id, 'manual', p_key, p_fire_at, p_params, p_actor, clock()
    from dag d where d.dag_id = p_dag_id and d.deleted_at is null and d.version_id is not null
      and (p_fire_at is null or not exists (
          select 1 from schedule c join run x on x.schedule_id = c.schedule_id and x.fire_at = p_fire_at
              where c.dag_id = p_dag_id))
    on conflict do nothing
    returning r.run_id into made;
    if made is null then
        return query
            select r.run_id, false, false from run r where r.dag_id = p_dag_id and r.key = p_key
            union all
            select r.run_id, false, false from run r where r.dag_id = p_dag_id and r.fire_at = p_fire_at
                and r.kind = 'manual'
            union all
            select x.run_id, false, false from schedule c join run x on x.schedule_id = c.schedule_id
                and x.fire_at = p_fire_at
            where c.dag_id = p_dag_id
            limit 1;
        return;
    end if;
    if p_note is not null then
        insert into note (run_id, idx, map_index, content, written_by, written_at)
            values (made, -1, -1, p_note, p_actor, clock());
    end if;
    -- The run itself says who triggered it; a request with an origin also gets an entry in the audit log.
    if coalesce(current_setting('evertick.origin', true), '') <> '' then
        insert into audit_log (occurred_at, action, actor, dag_id, run_id, detail)
        values (clock(), 'trigger', p_actor, p_dag_id, made, jsonb_strip_nulls(jsonb_build_object('key', p_key)));
    end if;
    perform open_runs(array[made]);
    perform apply_effects();
    return query select made, true, coalesce(current_setting('evertick.arrived', true) = 'yes', false);
end $$;

-- Ends everything of a run that has not started, and asks what runs to stop. The caller holds the run's lock, and
-- closes the run with what ended. Returns that, and how many are asked to stop.
create function stop_tasks(p_run_id bigint, p_reason text, out stopped task_ref[], out asked int) language plpgsql as $$
declare
    t timestamptz := clock();
begin
    perform leave_gate_queues(array[p_run_id], null);
    delete from ready_task q using run_status r, task_spec s
    where r.run_id = p_run_id and s.version_id = r.version_id and q.queue = s.queue
      and q.rank in (9 - s.priority, 9) and q.run_id = p_run_id;
    with gone as (
        insert into task as k (run_id, idx, version_id, state, finished_at, reason)
        select r.run_id, s.idx, r.version_id, 'canceled', t, p_reason
        from run_status r join task_spec s on s.version_id = r.version_id
        where r.run_id = p_run_id and not (s.is_mapped and has_instances(p_run_id, s.idx))
        order by s.idx
        on conflict (run_id, idx, map_index) do update
            set state = 'canceled', finished_at = t, reason = p_reason, not_before = null
            where k.state in ('waiting', 'pending', 'available', 'deferred')
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(g.run_id, g.idx, g.map_index, g.version_id, g.state)::task_ref) into stopped from gone g;
    with gone as (
        update task k set state = 'canceled', finished_at = t, reason = p_reason, not_before = null
        where k.run_id = p_run_id and k.map_index >= 0 and k.state in ('waiting', 'pending', 'available', 'deferred')
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select stopped || array_agg(row(g.run_id, g.idx, g.map_index, g.version_id, g.state)::task_ref) into stopped
        from gone g;
    delete from deferral d where d.run_id = p_run_id;
    if exists (select 1 from gate_holder h where h.run_id = p_run_id)
       or exists (select 1 from gate_order o where o.run_id = p_run_id) then
        perform release_gates(stopped);
    end if;
    update task k set request = 'cancel'
    where k.run_id = p_run_id and k.state in ('queued', 'running');
    get diagnostics asked = row_count;
    perform recount_groups(p_run_id);
end $$;

-- Cancels a run. Returns how many tasks are asked to stop; null when the run has ended.
create function cancel_run(p_run_id bigint, p_actor text, p_reason text) returns int language plpgsql as $$
declare
    asked int := stop_run(p_run_id, p_actor, p_reason);
begin
    perform apply_effects();
    return asked;
end $$;

-- The same, for a caller that cancels several runs: gates are processed once, at the very end.
create function stop_run(p_run_id bigint, p_actor text, p_reason text) returns int language plpgsql as $$
declare
    now_ended task_ref[];
    asked int;
    t timestamptz := clock();
begin
    update run_status r set cancel_requested = true, reason = p_reason
    where r.run_id = p_run_id and r.state in ('queued', 'running');
    if not found then
        return null;
    end if;
    select s.stopped, s.asked into now_ended, asked from stop_tasks(p_run_id, p_reason) s;
    insert into audit_log (occurred_at, action, actor, run_id, detail)
    values (t, 'cancel', p_actor, p_run_id, jsonb_build_object('reason', p_reason, 'asked_to_stop', asked));
    perform close_finished_runs(now_ended);
    return asked;
end $$;

-- The attempts of reset tasks become history, their results are deleted, and their polls start again.
create function record_cleared_attempts(p_tasks task_ref[]) returns void language plpgsql as $$
begin
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, reason, exit_code, admitted_at,
                         queued_at, started_at,
                         startup_seconds, finished_at)
    select k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.session, k.state::text, k.reason, k.exit_code,
        k.admitted_at, k.queued_at,
           k.started_at, k.startup_seconds, k.finished_at
    from unnest(p_tasks) p join task k on k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
    where k.epoch > 0 and k.finished_at is not null and (k.started_at is not null or k.session is not null)
    on conflict (run_id, idx, map_index, epoch) do nothing;
    delete from result v using unnest(p_tasks) p
    where v.run_id = p.run_id and v.idx = p.idx and v.map_index = p.map_index;
    delete from sensor_poll q using unnest(p_tasks) p
    where q.run_id = p.run_id and q.idx = p.idx and q.map_index = p.map_index;
end $$;

-- Downstream tasks that were enabled by ends which no longer count, and have not started: they leave the queue, and end
-- for a moment, so that they can wait again. A task that a runner is claiming stays with it. Returns them.
create function reset_downstream(p_tasks task_ref[]) returns task_ref[] language plpgsql as $$
declare
    one record;
    back task_ref;
    taken task_ref[] := '{}';
begin
    for one in
        select g.run_id, g.dst as idx, s.queue, s.priority
        from downstream_tasks(p_tasks) g
        join task_spec s on s.version_id = g.version_id and s.idx = g.dst
        cross join lateral (select from task k where k.run_id = g.run_id and k.idx = g.dst and k.map_index = -1
                            and k.state in ('pending', 'available') offset 0) k
        where g.has_heard
        order by g.run_id, g.dst
    loop
        perform leave_gate_queues(array[one.run_id], one.idx, -1);
        delete from ready_task q where q.queue = one.queue and q.rank in (9 - one.priority, 9) and q.run_id = one.run_id
            and q.idx = one.idx
          and q.map_index = -1;
        update task k set state = 'canceled', finished_at = clock(), not_before = null
        where k.run_id = one.run_id and k.idx = one.idx and k.map_index = -1 and k.state in ('pending', 'available')
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state into back;
        if found then
            perform release_gates(array[back]);
            taken := array_append(taken, back);
        end if;
    end loop;
    -- Of a mapped task none or all: what its instances were given is of the past, and one of them never waits for
    -- others.
    for one in
        select g.run_id, array_agg(g.dst order by g.dst) as idxs from downstream_tasks(p_tasks) g
        join task_spec s on s.version_id = g.version_id and s.idx = g.dst and s.is_mapped
        where g.has_heard and has_instances(g.run_id, g.dst) and not exists (
            select 1 from task k where k.run_id = g.run_id and k.idx = g.dst
                and (k.state not in ('pending', 'available') or k.attempt > 0))
          and not exists (select 1 from unnest(p_tasks) p where p.run_id = g.run_id and p.idx = g.dst)
        group by g.run_id order by g.run_id
    loop
        taken := taken || reset_instances(one.run_id, one.idxs);
    end loop;
    return taken;
end $$;

-- The tasks that count the ends of these tasks, and whether they have counted them. Of a group with retries all ends
-- are counted at once, by every task after the group.
create function downstream_tasks(p_tasks task_ref[])
returns table (run_id bigint, version_id int, dst int, has_heard boolean) language sql stable as $$
    select x.run_id, x.version_id, x.dst, bool_or(x.has_heard) from (
        select p.run_id, p.version_id, g.dst, true as has_heard
        from unnest(p_tasks) p join edge g on g.version_id = p.version_id and g.src = p.idx and g.leaves_group is null
        union all
        select p.run_id, p.version_id, g.dst, is_group_finished(p.run_id, p.version_id, p.group_id)
        from (select distinct q.run_id, q.version_id, s.group_id from unnest(p_tasks) q
              join task_spec s on s.version_id = q.version_id and s.idx = q.idx and s.group_id is not null) p
        join retry_group w on w.version_id = p.version_id and w.grp = p.group_id
        cross join unnest(w.members) m(idx)
        join edge g on g.version_id = p.version_id and g.src = m.idx and g.leaves_group = p.group_id
    ) x group by x.run_id, x.version_id, x.dst
$$;

-- Resets terminal tasks to waiting, counts their upstream again and evaluates them. The caller holds the runs' locks.
create function reopen_tasks(p_tasks task_ref[]) returns int language plpgsql as $$
declare
    runs bigint[];
    r bigint;
    offered int := 0;
begin
    p_tasks := p_tasks || reset_downstream(p_tasks);
    perform record_cleared_attempts(p_tasks);
    update task k
    set state = 'waiting', attempt = 0, lost_attempts = 0, session = null, not_before = null, started_at = null,
        finished_at = null, reason = null, exit_code = null
    from unnest(p_tasks) p
    where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
      and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed');
    if exists (select 1 from unnest(p_tasks) p where p.map_index >= 0) then
        perform collapse_instances(p_tasks);
    end if;
    runs := array(select distinct p.run_id from unnest(p_tasks) p order by 1);
    perform recount_groups(x) from unnest(runs) x;   -- a task that depends on a group checks whether it is finished
    p_tasks := p_tasks || collapse_unready(p_tasks);
    foreach r in array runs loop
        perform recount_groups(r);
        perform recount_upstream(r, array(
            select p.idx from unnest(p_tasks) p where p.run_id = r
            union
            select g.dst from downstream_tasks(p_tasks) g where g.run_id = r));
        -- It starts again, and so does its time limit.
        update run_status s
        set state = 'queued', started_at = null, finished_at = null, cancel_requested = false, reason = null
        where s.run_id = r and s.state in ('success', 'failed', 'canceled');
        perform recount_run(r);
    end loop;
    perform requeue_log_archiving(runs);
    -- A run that stayed open decides now; one that was closed waits for admission like any other queued run.
    offered := complete_tasks(evaluate_waiting_tasks(array(
        select s.run_id from run_status s where s.run_id = any(runs) and s.state = 'running')));
    return offered + admit_runs(array(
        select distinct s.dag_id from run_status s where s.run_id = any(runs) and s.state = 'queued'));
end $$;

-- Moves an ended run to another version of its DAG: the current one, if it has the same tasks with the same indexes, so
-- that existing records keep their meaning. The caller holds the run's lock.
create function change_run_version(p_run_id bigint, p_version_id int) returns void language plpgsql as $$
declare
    status run_status;
begin
    select * into status from run_status r where r.run_id = p_run_id;
    if status.version_id = p_version_id then
        return;
    elsif status.state not in ('success', 'failed', 'canceled') then
        raise exception 'Run % is still open; it can go on with another version once it has ended, or was canceled.',
            p_run_id
            using errcode = 'EV003';
    elsif p_version_id is distinct from (select d.version_id from dag d where d.dag_id = status.dag_id) then
        raise exception 'Another version was published meanwhile: look again.' using errcode = 'EV003';
    elsif exists (
        select 1 from (select s.idx, s.name, s.is_mapped from task_spec s where s.version_id = status.version_id) o
        full join (select s.idx, s.name, s.is_mapped from task_spec s where s.version_id = p_version_id) n
            on n.idx = o.idx
        where (o.name, o.is_mapped) is distinct from (n.name, n.is_mapped)) then
        raise exception 'The newest version has other tasks than run % began with: start a new run of it.', p_run_id
            using errcode = 'EV003';
    end if;
    update run_status r set version_id = p_version_id
    where r.run_id = p_run_id and r.version_id = status.version_id and r.state in ('success', 'failed', 'canceled');
    update task k set version_id = p_version_id where k.run_id = p_run_id;
    delete from run_group g where g.run_id = p_run_id;   -- of other groups; counted again when something is reopened
    insert into run_version_override as m (run_id, version_id) values (p_run_id, p_version_id)
    on conflict (run_id) do update set version_id = excluded.version_id;
end $$;

-- Clears tasks of a run so that they run again, with p_version_id on that version: p_idxs as a whole, and these
-- instances of mapped ones. Returns how many were reopened and how many were asked to stop first.
create function clear_tasks(p_run_id bigint, p_idxs int[], p_instances jsonb, p_actor text, p_version_id int,
                            out reopened int, out asked int)
language plpgsql as $$
declare
    chosen task_ref[];
    taken task_ref[];
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    if not found then
        return;  -- it was pruned a moment ago
    end if;
    if p_version_id is not null then
        perform change_run_version(p_run_id, p_version_id);
    end if;
    update task k set request = 'clear'
    where k.run_id = p_run_id and (k.idx = any(p_idxs) or (k.idx, k.map_index) in (
          select (x->>0)::int, (x->>1)::int from jsonb_array_elements(p_instances) x))
      and k.state in ('queued', 'running') and k.request is distinct from 'cancel';
    get diagnostics asked = row_count;
    taken := reset_instances(p_run_id, p_idxs);
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref) into chosen
    from task k
    where k.run_id = p_run_id and (k.idx = any(p_idxs) or (k.idx, k.map_index) in (
          select (x->>0)::int, (x->>1)::int from jsonb_array_elements(p_instances) x))
      and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed');
    reopened := coalesce(cardinality(chosen), 0) + cardinality(taken);
    -- An operator has acted: its retries count from zero again.
    update run_status r set retried = 0 where r.run_id = p_run_id and r.retried > 0;
    update run_group g set retried = 0 where g.run_id = p_run_id and g.retried > 0;
    insert into audit_log (occurred_at, action, actor, run_id, detail)
    values (clock(), 'clear', p_actor, p_run_id,
            jsonb_build_object('tasks', p_idxs, 'reopened', reopened, 'asked', asked)
            || case when p_instances = '[]' then '{}' else jsonb_build_object('instances', p_instances) end
            || case when p_version_id is null then '{}' else jsonb_build_object('version_id', p_version_id) end);
    if reopened > 0 then
        perform reopen_tasks(taken || chosen);
        perform apply_effects();
    end if;
end $$;

-- Marks a task as ended in the given state. Tasks that never ran because of how it had ended before are evaluated
-- again. Returns 'marked', 'asked' (it runs: it moves once it has stopped), or null when the run or task cannot be
-- marked.
create function mark_task(p_run_id bigint, p_idx int, p_map_index int, p_state task_state, p_actor text)
returns text language plpgsql as $$
declare
    before task;
    status run_status;
    spec task_spec;
    blocked task_ref[];
    t timestamptz := clock();
begin
    select * into status from run_status r where r.run_id = p_run_id for no key update;
    select * into spec from task_spec s where s.version_id = status.version_id and s.idx = p_idx;
    -- An instance can be marked when there is one, a mapped task as a whole as long as it has none.
    if spec.idx is null or p_state not in ('success', 'failed', 'skipped') or (case when p_map_index = -1 then
           spec.is_mapped and has_instances(p_run_id, p_idx) else
           not exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index)
               end) then
        return null;
    end if;
    update task k set request = ('mark_' || p_state)::stop_request
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.state in ('queued', 'running');
    if found then
        insert into audit_log (occurred_at, action, actor, run_id, idx, map_index, detail)
        values (t, 'mark', p_actor, p_run_id, p_idx, p_map_index, jsonb_build_object('to', p_state, 'asked', true));
        return 'asked';
    end if;
    if status.state = 'queued' then
        update run_status r set state = 'running', started_at = coalesce(r.started_at, t)
        where r.run_id = p_run_id and r.state = 'queued';
        perform complete_tasks(start_runs(array[p_run_id]));
    end if;
    perform leave_gate_queues(array[p_run_id], p_idx, p_map_index);
    delete from ready_task q
    where q.queue = spec.queue and q.rank in (9 - spec.priority, 9) and q.run_id = p_run_id and q.idx = p_idx
      and q.map_index = p_map_index;
    select * into before from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index;
    delete from deferral d where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index;
    insert into task as k (run_id, idx, map_index, version_id, state, finished_at, reason)
    values (p_run_id, p_idx, p_map_index, status.version_id, p_state, t, 'marked by ' || p_actor)
    on conflict (run_id, idx, map_index) do update
        set state = p_state, finished_at = t, not_before = null, reason = 'marked by ' || p_actor
        where k.state not in ('queued', 'running') and k.state <> p_state;
    if not found then
        perform apply_effects();   -- of a run that has just begun
        return null;
    end if;
    insert into audit_log (occurred_at, action, actor, run_id, idx, map_index, detail)
    values (t, 'mark', p_actor, p_run_id, p_idx, p_map_index,
            jsonb_build_object('from', coalesce(before.state, 'waiting'), 'to', p_state));
    if before.state is null or before.state not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed') then
        perform release_gates(array[row(p_run_id, p_idx, p_map_index, status.version_id, p_state)::task_ref]);
        perform complete_tasks(array[row(p_run_id, p_idx, p_map_index, status.version_id, p_state)::task_ref]);
        perform apply_effects();
        return 'marked';
    end if;
    -- It had ended before, and maybe the run with it: keep that attempt, then evaluate again what it had blocked.
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, reason, exit_code, admitted_at,
                         queued_at, started_at,
                         startup_seconds, finished_at)
    select before.run_id, before.idx, before.map_index, before.epoch, before.attempt, before.session,
        before.state::text,
           before.reason, before.exit_code, before.admitted_at, before.queued_at, before.started_at,
               before.startup_seconds,
               before.finished_at
    where before.epoch > 0 and before.started_at is not null
    on conflict (run_id, idx, map_index, epoch) do nothing;
    with recursive below as (
        select g.dst from edge g where g.version_id = status.version_id and g.src = p_idx
        union
        select g.dst from below b join edge g on g.version_id = status.version_id and g.src = b.dst
    )
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref) into blocked
    from below b join task k on k.run_id = p_run_id and k.idx = b.dst
    where k.state in ('upstream_failed', 'waiting');
    perform reopen_after_mark(p_run_id, blocked);
    if spec.awaits_past then
        perform depends_on_past_tasks(array[row(p_run_id, p_idx, p_map_index, status.version_id, p_state)::task_ref]);
    end if;
    perform apply_effects();
    return 'marked';
end $$;

-- After a mark in a run: blocked tasks are evaluated again; a closed run with nothing to evaluate gets its state again.
create function reopen_after_mark(p_run_id bigint, p_blocked task_ref[]) returns void language plpgsql as $$
declare
    t timestamptz := clock();
begin
    if p_blocked is not null then
        perform reopen_tasks(p_blocked);
        return;
    end if;
    -- Through the ordinary doors, so that no other move exists: queued, running (with the marked task open), ended.
    update run_status r set state = 'queued', finished_at = null, open_tasks = 1, cancel_requested = false
    where r.run_id = p_run_id and r.state in ('success', 'failed', 'canceled');
    if not found then
        perform recount_run(p_run_id);
        return;
    end if;
    update run_status r set state = 'running' where r.run_id = p_run_id and r.state = 'queued';
    update run_status r
    set open_tasks = 0, state = case when bad.n > 0 then 'failed'
        else 'success' end::run_state, failed_leaves = bad.n, finished_at = t
    from (select count(*)::int as n from task k
          join task_spec s on s.version_id = k.version_id and s.idx = k.idx and s.is_leaf
          where k.run_id = p_run_id and k.state in ('failed', 'canceled', 'upstream_failed')) bad
    where r.run_id = p_run_id and r.state = 'running' and r.open_tasks = 1;
end $$;

-- A paused DAG offers nothing: available tasks become pending again. reconcile repeats it for tasks that slipped
-- through.
create function suspend_dag_tasks(p_dag_id int) returns int language plpgsql as $$
declare
    held task_ref[];
begin
    perform 1 from run_status r where r.dag_id = p_dag_id and r.state = 'running' order by r.run_id for no key update;
    perform leave_gate_queues(array(select r.run_id from run_status r where r.dag_id = p_dag_id
        and r.state = 'running'),
                       null);
    -- One scan over the queue: with a lookup per run, a long queue would be read as often as there are runs.
    delete from ready_task q where q.ctid = any(array(
        select x.ctid from ready_task x
        cross join lateral (select 1 from run_status r
                            where r.run_id = x.run_id and r.dag_id = p_dag_id and r.state = 'running' offset 0) r
        where x.queue = any(array(
            select distinct s.queue
            from (select distinct r.version_id from run_status r where r.dag_id = p_dag_id and r.state = 'running') v
            join task_spec s on s.version_id = v.version_id))));
    with moved as (
        update task k set state = 'pending'
        from run_status r
        where r.dag_id = p_dag_id and r.state = 'running' and k.run_id = r.run_id and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into held from moved m;
    perform release_gates(held);
    return coalesce(cardinality(held), 0);
end $$;

create function resume_dag_tasks(p_dag_id int) returns int language plpgsql as $$
declare
    held task_ref[];
begin
    perform 1 from run_status r where r.dag_id = p_dag_id and r.state = 'running' order by r.run_id for no key update;
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref) into held
    from run_status r join task k on k.run_id = r.run_id
    where r.dag_id = p_dag_id and r.state = 'running' and k.state = 'pending' and k.not_before is null;
    return release_pending_tasks(held) + admit_runs(array[p_dag_id]);
end $$;
