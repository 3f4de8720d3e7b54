-- What operators ask for: trigger, cancel, clear, mark, pause. A running task is never moved from here: it gets a
-- request, and moves when its owner confirms that the process group is dead, or when the owner is declared dead.

create function trigger_run(p_dag_id int, p_params jsonb, p_key text, p_actor actor,
                            p_fire_at timestamptz default null, p_note text default null,
                            p_start_at timestamptz default null, p_unique_for interval default null,
                            p_partition text default null, p_partition_date timestamptz default null)
returns table (run_id bigint, is_new boolean, defers boolean) language plpgsql as $$
declare
    fx effects;
    made bigint;
begin
    if p_unique_for is not null then
        made := take_period(p_dag_id, unique_name(p_key, p_params), p_unique_for);
        if made is not null then
            return query select made, false, false;
            return;
        end if;
    end if;
    -- An explicit instant is a key as well: no other run has it, triggered or scheduled.
    insert into run as r (dag_id, version_id, kind, key, fire_at, params, triggered_by, created_at)
    select d.dag_id, d.version_id, 'manual', case when p_unique_for is null then p_key else period_key(p_key) end,
           p_fire_at, p_params, p_actor.name, clock()
    from dag d where d.dag_id = p_dag_id and d.deleted_at is null and d.version_id is not null
      and (p_fire_at is null or not exists (
          select 1 from schedule c join run x on x.schedule_id = c.schedule_id and x.fire_at = p_fire_at
              where c.dag_id = p_dag_id))
    on conflict do nothing
    returning r.run_id into made;
    if made is null then
        return query select r.run_id, false, false from run r where r.dag_id = p_dag_id and r.key = p_key
        union all
        select r.run_id, false, false from run r
        where r.dag_id = p_dag_id and r.fire_at = p_fire_at and r.kind = 'manual'
        union all
        select x.run_id, false, false from schedule c
        join run x on x.schedule_id = c.schedule_id and x.fire_at = p_fire_at where c.dag_id = p_dag_id limit 1;
        return;
    elsif p_note is not null then
        insert into note (run_id, idx, map_index, content, written_by, written_at)
            values (made, -1, -1, p_note, p_actor.name, clock());
    end if;
    if p_partition is not null then
        insert into run_partition (run_id, dag_id, key, date) values (made, p_dag_id, p_partition, p_partition_date);
    end if;
    -- The run itself says who triggered it; a request with an origin also gets an entry in the audit log.
    if p_actor.origin is not null then
        perform write_audit(p_actor, 'trigger', jsonb_strip_nulls(jsonb_build_object('key', p_key)),
                            p_dag_id => p_dag_id, p_run_id => made);
    end if;
    if p_unique_for is not null then
        update unique_period u set run_id = made where u.dag_id = p_dag_id and u.key = unique_name(p_key, p_params);
    end if;
    if p_start_at > clock() then
        insert into delayed_run (run_id, start_at) values (made, p_start_at);
        perform delay_runs(array[made]);
        return query select made, true, true;
        return;
    end if;
    fx := open_runs(array[made], fx);
    fx := apply_effects(fx);
    return query select made, true, coalesce(fx.wakes_planner, false);
end $$;

-- Ends what has not started in a run, and asks what runs to stop. The caller locks it, and closes it with the result.
create function stop_tasks(p_run_id bigint, p_reason text, fx effects) returns stop_result language plpgsql as $$
declare
    stopped task_ref[];
    asked int;
    t timestamptz := clock();
