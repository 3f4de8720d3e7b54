-- Triggers of deferred tasks (docs/decisions/0068-triggers.md): a coroutine of user code that waits without a slot, and
-- whose one event resumes its task.
--
-- A runner leases a trigger for its session. Each lease is a new epoch of the task: an event of an older one changes
-- nothing. All changes are made under the lock of the run. A row without an event belongs to a deferred task with the
-- same epoch; a row with one is what the task resumes with, until it is cleared, defers again or its run is pruned.

-- Attempts that ended in a deferral: some with a trigger, the others polled. The caller holds the runs' locks.
create function record_deferrals(p_deferred jsonb) returns void language plpgsql as $$
declare
    begun jsonb := jsonb_path_query_array(p_deferred, '$[*] ? (exists (@.result.trigger))');
    polled jsonb := jsonb_path_query_array(p_deferred, '$[*] ? (!exists (@.result.trigger))');
begin
    if begun <> '[]' then
        perform begin_triggers(begun);
    end if;
    if polled <> '[]' then
        perform record_polls(polled);
    end if;
end $$;

-- p_deferred: [{run_id, idx, map_index, version_id, epoch, attempt, result: {trigger: {classpath, kwargs, timeout,
-- next_method, next_kwargs}}}]. The resumed attempt has the number of the deferred one.
create function begin_triggers(p_deferred jsonb) returns void language plpgsql as $$
declare
    t timestamptz := clock();
begin
    with come as materialized (
        select x.*, s.queue, d.shard, x.result->'trigger' as given,
               t + make_interval(secs => (x.result->'trigger'->>'timeout')::double precision) as deadline
        from jsonb_to_recordset(p_deferred) as x(run_id bigint, idx int, map_index int, version_id int, epoch int,
                                                 attempt smallint, result jsonb)
        cross join lateral (select y.queue from task_spec y where y.version_id = x.version_id and y.idx = x.idx
                            offset 0) s
        cross join lateral (select y.dag_id from run_status y where y.run_id = x.run_id offset 0) r
        cross join lateral (select y.shard from dag y where y.dag_id = r.dag_id offset 0) d
    ), written as (
        insert into task_trigger as o (run_id, idx, map_index, epoch, attempt, queue, classpath, given, since, deadline)
        select c.run_id, c.idx, c.map_index, c.epoch, c.attempt, c.queue, c.given->>'classpath',
               c.given - '{classpath,timeout}'::text[], t, c.deadline
        from come c
        on conflict (run_id, idx, map_index) do update
        set epoch = excluded.epoch, attempt = excluded.attempt, queue = excluded.queue, classpath = excluded.classpath,
            given = excluded.given, since = excluded.since, deadline = excluded.deadline, session = null, event = null,
            trigger_id = default
    )
    insert into deferral as o (run_id, idx, map_index, epoch, shard, kind, wake_at, deadline)
    select c.run_id, c.idx, c.map_index, c.epoch, c.shard, 'trigger', coalesce(c.deadline, 'infinity'), c.deadline
    from come c
    on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, kind = excluded.kind, key = null,
        wake_at = excluded.wake_at, deadline = excluded.deadline;
end $$;

-- Tasks whose trigger is over resume with its event, as far as they still wait with that epoch. p_ends: [{run_id, idx,
-- map_index, epoch, value}]. The arguments of the trigger are not kept. The caller holds the runs' locks.
create function resume_tasks(p_ends jsonb, inout fx effects) language plpgsql as $$
declare
    resumed task_ref[];
