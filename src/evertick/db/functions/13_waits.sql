-- Waiting without a slot, for a time, an event, a person, a condition or a run (docs/decisions/0018-deferral.md).
--
-- A deferred task is a row of `deferral`: when it is due, when it fails, and the key of the event that wakes it. The
-- leader of the shard processes what is due. Such a task becomes pending and is deferred after its gates. The leader
-- ends every wait except decisions of people: one process, so an event and a wait cannot miss each other.

-- Pending tasks that wait for something outside become deferred. The caller holds the runs' locks.
create function defer_tasks(p_tasks task_ref[], inout fx effects) language plpgsql as $$
declare
    t timestamptz := clock();
    deferred task_ref[];
begin
    with moved as (
        update task k set state = 'deferred', epoch = k.epoch + 1, attempt = 1, started_at = t, reason = null
        from unnest(p_tasks) p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'pending'
            and k.not_before is null
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into deferred from moved m;
    fx := begin_waits(deferred, fx);
end $$;

-- Runs that have just been closed wake the tasks that wait for them. They are only made due: the verb that ends a task
-- holds its run's lock, and taking the other run's lock would violate the lock order.
create function wake_run_waiters(p_closed bigint[], inout fx effects) language plpgsql as $$
begin
    update deferral d set wake_at = clock() where d.key = any(array(select 'run:' || x from unnest(p_closed) x));
    if found then
        fx.wakes_planner := true;
    end if;
    fx := release_event_windows(p_closed, fx);
end $$;

-- Due child runs that are not started yet: the leader reads the other DAG, and starts the run or records why not.
create function child_runs_due(p_shard smallint, p_limit int)
returns table (run_id bigint, idx int, map_index int, task_epoch int, dag text, params jsonb, depth int, given jsonb,
    own jsonb, results jsonb) language sql stable as $$
    select f.run_id, f.idx, f.map_index, f.epoch, c.dag, c.params,
           coalesce((select x.depth from child_run x where x.run_id = f.run_id), 0) + 1, coalesce(c.given, '{}'),
           case when c.given is null then '{}' else (select x.params from run x where x.run_id = f.run_id) end,
           case when c.given is null then '{}'
                else coalesce((select jsonb_object_agg(s.name,
                                      case when s.is_mapped then mapped_results(f.run_id, i.src) else v.value end)
                               from task_input i join task_spec s on s.version_id = i.version_id and s.idx = i.src
                               left join result v on v.run_id = f.run_id and v.idx = i.src and v.map_index = -1
                               where i.version_id = c.version_id and i.idx = f.idx), '{}') end
    from (select * from deferral x where x.shard = p_shard and x.wake_at <= clock() and x.kind = 'start'
          order by x.wake_at limit p_limit) f
    join run_status r on r.run_id = f.run_id
    join trigger_dag_task c on c.version_id = r.version_id and c.idx = f.idx
$$;

-- Starts the run that a deferred task is there for. p_dag_id null: it cannot, and p_reason says why. One run for each
-- time that the task becomes ready, by its key. Returns that run; null when the task waits no more or fails.
create function start_child_run(p_shard smallint, p_epoch bigint, p_run_id bigint, p_idx int, p_map_index int,
                                p_task_epoch int, p_dag_id int, p_params jsonb, p_depth int, p_reason text,
                                out child bigint) language plpgsql as $$
declare
    fx effects;
    spec trigger_dag_task;
    made text := format('run %s, task %s, %s', p_run_id, p_idx, p_task_epoch);
begin
    perform fence(p_shard, p_epoch);
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    select c.* into spec from task k join trigger_dag_task c on c.version_id = k.version_id and c.idx = k.idx
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.state = 'deferred'
        and k.epoch = p_task_epoch;
    if not found then
        delete from deferral d where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index
            and d.epoch = p_task_epoch;
        return;
    elsif p_dag_id is null then
        fx := end_waits(array[row(p_run_id, p_idx, p_map_index, p_task_epoch, 'failed', p_reason, null)::wait_result],
                        fx);
        fx := apply_effects(fx);
        return;
    end if;
    insert into run as r (dag_id, version_id, kind, key, params, triggered_by, created_at)
    select d.dag_id, d.version_id, 'manual', made, p_params, 'run ' || p_run_id, clock()
    from dag d where d.dag_id = p_dag_id and d.deleted_at is null and d.version_id is not null
    on conflict (dag_id, key) where key is not null do nothing
    returning r.run_id into child;
    if child is not null then
        insert into child_run (run_id, parent_run_id, idx, map_index, depth)
            values (child, p_run_id, p_idx, p_map_index, p_depth);
        update dag d set has_dependents = true where d.dag_id = p_dag_id and not d.has_dependents and spec.waits;
        fx := open_runs(array[child], fx);
    else
        select r.run_id into child from run r where r.dag_id = p_dag_id and r.key = made;
    end if;
    if spec.waits then
        -- The end of the run wakes it at once; the regular check covers a lost wake-up.
        update deferral d set kind = 'run', key = 'run:' || child,
            wake_at = least(d.deadline, clock() + interval '10 minutes')
        where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_task_epoch;
    else
        fx := end_waits(array[row(p_run_id, p_idx, p_map_index, p_task_epoch, 'success', null,
                                  to_jsonb(child))::wait_result], fx);
    end if;
    fx := apply_effects(fx);
end $$;

-- The rows of tasks that have just been deferred, or lost their row. A wait that the leader must evaluate first (a DAG
-- to start, a time of day, an event that may exist) is due at once. The caller holds the locks.
create function begin_waits(p_tasks task_ref[], inout fx effects) language plpgsql as $$
declare
    t timestamptz := clock();
begin
    if coalesce(cardinality(p_tasks), 0) = 0 then
        return;
    end if;
    insert into deferral as o (run_id, idx, map_index, epoch, shard, kind, key, wake_at, deadline)
    select k.run_id, k.idx, k.map_index, k.epoch, d.shard, w.kind, w.key, w.wake_at, w.deadline from unnest(p_tasks) p
    cross join lateral (
        select x.* from task x
        where x.run_id = p.run_id and x.idx = p.idx and x.map_index = p.map_index and x.state = 'deferred' offset 0) k
    cross join lateral (select x.dag_id from run_status x where x.run_id = p.run_id offset 0) r
    cross join lateral (select x.shard from dag x where x.dag_id = r.dag_id offset 0) d
    cross join lateral first_wait(k.run_id, k.idx, k.map_index, k.version_id, k.started_at, t) w
    on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, kind = excluded.kind, key = excluded.key,
        wake_at = excluded.wake_at, deadline = excluded.deadline where o.epoch <> excluded.epoch;
    insert into approval (run_id, idx, map_index, epoch, title, asked_at)
    select k.run_id, k.idx, k.map_index, k.epoch, gate_name(w.parts, k.run_id), t
    from unnest(p_tasks) p
    cross join lateral (select x.* from task x where x.run_id = p.run_id and x.idx = p.idx and x.map_index = p.map_index
                        and x.state = 'deferred' offset 0) k
    cross join lateral (select x.parts from wait_spec x where x.version_id = p.version_id and x.idx = p.idx
                        and x.kind = 'approval' offset 0) w
    on conflict do nothing;
    fx.wakes_planner := true;
end $$;

-- With what a wait begins.
create function first_wait(p_run_id bigint, p_idx int, p_map_index int, p_version_id int, p_since timestamptz,
                           p_now timestamptz, out kind wait_kind, out key text, out wake_at timestamptz,
                           out deadline timestamptz) language plpgsql stable as $$
declare
    spec wait_spec;
begin
    select w.* into spec from wait_spec w where w.version_id = p_version_id and w.idx = p_idx;
    if not found then
        wake_at := p_now;
        select 'start', p_since + make_interval(secs => c.timeout) into kind, deadline
        from trigger_dag_task c where c.version_id = p_version_id and c.idx = p_idx;
        if kind is null then
            select 'trigger', coalesce(w.deadline, 'infinity'), w.deadline into kind, wake_at, deadline
            from task_trigger w
            where w.run_id = p_run_id and w.idx = p_idx and w.map_index = p_map_index and w.event is null;
        end if;
        if kind is null then
            kind := 'poll';
            wake_at := p_now;
        end if;
        return;
    end if;
    kind := spec.kind;
    deadline := p_since + make_interval(secs => spec.timeout);
    case spec.kind
        when 'time' then
            wake_at := coalesce(spec.until, p_since + make_interval(secs => spec.seconds));
        when 'event' then
            key := 'event:' || gate_name(spec.parts, p_run_id);
            wake_at := p_now;
        when 'approval' then
            wake_at := coalesce(deadline, 'infinity');
        when 'poll' then
            deadline := (select q.deadline from sensor_poll q where q.run_id = p_run_id and q.idx = p_idx
                         and q.map_index = p_map_index);
            wake_at := p_now;
        else
            wake_at := p_now;
    end case;
end $$;

-- Polls that found nothing yet: counted, and due again after their interval or at `poll_at`, or done at `until`. The
-- logs of the last ten stay. An attempt that asks people is polled when they have answered. p_polls: [{run_id, idx,
-- map_index, version_id, epoch, started_at, result: {until, poll_at, request}}].
create function record_polls(p_polls jsonb) returns void language plpgsql as $$
declare
    t timestamptz := clock();
begin
    with come as materialized (
        select x.*, coalesce(w.seconds, 60) as seconds, w.timeout, coalesce(w.backoff, 1) as backoff,
               coalesce(w.longest, w.seconds, 60) as longest, d.shard
        from jsonb_to_recordset(p_polls) as x(run_id bigint, idx int, map_index int, version_id int, epoch int,
                                              started_at timestamptz, result jsonb)
        left join lateral (select y.* from wait_spec y where y.version_id = x.version_id and y.idx = x.idx offset 0) w
            on true
        cross join lateral (select y.dag_id from run_status y where y.run_id = x.run_id offset 0) r
        cross join lateral (select y.shard from dag y where y.dag_id = r.dag_id offset 0) d
    ), counted as (
        insert into sensor_poll as q (run_id, idx, map_index, since, deadline, polls)
        select c.run_id, c.idx, c.map_index, c.started_at, c.started_at + make_interval(secs => c.timeout), 1
        from come c
        on conflict (run_id, idx, map_index) do update set polls = q.polls + 1
        returning q.run_id, q.idx, q.map_index, q.deadline, q.polls
    )
    insert into deferral as o (run_id, idx, map_index, epoch, shard, kind, wake_at, deadline)
    select c.run_id, c.idx, c.map_index, c.epoch, c.shard,
           case when c.result ? 'until' then 'time'::wait_kind else 'poll' end,
           coalesce((c.result->>'until')::timestamptz, (c.result->>'poll_at')::timestamptz, least(q.deadline,
                   t + make_interval(secs => least(c.seconds * power(c.backoff, least(q.polls - 1, 50)), c.longest)))),
           q.deadline
    from come c join counted q on q.run_id = c.run_id and q.idx = c.idx and q.map_index = c.map_index
    on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, kind = excluded.kind, key = null,
        wake_at = excluded.wake_at, deadline = excluded.deadline;
    delete from task_trigger w using jsonb_to_recordset(p_polls) as x(run_id bigint, idx int, map_index int)
    where w.run_id = x.run_id and w.idx = x.idx and w.map_index = x.map_index;
    insert into approval (run_id, idx, map_index, epoch, title, asked_at, request)
    select x.run_id, x.idx, x.map_index, x.epoch, x.result->'request'->>'title', t, x.result->'request'
    from jsonb_to_recordset(p_polls) as x(run_id bigint, idx int, map_index int, epoch int, result jsonb)
    where x.result ? 'request'
    on conflict do nothing;
    delete from log_chunk l using jsonb_to_recordset(p_polls) as x(run_id bigint, idx int, map_index int, epoch int)
    where l.run_id = x.run_id and l.idx = x.idx and l.map_index = x.map_index and l.epoch <= x.epoch - 10
        and l.content is not null and not exists (
        select 1 from attempt a where a.run_id = l.run_id and a.idx = l.idx and a.map_index = l.map_index
            and a.epoch = l.epoch);
end $$;

-- A time of day becomes an instant: which one, the leader says, by the rules of the schedules.
create function clock_waits_due(p_shard smallint, p_limit int)
returns table (run_id bigint, idx int, map_index int, epoch int, at text, timezone text,
    since timestamptz) language sql stable as $$
    select f.run_id, f.idx, f.map_index, f.epoch, w.at, w.timezone, coalesce(r.fire_at, r.created_at)
    from (select * from deferral x where x.shard = p_shard and x.wake_at <= clock() and x.kind = 'clock'
          order by x.wake_at limit p_limit) f
    join run r on r.run_id = f.run_id join run_status s on s.run_id = f.run_id
    join wait_spec w on w.version_id = s.version_id and w.idx = f.idx
$$;

-- Waits whose instant could not be computed are set aside and tried again in a minute: a time zone may come back.
create function set_clock_waits(p_shard smallint, p_epoch bigint, p_instants jsonb) returns void language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    perform quarantine_row('run', x.run_id, 'wake', x.reason, true)
    from jsonb_to_recordset(p_instants) as x(run_id bigint, reason text) where x.reason is not null;
    update deferral d set kind = case when x.wake_at is null then d.kind else 'time' end,
        wake_at = coalesce(x.wake_at, clock() + interval '1 minute')
    from jsonb_to_recordset(p_instants) as x(run_id bigint, idx int, map_index int, epoch int, wake_at timestamptz)
    where d.run_id = x.run_id and d.idx = x.idx and d.map_index = x.map_index and d.epoch = x.epoch
        and d.kind = 'clock';
end $$;

-- An event with a key that was sent before under that name is the earlier event.
create function send_event(p_name text, p_key text, p_payload jsonb, p_actor actor)
returns table (event_id bigint, is_new boolean, sent_at timestamptz, sent_by text) language plpgsql as $$
#variable_conflict use_column
begin
    return query
    with made as (
        insert into event as e (name, key, payload, sent_at, sent_by)
        values (p_name, p_key, p_payload, clock(), p_actor.name)
        on conflict (name, key) where key is not null do nothing
        returning e.event_id, e.sent_at, e.sent_by
    ), arrived as (
        insert into event_arrival (event_id)
        select m.event_id from made m
        where exists (select 1 from schedule c where c.spec->>'kind' = 'event' and c.deleted_at is null)
    )
    select m.event_id, true, m.sent_at, m.sent_by from made m;
    if not found then
        return query select e.event_id, false, e.sent_at, e.sent_by from event e
            where e.name = p_name and e.key = p_key and e.payload is not distinct from p_payload;
    end if;
end $$;

-- A person's decision. Returns whether it was accepted: a task must wait for it, and a second one changes nothing. One
-- about what an attempt asked is given to another attempt of its task.
create function decide_approval(p_run_id bigint, p_idx int, p_map_index int, p_epoch int, p_is_approved boolean,
                                p_actor actor, p_note text, p_fields jsonb, p_chosen jsonb)
returns boolean language plpgsql as $$
declare
    fx effects;
    t timestamptz := clock();
    rejected task_state;
    answer jsonb;
    is_asked boolean;
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    update approval a
    set decided_at = t, decided_by = p_actor.name, is_approved = p_is_approved, note = p_note, fields = p_fields,
        chosen = p_chosen
    where a.run_id = p_run_id and a.idx = p_idx and a.map_index = p_map_index and a.epoch = p_epoch
        and a.decided_at is null
      and exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
                  and k.state = 'deferred' and k.epoch = p_epoch)
    returning a.request is not null into is_asked;
    if not found then
        return false;
    end if;
    select w.on_reject into rejected from run_status r join wait_spec w on w.version_id = r.version_id and w.idx = p_idx
    where r.run_id = p_run_id;
    answer := jsonb_build_object('by', p_actor.name, 'at', t, 'note', p_note, 'fields', p_fields);
    perform write_audit(p_actor, case when p_is_approved then 'approve' else 'reject' end,
                        jsonb_strip_nulls(jsonb_build_object('chosen', p_chosen))
                        || jsonb_build_object('note', p_note, 'fields', p_fields), p_run_id => p_run_id, p_idx => p_idx,
                        p_map_index => p_map_index);
    if is_asked then
        update deferral d set wake_at = t
        where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_epoch;
        return true;
    end if;
    fx := end_waits(array[row(
        p_run_id, p_idx, p_map_index, p_epoch, case when p_is_approved then 'success' else rejected end,
        case when not p_is_approved then format('rejected by %s%s', p_actor.name, ': ' || nullif(p_note, '')) end,
        case when p_is_approved then answer end)::wait_result], fx);
    fx := apply_effects(fx);
    return true;