begin
    fx := leave_gate_queues(array[p_run_id], null, null, fx);
    delete from ready_task q using run_status r, task_spec s
    where r.run_id = p_run_id and s.version_id = r.version_id and q.queue = s.queue
      and q.rank in (9 - s.priority, 9) and q.run_id = p_run_id;
    with gone as (
        insert into task as k (run_id, idx, version_id, state, finished_at, reason)
        select r.run_id, s.idx, r.version_id, 'canceled', t, p_reason from run_status r
        join task_spec s on s.version_id = r.version_id
        where r.run_id = p_run_id and not (s.is_mapped and has_instances(p_run_id, s.idx)) order by s.idx
        on conflict (run_id, idx, map_index) do update set state = 'canceled', finished_at = t, reason = p_reason,
            not_before = null where k.state in ('waiting', 'pending', 'available', 'deferred')
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
    delete from task_trigger w where w.run_id = p_run_id;
    if exists (select 1 from gate_holder h where h.run_id = p_run_id)
       or exists (select 1 from gate_order o where o.run_id = p_run_id) then
        fx := release_gates(stopped, fx);
    end if;
    update task k set request = 'cancel' where k.run_id = p_run_id and k.state in ('queued', 'running');
    get diagnostics asked = row_count;
    perform recount_groups(p_run_id);
    return row(stopped, asked, fx)::stop_result;
end $$;

-- Cancels a run. Returns how many tasks are asked to stop; null when the run has ended.
create function cancel_run(p_run_id bigint, p_actor actor, p_reason text) returns int language plpgsql as $$
declare
    fx effects;
    done stop_result;
begin
    done := stop_run(p_run_id, p_actor, p_reason, fx);
    fx := apply_effects(done.fx);
    return done.asked;
end $$;

-- The same, for a caller that cancels several runs: gates are processed once, at the very end.
create function stop_run(p_run_id bigint, p_actor actor, p_reason text, fx effects)
returns stop_result language plpgsql as $$
declare
    done stop_result;
begin
    update run_status r set cancel_requested = true, reason = p_reason
    where r.run_id = p_run_id and r.state in ('queued', 'running');
    if not found then
        return row(null, null, fx)::stop_result;
    end if;
    done := stop_tasks(p_run_id, p_reason, fx);
    perform write_audit(p_actor, 'cancel', jsonb_build_object('reason', p_reason, 'asked_to_stop', done.asked),
                        p_run_id => p_run_id);
    done.fx := close_finished_runs(done.stopped, done.fx);
    return done;
end $$;

-- The attempts of reset tasks become history, their results and steps are deleted, and their polls start again.
create function record_cleared_attempts(p_tasks task_ref[]) returns void language plpgsql as $$
begin
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, reason, exit_code, admitted_at,
                         queued_at, started_at, startup_seconds, cpu_seconds, peak_memory_bytes, finished_at)
    select k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.session, k.state::text, k.reason, k.exit_code,
           k.admitted_at, k.queued_at, k.started_at, k.startup_seconds, k.cpu_seconds, k.peak_memory_bytes,
           k.finished_at
    from unnest(p_tasks) p join task k on k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
    where k.epoch > 0 and k.finished_at is not null and (k.started_at is not null or k.session is not null)
    on conflict (run_id, idx, map_index, epoch) do nothing;
    delete from result v using unnest(p_tasks) p
    where v.run_id = p.run_id and v.idx = p.idx and v.map_index = p.map_index;
    delete from step_result s using unnest(p_tasks) p
    where s.run_id = p.run_id and s.idx = p.idx and s.map_index = p.map_index;
    delete from sensor_poll q using unnest(p_tasks) p
    where q.run_id = p.run_id and q.idx = p.idx and q.map_index = p.map_index;
    delete from task_trigger w using unnest(p_tasks) p
    where w.run_id = p.run_id and w.idx = p.idx and w.map_index = p.map_index;
end $$;

-- Downstream tasks that were enabled by ends which no longer count, and have not started: they leave the queue, and end
-- for a moment, so that they can wait again. A task that a runner is claiming stays with it. Returns them.
create function reset_downstream(p_tasks task_ref[], fx effects) returns move_result language plpgsql as $$
declare
    one record;
    back task_ref;
    instances move_result;
    taken task_ref[] := '{}';