begin
    with ended as materialized (
        select x.* from jsonb_to_recordset(p_ends) as x(run_id bigint, idx int, map_index int, epoch int, value jsonb)
    ), moved as (
        update task k set state = 'pending' from ended e
        where k.run_id = e.run_id and k.idx = e.idx and k.map_index = e.map_index and k.state = 'deferred'
            and k.epoch = e.epoch
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, e.value
    ), fired as (
        update task_trigger w set event = m.value, session = null, given = w.given - 'kwargs' from moved m
        where w.run_id = m.run_id and w.idx = m.idx and w.map_index = m.map_index
    ), gone as (
        delete from deferral d using moved m
        where d.run_id = m.run_id and d.idx = m.idx and d.map_index = m.map_index
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into resumed from moved m;
    if resumed is not null then
        fx := release_pending_tasks(resumed, fx);
    end if;
end $$;

-- One round trip of a runner that has triggers: records how some ended, returns the refused ones and what it no longer
-- holds, and leases more. p_reports: [{r, i, m, e, value, log, seq, until}]; a report without a value returns the
-- trigger. p_held: [[run_id, idx, map_index, epoch]], with the reported ones; null: only the reports matter, whose
-- events must not wait. What the session holds and its list lacks is returned again, because the reply of the lease was
-- lost. Nothing is leased while it held what it no longer holds: after a failover the same epoch could be given twice.
create function exchange_triggers(p_session bigint, p_reports jsonb, p_held jsonb, p_queues text[], p_match text[],
                                  p_free int) returns setof trigger_row language plpgsql as $$
declare
    fx effects;
    ended jsonb;
    notice trigger_row;
    has_lost boolean := false;
    is_listed boolean := p_held is not null;
begin
    -- Whatever declares the runner dead waits for this, or has happened before.
    perform 1 from runner where session = p_session and ended_at is null for share;
    if not found then
        return query select 'lost', h.run_id, h.idx, h.map_index, h.epoch, null::int, null::int, null::timestamptz,
                            null::text, null::jsonb, null::jsonb from read_held(p_held) h;
        return;
    end if;
    if p_reports is not null then
        perform 1 from run_status s
        where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(p_reports) x))
        order by s.run_id for no key update;
        with report as materialized (
            select x.* from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, value jsonb, log text,
                                                               seq bigint, until bigint)
            join task_trigger w on w.run_id = x.r and w.idx = x.i and w.map_index = x.m and w.epoch = x.e
                and w.session = p_session
        ), logged as (
            insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content)
            select x.r, x.i, x.m, x.e, coalesce(x.seq, 0), coalesce(x.until, 0), x.log from report x
            where x.log is not null
            on conflict (run_id, idx, map_index, epoch, seq) do nothing
        ), freed as (
            update task_trigger w set session = null from report x
            where w.run_id = x.r and w.idx = x.i and w.map_index = x.m
        )
        select jsonb_agg(jsonb_build_object('run_id', x.r, 'idx', x.i, 'map_index', x.m, 'epoch', x.e,
                                            'value', x.value)) filter (where x.value is not null)
        into ended from report x;
        if ended is not null then
            fx := resume_tasks(ended, fx);
            fx := apply_effects(fx);
        end if;
        return query
        select 'refused', x.r, x.i, x.m, x.e, null::int, null::int, null::timestamptz, null::text, null::jsonb,
               null::jsonb
        from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, value jsonb)
        where not exists (select 1 from task_trigger w where w.run_id = x.r and w.idx = x.i and w.map_index = x.m
                          and w.epoch = x.e and w.session is null and (x.value is null or w.event = x.value));
        if fx.enqueued > 0 then
            notice.kind := 'more';
            return next notice;
        end if;
        -- without the rows that this transaction released
        p_held := (select jsonb_agg(h) from jsonb_array_elements(p_held) h where not exists (
            select 1 from jsonb_array_elements(p_reports) x
            where (x->'r', x->'i', x->'m', x->'e') = (h->0, h->1, h->2, h->3)));
    end if;
    return query select case when w.run_id is null then 'stop' else 'lost' end, h.run_id, h.idx, h.map_index, h.epoch,
                        null::int, null::int, null::timestamptz, null::text, null::jsonb, null::jsonb
    from read_held(p_held) h
    left join task_trigger w on w.run_id = h.run_id and w.idx = h.idx and w.map_index = h.map_index
    where w.session is distinct from p_session or w.epoch <> h.epoch;
    has_lost := found;
    if p_free > 0 and is_listed and not has_lost and exists (select 1 from runner where session = p_session
        and request is null) then
        perform lease_triggers(p_session, p_queues, p_match, p_free);
    end if;
    return query
    with started as materialized (
        select w.* from task_trigger w
        where is_listed and w.session = p_session and not exists (
            select 1 from read_held(p_held) h
            where h.run_id = w.run_id and h.idx = w.idx and h.map_index = w.map_index and h.epoch = w.epoch)
    ), facts as materialized (   -- once for all triggers of a run
        select s.run_id, run_facts(s.run_id) as of_run from (select distinct y.run_id from started y) s
    )
    select 'start', w.run_id, w.idx, w.map_index, w.epoch, k.version_id, w.attempt::int,
           coalesce(r.fire_at, r.created_at), w.classpath, w.given->'kwargs',
           f.of_run || jsonb_build_object('outputs', (
               select v.value from result v
               where v.run_id = w.run_id and v.idx = w.idx and v.map_index = w.map_index))
    from started w
    cross join lateral (select x.version_id from task x
                        where x.run_id = w.run_id and x.idx = w.idx and x.map_index = w.map_index offset 0) k
    join run r on r.run_id = w.run_id join facts f on f.run_id = w.run_id;
end $$;

create function read_held(p_held jsonb) returns table (run_id bigint, idx int, map_index int, epoch int)
language sql immutable as $$
    select (x->>0)::bigint, (x->>1)::int, (x->>2)::int, (x->>3)::int from jsonb_array_elements(p_held) x
$$;

-- The oldest triggers that no session runs. Those whose run is locked are found again in a moment.
create function lease_triggers(p_session bigint, p_queues text[], p_match text[], p_free int)
returns void language plpgsql as $$
begin
    with picked as materialized (
        select w.run_id, w.idx, w.map_index, w.epoch
        from (select x.* from task_trigger x
              where x.queue = any(p_queues) and x.session is null and x.event is null order by x.since offset 0) w
        cross join lateral (select y.version_id from task y
                            where y.run_id = w.run_id and y.idx = w.idx and y.map_index = w.map_index
                              and matches_patterns(p_match, y.version_id, w.idx) offset 0) k
        cross join lateral (select from run_status r where r.run_id = w.run_id for no key update skip locked) locked
        limit p_free
    ), moved as (
        update task k set epoch = k.epoch + 1 from picked p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'deferred'
            and k.epoch = p.epoch
        returning k.run_id, k.idx, k.map_index, k.epoch
    ), followed as (
        update deferral d set epoch = m.epoch from moved m
        where d.run_id = m.run_id and d.idx = m.idx and d.map_index = m.map_index
    )
    update task_trigger w set session = p_session, epoch = m.epoch from moved m
    where w.run_id = m.run_id and w.idx = m.idx and w.map_index = m.map_index;
end $$;

-- The triggers of a runner that is gone: another one leases them. The locks of all its runs come first and in order.
create function release_triggers(p_session bigint) returns void language plpgsql as $$
begin
    perform 1 from run_status s
    where s.run_id = any(array(select l.run_id from lease l where l.session = p_session
                               union all select w.run_id from task_trigger w where w.session = p_session))
    order by s.run_id for no key update;
    update task_trigger w set session = null where w.session = p_session;
end $$;