end $$;

-- Ends deferred tasks, as far as they still wait with that epoch. The caller holds their runs' locks.
create function end_waits(p_ends wait_result[], inout fx effects) language plpgsql as $$
declare
    over task_ref[];
begin
    delete from deferral d using unnest(p_ends) e
    where d.run_id = e.run_id and d.idx = e.idx and d.map_index = e.map_index and d.epoch = e.epoch;
    with moved as (
        update task k set state = e.state, finished_at = clock(), reason = e.reason
        from unnest(p_ends) e
        where k.run_id = e.run_id and k.idx = e.idx and k.map_index = e.map_index and k.state = 'deferred'
            and k.epoch = e.epoch
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, e.result
    ), kept as (
        insert into result (run_id, idx, map_index, epoch, value)
        select m.run_id, m.idx, m.map_index, m.epoch, m.result from moved m where m.result is not null
        on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into over from moved m;
    if over is not null then
        fx := release_gates(over, fx);   -- of a poll that stands on an ordered key
        fx := complete_tasks(over, fx);
    end if;
end $$;

-- How a wait that is due ends; a null state: not yet.
create function evaluate_wait(p_wait deferral, p_now timestamptz, out state task_state, out reason text,
                              out result jsonb) language plpgsql stable as $$
declare
    spec wait_spec;
    other record;
    is_late boolean := coalesce(p_wait.deadline <= p_now, false);
begin
    if p_wait.kind = 'run' then
        select r.run_id, r.state, r.reason, g.name into other
        from run_status r join dag g on g.dag_id = r.dag_id where r.run_id = substr(p_wait.key, 5)::bigint;
        state := case when other.state = 'success' then 'success'
                      when other.state is null or other.state in ('failed', 'canceled') or is_late then 'failed' end;
        result := case when state = 'success' then to_jsonb(other.run_id) end;
        reason := case
            when other.state is null then format('%s that it waited for was pruned', replace(p_wait.key, ':', ' '))
            when other.state in ('failed', 'canceled') then format('run %s of %s %s%s', other.run_id, other.name,
                case other.state when 'failed' then 'failed' else 'was canceled' end, ': ' || other.reason)
            when state = 'failed' then format('run %s of %s did not end in time', other.run_id, other.name) end;
        return;
    elsif p_wait.kind = 'time' then
        state := 'success';
        return;
    elsif p_wait.kind = 'trigger' then
        return;
    end if;
    select w.* into spec from run_status r join wait_spec w on w.version_id = r.version_id and w.idx = p_wait.idx
    where r.run_id = p_wait.run_id;
    if p_wait.kind = 'event' then
        select e.payload into result from event e
        where e.name = substr(p_wait.key, 7) and e.sent_at >= (
            select r.created_at from run r where r.run_id = p_wait.run_id) - make_interval(secs => spec.lookback)
        order by e.sent_at, e.event_id limit 1;
        if found then
            state := 'success';
            return;
        end if;
    end if;
    if is_late then
        state := spec.on_timeout;
        reason := case p_wait.kind
            when 'event' then format('event_timeout: %s did not come within %s s', substr(p_wait.key, 7), spec.timeout)
            when 'approval' then format('approval_timeout: no decision within %s s', spec.timeout)
            else format('sensor_timeout: not true within %s s, %s polls', spec.timeout, (
                select q.polls from sensor_poll q
                where q.run_id = p_wait.run_id and q.idx = p_wait.idx and q.map_index = p_wait.map_index)) end;
    end if;
end $$;

-- Evaluates due waits: some end, a condition is polled again, others continue. Rows of another epoch are leftovers.
create function evaluate_waits(p_due deferral[]) returns void language plpgsql as $$
declare
    fx effects;
    t timestamptz := clock();
    ends wait_result[];
    polled task_ref[];
    late jsonb;
begin
    delete from deferral d using unnest(p_due) x
    where d.run_id = x.run_id and d.idx = x.idx and d.map_index = x.map_index and d.epoch = x.epoch and not exists (
        select 1 from task k where k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
          and k.state = 'deferred' and k.epoch = x.epoch);
    select array_agg(row(x.run_id, x.idx, x.map_index, x.epoch, v.state, v.reason, v.result)::wait_result) into ends
    from unnest(p_due) x cross join lateral evaluate_wait(x, t) v
    where v.state is not null;
    fx := end_waits(ends, fx);
    with resumed as (
        update task k set state = 'pending'
        from unnest(p_due) x
        cross join lateral (select from deferral d where d.run_id = x.run_id and d.idx = x.idx
                            and d.map_index = x.map_index and d.epoch = x.epoch and d.kind = 'poll' offset 0) d
        where k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index and k.state = 'deferred'
            and k.epoch = x.epoch
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    ), gone as (
        delete from deferral d using resumed k where d.run_id = k.run_id and d.idx = k.idx and d.map_index = k.map_index
    )
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref) into polled from resumed k;
    if polled is not null then
        fx := release_pending_tasks(polled, fx);
    end if;
    select jsonb_agg(jsonb_build_object('run_id', x.run_id, 'idx', x.idx, 'map_index', x.map_index, 'epoch', x.epoch,
                                        'value', jsonb_build_object('is_late', true))) into late
    from unnest(p_due) x where x.kind = 'trigger' and x.deadline <= t;
    if late is not null then
        fx := resume_tasks(late, fx);
    end if;
    -- The wake-up may be lost when a repair closes the run: such a wait is checked from time to time.
    update deferral d set wake_at
        = coalesce(least(d.deadline, case when d.kind = 'run' then t + interval '10 minutes' end), 'infinity')
    from unnest(p_due) x
    where d.run_id = x.run_id and d.idx = x.idx and d.map_index = x.map_index and d.epoch = x.epoch
        and d.kind in ('run', 'event', 'approval') and d.wake_at <= t;
    fx := apply_effects(fx);