begin
    for one in
        select distinct g.run_id, g.dst as idx, k.map_index, s.queue, s.priority
        from downstream_tasks(p_tasks) g
        join task_spec s on s.version_id = g.version_id and s.idx = g.dst
        cross join lateral (select k.map_index from task k where k.run_id = g.run_id and k.idx = g.dst
                            and (k.map_index = -1 or (s.map_head is not null
                                and k.map_index = coalesce(g.map_index, k.map_index) and k.attempt = 0))
                            and k.state in ('pending', 'available') offset 0) k
        where g.has_heard order by g.run_id, g.dst, k.map_index
    loop
        fx := leave_gate_queues(array[one.run_id], one.idx, one.map_index, fx);
        delete from ready_task q where q.queue = one.queue and q.rank in (9 - one.priority, 9) and q.run_id = one.run_id
            and q.idx = one.idx
          and q.map_index = one.map_index;
        update task k set state = 'canceled', finished_at = clock(), not_before = null
        where k.run_id = one.run_id and k.idx = one.idx and k.map_index = one.map_index
            and k.state in ('pending', 'available')
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state into back;
        if found then
            fx := release_gates(array[back], fx);
            taken := array_append(taken, back);
        end if;
    end loop;
    -- Of a mapped task none or all: its instances' inputs are of the past, and no instance waits for others.
    for one in
        select g.run_id, array_agg(g.dst order by g.dst) as idxs from downstream_tasks(p_tasks) g
        join task_spec s on s.version_id = g.version_id and s.idx = g.dst and s.is_mapped
            and s.map_head is null
        where g.has_heard and has_instances(g.run_id, g.dst) and not exists (
            select 1 from task k where k.run_id = g.run_id and k.idx = g.dst
                and (k.state not in ('pending', 'available') or k.attempt > 0))
          and not exists (select 1 from unnest(p_tasks) p where p.run_id = g.run_id and p.idx = g.dst)
        group by g.run_id order by g.run_id
    loop
        instances := reset_instances(one.run_id, one.idxs, fx);
        fx := instances.fx;
        taken := taken || instances.tasks;
    end loop;
    return row(taken, fx)::move_result;
end $$;

-- The tasks that count the ends of these tasks, and whether they have: of a group with retries, all ends at once. With
-- a map_index only that instance of them.
create function downstream_tasks(p_tasks task_ref[])
returns table (run_id bigint, version_id int, dst int, map_index int, has_heard boolean) language sql stable as $$
    select x.run_id, x.version_id, x.dst, x.map_index, bool_or(x.has_heard) from (
        select p.run_id, p.version_id, g.dst,
               case g.scope when 'same_index' then p.map_index end as map_index, true as has_heard
        from unnest(p_tasks) p join edge g on g.version_id = p.version_id and g.src = p.idx and g.leaves_group is null
        union all
        select p.run_id, p.version_id, g.dst, null, is_group_finished(p.run_id, p.version_id, p.group_id)
        from (select distinct q.run_id, q.version_id, s.group_id from unnest(p_tasks) q
              join task_spec s on s.version_id = q.version_id and s.idx = q.idx and s.group_id is not null) p
        join retry_group w on w.version_id = p.version_id and w.group_id = p.group_id
        cross join unnest(w.members) m(idx)
        join edge g on g.version_id = p.version_id and g.src = m.idx and g.leaves_group = p.group_id
    ) x group by x.run_id, x.version_id, x.dst, x.map_index
$$;

-- Resets terminal tasks to waiting, counts their upstream again and evaluates them. The caller holds the runs' locks.
create function reopen_tasks(p_tasks task_ref[], inout fx effects) language plpgsql as $$
declare
    runs bigint[];
    r bigint;
    ended run_state;
    moved move_result;
begin
    p_tasks := with_whole_groups(p_tasks);
    moved := reset_downstream(p_tasks, fx);
    p_tasks := p_tasks || moved.tasks;
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
    moved := collapse_unready(p_tasks, moved.fx);
    p_tasks := p_tasks || moved.tasks;
    foreach r in array runs loop
        perform recount_groups(r);
        perform recount_upstream(r, array(select p.idx from unnest(p_tasks) p where p.run_id = r
                                          union
                                          select g.dst from downstream_tasks(p_tasks) g where g.run_id = r));
        -- It starts again, and so does its time limit.
        select s.state into ended from run_status s where s.run_id = r;
        update run_status s
        set state = 'queued', started_at = null, finished_at = null, cancel_requested = false, reason = null
        where s.run_id = r and s.state in ('success', 'failed', 'canceled');
        if found then
            perform uncount_backfill_run(r, ended);
        end if;
        perform recount_run(r);
    end loop;
    perform requeue_log_archiving(runs);
    -- A run that stayed open decides now; one that was closed waits for admission like any other queued run.
    moved := evaluate_waiting_tasks(array(
        select s.run_id from run_status s where s.run_id = any(runs) and s.state = 'running'), null, moved.fx);
    fx := complete_tasks(moved.tasks, moved.fx);
    fx := (admit_runs(array(
        select distinct s.dag_id from run_status s where s.run_id = any(runs) and s.state = 'queued'), fx)).fx;
end $$;

-- Moves an ended run to the current version of its DAG, if that has the same tasks with the same indexes.
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
        select 1 from (select s.idx, s.name, s.is_mapped, s.map_head from task_spec s
                       where s.version_id = status.version_id) o
        full join (select s.idx, s.name, s.is_mapped, s.map_head from task_spec s where s.version_id = p_version_id) n
            on n.idx = o.idx
        where (o.name, o.is_mapped, o.map_head) is distinct from (n.name, n.is_mapped, n.map_head)) then
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
create function clear_tasks(p_run_id bigint, p_idxs int[], p_instances jsonb, p_actor actor, p_version_id int,
                            out reopened int, out asked int) language plpgsql as $$
declare
    fx effects;
    chosen task_ref[];
    taken move_result;
begin
    perform lock_backfill_of_run(p_run_id);
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
    taken := reset_instances(p_run_id, p_idxs, fx);
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref) into chosen from task k
    where k.run_id = p_run_id and (k.idx = any(p_idxs) or (k.idx, k.map_index) in (
                                       select (x->>0)::int, (x->>1)::int from jsonb_array_elements(p_instances) x))
      and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed');
    fx := taken.fx;
    reopened := coalesce(cardinality(chosen), 0) + cardinality(taken.tasks);
    -- An operator has acted: its retries count from zero again.
    update run_status r set retried = 0 where r.run_id = p_run_id and r.retried > 0;
    update run_group g set retried = 0 where g.run_id = p_run_id and g.retried > 0;
    perform write_audit(p_actor, 'clear', jsonb_build_object('tasks', p_idxs, 'reopened', reopened, 'asked', asked)
                        || case when p_instances = '[]' then '{}' else jsonb_build_object('instances', p_instances) end
                        || case when p_version_id is null then '{}'
                                else jsonb_build_object('version_id', p_version_id) end, p_run_id => p_run_id);
    if reopened > 0 then
        fx := reopen_tasks(taken.tasks || chosen, fx);
    end if;
    fx := apply_effects(fx);
end $$;

-- Marks a task as ended in that state. Tasks that never ran because of its former end are evaluated again. Returns
-- 'marked', 'asked' (it runs: it moves once it has stopped), or null when the run or task cannot be marked.
create function mark_task(p_run_id bigint, p_idx int, p_map_index int, p_state task_state, p_actor actor)
returns text language plpgsql as $$
declare
    fx effects;
    before task;
    status run_status;
    spec task_spec;
    marked task_ref;
    blocked task_ref[];
    t timestamptz := clock();
begin
    perform lock_backfill_of_run(p_run_id);
    select * into status from run_status r where r.run_id = p_run_id for no key update;
    select * into spec from task_spec s where s.version_id = status.version_id and s.idx = p_idx;
    -- An instance can be marked when there is one, a mapped task as a whole as long as it has none.
    if spec.idx is null or p_state not in ('success', 'failed', 'skipped') or (case when p_map_index = -1 then
           spec.is_mapped and (has_instances(p_run_id, p_idx) or spec.map_head is not null) else
           not exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index)
               end) then
        return null;
    end if;
    update task k set request = ('mark_' || p_state)::stop_request
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.state in ('queued', 'running');
    if found then
        perform write_audit(p_actor, 'mark', jsonb_build_object('to', p_state, 'asked', true), p_run_id => p_run_id,
                            p_idx => p_idx, p_map_index => p_map_index);
        return 'asked';
    elsif status.state = 'queued' then
        update run_status r set state = 'running', started_at = coalesce(r.started_at, t)
        where r.run_id = p_run_id and r.state = 'queued';
        fx := start_runs(array[p_run_id], false, fx);
    end if;
    fx := leave_gate_queues(array[p_run_id], p_idx, p_map_index, fx);
    delete from ready_task q
    where q.queue = spec.queue and q.rank in (9 - spec.priority, 9) and q.run_id = p_run_id and q.idx = p_idx
      and q.map_index = p_map_index;
    select * into before from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index;
    delete from deferral d where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index;
    delete from task_trigger w where w.run_id = p_run_id and w.idx = p_idx and w.map_index = p_map_index;
    insert into task as k (run_id, idx, map_index, version_id, state, finished_at, reason)
    values (p_run_id, p_idx, p_map_index, status.version_id, p_state, t, 'marked by ' || p_actor.name)
    on conflict (run_id, idx, map_index) do update set state = p_state, finished_at = t, not_before = null,
        reason = 'marked by ' || p_actor.name where k.state not in ('queued', 'running') and k.state <> p_state;
    if not found then
        fx := apply_effects(fx);   -- of a run that has just begun
        return null;
    end if;
    marked := row(p_run_id, p_idx, p_map_index, status.version_id, p_state);
    perform write_audit(p_actor, 'mark', jsonb_build_object('from', coalesce(before.state, 'waiting'), 'to', p_state),
                        p_run_id => p_run_id, p_idx => p_idx, p_map_index => p_map_index);
    if before.state is null or before.state not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed') then
        fx := release_gates(array[marked], fx);
        fx := complete_tasks(array[marked], fx);
        fx := apply_effects(fx);
        return 'marked';
    end if;
    -- It had ended before, and maybe the run with it: keep that attempt, then evaluate again what it had blocked.
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, reason, exit_code, admitted_at,
                         queued_at, started_at, startup_seconds, cpu_seconds, peak_memory_bytes, finished_at)
    select before.run_id, before.idx, before.map_index, before.epoch, before.attempt, before.session,
           before.state::text, before.reason, before.exit_code, before.admitted_at, before.queued_at, before.started_at,
           before.startup_seconds, before.cpu_seconds, before.peak_memory_bytes, before.finished_at
    where before.epoch > 0 and before.started_at is not null
    on conflict (run_id, idx, map_index, epoch) do nothing;
    with recursive below as (
        select g.dst from edge g where g.version_id = status.version_id and g.src = p_idx
        union
        select g.dst from below b join edge g on g.version_id = status.version_id and g.src = b.dst
    )
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref) into blocked from below b
    join task k on k.run_id = p_run_id and k.idx = b.dst where k.state in ('upstream_failed', 'waiting');
    fx := reopen_after_mark(p_run_id, blocked, fx);
    if spec.awaits_past then
        fx := depends_on_past_tasks(array[marked], fx);
    end if;
    fx := apply_effects(fx);
    return 'marked';