end $$;

-- Makes the waits due whose event has arrived, at most so many at a time: an event with more is delivered again. A
-- locked row is skipped, as both transactions could wait for each other; then the event counts as not delivered.
create function deliver_events(p_limit int) returns void language plpgsql as $$
declare
    come record;
    t timestamptz := clock();
begin
    for come in select e.event_id, e.name from event e where not e.is_delivered order by e.event_id limit p_limit loop
        update deferral d set wake_at = t where d.ctid = any(array(
            select x.ctid from deferral x where x.key = 'event:' || come.name and x.wake_at > t
                limit p_limit for update skip locked));
        if not exists (select 1 from deferral x where x.key = 'event:' || come.name and x.wake_at > t) then
            update event e set is_delivered = true where e.event_id = come.event_id and not e.is_delivered;
        end if;
    end loop;
end $$;

-- One batch of due waits. Locked runs are skipped. If the database refuses the batch, its waits are processed one by
-- one, and what is refused alone is set aside. Returns how many were evaluated and set aside, and when the next is due.
create function wake_deferred_tasks(p_shard smallint, p_epoch bigint, p_limit int, out looked_at int, out refused int,
                                    out next_wake timestamptz) language plpgsql as $$
declare
    due deferral[];
    one deferral;
begin
    perform fence(p_shard, p_epoch);
    refused := 0;
    perform deliver_events(p_limit);
    due := array(
        select come.whole from (
            select d as whole, d.run_id from deferral d
            where d.shard = p_shard and d.wake_at <= clock() and d.kind not in ('start', 'clock')
                order by d.wake_at offset 0) come
        cross join lateral (select from run_status r where r.run_id = come.run_id for no key update skip locked) locked
        limit p_limit);
    looked_at := cardinality(due);
    if looked_at > 0 then
        begin
            perform evaluate_waits(due);
        exception when others then
            if not is_poison(sqlstate) then
                raise;
            end if;
            foreach one in array due loop
                begin
                    perform evaluate_waits(array[one]);
                exception when others then
                    if not is_poison(sqlstate) then
                        raise;
                    end if;
                    perform quarantine_row('run', one.run_id, 'wake', sqlerrm, true);
                    update deferral d set wake_at = clock() + interval '1 minute'
                    where d.run_id = one.run_id and d.idx = one.idx and d.map_index = one.map_index;
                    refused := refused + 1;
                end;
            end loop;
        end;
    end if;
    next_wake := next_wake(p_shard);
end $$;

-- When the leader must evaluate waits next: at once while an event is not delivered.
create function next_wake(p_shard smallint) returns timestamptz language sql stable as $$
    select case when exists (select 1 from event e where not e.is_delivered) then clock()
                else nullif((select min(d.wake_at) from deferral d where d.shard = p_shard), 'infinity') end
$$;