end $$;

-- After a mark in a run: blocked tasks are evaluated again; a closed run with nothing to evaluate gets its state again.
create function reopen_after_mark(p_run_id bigint, p_blocked task_ref[], inout fx effects) language plpgsql as $$
declare
    ended run_state;
begin
    if p_blocked is not null then
        fx := reopen_tasks(p_blocked, fx);
        return;
    end if;
    -- Through the ordinary doors, so that no other move exists: queued, running (with the marked task open), ended.
    select r.state into ended from run_status r where r.run_id = p_run_id;
    update run_status r set state = 'queued', finished_at = null, open_tasks = 1, cancel_requested = false
    where r.run_id = p_run_id and r.state in ('success', 'failed', 'canceled');
    if not found then
        perform recount_run(p_run_id);
        return;
    end if;
    perform uncount_backfill_run(p_run_id, ended);
    update run_status r set state = 'running' where r.run_id = p_run_id and r.state = 'queued';
    update run_status r
    set open_tasks = 0, state = case when bad.n > 0 then 'failed'
        else 'success' end::run_state, failed_leaves = bad.n, finished_at = clock()
    from (select count(*)::int as n from task k
          join task_spec s on s.version_id = k.version_id and s.idx = k.idx and s.is_leaf
          where k.run_id = p_run_id and k.state in ('failed', 'canceled', 'upstream_failed')) bad
    where r.run_id = p_run_id and r.state = 'running' and r.open_tasks = 1;
end $$;

-- A paused DAG enqueues nothing: available tasks become pending again. reconcile repeats it for missed ones.
create function suspend_dag_tasks(p_dag_id int, inout fx effects) language plpgsql as $$
declare
    held task_ref[];
begin
    perform 1 from run_status r where r.dag_id = p_dag_id and r.state = 'running' order by r.run_id for no key update;
    fx := leave_gate_queues(array(
        select r.run_id from run_status r where r.dag_id = p_dag_id and r.state = 'running'), null, null, fx);
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
    fx := release_gates(held, fx);
end $$;

create function resume_dag_tasks(p_dag_id int, inout fx effects) language plpgsql as $$
declare
    held task_ref[];
begin
    perform 1 from run_status r where r.dag_id = p_dag_id and r.state = 'running' order by r.run_id for no key update;
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref) into held
    from run_status r join task k on k.run_id = r.run_id
    where r.dag_id = p_dag_id and r.state = 'running' and k.state = 'pending' and k.not_before is null;
    fx := release_pending_tasks(held, fx);
    fx := (admit_runs(array[p_dag_id], fx)).fx;
end $$;
