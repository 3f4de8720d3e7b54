-- The schema that the migrations make. Written by `python tools/schema.py`: change a migration, not this file.

CREATE SCHEMA evertick;

CREATE TYPE evertick.decision AS ENUM (
    'wait',
    'run',
    'skip',
    'upstream_failed'
);

CREATE TYPE evertick.task_state AS ENUM (
    'waiting',
    'pending',
    'available',
    'queued',
    'running',
    'deferred',
    'success',
    'failed',
    'skipped',
    'canceled',
    'upstream_failed'
);

CREATE TYPE evertick.ended AS (
	run_id bigint,
	idx integer,
	map_index integer,
	version_id integer,
	state evertick.task_state
);

CREATE TYPE evertick.gate_arrival AS (
	run_id bigint,
	idx integer,
	map_index integer,
	version_id integer,
	rank smallint,
	gate_ids integer[],
	weights integer[],
	checks integer[],
	needs bigint[]
);

CREATE TYPE evertick.gate_kind AS ENUM (
    'pool',
    'mutex',
    'key',
    'group',
    'task',
    'dag',
    'order',
    'rate',
    'past'
);

CREATE TYPE evertick.gate_want AS (
	run_id bigint,
	idx integer,
	map_index integer,
	version_id integer,
	rank smallint,
	kind evertick.gate_kind,
	name text,
	weight integer,
	capacity integer,
	need bigint,
	period double precision
);

CREATE TYPE evertick.gate_weight AS (
	gate_id integer,
	weight integer
);

CREATE TYPE evertick.group_key AS (
	run_id bigint,
	version_id integer,
	grp integer
);

CREATE TYPE evertick.happening AS (
	run_id bigint,
	version_id integer,
	idx integer,
	task text,
	event text,
	state text,
	attempt integer,
	reason text
);

CREATE TYPE evertick.late AS (
	kind text,
	schedule_id integer,
	run_id bigint,
	task text,
	due_at timestamp with time zone
);

CREATE TYPE evertick.map_how AS ENUM (
    'product',
    'zip',
    'kwargs'
);

CREATE TYPE evertick.queued_row AS (
	run_id bigint,
	idx integer,
	map_index integer,
	epoch integer,
	session bigint,
	place integer,
	seq bigint
);

CREATE TYPE evertick.run_kind AS ENUM (
    'scheduled',
    'manual',
    'backfill'
);

CREATE TYPE evertick.run_state AS ENUM (
    'queued',
    'running',
    'success',
    'failed',
    'canceled'
);

CREATE TYPE evertick.settled AS (
	won integer[],
	overlapped integer,
	canceled integer
);

CREATE TYPE evertick.started_attempt AS (
	verdict text,
	attempt integer,
	version_id integer,
	fire_at timestamp with time zone,
	params text,
	inputs text
);

CREATE TYPE evertick.step_row AS (
	kind text,
	run_id bigint,
	idx integer,
	map_index integer,
	epoch integer,
	attempt integer,
	version_id integer,
	fire_at timestamp with time zone,
	params text,
	inputs text,
	place integer,
	seq bigint
);

CREATE TYPE evertick.task_request AS ENUM (
    'cancel',
    'clear',
    'mark_success',
    'mark_failed',
    'mark_skipped'
);

CREATE TYPE evertick.trigger_rule AS ENUM (
    'all_success',
    'all_failed',
    'all_done',
    'all_done_min_one_success',
    'all_done_setup_success',
    'one_success',
    'one_failed',
    'one_done',
    'none_failed',
    'none_skipped',
    'none_failed_min_one_success',
    'all_skipped',
    'always'
);

CREATE TYPE evertick.unexpanded AS (
	state evertick.task_state,
	reason text
);

CREATE TYPE evertick.wait_end AS (
	run_id bigint,
	idx integer,
	map_index integer,
	epoch integer,
	state evertick.task_state,
	reason text,
	result jsonb
);

CREATE TYPE evertick.wait_kind AS ENUM (
    'start',
    'run',
    'time',
    'clock',
    'event',
    'approval',
    'poll'
);

CREATE FUNCTION evertick.address_of(p_version_id integer, p_idx integer) RETURNS text
    LANGUAGE sql STABLE
    AS $$
    select d.name || '::' || replace(s.name, '.', '::') || '::'
    from task_spec s join dag_version v on v.version_id = s.version_id join dag d on d.dag_id = v.dag_id
    where s.version_id = p_version_id and s.idx = p_idx
$$;

CREATE FUNCTION evertick.admit(p_shard smallint, p_epoch bigint, OUT admitted integer, OUT refused integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    select a.admitted, a.refused into admitted, refused from admit_passed_over(p_shard) a;
    perform pass_gates();
end $$;

CREATE FUNCTION evertick.admit_passed_over(p_shard smallint, OUT admitted integer, OUT refused integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    d int;
begin
    admitted := 0;
    refused := 0;
    foreach d in array array(select x from dags_with_room(p_shard) x order by x) loop
        begin
            admitted := admitted + admit_runs(array[d]);
        exception when others then
            if not is_poison(sqlstate) then
                raise;
            end if;
            perform set_aside('dag', d, 'admit', sqlerrm, true);
            refused := refused + 1;
        end;
    end loop;
end $$;

CREATE FUNCTION evertick.admit_runs(p_dag_ids integer[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    admitted bigint[];
    t timestamptz := clock();
begin
    perform 1 from dag where dag_id = any(p_dag_ids) order by dag_id for no key update;
    with room as (
        select d.dag_id, case when d.max_active_runs is null then 1000 else d.max_active_runs - (
                   select count(*) from run_status a where a.dag_id = d.dag_id and a.state = 'running') end as free,
               case when d.has_turns then array(select x from whose_turn(d.dag_id) x) end as turn,
               case when d.awaits_past then array(select x from waited_for(d.dag_id) x) end as wanted
        from dag d where d.dag_id = any(p_dag_ids) and not d.paused
    ), chosen as (
        select q.run_id from room, lateral (
            select run_id from run_status q
            where q.dag_id = room.dag_id and q.state = 'queued' and (room.turn is null or q.run_id = any(room.turn))
            order by q.run_id limit greatest(room.free, 0)
            for no key update skip locked) q
        union
        select q.run_id from room, lateral (
            select run_id from run_status q
            where q.run_id = any(room.wanted) and q.state = 'queued' for no key update skip locked) q
    ), started as (
        update run_status r set state = 'running', started_at = coalesce(r.started_at, t)
        from chosen where r.run_id = chosen.run_id and r.state not in ('running', 'success', 'failed', 'canceled')
        returning r.run_id
    )
    select array_agg(run_id) into admitted from started;
    if admitted is null then
        return 0;
    end if;
    perform settle(start_runs(admitted));
    return cardinality(admitted);
end $$;

CREATE FUNCTION evertick.adopt_dispatches(p_session bigint, p_silent_seconds double precision, p_most integer) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    adopted int;
begin
    with orphan as materialized (
        select d.place from lost_owners(p_silent_seconds) o(owner)
        cross join lateral (
            select x.ctid as place from dispatch x
            cross join lateral (select r.executor, r.queues from runner r where r.session = p_session and r.gone_at is null offset 0) me
            where x.owner = o.owner and x.executor = me.executor and x.queue = any(me.queues)
            limit p_most for update of x skip locked) d
        where o.owner <> p_session
    )
    update dispatch d set owner = p_session where d.ctid = any(array(select o.place from orphan o limit p_most));
    get diagnostics adopted = row_count;
    return adopted;
end $$;

CREATE FUNCTION evertick.after_tasks(p_tasks evertick.ended[]) RETURNS TABLE(run_id bigint, version_id integer, dst integer, has_heard boolean)
    LANGUAGE sql STABLE
    AS $$
    select x.run_id, x.version_id, x.dst, bool_or(x.has_heard) from (
        select p.run_id, p.version_id, g.dst, true as has_heard
        from unnest(p_tasks) p join edge g on g.version_id = p.version_id and g.src = p.idx and g.out_of is null
        union all
        select p.run_id, p.version_id, g.dst, is_over(p.run_id, p.version_id, p.grp)
        from (select distinct q.run_id, q.version_id, s.grp from unnest(p_tasks) q
              join task_spec s on s.version_id = q.version_id and s.idx = q.idx and s.grp is not null) p
        join retry_group w on w.version_id = p.version_id and w.grp = p.grp
        cross join unnest(w.members) m(idx)
        join edge g on g.version_id = p.version_id and g.src = m.idx and g.out_of = p.grp
    ) x group by x.run_id, x.version_id, x.dst
$$;

CREATE FUNCTION evertick.arrivals_of(p_wants evertick.gate_want[]) RETURNS evertick.gate_arrival[]
    LANGUAGE sql STABLE
    AS $$
    select array_agg(row(t.run_id, t.idx, t.map_index, t.version_id, t.rank, t.gate_ids, t.weights, t.checks, t.needs)::gate_arrival
                     order by t.rank, t.run_id, t.idx, t.map_index)
    from (
        select n.run_id, n.idx, n.map_index, n.version_id, n.rank,
               coalesce(array_agg(n.gate_id order by n.gate_id) filter (where n.is_held), '{}') as gate_ids,
               coalesce(array_agg(n.weight order by n.gate_id) filter (where n.is_held), '{}') as weights,
               coalesce(array_agg(n.gate_id order by n.gate_id) filter (where not n.is_held and n.gate_id is not null), '{}') as checks,
               coalesce(array_agg(n.need order by n.gate_id) filter (where not n.is_held and n.gate_id is not null), '{}') as needs
        from (
            select w.run_id, w.idx, w.map_index, w.version_id, w.rank, g.gate_id, w.kind < 'order' as is_held,
                   max(w.weight) as weight, max(w.need) as need
            from unnest(p_wants) w
            cross join lateral (select (select x.gate_id from gate x where x.kind = w.kind and x.name = w.name) offset 0) g(gate_id)
            group by w.run_id, w.idx, w.map_index, w.version_id, w.rank, g.gate_id, is_held) n
        group by n.run_id, n.idx, n.map_index, n.version_id, n.rank) t
$$;

CREATE FUNCTION evertick.begin_waits(p_tasks evertick.ended[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    if coalesce(cardinality(p_tasks), 0) = 0 then
        return;
    end if;
    insert into deferral as o (run_id, idx, map_index, epoch, shard, kind, key, wake_at, deadline)
    select k.run_id, k.idx, k.map_index, k.epoch, d.shard, w.kind, w.key, w.wake_at, w.deadline
    from unnest(p_tasks) p
    cross join lateral (select x.* from task x where x.run_id = p.run_id and x.idx = p.idx and x.map_index = p.map_index
                        and x.state = 'deferred' offset 0) k
    cross join lateral (select x.dag_id from run_status x where x.run_id = p.run_id offset 0) r
    cross join lateral (select x.shard from dag x where x.dag_id = r.dag_id offset 0) d
    cross join lateral first_wait(k.run_id, k.idx, k.map_index, k.version_id, k.started_at, t) w
    on conflict (run_id, idx, map_index) do update
        set epoch = excluded.epoch, kind = excluded.kind, key = excluded.key, wake_at = excluded.wake_at, deadline = excluded.deadline
        where o.epoch <> excluded.epoch;
    insert into approval (run_id, idx, map_index, epoch, title, asked_at)
    select k.run_id, k.idx, k.map_index, k.epoch, gate_name(w.parts, k.run_id), t
    from unnest(p_tasks) p
    cross join lateral (select x.* from task x where x.run_id = p.run_id and x.idx = p.idx and x.map_index = p.map_index
                        and x.state = 'deferred' offset 0) k
    cross join lateral (select x.parts from task_wait x where x.version_id = p.version_id and x.idx = p.idx
                        and x.kind = 'approval' offset 0) w
    on conflict do nothing;
    perform set_config('evertick.arrived', 'yes', true);
end $$;

CREATE FUNCTION evertick.begins_again(p_group evertick.group_key) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select count(*) filter (where k.state = 'failed') > 0
       and count(*) filter (where s.decides_grp and k.state in ('failed', 'canceled', 'upstream_failed')) > 0
    from run_status r
    join dag_version v on v.version_id = r.version_id
    join run_group g on g.run_id = r.run_id and g.grp = p_group.grp
    join retry_group w on w.version_id = r.version_id and w.grp = p_group.grp and g.retried < w.retries
    cross join unnest(w.members) m(idx)
    cross join lateral (select x.state from task x where x.run_id = r.run_id and x.idx = m.idx offset 0) k
    cross join lateral (select x.decides_grp from task_spec x where x.version_id = r.version_id and x.idx = m.idx offset 0) s
    where r.run_id = p_group.run_id and r.state = 'running' and not r.cancel_requested
      and coalesce(r.started_at + make_interval(secs => v.run_timeout) > clock(), true)
$$;

CREATE FUNCTION evertick.blocker_of(p_gate_ids integer[], p_weights integer[], p_checks integer[], p_needs bigint[], OUT gate_id integer, OUT need bigint) RETURNS record
    LANGUAGE plpgsql STABLE
    AS $$
begin
    if p_checks <> '{}' then
        select n.gate_id, n.need into gate_id, need
        from unnest(p_checks, p_needs) as n(gate_id, need) where n.need > room_at(n.gate_id) order by n.gate_id limit 1;
        if found then
            return;
        end if;
    end if;
    select n.gate_id, n.weight into gate_id, need
    from unnest(p_gate_ids, p_weights) as n(gate_id, weight)
    cross join lateral (select x.capacity, x.used from gate x where x.gate_id = n.gate_id offset 0) g
    where g.capacity - g.used < n.weight order by n.gate_id limit 1;
end $$;

CREATE FUNCTION evertick.bury(p_session bigint, p_reason text, p_infra_retries integer) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    reports jsonb;
    report jsonb;
    moved int := 0;
begin
    update runner set gone_at = coalesce(gone_at, clock()), gone_reason = coalesce(gone_reason, p_reason)
    where session = p_session;
    select jsonb_agg(jsonb_build_object('r', l.run_id, 'i', l.idx, 'm', l.map_index, 'e', l.epoch, 'kind', 'lost',
                                        'reason', p_reason) order by l.run_id, l.idx, l.map_index)
    into reports from lease l where l.session = p_session and not is_set_aside('run', l.run_id);
    if reports is null then
        return 0;
    end if;
    begin
        perform finish(p_session, reports, p_infra_retries);
        perform pass_gates();
        return jsonb_array_length(reports);
    exception when others then
        if not is_poison(sqlstate) then
            raise;
        end if;
    end;
    for report in select x from jsonb_array_elements(reports) x loop
        begin
            perform finish(p_session, jsonb_build_array(report), p_infra_retries);
            moved := moved + 1;
        exception when others then
            if not is_poison(sqlstate) then
                raise;
            end if;
            perform set_aside('run', (report->>'r')::bigint, 'bury', sqlerrm, true);
        end;
    end loop;
    perform pass_gates();
    return moved;
end $$;

CREATE FUNCTION evertick.busy_slots(p_session bigint) RETURNS bigint
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return (select count(*) from lease l where l.session = p_session) + (select count(*) from dispatch d where d.owner = p_session);
end $$;

CREATE FUNCTION evertick.can_come_back() RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (
        select 1 from gate_line l
        cross join lateral (select distinct w.version_id, w.idx from gate_wait w where w.line_id = l.line_id offset 0) w
        where l.queue is not null and is_served(l.queue, w.version_id, w.idx, 0))
$$;

CREATE FUNCTION evertick.cancel_backfill(p_backfill_id integer, p_leaves_runs boolean, p_actor text, OUT runs integer, OUT asked integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    open bigint[];
    one bigint;
    n int;
begin
    update backfill b set state = 'canceled', finished_at = clock(), reason = format('canceled by %s', p_actor)
    where b.backfill_id = p_backfill_id and b.state in ('running', 'paused');
    if not found then
        return;
    end if;
    runs := 0;
    asked := 0;
    insert into journal (occurred_at, verb, actor, dag_id, detail)
    select clock(), 'cancel', p_actor, b.dag_id, jsonb_build_object('backfill', p_backfill_id, 'leaves_runs', p_leaves_runs)
    from backfill b where b.backfill_id = p_backfill_id;
    if p_leaves_runs then
        return;
    end if;
    open := array(
        select r.run_id from run_status r
        where r.run_id = any(array(select o.run_id from backfill_run o where o.backfill_id = p_backfill_id and o.is_open))
          and r.state in ('queued', 'running')
        order by r.run_id for no key update);
    foreach one in array open loop
        n := stop_run(one, p_actor, format('backfill %s was canceled', p_backfill_id));
        runs := runs + (n is not null)::int;
        asked := asked + coalesce(n, 0);
    end loop;
    perform pass_gates();
end $$;

CREATE FUNCTION evertick.cancel_run(p_run_id bigint, p_actor text, p_reason text) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    asked int := stop_run(p_run_id, p_actor, p_reason);
begin
    perform pass_gates();
    return asked;
end $$;

CREATE FUNCTION evertick.change_account(p_name text, p_role text, p_tags text[], p_all_tags boolean, p_disabled boolean, p_password_hash text, p_actor text) RETURNS text
    LANGUAGE plpgsql
    AS $$
declare
    before account;
    t timestamptz := clock();
begin
    -- All admins, in one order, so that two of them cannot take each other's last one away.
    perform 1 from account a where a.role = 'admin' or lower(a.name) = lower(p_name) order by a.account_id for no key update;
    select * into before from account a where lower(a.name) = lower(p_name);
    if before.account_id is null then
        return 'unknown';
    end if;
    if before.role = 'admin' and not before.is_disabled and before.tags is null
       and (p_role <> 'admin' or p_disabled or p_tags is not null)
       and not exists (select 1 from account a where a.role = 'admin' and not a.is_disabled and a.tags is null
                       and a.account_id <> before.account_id) then
        return 'last_admin';
    end if;
    update account a
    set role = coalesce(p_role, a.role), tags = case when p_all_tags then null else coalesce(p_tags, a.tags) end,
        is_disabled = coalesce(p_disabled, a.is_disabled), password_hash = coalesce(p_password_hash, a.password_hash),
        password_changed_at = case when p_password_hash is null then a.password_changed_at else t end
    where a.account_id = before.account_id;
    if p_password_hash is not null or p_disabled then
        update credential c set revoked_at = t where c.account_id = before.account_id and c.revoked_at is null;
    end if;
    insert into journal (occurred_at, verb, actor, detail)
    values (t, 'change_user', p_actor, jsonb_build_object('user', before.name,
            'before', jsonb_build_object('role', before.role, 'tags', before.tags, 'is_disabled', before.is_disabled),
            'after', (select jsonb_build_object('role', a.role, 'tags', a.tags, 'is_disabled', a.is_disabled)
                      from account a where a.account_id = before.account_id),
            'password', case when p_password_hash is null then 'kept' else 'changed' end));
    -- API processes remember for some seconds whom they have let in.
    perform pg_notify('evertick_access', '');
    return 'changed';
end $$;

CREATE FUNCTION evertick.change_schedule(p_dag_id integer, p_name text, p_change text, p_expected integer, p_seen jsonb, p_settle jsonb, p_actor text) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    id int;
    changed int;
    t timestamptz := clock();
begin
    perform lock_schedules(d.name) from dag d where d.dag_id = p_dag_id;
    perform refuse_moved(d.name, p_name, p_seen) from dag d where d.dag_id = p_dag_id;
    select c.schedule_id into id from schedule c
    where c.dag_id = p_dag_id and c.name = p_name and c.deleted_at is null and (p_expected is null or c.version = p_expected);
    if not found then
        return null;
    end if;
    -- One that is paused already, or is not, stays as it is: what is due of it is the leader's.
    select c.version into changed from schedule c join schedule_state s on s.schedule_id = c.schedule_id
    where c.schedule_id = id and p_change <> 'delete' and s.is_held = (p_change = 'pause');
    if found then
        return changed;
    end if;
    if p_change <> 'unpause' then
        perform settle_schedules(p_settle, p_change = 'delete');
    end if;
    update schedule c set origin = 'user' where c.schedule_id = id;
    if p_change = 'delete' then
        perform remove_schedules(array[id], p_actor);
    else
        update schedule c set version = c.version + 1, changed_by = p_actor, changed_at = t where c.schedule_id = id;
        update schedule_state s set version = c.version, is_held = p_change = 'pause', paused = p_change = 'pause' or d.paused
        from schedule c join dag d on d.dag_id = c.dag_id
        where c.schedule_id = s.schedule_id and s.schedule_id = id;
        perform note_schedules(array[id], p_change);
    end if;
    select c.version into changed from schedule c where c.schedule_id = id;
    if p_change = 'unpause' then
        -- The plans are for the version that it has from now on.
        perform settle_schedules(p_settle);
    end if;
    insert into journal (occurred_at, verb, actor, dag_id, detail)
    values (t, p_change || '_schedule', p_actor, p_dag_id, jsonb_build_object('name', p_name, 'version', changed));
    perform pass_gates();
    return changed;
end $$;

CREATE FUNCTION evertick.check_facts(p_gate_id integer, p_need bigint, p_ahead bigint) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    AS $$
declare
    g gate;
begin
    select x.* into g from gate x where x.gate_id = p_gate_id;
    case g.kind
    when 'order' then
        return jsonb_build_object(
            'ahead', (select count(*) from (select 1 from gate_order o where o.gate_id = p_gate_id and o.version < p_need limit 10000) x),
            'smaller', (
                select coalesce(jsonb_agg(jsonb_build_object('version', f.version, 'run_id', f.run_id, 'dag', d.name, 'task', s.name,
                                                             'state', k.state) order by f.version, f.run_id, f.idx), '[]')
                from (select o.* from gate_order o where o.gate_id = p_gate_id and o.version < p_need
                      order by o.version, o.run_id, o.idx limit 5) f
                join task k on k.run_id = f.run_id and k.idx = f.idx and k.map_index = f.map_index
                join task_spec s on s.version_id = k.version_id and s.idx = k.idx
                join run r on r.run_id = f.run_id join dag d on d.dag_id = r.dag_id));
    when 'rate' then
        -- Slots come back in the order in which they were taken, and are taken again at once by those who wait.
        return jsonb_build_object('period', g.period, 'until', (
            select p.until from gate_pass p where p.gate_id = p_gate_id order by p.until, p.seq
            offset p_ahead % g.capacity limit 1) + make_interval(secs => g.period * (p_ahead / g.capacity)));
    else
        return (
            select jsonb_build_object('run_id', b.run_id, 'task', s.name, 'state', coalesce(k.state, 'waiting'), 'run_state', b.state)
            from run_status b join task_spec s on s.version_id = b.version_id and s.idx = split_part(g.name, '/', 2)::int
            left join task k on k.run_id = b.run_id and k.idx = s.idx
            where b.run_id = split_part(g.name, '/', 1)::bigint);
    end case;
end $$;

CREATE FUNCTION evertick.children_due(p_shard smallint, p_limit integer) RETURNS TABLE(run_id bigint, idx integer, map_index integer, epoch integer, dag text, params jsonb, depth integer, parent_dag text, given jsonb, own jsonb, results jsonb)
    LANGUAGE sql STABLE
    AS $$
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

CREATE TABLE evertick.backfill (
    backfill_id integer NOT NULL,
    shard smallint NOT NULL,
    dag_id integer NOT NULL,
    schedule_id integer,
    spec jsonb NOT NULL,
    params jsonb NOT NULL,
    first_at timestamp with time zone NOT NULL,
    last_at timestamp with time zone NOT NULL,
    reprocess text NOT NULL,
    newest_first boolean NOT NULL,
    parallel integer NOT NULL,
    request text NOT NULL,
    state text NOT NULL,
    reason text,
    "position" timestamp with time zone,
    is_planned boolean DEFAULT false NOT NULL,
    total bigint NOT NULL,
    left_alone bigint DEFAULT 0 NOT NULL,
    made bigint DEFAULT 0 NOT NULL,
    open_runs integer DEFAULT 0 NOT NULL,
    succeeded bigint DEFAULT 0 NOT NULL,
    failed bigint DEFAULT 0 NOT NULL,
    canceled bigint DEFAULT 0 NOT NULL,
    created_by text NOT NULL,
    created_at timestamp with time zone NOT NULL,
    finished_at timestamp with time zone,
    CONSTRAINT backfill_check CHECK ((first_at <= last_at)),
    CONSTRAINT backfill_check1 CHECK (((finished_at IS NOT NULL) = (state = ANY (ARRAY['done'::text, 'canceled'::text, 'failed'::text])))),
    CONSTRAINT backfill_open_runs_check CHECK ((open_runs >= 0)),
    CONSTRAINT backfill_parallel_check CHECK (((parallel >= 1) AND (parallel <= 1000))),
    CONSTRAINT backfill_reprocess_check CHECK ((reprocess = ANY (ARRAY['none'::text, 'failed'::text, 'all'::text]))),
    CONSTRAINT backfill_state_check CHECK ((state = ANY (ARRAY['running'::text, 'paused'::text, 'done'::text, 'canceled'::text, 'failed'::text]))),
    CONSTRAINT backfill_total_check CHECK ((total > 0))
);

CREATE FUNCTION evertick.choose_instants(b evertick.backfill, p_instants timestamp with time zone[], p_room integer) RETURNS TABLE(place bigint, instant timestamp with time zone, is_needed boolean)
    LANGUAGE sql STABLE
    AS $$
    with cursor_at as (
        select coalesce((select s.next_due - make_interval(secs => c.delay_seconds)
                         from schedule_state s join schedule c on c.schedule_id = s.schedule_id
                         where s.schedule_id = (b).schedule_id and s.paused is not true and s.error is null), 'infinity') as next_due
    ), candidate as (
        select i.place, i.instant,
               case when n.run_id is null then true
                    when n.state in ('queued', 'running') then false
                    else (b).reprocess = 'all' or ((b).reprocess = 'failed' and n.state in ('failed', 'canceled')) end as is_needed
        from unnest(p_instants) with ordinality i(instant, place)
        cross join lateral newest_run_for((b).dag_id, (b).schedule_id, i.instant) n
    ), numbered as (
        select c.*, count(*) filter (where c.is_needed) over (order by c.place) as needed,
               bool_or(c.instant >= k.next_due) over (order by c.place) as is_ahead
        from candidate c cross join cursor_at k
    )
    select n.place, n.instant, n.is_needed from numbered n
    where n.needed <= p_room and not n.is_ahead
    order by n.place
$$;

CREATE FUNCTION evertick.claim(p_session bigint, p_queues text[], p_free integer, p_low bigint[]) RETURNS SETOF evertick.step_row
    LANGUAGE plpgsql
    AS $$
declare
    wanted int := p_free;
    got int;
    t timestamptz := clock();
begin
    perform 1 from runner where session = p_session and gone_at is null and request is null;
    if not found then
        return;
    end if;
    for n in 1 .. cardinality(p_queues) loop
        exit when wanted <= 0;
        return query
        with picked as materialized (
            select p.* from generate_series(0, 9) k(rank) cross join lateral (
                select r.ctid as place, r.rank, r.seq, r.run_id, r.idx, r.map_index from ready r
                where r.queue = p_queues[n] and r.rank = k.rank
                  and r.seq >= coalesce(p_low[10 * (n - 1) + k.rank + 1], 0)
                order by r.seq limit wanted for update skip locked) p
            limit wanted
        ), taken as (
            delete from ready r where r.ctid = any(array(select p.place from picked p))
        ), moved as (
            update task k
            set state = 'running', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_session,
                started_at = t, finished_at = null, reason = null, exit_code = null
            from picked p
            where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
            returning k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.version_id, p.rank, p.seq
        ), leased as (
            insert into lease (session, run_id, idx, map_index, epoch)
            select p_session, m.run_id, m.idx, m.map_index, m.epoch from moved m
        )
        select 'claim', m.run_id, m.idx, m.map_index, m.epoch, m.attempt::int, m.version_id, r.fire_at, r.params::text,
               case when m.map_index >= 0 then inputs_of_instance(m.run_id, m.version_id, m.idx, m.map_index) else
               (select jsonb_object_agg(s.name, case when s.is_mapped then results_of(m.run_id, i.src) else v.value end)::text
                from task_input i
                join task_spec s on s.version_id = i.version_id and s.idx = i.src
                left join result v on v.run_id = m.run_id and v.idx = i.src and v.map_index = -1
                where i.version_id = m.version_id and i.idx = m.idx) end, 10 * (n - 1) + m.rank, m.seq
        from moved m join run r on r.run_id = m.run_id
        order by m.rank, m.seq;
        get diagnostics got = row_count;
        wanted := wanted - got;
    end loop;
end $$;

CREATE FUNCTION evertick.claim_fairly(p_session bigint, p_queues text[], p_free integer, p_low bigint[], p_aging double precision) RETURNS SETOF evertick.step_row
    LANGUAGE plpgsql
    AS $$
declare
    places int[];
    seqs bigint[];
    got int := 0;
begin
    select array_agg(o.place), array_agg(o.seq) into places, seqs
    from overdue(p_queues, p_low, p_aging, (p_free + 1) / 2) o;
    if places is not null then
        return query select * from claim_rows(p_session, p_queues, places, seqs);
        get diagnostics got = row_count;
    end if;
    if p_free > got then
        return query select * from claim(p_session, p_queues, p_free - got, p_low);
    end if;
end $$;

CREATE FUNCTION evertick.claim_for_dispatch(p_session bigint, p_queues text[], p_free integer, p_low bigint[], p_aging double precision, p_sessions bigint[]) RETURNS SETOF evertick.queued_row
    LANGUAGE plpgsql
    AS $$
declare
    places int[] := '{}';
    seqs bigint[] := '{}';
    head_places int[];
    head_seqs bigint[];
begin
    p_free := least(p_free, dispatch_room(p_session));
    if coalesce(p_free, 0) <= 0 then
        return;
    end if;
    if p_aging is not null then
        select coalesce(array_agg(o.place), '{}'), coalesce(array_agg(o.seq), '{}') into places, seqs
        from overdue(p_queues, p_low, p_aging, (p_free + 1) / 2) o;
    end if;
    -- One series for queue and rank, so that no plan can change the order in which they are asked.
    select array_agg(h.place), array_agg(h.seq) into head_places, head_seqs from (
        select k.place, p.seq from generate_series(0, 10 * cardinality(p_queues) - 1) k(place) cross join lateral (
            select r.seq from ready r
            where r.queue = p_queues[k.place / 10 + 1] and r.rank = (k.place % 10)::smallint
              and r.seq >= coalesce(p_low[k.place + 1], 0) and r.seq <> all(seqs)
            order by r.seq limit p_free for update skip locked) p
        limit p_free - cardinality(places)) h;
    return query select * from queue_rows(p_session, p_queues, places || head_places, seqs || head_seqs, p_sessions);
end $$;

CREATE FUNCTION evertick.claim_rows(p_session bigint, p_queues text[], p_places integer[], p_seqs bigint[]) RETURNS SETOF evertick.step_row
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    perform 1 from runner where session = p_session and gone_at is null and request is null;
    if not found then
        return;
    end if;
    return query
    with picked as materialized (
        select w.turn, w.place, r.spot, r.seq, r.run_id, r.idx, r.map_index
        from unnest(p_places, p_seqs) with ordinality w(place, seq, turn)
        cross join lateral (
            select q.ctid as spot, q.seq, q.run_id, q.idx, q.map_index from ready q
            where q.queue = p_queues[w.place / 10 + 1] and q.rank = (w.place % 10)::smallint and q.seq = w.seq
            for update skip locked) r
    ), taken as (
        delete from ready r where r.ctid = any(array(select p.spot from picked p))
    ), moved as (
        update task k
        set state = 'running', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_session,
            started_at = t, finished_at = null, reason = null, exit_code = null
        from picked p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.version_id, p.turn, p.place, p.seq
    ), leased as (
        insert into lease (session, run_id, idx, map_index, epoch)
        select p_session, m.run_id, m.idx, m.map_index, m.epoch from moved m
    )
    select 'claim', m.run_id, m.idx, m.map_index, m.epoch, m.attempt::int, m.version_id, r.fire_at, r.params::text,
           case when m.map_index >= 0 then inputs_of_instance(m.run_id, m.version_id, m.idx, m.map_index) else
           (select jsonb_object_agg(s.name, case when s.is_mapped then results_of(m.run_id, i.src) else v.value end)::text
            from task_input i
            join task_spec s on s.version_id = i.version_id and s.idx = i.src
            left join result v on v.run_id = m.run_id and v.idx = i.src and v.map_index = -1
            where i.version_id = m.version_id and i.idx = m.idx) end, m.place, m.seq
    from moved m join run r on r.run_id = m.run_id
    order by m.turn;
end $$;

CREATE FUNCTION evertick.clear_tasks(p_run_id bigint, p_idxs integer[], p_instances jsonb, p_actor text, p_version_id integer, OUT reopened integer, OUT asked integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    chosen ended[];
    taken ended[];
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    if not found then
        return;  -- it was pruned a moment ago
    end if;
    if p_version_id is not null then
        perform move_run(p_run_id, p_version_id);
    end if;
    update task k set request = 'clear'
    where k.run_id = p_run_id and (k.idx = any(p_idxs) or (k.idx, k.map_index) in (
          select (x->>0)::int, (x->>1)::int from jsonb_array_elements(p_instances) x))
      and k.state in ('queued', 'running') and k.request is distinct from 'cancel';
    get diagnostics asked = row_count;
    taken := take_back_instances(p_run_id, p_idxs);
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended) into chosen
    from task k
    where k.run_id = p_run_id and (k.idx = any(p_idxs) or (k.idx, k.map_index) in (
          select (x->>0)::int, (x->>1)::int from jsonb_array_elements(p_instances) x))
      and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed');
    reopened := coalesce(cardinality(chosen), 0) + cardinality(taken);
    -- Somebody looked after it: its retries count anew.
    update run_status r set retried = 0 where r.run_id = p_run_id and r.retried > 0;
    update run_group g set retried = 0 where g.run_id = p_run_id and g.retried > 0;
    insert into journal (occurred_at, verb, actor, run_id, detail)
    values (clock(), 'clear', p_actor, p_run_id, jsonb_build_object('tasks', p_idxs, 'reopened', reopened, 'asked', asked)
            || case when p_instances = '[]' then '{}' else jsonb_build_object('instances', p_instances) end
            || case when p_version_id is null then '{}' else jsonb_build_object('version_id', p_version_id) end);
    if reopened > 0 then
        perform reopen(taken || chosen);
        perform pass_gates();
    end if;
end $$;

CREATE FUNCTION evertick.clock() RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    AS $$
    select coalesce(nullif(current_setting('evertick.now', true), '')::timestamptz, clock_timestamp())
$$;

CREATE FUNCTION evertick.clocks_due(p_shard smallint, p_limit integer) RETURNS TABLE(run_id bigint, idx integer, map_index integer, epoch integer, at text, timezone text, since timestamp with time zone)
    LANGUAGE sql STABLE
    AS $$
    select f.run_id, f.idx, f.map_index, f.epoch, w.at, w.timezone, coalesce(r.fire_at, r.created_at)
    from (select * from deferral x where x.shard = p_shard and x.wake_at <= clock() and x.kind = 'clock' order by x.wake_at limit p_limit) f
    join run r on r.run_id = f.run_id
    join run_status s on s.run_id = f.run_id
    join task_wait w on w.version_id = s.version_id and w.idx = f.idx
$$;

CREATE FUNCTION evertick.close_if_done(p_run_id bigint) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION evertick.close_runs(p_ended evertick.ended[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    limited int[];
    closed bigint[];
    has_updated boolean;
    is_past boolean;
    is_told boolean;
    told bigint[];
    again bigint[];
    -- where nobody is told of anything, asking is a look at two empty tables
    has_episodes boolean := exists (select 1 from episode);
    has_defaults boolean := exists (select 1 from default_notice);
    t timestamptz := clock();
begin
    with per_run as (
        select e.run_id, count(*)::int as n,
               count(*) filter (where s.is_leaf and e.state in ('failed', 'canceled', 'upstream_failed'))::int as bad,
               bool_or(s.outlets is not null and e.state = 'success') as has_updated,
               bool_or(s.awaits_past) as is_past, bool_or(s.notifies) as is_told
        from unnest(p_ended) e join task_spec s on s.version_id = e.version_id and s.idx = e.idx
        group by e.run_id
    ), counted as (
        update run_status r
        set open_tasks = r.open_tasks - p.n,
            failed_leaves = r.failed_leaves + p.bad,
            finished_at = case when r.open_tasks = p.n then t else r.finished_at end,
            state = case when r.open_tasks > p.n then r.state
                         when r.cancel_requested then 'canceled'
                         when r.failed_leaves + p.bad > 0 then 'failed'
                         else 'success' end
        from per_run p
        where r.run_id = p.run_id and r.state not in ('success', 'failed', 'canceled')
        returning r.run_id, r.dag_id, r.version_id, r.state, r.retried, p.has_updated, p.is_past, p.is_told
    )
    select array_agg(distinct c.dag_id) filter (where (d.max_active_runs is not null or d.has_turns)
                                                  and c.state not in ('queued', 'running')),
           array_agg(c.run_id) filter (where case when c.state = 'failed' and d.has_run_retries then c.retried < (
               select v.run_retries from dag_version v where v.version_id = c.version_id) end),
           array_agg(c.run_id) filter (where d.is_awaited and c.state not in ('queued', 'running')),
           array_agg(c.run_id) filter (where (d.notifies or has_episodes or (has_defaults and c.state = 'failed'))
                                           and c.state not in ('queued', 'running')),
           bool_or(c.has_updated), bool_or(c.is_past), bool_or(c.is_told)
    into limited, again, closed, told, has_updated, is_past, is_told
    from counted c join dag d on d.dag_id = c.dag_id
    where c.has_updated or c.is_past or c.is_told or c.state not in ('queued', 'running');
    if again is not null then
        -- To all others it has not ended.
        closed := (select array_agg(x) from unnest(closed) x where x <> all(again));
        told := (select array_agg(x) from unnest(told) x where x <> all(again));
    end if;
    if is_past then
        perform note_past(p_ended);
    end if;
    if closed is not null or has_updated then
        perform note_arrivals(closed, p_ended);
    end if;
    if is_told or told is not null then
        perform tell_ends(case when is_told then p_ended end, told);
    end if;
    return case when again is null then 0 else retry_runs(again) end + case when limited is null then 0 else admit_runs(limited) end;
end $$;

CREATE FUNCTION evertick.count_ended(p_backfill_id integer) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    n int;
begin
    with over as (
        update backfill_run b set is_open = false
        from (select o.run_id, s.state from backfill_run o
              cross join lateral (select x.state from run_status x where x.run_id = o.run_id offset 0) s
              where o.backfill_id = p_backfill_id and o.is_open and s.state in ('success', 'failed', 'canceled')) e
        where b.run_id = e.run_id and b.is_open
        returning e.state
    ), counted as (
        select count(*) as n, count(*) filter (where o.state = 'success') as succeeded,
               count(*) filter (where o.state = 'failed') as failed, count(*) filter (where o.state = 'canceled') as canceled
        from over o
    ), noted as (
        update backfill b
        set succeeded = b.succeeded + c.succeeded, failed = b.failed + c.failed, canceled = b.canceled + c.canceled
        from counted c where b.backfill_id = p_backfill_id and c.n > 0
    )
    select c.n into n from counted c;
    -- Counted anew, not taken off: a run that was pruned before anybody counted it must not keep the backfill open.
    update backfill b set open_runs = (select count(*) from backfill_run o where o.backfill_id = p_backfill_id and o.is_open)
    where b.backfill_id = p_backfill_id;
    return n;
end $$;

CREATE FUNCTION evertick.count_instances(p_head evertick.ended, p_lists jsonb[], OUT n integer, OUT sizes integer[], OUT strides integer[], OUT instead evertick.unexpanded) RETURNS record
    LANGUAGE plpgsql STABLE
    AS $$
declare
    planned task_mapping;
    total bigint := 1;
begin
    select m.* into planned from task_mapping m where m.version_id = p_head.version_id and m.idx = p_head.idx;
    sizes := array(select jsonb_array_length(l) from unnest(p_lists) l);
    if 0 = all(sizes) or (planned.how = 'product' and 0 = any(sizes)) then
        instead := row('skipped', 'nothing to expand over: the list is empty')::unexpanded;
        return;
    elsif planned.how = 'zip' and (select count(distinct x) from unnest(sizes) x) > 1 then
        instead := row('failed', format('cannot expand lists side by side: they have %s elements', array_to_string(sizes, ', ')))::unexpanded;
        return;
    end if;
    for place in reverse cardinality(sizes) .. 1 loop
        strides := (case planned.how when 'product' then total else 1 end)::int || strides;
        total := case planned.how when 'product' then total * sizes[place] else sizes[place] end;
        if total > planned.most then
            instead := row('failed', format('expands to %s%s instances, and at most %s are allowed: give it less, or raise max_instances',
                                            case when place > 1 then 'at least ' else '' end, total, planned.most))::unexpanded;
            return;
        end if;
    end loop;
    n := total;
end $$;

CREATE FUNCTION evertick.count_passes(p_checks integer[], p_count integer) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    insert into gate_pass (gate_id, until)
    select g.gate_id, t + make_interval(secs => g.period)
    from gate g cross join generate_series(1, p_count) where g.gate_id = any(p_checks) and g.kind = 'rate';
    update gate g set used = g.used + p_count where g.gate_id = any(p_checks) and g.kind = 'rate';
end $$;

CREATE FUNCTION evertick.count_shards() RETURNS void
    LANGUAGE sql
    AS $$
    update shard s set of_shards = (select count(*) from shard x where x.state <> 'closed')
$$;

CREATE FUNCTION evertick.create_backfill(p_plan jsonb, p_request text, p_actor text, OUT id integer, OUT is_new boolean) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    insert into backfill as b (shard, dag_id, schedule_id, spec, params, first_at, last_at, reprocess, newest_first, parallel,
                               request, state, total, created_by, created_at)
    select d.shard, d.dag_id, x.schedule_id, x.spec, x.params, x.first_at, x.last_at, x.reprocess, x.newest_first, x.parallel,
           p_request, 'running', x.total, p_actor, t
    from jsonb_to_record(p_plan) as x(dag_id int, schedule_id int, spec jsonb, params jsonb, first_at timestamptz,
         last_at timestamptz, reprocess text, newest_first boolean, parallel int, total bigint)
    join dag d on d.dag_id = x.dag_id and d.deleted_at is null and d.version_id is not null
    on conflict (request) do nothing
    returning b.backfill_id into id;
    is_new := id is not null;
    if is_new then
        insert into journal (occurred_at, verb, actor, dag_id, detail)
        values (t, 'backfill', p_actor, (p_plan->>'dag_id')::int,
                (p_plan - 'spec' - 'params' - 'dag_id') || jsonb_build_object('backfill', id));
    else
        select b.backfill_id into id from backfill b where b.request = p_request;
    end if;
end $$;

CREATE FUNCTION evertick.dags_with_room(p_shard smallint) RETURNS SETOF integer
    LANGUAGE sql STABLE
    AS $$
    with recursive active as (
        (select r.dag_id from run_status r where r.state in ('queued', 'running') order by r.dag_id limit 1)
        union all
        select (select r.dag_id from run_status r where r.state in ('queued', 'running') and r.dag_id > a.dag_id
                order by r.dag_id limit 1)
        from active a where a.dag_id is not null
    )
    select d.dag_id from active a
    cross join lateral (select x.dag_id, x.max_active_runs, x.has_turns, x.awaits_past from dag x
                        where x.dag_id = a.dag_id and x.shard = p_shard and not x.paused offset 0) d
    where (select true from run_status q
           where q.dag_id = d.dag_id and q.state in ('queued', 'running') and q.state = 'queued' limit 1)
      and (((d.max_active_runs is null or d.max_active_runs > (
                select count(*) from run_status q
                where q.dag_id = d.dag_id and q.state in ('queued', 'running') and q.state = 'running'))
            and (not d.has_turns or exists (select 1 from whose_turn(d.dag_id))))
           or (d.awaits_past and exists (select 1 from waited_for(d.dag_id))))
      and not is_set_aside('dag', d.dag_id)
    limit 100
$$;

CREATE FUNCTION evertick.dead_log_objects(p_shard smallint, p_epoch bigint, p_limit integer) RETURNS TABLE(object_id uuid, run_id bigint)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
declare
    due uuid[];
begin
    perform fence(p_shard, p_epoch);
    due := array(select o.object_id from log_object o where o.look_at <= clock() order by o.look_at limit p_limit for update skip locked);
    update log_object o set look_at = null
    where o.object_id = any(due) and exists (
        select 1 from log_chunk c where c.run_id = o.run_id and c.object_id = o.object_id);
    return query select o.object_id, o.run_id from log_object o where o.object_id = any(due) and o.look_at <= clock();
end $$;

CREATE FUNCTION evertick.decide(rule evertick.trigger_rule, total integer, success integer, failed integer, upstream_failed integer, skipped integer, setup_total integer, setup_success integer, setup_skipped integer) RETURNS evertick.decision
    LANGUAGE plpgsql IMMUTABLE
    AS $$
begin
    return case when total = 0 then 'run'::decision else case rule
        when 'always' then 'run'::decision
        when 'all_success' then case
            when failed + upstream_failed > 0 then 'upstream_failed'::decision
            when skipped > 0 then 'skip'
            when success >= total then 'run' else 'wait' end
        when 'all_failed' then case
            when success + skipped > 0 then 'skip'::decision
            when failed + upstream_failed >= total then 'run' else 'wait' end
        when 'all_done' then case
            when success + failed + upstream_failed + skipped >= total then 'run'::decision else 'wait' end
        when 'all_done_min_one_success' then case
            when skipped > 0 then 'skip'::decision
            when success + failed + upstream_failed < total then 'wait'
            when success > 0 then 'run' else 'upstream_failed' end
        when 'all_done_setup_success' then case
            when success + failed + upstream_failed + skipped < total then 'wait'::decision
            when setup_total = 0 or setup_success > 0 then 'run'
            when setup_skipped >= setup_total then 'skip' else 'upstream_failed' end
        when 'one_success' then case
            when success > 0 then 'run'::decision
            when success + failed + upstream_failed + skipped < total then 'wait'
            when skipped >= total then 'skip' else 'upstream_failed' end
        when 'one_failed' then case
            when failed + upstream_failed > 0 then 'run'::decision
            when success + skipped >= total then 'skip' else 'wait' end
        when 'one_done' then case
            when success + failed > 0 then 'run'::decision
            when upstream_failed + skipped >= total then 'skip' else 'wait' end
        when 'none_failed' then case
            when failed + upstream_failed > 0 then 'upstream_failed'::decision
            when success + skipped >= total then 'run' else 'wait' end
        when 'none_failed_min_one_success' then case
            when failed + upstream_failed > 0 then 'upstream_failed'::decision
            when skipped >= total then 'skip'
            when success + skipped >= total then 'run' else 'wait' end
        when 'none_skipped' then case
            when skipped > 0 then 'skip'::decision
            when success + failed + upstream_failed >= total then 'run' else 'wait' end
        when 'all_skipped' then case
            when success + failed + upstream_failed > 0 then 'skip'::decision
            when skipped >= total then 'run' else 'wait' end
    end end;
end $$;

CREATE FUNCTION evertick.decide_approval(p_run_id bigint, p_idx integer, p_map_index integer, p_epoch integer, p_is_approved boolean, p_actor text, p_note text, p_fields jsonb) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
    rejected task_state;
    answer jsonb;
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    update approval a
    set decided_at = t, decided_by = p_actor, is_approved = p_is_approved, note = p_note, fields = p_fields
    where a.run_id = p_run_id and a.idx = p_idx and a.map_index = p_map_index and a.epoch = p_epoch and a.decided_at is null
      and exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
                  and k.state = 'deferred' and k.epoch = p_epoch);
    if not found then
        return false;
    end if;
    select w.on_reject into rejected from run_status r join task_wait w on w.version_id = r.version_id and w.idx = p_idx
    where r.run_id = p_run_id;
    answer := jsonb_build_object('by', p_actor, 'at', t, 'note', p_note, 'fields', p_fields);
    insert into journal (occurred_at, verb, actor, run_id, idx, map_index, detail)
    values (t, case when p_is_approved then 'approve' else 'reject' end, p_actor, p_run_id, p_idx, p_map_index,
            jsonb_build_object('note', p_note, 'fields', p_fields));
    perform end_waits(array[row(p_run_id, p_idx, p_map_index, p_epoch, case when p_is_approved then 'success' else rejected end,
        case when not p_is_approved then format('rejected by %s%s', p_actor, ': ' || nullif(p_note, '')) end,
        case when p_is_approved then answer end)::wait_end]);
    perform pass_gates();
    return true;
end $$;

CREATE FUNCTION evertick.decide_waiting(p_run_ids bigint[]) RETURNS evertick.ended[]
    LANGUAGE plpgsql
    AS $$
declare
    moved ended[];
    t timestamptz := clock();
begin
    with decided as (
        update task k
        set state = n.state,
            finished_at = case when n.state in ('skipped', 'upstream_failed') then t end
        from (
            select w.run_id, w.idx, w.map_index, state_after(decide(
                       s.rule, s.upstream_total + coalesce(w.n_more, 0), coalesce(w.n_success, 0), coalesce(w.n_failed, 0),
                       coalesce(w.n_upstream_failed, 0), coalesce(w.n_skipped, 0),
                       s.setup_total, coalesce(w.n_setup_success, 0), coalesce(w.n_setup_skipped, 0)),
                       s.is_gated or (s.is_mapped and w.map_index = -1)) as state
            from task w join task_spec s on s.version_id = w.version_id and s.idx = w.idx
            where w.run_id = any(p_run_ids) and w.state = 'waiting'
        ) n
        where k.run_id = n.run_id and k.idx = n.idx and k.map_index = n.map_index
          and k.state = 'waiting' and n.state <> 'waiting'
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(run_id, idx, map_index, version_id, state)::ended) into moved from decided;
    perform offer(moved);
    return array(select m from unnest(moved) m where (m).state in ('skipped', 'upstream_failed'));
end $$;

CREATE FUNCTION evertick.defer(p_tasks evertick.ended[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION evertick.delete_dag(p_dag_id integer, p_seen jsonb, p_settle jsonb, p_actor text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    perform lock_schedules(d.name) from dag d where d.dag_id = p_dag_id;
    perform refuse_moved(d.name, null, p_seen) from dag d where d.dag_id = p_dag_id;
    perform 1 from dag d where d.dag_id = p_dag_id and d.deleted_at is null for no key update;
    if not found then
        return false;
    end if;
    perform settle_schedules(p_settle, true);
    perform sync_schedules(p_dag_id, '[]', true, p_actor);
    update dag d set deleted_at = clock() where d.dag_id = p_dag_id and d.deleted_at is null;
    insert into journal (occurred_at, verb, actor, dag_id, detail) values (clock(), 'delete', p_actor, p_dag_id, '{}');
    perform pass_gates();
    return true;
end $$;

CREATE FUNCTION evertick.delete_pool(p_name text, p_actor text) RETURNS text
    LANGUAGE plpgsql
    AS $$
declare
    id int;
    is_used boolean;
    why text;
begin
    select g.gate_id, g.used > 0 into id, is_used from gate g where g.kind = 'pool' and g.name = p_name for update;
    if not found then
        return 'unknown';
    end if;
    if is_used or exists (select 1 from gate_line l where id = any(l.gate_ids)) then
        return 'used';
    end if;
    select d.name into why from task_gate x join dag d on d.version_id = x.version_id and d.deleted_at is null
    where x.kind = 'pool' and x.name = p_name limit 1;
    if found then
        return why;
    end if;
    delete from gate g where g.gate_id = id;
    insert into journal (occurred_at, verb, actor, detail)
    values (clock(), 'delete_pool', p_actor, jsonb_build_object('pool', p_name));
    return null;
end $$;

CREATE FUNCTION evertick.delete_run(p_run_id bigint, p_actor text) RETURNS text
    LANGUAGE plpgsql
    AS $$
declare
    doomed run_status;
begin
    select * into doomed from run_status r where r.run_id = p_run_id for update;
    if doomed.run_id is null then
        return null;
    end if;
    if doomed.state not in ('success', 'failed', 'canceled') then
        return 'open';
    end if;
    perform forget_runs(0::smallint, array[p_run_id]);
    insert into journal (occurred_at, verb, actor, dag_id, run_id, detail)
    values (clock(), 'delete_run', p_actor, doomed.dag_id, p_run_id, jsonb_build_object('state', doomed.state));
    return 'deleted';
end $$;

CREATE FUNCTION evertick.delete_value(p_kind text, p_name text, p_actor text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    delete from stored_value v where v.kind = p_kind and v.name = p_name;
    if not found then
        return false;
    end if;
    insert into journal (occurred_at, verb, actor, detail)
    values (clock(), 'delete_value', p_actor, jsonb_build_object('kind', p_kind, 'name', p_name));
    return true;
end $$;

CREATE FUNCTION evertick.dispatch_room(p_session bigint) RETURNS integer
    LANGUAGE sql STABLE
    AS $$
    select r.slots - (select count(*) from dispatch d where d.owner = p_session)::int
    from runner r where r.session = p_session and r.gone_at is null and r.request is null
$$;

CREATE FUNCTION evertick.end_dispatches(p_reports jsonb, p_infra_retries integer, OUT moved_sessions bigint[], OUT offered integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    ended_now ended[];
    again ended[];
    cleared ended[];
    left_now ended[];
    retried jsonb;
    t timestamptz := clock();
begin
    perform 1 from run_status s
    where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(p_reports) x))
    order by s.run_id for no key update;
    with report as materialized (
        select x.r as run_id, x.i as idx, x.m as map_index, x.e as epoch, x.s as session, x.kind, x.reason,
               coalesce(x.retry_in, 0) as retry_in, coalesce(x.no_retry, false) as no_retry
        from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, s bigint, kind text, reason text,
             retry_in double precision, no_retry boolean)
    ), decided as (
        select x.*, k.attempt, k.losses, k.request, k.version_id, s.is_gated, n.state,
               case when n.state <> 'pending' then null
                    when x.kind = 'lost'
                    then t + make_interval(secs => case k.losses when 0 then 0 else least(5 * 2 ^ (k.losses - 1), 300) end)
                    else t + make_interval(secs => greatest(x.retry_in, 0)) end as not_before
        from report x
        cross join lateral (select * from task y where y.run_id = x.run_id and y.idx = x.idx and y.map_index = x.map_index offset 0) k
        cross join lateral (select * from task_spec y where y.version_id = k.version_id and y.idx = k.idx offset 0) s
        cross join lateral (select case
            when k.request = 'mark_success' then 'success'::task_state
            when k.request = 'mark_failed' then 'failed'
            when k.request = 'mark_skipped' then 'skipped'
            when k.request in ('cancel', 'clear') then 'canceled'
            when x.kind = 'given_back' then 'pending'
            when x.kind = 'lost' then
                case when s.rerun_on_loss and k.losses < p_infra_retries then 'pending'::task_state else 'failed' end
            when x.no_retry or k.attempt >= s.max_attempts then 'failed'
            else 'pending' end as state) n
    ), moved as (
        update task k
        set state = d.state,
            attempt = case when d.kind in ('given_back', 'lost') and d.state = 'pending' then d.attempt - 1 else d.attempt end,
            losses = case when d.kind = 'lost' then d.losses + 1 else d.losses end,
            session = case when d.state = 'pending' and d.kind in ('given_back', 'lost') then null else d.session end,
            request = null,
            not_before = case when d.not_before > t then d.not_before end,
            finished_at = case when d.state <> 'pending' then t end,
            reason = case when d.request is null or d.state = 'canceled' then d.reason end
        from decided d
        where k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index
          and k.state = 'queued' and k.epoch = d.epoch and k.session = d.session
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, k.not_before, d.session, d.kind, d.reason,
                  d.request, d.attempt, d.is_gated, k.let_in_at, k.taken_at
    ), unlisted as (
        delete from dispatch w where w.ctid = any(array(
            select h.ctid from moved m cross join lateral (
                select y.ctid from dispatch y where y.run_id = m.run_id and y.idx = m.idx and y.map_index = m.map_index
                  and y.epoch = m.epoch and y.session = m.session offset 0) h))
    )
    select array_agg(m.session),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended)
               filter (where m.state <> 'pending' and m.request is distinct from 'clear'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended)
               filter (where m.state = 'pending' and m.not_before is null),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) filter (where m.request = 'clear'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) filter (where m.is_gated),
           jsonb_agg(to_jsonb(m)) filter (where m.state = 'pending')
    into moved_sessions, ended_now, again, cleared, left_now, retried from moved m;
    if left_now is not null then
        perform leave_gates(left_now);
    end if;
    if retried is not null then
        perform remember(null, retried);
    end if;
    offered := settle(ended_now);
    if again is not null then
        offered := offered + release(again);
    end if;
    if cleared is not null then
        offered := offered + reopen(cleared);
    end if;
end $$;

CREATE FUNCTION evertick.end_moves(p_shard smallint, p_epoch bigint, p_now timestamp with time zone, OUT is_over boolean, OUT is_closed boolean) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    is_closed := false;
    perform pg_advisory_xact_lock(4714, 0);
    update shard s set moves_since = null
    where s.shard = p_shard and s.epoch = p_epoch and s.moves_since < p_now - interval '1 minute';
    is_over := found;
    if is_over then
        update shard s set state = 'closed', epoch = s.epoch + 1, lease_until = null, owner = null, is_watched = false
        where s.shard = p_shard and s.epoch = p_epoch and s.state = 'leaving';
        is_closed := found;
    end if;
    if is_closed then
        perform count_shards();
    end if;
end $$;

CREATE FUNCTION evertick.end_queued(p_reports jsonb, p_infra_retries integer, OUT moved_sessions bigint[], OUT offered integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    select e.moved_sessions, e.offered into moved_sessions, offered from end_dispatches(p_reports, p_infra_retries) e;
    offered := offered + pass_gates();
end $$;

CREATE FUNCTION evertick.end_waits(p_ends evertick.wait_end[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    over ended[];
begin
    delete from deferral d using unnest(p_ends) e
    where d.run_id = e.run_id and d.idx = e.idx and d.map_index = e.map_index and d.epoch = e.epoch;
    with moved as (
        update task k set state = e.state, finished_at = clock(), reason = e.reason
        from unnest(p_ends) e
        where k.run_id = e.run_id and k.idx = e.idx and k.map_index = e.map_index and k.state = 'deferred' and k.epoch = e.epoch
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, e.result
    ), kept as (
        insert into result (run_id, idx, map_index, epoch, value)
        select m.run_id, m.idx, m.map_index, m.epoch, m.result from moved m where m.result is not null
        on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into over from moved m;
    if over is not null then
        perform leave_gates(over);   -- of a poll that stands on an ordered key
        perform settle(over);
    end if;
end $$;

CREATE FUNCTION evertick.enter_gates(p_tasks evertick.ended[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    if coalesce(cardinality(p_tasks), 0) > 0 then
        perform set_config('evertick.entering', (
            coalesce(nullif(current_setting('evertick.entering', true), ''), '{}')::ended[] || p_tasks)::text, true);
    end if;
end $$;

CREATE FUNCTION evertick.examine_run(p_run_id bigint, p_in_line integer) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
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
    select d.paused into is_paused from dag d where d.dag_id = status.dag_id;
    select count(*) filter (where k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed'))::int as ended,
           count(*) filter (where s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed'))::int as bad,
           count(*) filter (where k.state in ('pending', 'available', 'queued', 'running', 'deferred'))::int as moving,
           count(*) filter (where k.state = 'available')::int as available,
           count(*) filter (where k.state = 'waiting')::int as waiting
    into seen
    from task k
    left join lateral (select x.is_leaf from task_spec x where x.version_id = k.version_id and x.idx = k.idx offset 0) s on true
    where k.run_id = p_run_id;
    if seen.ended >= planned or (planned - seen.ended, seen.bad) <> (status.open_tasks, status.failed_leaves)
       or seen.available > p_in_line then
        return 'drifted';
    end if;
    if exists (
        -- running without a lease, queued and on nobody's list, or pending for a time that nobody watches, or for nothing
        select 1 from task k
        where k.run_id = p_run_id and case k.state
            when 'running' then not exists (
                select 1 from lease l where l.session = k.session and l.run_id = k.run_id and l.idx = k.idx and l.map_index = k.map_index)
            when 'queued' then not exists (
                select 1 from dispatch w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index and w.epoch = k.epoch)
            when 'pending' then case when k.not_before is null then not is_paused and not exists (
                select 1 from gate_wait w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index)
                                     else not is_timed(k) end
            when 'deferred' then not exists (
                select 1 from deferral w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index)
            else false end)
       or exists (
        -- without one of its first tasks
        select 1 from task_spec s where s.version_id = status.version_id and s.starts_at_once
        and (select true from task k where k.run_id = p_run_id and k.idx = s.idx limit 1) is null)
       or exists (
        -- an end that was not counted, so that what follows has no row at all
        select 1 from task k
        cross join lateral (select x.dst, x.out_of from edge x where x.version_id = status.version_id and x.src = k.idx offset 0) g
        where k.run_id = p_run_id and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
          and (g.out_of is null or is_over(p_run_id, status.version_id, g.out_of))
          and (select true from task n where n.run_id = p_run_id and n.idx = g.dst limit 1) is null)
       or exists (select 1 from groups_that_drifted(p_run_id))
       or (seen.waiting > 0 and exists (
        -- counted wrongly, or counted and not decided
        select 1 from upstream_of(p_run_id, null) u
        cross join lateral (select * from task x where x.run_id = p_run_id and x.idx = u.idx and x.map_index = u.map_index offset 0) w
        cross join lateral (select * from task_spec x where x.version_id = w.version_id and x.idx = w.idx offset 0) s
        where (coalesce(w.n_success, 0), coalesce(w.n_failed, 0), coalesce(w.n_upstream_failed, 0), coalesce(w.n_skipped, 0),
               coalesce(w.n_setup_success, 0), coalesce(w.n_setup_skipped, 0), coalesce(w.n_more, 0))
              is distinct from (u.success, u.failed, u.upstream_failed, u.skipped, u.setup_success, u.setup_skipped, u.more)
           or decide(s.rule, s.upstream_total + u.more, u.success, u.failed, u.upstream_failed, u.skipped, s.setup_total,
                     u.setup_success, u.setup_skipped) <> 'wait')) then
        return 'drifted';
    end if;
    return case when seen.moving = 0 then 'stuck' else 'sound' end;
end $$;

CREATE FUNCTION evertick.expand(p_head evertick.ended) RETURNS evertick.ended[]
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'on'
    AS $$
declare
    head task;
    given record;
    counted record;
    why unexpanded;
    made ended[];
begin
    select k.* into head from task k
    where k.run_id = p_head.run_id and k.idx = p_head.idx and k.map_index = -1 and k.state = 'pending' and k.not_before is null;
    if not found then
        return null;
    end if;
    select l.lists, l.instead into given from lists_of(p_head) l;
    why := given.instead;
    if why.state is null then
        select c.* into counted from count_instances(p_head, given.lists) c;
        why := counted.instead;
    end if;
    if why.state is not null then
        update task k set state = why.state, reason = why.reason, finished_at = clock()
        where k.run_id = p_head.run_id and k.idx = p_head.idx and k.map_index = -1 and k.state = 'pending';
        return array[row(p_head.run_id, p_head.idx, -1, p_head.version_id, why.state)::ended];
    end if;
    delete from task k where k.run_id = p_head.run_id and k.idx = p_head.idx and k.map_index = -1 and k.state = 'pending';
    insert into map_item (run_id, idx, map_index, item)
    select p_head.run_id, p_head.idx, i, jsonb_agg(e.value order by l.place)
    from generate_series(0, counted.n - 1) i
    cross join unnest(counted.sizes, counted.strides) with ordinality l(size, stride, place)
    join (select x.place, e.value, e.place - 1 as spot
          from unnest(given.lists) with ordinality x(list, place)
          cross join jsonb_array_elements(x.list) with ordinality e(value, place)) e
      on e.place = l.place and e.spot = (i / l.stride) % l.size
    group by i;
    with entering as (
        insert into task (run_id, idx, map_index, version_id, state, epoch)
        select p_head.run_id, p_head.idx, i, p_head.version_id,
               case when s.is_gated or d.paused then 'pending'::task_state else 'available' end, head.epoch
        from generate_series(0, counted.n - 1) i, task_spec s, run_status r, dag d
        where s.version_id = p_head.version_id and s.idx = p_head.idx and r.run_id = p_head.run_id and d.dag_id = r.dag_id
        returning run_id, idx, map_index, version_id, state
    )
    select array_agg(row(e.run_id, e.idx, e.map_index, e.version_id, e.state)::ended order by e.map_index) into made from entering e;
    update run_status r set open_tasks = r.open_tasks + counted.n - 1, extra_tasks = r.extra_tasks + counted.n - 1
    where r.run_id = p_head.run_id and r.state = 'running';
    if counted.n > 1 then
        insert into run_group as g (run_id, grp, more)
        select p_head.run_id, s.grp, counted.n - 1 from task_spec s
        where s.version_id = p_head.version_id and s.idx = p_head.idx and s.grp is not null
        on conflict (run_id, grp) do update set more = g.more + excluded.more;
        insert into task as k (run_id, idx, version_id, state, n_more)
        select p_head.run_id, g.dst, p_head.version_id, 'waiting', counted.n - 1
        from edge g join task_spec s on s.version_id = g.version_id and s.idx = g.dst
        where g.version_id = p_head.version_id and g.src = p_head.idx and not (s.is_mapped and has_instances(p_head.run_id, g.dst))
        order by g.dst
        on conflict (run_id, idx, map_index) do update set n_more = coalesce(k.n_more, 0) + excluded.n_more
            where k.state = 'waiting';
    end if;
    return made;
end $$;

CREATE FUNCTION evertick.expand_all(p_heads evertick.ended[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    head ended;
    made ended[];
    offered int := 0;
begin
    foreach head in array p_heads loop
        made := expand(head);
        if made[1].map_index = -1 then
            offered := offered + settle(made);
        else
            offered := offered + offer(made);
        end if;
    end loop;
    return offered;
end $$;

CREATE FUNCTION evertick.extend(p_session bigint, p_held jsonb) RETURNS TABLE(kind text, run_id bigint, idx integer, map_index integer, epoch integer)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
declare
    asked text;
begin
    update runner set beat = beat + 1, beat_at = clock() where session = p_session and gone_at is null
    returning request into asked;
    if not found then
        return query select 'gone', null::bigint, null::int, null::int, null::int;
    elsif asked is not null then
        return query select asked, null::bigint, null::int, null::int, null::int;
    end if;
    return query
    with held as (
        select (x->>0)::bigint as run_id, (x->>1)::int as idx, (x->>2)::int as map_index, (x->>3)::int as epoch
        from jsonb_array_elements(p_held) x
    )
    select case when l.run_id is null then 'lost' when h.run_id is null then 'unknown' else 'stop' end,
           coalesce(h.run_id, l.run_id), coalesce(h.idx, l.idx), coalesce(h.map_index, l.map_index),
           coalesce(h.epoch, l.epoch)
    from held h
    full join (select * from lease where session = p_session) l
      on l.run_id = h.run_id and l.idx = h.idx and l.map_index = h.map_index and l.epoch = h.epoch
    left join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
    where l.run_id is null or h.run_id is null or k.request is not null;
end $$;

CREATE FUNCTION evertick.fail_backfill(p_shard smallint, p_epoch bigint, p_backfill_id integer, p_reason text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    update backfill b set state = 'failed', finished_at = clock(), reason = left(p_reason, 2000)
    where b.backfill_id = p_backfill_id and b.shard = p_shard and b.state = 'running';
    return found;
end $$;

CREATE TABLE evertick.ready (
    queue text NOT NULL,
    rank smallint NOT NULL,
    seq bigint NOT NULL,
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    expires_at timestamp with time zone,
    offered_at timestamp with time zone DEFAULT evertick.clock() NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000', vacuum_truncate=off);

CREATE FUNCTION evertick.fail_waits(p_late evertick.ready[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    over ended[];
begin
    with expired as (
        delete from ready q where q.ctid = any(array(
            select h.place from unnest(p_late) p cross join lateral (
                select x.ctid as place from ready x
                where x.queue = p.queue and x.rank = p.rank and x.seq = p.seq for update skip locked) h))
        returning q.run_id, q.idx, q.map_index, q.queue
    ), placed as (
        select h.place, e.queue from expired e cross join lateral (
            select k.ctid as place from task k where k.run_id = e.run_id and k.idx = e.idx and k.map_index = e.map_index offset 0) h
    ), moved as (
        update task k
        set state = 'failed', finished_at = clock(),
            reason = format('queue_timeout: no runner of queue %s took it within %s s', p.queue,
                            (select s.queue_timeout from task_spec s where s.version_id = k.version_id and s.idx = k.idx))
        from placed p
        where k.ctid = p.place and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into over from moved m;
    perform leave_gates(over);
    perform settle(over);
    return coalesce(cardinality(over), 0);
end $$;

CREATE FUNCTION evertick.fence(p_shard smallint, p_epoch bigint) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    perform pg_advisory_xact_lock_shared(4711, p_shard);
    perform 1 from shard where shard = p_shard and epoch = p_epoch;
    if not found then
        raise exception 'not the leader of shard %: epoch % is over', p_shard, p_epoch using errcode = 'EV001';
    end if;
end $$;

CREATE FUNCTION evertick.fingerprint(p_run_id bigint) RETURNS text
    LANGUAGE sql STABLE
    AS $$
    select concat_ws(' ', r.open_tasks, count(k.*), sum(k.epoch), max(k.finished_at),
                     (select max(j.entry_id) from journal j where j.run_id = p_run_id and j.verb <> 'quarantine'))
    from run_status r left join task k on k.run_id = r.run_id where r.run_id = p_run_id group by r.open_tasks
$$;

CREATE FUNCTION evertick.finish(p_session bigint, p_reports jsonb, p_infra_retries integer, p_unchosen evertick.ended[] DEFAULT NULL::evertick.ended[], OUT refused evertick.ended[], OUT offered integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    moved_now ended[];
    ended_now ended[];
    again ended[];
    cleared ended[];
    retried jsonb;
    polled jsonb;
    left_now ended[];
    t timestamptz := clock();
begin
    perform 1 from run_status s
    where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(p_reports) x))
    order by s.run_id for no key update;
    with report as materialized (
        select * from read_reports(p_reports)
    ), decided as (
        select x.*, k.attempt, k.losses, k.started_at, k.request, k.version_id, s.is_gated,
               case when n.state = 'pending' and x.kind = 'lost'
                    then t + make_interval(secs => case k.losses when 0 then 0 else least(5 * 2 ^ (k.losses - 1), 300) end)
                    when n.state = 'pending' then t + make_interval(secs => greatest(coalesce(x.retry_in, 0), 0))
               end as not_before,
               n.state
        from report x
        join task k on k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
        join task_spec s on s.version_id = k.version_id and s.idx = k.idx
        cross join lateral (select case
            when k.request = 'mark_success' then 'success'::task_state
            when k.request = 'mark_failed' then 'failed'
            when k.request = 'mark_skipped' then 'skipped'
            when x.kind = 'success' then 'success'
            when x.kind = 'skipped' then 'skipped'
            when k.request in ('cancel', 'clear') then 'canceled'
            when x.kind = 'deferred' then 'deferred'
            when x.kind = 'given_back' then 'pending'
            when x.kind = 'lost' then
                case when s.rerun_on_loss and k.losses < p_infra_retries then 'pending'::task_state else 'failed' end
            when x.no_retry or k.attempt >= s.max_attempts then 'failed'
            else 'pending' end as state) n
    ), freed as (
        delete from lease l where l.ctid = any(array(
            select h.ctid from report x cross join lateral (
                select y.ctid from lease y
                where y.session = p_session and y.run_id = x.run_id and y.idx = x.idx and y.map_index = x.map_index
                  and y.epoch = x.epoch offset 0) h))
    ), moved as (
        update task k
        set state = d.state,
            -- what was given back or lost never came from the user's own retries
            attempt = case when d.kind in ('given_back', 'lost') and d.state = 'pending' then d.attempt - 1
                           when d.state = 'deferred' then 0   -- it went well: errors are counted anew
                           else d.attempt end,
            losses = case when d.kind = 'lost' then d.losses + 1 else d.losses end,
            session = case when d.kind in ('given_back', 'lost') then null else p_session end,
            request = null,
            not_before = case when d.not_before > t then d.not_before end,
            start_seconds = d.start_in,
            finished_at = case when d.state not in ('pending', 'deferred') then t end,
            exit_code = d.exit_code,
            reason = case when d.request is null or d.state = 'canceled' or d.kind in ('failed', 'timed_out', 'lost')
                          then d.reason end
        from decided d
        where k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index
          and k.state = 'running' and k.epoch = d.epoch and k.session = p_session
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, k.not_before, d.kind, d.reason,
                  d.result, d.request, d.exit_code, d.attempt, d.started_at, d.log, d.seq, d.until, d.is_gated,
                  k.let_in_at, k.taken_at, k.start_seconds
    ), kept as (
        insert into result (run_id, idx, map_index, epoch, value)
        select m.run_id, m.idx, m.map_index, m.epoch, m.result from moved m
        where m.state = 'success' and m.result is not null
        on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value
    ), logged as (
        insert into log_chunk (run_id, idx, map_index, epoch, seq, until, content)
        select m.run_id, m.idx, m.map_index, m.epoch, m.seq, m.until, m.log from moved m where m.log is not null
        on conflict (run_id, idx, map_index, epoch, seq) do nothing
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended)
               filter (where m.state not in ('pending', 'deferred') and m.request is distinct from 'clear'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended)
               filter (where m.state = 'pending' and m.not_before is null),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) filter (where m.request = 'clear'),
           jsonb_agg(to_jsonb(m) - array['result', 'log']) filter (where m.state = 'pending'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) filter (where m.is_gated),
           jsonb_agg(to_jsonb(m) - 'log') filter (where m.state = 'deferred')
    into moved_now, ended_now, again, cleared, retried, left_now, polled from moved m;
    if left_now is not null then
        perform leave_gates(left_now);
    end if;
    if retried is not null then
        perform remember(p_session, retried);
    end if;
    if polled is not null then
        perform note_polls(polled);
    end if;
    if coalesce(cardinality(moved_now), 0) < jsonb_array_length(p_reports) then
        select array_agg(row(x.run_id, x.idx, x.map_index, x.epoch, 'failed')::ended) into refused
        from read_reports(p_reports) x
        where not exists (select 1 from unnest(moved_now) m
                          where m.run_id = x.run_id and m.idx = x.idx and m.map_index = x.map_index)
          and not exists (select 1 from task k where k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
                          and k.epoch = x.epoch and k.session = p_session and k.state <> 'running');
    end if;
    offered := settle(ended_now || p_unchosen);
    if again is not null then
        offered := offered + release(again);
    end if;
    if cleared is not null then
        offered := offered + reopen(cleared);
    end if;
end $$;

CREATE FUNCTION evertick.finish_attempt(p_session bigint, p_reports jsonb, p_infra_retries integer) RETURNS SETOF evertick.step_row
    LANGUAGE plpgsql
    AS $$
begin
    return query select * from step(p_session, p_reports, p_infra_retries, '{}', 0, null, null);
    update runner r set gone_at = clock(), gone_reason = 'finished'
    where r.session = p_session and r.gone_at is null and not exists (select 1 from lease l where l.session = p_session);
end $$;

CREATE FUNCTION evertick.fire(p_shard smallint, p_epoch bigint, p_plans jsonb) RETURNS evertick.settled
    LANGUAGE plpgsql
    AS $$
declare
    free int[];
    done settled;
begin
    perform fence(p_shard, p_epoch);
    free := array(
        select s.schedule_id from schedule_state s
        where s.schedule_id = any(array(select (x->>'schedule_id')::int from jsonb_array_elements(p_plans) x))
          and (s.next_due > clock()) is not true and s.shard = p_shard   -- one that has moved is its new leader's
        order by s.schedule_id for no key update skip locked);
    if cardinality(free) < jsonb_array_length(p_plans) then
        p_plans := (select coalesce(jsonb_agg(x), '[]') from jsonb_array_elements(p_plans) x
                    where (x->>'schedule_id')::int = any(free));
    end if;
    done := settle_locked(p_plans, false);
    perform pass_gates();
    return done;
end $$;

CREATE FUNCTION evertick.first_wait(p_run_id bigint, p_idx integer, p_map_index integer, p_version_id integer, p_since timestamp with time zone, p_now timestamp with time zone, OUT kind evertick.wait_kind, OUT key text, OUT wake_at timestamp with time zone, OUT deadline timestamp with time zone) RETURNS record
    LANGUAGE plpgsql STABLE
    AS $$
declare
    spec task_wait;
begin
    select w.* into spec from task_wait w where w.version_id = p_version_id and w.idx = p_idx;
    if not found then
        wake_at := p_now;
        select 'start', p_since + make_interval(secs => c.timeout) into kind, deadline
        from task_child c where c.version_id = p_version_id and c.idx = p_idx;
        kind := coalesce(kind, 'poll');
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
            deadline := (select q.deadline from poll q where q.run_id = p_run_id and q.idx = p_idx and q.map_index = p_map_index);
            wake_at := p_now;
        else
            wake_at := p_now;
    end case;
end $$;

CREATE FUNCTION evertick.fits_in(p_gate_ids integer[], p_weights integer[], p_checks integer[], p_needs bigint[]) RETURNS integer
    LANGUAGE sql STABLE
    AS $$
    select least(
        (select min(greatest(g.capacity - g.used, 0) / n.weight)
         from unnest(p_gate_ids, p_weights) as n(gate_id, weight)
         cross join lateral (select x.capacity, x.used from gate x where x.gate_id = n.gate_id offset 0) g),
        case when p_checks <> '{}' then (
            select min(case when n.need > room_at(n.gate_id) then 0 when g.kind = 'rate' then room_at(n.gate_id) end)
            from unnest(p_checks, p_needs) as n(gate_id, need)
            cross join lateral (select x.kind from gate x where x.gate_id = n.gate_id offset 0) g) end)
$$;

CREATE FUNCTION evertick.fold_instances(p_tasks evertick.ended[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    one record;
begin
    for one in
        select distinct p.run_id, p.idx, p.version_id from unnest(p_tasks) p
        where p.map_index >= 0 and not exists (
            select 1 from task k where k.run_id = p.run_id and k.idx = p.idx and k.state <> 'waiting')
        order by p.run_id, p.idx
    loop
        delete from task k where k.run_id = one.run_id and k.idx = one.idx and k.map_index >= 0 and k.state = 'waiting';
        delete from map_item m where m.run_id = one.run_id and m.idx = one.idx;
        insert into task (run_id, idx, version_id, state, epoch)
        select one.run_id, one.idx, one.version_id, 'waiting', coalesce(max(a.epoch), 0)
        from attempt a where a.run_id = one.run_id and a.idx = one.idx
        on conflict (run_id, idx, map_index) do nothing;
    end loop;
end $$;

CREATE FUNCTION evertick.fold_unready(p_tasks evertick.ended[]) RETURNS evertick.ended[]
    LANGUAGE plpgsql
    AS $$
declare
    frontier ended[] := p_tasks;
    one record;
    everything ended[] := '{}';
    taken ended[];
begin
    while cardinality(frontier) > 0 loop
        taken := '{}';
        for one in
            select c.run_id, array_agg(c.idx) as idxs from (
                select p.run_id, p.version_id, p.idx from unnest(frontier) p
                union
                select p.run_id, p.version_id, g.dst from unnest(frontier) p join edge g on g.version_id = p.version_id and g.src = p.idx
            ) c
            where exists (select 1 from task k where k.run_id = c.run_id and k.idx = c.idx and k.map_index >= 0 and k.state = 'waiting')
              and exists (
                select 1 from edge g
                left join task u on u.run_id = c.run_id and u.idx = g.src
                where g.version_id = c.version_id and g.dst = c.idx
                  and (coalesce(u.state, 'waiting') not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
                       or not (g.out_of is null or is_over(c.run_id, c.version_id, g.out_of))))
            group by c.run_id order by c.run_id
        loop
            taken := taken || take_back_instances(one.run_id, one.idxs);
        end loop;
        everything := everything || taken;
        frontier := taken;
    end loop;
    return everything;
end $$;

CREATE FUNCTION evertick.forget_dispatches(p_sessions bigint[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    forgotten int;
begin
    with over as (
        select d.ctid as place from unnest(p_sessions) s(session)
        cross join lateral (select x.*, x.ctid from dispatch x where x.session = s.session offset 0) d
        left join lateral (
            select true as is_current from task k
            where k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index and k.epoch = d.epoch
              and k.session = d.session and k.state in ('queued', 'running') offset 0) k on true
        where k.is_current is null
    )
    delete from dispatch d where d.ctid = any(array(select o.place from over o));
    get diagnostics forgotten = row_count;
    return forgotten;
end $$;

CREATE FUNCTION evertick.forget_log_objects(p_shard smallint, p_epoch bigint, p_object_ids uuid[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    delete from log_object o where o.object_id = any(p_object_ids) and o.look_at <= clock();
end $$;

CREATE FUNCTION evertick.forget_runs(p_shard smallint, p_doomed bigint[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    awaited int[];
begin
    insert into remains (shard, kind, id) select p_shard, 'run', d from unnest(p_doomed) d;
    -- Who waited for one of them waits for nothing now (is_past_over): the leader lets them in.
    awaited := array(select g.gate_id from gate g where g.kind = 'past' and split_part(g.name, '/', 1)::bigint = any(p_doomed)
                     order by g.gate_id for no key update);
    update gate g set is_behind = true where g.gate_id = any(awaited);
    delete from run_status r where r.run_id = any(p_doomed);
    delete from backfill_run b where b.run_id = any(p_doomed);
    delete from moved_run m where m.run_id = any(p_doomed);
    delete from run r where r.run_id = any(p_doomed);
end $$;

CREATE FUNCTION evertick.gate_name(p_parts jsonb, p_run_id bigint) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
declare
    given jsonb := (select r.params from run r where r.run_id = p_run_id);
    name text;
begin
    select string_agg(case jsonb_typeof(x.part)
                          when 'string' then x.part #>> '{}'
                          else coalesce(given #>> array(select jsonb_array_elements_text(x.part)), 'null') end,
                      '' order by x.place)
    into name from jsonb_array_elements(p_parts) with ordinality as x(part, place);
    return case when length(name) > 400 then left(name, 300) || '…' || md5(name) else name end;
end $$;

CREATE FUNCTION evertick.groups_that_drifted(p_run_id bigint) RETURNS TABLE(grp integer, ended integer, more integer)
    LANGUAGE sql STABLE
    AS $$
    select w.grp, c.ended, c.more
    from run_status r
    join retry_group w on w.version_id = r.version_id
    cross join lateral (
        select count(*) filter (where k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed'))::int as ended,
               (count(k.idx) - count(distinct k.idx))::int as more
        from unnest(w.members) m(idx)
        cross join lateral (select x.idx, x.state from task x where x.run_id = p_run_id and x.idx = m.idx offset 0) k) c
    left join run_group g on g.run_id = r.run_id and g.grp = w.grp
    where r.run_id = p_run_id and (coalesce(g.ended, 0), coalesce(g.more, 0)) <> (c.ended, c.more)
$$;

CREATE FUNCTION evertick.has_claimed_since(p_session bigint, p_seconds double precision) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (
        select 1 from lease l join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
        where l.session = p_session and k.started_at > clock() - make_interval(secs => p_seconds)
          -- a start in the future is that of a clock that was set back, and proves nothing
          and k.started_at <= clock())
$$;

CREATE TABLE evertick.alert (
    alert_id bigint NOT NULL,
    kind text NOT NULL,
    schedule_id integer NOT NULL,
    task text DEFAULT ''::text NOT NULL,
    run_id bigint,
    due_at timestamp with time zone NOT NULL,
    last_due_at timestamp with time zone NOT NULL,
    count integer DEFAULT 1 NOT NULL,
    raised_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone,
    CONSTRAINT alert_kind_check CHECK ((kind = ANY (ARRAY['not_fired'::text, 'not_started'::text, 'not_finished'::text])))
);

CREATE FUNCTION evertick.has_deadline(a evertick.alert) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (
        select 1 from schedule c where c.schedule_id = a.schedule_id and c.deleted_at is null and case
            when a.task <> '' then exists (
                select 1 from dag d join task_deadline x on x.version_id = d.version_id
                join task_spec s on s.version_id = x.version_id and s.idx = x.idx
                where d.dag_id = c.dag_id and s.name = a.task)
            when a.kind = 'not_started' then c.start_within is not null
            else c.finish_within is not null end)
$$;

CREATE FUNCTION evertick.has_instances(p_run_id bigint, p_idx integer) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index >= 0)
$$;

CREATE FUNCTION evertick.hear_arrivals(p_shard smallint, p_epoch bigint, p_limit integer, OUT became_due integer, OUT has_more boolean) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    taken jsonb;
    concerned int[];
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    with gone as (
        delete from arrival a where a.arrival_id = any(array(
            select x.arrival_id from arrival x order by x.arrival_id limit p_limit for update skip locked))
        returning a.*
    )
    select jsonb_agg(to_jsonb(g) order by g.arrival_id), count(*) = p_limit into taken, has_more from gone g;
    concerned := array(
        select distinct w.schedule_id from jsonb_to_recordset(coalesce(taken, '[]')) as x(kind text, name text)
        cross join lateral (select y.schedule_id from awaited y where y.kind = x.kind and y.name = x.name offset 0) w);
    became_due := 0;
    if cardinality(concerned) = 0 then
        return;
    end if;
    perform 1 from schedule_state s where s.schedule_id = any(concerned) order by s.schedule_id for no key update;
    insert into heard as h (schedule_id, kind, name, run_id, occurred_at, update_id)
    select distinct on (w.schedule_id, x.kind, x.name) w.schedule_id, x.kind, x.name, x.run_id, x.occurred_at, x.update_id
    from jsonb_to_recordset(taken)
        as x(arrival_id bigint, kind text, name text, run_id bigint, occurred_at timestamptz, update_id bigint)
    cross join lateral (select y.schedule_id from awaited y where y.kind = x.kind and y.name = x.name offset 0) w
    order by w.schedule_id, x.kind, x.name, x.arrival_id desc
    on conflict (schedule_id, kind, name) do update
        set run_id = excluded.run_id, occurred_at = excluded.occurred_at, update_id = excluded.update_id;
    with met as (
        select s.schedule_id, s.next_due, greatest(t, s.last_fired + interval '1 microsecond') as due
        from unnest(concerned) n(id)
        cross join lateral (select * from schedule_state y where y.schedule_id = n.id offset 0) s
        cross join lateral (select * from schedule y where y.schedule_id = n.id and y.deleted_at is null offset 0) c
        where is_met((c.spec->>'after')::jsonb, array(
            select h.kind || ':' || h.name from heard h where h.schedule_id = n.id))
    ), moved as (
        update schedule_state s set next_due = m.due from met m
        where s.schedule_id = m.schedule_id and s.next_due is null
        returning s.schedule_id
    ), told as (
        delete from heard h using met m where h.schedule_id = m.schedule_id
        returning h.*, coalesce(m.next_due, m.due) as fire_at
    ), written as (
        insert into cause (schedule_id, fire_at, kind, name, run_id, occurred_at, update_id)
        select d.schedule_id, d.fire_at, d.kind, d.name, d.run_id, d.occurred_at, d.update_id from told d
        on conflict (schedule_id, fire_at, kind, name) do update
            set run_id = excluded.run_id, occurred_at = excluded.occurred_at, update_id = excluded.update_id
    )
    select count(*) into became_due from moved;
end $$;

CREATE FUNCTION evertick.hear_events(p_limit integer) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    come record;
    t timestamptz := clock();
begin
    for come in select e.event_id, e.name from event e where not e.is_heard order by e.event_id limit p_limit loop
        update deferral d set wake_at = t where d.ctid = any(array(
            select x.ctid from deferral x where x.key = 'event:' || come.name and x.wake_at > t limit p_limit for update skip locked));
        if not exists (select 1 from deferral x where x.key = 'event:' || come.name and x.wake_at > t) then
            update event e set is_heard = true where e.event_id = come.event_id and not e.is_heard;
        end if;
    end loop;
end $$;

CREATE FUNCTION evertick.hold_dag(p_dag_id integer) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    held ended[];
begin
    perform 1 from run_status r where r.dag_id = p_dag_id and r.state = 'running' order by r.run_id for no key update;
    perform quit_lines(array(select r.run_id from run_status r where r.dag_id = p_dag_id and r.state = 'running'), null);
    -- The lines are walked over once: looked for run by run, a long line is read as often as there are runs.
    delete from ready q where q.ctid = any(array(
        select x.ctid from ready x
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
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into held from moved m;
    perform leave_gates(held);
    return coalesce(cardinality(held), 0);
end $$;

CREATE FUNCTION evertick.holders_of(p_gate_id integer, p_limit integer) RETURNS jsonb
    LANGUAGE sql STABLE
    AS $$
    select coalesce(jsonb_agg(jsonb_build_object('run_id', x.run_id, 'dag', x.dag, 'task', x.task, 'state', x.state,
                                                 'weight', x.weight, 'since', x.since) order by x.since, x.run_id, x.idx), '[]')
    from (
        select h.run_id, h.idx, d.name as dag, s.name as task, k.state, n.weight, h.since
        from gate_hold h
        cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight)
        join task k on k.run_id = h.run_id and k.idx = h.idx and k.map_index = h.map_index
        join task_spec s on s.version_id = k.version_id and s.idx = k.idx
        join run r on r.run_id = h.run_id join dag d on d.dag_id = r.dag_id
        where n.gate_id = p_gate_id order by h.since, h.run_id, h.idx limit p_limit) x
$$;

CREATE FUNCTION evertick.holds_gates(p_run_id bigint, p_idx integer, p_map_index integer) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
                   and k.state in ('available', 'queued', 'running'))
$$;

CREATE FUNCTION evertick.home_of(p_run_id bigint) RETURNS smallint
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return coalesce((select d.shard from run_status r join dag d on d.dag_id = r.dag_id where r.run_id = p_run_id), 0);
end $$;

CREATE FUNCTION evertick.inputs_of(p_run_id bigint, p_version_id integer, p_idx integer, p_map_index integer) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
begin
    if p_map_index >= 0 then
        return inputs_of_instance(p_run_id, p_version_id, p_idx, p_map_index);
    end if;
    return (
        select jsonb_object_agg(s.name, case when s.is_mapped then results_of(p_run_id, i.src) else v.value end)::text
        from task_input i
        join task_spec s on s.version_id = i.version_id and s.idx = i.src
        left join result v on v.run_id = p_run_id and v.idx = i.src and v.map_index = -1
        where i.version_id = p_version_id and i.idx = p_idx);
end $$;

CREATE FUNCTION evertick.inputs_of_instance(p_run_id bigint, p_version_id integer, p_idx integer, p_map_index integer) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return (
        select coalesce(jsonb_object_agg(s.name, case when s.is_mapped then results_of(p_run_id, i.src) else v.value end), '{}')
        from task_input i
        join task_spec s on s.version_id = i.version_id and s.idx = i.src
        left join result v on v.run_id = p_run_id and v.idx = i.src and v.map_index = -1
        where i.version_id = p_version_id and i.idx = p_idx
    ) || jsonb_build_object('', (
        select m.item from map_item m where m.run_id = p_run_id and m.idx = p_idx and m.map_index = p_map_index));
end $$;

CREATE TABLE evertick.shard (
    shard smallint NOT NULL,
    epoch bigint NOT NULL,
    owner text,
    lease_until timestamp with time zone,
    is_watched boolean DEFAULT false NOT NULL,
    led_since timestamp with time zone,
    state text DEFAULT 'open'::text NOT NULL,
    of_shards smallint DEFAULT 1 NOT NULL,
    chosen_at timestamp with time zone,
    moves_since timestamp with time zone,
    heir text,
    heir_until timestamp with time zone,
    CONSTRAINT shard_state_check CHECK ((state = ANY (ARRAY['open'::text, 'leaving'::text, 'closed'::text])))
);

CREATE FUNCTION evertick.is_free(s evertick.shard, p_owner text) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select (s.lease_until is null or s.lease_until < clock()) and s.state <> 'closed'
       and (s.heir is null or s.heir = p_owner or s.heir_until < clock())
$$;

CREATE FUNCTION evertick.is_met(p_condition jsonb, p_heard text[]) RETURNS boolean
    LANGUAGE plpgsql IMMUTABLE
    AS $$
begin
    if p_condition ? 'all' then
        return (select bool_and(is_met(x, p_heard)) from jsonb_array_elements(p_condition->'all') x);
    elsif p_condition ? 'any' then
        return (select bool_or(is_met(x, p_heard)) from jsonb_array_elements(p_condition->'any') x);
    end if;
    return (select k.key || ':' || k.value = any(p_heard) from jsonb_each_text(p_condition) k);
end $$;

CREATE FUNCTION evertick.is_over(p_run_id bigint, p_version_id integer, p_grp integer) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select coalesce((select g.ended >= cardinality(w.members) + g.more from run_group g
                     join retry_group w on w.version_id = p_version_id and w.grp = p_grp
                     where g.run_id = p_run_id and g.grp = p_grp), false)
$$;

CREATE FUNCTION evertick.is_overdue(p_run_id bigint) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (
        select 1 from run_status r join dag_version v on v.version_id = r.version_id
        where r.run_id = p_run_id and r.state = 'running' and not r.cancel_requested
          and r.started_at + make_interval(secs => v.run_timeout) <= clock()
          and (v.task_count + r.extra_tasks > (select count(*) from task k where k.run_id = r.run_id)
               or exists (select 1 from task k where k.run_id = r.run_id
                          and (k.state in ('waiting', 'pending', 'available', 'deferred')
                               or (k.state in ('queued', 'running') and k.request is null)))))
$$;

CREATE FUNCTION evertick.is_past_over(p_name text) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select not exists (select 1 from run_status r where r.run_id = split_part(p_name, '/', 1)::bigint)
        or coalesce((select bool_and(k.state in ('success', 'skipped')) from task k   -- in another version it may have been mapped
                     where k.run_id = split_part(p_name, '/', 1)::bigint and k.idx = split_part(p_name, '/', 2)::int), false)
$$;

CREATE FUNCTION evertick.is_poison(p_code text) RETURNS boolean
    LANGUAGE sql IMMUTABLE
    AS $$
    select left(p_code, 2) in ('22', '23', '54', 'XX') or p_code = 'P0001'
$$;

CREATE FUNCTION evertick.is_served(p_queue text, p_version_id integer, p_idx integer, p_grace double precision) RETURNS boolean
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return exists (select 1 from runner r where p_queue = any(r.queues)
                   and ((r.gone_at is null and r.request is null) or r.gone_at > clock() - make_interval(secs => p_grace))
                   and takes(r.match, p_version_id, p_idx));
end $$;

CREATE FUNCTION evertick.is_served_to_all(p_queue text, p_grace double precision) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (select 1 from runner r where p_queue = any(r.queues) and r.match = '{}'
                   and ((r.gone_at is null and r.request is null) or r.gone_at > clock() - make_interval(secs => p_grace)))
$$;

CREATE FUNCTION evertick.is_set_aside(p_kind text, p_subject_id bigint) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (select 1 from quarantine q where q.kind = p_kind and q.subject_id = p_subject_id
                   and (q.retry_at is null or q.retry_at > clock()))
$$;

CREATE TABLE evertick.task (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer DEFAULT '-1'::integer NOT NULL,
    version_id integer NOT NULL,
    state evertick.task_state NOT NULL,
    epoch integer DEFAULT 0 NOT NULL,
    attempt smallint DEFAULT 0 NOT NULL,
    losses smallint DEFAULT 0 NOT NULL,
    session bigint,
    request evertick.task_request,
    not_before timestamp with time zone,
    let_in_at timestamp with time zone,
    taken_at timestamp with time zone,
    started_at timestamp with time zone,
    start_seconds real,
    finished_at timestamp with time zone,
    n_success integer,
    n_failed integer,
    n_upstream_failed integer,
    n_skipped integer,
    n_setup_success integer,
    n_setup_skipped integer,
    n_more integer,
    exit_code integer,
    reason text,
    CONSTRAINT task_attempt_check CHECK ((attempt >= 0)),
    CONSTRAINT task_check CHECK (((state <> 'running'::evertick.task_state) OR ((session IS NOT NULL) AND (epoch > 0) AND (started_at IS NOT NULL)))),
    CONSTRAINT task_check1 CHECK (((state <> 'queued'::evertick.task_state) OR ((session IS NOT NULL) AND (epoch > 0) AND (started_at IS NULL)))),
    CONSTRAINT task_check2 CHECK (((request IS NULL) OR (state = ANY (ARRAY['queued'::evertick.task_state, 'running'::evertick.task_state])))),
    CONSTRAINT task_check3 CHECK (((not_before IS NULL) OR (state = 'pending'::evertick.task_state))),
    CONSTRAINT task_check4 CHECK (((finished_at IS NOT NULL) OR (state <> ALL (ARRAY['success'::evertick.task_state, 'failed'::evertick.task_state, 'skipped'::evertick.task_state, 'canceled'::evertick.task_state, 'upstream_failed'::evertick.task_state]))))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_vacuum_insert_scale_factor='0.05', autovacuum_freeze_min_age='0', vacuum_truncate=off);

CREATE FUNCTION evertick.is_timed(p_task evertick.task) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (select 1 from shard h
                   join timer w on w.shard = h.shard and w.due_at = p_task.not_before and w.run_id = p_task.run_id
                                and w.idx = p_task.idx and w.map_index = p_task.map_index)
        or exists (select 1 from shard h
                   join task_spec s on s.version_id = p_task.version_id and s.idx = p_task.idx
                   join retry_line l on l.shard = h.shard and l.queue = s.queue and l.due_at = p_task.not_before
                                     and l.run_id = p_task.run_id and l.idx = p_task.idx and l.map_index = p_task.map_index)
$$;

CREATE TABLE evertick.schedule_state (
    schedule_id integer NOT NULL,
    shard smallint NOT NULL,
    version integer NOT NULL,
    next_due timestamp with time zone,
    last_fired timestamp with time zone,
    paused boolean DEFAULT false NOT NULL,
    is_held boolean DEFAULT false NOT NULL,
    error text
)
WITH (fillfactor='70');

CREATE FUNCTION evertick.is_unfired(s evertick.schedule_state, t timestamp with time zone, p_seconds double precision) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select s.next_due < t - make_interval(secs => p_seconds) and not s.paused
$$;

CREATE FUNCTION evertick.join_line(p_gate_ids integer[], p_weights integer[], p_checks integer[], p_needs bigint[], p_tasks evertick.gate_arrival[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    line bigint;
    t timestamptz := clock();
begin
    select l.line_id into line from gate_line l
    where l.gate_ids = p_gate_ids and l.weights = p_weights and l.checks = p_checks and l.needs = p_needs and l.queue is null;
    if not found then
        insert into gate_line (gate_ids, weights, checks, needs, blocked_on, need, rank, seq, since)
        select p_gate_ids, p_weights, p_checks, p_needs, coalesce(b.gate_id, p_gate_ids[1], p_checks[1]),
               coalesce(b.need, p_weights[1], p_needs[1]), 100, 0, t
        from blocker_of(p_gate_ids, p_weights, p_checks, p_needs) b
        returning line_id into line;
    end if;
    insert into gate_wait (line_id, rank, run_id, idx, map_index, version_id, since)
    select line, p.rank, p.run_id, p.idx, p.map_index, p.version_id, t
    from unnest(p_tasks) with ordinality as p(run_id, idx, map_index, version_id, rank, gate_ids, weights, checks, needs, place) order by p.place;
    perform refresh_line(line);
end $$;

CREATE FUNCTION evertick.join_overlapped(p_ids integer[]) RETURNS void
    LANGUAGE sql
    AS $$
    with part as (
        select n.schedule_id, b.first_at as begins_at, n.first_at, n.last_at, n.count
        from unnest(p_ids) i(id)
        cross join lateral (select * from skip_record x where x.schedule_id = i.id order by x.first_at desc limit 1) n
        cross join lateral (select * from skip_record x where x.schedule_id = i.id and x.first_at < n.first_at
                            order by x.first_at desc limit 1) b
        cross join lateral (select x.delay_seconds, x.changed_at from schedule x where x.schedule_id = i.id offset 0) c
        where b.reason = n.reason and c.changed_at < b.recorded_at
          and n.last_at + make_interval(secs => c.delay_seconds) <= b.recorded_at
          and not exists (select 1 from run r where r.schedule_id = i.id and r.fire_at > b.last_at and r.fire_at < n.first_at)
    ), gone as (
        delete from skip_record k using part p where k.schedule_id = p.schedule_id and k.first_at = p.first_at
    )
    update skip_record k set last_at = p.last_at, count = k.count + p.count
    from part p where k.schedule_id = p.schedule_id and k.first_at = p.begins_at
$$;

CREATE FUNCTION evertick.keep_attempts(p_tasks evertick.ended[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, reason, exit_code, let_in_at, taken_at, started_at,
                         start_seconds, finished_at)
    select k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.session, k.state::text, k.reason, k.exit_code, k.let_in_at, k.taken_at,
           k.started_at, k.start_seconds, k.finished_at
    from unnest(p_tasks) p join task k on k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
    where k.epoch > 0 and k.finished_at is not null and (k.started_at is not null or k.session is not null)
    on conflict (run_id, idx, map_index, epoch) do nothing;
    delete from result v using unnest(p_tasks) p
    where v.run_id = p.run_id and v.idx = p.idx and v.map_index = p.map_index;
    delete from poll q using unnest(p_tasks) p
    where q.run_id = p.run_id and q.idx = p.idx and q.map_index = p.map_index;
end $$;

CREATE FUNCTION evertick.leave_gates(p_tasks evertick.ended[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    given gate_weight[];
begin
    with left_now as (
        delete from gate_hold h where h.ctid = any(array(
            select x.place from unnest(p_tasks) p cross join lateral (
                select y.ctid as place from gate_hold y
                where y.run_id = p.run_id and y.idx = p.idx and y.map_index = p.map_index offset 0) x))
        returning h.gate_ids, h.weights
    ), over as (
        delete from gate_order o where o.ctid = any(array(
            select x.place from unnest(p_tasks) p cross join lateral (
                select y.ctid as place from gate_order y
                where y.run_id = p.run_id and y.idx = p.idx and y.map_index = p.map_index offset 0) x
            where p.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')))
        returning o.gate_id
    )
    select array_agg(row(s.gate_id, s.weight)::gate_weight) into given
    from (select g.gate_id, sum(g.weight)::int as weight
          from (select n.gate_id, n.weight from left_now l cross join lateral unnest(l.gate_ids, l.weights) as n(gate_id, weight)
                union all select o.gate_id, 0 from over o) g group by g.gate_id) s;
    if given is not null then
        perform set_config('evertick.released', (
            coalesce(nullif(current_setting('evertick.released', true), ''), '{}')::gate_weight[] || given)::text, true);
    end if;
end $$;

CREATE FUNCTION evertick.leave_groups(p_ended evertick.ended[], OUT heard evertick.ended[], OUT again evertick.group_key[]) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    over group_key[];
begin
    heard := '{}';
    again := '{}';
    with counted as (
        insert into run_group as g (run_id, grp, ended)
        select e.run_id, s.grp, count(*)::int from unnest(p_ended) e
        cross join lateral (select x.grp from task_spec x where x.version_id = e.version_id and x.idx = e.idx offset 0) s
        where s.grp is not null
        group by e.run_id, s.grp order by e.run_id, s.grp
        on conflict (run_id, grp) do update set ended = g.ended + excluded.ended
        returning g.run_id, g.grp, g.ended, g.more
    )
    select array_agg(row(c.run_id, r.version_id, c.grp)::group_key) into over
    from counted c
    cross join lateral (select x.version_id from run_status x where x.run_id = c.run_id offset 0) r
    cross join lateral (select x.members from retry_group x where x.version_id = r.version_id and x.grp = c.grp offset 0) w
    where c.ended >= cardinality(w.members) + c.more;
    if over is null then
        return;
    end if;
    again := array(select o from unnest(over) o where begins_again(o));
    heard := array(
        select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended
        from unnest(over) o
        join retry_group w on w.version_id = o.version_id and w.grp = o.grp
        cross join unnest(w.members) m(idx)
        cross join lateral (select * from task x where x.run_id = o.run_id and x.idx = m.idx offset 0) k
        where o <> all(again));
end $$;

CREATE FUNCTION evertick.let_in(p_tasks evertick.gate_arrival[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    freed ended[];
    t timestamptz := clock();
begin
    with moved as (
        update task k set state = 'available', let_in_at = t
        from unnest(p_tasks) p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
          and k.state = 'pending' and k.not_before is null
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, p.gate_ids, p.weights
    ), kept as (
        insert into gate_hold (run_id, idx, map_index, gate_ids, weights, since)
        select m.run_id, m.idx, m.map_index, m.gate_ids, m.weights, t from moved m
    ), counted as (
        update gate g set used = g.used + n.weight
        from (select x.gate_id, sum(x.weight)::int as weight
              from moved m cross join lateral unnest(m.gate_ids, m.weights) as x(gate_id, weight) group by x.gate_id) n
        where g.gate_id = n.gate_id
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into freed from moved m;
    -- Whoever lets in at once has the same gates, or none of them has checks.
    if (p_tasks[1]).checks <> '{}' then
        perform count_passes((p_tasks[1]).checks, coalesce(cardinality(freed), 0));
    end if;
    return offer(freed);
end $$;

CREATE FUNCTION evertick.let_retries_in(p_places tid[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    due ended[];
begin
    with gone as (
        delete from retry_line l where l.ctid = any(p_places)
        returning l.shard, l.queue, l.due_at, l.run_id, l.idx, l.map_index
    ), placed as (
        select g.*, h.place, d.paused or s.is_gated as is_held from gone g
        cross join lateral (select k.ctid as place, k.version_id from task k where k.run_id = g.run_id and k.idx = g.idx
                            and k.map_index = g.map_index offset 0) h
        cross join lateral (select x.is_gated from task_spec x where x.version_id = h.version_id and x.idx = g.idx offset 0) s
        cross join lateral (select r.dag_id from run_status r where r.run_id = g.run_id offset 0) r
        cross join lateral (select x.paused from dag x where x.dag_id = r.dag_id offset 0) d
    ), moved as (
        update task k set state = case when p.is_held then 'pending'::task_state else 'available' end, not_before = null
        from placed p
        where k.ctid = p.place and k.state = 'pending' and k.not_before = p.due_at
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, p.shard, p.queue
    ), kept as (
        insert into retry_slot (shard, queue, run_id, idx, map_index, epoch)
        select m.shard, m.queue, m.run_id, m.idx, m.map_index, m.epoch from moved m where m.state = 'available'
        on conflict (shard, queue, run_id, idx, map_index) do update set epoch = excluded.epoch
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into due from moved m;
    return offer(due);
end $$;

CREATE FUNCTION evertick.list_log_object(p_shard smallint, p_epoch bigint, p_run_id bigint, p_bytes integer) RETURNS uuid
    LANGUAGE plpgsql
    AS $$
declare
    listed uuid;
begin
    perform fence(p_shard, p_epoch);
    insert into log_object (run_id, bytes, look_at) values (p_run_id, p_bytes, clock() + interval '1 hour') returning object_id into listed;
    return listed;
end $$;

CREATE FUNCTION evertick.listen(p_shard smallint, p_epoch bigint, p_elapsed double precision, p_lost_after double precision, OUT silent bigint[], OUT stranded bigint[]) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    silent := array(select x from listen_for_silence(p_elapsed, p_lost_after) x);
    stranded := array(select x from stranded() x);
end $$;

CREATE FUNCTION evertick.listen_for_silence(p_elapsed double precision, p_lost_after double precision) RETURNS SETOF bigint
    LANGUAGE sql
    AS $$
    with watched as (
        update runner r
        set silent_seconds = case when r.beat > r.watched_beat then 0 else r.silent_seconds + least(p_elapsed, 2) end,
            watched_beat = r.beat
        where r.session = any(array(select x.session from runner x where x.gone_at is null for no key update skip locked))
          and r.gone_at is null and (r.beat > r.watched_beat or p_elapsed > 0)
        returning r.session, r.silent_seconds, greatest(p_lost_after, r.lost_after_seconds) as threshold
    )
    select w.session from watched w
    where w.silent_seconds > w.threshold and not has_claimed_since(w.session, w.threshold)
    limit 100
$$;

CREATE FUNCTION evertick.lists_of(p_head evertick.ended, OUT lists jsonb[], OUT instead evertick.unexpanded) RETURNS record
    LANGUAGE plpgsql STABLE
    AS $_$
declare
    source record;
    list jsonb;
    how map_how := (select m.how from task_mapping m where m.version_id = p_head.version_id and m.idx = p_head.idx);
begin
    for source in
        select l.length, l.src, s.name, s.is_mapped
        from task_list l left join task_spec s on s.version_id = l.version_id and s.idx = l.src
        where l.version_id = p_head.version_id and l.idx = p_head.idx order by l.place
    loop
        if source.src is null then
            lists := lists || (select coalesce(jsonb_agg(n), '[]') from generate_series(0, source.length - 1) n);
            continue;
        end if;
        list := case when source.is_mapped and has_instances(p_head.run_id, source.src) then results_of(p_head.run_id, source.src)
                     else (select v.value from result v where v.run_id = p_head.run_id and v.idx = source.src and v.map_index = -1) end;
        if list is null and exists (
            select 1 from task k where k.run_id = p_head.run_id and k.idx = source.src and k.map_index = -1 and k.state = 'skipped') then
            instead := row('skipped', format('nothing to expand over: task %s was skipped', source.name))::unexpanded;
            return;
        elsif list->>'$evertick' = 'file' then
            instead := row('failed', format('cannot expand over the result of task %s: it is so large that it was put into a file; '
                'return a list of names or numbers, and let each instance read its own', source.name))::unexpanded;
            return;
        elsif list is null or jsonb_typeof(list) <> 'array' then
            instead := row('failed', format('cannot expand over the result of task %s: it is %s, not a list', source.name,
                coalesce(replace(replace(jsonb_typeof(list), 'object', 'a dict'), 'string', 'text'), 'nothing')))::unexpanded;
            return;
        elsif how = 'kwargs' and exists (select 1 from jsonb_array_elements(list) e where jsonb_typeof(e) <> 'object') then
            instead := row('failed', format('cannot expand over the result of task %s: expand_kwargs takes a list of dicts, and not all '
                'of its elements are', source.name))::unexpanded;
            return;
        end if;
        lists := lists || list;
    end loop;
end $_$;

CREATE FUNCTION evertick.lock_also(p_held integer[], p_gate_ids integer[]) RETURNS integer[]
    LANGUAGE plpgsql
    AS $$
declare
    g int;
    is_rate boolean;
    top int := (select max(x) from unnest(p_held) x);
begin
    for g in select x from unnest(p_gate_ids) x where x <> all(p_held) order by x loop
        if g > top then
            select x.kind = 'rate' into is_rate from gate x where x.gate_id = g for no key update;
            top := g;
        else
            select x.kind = 'rate' into is_rate from gate x where x.gate_id = g for no key update skip locked;
        end if;
        if not found then
            return null;
        end if;
        if is_rate then
            perform return_slots(array[g]);
        end if;
        p_held := p_held || g;
    end loop;
    return p_held;
end $$;

CREATE FUNCTION evertick.lock_schedules(p_name text) RETURNS void
    LANGUAGE sql
    AS $$
    select from schedule_state s join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
    where d.name = p_name order by s.schedule_id for no key update of s
$$;

CREATE FUNCTION evertick.look(p_shard smallint, p_epoch bigint, p_seconds double precision, p_watches boolean, p_is_watched boolean, p_elapsed double precision, p_lost_after double precision, p_system_id bigint, p_timeline bigint, p_lsn bigint, OUT read_at timestamp with time zone, OUT is_watched boolean, OUT next_fire timestamp with time zone, OUT next_timer timestamp with time zone, OUT has_line boolean, OUT next_expiry timestamp with time zone, OUT silent bigint[], OUT stranded bigint[], OUT overdue bigint[], OUT with_room integer[], OUT backfills integer[], OUT has_arrivals boolean, OUT next_wake timestamp with time zone, OUT has_gates boolean, OUT next_opening timestamp with time zone, OUT has_deliveries boolean, OUT marked_lsn bigint, OUT is_synchronous boolean, OUT of_shards smallint, OUT has_moves boolean, OUT troubles text[]) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    read_at := clock();
    troubles := '{}';
    is_watched := p_is_watched;
    if p_seconds is not null then
        if p_watches and not p_is_watched then
            is_watched := pg_try_advisory_lock(4712, p_shard);
        end if;
        update shard s set lease_until = read_at + make_interval(secs => p_seconds), is_watched = look.is_watched
        where s.shard = p_shard and s.epoch = p_epoch and s.lease_until is not null
        returning s.of_shards, s.moves_since is not null into of_shards, has_moves;
        if not found then
            raise exception 'not the leader of shard %: epoch % has resigned', p_shard, p_epoch using errcode = 'EV001';
        end if;
    end if;
    perform set_config('lock_timeout', '50ms', true);
    begin
        select min(s.next_due) into next_fire from schedule_state s
        where s.shard = p_shard and s.next_due is not null and not s.paused and s.error is null;
    exception when others then
        troubles := array_append(troubles, 'fire: ' || sqlerrm);
    end;
    begin
        select min(w.due_at) into next_timer from timer w where w.shard = p_shard;
        has_line := exists (select 1 from retry_line l where l.shard = p_shard);
    exception when others then
        troubles := array_append(troubles, 'promote: ' || sqlerrm);
    end;
    begin
        overdue := array(select x from overdue_runs(p_shard) x);
    exception when others then
        troubles := array_append(troubles, 'time_out: ' || sqlerrm);
    end;
    begin
        with_room := array(select x from dags_with_room(p_shard) x);
    exception when others then
        troubles := array_append(troubles, 'admit: ' || sqlerrm);
    end;
    begin
        backfills := array(select b.backfill_id from backfill b
                           where b.shard = p_shard and (b.state = 'running' or b.open_runs > 0) order by b.backfill_id limit 100);
    exception when others then
        troubles := array_append(troubles, 'backfill: ' || sqlerrm);
    end;
    begin
        next_wake := next_wake_of(p_shard);
    exception when others then
        troubles := array_append(troubles, 'wake: ' || sqlerrm);
    end;
    if p_shard <> 0 then
        stranded := '{}';
        has_arrivals := false;
        has_gates := false;
        has_deliveries := false;
        read_at := clock();
        return;
    end if;
    begin
        if p_elapsed is not null then
            silent := array(select x from listen_for_silence(p_elapsed, p_lost_after) x);
        end if;
        stranded := array(select x from stranded() x);
    exception when others then
        troubles := array_append(troubles, 'reap: ' || sqlerrm);
    end;
    begin
        select min(q.expires_at) into next_expiry from ready q where q.expires_at is not null;
    exception when others then
        troubles := array_append(troubles, 'time_out: ' || sqlerrm);
    end;
    begin
        has_arrivals := exists (select 1 from arrival);
    exception when others then
        troubles := array_append(troubles, 'hear: ' || sqlerrm);
    end;
    begin
        select min(g.opens_at) into next_opening from gate g where g.opens_at is not null;
        has_gates := exists (select 1 from gate g where g.is_behind)
                  or can_come_back();
    exception when others then
        troubles := array_append(troubles, 'gates: ' || sqlerrm);
    end;
    begin
        has_deliveries := exists (select 1 from outbox o where o.shard = p_shard and o.state = 'waiting');
    exception when others then
        troubles := array_append(troubles, 'notify: ' || sqlerrm);
    end;
    begin
        update cluster c
        set marked_at = clock_timestamp(), lsn = pg_current_wal_insert_lsn(),
            is_synchronous = current_setting('synchronous_standby_names') <> ''
                             and current_setting('synchronous_commit') not in ('off', 'local')
        where c.ctid = (select x.ctid from cluster x
                        where x.system_id = p_system_id and x.timeline = p_timeline and x.lsn >= '0/0'::pg_lsn + p_lsn::numeric
                        for no key update skip locked)
        returning (c.lsn - '0/0')::bigint, c.is_synchronous into marked_lsn, look.is_synchronous;
    exception when others then
        troubles := array_append(troubles, 'mark: ' || sqlerrm);
    end;
    -- By this the leader sets its timer. Read last: it would be late by as long as the look took.
    read_at := clock();
end $$;

CREATE TABLE evertick.deferral (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    epoch integer NOT NULL,
    shard smallint NOT NULL,
    kind evertick.wait_kind NOT NULL,
    key text,
    wake_at timestamp with time zone NOT NULL,
    deadline timestamp with time zone
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

CREATE FUNCTION evertick.look_at_waits(p_due evertick.deferral[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
    ends wait_end[];
    polled ended[];
begin
    delete from deferral d using unnest(p_due) x
    where d.run_id = x.run_id and d.idx = x.idx and d.map_index = x.map_index and d.epoch = x.epoch and not exists (
        select 1 from task k where k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
          and k.state = 'deferred' and k.epoch = x.epoch);
    select array_agg(row(x.run_id, x.idx, x.map_index, x.epoch, v.state, v.reason, v.result)::wait_end) into ends
    from unnest(p_due) x
    cross join lateral verdict_on(x, t) v
    where v.state is not null;
    perform end_waits(ends);
    with resumed as (
        update task k set state = 'pending'
        from unnest(p_due) x
        cross join lateral (select from deferral d where d.run_id = x.run_id and d.idx = x.idx and d.map_index = x.map_index
                            and d.epoch = x.epoch and d.kind = 'poll' offset 0) d
        where k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index and k.state = 'deferred' and k.epoch = x.epoch
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    ), gone as (
        delete from deferral d using resumed k where d.run_id = k.run_id and d.idx = k.idx and d.map_index = k.map_index
    )
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended) into polled from resumed k;
    if polled is not null then
        perform release(polled);
    end if;
    -- Word of the end of a run may be lost where a repair closes it: such a wait is looked at now and then.
    update deferral d set wake_at = coalesce(least(d.deadline, case when d.kind = 'run' then t + interval '10 minutes' end), 'infinity')
    from unnest(p_due) x
    where d.run_id = x.run_id and d.idx = x.idx and d.map_index = x.map_index and d.epoch = x.epoch and d.kind in ('run', 'event', 'approval')
      and d.wake_at <= t;
    perform pass_gates();
end $$;

CREATE FUNCTION evertick.lost_owners(p_silent_seconds double precision) RETURNS SETOF bigint
    LANGUAGE sql STABLE
    AS $$
    with recursive holder as (
        (select owner from dispatch order by owner limit 1)
        union all
        select (select d.owner from dispatch d where d.owner > h.owner order by d.owner limit 1)
        from holder h where h.owner is not null
    )
    select h.owner from holder h left join runner r on r.session = h.owner
    where h.owner is not null and (r.session is null or r.gone_at is not null or r.silent_seconds > p_silent_seconds)
$$;

CREATE FUNCTION evertick.mark_task(p_run_id bigint, p_idx integer, p_map_index integer, p_state evertick.task_state, p_actor text) RETURNS text
    LANGUAGE plpgsql
    AS $$
declare
    before task;
    status run_status;
    spec task_spec;
    blocked ended[];
    t timestamptz := clock();
begin
    select * into status from run_status r where r.run_id = p_run_id for no key update;
    select * into spec from task_spec s where s.version_id = status.version_id and s.idx = p_idx;
    -- An instance can be marked when there is one, a mapped task as a whole as long as it has none.
    if spec.idx is null or p_state not in ('success', 'failed', 'skipped') or (case when p_map_index = -1 then
           spec.is_mapped and has_instances(p_run_id, p_idx) else
           not exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index) end) then
        return null;
    end if;
    update task k set request = ('mark_' || p_state)::task_request
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.state in ('queued', 'running');
    if found then
        insert into journal (occurred_at, verb, actor, run_id, idx, map_index, detail)
        values (t, 'mark', p_actor, p_run_id, p_idx, p_map_index, jsonb_build_object('to', p_state, 'asked', true));
        return 'asked';
    end if;
    if status.state = 'queued' then
        update run_status r set state = 'running', started_at = coalesce(r.started_at, t)
        where r.run_id = p_run_id and r.state = 'queued';
        perform settle(start_runs(array[p_run_id]));
    end if;
    perform quit_lines(array[p_run_id], p_idx, p_map_index);
    delete from ready q
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
        perform pass_gates();   -- of a run that has just begun
        return null;
    end if;
    insert into journal (occurred_at, verb, actor, run_id, idx, map_index, detail)
    values (t, 'mark', p_actor, p_run_id, p_idx, p_map_index,
            jsonb_build_object('from', coalesce(before.state, 'waiting'), 'to', p_state));
    if before.state is null or before.state not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed') then
        perform leave_gates(array[row(p_run_id, p_idx, p_map_index, status.version_id, p_state)::ended]);
        perform settle(array[row(p_run_id, p_idx, p_map_index, status.version_id, p_state)::ended]);
        perform pass_gates();
        return 'marked';
    end if;
    -- It had ended before, and maybe the run with it: keep that attempt, then let what was blocked by it be decided again.
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, reason, exit_code, let_in_at, taken_at, started_at,
                         start_seconds, finished_at)
    select before.run_id, before.idx, before.map_index, before.epoch, before.attempt, before.session, before.state::text,
           before.reason, before.exit_code, before.let_in_at, before.taken_at, before.started_at, before.start_seconds, before.finished_at
    where before.epoch > 0 and before.started_at is not null
    on conflict (run_id, idx, map_index, epoch) do nothing;
    with recursive below as (
        select g.dst from edge g where g.version_id = status.version_id and g.src = p_idx
        union
        select g.dst from below b join edge g on g.version_id = status.version_id and g.src = b.dst
    )
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended) into blocked
    from below b join task k on k.run_id = p_run_id and k.idx = b.dst
    where k.state in ('upstream_failed', 'waiting');
    perform reopen_marked(p_run_id, blocked);
    if spec.awaits_past then
        perform note_past(array[row(p_run_id, p_idx, p_map_index, status.version_id, p_state)::ended]);
    end if;
    perform pass_gates();
    return 'marked';
end $$;

CREATE FUNCTION evertick.misplaced(p_shard smallint, p_limit integer) RETURNS bigint
    LANGUAGE sql STABLE
    AS $$
    select (select count(*) from (select 1 from dag d where d.shard = p_shard and shard_of(d.name, open_shards()) <> p_shard limit p_limit) x)
         + (select count(*) from (select 1 from schedule_state s join schedule c on c.schedule_id = s.schedule_id
                                  join dag d on d.dag_id = c.dag_id where s.shard = p_shard and d.shard <> p_shard limit p_limit) x)
         + (select count(*) from (select 1 from backfill b join dag d on d.dag_id = b.dag_id
                                  where b.shard = p_shard and d.shard <> p_shard limit p_limit) x)
         + (select count(*) from (select 1 from deferral x where x.shard = p_shard and home_of(x.run_id) <> p_shard limit p_limit) x)
         + (select count(*) from (select 1 from timer x where x.shard = p_shard and home_of(x.run_id) <> p_shard limit p_limit) x)
         + (select count(*) from (select 1 from retry_line x where x.shard = p_shard and home_of(x.run_id) <> p_shard limit p_limit) x)
         + (select count(*) from (select 1 from retry_slot x where x.shard = p_shard and home_of(x.run_id) <> p_shard limit p_limit) x)
         + (select count(*) from (select 1 from deadline x where x.shard = p_shard and home_of(x.run_id) <> p_shard limit p_limit) x)
$$;

CREATE FUNCTION evertick.move_logs(p_shard smallint, p_epoch bigint, p_object_id uuid, p_pieces jsonb) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    target bigint;
    moved int;
begin
    perform fence(p_shard, p_epoch);
    select o.run_id into target from log_object o where o.object_id = p_object_id;
    perform 1 from run_status r where r.run_id = target for no key update;
    if not found then
        return 0;
    end if;
    perform 1 from log_object o where o.object_id = p_object_id and o.look_at > clock() for update;
    if not found then
        return 0;
    end if;
    update log_chunk c set content = null, object_id = p_object_id, at = x.at, bytes = x.bytes, digest = decode(x.digest, 'hex')
    from jsonb_to_recordset(p_pieces) as x(idx int, map_index int, epoch int, seq bigint, at int, bytes int, digest text)
    where c.run_id = target and c.idx = x.idx and c.map_index = x.map_index and c.epoch = x.epoch and c.seq = x.seq
      and c.content is not null;
    get diagnostics moved = row_count;
    if moved > 0 then
        update log_object o set look_at = null where o.object_id = p_object_id;
    end if;
    return moved;
end $$;

CREATE FUNCTION evertick.move_out(p_shard smallint, p_epoch bigint, p_limit integer, OUT moved integer, OUT is_over boolean, OUT is_closed boolean) RETURNS record
    LANGUAGE plpgsql
    AS $_$
declare
    n int := open_shards();
    k int;
    hung text;
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    is_over := false;
    is_closed := false;
    update dag d set shard = shard_of(d.name, n)
    where d.dag_id = any(array(select x.dag_id from dag x where x.shard = p_shard and shard_of(x.name, n) <> p_shard
                               order by x.dag_id limit p_limit for no key update skip locked));
    get diagnostics moved = row_count;
    with gone as materialized (
        select s.schedule_id, d.shard as home from schedule_state s
        join schedule c on c.schedule_id = s.schedule_id join dag d on d.dag_id = c.dag_id
        where s.shard = p_shard and d.shard <> p_shard limit p_limit for no key update of s skip locked)
    update schedule_state s set shard = g.home from gone g where s.schedule_id = g.schedule_id and s.shard = p_shard;
    get diagnostics k = row_count;
    moved := moved + k;
    with gone as materialized (
        select b.backfill_id, d.shard as home from backfill b join dag d on d.dag_id = b.dag_id
        where b.shard = p_shard and d.shard <> p_shard limit p_limit for no key update of b skip locked)
    update backfill b set shard = g.home from gone g where b.backfill_id = g.backfill_id and b.shard = p_shard;
    get diagnostics k = row_count;
    moved := moved + k;
    with gone as materialized (
        select x.run_id, x.idx, x.map_index, home_of(x.run_id) as home from deferral x
        where x.shard = p_shard and home_of(x.run_id) <> p_shard limit p_limit for no key update skip locked)
    update deferral x set shard = g.home from gone g
    where x.run_id = g.run_id and x.idx = g.idx and x.map_index = g.map_index and x.shard = p_shard;
    get diagnostics k = row_count;
    moved := moved + k;
    -- Their shard is part of their key, and a row like it may be there already.
    foreach hung in array array['timer', 'retry_line', 'retry_slot', 'deadline'] loop
        execute format('
            with gone as (
                delete from %1$I w where w.ctid = any(array(
                    select x.ctid from %1$I x where x.shard = $1 and home_of(x.run_id) <> $1 limit $2 for update skip locked))
                returning w
            ), placed as (
                insert into %1$I
                select n.* from gone g
                cross join lateral jsonb_populate_record(g.w, jsonb_build_object(''shard'', home_of((g.w).run_id))) n
                on conflict do nothing
            )
            select count(*) from gone', hung) into k using p_shard, p_limit;
        moved := moved + k;
    end loop;
    if moved = 0 and misplaced(p_shard, 1) = 0 then
        select e.is_over, e.is_closed into is_over, is_closed from end_moves(p_shard, p_epoch, t) e;
    end if;
end $_$;

CREATE FUNCTION evertick.move_run(p_run_id bigint, p_version_id integer) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    status run_status;
begin
    select * into status from run_status r where r.run_id = p_run_id;
    if status.version_id = p_version_id then
        return;
    elsif status.state not in ('success', 'failed', 'canceled') then
        raise exception 'Run % is still open; it can go on with another version once it has ended, or was canceled.', p_run_id
            using errcode = 'EV003';
    elsif p_version_id is distinct from (select d.version_id from dag d where d.dag_id = status.dag_id) then
        raise exception 'Another version was published meanwhile: look again.' using errcode = 'EV003';
    elsif exists (
        select 1 from (select s.idx, s.name, s.is_mapped from task_spec s where s.version_id = status.version_id) o
        full join (select s.idx, s.name, s.is_mapped from task_spec s where s.version_id = p_version_id) n on n.idx = o.idx
        where (o.name, o.is_mapped) is distinct from (n.name, n.is_mapped)) then
        raise exception 'The newest version has other tasks than run % began with: start a new run of it.', p_run_id
            using errcode = 'EV003';
    end if;
    update run_status r set version_id = p_version_id
    where r.run_id = p_run_id and r.version_id = status.version_id and r.state in ('success', 'failed', 'canceled');
    update task k set version_id = p_version_id where k.run_id = p_run_id;
    delete from run_group g where g.run_id = p_run_id;   -- of other groups; counted anew by whoever reopens something
    insert into moved_run as m (run_id, version_id) values (p_run_id, p_version_id)
    on conflict (run_id) do update set version_id = excluded.version_id;
end $$;

CREATE TABLE evertick.run_status (
    run_id bigint NOT NULL,
    dag_id integer NOT NULL,
    version_id integer NOT NULL,
    state evertick.run_state NOT NULL,
    open_tasks integer NOT NULL,
    failed_leaves integer DEFAULT 0 NOT NULL,
    extra_tasks integer DEFAULT 0 NOT NULL,
    cancel_requested boolean DEFAULT false NOT NULL,
    retried smallint DEFAULT 0 NOT NULL,
    started_at timestamp with time zone,
    finished_at timestamp with time zone,
    reason text,
    CONSTRAINT run_status_check CHECK (((state <> ALL (ARRAY['success'::evertick.run_state, 'failed'::evertick.run_state, 'canceled'::evertick.run_state])) OR ((open_tasks = 0) AND (finished_at IS NOT NULL)))),
    CONSTRAINT run_status_check1 CHECK (((state <> 'running'::evertick.run_state) OR (open_tasks > 0))),
    CONSTRAINT run_status_failed_leaves_check CHECK ((failed_leaves >= 0)),
    CONSTRAINT run_status_open_tasks_check CHECK ((open_tasks >= 0))
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_freeze_min_age='0', vacuum_truncate=off);

CREATE FUNCTION evertick.newest_run_for(p_dag_id integer, p_schedule_id integer, p_instant timestamp with time zone) RETURNS evertick.run_status
    LANGUAGE sql STABLE
    AS $$
    select s from (
        (select r.run_id from run r where r.schedule_id = p_schedule_id and r.fire_at = p_instant)
        union all
        (select b.run_id from backfill_run b
         where b.dag_id = p_dag_id and b.schedule_id = coalesce(p_schedule_id, 0) and b.fire_at = p_instant
         order by b.run_id desc limit 1)
    ) made cross join lateral (select x from run_status x where x.run_id = made.run_id offset 0) s(s)
    order by made.run_id desc limit 1
$$;

CREATE FUNCTION evertick.next_wake_of(p_shard smallint) RETURNS timestamp with time zone
    LANGUAGE sql STABLE
    AS $$
    select case when exists (select 1 from event e where not e.is_heard) then clock()
                else nullif((select min(d.wake_at) from deferral d where d.shard = p_shard), 'infinity') end
$$;

CREATE FUNCTION evertick.note_arrivals(p_closed bigint[], p_ended evertick.ended[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    perform note_closed(p_closed);
    insert into arrival (kind, name, run_id, occurred_at)
    select k.kind, k.name, k.run_id, clock()
    from (
        select e.kind, d.name, s.run_id
        from run_status s join dag d on d.dag_id = s.dag_id cross join (values ('end'), ('dag')) e(kind)
        where s.run_id = any(p_closed) and (e.kind = 'end' or s.state = 'success')
        union all
        select distinct 'asset', o.name, e.run_id
        from unnest(p_ended) e join task_spec s on s.version_id = e.version_id and s.idx = e.idx
        cross join lateral unnest(s.outlets) o(name)
        where e.state = 'success'
    ) k
    where exists (select 1 from awaited w where w.kind = k.kind and w.name = k.name)
    order by k.run_id, k.kind, k.name;
    if found then
        perform set_config('evertick.arrived', 'yes', true);
    end if;
end $$;

CREATE FUNCTION evertick.note_closed(p_closed bigint[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    update deferral d set wake_at = clock() where d.key = any(array(select 'run:' || x from unnest(p_closed) x));
    if found then
        perform set_config('evertick.arrived', 'yes', true);
    end if;
end $$;

CREATE FUNCTION evertick.note_past(p_ended evertick.ended[]) RETURNS void
    LANGUAGE sql
    AS $$
    select note_tasks(array(
        select e from unnest(p_ended) e
        join task_spec s on s.version_id = (e).version_id and s.idx = (e).idx and s.awaits_past))
$$;

CREATE FUNCTION evertick.note_polls(p_polls jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    with come as materialized (
        select x.*, coalesce(w.seconds, 60) as seconds, w.timeout, coalesce(w.backoff, 1) as backoff, coalesce(w.longest, w.seconds, 60) as longest,
               d.shard
        from jsonb_to_recordset(p_polls) as x(run_id bigint, idx int, map_index int, version_id int, epoch int, started_at timestamptz,
                                              result jsonb)
        left join lateral (select y.* from task_wait y where y.version_id = x.version_id and y.idx = x.idx offset 0) w on true
        cross join lateral (select y.dag_id from run_status y where y.run_id = x.run_id offset 0) r
        cross join lateral (select y.shard from dag y where y.dag_id = r.dag_id offset 0) d
    ), counted as (
        insert into poll as q (run_id, idx, map_index, since, deadline, polls)
        select c.run_id, c.idx, c.map_index, c.started_at, c.started_at + make_interval(secs => c.timeout), 1 from come c
        on conflict (run_id, idx, map_index) do update set polls = q.polls + 1
        returning q.run_id, q.idx, q.map_index, q.deadline, q.polls
    )
    insert into deferral as o (run_id, idx, map_index, epoch, shard, kind, wake_at, deadline)
    select c.run_id, c.idx, c.map_index, c.epoch, c.shard, case when c.result ? 'until' then 'time'::wait_kind else 'poll' end,
           coalesce((c.result->>'until')::timestamptz,
                    least(q.deadline, t + make_interval(secs => least(c.seconds * power(c.backoff, least(q.polls - 1, 50)), c.longest)))),
           q.deadline
    from come c join counted q on q.run_id = c.run_id and q.idx = c.idx and q.map_index = c.map_index
    on conflict (run_id, idx, map_index) do update
        set epoch = excluded.epoch, kind = excluded.kind, key = null, wake_at = excluded.wake_at, deadline = excluded.deadline;
    delete from log_chunk l using jsonb_to_recordset(p_polls) as x(run_id bigint, idx int, map_index int, epoch int)
    where l.run_id = x.run_id and l.idx = x.idx and l.map_index = x.map_index and l.epoch <= x.epoch - 10 and l.content is not null and not exists (
        select 1 from attempt a where a.run_id = l.run_id and a.idx = l.idx and a.map_index = l.map_index and a.epoch = l.epoch);
end $$;

CREATE FUNCTION evertick.note_pruned(p_entry bigint, p_actor text, p_before timestamp with time zone, p_kind text, p_count bigint) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
declare
    noted bigint;
begin
    if p_count = 0 then
        return p_entry;
    end if;
    update journal j
    set detail = j.detail || jsonb_build_object(p_kind, coalesce((j.detail->>p_kind)::bigint, 0) + p_count)
    where j.entry_id = p_entry
    returning j.entry_id into noted;
    if noted is null then
        insert into journal (occurred_at, verb, actor, detail)
        values (clock(), 'prune', p_actor, jsonb_build_object('before', p_before, p_kind, p_count))
        returning entry_id into noted;
    end if;
    return noted;
end $$;

CREATE FUNCTION evertick.note_schedules(p_ids integer[], p_change text) RETURNS void
    LANGUAGE sql
    AS $$
    insert into schedule_version (schedule_id, version, change, changed_by, changed_at, origin, is_held, settings)
    select c.schedule_id, c.version, p_change, c.changed_by, c.changed_at, c.origin, s.is_held,
           jsonb_build_object('spec', c.spec, 'params', c.params, 'misfire', c.misfire, 'window_seconds', c.window_seconds,
                              'catchup_limit', c.catchup_limit, 'overlap', c.overlap, 'start_within', c.start_within,
                              'finish_within', c.finish_within)
    from schedule c join schedule_state s on s.schedule_id = c.schedule_id
    where c.schedule_id = any(p_ids)
    on conflict (schedule_id, version) do nothing;
    -- What they wait for from now on; what they have heard of before counts no more.
    delete from heard h where h.schedule_id = any(p_ids);
    delete from awaited w where w.schedule_id = any(p_ids);
    insert into awaited (kind, name, schedule_id)
    select distinct x.kind, x.name, c.schedule_id
    from schedule c cross join lateral sources_of((c.spec->>'after')::jsonb) x
    where c.schedule_id = any(p_ids) and c.deleted_at is null and c.spec ? 'after';
    update dag d set is_awaited = true
    where not d.is_awaited and d.name in (
        select w.name from awaited w where w.schedule_id = any(p_ids) and w.kind in ('dag', 'end'));
$$;

CREATE FUNCTION evertick.note_tasks(p_tasks evertick.ended[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    if coalesce(cardinality(p_tasks), 0) > 0 then
        perform set_config('evertick.noted', (
            coalesce(nullif(current_setting('evertick.noted', true), ''), '{}')::ended[] || p_tasks)::text, true);
    end if;
end $$;

CREATE FUNCTION evertick.offer(p_tasks evertick.ended[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    offered int;
    has_backfills boolean := exists (select 1 from backfill);
    entering ended[];
    held ended[];
    now timestamptz := clock();
begin
    if coalesce(cardinality(p_tasks), 0) = 0 then
        return 0;
    end if;
    insert into ready (queue, rank, run_id, idx, map_index, expires_at, offered_at)
    select s.queue,
           case when not has_backfills then 9 - s.priority
                when (select r.kind from run r where r.run_id = t.run_id) = 'backfill' then 9
                else 9 - s.priority end,
           t.run_id, t.idx, t.map_index, now + make_interval(secs => s.queue_timeout), now
    from unnest(p_tasks) t join task_spec s on s.version_id = t.version_id and s.idx = t.idx
    where t.state = 'available'
    order by s.queue, s.priority desc, t.run_id, t.idx, t.map_index;
    get diagnostics offered = row_count;
    if offered < cardinality(p_tasks) then
        select array_agg(t) filter (where not d.paused), array_agg(t) filter (where d.paused and s.is_ordered)
        into entering, held
        from unnest(p_tasks) t
        cross join lateral (select r.dag_id from run_status r where r.run_id = (t).run_id offset 0) r
        cross join lateral (select x.paused from dag x where x.dag_id = r.dag_id offset 0) d
        cross join lateral (select x.is_ordered from task_spec x where x.version_id = (t).version_id and x.idx = (t).idx offset 0) s
        where (t).state = 'pending';
        perform enter_gates(entering);
        if held is not null then
            perform note_tasks(held);
        end if;
    end if;
    return offered;
end $$;

CREATE FUNCTION evertick.open_gate(p_gate_id integer, INOUT held integer[], INOUT looks integer, OUT admitted integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    free bigint;
    kind gate_kind;
    was_behind boolean;
    is_left boolean := false;
    set_aside bigint[] := '{}';
    reserved bigint;
    lines gate_line[];
    line gate_line;
    block record;
    now_held int[];
    taken gate_arrival[];
begin
    admitted := 0;
    select g.is_behind, g.kind into was_behind, kind from gate g where g.gate_id = p_gate_id;
    loop
        if kind in ('order', 'past') then
            free := room_at(p_gate_id);
        else
            select g.capacity - g.used into free from gate g where g.gate_id = p_gate_id;
        end if;
        exit when free is null or (free <= 0 and kind <> 'order');
        -- From need to need through the index: there are few different ones, and maybe many lines of each.
        lines := array(
            with recursive needs as (
                (select l.need from gate_line l where l.blocked_on = p_gate_id and l.need <= free order by l.need limit 1)
                union all
                select (select l.need from gate_line l where l.blocked_on = p_gate_id and l.need > n.need and l.need <= free
                        order by l.need limit 1)
                from needs n where n.need is not null
            )
            select h.whole from needs n cross join lateral (
                select l as whole, l.rank, l.seq from gate_line l
                where l.blocked_on = p_gate_id and l.need = n.need and l.line_id <> all(set_aside)
                order by l.rank, l.seq limit 2) h
            where n.need is not null order by h.rank, h.seq limit 2);
        exit when cardinality(lines) = 0;
        reserved := case when kind < 'order' then reserved_for(p_gate_id) end;
        if reserved is not null then
            -- Its first may be gone by now, and with it the reason to keep anything free.
            perform refresh_line(reserved);
            exit when reserved_for(p_gate_id) = reserved;
            continue;
        end if;
        if looks <= 0 then
            is_left := true;
            exit;
        end if;
        looks := looks - 1;
        line := lines[1];
        now_held := lock_also(held, line.gate_ids || line.checks);
        if now_held is null then
            is_left := true;
            set_aside := set_aside || line.line_id;
            continue;
        end if;
        held := now_held;
        select b.gate_id, b.need into block from blocker_of(line.gate_ids, line.weights, line.checks, line.needs) b;
        if block.gate_id is not null then
            update gate_line l set blocked_on = block.gate_id, need = block.need where l.line_id = line.line_id;
            continue;
        end if;
        -- Up to the first of the next line: lines with other needs wait no longer for it than they must.
        with first as (
            select w.ctid as place, w.run_id, w.idx, w.map_index, w.version_id, w.rank, w.seq from gate_wait w
            where w.line_id = line.line_id
              and (cardinality(lines) < 2 or (w.rank, w.seq) < (lines[2].rank, lines[2].seq))
            order by w.rank, w.seq limit fits_in(line.gate_ids, line.weights, line.checks, line.needs)
            for update skip locked
        ), gone as (
            delete from gate_wait w where w.ctid = any(array(select f.place from first f))
        )
        select array_agg(row(f.run_id, f.idx, f.map_index, f.version_id, f.rank, line.gate_ids, line.weights, line.checks,
                             line.needs)::gate_arrival order by f.rank, f.seq)
        into taken from first f;
        if taken is not null then
            admitted := admitted + let_in(taken);
        end if;
        perform refresh_line(line.line_id);
        -- Nobody to take although somebody is first: he is just being taken away.
        if taken is null and exists (select 1 from gate_line l where l.line_id = line.line_id
                                     and (l.rank, l.seq) = (line.rank, line.seq)) then
            set_aside := set_aside || line.line_id;
        end if;
    end loop;
    if is_left <> was_behind then
        update gate g set is_behind = is_left where g.gate_id = p_gate_id;
    end if;
end $$;

CREATE FUNCTION evertick.open_runs(p_run_ids bigint[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    started bigint[];
    held int[];
    t timestamptz := clock();
begin
    if coalesce(cardinality(p_run_ids), 0) = 0 then
        return 0;
    end if;
    with opened as (
        insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at)
        select r.run_id, r.dag_id, r.version_id,
               case when h.is_held then 'queued'::run_state else 'running' end,
               v.task_count,
               case when h.is_held then null else t end
        from run r join dag d on d.dag_id = r.dag_id join dag_version v on v.version_id = r.version_id
        cross join lateral (select d.paused or d.max_active_runs is not null
                                   or (d.has_turns and r.schedule_id is not null) as is_held) h
        where r.run_id = any(p_run_ids)
        order by r.run_id
        on conflict (run_id) do nothing
        returning run_id, dag_id, state
    )
    select array_agg(run_id) filter (where state = 'running'), array_agg(distinct dag_id) filter (where state = 'queued')
    into started, held from opened;
    -- where no task has a deadline, asking is a look at an empty table
    if exists (select 1 from task_deadline) then
        perform set_task_deadlines(p_run_ids);
    end if;
    if started is not null then
        perform settle(start_runs(started, true));
    end if;
    if held is not null then
        perform admit_runs(held);
    end if;
    return coalesce(cardinality(started), 0);
end $$;

CREATE FUNCTION evertick.open_shards() RETURNS integer
    LANGUAGE sql STABLE
    AS $$
    select count(*)::int from shard s where s.state = 'open'
$$;

CREATE FUNCTION evertick.overdue(p_queues text[], p_low bigint[], p_aging double precision, p_most integer) RETURNS TABLE(place integer, seq bigint)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
declare
    t timestamptz := clock();
begin
    return query
    with head as materialized (
        select 10 * (n.n - 1) + k.rank as place, n.n, k.rank, h.seq,
               extract(epoch from t - h.offered_at)::double precision as waited
        from generate_subscripts(p_queues, 1) n(n) cross join generate_series(0, 9) k(rank)
        cross join lateral (
            select r.seq, r.offered_at from ready r
            where r.queue = p_queues[n.n] and r.rank = k.rank
              and r.seq >= coalesce(p_low[10 * (n.n - 1) + k.rank + 1], 0)
            order by r.seq limit 1) h
    ), served_next as (
        select h.place, h.n, h.rank from head h order by h.place limit 1
    )
    select h.place, h.seq
    from head h cross join served_next f
    cross join lateral (select p_aging * case when h.n = f.n then h.rank - f.rank
                                              else greatest(1, h.rank - f.rank) end as allowed) a
    where h.place <> f.place and h.waited > a.allowed
    order by h.waited - a.allowed desc, h.place limit p_most;
end $$;

CREATE FUNCTION evertick.overdue_runs(p_shard smallint) RETURNS SETOF bigint
    LANGUAGE sql STABLE
    AS $$
    select late.run_id from (
        select r.run_id from dag d
        cross join lateral (select x.run_id, x.version_id, x.started_at from run_status x
                            where x.dag_id = d.dag_id and x.state in ('queued', 'running') and x.state = 'running' offset 0) r
        cross join lateral (select x.run_timeout from dag_version x where x.version_id = r.version_id offset 0) v
        where d.has_run_timeout and d.shard = p_shard and r.started_at + make_interval(secs => v.run_timeout) <= clock()
        offset 0) late
    where is_overdue(late.run_id) and not is_set_aside('run', late.run_id)
    limit 100
$$;

CREATE FUNCTION evertick.pass_gates() RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    coming text := nullif(current_setting('evertick.entering', true), '');
    released text := nullif(current_setting('evertick.released', true), '');
    noted text := nullif(current_setting('evertick.noted', true), '');
    entering ended[] := '{}';
    heads ended[];
    outside ended[];
    offered int := 0;
begin
    if coming is null and released is null and noted is null then
        return 0;
    end if;
    while coming is not null loop
        perform set_config('evertick.entering', '', true);
        select array_agg(e) filter (where s.is_mapped), array_agg(e) filter (where s.defers),
               entering || array_agg(e) filter (where not s.is_mapped and not s.defers) into heads, outside, entering
        from unnest(coming::ended[]) e
        cross join lateral (select x.is_mapped and (e).map_index = -1 as is_mapped, x.defers from task_spec x
                            where x.version_id = (e).version_id and x.idx = (e).idx offset 0) s;
        if outside is not null then
            perform defer(outside);
        end if;
        exit when heads is null;
        offered := offered + expand_all(heads);
        coming := nullif(current_setting('evertick.entering', true), '');
    end loop;
    -- what became of that may have noted more
    released := nullif(current_setting('evertick.released', true), '');
    noted := nullif(current_setting('evertick.noted', true), '');
    perform set_config('evertick.released', '', true);
    if noted is not null then
        perform set_config('evertick.noted', '', true);
    end if;
    return offered + work_gates(entering, coalesce(noted, '{}')::ended[], coalesce(released, '{}')::gate_weight[], '{}');
end $$;

CREATE FUNCTION evertick.past_name(p_run_id bigint, p_idx integer) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
    select p_run_id || '/' || p_idx
$$;

CREATE FUNCTION evertick.past_of(p_run_id bigint, p_version_id integer, p_idx integer) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
declare
    this run;
    before run_status;
    wanted text;
begin
    select r.* into this from run r where r.run_id = p_run_id;
    select s.* into before from run_status s where s.run_id = case this.kind
        when 'scheduled' then (select r.run_id from run r where r.schedule_id = this.schedule_id and r.fire_at < this.fire_at
                               order by r.fire_at desc limit 1)
        when 'backfill' then (select o.run_id from backfill_run b
                              join backfill_run o on o.dag_id = b.dag_id and o.schedule_id = b.schedule_id
                                                 and o.fire_at < b.fire_at and o.backfill_id = b.backfill_id
                              where b.run_id = p_run_id order by o.fire_at desc, o.run_id desc limit 1) end;
    select s.name into wanted from task_spec s where s.version_id = p_version_id and s.idx = p_idx;
    -- Most runs have the version of the run before, where the place is the same; only otherwise is it looked for.
    return past_name(before.run_id, coalesce(
        (select s.idx from task_spec s where s.version_id = before.version_id and s.idx = p_idx and s.name = wanted),
        (select s.idx from task_spec s where s.version_id = before.version_id and s.name = wanted)));
end $$;

CREATE FUNCTION evertick.pattern_regex(p_pattern text) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $_$
    select '^' || string_agg(case x.segment when '**' then '([^:]+::)*'
                                  else replace(replace(x.segment, '.', '\.'), '*', '[^:]*') || '::' end, '' order by x.place) || '$'
    from unnest(string_to_array(case when strpos(p_pattern, '::') = 0 and p_pattern <> '**' then '**::' || p_pattern else p_pattern end,
                                '::')) with ordinality as x(segment, place)
$_$;

CREATE FUNCTION evertick.pause_backfill(p_backfill_id integer, p_paused boolean, p_actor text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    update backfill b set state = case when p_paused then 'paused' else 'running' end
    where b.backfill_id = p_backfill_id and b.state = case when p_paused then 'running' else 'paused' end;
    if not found then
        return false;
    end if;
    insert into journal (occurred_at, verb, actor, dag_id, detail)
    select clock(), case when p_paused then 'pause' else 'resume' end, p_actor, b.dag_id, jsonb_build_object('backfill', p_backfill_id)
    from backfill b where b.backfill_id = p_backfill_id;
    return true;
end $$;

CREATE FUNCTION evertick.pause_dag(p_dag_id integer, p_paused boolean, p_seen jsonb, p_settle jsonb, p_actor text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    perform lock_schedules(d.name) from dag d where d.dag_id = p_dag_id;
    perform refuse_moved(d.name, null, p_seen) from dag d where d.dag_id = p_dag_id;
    if p_paused then
        perform settle_schedules(p_settle);
    end if;
    perform 1 from run_status r where r.dag_id = p_dag_id and r.state = 'running' order by r.run_id for no key update;
    update dag d set paused = p_paused where d.dag_id = p_dag_id and d.deleted_at is null and d.paused <> p_paused;
    if not found then
        perform pass_gates();
        return false;
    end if;
    update schedule_state s set paused = p_paused or s.is_held
    from schedule c where c.schedule_id = s.schedule_id and c.dag_id = p_dag_id;
    if p_paused then
        perform hold_dag(p_dag_id);
    else
        perform unhold_dag(p_dag_id);
        perform settle_schedules(p_settle);
    end if;
    insert into journal (occurred_at, verb, actor, dag_id, detail)
    values (t, case when p_paused then 'pause' else 'unpause' end, p_actor, p_dag_id, '{}');
    perform pass_gates();
    return true;
end $$;

CREATE FUNCTION evertick.promote(p_shard smallint, p_epoch bigint, p_limit integer, p_bound integer, OUT promoted integer, OUT refused integer, OUT next_due timestamp with time zone, OUT has_line boolean) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    q text;
    room int;
    chosen tid[];
    one tid;
    guilty bigint;
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    promoted := 0;
    refused := 0;
    with due as materialized (
        select come.* from (
            select w.ctid as place, w.due_at, w.run_id, w.idx, w.map_index from timer w
            where w.shard = p_shard and w.due_at <= t order by w.due_at offset 0) come
        cross join lateral (select from run_status r where r.run_id = come.run_id for no key update skip locked) locked
        limit p_limit
    ), passed as (
        delete from timer w where w.ctid = any(array(select d.place from due d))
    )
    insert into retry_line (shard, queue, due_at, run_id, idx, map_index)
    select p_shard, s.queue, d.due_at, d.run_id, d.idx, d.map_index
    from due d
    cross join lateral (select x.version_id from task x where x.run_id = d.run_id and x.idx = d.idx
                        and x.map_index = d.map_index and x.state = 'pending' and x.not_before = d.due_at offset 0) k
    cross join lateral (select x.queue from task_spec x where x.version_id = k.version_id and x.idx = d.idx offset 0) s
    on conflict do nothing;
    q := (select min(l.queue) from retry_line l where l.shard = p_shard);
    while q is not null loop
        room := retry_room(q, p_bound);
        if room > 0 then
            chosen := array(
                select first.place from (
                    select l.ctid as place, l.run_id from retry_line l
                    where l.shard = p_shard and l.queue = q and waits_until(l.run_id, l.idx, l.map_index, l.due_at)
                    order by l.due_at offset 0) first
                cross join lateral (select from run_status r where r.run_id = first.run_id for no key update skip locked) locked
                limit least(room, p_limit));
            if cardinality(chosen) = 0 then
                delete from retry_line l
                where l.shard = p_shard and l.queue = q and not waits_until(l.run_id, l.idx, l.map_index, l.due_at);
            end if;
            begin
                promoted := promoted + let_retries_in(chosen);
            exception when others then
                if not is_poison(sqlstate) then
                    raise;
                end if;
                foreach one in array chosen loop
                    begin
                        promoted := promoted + let_retries_in(array[one]);
                    exception when others then
                        if not is_poison(sqlstate) then
                            raise;
                        end if;
                        -- Out of the line; reconcile winds its timer up again when its time to be tried again has come.
                        delete from retry_line l where l.ctid = one returning l.run_id into guilty;
                        perform set_aside('run', guilty, 'promote', sqlerrm, true);
                        refused := refused + 1;
                    end;
                end loop;
            end;
        end if;
        q := (select min(l.queue) from retry_line l where l.shard = p_shard and l.queue > q);
    end loop;
    promoted := promoted + pass_gates();
    select min(w.due_at) into next_due from timer w where w.shard = p_shard;
    has_line := exists (select 1 from retry_line l where l.shard = p_shard);
end $$;

CREATE FUNCTION evertick.prune_journal(p_shard smallint, p_epoch bigint, p_entry_ids bigint[], p_before timestamp with time zone, p_actor text, p_entry bigint, OUT pruned bigint, OUT entry bigint) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    delete from journal where ctid = any(array(
        select j.ctid from journal j
        where j.entry_id = any(p_entry_ids) and j.occurred_at < p_before for update skip locked));
    get diagnostics pruned = row_count;
    entry := note_pruned(p_entry, p_actor, p_before, 'journal', pruned);
end $$;

CREATE FUNCTION evertick.prune_kind(p_shard smallint, p_epoch bigint, p_kind text, p_before timestamp with time zone, p_limit integer, p_actor text, p_entry bigint, OUT pruned bigint, OUT entry bigint) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    if p_kind = 'skip_records' then
        -- Schedule by schedule: within one, ranges are in the order of time. A range is recorded when it is over.
        delete from skip_record where ctid = any(array(
            select k.ctid from schedule c cross join lateral (
                select x.ctid from skip_record x
                where x.schedule_id = c.schedule_id and x.first_at < p_before and x.recorded_at < p_before
                order by x.first_at limit p_limit for update skip locked) k
            limit p_limit));
    elsif p_kind = 'causes' then
        -- What fires of long ago came after, schedule by schedule as well.
        delete from cause where ctid = any(array(
            select k.ctid from schedule c cross join lateral (
                select x.ctid from cause x
                where x.schedule_id = c.schedule_id and x.fire_at < p_before
                order by x.fire_at limit p_limit for update skip locked) k
            limit p_limit));
    elsif p_kind = 'alerts' then
        -- Their episode is long over.
        delete from alert where ctid = any(array(
            select a.ctid from alert a where a.ended_at < p_before limit p_limit for update skip locked));
    elsif p_kind = 'notifications' then
        -- Sent or given up. The oldest first, by the key: what waits is never old for long.
        delete from outbox where ctid = any(array(
            select x.ctid from outbox x where x.ended_at < p_before order by x.delivery_id limit p_limit for update skip locked));
    elsif p_kind = 'events' then
        -- In the order of their ids, which is that of time: the first young one ends the look.
        delete from event where ctid = any(array(
            select x.ctid from (select e.ctid, e.sent_at from event e where e.is_heard order by e.event_id limit p_limit for update skip locked) x
            where x.sent_at < p_before));
    elsif p_kind = 'asset_updates' then
        delete from asset_update where ctid = any(array(
            select x.ctid from (select u.ctid, u.occurred_at from asset_update u order by u.update_id limit p_limit for update skip locked) x
            where x.occurred_at < p_before));
    elsif p_kind = 'backfills' then
        -- They are over and their runs are all counted; the runs go by themselves.
        delete from backfill where ctid = any(array(
            select b.ctid from backfill b where b.finished_at < p_before and b.open_runs = 0
            limit p_limit for update skip locked));
    elsif p_kind = 'runners' then
        -- Gone for long. One that comes back finds out that it is gone by not being there.
        delete from runner where ctid = any(array(
            select r.ctid from runner r
            where r.gone_at < p_before and not exists (select 1 from lease l where l.session = r.session)
            limit p_limit for update of r skip locked));
    elsif p_kind = 'bundles' then
        -- Code that no version has. Publishing puts the code first and the version a moment later, and puts its date anew even if
        -- it is there already: an old date means that nobody is about to use it.
        delete from bundle where ctid = any(array(
            select b.ctid from bundle b
            where b.created_at < p_before and b.hash <> all(select v.bundle_hash from dag_version v)
            limit p_limit for update skip locked));
    else
        raise exception 'nothing is pruned as %', p_kind;
    end if;
    get diagnostics pruned = row_count;
    entry := note_pruned(p_entry, p_actor, p_before, p_kind, pruned);
end $$;

CREATE FUNCTION evertick.prune_runs(p_shard smallint, p_epoch bigint, p_run_ids bigint[], p_before timestamp with time zone, p_actor text, p_entry bigint, OUT pruned bigint, OUT entry bigint) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    doomed bigint[];
begin
    perform fence(p_shard, p_epoch);
    doomed := array(
        select r.run_id from run_status r
        where r.run_id = any(p_run_ids) and r.state in ('success', 'failed', 'canceled') and r.finished_at < p_before
        order by r.run_id for update skip locked);
    perform forget_runs(p_shard, doomed);
    pruned := cardinality(doomed);
    entry := note_pruned(p_entry, p_actor, p_before, 'runs', pruned);
end $$;

CREATE FUNCTION evertick.prune_versions(p_shard smallint, p_epoch bigint, p_before timestamp with time zone, p_limit integer, p_actor text, p_entry bigint, OUT pruned bigint, OUT entry bigint) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    doomed int[];
begin
    perform fence(p_shard, p_epoch);
    doomed := array(
        select v.version_id from dag_version v join dag d on d.dag_id = v.dag_id
        where v.retired_at < p_before and v.version_id is distinct from d.version_id
          and not exists (select 1 from run r where r.dag_id = v.dag_id and r.version_id = v.version_id
                          and r.run_id <= v.final_run_id + 100000)
          and not exists (select 1 from moved_run m where m.version_id = v.version_id)
        limit p_limit for no key update skip locked);
    insert into remains (shard, kind, id) select p_shard, 'version', d from unnest(doomed) d;
    delete from dag_version v where v.version_id = any(doomed);
    pruned := cardinality(doomed);
    entry := note_pruned(p_entry, p_actor, p_before, 'versions', pruned);
end $$;

CREATE FUNCTION evertick.publish_dag(p_dag jsonb, p_seen jsonb, p_settle jsonb, p_actor text, OUT out_dag_id integer, OUT out_version_id integer, OUT is_new boolean, OUT rerouted integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
    before int;
begin
    perform lock_schedules(p_dag->>'name');
    perform refuse_moved(p_dag->>'name', null, p_seen);
    before := (select d.version_id from dag d where d.name = p_dag->>'name');
    insert into dag as d (name, file, paused, shard)
    values (p_dag->>'name', p_dag->>'file', coalesce((p_dag->>'starts_paused')::boolean, false),
            shard_of(p_dag->>'name', open_shards()))
    on conflict (name) do update set file = excluded.file, deleted_at = null
    returning d.dag_id into out_dag_id;

    insert into dag_version as v (dag_id, number, hash, bundle_hash, spec, task_count, run_timeout, run_retries, created_at)
    select out_dag_id, coalesce(max(v.number), 0) + 1, p_dag->>'hash', p_dag->>'bundle_hash', p_dag->'spec',
           jsonb_array_length(p_dag->'tasks'), (p_dag->>'run_timeout')::double precision,
           coalesce((p_dag->>'run_retries')::int, 0), t
    from dag_version v where v.dag_id = out_dag_id
    on conflict (dag_id, hash, bundle_hash) do nothing
    returning v.version_id into out_version_id;
    is_new := out_version_id is not null;
    if is_new then
        insert into task_spec (version_id, idx, name, queue, priority, rule, upstream_total, setup_total, is_setup, is_leaf,
                               starts_at_once, max_attempts, rerun_on_loss, queue_timeout, outlets, is_gated, is_ordered,
                               awaits_past, is_mapped, defers, notifies, grp, decides_grp)
        select out_version_id, x.idx, x.name, x.queue, x.priority, x.rule, x.upstream_total, x.setup_total, x.is_setup,
               x.is_leaf, x.starts_at_once, x.max_attempts, x.rerun_on_loss, x.queue_timeout, x.outlets, coalesce(x.is_gated, false),
               coalesce(x.is_ordered, false), coalesce(x.awaits_past, false), coalesce(x.is_mapped, false),
               coalesce(x.defers, false), coalesce(x.notifies, false), x.grp, coalesce(x.decides_grp, false)
        from jsonb_to_recordset(p_dag->'tasks') as x(idx int, name text, queue text, priority smallint, rule trigger_rule,
             upstream_total int, setup_total int, is_setup boolean, is_leaf boolean, starts_at_once boolean,
             max_attempts int, rerun_on_loss boolean, queue_timeout double precision, outlets text[], is_gated boolean,
             is_ordered boolean, awaits_past boolean, is_mapped boolean, defers boolean,
             notifies boolean, grp int, decides_grp boolean);
        insert into retry_group (version_id, grp, name, retries, members)
        select out_version_id, x.grp, x.name, x.retries, x.members
        from jsonb_to_recordset(p_dag->'groups') as x(grp int, name text, retries int, members int[]);
        insert into task_gate (version_id, idx, place, kind, name, parts, weight, capacity, version, period)
        select out_version_id, x.idx, x.place, x.kind, x.name, x.parts, x.weight, x.capacity, x.version, x.period
        from jsonb_to_recordset(p_dag->'gates')
            as x(idx int, place int, kind gate_kind, name text, parts jsonb, weight int, capacity int, version jsonb,
                 period double precision);
        insert into task_mapping (version_id, idx, how, most)
        select out_version_id, x.idx, x.how, x.most from jsonb_to_recordset(p_dag->'mappings') as x(idx int, how map_how, most int);
        insert into task_list (version_id, idx, place, src, length)
        select out_version_id, x.idx, x.place, x.src, x.length
        from jsonb_to_recordset(p_dag->'lists') as x(idx int, place int, src int, length int);
        insert into task_child (version_id, idx, dag, params, given, waits, timeout)
        select out_version_id, x.idx, x.dag, x.params, x.given, x.waits, x.timeout
        from jsonb_to_recordset(p_dag->'children')
            as x(idx int, dag text, params jsonb, given jsonb, waits boolean, timeout double precision);
        insert into notice (version_id, idx, event, sink, every_time)
        select out_version_id, x.idx, x.event, x.sink, x.every_time
        from jsonb_to_recordset(p_dag->'notices') as x(idx int, event text, sink text, every_time boolean);
        insert into task_deadline (version_id, idx, seconds)
        select out_version_id, x.idx, x.seconds
        from jsonb_to_recordset(p_dag->'deadlines') as x(idx int, seconds double precision);
        insert into task_wait (version_id, idx, kind, until, seconds, at, timezone, parts, lookback, timeout, on_timeout, on_reject, backoff, longest)
        select out_version_id, x.idx, x.kind, x.until, x.seconds, x.at, x.timezone, x.parts, x.lookback, x.timeout, x.on_timeout, x.on_reject,
               x.backoff, x.longest
        from jsonb_to_recordset(p_dag->'waits') as x(idx int, kind wait_kind, until timestamptz, seconds double precision, at text,
             timezone text, parts jsonb, lookback double precision, timeout double precision, on_timeout task_state, on_reject task_state,
             backoff double precision, longest double precision);
        insert into edge (version_id, src, dst, out_of)
        select out_version_id, (x->>0)::int, (x->>1)::int, (x->>2)::int from jsonb_array_elements(p_dag->'edges') x;
        insert into task_input (version_id, idx, src)
        select out_version_id, (x->>0)::int, (x->>1)::int from jsonb_array_elements(p_dag->'inputs') x;
    else
        select v.version_id into out_version_id from dag_version v
        where v.dag_id = out_dag_id and v.hash = p_dag->>'hash' and v.bundle_hash = p_dag->>'bundle_hash';
        rerouted := reroute(out_dag_id, out_version_id, p_dag->'tasks', p_actor);
    end if;
    perform settle_schedules(p_settle, true);
    -- Which runs can have the version that is replaced: prune goes by that. By the sequence, because ids that were drawn count.
    update dag_version v set retired_at = t, final_run_id = (select last_value from run_run_id_seq)
    from dag d where d.dag_id = out_dag_id and v.version_id = d.version_id and v.version_id <> out_version_id;
    update dag_version v set retired_at = null, final_run_id = null
    where v.version_id = out_version_id and v.retired_at is not null;
    update dag d set version_id = out_version_id, max_active_runs = (p_dag->>'max_active_runs')::int
    where d.dag_id = out_dag_id
      and (d.version_id, d.max_active_runs) is distinct from (out_version_id, (p_dag->>'max_active_runs')::int);
    update dag d set has_run_timeout = true
    where d.dag_id = out_dag_id and not d.has_run_timeout and (p_dag->>'run_timeout') is not null;
    update dag d set has_run_retries = true
    where d.dag_id = out_dag_id and not d.has_run_retries and (p_dag->>'run_retries')::int > 0;
    update dag d set awaits_past = true
    where d.dag_id = out_dag_id and not d.awaits_past and exists (
        select 1 from task_spec s where s.version_id = out_version_id and s.awaits_past);
    update dag d set notifies = true
    where d.dag_id = out_dag_id and not d.notifies and exists (
        select 1 from notice n where n.version_id = out_version_id and n.idx = -1);
    -- A run of another version may be what a run waits for: whoever ends its tasks must tell.
    update task_spec s set awaits_past = true
    from dag d, dag_version v
    where d.dag_id = out_dag_id and d.awaits_past and v.dag_id = d.dag_id and s.version_id = v.version_id and not s.awaits_past
      and s.name in (select n.name from task_spec n join dag_version w on w.version_id = n.version_id
                     where w.dag_id = d.dag_id and n.awaits_past);
    update dag d set is_awaited = true
    where d.dag_id = out_dag_id and not d.is_awaited and exists (
        select 1 from awaited w where w.kind in ('dag', 'end') and w.name = d.name);
    perform sync_schedules(out_dag_id, p_dag->'schedules', false, p_actor);
    if is_new or before is distinct from out_version_id then
        insert into journal (occurred_at, verb, actor, dag_id, detail)
        values (t, 'publish', p_actor, out_dag_id, jsonb_build_object('version_id', out_version_id, 'hash', p_dag->>'hash'));
    end if;
    perform pass_gates();
end $$;

CREATE FUNCTION evertick.put_note(p_run_id bigint, p_idx integer, p_map_index integer, p_content text, p_actor text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    perform 1 from run_status r where r.run_id = p_run_id for key share;
    if not found then
        return false;
    end if;
    if p_content is null then
        delete from note n where n.run_id = p_run_id and n.idx = p_idx and n.map_index = p_map_index;
    else
        insert into note as n (run_id, idx, map_index, content, written_by, written_at)
        values (p_run_id, p_idx, p_map_index, p_content, p_actor, clock())
        on conflict (run_id, idx, map_index) do update
            set content = excluded.content, written_by = excluded.written_by, written_at = excluded.written_at;
    end if;
    insert into journal (occurred_at, verb, actor, run_id, idx, map_index, detail)
    values (clock(), 'note', p_actor, p_run_id, nullif(p_idx, -1), case when p_idx >= 0 then p_map_index end,
            jsonb_build_object('is_taken_away', p_content is null));
    return true;
end $$;

CREATE FUNCTION evertick.put_output(p_run_id bigint, p_idx integer, p_map_index integer, p_name text, p_value jsonb, p_must text, p_actor text) RETURNS text
    LANGUAGE plpgsql
    AS $_$
declare
    owner task;
    before jsonb;
    named jsonb;
    returned jsonb;
    is_there boolean;
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    if not found then
        return null;
    end if;
    select * into owner from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.state = 'success';
    if owner.run_id is null then
        return null;
    end if;
    select v.value into before from result v where v.run_id = p_run_id and v.idx = p_idx and v.map_index = p_map_index;
    named := case when before->>'$evertick' = 'outputs' then before->'named' else '{}' end;
    returned := case when before->>'$evertick' = 'outputs' then nullif(before->'value', 'null') else before end;
    is_there := case when p_name is null then returned is not null else named ? p_name end;
    if p_must = 'new' and is_there then
        return 'exists';
    elsif p_must = 'old' and not is_there then
        return 'missing';
    end if;
    if p_name is null then
        returned := p_value;
    else
        named := case when p_value is null then named - p_name else named || jsonb_build_object(p_name, p_value) end;
    end if;
    if named <> '{}' then
        returned := jsonb_build_object('$evertick', 'outputs', 'value', returned, 'named', named);
    end if;
    if returned is null then
        delete from result v where v.run_id = p_run_id and v.idx = p_idx and v.map_index = p_map_index;
    else
        insert into result as v (run_id, idx, map_index, epoch, value) values (p_run_id, p_idx, p_map_index, owner.epoch, returned)
        on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value;
    end if;
    insert into journal (occurred_at, verb, actor, run_id, idx, map_index, detail)
    values (clock(), 'put_output', p_actor, p_run_id, p_idx, p_map_index,
            jsonb_strip_nulls(jsonb_build_object('name', p_name, 'is_taken_away', nullif(p_value is null, false))));
    return 'done';
end $_$;

CREATE FUNCTION evertick.put_schedule(p_dag_id integer, p_schedule jsonb, p_expected integer, p_request text, p_origin text, p_seen jsonb, p_settle jsonb, p_actor text) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    put int;
    id int;
    t timestamptz := clock();
begin
    perform lock_schedules(d.name) from dag d where d.dag_id = p_dag_id;
    select c.version into put from schedule c
    where c.dag_id = p_dag_id and c.name = p_schedule->>'name' and c.request = p_request and c.deleted_at is null;
    if found then
        return put;
    end if;
    perform refuse_moved(d.name, p_schedule->>'name', p_seen) from dag d where d.dag_id = p_dag_id;
    perform settle_schedules(p_settle, true);
    insert into schedule as c (dag_id, name, version, spec, params, misfire, window_seconds, catchup_limit, overlap, start_within,
                               finish_within, delay_seconds, origin, request, changed_by, changed_at)
    select p_dag_id, w.name, 1, w.spec, w.params, w.misfire, w.window_seconds, w.catchup_limit, w.overlap, w.start_within,
           w.finish_within, w.delay_seconds, p_origin, p_request, p_actor, t
    from read_schedules(jsonb_build_array(p_schedule)) w
    where coalesce(p_expected, 0) = 0 or exists (
        select 1 from schedule x where x.dag_id = p_dag_id and x.name = p_schedule->>'name')
    on conflict (dag_id, name) do update
        set version = c.version + 1, spec = excluded.spec, params = excluded.params, misfire = excluded.misfire,
            window_seconds = excluded.window_seconds, catchup_limit = excluded.catchup_limit, overlap = excluded.overlap,
            start_within = excluded.start_within, finish_within = excluded.finish_within,
            delay_seconds = excluded.delay_seconds, origin = p_origin, request = p_request, changed_by = p_actor,
            changed_at = t, deleted_at = null
        where p_expected is null or p_expected = case when c.deleted_at is null then c.version else 0 end
    returning c.version, c.schedule_id into put, id;
    if put is null then
        perform pass_gates();
        return null;
    end if;
    insert into schedule_state as s (schedule_id, shard, version, next_due, paused)
    select id, d.shard, put, (p_schedule->>'next_due')::timestamptz, d.paused from dag d where d.dag_id = p_dag_id
    on conflict (schedule_id) do update
        set version = excluded.version, next_due = excluded.next_due, error = null,
            -- a pause by hand ends when the schedule is the code's again
            is_held = s.is_held and p_origin = 'user', paused = excluded.paused or (s.is_held and p_origin = 'user');
    update dag d set has_turns = true
    where d.dag_id = p_dag_id and not d.has_turns and p_schedule->>'overlap' <> 'allow';
    insert into skip_record (schedule_id, first_at, last_at, count, reason, recorded_at)
    select id, k.first_at, k.last_at, k.count, k.reason, t
    from jsonb_to_record(p_schedule->'skipped') as k(first_at timestamptz, last_at timestamptz, count bigint, reason text)
    where jsonb_typeof(p_schedule->'skipped') = 'object' and put = 1
    on conflict (schedule_id, first_at) do nothing;
    perform note_schedules(array[id], 'put');
    insert into journal (occurred_at, verb, actor, dag_id, detail)
    values (t, 'put_schedule', p_actor, p_dag_id, p_schedule || jsonb_build_object('version', put));
    perform pass_gates();
    return put;
end $$;

CREATE FUNCTION evertick.put_value(p_kind text, p_name text, p_content text, p_key_id text, p_description text, p_actor text, p_only_new boolean) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
declare
    is_new boolean;
begin
    insert into stored_value as v (kind, name, content, key_id, description, changed_by, changed_at)
    values (p_kind, p_name, p_content, p_key_id, p_description, p_actor, clock())
    on conflict (kind, name) do update
        set content = excluded.content, key_id = excluded.key_id, description = coalesce(excluded.description, v.description),
            changed_by = excluded.changed_by, changed_at = excluded.changed_at
        where not p_only_new
    returning v.xmax = 0 into is_new;
    if is_new is null then
        return null;
    end if;
    insert into journal (occurred_at, verb, actor, detail)
    values (clock(), 'put_value', p_actor, jsonb_build_object('kind', p_kind, 'name', p_name, 'is_new', is_new));
    return is_new;
end $$;

CREATE FUNCTION evertick.queue_facts(p_queue text, p_version_id integer, p_idx integer) RETURNS jsonb
    LANGUAGE sql STABLE
    AS $$
    select jsonb_build_object(
        'queue', p_queue,
        'others', (select coalesce(jsonb_agg(distinct m.pattern), '[]') from runner x cross join unnest(x.match) as m(pattern)
                   where p_queue = any(x.queues) and x.gone_at is null and x.request is null
                     and not takes(x.match, p_version_id, p_idx)),
        'runners', count(*) filter (where r.gone_at is null and r.request is null),
        'draining', count(*) filter (where r.gone_at is null and r.request is not null),
        'slots', coalesce(sum(r.slots) filter (where r.gone_at is null and r.request is null), 0),
        'busy', coalesce(sum(busy_slots(r.session)) filter (where r.gone_at is null and r.request is null), 0),
        'last', (select jsonb_build_object('runner', x.runner_id, 'until', x.gone_at) from runner x
                 where p_queue = any(x.queues) and x.gone_at is not null and takes(x.match, p_version_id, p_idx)
                 order by x.gone_at desc limit 1))
    from runner r where p_queue = any(r.queues) and takes(r.match, p_version_id, p_idx)
$$;

CREATE FUNCTION evertick.queue_rows(p_session bigint, p_queues text[], p_places integer[], p_seqs bigint[], p_sessions bigint[]) RETURNS SETOF evertick.queued_row
    LANGUAGE plpgsql
    AS $$
declare
    room int;
    t timestamptz := clock();
begin
    -- A claim whose answer never came may still be under way: they count one after the other.
    perform 1 from runner r where r.session = p_session for no key update;
    room := dispatch_room(p_session);
    if coalesce(room, 0) <= 0 then
        return;
    end if;
    return query
    with picked as materialized (
        select w.turn, w.place, r.spot, r.seq, r.queue, r.run_id, r.idx, r.map_index
        from unnest(p_places, p_seqs) with ordinality w(place, seq, turn)
        cross join lateral (
            select q.ctid as spot, q.seq, q.queue, q.run_id, q.idx, q.map_index from ready q
            where q.queue = p_queues[w.place / 10 + 1] and q.rank = (w.place % 10)::smallint and q.seq = w.seq
            for update skip locked) r
        limit room
    ), taken as (
        delete from ready r where r.ctid = any(array(select p.spot from picked p))
    ), moved as (
        update task k
        set state = 'queued', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_sessions[p.turn],
            taken_at = t, started_at = null, finished_at = null, reason = null, exit_code = null
        from picked p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.epoch, k.session, p.turn, p.place, p.seq, p.queue
    ), listed as (
        insert into dispatch (run_id, idx, map_index, epoch, session, executor, owner, queue, queued_at)
        select m.run_id, m.idx, m.map_index, m.epoch, m.session, r.executor, p_session, m.queue, t
        from moved m cross join (select x.executor from runner x where x.session = p_session) r
    )
    select m.run_id, m.idx, m.map_index, m.epoch, m.session, m.place, m.seq from moved m order by m.turn;
end $$;

CREATE FUNCTION evertick.quit_lines(p_run_ids bigint[], p_idx integer, p_map_index integer DEFAULT NULL::integer) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    touched gate_weight[];
begin
    with gone as (
        delete from gate_wait w where w.run_id = any(p_run_ids) and (p_idx is null or w.idx = p_idx)
          and (p_map_index is null or w.map_index = p_map_index)
        returning w.line_id
    )
    select array_agg(distinct row(l.blocked_on, 0)::gate_weight) into touched
    from gone g join gate_line l on l.line_id = g.line_id where l.blocked_on is not null;
    if touched is not null then
        perform set_config('evertick.released', (
            coalesce(nullif(current_setting('evertick.released', true), ''), '{}')::gate_weight[] || touched)::text, true);
    end if;
end $$;

CREATE FUNCTION evertick.raise_alerts(p_shard smallint, p_epoch bigint, p_unfired_seconds double precision, p_limit integer) RETURNS TABLE(kind text, dag text, schedule text, run_id bigint, task text, has_ended boolean)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
declare
    t timestamptz := clock();
    judged jsonb;
    raised bigint[];
    of_no_schedule late[];
    ended bigint[];
    newest bigint;
begin
    perform fence(p_shard, p_epoch);
    select coalesce(max(alert_id), 0) into newest from alert;
    with due as (
        delete from deadline x where x.ctid = any(array(
            select y.ctid from deadline y where y.shard = p_shard and y.due_at <= t
            order by y.due_at limit p_limit for update skip locked))
        returning x.run_id, x.kind, x.idx, x.due_at
    )
    select jsonb_agg(jsonb_build_object('schedule_id', r.schedule_id, 'run_id', d.run_id, 'due_at', d.due_at,
                     'task', coalesce(s.name, ''),
                     'kind', case d.kind when 'start' then 'not_started' else 'not_finished' end,
                     'in_time', case d.kind when 'task' then was_task_in_time(d.run_id, d.idx, d.due_at)
                                            else was_in_time(d.run_id, d.kind, d.due_at) end))
    into judged
    from due d
    cross join lateral (select y.schedule_id, y.version_id from run y where y.run_id = d.run_id offset 0) r
    left join lateral (select y.name from task_spec y where y.version_id = r.version_id and y.idx = d.idx offset 0) s on true;
    of_no_schedule := array(
        select row(x.kind, x.schedule_id, x.run_id, x.task, x.due_at)::late
        from jsonb_to_recordset(coalesce(judged, '[]')) as x(schedule_id int, kind text, run_id bigint, due_at timestamptz, task text,
             in_time boolean)
        where not x.in_time and x.schedule_id is null);
    with missed as (
        select x.schedule_id, x.kind, x.task, min(x.run_id) as run_id, min(x.due_at) as due_at, max(x.due_at) as last_due_at,
               count(*)::int as count
        from jsonb_to_recordset(coalesce(judged, '[]')) as x(schedule_id int, kind text, run_id bigint, due_at timestamptz, task text,
             in_time boolean)
        where not x.in_time and x.schedule_id is not null group by 1, 2, 3
        union all
        select s.schedule_id, 'not_fired', '', null, s.next_due, s.next_due, 1
        from (select y.schedule_id, y.next_due from schedule_state y
              where y.shard = p_shard and y.next_due < t - make_interval(secs => p_unfired_seconds) and y.next_due is not null
                and not y.paused and y.error is null
              order by y.next_due limit p_limit) s
        union all
        select s.schedule_id, 'not_fired', '', null, s.next_due, s.next_due, 1
        from quarantine q
        cross join lateral (select * from schedule_state y where y.schedule_id = q.subject_id offset 0) s
        where q.kind = 'schedule' and s.shard = p_shard and is_unfired(s, t, p_unfired_seconds)
    ), written as (
        insert into alert as a (kind, schedule_id, task, run_id, due_at, last_due_at, count, raised_at)
        select m.kind, m.schedule_id, m.task, min(m.run_id), min(m.due_at), max(m.last_due_at), max(m.count), t from missed m
        group by 1, 2, 3
        on conflict (schedule_id, kind, task) where ended_at is null do update
            set count = a.count + excluded.count, last_due_at = excluded.last_due_at
            where a.kind <> 'not_fired'
        returning a.alert_id
    )
    select array_agg(w.alert_id) filter (where w.alert_id > newest) into raised from written w;
    if raised is not null or cardinality(of_no_schedule) > 0 then
        perform tell_alerts(of_no_schedule || array(
            select row(a.kind, a.schedule_id, a.run_id, a.task, a.due_at)::late from alert a
            where a.alert_id = any(raised) order by a.alert_id));
    end if;
    with over as (
        update alert a set ended_at = t
        where a.ended_at is null and case a.kind
            when 'not_fired' then not exists (
                select 1 from schedule_state s where s.schedule_id = a.schedule_id and is_unfired(s, t, p_unfired_seconds))
            else not has_deadline(a) or exists (
                select 1 from jsonb_to_recordset(coalesce(judged, '[]')) as x(schedule_id int, kind text, due_at timestamptz, task text,
                     in_time boolean)
                where x.schedule_id = a.schedule_id and x.kind = a.kind and x.task = a.task and x.in_time
                  and x.due_at > a.last_due_at) end
        returning a.alert_id
    )
    select array_agg(o.alert_id) into ended from over o;
    return query
    select a.kind, d.name, c.name, a.run_id, a.task, coalesce(a.alert_id = any(ended), false)
    from alert a join schedule c on c.schedule_id = a.schedule_id join dag d on d.dag_id = c.dag_id
    where a.alert_id = any(raised || ended)
    union all
    select o.kind, d.name, null, o.run_id, o.task, false
    from unnest(of_no_schedule) o join run r on r.run_id = o.run_id join dag d on d.dag_id = r.dag_id;
end $$;

CREATE FUNCTION evertick.read_reports(p_reports jsonb) RETURNS TABLE(run_id bigint, idx integer, map_index integer, epoch integer, kind text, reason text, result jsonb, exit_code integer, retry_in double precision, no_retry boolean, log text, seq bigint, until bigint, start_in real)
    LANGUAGE sql ROWS 5
    AS $$
    select x.r, x.i, x.m, x.e, x.kind, x.reason, x.result, x.exit_code, x.retry_in, coalesce(x.no_retry, false), x.log,
           coalesce(x.seq, 0), coalesce(x.until, 0), x.start_in
    from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, kind text, reason text, result jsonb,
         exit_code int, retry_in double precision, no_retry boolean, log text, seq bigint, until bigint, start_in real)
$$;

CREATE FUNCTION evertick.read_schedules(p_schedules jsonb) RETURNS TABLE(name text, spec jsonb, params jsonb, misfire text, window_seconds double precision, catchup_limit integer, overlap text, start_within double precision, finish_within double precision, delay_seconds double precision, next_due timestamp with time zone, skipped jsonb)
    LANGUAGE sql STABLE
    AS $$
    select * from jsonb_to_recordset(p_schedules) as x(
        name text, spec jsonb, params jsonb, misfire text, window_seconds double precision, catchup_limit int, overlap text,
        start_within double precision, finish_within double precision, delay_seconds double precision, next_due timestamptz,
        skipped jsonb)
$$;

CREATE FUNCTION evertick.reap_orphan(p_shard smallint, p_epoch bigint, p_run_id bigint, p_after double precision) RETURNS text
    LANGUAGE plpgsql
    AS $$
declare
    status run_status;
    why text := format('orphaned: nothing in it could move for %s s', round(p_after));
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    begin
        select r.* into status from run_status r where r.run_id = p_run_id and r.state = 'running' for no key update;
        if not found or cardinality(reconcile_run(p_run_id)) > 0 or examine_run(p_run_id, 0) <> 'stuck' or not exists (
            select 1 from orphan_watch w where w.run_id = p_run_id and w.watched_seconds >= p_after
               and w.fingerprint = fingerprint(p_run_id)) then
            delete from orphan_watch w where w.run_id = p_run_id;
            perform pass_gates();
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
            failed_leaves = (select count(*) from task k join task_spec s on s.version_id = k.version_id and s.idx = k.idx
                             where k.run_id = p_run_id and s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed'))
        where r.run_id = p_run_id and r.state = 'running';
        insert into journal (occurred_at, verb, actor, run_id, detail)
        values (t, 'reap', 'evertick', p_run_id, jsonb_build_object('reason', why));
        delete from orphan_watch w where w.run_id = p_run_id;
        perform tell_ends(null, array[p_run_id]);
        perform admit_runs(array[status.dag_id]);
        perform pass_gates();
        return 'reaped';
    exception when others then
        if not is_poison(sqlstate) then
            raise;
        end if;
        perform set_aside('run', p_run_id, 'reap', sqlerrm, true);
        return 'refused';
    end;
end $$;

CREATE FUNCTION evertick.reap_runner(p_shard smallint, p_epoch bigint, p_session bigint, p_lost_after double precision, p_infra_retries integer, OUT reaped integer, OUT refused integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    why text;
begin
    perform fence(p_shard, p_epoch);
    refused := 0;
    select case when r.gone_at is not null then 'agent_lost: its runner is gone'
                when r.beat = r.watched_beat and r.silent_seconds > greatest(p_lost_after, r.lost_after_seconds)
                     and not has_claimed_since(p_session, greatest(p_lost_after, r.lost_after_seconds))
                then format('agent_lost: no heartbeat for %s s', round(greatest(p_lost_after, r.lost_after_seconds))) end
    into why from runner r where r.session = p_session for no key update;
    if not found then
        why := 'agent_lost: its runner is unknown';
    end if;
    if why is null then
        return;
    end if;
    reaped := bury(p_session, why, p_infra_retries);
    select count(*) into refused from lease l where l.session = p_session;
end $$;

CREATE FUNCTION evertick.reconcile(p_shard smallint, p_epoch bigint, p_after_dag integer, p_after_run bigint, p_limit integer, p_counts_line boolean DEFAULT true, p_elapsed double precision DEFAULT 0, p_tasks integer DEFAULT 20000, OUT last_dag_id integer, OUT last_run_id bigint, OUT repaired text[], OUT refused integer) RETURNS record
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'on'
    AS $$
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
                   sum(v.task_count + s.extra_tasks) over (order by s.dag_id, s.run_id) - v.task_count - s.extra_tasks as before
            from (select x.dag_id, x.run_id, x.version_id, x.extra_tasks from run_status x join dag d on d.dag_id = x.dag_id
                  where x.state in ('queued', 'running') and x.state = 'running' and d.shard = p_shard
                    and (x.dag_id, x.state, x.run_id) > (p_after_dag, 'running'::run_state, p_after_run)
                  order by x.dag_id, x.state, x.run_id limit p_limit) s
            join dag_version v on v.version_id = s.version_id
        )
        select s.dag_id, s.run_id, case when p_counts_line then coalesce(l.tasks, 0) end as in_line
        from slice s left join (select q.run_id, count(*)::int as tasks from ready q where p_counts_line group by q.run_id) l
             on l.run_id = s.run_id
        where s.before < p_tasks
        order by s.dag_id, s.run_id
    loop
        last_dag_id := r.dag_id;
        last_run_id := r.run_id;
        continue when is_set_aside('run', r.run_id);
        begin
            verdict := examine_run(r.run_id, r.in_line);
            if verdict = 'drifted' then
                repaired := repaired || reconcile_run(r.run_id);
            end if;
            if verdict = 'stuck' then
                insert into orphan_watch as w (run_id, fingerprint, watched_seconds) values (r.run_id, fingerprint(r.run_id), 0)
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
            perform set_aside('run', r.run_id, 'reconcile', sqlerrm, true);
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
        perform take_back(p_shard);
        perform admit_passed_over(p_shard);
        if p_shard = 0 then
            perform reopen_shards();
        end if;
    end if;
    perform pass_gates();
end $$;

CREATE FUNCTION evertick.reconcile_gates(p_shard smallint, p_epoch bigint, p_after integer, p_limit integer, OUT last_gate_id integer, OUT drifted integer, OUT admitted integer) RETURNS record
    LANGUAGE plpgsql
    SET enable_hashjoin TO 'on'
    AS $$
declare
    slice int[];
    stale gate_hold[];
    gone_places gate_order[];
    doubtful int[];
    held int[];
begin
    perform fence(p_shard, p_epoch);
    drifted := 0;
    admitted := 0;
    slice := array(select g.gate_id from gate g where g.gate_id > p_after order by g.gate_id limit p_limit);
    if cardinality(slice) = p_limit then
        last_gate_id := slice[p_limit];
    end if;
    stale := array(
        select h from gate_hold h
        where h.gate_ids && slice and not holds_gates(h.run_id, h.idx, h.map_index));
    gone_places := array(
        select o from gate_order o where o.gate_id = any(slice) and not exists (
            select 1 from task k where k.run_id = o.run_id and k.idx = o.idx and k.map_index = o.map_index
               and k.state in ('pending', 'available', 'queued', 'running', 'deferred')));
    doubtful := array(
        select g.gate_id from gate g
        left join (select n.gate_id, sum(n.weight)::int as weight
                   from gate_hold h cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight)
                   group by n.gate_id) s on s.gate_id = g.gate_id
        where g.gate_id = any(slice)
          and (case g.kind when 'rate' then g.used <> used_of(g.gate_id) else g.used <> coalesce(s.weight, 0) end
               or (g.kind <> 'pool' and g.used = 0)
               or exists (select 1 from gate_pass p where p.gate_id = g.gate_id and p.until <= clock())
               or exists (select 1 from gate_line l where l.blocked_on = g.gate_id and l.need <= room_at(g.gate_id))));
    doubtful := doubtful || array(select unnest(x.gate_ids) from unnest(stale) x) || array(select x.gate_id from unnest(gone_places) x);
    held := array(select g.gate_id from gate g where g.gate_id = any(doubtful) order by g.gate_id for update skip locked);
    if cardinality(held) = 0 then
        return;
    end if;
    delete from gate_hold h
    where (h.run_id, h.idx, h.map_index) in (select x.run_id, x.idx, x.map_index from unnest(stale) x)
      and h.gate_ids <@ held and not holds_gates(h.run_id, h.idx, h.map_index);
    with dropped as (
        delete from gate_order o
        where (o.gate_id, o.run_id, o.idx, o.map_index) in (select x.gate_id, x.run_id, x.idx, x.map_index from unnest(gone_places) x)
          and o.gate_id = any(held)
        returning o.gate_id
    ), repaired as (
        update gate g set used = s.weight
        from (select x.gate_id, used_of(x.gate_id) as weight from unnest(held) as x(gate_id)) s
        where g.gate_id = s.gate_id and (g.used <> s.weight or g.gate_id in (select d.gate_id from dropped d))
        returning g.kind, g.name, g.used
    ), noted as (
        insert into journal (occurred_at, verb, actor, detail)
        select clock(), 'reconcile', 'evertick', jsonb_build_object('repairs', array['gate_drift'], 'gate', r.kind || ' ' || r.name,
                                                                    'used', r.used) from repaired r
    )
    select count(*) into drifted from repaired;
    with gone as (
        delete from gate g
        where g.gate_id = any(held) and g.kind <> 'pool' and g.used = 0
          and g.gate_id not in (select unnest(l.gate_ids || l.checks) from gate_line l)
          and not exists (select 1 from gate_order o where o.gate_id = g.gate_id)
        returning g.gate_id
    )
    select array(select x from unnest(held) x where x not in (select gate_id from gone)) into held;
    admitted := work_gates('{}', '{}', '{}', held);
end $$;

CREATE FUNCTION evertick.reconcile_run(p_run_id bigint) RETURNS text[]
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION evertick.recount_groups(p_run_id bigint) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    drifted int;
begin
    insert into run_group as g (run_id, grp, ended, more)
    select p_run_id, d.grp, d.ended, d.more from groups_that_drifted(p_run_id) d
    on conflict (run_id, grp) do update set ended = excluded.ended, more = excluded.more;
    get diagnostics drifted = row_count;
    return drifted;
end $$;

CREATE FUNCTION evertick.recount_run(p_run_id bigint) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
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
        left join lateral (select y.is_leaf from task_spec y where y.version_id = k.version_id and y.idx = k.idx offset 0) s on true
        where x.run_id = p_run_id
        group by v.task_count
    ) c
    where r.run_id = p_run_id and r.state in ('queued', 'running') and c.open_tasks > 0
      and (r.open_tasks, r.failed_leaves, r.extra_tasks) is distinct from (c.open_tasks, c.failed_leaves, c.extra);
    return found;
end $$;

CREATE FUNCTION evertick.recount_upstream(p_run_id bigint, p_idxs integer[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    changed int;
begin
    update task k
    set n_success = c.success, n_failed = c.failed, n_upstream_failed = c.upstream_failed, n_skipped = c.skipped,
        n_setup_success = c.setup_success, n_setup_skipped = c.setup_skipped, n_more = c.more
    from upstream_of(p_run_id, p_idxs) c
    where k.run_id = p_run_id and k.idx = c.idx and k.map_index = c.map_index and k.state = 'waiting'
      and (coalesce(k.n_success, 0), coalesce(k.n_failed, 0), coalesce(k.n_upstream_failed, 0),
           coalesce(k.n_skipped, 0), coalesce(k.n_setup_success, 0), coalesce(k.n_setup_skipped, 0), coalesce(k.n_more, 0))
          is distinct from
          (c.success, c.failed, c.upstream_failed, c.skipped, c.setup_success, c.setup_skipped, c.more);
    get diagnostics changed = row_count;
    return changed;
end $$;

CREATE FUNCTION evertick.refresh_line(p_line bigint) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    head record;
begin
    select w.rank, w.seq, w.since into head from gate_wait w where w.line_id = p_line order by w.rank, w.seq limit 1;
    if not found then
        delete from gate_line l where l.line_id = p_line;
        return;
    end if;
    update gate_line l set rank = head.rank, seq = head.seq, since = head.since
    where l.line_id = p_line and (l.rank, l.seq) is distinct from (head.rank, head.seq);
end $$;

CREATE FUNCTION evertick.refuse_moved(p_dag text, p_name text, p_seen jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    if p_seen is distinct from (
        select coalesce(jsonb_agg(jsonb_build_array(s.schedule_id, s.version, extract(epoch from s.next_due) * 1000000,
                                                    s.paused, s.error is not null) order by s.schedule_id), '[]')
        from dag d join schedule c on c.dag_id = d.dag_id join schedule_state s on s.schedule_id = c.schedule_id
        where d.name = p_dag and c.deleted_at is null and (p_name is null or c.name = p_name)) then
        raise exception 'the schedules of % have moved on', p_dag using errcode = 'EV002';
    end if;
end $$;

CREATE FUNCTION evertick.release(p_tasks evertick.ended[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    freed ended[];
begin
    with moved as (
        update task k set state = 'available'
        from unnest(p_tasks) p
        join run_status r on r.run_id = p.run_id
        join dag d on d.dag_id = r.dag_id
        join task_spec s on s.version_id = p.version_id and s.idx = p.idx
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
          and k.state = 'pending' and k.not_before is null and not d.paused and not s.is_gated
          and not (s.is_mapped and k.map_index = -1)
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into freed from moved m;
    if coalesce(cardinality(freed), 0) < cardinality(p_tasks) then
        perform enter_gates(array(
            select p from unnest(p_tasks) p
            join task_spec s on s.version_id = (p).version_id and s.idx = (p).idx and (s.is_gated or (s.is_mapped and (p).map_index = -1))
            join run_status r on r.run_id = (p).run_id
            join dag d on d.dag_id = r.dag_id and not d.paused));
    end if;
    return offer(freed);
end $$;

CREATE FUNCTION evertick.remember(p_session bigint, p_retried jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, reason, exit_code, let_in_at, taken_at, started_at,
                         start_seconds, finished_at, retry_at)
    select m.run_id, m.idx, m.map_index, m.epoch, m.attempt, coalesce(p_session, m.session), m.kind, m.reason, m.exit_code, m.let_in_at,
           m.taken_at, m.started_at, m.start_seconds, clock(), coalesce(m.not_before, clock())
    from jsonb_to_recordset(p_retried) as m(run_id bigint, idx int, map_index int, epoch int, attempt smallint, kind text,
         reason text, exit_code int, let_in_at timestamptz, taken_at timestamptz, started_at timestamptz, start_seconds real,
         not_before timestamptz, session bigint)
    on conflict (run_id, idx, map_index, epoch) do nothing;
    insert into timer (shard, due_at, run_id, idx, map_index)
    select g.shard, m.not_before, m.run_id, m.idx, m.map_index
    from jsonb_to_recordset(p_retried) as m(run_id bigint, idx int, map_index int, not_before timestamptz)
    join run_status r on r.run_id = m.run_id
    join dag g on g.dag_id = r.dag_id
    where m.not_before is not null
    on conflict do nothing;
    perform tell_retries(p_retried);
end $$;

CREATE FUNCTION evertick.remove_schedules(p_ids integer[], p_actor text) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    if cardinality(p_ids) = 0 then
        return;
    end if;
    update schedule c set deleted_at = clock(), version = c.version + 1, changed_by = p_actor, changed_at = clock()
    where c.schedule_id = any(p_ids) and c.deleted_at is null;
    update schedule_state s set next_due = null, version = c.version, is_held = false, paused = d.paused
    from schedule c join dag d on d.dag_id = c.dag_id
    where c.schedule_id = s.schedule_id and s.schedule_id = any(p_ids);
    perform note_schedules(p_ids, 'delete');
end $$;

CREATE FUNCTION evertick.renew_shard(p_shard smallint, p_epoch bigint, p_seconds double precision) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    update shard set lease_until = clock() + make_interval(secs => p_seconds)
    where shard = p_shard and epoch = p_epoch and lease_until is not null;
    return found;
end $$;

CREATE FUNCTION evertick.reopen(p_tasks evertick.ended[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    runs bigint[];
    r bigint;
    offered int := 0;
begin
    p_tasks := p_tasks || take_back_successors(p_tasks);
    perform keep_attempts(p_tasks);
    update task k
    set state = 'waiting', attempt = 0, losses = 0, session = null, not_before = null, started_at = null,
        finished_at = null, reason = null, exit_code = null
    from unnest(p_tasks) p
    where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
      and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed');
    if exists (select 1 from unnest(p_tasks) p where p.map_index >= 0) then
        perform fold_instances(p_tasks);
    end if;
    runs := array(select distinct p.run_id from unnest(p_tasks) p order by 1);
    perform recount_groups(x) from unnest(runs) x;   -- who counts on a group asks whether it is over
    p_tasks := p_tasks || fold_unready(p_tasks);
    foreach r in array runs loop
        perform recount_groups(r);
        perform recount_upstream(r, array(
            select p.idx from unnest(p_tasks) p where p.run_id = r
            union
            select g.dst from after_tasks(p_tasks) g where g.run_id = r));
        -- It starts anew, and so does the time that it may take.
        update run_status s
        set state = 'queued', started_at = null, finished_at = null, cancel_requested = false, reason = null
        where s.run_id = r and s.state in ('success', 'failed', 'canceled');
        perform recount_run(r);
    end loop;
    perform watch_again(runs);
    -- A run that stayed open decides now; one that was closed waits for admission like any other queued run.
    offered := settle(decide_waiting(array(
        select s.run_id from run_status s where s.run_id = any(runs) and s.state = 'running')));
    return offered + admit_runs(array(
        select distinct s.dag_id from run_status s where s.run_id = any(runs) and s.state = 'queued'));
end $$;

CREATE FUNCTION evertick.reopen_marked(p_run_id bigint, p_blocked evertick.ended[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    if p_blocked is not null then
        perform reopen(p_blocked);
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
    set open_tasks = 0, state = case when bad.n > 0 then 'failed' else 'success' end::run_state, failed_leaves = bad.n, finished_at = t
    from (select count(*)::int as n from task k
          join task_spec s on s.version_id = k.version_id and s.idx = k.idx and s.is_leaf
          where k.run_id = p_run_id and k.state in ('failed', 'canceled', 'upstream_failed')) bad
    where r.run_id = p_run_id and r.state = 'running' and r.open_tasks = 1;
end $$;

CREATE FUNCTION evertick.reopen_shards() RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    if not exists (select 1 from shard s where s.state = 'closed') then
        return;
    end if;
    if exists (select 1 from shard s where s.state = 'closed' and misplaced(s.shard, 1) > 0) then
        perform pg_advisory_xact_lock(4714, 0);
        update shard s set state = 'leaving', moves_since = clock() where s.state = 'closed' and misplaced(s.shard, 1) > 0;
        perform count_shards();
    end if;
end $$;

CREATE FUNCTION evertick.reroute(p_dag_id integer, p_version_id integer, p_tasks jsonb, p_actor text) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    moved jsonb;
begin
    with changed as (
        update task_spec s set queue = x.queue
        from jsonb_to_recordset(p_tasks) as x(idx int, queue text), task_spec o
        where s.version_id = p_version_id and s.idx = x.idx and s.queue <> x.queue
          and o.version_id = s.version_id and o.idx = s.idx
        returning s.name, o.queue as old, s.queue as new
    )
    select jsonb_object_agg(c.name, jsonb_build_array(c.old, c.new)) into moved from changed c;
    if moved is null then
        return 0;
    end if;
    insert into journal (occurred_at, verb, actor, dag_id, detail)
    values (clock(), 'route', p_actor, p_dag_id, jsonb_build_object('version_id', p_version_id, 'tasks', moved));
    return (select count(*) from jsonb_object_keys(moved));
end $$;

CREATE FUNCTION evertick.reseal_value(p_kind text, p_name text, p_old text, p_content text, p_key_id text) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    update stored_value v set content = p_content, key_id = p_key_id
    where v.kind = p_kind and v.name = p_name and v.content = p_old;
    return found;
end $$;

CREATE FUNCTION evertick.reserved_for(p_gate_id integer) RETURNS bigint
    LANGUAGE sql STABLE
    AS $$
    select o.line_id from gate g cross join lateral (
        select l.line_id, l.since, l.need from gate_line l
        where l.blocked_on = g.gate_id and l.need > 1 and l.need <= g.capacity order by l.since limit 1) o
    where g.gate_id = p_gate_id and o.since < clock() - interval '60 seconds' and o.need > g.capacity - g.used
$$;

CREATE FUNCTION evertick.resign_shard(p_shard smallint, p_epoch bigint, p_heir text, p_heir_seconds double precision) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
declare
    held boolean := exists (select 1 from shard s where s.shard = p_shard and s.is_watched);
begin
    update shard s
    set lease_until = null, owner = null, is_watched = false, heir = p_heir,
        heir_until = clock() + make_interval(secs => p_heir_seconds)
    where s.shard = p_shard and s.epoch = p_epoch;
    if not found then
        return false;
    end if;
    if held then
        perform pg_advisory_unlock(4712, p_shard);
    end if;
    return true;
end $$;

CREATE FUNCTION evertick.resolve_overlap(p_plans jsonb, OUT plans jsonb, OUT canceled integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    live jsonb;
    doomed bigint[];
    one bigint;
begin
    with due as materialized (
        select p.schedule_id, p.overlap, c.dag_id
        from jsonb_to_recordset(p_plans) as p(schedule_id int, version int, expected timestamptz, overlap text, fires jsonb)
        cross join lateral (select x.dag_id from schedule x where x.schedule_id = p.schedule_id offset 0) c
        cross join lateral (select * from schedule_state x where x.schedule_id = p.schedule_id offset 0) s
        where p.overlap is not null and jsonb_array_length(p.fires) > 0
          and s.version = p.version and s.next_due = p.expected and s.paused is not true and s.error is null
    ), open as (
        select a.run_id, r.schedule_id
        from (select distinct d.dag_id from due d) d
        cross join lateral (select y.run_id from run_status y
                            where y.dag_id = d.dag_id and y.state in ('queued', 'running') offset 0) a
        cross join lateral (select y.schedule_id from run y where y.run_id = a.run_id offset 0) r
    )
    select (select jsonb_object_agg(o.schedule_id, o.runs)
            from (select x.schedule_id, count(*) as runs from open x where x.schedule_id is not null group by 1) o),
           (select array_agg(x.run_id order by x.run_id) from open x
            where x.schedule_id = any(array(select d.schedule_id from due d where d.overlap = 'cancel')))
    into live, doomed;
    canceled := 0;
    if doomed is not null then
        perform 1 from run_status s where s.run_id = any(doomed) order by s.run_id for no key update;
        foreach one in array doomed loop
            canceled := canceled + coalesce(stop_run(one, 'schedule', 'the next fire of its schedule is due, and overlap is cancel'), 0);
        end loop;
    end if;
    select jsonb_agg(case when k.first is null then x.plan else x.plan || jsonb_build_object(
               'fires', coalesce((select jsonb_agg(f.v order by f.n) from jsonb_array_elements(x.plan->'fires')
                                  with ordinality f(v, n) where f.n not between k.first and k.last), '[]'),
               'overlapped', jsonb_build_object('first_at', x.plan->'fires'->(k.first - 1), 'last_at', x.plan->'fires'->(k.last - 1),
                                                'count', k.last - k.first + 1, 'reason', 'overlap_' || (x.plan->>'overlap')),
               'last_fire', case when k.last < x.fires then x.plan->'fires'->(x.fires - 1)
                                 when k.first > 1 then x.plan->'fires'->(k.first - 2) end) end order by x.n)
    into plans
    from (select p.plan, p.n, jsonb_array_length(p.plan->'fires') as fires,
                 coalesce((live->>(p.plan->>'schedule_id'))::int, 0) as runs
          from jsonb_array_elements(p_plans) with ordinality p(plan, n)) x
    -- From where to where its fires get no run.
    cross join lateral (select case x.plan->>'overlap' when 'skip' then greatest(1 - x.runs, 0) + 1
                                                       when 'queue_one' then greatest(2 - x.runs, 0) + 1
                                                       when 'cancel' then 1 end as first,
                               case when x.plan->>'overlap' = 'cancel' then x.fires - 1 else x.fires end as last) w
    left join lateral (select w.first, w.last where w.first <= w.last) k on true;
end $$;

CREATE FUNCTION evertick.results_of(p_run_id bigint, p_idx integer) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return (select coalesce(jsonb_agg(v.value order by v.map_index), '[]') from result v
            where v.run_id = p_run_id and v.idx = p_idx and v.map_index >= 0);
end $$;

CREATE FUNCTION evertick.retry_deliveries(p_ids bigint[], p_sink text, p_limit integer, p_actor text) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    again int;
    t timestamptz := clock();
begin
    update outbox o set state = 'waiting', attempts = 0, waiting_since = t, due_at = t, ended_at = null
    where o.state = 'failed' and o.ctid = any(array(
        select x.ctid from outbox x
        where x.state = 'failed' and (p_ids is null or x.delivery_id = any(p_ids)) and (p_sink is null or x.sink = p_sink)
        order by x.delivery_id limit p_limit for update skip locked));
    get diagnostics again = row_count;
    if again > 0 then
        insert into journal (occurred_at, verb, actor, detail)
        values (t, 'retry_notifications', p_actor, jsonb_strip_nulls(jsonb_build_object('ids', p_ids, 'sink', p_sink, 'count', again)));
    end if;
    return again;
end $$;

CREATE FUNCTION evertick.retry_groups(p_groups evertick.group_key[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    one group_key;
    what retry_group;
    everything ended[] := '{}';
    tries int;
begin
    foreach one in array p_groups loop
        select w.* into what from retry_group w where w.version_id = one.version_id and w.grp = one.grp;
        -- Nothing of it has been heard outside, so nothing there is taken back.
        update run_group g set retried = g.retried + 1, ended = 0 where g.run_id = one.run_id and g.grp = one.grp
        returning g.retried into tries;
        insert into journal (occurred_at, verb, actor, run_id, detail)
        values (clock(), 'retry', 'evertick', one.run_id, jsonb_build_object('group', what.name, 'retried', tries, 'failed', (
            select jsonb_agg(distinct s.name) from unnest(what.members) m(idx)
            join task k on k.run_id = one.run_id and k.idx = m.idx and k.state = 'failed'
            join task_spec s on s.version_id = one.version_id and s.idx = m.idx)));
        everything := everything || array(
            select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended
            from unnest(what.members) m(idx)
            cross join lateral (select * from task x where x.run_id = one.run_id and x.idx = m.idx offset 0) k
            where not (k.state = 'skipped' and k.started_at is null and coalesce(k.reason, '') like 'not chosen by %' and not exists (
                select 1 from unnest(what.members) u(idx) join task_spec s on s.version_id = one.version_id and s.idx = u.idx
                where k.reason = format('not chosen by %s', s.name))));
    end loop;
    return reopen(everything);   -- all at once: a group that is still to begin again must not be heard
end $$;

CREATE FUNCTION evertick.retry_room(p_queue text, p_bound integer) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    places smallint[] := array(select s.shard from shard s);
begin
    if cardinality(places) > 1 then
        perform pg_advisory_xact_lock(4713, hashtext(p_queue));
    end if;
    delete from retry_slot x
    where x.shard = any(places) and x.queue = p_queue and (
        select true from task k
        where k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
          and ((k.state = 'available' and k.epoch = x.epoch and k.attempt + k.losses > 0)   -- what was cleared is no retry
               or (k.state in ('queued', 'running') and k.epoch = x.epoch + 1))) is null;
    return coalesce(p_bound, (select greatest(sum(r.slots) / 2, 1) from runner r
                              where r.gone_at is null and p_queue = any(r.queues)), 1)
         - (select count(*) from retry_slot x where x.shard = any(places) and x.queue = p_queue);
end $$;

CREATE FUNCTION evertick.retry_runs(p_run_ids bigint[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    update run_status r set retried = r.retried + 1 where r.run_id = any(p_run_ids) and r.state = 'failed';
    update run_group g set retried = 0 where g.run_id = any(p_run_ids) and g.retried > 0;
    insert into journal (occurred_at, verb, actor, run_id, detail)
    select t, 'retry', 'evertick', r.run_id, jsonb_strip_nulls(jsonb_build_object('retried', r.retried, 'reason', r.reason))
    from run_status r where r.run_id = any(p_run_ids);
    perform tell(array(
        select row(r.run_id, r.version_id, -1, '', 'retry', 'failed', r.retried, r.reason)::happening
        from unnest(p_run_ids) p(run_id)
        cross join lateral (select * from run_status x where x.run_id = p.run_id offset 0) r
        cross join lateral (select from dag d where d.dag_id = r.dag_id and d.notifies offset 0) d));
    return reopen(array(
        select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended from task k
        where k.run_id = any(p_run_ids) and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')));
end $$;

CREATE FUNCTION evertick.return_slots(p_gate_ids integer[]) RETURNS void
    LANGUAGE sql
    AS $$
    with back as (
        delete from gate_pass p where p.gate_id = any(p_gate_ids) and p.until <= clock() returning p.gate_id
    )
    update gate g set used = g.used - b.slots
    from (select x.gate_id, count(*)::int as slots from back x group by x.gate_id) b
    where g.gate_id = b.gate_id
$$;

CREATE FUNCTION evertick.room_at(p_gate_id integer) RETURNS bigint
    LANGUAGE plpgsql STABLE
    AS $$
declare
    g gate;
begin
    select x.* into g from gate x where x.gate_id = p_gate_id;
    return case g.kind
        when 'order' then (select o.version from gate_order o where o.gate_id = p_gate_id order by o.version limit 1)
        when 'past' then is_past_over(g.name)::int
        else g.capacity - g.used end;
end $$;

CREATE TABLE evertick.dag (
    dag_id integer NOT NULL,
    name text NOT NULL,
    shard smallint DEFAULT 0 NOT NULL,
    paused boolean DEFAULT false NOT NULL,
    version_id integer,
    max_active_runs integer,
    has_run_timeout boolean DEFAULT false NOT NULL,
    is_awaited boolean DEFAULT false NOT NULL,
    has_turns boolean DEFAULT false NOT NULL,
    awaits_past boolean DEFAULT false NOT NULL,
    notifies boolean DEFAULT false NOT NULL,
    has_run_retries boolean DEFAULT false NOT NULL,
    file text NOT NULL,
    deleted_at timestamp with time zone,
    CONSTRAINT dag_max_active_runs_check CHECK ((max_active_runs > 0))
);

CREATE FUNCTION evertick.room_for(b evertick.backfill, d evertick.dag) RETURNS integer
    LANGUAGE sql STABLE
    AS $$
    select greatest(least((b).parallel - (b).open_runs,
        case when (d).max_active_runs is null then (b).parallel
             else (d).max_active_runs - (select count(*) from run_status r
                                         where r.dag_id = (d).dag_id and r.state in ('queued', 'running')) end), 0)::int
$$;

CREATE FUNCTION evertick.run_text(p_key text, p_kind evertick.run_kind, p_at timestamp with time zone, p_run_id bigint) RETURNS text
    LANGUAGE sql IMMUTABLE
    AS $$
    select coalesce(p_key,
        case p_kind when 'manual' then 'manual__' when 'scheduled' then 'scheduled__' else 'backfill__' end
        || overlay(overlay(overlay(overlay(overlay(
               lpad((date_part('year', p_at at time zone 'UTC') * 1e10 + date_part('month', p_at at time zone 'UTC') * 1e8
                     + date_part('day', p_at at time zone 'UTC') * 1e6 + date_part('hour', p_at at time zone 'UTC') * 1e4
                     + date_part('minute', p_at at time zone 'UTC') * 1e2 + floor(date_part('second', p_at at time zone 'UTC')))::bigint::text, 14, '0')
               placing ':' from 13 for 0) placing ':' from 11 for 0) placing 'T' from 9 for 0) placing '-' from 7 for 0) placing '-' from 5 for 0)
        || '+00:00__' || p_run_id::text)
$$;

CREATE FUNCTION evertick.send_event(p_name text, p_key text, p_payload jsonb, p_actor text) RETURNS TABLE(event_id bigint, is_new boolean, sent_at timestamp with time zone, sent_by text)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
begin
    return query
    insert into event as e (name, key, payload, sent_at, sent_by) values (p_name, p_key, p_payload, clock(), p_actor)
    on conflict (name, key) where key is not null do nothing
    returning e.event_id, true, e.sent_at, e.sent_by;
    if not found then
        return query select e.event_id, false, e.sent_at, e.sent_by from event e where e.name = p_name and e.key = p_key;
    end if;
end $$;

CREATE FUNCTION evertick.set_aside(p_kind text, p_subject_id bigint, p_verb text, p_reason text, p_is_tried_again boolean) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
    shown text := left(p_reason, 2000);
begin
    insert into quarantine as q (kind, subject_id, verb, reason, failures, since, failed_at, retry_at)
    values (p_kind, p_subject_id, p_verb, shown, 1, t, t, case when p_is_tried_again then t + interval '10 seconds' end)
    on conflict (kind, subject_id) do update
        set verb = excluded.verb, reason = excluded.reason, failures = q.failures + 1, failed_at = t,
            retry_at = case when p_is_tried_again
                            then t + make_interval(secs => least(10 * 2 ^ least(q.failures, 20), 3600)) end;
    insert into journal (occurred_at, verb, actor, dag_id, run_id, detail)
    select t, 'quarantine', 'evertick',
           case p_kind when 'dag' then p_subject_id
                       when 'schedule' then (select c.dag_id from schedule c where c.schedule_id = p_subject_id) end,
           case p_kind when 'run' then p_subject_id end,
           jsonb_build_object('kind', p_kind, 'verb', p_verb, 'reason', shown);
end $$;

CREATE FUNCTION evertick.set_clocks(p_shard smallint, p_epoch bigint, p_instants jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    perform set_aside('run', x.run_id, 'wake', x.reason, true)
    from jsonb_to_recordset(p_instants) as x(run_id bigint, reason text) where x.reason is not null;
    update deferral d set kind = case when x.wake_at is null then d.kind else 'time' end,
        wake_at = coalesce(x.wake_at, clock() + interval '1 minute')
    from jsonb_to_recordset(p_instants) as x(run_id bigint, idx int, map_index int, epoch int, wake_at timestamptz)
    where d.run_id = x.run_id and d.idx = x.idx and d.map_index = x.map_index and d.epoch = x.epoch and d.kind = 'clock';
end $$;

CREATE FUNCTION evertick.set_deadlines(p_run_ids bigint[]) RETURNS void
    LANGUAGE sql
    AS $$
    insert into deadline (shard, due_at, run_id, kind)
    select d.shard, r.fire_at + make_interval(secs => c.delay_seconds + k.within), r.run_id, k.kind
    from run r
    cross join lateral (select * from schedule c where c.schedule_id = r.schedule_id offset 0) c
    cross join lateral (select * from dag d where d.dag_id = r.dag_id offset 0) d
    cross join lateral (values ('start', c.start_within), ('finish', c.finish_within)) k(kind, within)
    where r.run_id = any(p_run_ids) and k.within is not null
    on conflict do nothing
$$;

CREATE FUNCTION evertick.set_openings(p_gate_ids integer[]) RETURNS void
    LANGUAGE sql
    AS $$
    update gate g set opens_at = n.opens_at
    from (select x.gate_id, case when not exists (select 1 from gate_line l where l.blocked_on = x.gate_id) then null
                                 when x.used < x.capacity then clock()
                                 else (select p.until from gate_pass p where p.gate_id = x.gate_id order by p.until limit 1) end as opens_at
          from gate x where x.gate_id = any(p_gate_ids) and x.kind = 'rate') n
    where g.gate_id = n.gate_id and g.opens_at is distinct from n.opens_at
$$;

CREATE FUNCTION evertick.set_pool(p_name text, p_slots integer, p_actor text, OUT is_new boolean, OUT admitted integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    id int;
    was int;
begin
    select g.gate_id, g.capacity into id, was from gate g where g.kind = 'pool' and g.name = p_name for no key update;
    is_new := not found;
    if is_new then
        insert into gate (kind, name, capacity) values ('pool', p_name, p_slots) returning gate_id into id;
    else
        update gate g set capacity = p_slots where g.gate_id = id and g.capacity <> p_slots;
    end if;
    insert into journal (occurred_at, verb, actor, detail)
    values (clock(), 'set_pool', p_actor, jsonb_strip_nulls(jsonb_build_object('pool', p_name, 'slots', p_slots, 'was', was)));
    admitted := work_gates('{}', '{}', '{}', array[id]);
end $$;

CREATE FUNCTION evertick.set_schedule_aside(p_shard smallint, p_epoch bigint, p_schedule_id integer, p_version integer, p_reason text, p_is_tried_again boolean) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    update schedule_state s set error = left(p_reason, 2000)
    where s.schedule_id = p_schedule_id and s.version = p_version and s.error is null and s.shard = p_shard;
    if not found then
        return false;
    end if;
    perform set_aside('schedule', p_schedule_id, 'fire', p_reason, p_is_tried_again);
    return true;
end $$;

CREATE FUNCTION evertick.set_shards(p_shards integer, p_actor text, p_if_never_chosen boolean) RETURNS boolean
    LANGUAGE plpgsql
    AS $$
declare
    before int;
    t timestamptz := clock();
begin
    perform pg_advisory_xact_lock(4714, 0);
    if p_if_never_chosen and exists (select 1 from shard s where s.chosen_at is not null) then
        return false;
    end if;
    before := open_shards();
    insert into shard (shard, epoch) select n, 0 from generate_series(0, p_shards - 1) n on conflict (shard) do nothing;
    update shard s
    set state = case when s.shard < p_shards then 'open' when s.state = 'closed' then 'closed' else 'leaving' end,
        moves_since = case when s.shard >= p_shards and s.state = 'closed' then null else t end,
        chosen_at = t;
    perform count_shards();
    insert into journal (occurred_at, verb, actor, detail)
    values (t, 'set_shards', p_actor, jsonb_build_object('shards', p_shards, 'before', before));
    return true;
end $$;

CREATE FUNCTION evertick.set_task_deadlines(p_run_ids bigint[]) RETURNS void
    LANGUAGE sql
    AS $$
    insert into deadline (shard, due_at, run_id, kind, idx)
    select d.shard, coalesce(r.fire_at + make_interval(secs => c.delay_seconds), r.created_at) + make_interval(secs => x.seconds),
           r.run_id, 'task', x.idx
    from run r
    cross join lateral (select y.idx, y.seconds from task_deadline y where y.version_id = r.version_id offset 0) x
    cross join lateral (select y.shard from dag y where y.dag_id = r.dag_id offset 0) d
    left join lateral (select y.delay_seconds from schedule y where y.schedule_id = r.schedule_id offset 0) c on true
    where r.run_id = any(p_run_ids) and r.kind <> 'backfill'
    on conflict do nothing
$$;

CREATE FUNCTION evertick.settle(p_ended evertick.ended[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    frontier ended[] := coalesce(p_ended, '{}');
    everything ended[] := frontier;
    moved ended[];
    offered int := 0;
    -- where no group has retries, asking is a look at an empty table
    has_groups boolean := exists (select 1 from retry_group);
    left_groups boolean[];   -- for each of the frontier: whether it is heard outside of its group now, which was done with within
    to_retry group_key[] := '{}';
    counted int := 0;
    t timestamptz := clock();
begin
    if cardinality(frontier) = 0 then
        return 0;
    end if;
    loop
        loop
            -- Most tasks that end have nobody after them; asking is cheaper than setting up what follows.
            exit when not exists (select 1 from unnest(frontier) e join edge g on g.version_id = e.version_id and g.src = e.idx);
            with hit as (
                select e.run_id, g.dst, e.version_id,
                       count(*) filter (where e.state = 'success')::int as success,
                       count(*) filter (where e.state in ('failed', 'canceled'))::int as failed,
                       count(*) filter (where e.state = 'upstream_failed')::int as upstream_failed,
                       count(*) filter (where e.state = 'skipped')::int as skipped,
                       count(*) filter (where s.is_setup and e.state = 'success')::int as setup_success,
                       count(*) filter (where s.is_setup and e.state = 'skipped')::int as setup_skipped
                from unnest(frontier, left_groups) e(run_id, idx, map_index, version_id, state, has_left)
                join task_spec s on s.version_id = e.version_id and s.idx = e.idx
                join edge g on g.version_id = e.version_id and g.src = e.idx and (g.out_of is null) = (e.has_left is null)
                group by e.run_id, g.dst, e.version_id
            ), total as (
                -- Added up here, not in the conflict's update: whoever changes a waiting row holds its run's lock, as we do.
                -- OFFSET 0, so that each row is looked up by its whole key: joined, a plan made while runs were small reads
                -- all tasks of the run for each (measured: 15 ms of 18 per batch in a run of 3,000).
                -- A task that waits no more is not touched: "on conflict" would lock its row even so, and a claim that
                -- holds another such row and wants this one would be a deadlock.
                select h.run_id, h.dst, h.version_id,
                       coalesce(w.n_success, 0) + h.success as success,
                       coalesce(w.n_failed, 0) + h.failed as failed,
                       coalesce(w.n_upstream_failed, 0) + h.upstream_failed as upstream_failed,
                       coalesce(w.n_skipped, 0) + h.skipped as skipped,
                       coalesce(w.n_setup_success, 0) + h.setup_success as setup_success,
                       coalesce(w.n_setup_skipped, 0) + h.setup_skipped as setup_skipped,
                       coalesce(w.n_more, 0) as more, w.state is null as is_new
                from hit h
                left join lateral (select * from task k where k.run_id = h.run_id and k.idx = h.dst and k.map_index = -1 offset 0) w
                    on true
                where w.state is null or w.state = 'waiting'
            ), counted as (
                insert into task as k (run_id, idx, version_id, state, finished_at, n_success, n_failed,
                                       n_upstream_failed, n_skipped, n_setup_success, n_setup_skipped)
                select h.run_id, h.dst, h.version_id, n.state,
                       case when n.state in ('skipped', 'upstream_failed') then t end,
                       h.success, h.failed, h.upstream_failed, h.skipped, h.setup_success, h.setup_skipped
                from total h
                join task_spec s on s.version_id = h.version_id and s.idx = h.dst
                join run_status r on r.run_id = h.run_id
                join dag d on d.dag_id = r.dag_id
                cross join lateral (select case when r.state <> 'running' then 'waiting'::task_state else state_after(decide(
                    s.rule, s.upstream_total + h.more, h.success, h.failed, h.upstream_failed, h.skipped,
                    s.setup_total, h.setup_success, h.setup_skipped), d.paused or s.is_gated or s.is_mapped) end as state) n
                -- a mapped task that has become its instances waits no more, either
                where not (s.is_mapped and h.is_new and has_instances(h.run_id, h.dst))
                order by h.run_id, h.dst
                on conflict (run_id, idx, map_index) do update set
                    n_success = excluded.n_success, n_failed = excluded.n_failed,
                    n_upstream_failed = excluded.n_upstream_failed, n_skipped = excluded.n_skipped,
                    n_setup_success = excluded.n_setup_success, n_setup_skipped = excluded.n_setup_skipped,
                    state = excluded.state, finished_at = excluded.finished_at
                where k.state = 'waiting'
                returning k.run_id, k.idx, k.map_index, k.version_id, k.state
            )
            select array_agg(row(run_id, idx, map_index, version_id, state)::ended) filter (where state <> 'waiting')
            into moved from counted;
            exit when moved is null;
            offered := offered + offer(moved);
            frontier := array(select m from unnest(moved) m where (m).state in ('skipped', 'upstream_failed'));
            left_groups := null;
            exit when cardinality(frontier) = 0;
            everything := everything || frontier;
        end loop;
        exit when not has_groups;
        select l.heard, to_retry || l.again into frontier, to_retry from leave_groups(everything[counted + 1:]) l;
        exit when cardinality(frontier) = 0;
        counted := cardinality(everything);
        left_groups := array_fill(true, array[cardinality(frontier)]);
    end loop;
    if cardinality(to_retry) > 0 then
        -- Open by one more until all of it is counted anew: it must not end in between.
        update run_status r set open_tasks = r.open_tasks + 1
        where r.run_id = any(array(select a.run_id from unnest(to_retry) a)) and r.state = 'running';
        return offered + close_runs(everything) + retry_groups(to_retry);
    end if;
    return offered + close_runs(everything);
end $$;

CREATE FUNCTION evertick.settle_locked(p_plans jsonb, p_even_held boolean) RETURNS evertick.settled
    LANGUAGE plpgsql
    AS $_$
declare
    done settled;
    made bigint[];
    t timestamptz := clock();
begin
    done.canceled := 0;
    if jsonb_path_exists(p_plans, '$[*].overlap') then
        select o.plans, o.canceled into p_plans, done.canceled from resolve_overlap(p_plans) o;
    end if;
    -- Every row is found by its key. "is not true", because the index of what is due fits "not paused" as well, and a plan
    -- that was made while there were few schedules takes it and compares each with each (measured: 80 ms for a thousand).
    with plan as materialized (
        select * from jsonb_to_recordset(p_plans) as x(schedule_id int, version int, expected timestamptz,
            next_due timestamptz, last_fire timestamptz, fires timestamptz[], skipped jsonb, overlapped jsonb, missing jsonb)
    ), moved as (
        update schedule_state s
        set next_due = p.next_due, last_fired = coalesce(p.last_fire, s.last_fired)
        from plan p
        where s.schedule_id = p.schedule_id and s.version = p.version and s.next_due = p.expected
          and (p_even_held or (s.paused is not true and s.error is null))
        returning s.schedule_id, p.fires, p.skipped, p.overlapped, p.missing
    ), created as (
        insert into run as r (dag_id, version_id, kind, schedule_id, fire_at, params, triggered_by, created_at)
        select d.dag_id, d.version_id, 'scheduled', f.schedule_id, f.fire_at, c.params, 'schedule', t
        from (select m.schedule_id, unnest(m.fires) as fire_at from moved m) f
        cross join lateral (select * from schedule c where c.schedule_id = f.schedule_id offset 0) c
        cross join lateral (select * from dag d where d.dag_id = c.dag_id offset 0) d
        where d.deleted_at is null
        order by f.fire_at, f.schedule_id
        on conflict (schedule_id, fire_at) where schedule_id is not null do nothing
        returning r.run_id
    ), passed as (
        insert into skip_record (schedule_id, first_at, last_at, count, reason, recorded_at)
        select m.schedule_id, k.first_at, k.last_at, k.count, k.reason, t
        from moved m
        cross join lateral (values (m.skipped), (m.overlapped), (m.missing)) v(skipped)
        cross join lateral jsonb_to_record(v.skipped)
            as k(first_at timestamptz, last_at timestamptz, count bigint, reason text)
        where jsonb_typeof(v.skipped) = 'object'
        on conflict (schedule_id, first_at) do nothing
    )
    select array(select m.schedule_id from moved m), array(select c.run_id from created c),
           coalesce((select sum((m.overlapped->>'count')::int) from moved m where m.overlapped is not null), 0)
    into done.won, made, done.overlapped;
    if done.overlapped > 0 then
        perform join_overlapped(done.won);
    end if;
    perform open_runs(made);
    if jsonb_path_exists(p_plans, '$[*].has_deadlines') then
        perform set_deadlines(made);
    end if;
    return done;
end $_$;

CREATE FUNCTION evertick.settle_schedules(p_plans jsonb, p_even_held boolean DEFAULT false) RETURNS evertick.settled
    LANGUAGE plpgsql
    AS $$
begin
    perform 1 from schedule_state s
    where s.schedule_id = any(array(select (x->>'schedule_id')::int from jsonb_array_elements(p_plans) x))
    order by s.schedule_id for no key update;
    return settle_locked(p_plans, p_even_held);
end $$;

CREATE FUNCTION evertick.shard_of(p_dag text, p_shards integer) RETURNS smallint
    LANGUAGE sql IMMUTABLE
    AS $$
    select case when p_shards <= 1 then 0 else ((hashtextextended(p_dag, 0) % p_shards + p_shards) % p_shards) end::smallint
$$;

CREATE FUNCTION evertick.shown_utc(p_instant timestamp with time zone) RETURNS text
    LANGUAGE sql STABLE
    AS $$
    select to_char(p_instant at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
$$;

CREATE FUNCTION evertick.skip_run(p_shard smallint, p_epoch bigint, p_after_dag integer, p_after_run bigint, OUT skipped_dag_id integer, OUT skipped_run_id bigint) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    select x.dag_id, x.run_id into skipped_dag_id, skipped_run_id
    from run_status x join dag d on d.dag_id = x.dag_id
    where x.state in ('queued', 'running') and x.state = 'running' and d.shard = p_shard
      and (x.dag_id, x.state, x.run_id) > (p_after_dag, 'running'::run_state, p_after_run)
    order by x.dag_id, x.state, x.run_id limit 1;
    if found then
        perform set_aside('run', skipped_run_id, 'reconcile', 'looking at it takes too long', true);
    end if;
end $$;

CREATE FUNCTION evertick.skip_unchosen(p_session bigint, p_reports jsonb) RETURNS evertick.ended[]
    LANGUAGE plpgsql
    AS $$
declare
    skipped ended[];
    t timestamptz := clock();
begin
    perform 1 from run_status s
    where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(p_reports) x))
    order by s.run_id for no key update;
    with moved as (
        insert into task as k (run_id, idx, version_id, state, finished_at, reason)
        select distinct on (x.r, n.idx) x.r, n.idx::int, b.version_id, 'skipped'::task_state, t, format('not chosen by %s', b.name)
        from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, kind text, skip jsonb)
        cross join lateral (
            select y.version_id, s.name from task y join task_spec s on s.version_id = y.version_id and s.idx = y.idx
            where y.run_id = x.r and y.idx = x.i and y.map_index = x.m and y.state = 'running' and y.epoch = x.e
              and y.session = p_session and y.request is null) b
        cross join lateral jsonb_array_elements_text(x.skip) n(idx)
        join task_spec s on s.version_id = b.version_id and s.idx = n.idx::int
        where x.kind = 'success' and not has_instances(x.r, n.idx::int)
        order by x.r, n.idx
        on conflict (run_id, idx, map_index) do update set state = 'skipped', finished_at = t, reason = excluded.reason
            where k.state = 'waiting'
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into skipped from moved m;
    return skipped;
end $$;

CREATE FUNCTION evertick.sources_of(p_condition jsonb) RETURNS TABLE(kind text, name text)
    LANGUAGE sql IMMUTABLE
    AS $$
    with recursive part as (
        select p_condition as c
        union all
        select x from part p cross join lateral jsonb_array_elements(coalesce(p.c->'all', p.c->'any')) x
        where p.c ? 'all' or p.c ? 'any'
    )
    select k.key, k.value from part p cross join lateral jsonb_each_text(p.c) k where k.key in ('dag', 'end', 'asset')
$$;

CREATE FUNCTION evertick.stand_by(p_shard smallint, p_owner text, p_seconds double precision, p_watches boolean, OUT taken bigint, OUT is_watched boolean, OUT free_in double precision, OUT of_shards smallint) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    -- Held to the end of this transaction: nobody else can come to the same conclusion meanwhile.
    is_watched := p_watches and pg_try_advisory_xact_lock(4712, p_shard);
    if is_watched and exists (select 1 from shard s where s.shard = p_shard and s.is_watched and s.lease_until is not null) then
        perform pg_advisory_xact_lock(4711, p_shard);
        update shard s set lease_until = null where s.shard = p_shard and s.is_watched;
    end if;
    taken := take_shard(p_shard, p_owner, p_seconds);
    if taken is null then
        is_watched := false;
        select greatest(extract(epoch from s.lease_until - clock()), 0), s.of_shards into free_in, of_shards
        from shard s where s.shard = p_shard;
        return;
    end if;
    if is_watched then
        perform pg_advisory_lock(4712, p_shard);
    end if;
    update shard s set is_watched = stand_by.is_watched where s.shard = p_shard and s.epoch = taken
    returning s.of_shards into of_shards;
end $$;

CREATE FUNCTION evertick.start_attempt(p_run_id bigint, p_idx integer, p_map_index integer, p_epoch integer, p_session bigint, p_nonce text, p_agent jsonb, p_lost_after double precision) RETURNS evertick.started_attempt
    LANGUAGE plpgsql
    AS $$
declare
    answer started_attempt;
    found_state task_state;
    asked task_request;
    first_nonce text;
    remote text;
    t timestamptz := clock();
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    select k.state, k.request, k.attempt, k.version_id into found_state, asked, answer.attempt, answer.version_id
    from task k
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.epoch = p_epoch and k.session = p_session
      and k.state in ('queued', 'running')
    for no key update;
    if not found then
        answer.verdict := 'stale';
        return answer;
    end if;
    select d.nonce, d.executor into first_nonce, remote from dispatch d
    where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_epoch and d.session = p_session
    for no key update;
    if not found then
        answer.verdict := 'stale';
        return answer;
    end if;
    answer.verdict := case when found_state = 'running' and first_nonce is not distinct from p_nonce then 'again'
                           when found_state = 'running' then 'duplicate'
                           when asked is not null then 'canceled'
                           else 'started' end;
    if answer.verdict in ('duplicate', 'canceled') then
        return answer;
    end if;
    select r.fire_at, r.params::text into answer.fire_at, answer.params from run r where r.run_id = p_run_id;
    answer.inputs := inputs_of(p_run_id, answer.version_id, p_idx, p_map_index);
    if answer.verdict = 'again' then
        return answer;
    end if;
    update task k set state = 'running', started_at = t
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
      and k.state = 'queued' and k.epoch = p_epoch and k.session = p_session and k.request is null;
    insert into runner (session, runner_id, version, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots, executor,
                        lost_after_seconds, beat_at, started_at)
    select p_session, x.runner_id, x.version, x.host, x.boot_id, x.pid_namespace, x.uid, x.pid, x.pid_started, '{}', 1, remote,
           p_lost_after, t, t
    from jsonb_to_record(p_agent) as x(runner_id text, version text, host text, boot_id text, pid_namespace text, uid int, pid int,
                                       pid_started double precision)
    on conflict (session) do nothing;
    insert into lease (session, run_id, idx, map_index, epoch) values (p_session, p_run_id, p_idx, p_map_index, p_epoch);
    update dispatch d set started_at = t, nonce = p_nonce
    where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_epoch and d.session = p_session;
    return answer;
end $$;

CREATE FUNCTION evertick.start_child(p_shard smallint, p_epoch bigint, p_run_id bigint, p_idx integer, p_map_index integer, p_task_epoch integer, p_dag_id integer, p_params jsonb, p_depth integer, p_reason text) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
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

CREATE FUNCTION evertick.start_runs(p_run_ids bigint[], p_are_new boolean DEFAULT false) RETURNS evertick.ended[]
    LANGUAGE plpgsql
    AS $$
declare
    moved ended[];
begin
    with entering as (
        insert into task (run_id, idx, version_id, state)
        select r.run_id, s.idx, r.version_id, case when s.is_gated or s.is_mapped then 'pending'::task_state else 'available' end
        from run_status r join task_spec s on s.version_id = r.version_id and s.starts_at_once
        where r.run_id = any(p_run_ids) and not (s.is_mapped and has_instances(r.run_id, s.idx))
        on conflict (run_id, idx, map_index) do nothing
        returning run_id, idx, map_index, version_id, state
    )
    select array_agg(row(run_id, idx, map_index, version_id, state)::ended) into moved from entering;
    if offer(array(select m from unnest(moved) m where (m).state = 'available')) < cardinality(moved) then
        -- Whatever a pause says by now: whoever unpauses cannot see a run that is not committed, and would not come by again.
        perform enter_gates(array(select m from unnest(moved) m where (m).state = 'pending'));
    end if;
    return case when p_are_new then '{}' else decide_waiting(p_run_ids) end;
end $$;

CREATE FUNCTION evertick.state_after(d evertick.decision, is_held boolean) RETURNS evertick.task_state
    LANGUAGE sql IMMUTABLE
    AS $$
    select case d when 'run' then case when is_held then 'pending'::task_state else 'available' end
                  when 'skip' then 'skipped' when 'upstream_failed' then 'upstream_failed'
                  else 'waiting' end
$$;

CREATE FUNCTION evertick.step(p_session bigint, p_reports jsonb, p_infra_retries integer, p_queues text[], p_free integer, p_low bigint[], p_aging double precision) RETURNS SETOF evertick.step_row
    LANGUAGE plpgsql
    AS $_$
declare
    stale ended[];
    offered int := 0;
    claimed int := 0;
    unchosen ended[];
begin
    if p_reports is not null then
        if p_reports @? '$[*].skip' then
            unchosen := skip_unchosen(p_session, p_reports);
        end if;
        select f.refused, f.offered into stale, offered from finish(p_session, p_reports, p_infra_retries, unchosen) f;
        offered := offered + pass_gates();
        return query select 'refused', x.run_id, x.idx, x.map_index, x.version_id, null::int, null::int,
                            null::timestamptz, null::text, null::text, null::int, null::bigint from unnest(stale) x;
    end if;
    if current_setting('evertick.arrived', true) = 'yes' then
        return query select 'arrived', null::bigint, null::int, null::int, null::int, null::int, null::int,
                            null::timestamptz, null::text, null::text, null::int, null::bigint;
    end if;
    if p_free > 0 and p_aging is null then
        return query select * from claim(p_session, p_queues, p_free, p_low);
        get diagnostics claimed = row_count;
    elsif p_free > 0 then
        return query select * from claim_fairly(p_session, p_queues, p_free, p_low, p_aging);
        get diagnostics claimed = row_count;
    end if;
    if offered > claimed then
        return query select 'more', null::bigint, null::int, null::int, null::int, null::int, null::int,
                            null::timestamptz, null::text, null::text, null::int, null::bigint;
    end if;
end $_$;

CREATE FUNCTION evertick.step_backfill(p_shard smallint, p_epoch bigint, p_backfill_id integer, p_position timestamp with time zone, p_instants timestamp with time zone[], p_is_all boolean, OUT made integer, OUT ended integer, OUT moved boolean, OUT is_over boolean) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    b backfill;
    d dag;
    room int;
    chosen timestamptz[];
    needed timestamptz[];
    runs bigint[];
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    made := 0;
    ended := 0;
    moved := false;
    is_over := false;
    -- Somebody is just changing it: the next step sees to what.
    perform 1 from backfill x where x.backfill_id = p_backfill_id and x.shard = p_shard for no key update skip locked;
    if not found then
        return;
    end if;
    ended := count_ended(p_backfill_id);
    select * into b from backfill x where x.backfill_id = p_backfill_id and x.shard = p_shard;
    if b.state = 'running' and not b.is_planned and b.position is not distinct from p_position then
        select * into d from dag x where x.dag_id = b.dag_id for no key update;
        if d.deleted_at is not null or d.version_id is null then
            update backfill x set state = 'failed', finished_at = t, reason = 'its DAG was deleted'
            where x.backfill_id = p_backfill_id and x.state = 'running';
        elsif not d.paused and not is_set_aside('dag', d.dag_id) then
            room := room_for(b, d);
            if room > 0 then
                select array_agg(c.instant order by c.place), array_agg(c.instant order by c.place) filter (where c.is_needed)
                into chosen, needed from choose_instants(b, p_instants, room) c;
            end if;
            chosen := coalesce(chosen, '{}');
            with created as (
                insert into run as r (dag_id, version_id, kind, key, fire_at, params, triggered_by, created_at)
                select d.dag_id, d.version_id, 'backfill', format('backfill:%s:%s', p_backfill_id, i.instant at time zone 'UTC'),
                       i.instant, b.params, format('backfill %s', p_backfill_id), t
                from unnest(needed) with ordinality i(instant, place) order by i.place
                on conflict (dag_id, key) where key is not null do nothing
                returning r.run_id, r.fire_at
            ), listed as (
                insert into backfill_run (run_id, backfill_id, dag_id, schedule_id, fire_at)
                select c.run_id, p_backfill_id, d.dag_id, coalesce(b.schedule_id, 0), c.fire_at from created c
            )
            select array_agg(c.run_id order by c.run_id) into runs from created c;
            made := coalesce(cardinality(runs), 0);
            moved := cardinality(chosen) > 0 or (p_is_all and cardinality(p_instants) = 0);
            update backfill x
            set position = coalesce(chosen[cardinality(chosen)], x.position), made = x.made + step_backfill.made,
                left_alone = x.left_alone + cardinality(chosen) - step_backfill.made,
                open_runs = x.open_runs + step_backfill.made,
                is_planned = p_is_all and cardinality(chosen) = cardinality(p_instants)
            where x.backfill_id = p_backfill_id and x.state = 'running' and x.position is not distinct from p_position;
            perform open_runs(runs);
        end if;
    end if;
    update backfill x set state = 'done', finished_at = t
    where x.backfill_id = p_backfill_id and x.state = 'running' and x.is_planned and x.open_runs = 0;
    is_over := not exists (select 1 from backfill x where x.backfill_id = p_backfill_id
                           and (x.state = 'running' or x.open_runs > 0));
    perform pass_gates();
end $$;

CREATE FUNCTION evertick.stop_run(p_run_id bigint, p_actor text, p_reason text) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    now_ended ended[];
    asked int;
    t timestamptz := clock();
begin
    update run_status r set cancel_requested = true, reason = p_reason
    where r.run_id = p_run_id and r.state in ('queued', 'running');
    if not found then
        return null;
    end if;
    select s.stopped, s.asked into now_ended, asked from stop_tasks(p_run_id, p_reason) s;
    insert into journal (occurred_at, verb, actor, run_id, detail)
    values (t, 'cancel', p_actor, p_run_id, jsonb_build_object('reason', p_reason, 'asked_to_stop', asked));
    perform close_runs(now_ended);
    return asked;
end $$;

CREATE FUNCTION evertick.stop_tasks(p_run_id bigint, p_reason text, OUT stopped evertick.ended[], OUT asked integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    perform quit_lines(array[p_run_id], null);
    delete from ready q using run_status r, task_spec s
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
    select array_agg(row(g.run_id, g.idx, g.map_index, g.version_id, g.state)::ended) into stopped from gone g;
    with gone as (
        update task k set state = 'canceled', finished_at = t, reason = p_reason, not_before = null
        where k.run_id = p_run_id and k.map_index >= 0 and k.state in ('waiting', 'pending', 'available', 'deferred')
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select stopped || array_agg(row(g.run_id, g.idx, g.map_index, g.version_id, g.state)::ended) into stopped from gone g;
    delete from deferral d where d.run_id = p_run_id;
    if exists (select 1 from gate_hold h where h.run_id = p_run_id)
       or exists (select 1 from gate_order o where o.run_id = p_run_id) then
        perform leave_gates(stopped);
    end if;
    update task k set request = 'cancel'
    where k.run_id = p_run_id and k.state in ('queued', 'running');
    get diagnostics asked = row_count;
    perform recount_groups(p_run_id);
end $$;

CREATE FUNCTION evertick.stranded() RETURNS SETOF bigint
    LANGUAGE sql STABLE
    AS $$
    with recursive holder as (
        (select session from lease order by session limit 1)
        union all
        select (select l.session from lease l where l.session > h.session order by l.session limit 1)
        from holder h where h.session is not null
    )
    select h.session from holder h left join runner r on r.session = h.session
    where h.session is not null and (r.session is null or r.gone_at is not null)
      and exists (select 1 from lease l where l.session = h.session and not is_set_aside('run', l.run_id))
    limit 100
$$;

CREATE FUNCTION evertick.survey(p_owner text, p_seconds double precision, p_watches boolean) RETURNS TABLE(shard smallint, state text, owner text, heir text, is_free boolean, free_in double precision, live text[])
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
declare
    t timestamptz := clock();
    there text[];
    held int[];
begin
    perform set_config('synchronous_commit', 'off', true);
    insert into scheduler (owner, since, seen_until, pid)
    values (p_owner, t, t + make_interval(secs => p_seconds), case when p_watches then pg_backend_pid() end)
    on conflict (owner) do update set seen_until = excluded.seen_until, pid = excluded.pid;
    delete from scheduler x where x.ctid = any(array(
        select y.ctid from scheduler y where y.seen_until < t - interval '1 minute' for update skip locked));
    there := array(select x.owner from scheduler x
                   where x.seen_until > t + make_interval(secs => p_seconds * 0.4)
                     and (x.pid is null or x.pid in (select a.pid from pg_stat_activity a))
                   order by x.owner);
    held := array(select l.objid::int from pg_locks l where l.locktype = 'advisory' and l.classid = 4712 and l.objsubid = 2
                  and l.database = (select d.oid from pg_database d where d.datname = current_database()) and l.granted);
    return query
    select s.shard, s.state, s.owner, h.heir, s.lease_until is null or s.lease_until < t
               or (p_watches and s.is_watched and s.shard <> all(held)),
           extract(epoch from greatest(s.lease_until, case when h.heir is not null then s.heir_until end) - t)::double precision, there
    from shard s cross join lateral (select case when s.heir_until > t then s.heir end as heir) h
    where s.state <> 'closed' order by s.shard;
end $$;

CREATE FUNCTION evertick.sweep(p_shard smallint, p_epoch bigint, p_kind text, p_ids bigint[], p_limit integer, OUT swept integer, OUT is_clean boolean) RETURNS record
    LANGUAGE plpgsql
    AS $_$
declare
    gone bigint[];
    hung text;
    n int;
begin
    perform fence(p_shard, p_epoch);
    swept := 0;
    gone := array(
        select m.id from remains m
        where m.shard = p_shard and m.kind = p_kind and m.id = any(p_ids)
        order by m.id for update skip locked);
    foreach hung in array case p_kind when 'run' then array['log_chunk', 'result', 'map_item', 'deferral', 'poll', 'approval', 'child_run', 'attempt', 'note', 'run_group', 'task']
                                      else array['edge', 'retry_group', 'task_input', 'task_gate', 'task_child', 'task_wait', 'task_deadline', 'notice', 'task_list', 'task_mapping', 'task_spec'] end loop
        execute format('delete from %1$I where ctid = any(array(select x.ctid from %1$I x where x.%2$I = any($1) limit $2))',
                       hung, p_kind || '_id') using gone, p_limit - swept;
        get diagnostics n = row_count;
        swept := swept + n;
    end loop;
    is_clean := swept < p_limit;
    if is_clean then
        if p_kind = 'run' then
            -- Their logs in the storage go next. What is being put at this moment stays on its list for as long as that may take.
            update log_object o set look_at = greatest(o.look_at, clock()) where o.run_id = any(gone);
        end if;
        delete from remains m where m.shard = p_shard and m.kind = p_kind and m.id = any(gone);
    end if;
end $_$;

CREATE FUNCTION evertick.sync_schedules(p_dag_id integer, p_schedules jsonb, p_removes_all boolean, p_actor text) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    changed int[];
    t timestamptz := clock();
begin
    with wanted as (
        select * from read_schedules(p_schedules)
    ), written as (
        insert into schedule as c (dag_id, name, version, spec, params, misfire, window_seconds, catchup_limit, overlap,
                                   start_within, finish_within, delay_seconds, changed_by, changed_at)
        select p_dag_id, w.name, 1, w.spec, w.params, w.misfire, w.window_seconds, w.catchup_limit, w.overlap,
               w.start_within, w.finish_within, w.delay_seconds, p_actor, t
        from wanted w
        on conflict (dag_id, name) do update
            set version = c.version + 1, spec = excluded.spec, params = excluded.params, misfire = excluded.misfire,
                window_seconds = excluded.window_seconds, catchup_limit = excluded.catchup_limit, overlap = excluded.overlap,
                start_within = excluded.start_within, finish_within = excluded.finish_within,
                delay_seconds = excluded.delay_seconds, changed_by = p_actor, changed_at = t, deleted_at = null
            where c.origin = 'code'
              and (c.deleted_at is not null or (c.spec, c.params, c.misfire, c.window_seconds, c.catchup_limit, c.overlap,
                                              c.start_within, c.finish_within)
                  is distinct from (excluded.spec, excluded.params, excluded.misfire, excluded.window_seconds,
                                    excluded.catchup_limit, excluded.overlap, excluded.start_within, excluded.finish_within))
        returning c.schedule_id, c.name, c.version
    ), missed as (
        -- instants that were over before anybody knew of the schedule; a later version begins when it is made
        insert into skip_record (schedule_id, first_at, last_at, count, reason, recorded_at)
        select c.schedule_id, k.first_at, k.last_at, k.count, k.reason, t
        from written c join wanted w on w.name = c.name
        cross join lateral jsonb_to_record(w.skipped) as k(first_at timestamptz, last_at timestamptz, count bigint, reason text)
        where jsonb_typeof(w.skipped) = 'object' and c.version = 1
        on conflict (schedule_id, first_at) do nothing
    ), placed as (
        insert into schedule_state as s (schedule_id, shard, version, next_due, paused)
        select c.schedule_id, d.shard, c.version, w.next_due, d.paused
        from written c join wanted w on w.name = c.name join dag d on d.dag_id = p_dag_id
        on conflict (schedule_id) do update set version = excluded.version, next_due = excluded.next_due, error = null
    )
    select array(select c.schedule_id from written c) into changed;
    if cardinality(changed) > 0 then
        perform note_schedules(changed, 'publish');
        update dag d set has_turns = true where d.dag_id = p_dag_id and not d.has_turns and exists (
            select 1 from schedule c where c.schedule_id = any(changed) and c.overlap <> 'allow');
    end if;
    perform remove_schedules(array(
        select c.schedule_id from schedule c
        where c.dag_id = p_dag_id and c.deleted_at is null and (c.origin = 'code' or p_removes_all)
          and c.name not in (select x->>'name' from jsonb_array_elements(p_schedules) x)), p_actor);
end $$;

CREATE FUNCTION evertick.take_back(p_shard smallint) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    update schedule_state s set error = null
    from quarantine q
    where q.kind = 'schedule' and q.subject_id = s.schedule_id and q.retry_at <= t and s.shard = p_shard and s.error is not null;
    delete from quarantine q
    where q.retry_at + greatest(q.retry_at - q.failed_at, interval '1 minute') < t
       or (q.kind = 'schedule' and q.retry_at is null
           and not exists (select 1 from schedule_state s where s.schedule_id = q.subject_id and s.error is not null));
    delete from retry_line l where l.shard = p_shard and not waits_until(l.run_id, l.idx, l.map_index, l.due_at);
    delete from timer w
    where w.shard = p_shard and w.due_at <= t and (select true from run_status r where r.run_id = w.run_id) is null;
end $$;

CREATE FUNCTION evertick.take_back_instances(p_run_id bigint, p_idxs integer[]) RETURNS evertick.ended[]
    LANGUAGE plpgsql
    AS $$
declare
    one record;
    taken ended[];
    everything ended[] := '{}';
    is_stopping boolean;
begin
    for one in
        select s.idx, s.queue, s.priority from run_status r join task_spec s on s.version_id = r.version_id
        where r.run_id = p_run_id and s.idx = any(p_idxs) and s.is_mapped and has_instances(p_run_id, s.idx) order by s.idx
    loop
        perform quit_lines(array[p_run_id], one.idx);
        delete from ready q where q.queue = one.queue and q.rank in (9 - one.priority, 9) and q.run_id = p_run_id and q.idx = one.idx;
        update task k set request = 'clear'
        where k.run_id = p_run_id and k.idx = one.idx and k.state in ('queued', 'running') and k.request is distinct from 'cancel';
        is_stopping := exists (select 1 from task k where k.run_id = p_run_id and k.idx = one.idx and k.state in ('queued', 'running'));
        update task k set state = 'canceled', finished_at = clock(), not_before = null
        where k.run_id = p_run_id and k.idx = one.idx and k.state in ('waiting', 'pending', 'available', 'deferred');
        delete from deferral d where d.run_id = p_run_id and d.idx = one.idx;
        taken := array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended from task k
                       where k.run_id = p_run_id and k.idx = one.idx and k.state not in ('queued', 'running'));
        perform leave_gates(taken);
        perform keep_attempts(taken);
        if is_stopping then
            delete from task k where k.run_id = p_run_id and k.idx = one.idx and k.state not in ('queued', 'running');
        else
            update task k set state = 'waiting', finished_at = null
            where k.run_id = p_run_id and k.idx = one.idx
              and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed');
            perform fold_instances(taken);
        end if;
        everything := everything || taken;
    end loop;
    return everything;
end $$;

CREATE FUNCTION evertick.take_back_successors(p_tasks evertick.ended[]) RETURNS evertick.ended[]
    LANGUAGE plpgsql
    AS $$
declare
    one record;
    back ended;
    taken ended[] := '{}';
begin
    for one in
        select g.run_id, g.dst as idx, s.queue, s.priority
        from after_tasks(p_tasks) g
        join task_spec s on s.version_id = g.version_id and s.idx = g.dst
        cross join lateral (select from task k where k.run_id = g.run_id and k.idx = g.dst and k.map_index = -1
                            and k.state in ('pending', 'available') offset 0) k
        where g.has_heard
        order by g.run_id, g.dst
    loop
        perform quit_lines(array[one.run_id], one.idx, -1);
        delete from ready q where q.queue = one.queue and q.rank in (9 - one.priority, 9) and q.run_id = one.run_id and q.idx = one.idx
          and q.map_index = -1;
        update task k set state = 'canceled', finished_at = clock(), not_before = null
        where k.run_id = one.run_id and k.idx = one.idx and k.map_index = -1 and k.state in ('pending', 'available')
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state into back;
        if found then
            perform leave_gates(array[back]);
            taken := array_append(taken, back);
        end if;
    end loop;
    -- Of a mapped task none or all: what its instances were given is of the past, and one of them never waits for others.
    for one in
        select g.run_id, array_agg(g.dst order by g.dst) as idxs from after_tasks(p_tasks) g
        join task_spec s on s.version_id = g.version_id and s.idx = g.dst and s.is_mapped
        where g.has_heard and has_instances(g.run_id, g.dst) and not exists (
            select 1 from task k where k.run_id = g.run_id and k.idx = g.dst and (k.state not in ('pending', 'available') or k.attempt > 0))
          and not exists (select 1 from unnest(p_tasks) p where p.run_id = g.run_id and p.idx = g.dst)
        group by g.run_id order by g.run_id
    loop
        taken := taken || take_back_instances(one.run_id, one.idxs);
    end loop;
    return taken;
end $$;

CREATE FUNCTION evertick.take_deliveries(p_shard smallint, p_epoch bigint, p_passed_over text[], p_each integer, p_limit integer, p_seconds double precision) RETURNS TABLE(delivery_id bigint, sink text, event text, fact jsonb, attempts integer, created_at timestamp with time zone)
    LANGUAGE plpgsql
    AS $$
#variable_conflict use_column
declare
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    return query
    with recursive waited_for as (
        (select o.sink from outbox o where o.shard = p_shard and o.state = 'waiting' order by o.sink limit 1)
        union all
        select (select o.sink from outbox o where o.shard = p_shard and o.state = 'waiting' and o.sink > w.sink order by o.sink limit 1)
        from waited_for w where w.sink is not null
    ), due as materialized (
        select x.place from waited_for w cross join lateral (
            select o.ctid as place from outbox o
            where o.shard = p_shard and o.sink = w.sink and o.state = 'waiting' and o.due_at <= t
            order by o.due_at limit p_each for update skip locked) x
        where w.sink is not null and w.sink <> all(p_passed_over)
        limit p_limit
    )
    update outbox o set attempts = o.attempts + 1, due_at = t + make_interval(secs => p_seconds)
    where o.ctid = any(array(select d.place from due d)) and o.state = 'waiting'
    returning o.delivery_id, o.sink, o.event, o.fact, o.attempts, o.created_at;
end $$;

CREATE FUNCTION evertick.take_places(p_tasks evertick.gate_arrival[]) RETURNS void
    LANGUAGE sql
    AS $$
    insert into gate_order (gate_id, version, run_id, idx, map_index, since)
    select n.gate_id, n.need, a.run_id, a.idx, a.map_index, clock()
    from unnest(p_tasks) a cross join lateral unnest(a.checks, a.needs) as n(gate_id, need)
    cross join lateral (select x.kind from gate x where x.gate_id = n.gate_id offset 0) g
    where g.kind = 'order'
    on conflict (run_id, idx, map_index, gate_id) do nothing
$$;

CREATE FUNCTION evertick.take_shard(p_shard smallint, p_owner text, p_seconds double precision) RETURNS bigint
    LANGUAGE plpgsql
    AS $$
declare
    taken bigint;
begin
    perform 1 from shard s where s.shard = p_shard and is_free(s, p_owner);
    if not found then
        return null;
    end if;
    perform pg_advisory_xact_lock(4711, p_shard);
    update shard s
    set epoch = s.epoch + 1, owner = p_owner, lease_until = clock() + make_interval(secs => p_seconds), is_watched = false,
        led_since = clock(), heir = null, heir_until = null
    where s.shard = p_shard and is_free(s, p_owner)
    returning s.epoch into taken;
    return taken;
end $$;

CREATE FUNCTION evertick.takes(p_match text[], p_version_id integer, p_idx integer) RETURNS boolean
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return p_match = '{}' or exists (select 1 from unnest(p_match) m where address_of(p_version_id, p_idx) ~ pattern_regex(m));
end $$;

CREATE FUNCTION evertick.tell(p_happened evertick.happening[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    delete from episode p using unnest(p_happened) h
    cross join lateral (select x.schedule_id from run x where x.run_id = h.run_id offset 0) r
    where h.event = 'success' and p.schedule_id = r.schedule_id and p.task = h.task;
    with wanted as materialized (
        select h.*, r.schedule_id, r.fire_at, d.name as dag, n.sink, n.every_time
        from unnest(p_happened) h
        cross join lateral (select x.schedule_id, x.fire_at, x.dag_id from run x where x.run_id = h.run_id offset 0) r
        cross join lateral (select x.name from dag x where x.dag_id = r.dag_id offset 0) d
        cross join lateral (
            select y.sink, bool_or(y.every_time) as every_time from (
                select x.sink, x.every_time from notice x where x.version_id = h.version_id and x.idx = h.idx and x.event = h.event
                union all
                select x.sink, x.every_time from default_notice x where h.idx = -1 and x.event = h.event) y
            group by y.sink) n
    ), failing as materialized (
        select w.schedule_id, w.task, min(w.run_id) as run_id, count(distinct w.run_id)::int as failures
        from wanted w where w.event = 'failure' and w.schedule_id is not null
        group by w.schedule_id, w.task
    ), noted as (
        insert into episode as p (schedule_id, task, run_id, since, failures)
        select f.schedule_id, f.task, f.run_id, t, f.failures from failing f order by f.schedule_id, f.task
        on conflict (schedule_id, task) do update set failures = p.failures + excluded.failures
        returning p.schedule_id, p.task, p.failures
    ), begun as materialized (
        select f.schedule_id, f.task, f.run_id from failing f
        join noted p on p.schedule_id = f.schedule_id and p.task = f.task and p.failures = f.failures
    )
    insert into outbox (shard, sink, event, run_id, fact, created_at, waiting_since, due_at)
    select 0, w.sink, w.event, w.run_id, jsonb_strip_nulls(jsonb_build_object(
               'event', w.event, 'dag', w.dag, 'run', w.run_id, 'task', nullif(w.task, ''), 'state', w.state, 'attempt', w.attempt,
               'schedule', (select c.name from schedule c where c.schedule_id = w.schedule_id), 'fire_at', w.fire_at, 'at', t,
               'reason', left(w.reason, 4000))), t, t, t
    from wanted w
    where w.event <> 'failure' or w.every_time or w.schedule_id is null or exists (
        select 1 from begun b where b.schedule_id = w.schedule_id and b.task = w.task and b.run_id = w.run_id)
    order by w.run_id, w.idx < 0, w.idx, w.task, w.sink;
end $$;

CREATE FUNCTION evertick.tell_alerts(p_late evertick.late[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    insert into outbox (shard, sink, event, run_id, fact, created_at, waiting_since, due_at)
    select 0, n.sink, 'deadline', a.run_id, jsonb_strip_nulls(jsonb_build_object(
               'event', 'deadline', 'alert', a.kind, 'dag', d.name, 'schedule', c.name, 'run', a.run_id, 'task', nullif(a.task, ''),
               'due_at', a.due_at, 'at', t)),
           t, t, t
    from unnest(p_late) with ordinality a(kind, schedule_id, run_id, task, due_at, place)
    left join lateral (select x.dag_id, x.name from schedule x where x.schedule_id = a.schedule_id offset 0) c on true
    left join lateral (select x.dag_id, x.version_id from run x where x.run_id = a.run_id offset 0) r on true
    cross join lateral (select * from dag x where x.dag_id = coalesce(c.dag_id, r.dag_id) offset 0) d
    cross join lateral (
        select x.sink from notice x where a.task = '' and x.version_id = d.version_id and x.idx = -1 and x.event = 'deadline'
        union
        select x.sink from task_spec s join notice x on x.version_id = s.version_id and x.idx = s.idx and x.event = 'deadline'
        where s.version_id = r.version_id and s.name = a.task
        union
        select x.sink from default_notice x where x.event = 'deadline') n
    order by a.place, n.sink;
end $$;

CREATE FUNCTION evertick.tell_ends(p_ended evertick.ended[], p_closed bigint[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    perform tell(array(
        select row(e.run_id, e.version_id, e.idx, case when e.map_index < 0 then s.name else format('%s[%s]', s.name, e.map_index) end,
                   case e.state when 'success' then 'success' when 'failed' then 'failure' else 'skipped' end, e.state,
                   nullif(k.attempt, 0), k.reason)::happening
        from unnest(p_ended) e
        cross join lateral (select x.name from task_spec x where x.version_id = e.version_id and x.idx = e.idx and x.notifies offset 0) s
        cross join lateral (select x.attempt, x.reason from task x
                            where x.run_id = e.run_id and x.idx = e.idx and x.map_index = e.map_index offset 0) k
        where e.state in ('success', 'failed', 'skipped')
        union all
        select row(r.run_id, r.version_id, -1, '', case r.state when 'success' then 'success' else 'failure' end, r.state, null,
                   r.reason)::happening
        from unnest(p_closed) c(run_id)
        cross join lateral (select * from run_status x where x.run_id = c.run_id offset 0) r
        where r.state in ('success', 'failed')));
end $$;

CREATE FUNCTION evertick.tell_retries(p_retried jsonb) RETURNS void
    LANGUAGE plpgsql
    AS $$
declare
    happened happening[];
begin
    happened := array(
        select row(m.run_id, m.version_id, m.idx, case when m.map_index < 0 then s.name else format('%s[%s]', s.name, m.map_index) end,
                   'retry', m.kind, m.attempt, m.reason)::happening
        from jsonb_to_recordset(p_retried) as m(run_id bigint, version_id int, idx int, map_index int, kind text, attempt int, reason text)
        cross join lateral (select x.name from task_spec x where x.version_id = m.version_id and x.idx = m.idx and x.notifies offset 0) s
        where m.kind <> 'given_back');
    if cardinality(happened) > 0 then
        perform tell(happened);
    end if;
end $$;

CREATE FUNCTION evertick.tend_gates(p_shard smallint, p_epoch bigint, p_limit integer, OUT admitted integer, OUT next_opening timestamp with time zone) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    back ended[];
begin
    perform fence(p_shard, p_epoch);
    with waiting as (
        select w.ctid as place, w.run_id, w.idx, w.map_index, w.version_id
        from gate_line l
        cross join lateral (select x.ctid, x.* from gate_wait x
                            where x.line_id = l.line_id and is_served(l.queue, x.version_id, x.idx, 0)
                            order by x.rank, x.seq limit p_limit) w
        cross join lateral (select from run_status r where r.run_id = w.run_id for no key update skip locked) locked
        where l.queue is not null limit p_limit
    ), gone as (
        delete from gate_wait w where w.ctid = any(array(select x.place from waiting x))
    )
    select array_agg(row(x.run_id, x.idx, x.map_index, x.version_id, 'pending')::ended) into back from waiting x;
    delete from gate_line l where l.queue is not null
    and (select true from gate_wait w where w.line_id = l.line_id limit 1) is null;
    admitted := work_gates(coalesce(back, '{}'), '{}', '{}', array(
        (select g.gate_id from gate g where g.is_behind order by g.gate_id limit p_limit)
        union
        (select g.gate_id from gate g where g.opens_at <= clock() order by g.opens_at limit p_limit)));
    select min(g.opens_at) into next_opening from gate g where g.opens_at is not null;
end $$;

CREATE FUNCTION evertick.tend_outbox(p_shard smallint, p_epoch bigint, p_defaults jsonb, p_seconds double precision, p_limit integer, p_most integer, OUT given_up integer, OUT waiting integer, OUT oldest_seconds double precision) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    delete from default_notice n where not exists (
        select 1 from jsonb_to_recordset(p_defaults) as x(event text, sink text) where x.event = n.event and x.sink = n.sink);
    insert into default_notice as n (event, sink, every_time)
    select x.event, x.sink, x.every_time from jsonb_to_recordset(p_defaults) as x(event text, sink text, every_time boolean)
    order by x.event, x.sink
    on conflict (event, sink) do update set every_time = excluded.every_time where n.every_time <> excluded.every_time;
    update outbox o set state = 'failed', ended_at = t, answer = 'given up: ' || coalesce(o.answer, 'its sink did not work for long')
    where o.state = 'waiting' and o.ctid = any(array(
        select x.ctid from outbox x
        where x.shard = p_shard and x.state = 'waiting' and x.waiting_since < t - make_interval(secs => p_seconds) and x.due_at <= t
        limit p_limit for update skip locked));
    get diagnostics given_up = row_count;
    select count(*), extract(epoch from t - min(w.waiting_since)) into waiting, oldest_seconds
    from (select o.waiting_since from outbox o where o.shard = p_shard and o.state = 'waiting' limit p_most) w;
end $$;

CREATE FUNCTION evertick.time_out_run(p_shard smallint, p_epoch bigint, p_run_id bigint) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    why text;
    stopped ended[];
    asked int;
begin
    perform fence(p_shard, p_epoch);
    begin
        perform 1 from run_status r where r.run_id = p_run_id and r.state = 'running' for no key update;
        if not is_overdue(p_run_id) then
            return null;
        end if;
        select format('run_timeout: exceeded %s s', v.run_timeout) into why
        from run_status r join dag_version v on v.version_id = r.version_id where r.run_id = p_run_id;
        update run_status r set reason = why where r.run_id = p_run_id and r.state = 'running';
        select s.stopped, s.asked into stopped, asked from stop_tasks(p_run_id, why) s;
        insert into journal (occurred_at, verb, actor, run_id, detail)
        values (clock(), 'time_out', 'evertick', p_run_id, jsonb_build_object('reason', why, 'asked_to_stop', asked));
        perform close_runs(stopped);
        perform pass_gates();
        return asked;
    exception when others then
        if not is_poison(sqlstate) then
            raise;
        end if;
        perform set_aside('run', p_run_id, 'time_out', sqlerrm, true);
        return -1;
    end;
end $$;

CREATE FUNCTION evertick.time_out_waits(p_shard smallint, p_epoch bigint, p_limit integer, OUT failed integer, OUT refused integer) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    late ready[];
    one ready;
begin
    perform fence(p_shard, p_epoch);
    failed := 0;
    refused := 0;
    late := array(
        select first.whole from (
            select q as whole, q.run_id from ready q
            where q.expires_at <= clock() and not is_set_aside('run', q.run_id) order by q.expires_at offset 0) first
        cross join lateral (select from run_status r where r.run_id = first.run_id for no key update skip locked) locked
        limit p_limit);
    begin
        failed := fail_waits(late);
        perform pass_gates();
        return;
    exception when others then
        if not is_poison(sqlstate) then
            raise;
        end if;
    end;
    foreach one in array late loop
        begin
            failed := failed + fail_waits(array[one]);
        exception when others then
            if not is_poison(sqlstate) then
                raise;
            end if;
            perform set_aside('run', one.run_id, 'time_out', sqlerrm, true);
            refused := refused + 1;
        end;
    end loop;
    perform pass_gates();
end $$;

CREATE FUNCTION evertick.trigger_run(p_dag_id integer, p_params jsonb, p_key text, p_actor text, p_fire_at timestamp with time zone DEFAULT NULL::timestamp with time zone, p_note text DEFAULT NULL::text) RETURNS TABLE(run_id bigint, is_new boolean, defers boolean)
    LANGUAGE plpgsql
    AS $$
declare
    made bigint;
begin
    -- An instant of one's own is a key as well: nothing else has a run for it, neither somebody nor a schedule of the DAG.
    insert into run as r (dag_id, version_id, kind, key, fire_at, params, triggered_by, created_at)
    select d.dag_id, d.version_id, 'manual', p_key, p_fire_at, p_params, p_actor, clock()
    from dag d where d.dag_id = p_dag_id and d.deleted_at is null and d.version_id is not null
      and (p_fire_at is null or not exists (
          select 1 from schedule c join run x on x.schedule_id = c.schedule_id and x.fire_at = p_fire_at where c.dag_id = p_dag_id))
    on conflict do nothing
    returning r.run_id into made;
    if made is null then
        return query
            select r.run_id, false, false from run r where r.dag_id = p_dag_id and r.key = p_key
            union all
            select r.run_id, false, false from run r where r.dag_id = p_dag_id and r.fire_at = p_fire_at and r.kind = 'manual'
            union all
            select x.run_id, false, false from schedule c join run x on x.schedule_id = c.schedule_id and x.fire_at = p_fire_at
            where c.dag_id = p_dag_id
            limit 1;
        return;
    end if;
    if p_note is not null then
        insert into note (run_id, idx, map_index, content, written_by, written_at) values (made, -1, -1, p_note, p_actor, clock());
    end if;
    -- The run says itself who triggered it; somebody who also says from where gets it into the audit log.
    if coalesce(current_setting('evertick.origin', true), '') <> '' then
        insert into journal (occurred_at, verb, actor, dag_id, run_id, detail)
        values (clock(), 'trigger', p_actor, p_dag_id, made, jsonb_strip_nulls(jsonb_build_object('key', p_key)));
    end if;
    perform open_runs(array[made]);
    perform pass_gates();
    return query select made, true, coalesce(current_setting('evertick.arrived', true) = 'yes', false);
end $$;

CREATE FUNCTION evertick.try_login(p_subjects text[], p_free integer[], p_fading text[]) RETURNS double precision
    LANGUAGE plpgsql
    AS $$
declare
    t timestamptz := clock();
    wait double precision;
begin
    delete from login_try l where l.tried_at < t - interval '1 day' and l.subject <> all(p_subjects);
    update login_try l
    set failures = greatest(l.failures - floor(extract(epoch from t - l.tried_at) / 60)::int, 0),
        tried_at = l.tried_at + floor(extract(epoch from t - l.tried_at) / 60) * interval '1 minute'
    where l.subject = any(p_fading) and l.tried_at <= t - interval '1 minute';
    select max(extract(epoch from l.tried_at - t) + least(2 ^ least(l.failures - s.free, 20), 900)) into wait
    from unnest(p_subjects, p_free) as s(subject, free) join login_try l on l.subject = s.subject and l.failures >= s.free;
    if wait > 0 then
        return wait;
    end if;
    insert into login_try as l (subject, failures, tried_at)
    select s, 1, t from unnest(p_subjects) s order by s
    on conflict (subject) do update set failures = l.failures + 1, tried_at = t;
    return 0;
end $$;

CREATE FUNCTION evertick.unadmit(p_shard smallint, p_epoch bigint, p_grace double precision, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    dead text[];
    chosen ended[];
    one record;
    line bigint;
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    dead := array(
        with recursive each_queue as (
            (select q.queue from ready q order by q.queue limit 1)
            union all
            select (select q.queue from ready q where q.queue > e.queue order by q.queue limit 1)
            from each_queue e where e.queue is not null
        )
        select e.queue from each_queue e where e.queue is not null and not is_served_to_all(e.queue, p_grace));
    if cardinality(dead) = 0 then
        return 0;
    end if;
    chosen := array(
        select row(h.run_id, h.idx, h.map_index, k.version_id, 'pending')::ended
        from gate_hold h
        cross join lateral (select x.version_id from task x where x.run_id = h.run_id and x.idx = h.idx
                            and x.map_index = h.map_index and x.state = 'available' offset 0) k
        cross join lateral (select x.queue from task_spec x where x.version_id = k.version_id and x.idx = h.idx offset 0) s
        cross join lateral (select from run_status r where r.run_id = h.run_id for no key update skip locked) locked
        where h.since < t - make_interval(secs => p_grace) and s.queue = any(dead)
          and not is_served(s.queue, k.version_id, h.idx, p_grace)
        limit p_limit);
    if cardinality(chosen) = 0 then
        return 0;
    end if;
    with gone as (
        delete from ready q
        where q.queue = any(dead) and (q.run_id, q.idx, q.map_index) in (select c.run_id, c.idx, c.map_index from unnest(chosen) c)
        returning q.run_id, q.idx, q.map_index
    ), moved as (
        update task k set state = 'pending' from gone g
        where k.run_id = g.run_id and k.idx = g.idx and k.map_index = g.map_index and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into chosen from moved m;
    perform leave_gates(chosen);
    for one in
        select s.queue, case when r.kind = 'backfill' then 9 else 9 - s.priority end as rank, c.run_id, c.idx, c.map_index, c.version_id
        from unnest(chosen) c join task_spec s on s.version_id = c.version_id and s.idx = c.idx join run r on r.run_id = c.run_id
    loop
        insert into gate_line (gate_ids, weights, queue, rank, seq, since) values ('{}', '{}', one.queue, 0, 0, t)
        on conflict (gate_ids, weights, checks, needs, queue) do update set rank = 0 returning line_id into line;
        insert into gate_wait (line_id, rank, run_id, idx, map_index, version_id, since)
        values (line, one.rank, one.run_id, one.idx, one.map_index, one.version_id, t);
    end loop;
    perform pass_gates();
    return coalesce(cardinality(chosen), 0);
end $$;

CREATE FUNCTION evertick.unhear(p_dag_ids integer[], p_asset text, p_before timestamp with time zone, p_actor text) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    meant int[] := array(
        select c.schedule_id from schedule c join heard h on h.schedule_id = c.schedule_id and h.kind = 'asset'
        where p_dag_ids is null or c.dag_id = any(p_dag_ids));
    n int;
begin
    perform 1 from schedule_state s where s.schedule_id = any(meant) order by s.schedule_id for no key update;
    delete from heard h
    where h.schedule_id = any(meant) and h.kind = 'asset' and (p_asset is null or h.name = p_asset)
      and (p_before is null or h.occurred_at < p_before);
    get diagnostics n = row_count;
    if n > 0 then
        insert into journal (occurred_at, verb, actor, dag_id, detail)
        values (clock(), 'unhear', p_actor, case when cardinality(p_dag_ids) = 1 then p_dag_ids[1] end,
                jsonb_strip_nulls(jsonb_build_object('asset', p_asset, 'updates', n)));
    end if;
    return n;
end $$;

CREATE FUNCTION evertick.unhold_dag(p_dag_id integer) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    held ended[];
begin
    perform 1 from run_status r where r.dag_id = p_dag_id and r.state = 'running' order by r.run_id for no key update;
    select array_agg(row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::ended) into held
    from run_status r join task k on k.run_id = r.run_id
    where r.dag_id = p_dag_id and r.state = 'running' and k.state = 'pending' and k.not_before is null;
    return release(held) + admit_runs(array[p_dag_id]);
end $$;

CREATE FUNCTION evertick.unwatch_logs(p_shard smallint, p_epoch bigint, p_run_ids bigint[], p_finished timestamp with time zone[]) RETURNS void
    LANGUAGE plpgsql
    AS $$
begin
    perform fence(p_shard, p_epoch);
    perform 1 from run_status r where r.run_id = any(p_run_ids) order by r.run_id for no key update;
    delete from log_watch w using unnest(p_run_ids, p_finished) as x(run_id, finished_at)
    where w.run_id = x.run_id and (select r.finished_at from run_status r where r.run_id = x.run_id) is not distinct from x.finished_at;
end $$;

CREATE FUNCTION evertick.update_asset(p_asset text, p_extra jsonb, p_actor text, OUT update_id bigint, OUT occurred_at timestamp with time zone) RETURNS record
    LANGUAGE plpgsql
    AS $$
begin
    insert into asset_update as u (asset, extra, updated_by, occurred_at) values (p_asset, p_extra, p_actor, clock())
    returning u.update_id, u.occurred_at into update_asset.update_id, update_asset.occurred_at;
    insert into arrival (kind, name, update_id, occurred_at)
    select 'asset', p_asset, update_asset.update_id, update_asset.occurred_at
    where exists (select 1 from awaited w where w.kind = 'asset' and w.name = p_asset);
    insert into journal (occurred_at, verb, actor, detail)
    values (update_asset.occurred_at, 'update_asset', p_actor, jsonb_build_object('asset', p_asset, 'update', update_asset.update_id));
end $$;

CREATE FUNCTION evertick.upstream_of(p_run_id bigint, p_idxs integer[]) RETURNS TABLE(idx integer, map_index integer, success integer, failed integer, upstream_failed integer, skipped integer, setup_success integer, setup_skipped integer, more integer)
    LANGUAGE sql STABLE
    AS $$
    with counted as (
        select w.idx,
               count(*) filter (where u.state = 'success')::int as success,
               count(*) filter (where u.state in ('failed', 'canceled'))::int as failed,
               count(*) filter (where u.state = 'upstream_failed')::int as upstream_failed,
               count(*) filter (where u.state = 'skipped')::int as skipped,
               count(*) filter (where s.is_setup and u.state = 'success')::int as setup_success,
               count(*) filter (where s.is_setup and u.state = 'skipped')::int as setup_skipped,
               (count(u.idx) - count(distinct g.src) filter (where u.idx is not null))::int as more
        from (select distinct k.idx, k.version_id from task k
              where k.run_id = p_run_id and (p_idxs is null or k.idx = any(p_idxs)) and k.state = 'waiting') w
        left join lateral (select x.src, x.out_of is null or is_over(p_run_id, x.version_id, x.out_of) as is_heard
                           from edge x where x.version_id = w.version_id and x.dst = w.idx offset 0) g on true
        left join lateral (select case when g.is_heard then x.state end as state, x.idx
                           from task x where x.run_id = p_run_id and x.idx = g.src offset 0) u on true
        left join lateral (select x.is_setup from task_spec x where x.version_id = w.version_id and x.idx = g.src offset 0) s on true
        group by w.idx
    )
    select c.idx, k.map_index, c.success, c.failed, c.upstream_failed, c.skipped, c.setup_success, c.setup_skipped, c.more
    from counted c
    cross join lateral (select x.map_index from task x where x.run_id = p_run_id and x.idx = c.idx and x.state = 'waiting' offset 0) k
$$;

CREATE FUNCTION evertick.used_of(p_gate_id integer) RETURNS integer
    LANGUAGE sql STABLE
    AS $$
    select case when (select g.kind = 'rate' from gate g where g.gate_id = p_gate_id)
                then (select count(*) from gate_pass p where p.gate_id = p_gate_id)
                else coalesce((select sum(n.weight) from gate_hold h cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight)
                               where p_gate_id = any(h.gate_ids) and n.gate_id = p_gate_id), 0) end::int
$$;

CREATE TABLE evertick.stored_value (
    kind text NOT NULL,
    name text NOT NULL,
    content text NOT NULL,
    key_id text NOT NULL,
    description text,
    changed_by text NOT NULL,
    changed_at timestamp with time zone NOT NULL,
    CONSTRAINT stored_value_kind_check CHECK ((kind = ANY (ARRAY['variable'::text, 'connection'::text, 'secret'::text])))
);

CREATE FUNCTION evertick.values_of_attempt(p_session bigint, p_run_id bigint, p_idx integer, p_map_index integer, p_epoch integer, p_kinds text[], p_names text[]) RETURNS SETOF evertick.stored_value
    LANGUAGE sql STABLE
    AS $$
    select v.*
      from lease l
     cross join lateral (select k.version_id from task k where k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
                         offset 0) k
     cross join lateral (select x.spec->'tasks'->l.idx as spec from dag_version x where x.version_id = k.version_id offset 0) t
     cross join lateral unnest(p_kinds, p_names) as w(kind, name)
     cross join lateral (select x.* from stored_value x where x.kind = w.kind and x.name = w.name offset 0) v
     where l.session = p_session and l.run_id = p_run_id and l.idx = p_idx and l.map_index = p_map_index and l.epoch = p_epoch
       and coalesce(t.spec->(w.kind || 's'), '[]'::jsonb) ? w.name
     limit 1000
$$;

CREATE FUNCTION evertick.verdict_on(p_wait evertick.deferral, p_now timestamp with time zone, OUT state evertick.task_state, OUT reason text, OUT result jsonb) RETURNS record
    LANGUAGE plpgsql STABLE
    AS $$
declare
    spec task_wait;
    other record;
    is_late boolean := coalesce(p_wait.deadline <= p_now, false);
begin
    if p_wait.kind = 'run' then
        select r.run_id, r.state, r.reason, g.name into other
        from run_status r join dag g on g.dag_id = r.dag_id where r.run_id = substr(p_wait.key, 5)::bigint;
        if other.state = 'success' then
            state := 'success';
            result := to_jsonb(other.run_id);
        elsif other.state is null then
            state := 'failed';
            reason := format('%s that it waited for was pruned', replace(p_wait.key, ':', ' '));
        elsif other.state in ('failed', 'canceled') then
            state := 'failed';
            reason := format('run %s of %s %s%s', other.run_id, other.name,
                             case other.state when 'failed' then 'failed' else 'was canceled' end, ': ' || other.reason);
        elsif is_late then
            state := 'failed';
            reason := format('run %s of %s did not end in time', other.run_id, other.name);
        end if;
        return;
    elsif p_wait.kind = 'time' then
        state := 'success';
        return;
    end if;
    select w.* into spec from run_status r join task_wait w on w.version_id = r.version_id and w.idx = p_wait.idx
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
            when 'approval' then format('approval_timeout: nobody decided within %s s', spec.timeout)
            else format('sensor_timeout: not true within %s s, %s polls', spec.timeout, (
                select q.polls from poll q
                where q.run_id = p_wait.run_id and q.idx = p_wait.idx and q.map_index = p_wait.map_index)) end;
    end if;
end $$;

CREATE FUNCTION evertick.version_of(p_version jsonb, p_run_id bigint) RETURNS bigint
    LANGUAGE plpgsql STABLE
    AS $$
begin
    if jsonb_typeof(p_version) = 'number' then
        return p_version::bigint;
    end if;
    return (select r.params #>> array(select jsonb_array_elements_text(p_version)) from run r where r.run_id = p_run_id)::bigint;
end $$;

CREATE FUNCTION evertick.waited_for(p_dag_id integer) RETURNS SETOF bigint
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return query
    select q.run_id from run_status q
    where q.dag_id = p_dag_id and q.state = 'queued' and exists (
        select 1 from task_gate t
        cross join lateral (select x.gate_id from gate x where x.kind = 'past' and x.name = past_name(q.run_id, t.idx) offset 0) g
        where t.version_id = q.version_id and t.kind = 'past'
          and exists (select 1 from gate_line l where l.blocked_on = g.gate_id));
end $$;

CREATE FUNCTION evertick.waits_for(p_run_id bigint, p_idx integer, p_map_index integer) RETURNS text
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return (
        select case d.kind
            when 'run' then 'waits for run ' || substr(d.key, 5)
            when 'event' then 'waits for event ' || substr(d.key, 7)
            when 'approval' then 'waits for a decision'
            when 'poll' then format('polled %s times, again at %s', coalesce((
                select q.polls from poll q where q.run_id = p_run_id and q.idx = p_idx and q.map_index = p_map_index), 0), shown_utc(d.wake_at))
            when 'time' then 'waits until ' || shown_utc(d.wake_at) end
        from deferral d where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index);
end $$;

CREATE FUNCTION evertick.waits_until(p_run_id bigint, p_idx integer, p_map_index integer, p_instant timestamp with time zone) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
                   and k.state = 'pending' and k.not_before = p_instant)
$$;

CREATE FUNCTION evertick.wake_waits(p_shard smallint, p_epoch bigint, p_limit integer, OUT looked_at integer, OUT refused integer, OUT next_wake timestamp with time zone) RETURNS record
    LANGUAGE plpgsql
    AS $$
declare
    due deferral[];
    one deferral;
begin
    perform fence(p_shard, p_epoch);
    refused := 0;
    perform hear_events(p_limit);
    due := array(
        select come.whole from (
            select d as whole, d.run_id from deferral d
            where d.shard = p_shard and d.wake_at <= clock() and d.kind not in ('start', 'clock') order by d.wake_at offset 0) come
        cross join lateral (select from run_status r where r.run_id = come.run_id for no key update skip locked) locked
        limit p_limit);
    looked_at := cardinality(due);
    if looked_at > 0 then
        begin
            perform look_at_waits(due);
        exception when others then
            if not is_poison(sqlstate) then
                raise;
            end if;
            foreach one in array due loop
                begin
                    perform look_at_waits(array[one]);
                exception when others then
                    if not is_poison(sqlstate) then
                        raise;
                    end if;
                    perform set_aside('run', one.run_id, 'wake', sqlerrm, true);
                    update deferral d set wake_at = clock() + interval '1 minute'
                    where d.run_id = one.run_id and d.idx = one.idx and d.map_index = one.map_index;
                    refused := refused + 1;
                end;
            end loop;
        end;
    end if;
    next_wake := next_wake_of(p_shard);
end $$;

CREATE FUNCTION evertick.wants_of(p_tasks evertick.ended[]) RETURNS evertick.gate_want[]
    LANGUAGE sql STABLE
    AS $$
    select coalesce(array_agg(row(p.run_id, p.idx, p.map_index, p.version_id,
                                  case when r.kind = 'backfill' then 9 else 9 - s.priority end, g.kind,
                                  case g.kind when 'group' then p.run_id || '/' || g.name
                                              when 'past' then past_of(p.run_id, p.version_id, p.idx)
                                              else coalesce(g.name, gate_name(g.parts, p.run_id)) end,
                                  g.weight, coalesce(g.capacity, case g.kind when 'mutex' then 1000000 else 0 end),
                                  case g.kind when 'order' then version_of(g.version, p.run_id) else 1 end,
                                  g.period)::gate_want), '{}')
    from (select distinct run_id, idx, map_index, version_id from unnest(p_tasks)) p
    cross join lateral (select from task k where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
                        and k.state = 'pending' and k.not_before is null offset 0) k
    cross join lateral (select x.priority from task_spec x where x.version_id = p.version_id and x.idx = p.idx offset 0) s
    cross join lateral (select * from task_gate x where x.version_id = p.version_id and x.idx = p.idx offset 0) g
    cross join lateral (select x.kind from run x where x.run_id = p.run_id offset 0) r
    where (select r.state from run_status r where r.run_id = p.run_id) = 'running'
      and (select true from gate_wait w where w.run_id = p.run_id and w.idx = p.idx and w.map_index = p.map_index) is null
$$;

CREATE FUNCTION evertick.was_in_time(p_run_id bigint, p_kind text, p_due_at timestamp with time zone) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select coalesce((
        select (s.state in ('success', 'failed', 'canceled') and s.finished_at <= p_due_at)
            or (p_kind = 'start' and (
                exists (select 1 from task k where k.run_id = p_run_id and k.started_at <= p_due_at)
                or exists (select 1 from attempt a where a.run_id = p_run_id and a.started_at <= p_due_at)))
        from run_status s where s.run_id = p_run_id), true)
$$;

CREATE FUNCTION evertick.was_task_in_time(p_run_id bigint, p_idx integer, p_due_at timestamp with time zone) RETURNS boolean
    LANGUAGE sql STABLE
    AS $$
    select was_in_time(p_run_id, 'finish', p_due_at) or coalesce((
        select bool_and(k.state in ('success', 'failed', 'skipped', 'upstream_failed', 'canceled') and k.finished_at <= p_due_at)
        from task k where k.run_id = p_run_id and k.idx = p_idx), false)
$$;

CREATE FUNCTION evertick.watch_again(p_run_ids bigint[]) RETURNS void
    LANGUAGE sql
    AS $$
    insert into log_watch (run_id) select x.run_id from log_walk w cross join unnest(p_run_ids) as x(run_id) where x.run_id <= w.after
    on conflict (run_id) do nothing
$$;

CREATE FUNCTION evertick.watch_logs(p_shard smallint, p_epoch bigint, p_limit integer) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    begun bigint;
    passed bigint[];
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    insert into log_walk (after) values (0) on conflict (is_only) do nothing;
    select w.after into begun from log_walk w for update;
    passed := array(
        select x.run_id from (
            select r.run_id, count(*) filter (where r.created_at between t - interval '1 minute' and t) over (order by r.run_id) as young
            from (select f.run_id, f.created_at from run f where f.run_id > begun order by f.run_id limit p_limit) r) x
        where x.young = 0 order by x.run_id);
    if cardinality(passed) > 0 then
        insert into log_watch (run_id) select p from unnest(passed) p on conflict (run_id) do nothing;
        update log_walk w set after = passed[cardinality(passed)];
    end if;
    return cardinality(passed);
end $$;

CREATE FUNCTION evertick.who_fits(p_tasks evertick.gate_arrival[], OUT fitting evertick.gate_arrival[], OUT others evertick.gate_arrival[]) RETURNS record
    LANGUAGE sql STABLE
    AS $$
    select array_agg(j.whole order by j.place) filter (where j.fits), array_agg(j.whole order by j.place) filter (where not j.fits)
    from (
        select n.place, (array_agg(n.whole))[1] as whole,
               coalesce(bool_and(n.running <= g.capacity - g.used), false) and bool_and(n.checks = '{}') as fits
        from (
            select e.whole, e.place, e.checks, x.gate_id, sum(x.weight) over (partition by x.gate_id order by e.place) as running
            from (select a as whole, a.gate_ids, a.weights, a.checks,
                         row_number() over (order by a.rank, a.run_id, a.idx, a.map_index) as place from unnest(p_tasks) a) e
            left join lateral unnest(e.gate_ids, e.weights) as x(gate_id, weight) on true) n
        left join lateral (select x.capacity, x.used from gate x where x.gate_id = n.gate_id offset 0) g on true
        group by n.place) j
$$;

CREATE FUNCTION evertick.whose_turn(p_dag_id integer) RETURNS SETOF bigint
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return query
    select x.run_id from (
        select a.run_id, a.state, c.overlap,
               row_number() over (partition by r.schedule_id order by a.state <> 'running', a.run_id) as place
        from (select y.run_id, y.state from run_status y
              where y.dag_id = p_dag_id and y.state in ('queued', 'running') offset 0) a
        cross join lateral (select y.schedule_id from run y where y.run_id = a.run_id offset 0) r
        left join lateral (select y.overlap from schedule y where y.schedule_id = r.schedule_id offset 0) c on true) x
    where x.state = 'queued' and (x.overlap is null or x.overlap = 'allow' or x.place = 1)
    order by x.run_id;
end $$;

CREATE FUNCTION evertick.why(p_run_id bigint, p_idx integer, p_map_index integer) RETURNS TABLE(kind text, detail jsonb)
    LANGUAGE plpgsql STABLE
    AS $$
declare
    status run_status;
    spec task_spec;
    k task;
    d dag;
    wait gate_wait;
    line gate_line;
    most constant int := 10000;
    t timestamptz := clock();
begin
    select r.* into status from run_status r where r.run_id = p_run_id;
    select s.* into spec from task_spec s where s.version_id = status.version_id and s.idx = p_idx;
    select x.* into k from task x where x.run_id = p_run_id and x.idx = p_idx and x.map_index = p_map_index;
    select x.* into d from dag x where x.dag_id = status.dag_id;
    if spec.idx is null then
        return;
    end if;
    if k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed') then
        return query select 'ended', jsonb_build_object('state', k.state, 'at', k.finished_at, 'reason', k.reason);
        return;
    end if;
    if k.state = 'queued' then
        return query select 'queued', why_queued(k);
        return;
    end if;
    if k.state = 'running' then
        return query select 'running', jsonb_build_object('since', k.started_at, 'asked', k.request, 'runner', (
            select r.runner_id from runner r where r.session = k.session));
        return;
    end if;
    return query select 'quarantined', jsonb_build_object('verb', q.verb, 'reason', q.reason, 'retry_at', q.retry_at)
        from quarantine q where (q.kind, q.subject_id) in (('run', p_run_id), ('dag', status.dag_id::bigint))
        and (q.retry_at is null or q.retry_at > t);
    if d.paused and (status.state = 'queued' or k.state = 'pending') then
        return query select 'dag_paused', jsonb_build_object('dag', d.name);
    end if;
    if status.state = 'queued' then
        return query select 'run_queued', jsonb_build_object('limit', d.max_active_runs,
            'active', (select count(*) from run_status a where a.dag_id = d.dag_id and a.state = 'running'),
            'ahead', (select count(*) from (select 1 from run_status q where q.dag_id = d.dag_id and q.state = 'queued'
                                            and q.run_id < p_run_id limit most) x));
        return;
    end if;
    if k.state is null or k.state = 'waiting' then
        return query
        select 'upstream', jsonb_build_object('idx', g.src, 'task', s.name, 'state', coalesce(u.state, 'waiting'), 'rule', spec.rule,
                                              'ended', coalesce(k.n_success, 0) + coalesce(k.n_failed, 0)
                                                       + coalesce(k.n_upstream_failed, 0) + coalesce(k.n_skipped, 0),
                                              'total', spec.upstream_total + coalesce(k.n_more, 0))
        -- of a group with retries all tasks, because it hears of none before all have ended
        from (select e.src from edge e where e.version_id = status.version_id and e.dst = p_idx
              union select unnest(w.members) from edge e join retry_group w on w.version_id = e.version_id and w.grp = e.out_of
              where e.version_id = status.version_id and e.dst = p_idx) g
        join task_spec s on s.version_id = status.version_id and s.idx = g.src
        left join task u on u.run_id = p_run_id and u.idx = g.src
        where coalesce(u.state, 'waiting') not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
        order by array_position(array['waiting', 'pending', 'deferred', 'available', 'queued', 'running']::task_state[],
                                coalesce(u.state, 'waiting')) desc, g.src
        limit 10;
        return;
    end if;
    if k.state = 'deferred' then
        return query select 'deferred', jsonb_build_object('since', k.started_at, 'kind', w.kind, 'until', nullif(w.wake_at, 'infinity'),
                'deadline', w.deadline, 'run_id', c.run_id, 'dag', h.dag, 'state', c.state, 'event', substr(w.key, 7),
                'title', a.title, 'polls', q.polls)
        from (select 1) one
        left join deferral w on w.run_id = p_run_id and w.idx = p_idx and w.map_index = p_map_index and w.epoch = k.epoch
        left join run_status c on c.run_id = case when w.kind = 'run' then substr(w.key, 5)::bigint end
        left join task_child h on h.version_id = k.version_id and h.idx = p_idx
        left join approval a on a.run_id = p_run_id and a.idx = p_idx and a.map_index = p_map_index and a.epoch = k.epoch
        left join poll q on q.run_id = p_run_id and q.idx = p_idx and q.map_index = p_map_index;
        return;
    end if;
    if k.state = 'pending' and k.not_before is not null then
        if k.not_before > t then
            return query select 'time', jsonb_build_object('until', k.not_before, 'attempt', k.attempt, 'reason', k.reason);
        else
            return query select 'retry_line', jsonb_build_object('queue', spec.queue, 'due_at', k.not_before, 'ahead', (
                select count(*) from (select 1 from retry_line l where l.shard = any(array(select h.shard from shard h)) and l.queue = spec.queue
                                      and l.due_at < k.not_before limit most) x));
        end if;
        return;
    end if;
    if k.state = 'available' then
        return query select case when is_served(spec.queue, spec.version_id, p_idx, 0) then 'in_line' else 'no_runner' end,
            queue_facts(spec.queue, spec.version_id, p_idx) || jsonb_build_object('ahead', (
                select count(*) from (
                    select 1 from ready q join ready mine on mine.queue = q.queue and mine.run_id = p_run_id and mine.idx = p_idx
                                                         and mine.map_index = p_map_index and mine.rank in (9 - spec.priority, 9)
                    where q.queue = spec.queue and (q.rank, q.seq) < (mine.rank, mine.seq) limit most) x));
        return;
    end if;
    select w.* into wait from gate_wait w where w.run_id = p_run_id and w.idx = p_idx and w.map_index = p_map_index;
    select l.* into line from gate_line l where l.line_id = wait.line_id;
    if line.queue is not null then
        return query select 'no_runner', queue_facts(line.queue, spec.version_id, p_idx);
    end if;
    return query
    select 'gate', jsonb_build_object(
        'gate', g.kind, 'name', g.name, 'used', g.used, 'capacity', g.capacity, 'need', n.need, 'since', wait.since,
        'holders', case when n.is_held then holders_of(g.gate_id, 5) else '[]' end,
        'reserved_for', case when n.is_held and g.capacity - g.used >= n.need then (
            select jsonb_build_object('run_id', w.run_id, 'dag', y.name, 'task', s.name, 'need', l.need)
            from gate_line l join gate_wait w on w.line_id = l.line_id and w.rank = l.rank and w.seq = l.seq
            join task_spec s on s.version_id = w.version_id and s.idx = w.idx
            join run r on r.run_id = w.run_id join dag y on y.dag_id = r.dag_id
            where l.line_id = reserved_for(g.gate_id)) end,
        'ahead', a.ahead) || case when n.is_held then '{}' else check_facts(g.gate_id, n.need, coalesce(a.ahead, 0)) end
    from (select x.gate_id, x.weight::bigint, true from unnest(line.gate_ids, line.weights) as x(gate_id, weight)
          union all select x.gate_id, x.need, false from unnest(line.checks, line.needs) as x(gate_id, need)) as n(gate_id, need, is_held)
    join gate g on g.gate_id = n.gate_id
    cross join lateral (select case when g.gate_id = line.blocked_on then (
        select count(*) from (
            select 1 from gate_line l join gate_wait w on w.line_id = l.line_id
            where l.blocked_on = g.gate_id and (w.rank, w.seq) < (wait.rank, wait.seq) limit most) x) end as ahead) a
    where g.gate_id = line.blocked_on or n.need > room_at(g.gate_id)
    order by g.gate_id = line.blocked_on desc, g.gate_id;
end $$;

CREATE FUNCTION evertick.why_queued(p_task evertick.task) RETURNS jsonb
    LANGUAGE plpgsql STABLE
    AS $$
begin
    return (
        select jsonb_build_object(
            'executor', d.executor, 'queue', d.queue, 'since', d.queued_at, 'tries', coalesce(d.tries, 0), 'tried_at', d.tried_at,
            'submitted_at', d.submitted_at, 'trouble', d.trouble, 'retry_at', d.retry_at, 'asked', p_task.request,
            'runner', (select r.runner_id from runner r where r.session = d.owner and r.gone_at is null),
            'has_runner', exists (select 1 from runner r where r.gone_at is null and r.executor = d.executor and d.queue = any(r.queues)),
            'ahead', (select count(*) from (
                select 1 from dispatch b where b.owner = d.owner and b.submitted_at is null and b.started_at is null
                  and b.queued_at < d.queued_at limit 10000) x))
        from (select) one left join dispatch d on d.run_id = p_task.run_id and d.idx = p_task.idx and d.map_index = p_task.map_index
             and d.epoch = p_task.epoch);
end $$;

CREATE FUNCTION evertick.work_gates(p_entering evertick.ended[], p_noted evertick.ended[], p_released evertick.gate_weight[], p_also integer[]) RETURNS integer
    LANGUAGE plpgsql
    AS $$
declare
    wants gate_want[] := '{}';
    arrivals gate_arrival[] := '{}';
    fresh gate_arrival[] := '{}';
    counting gate_want[] := '{}';
    asked int[];
    has_checks boolean;
    held int[];
    at_first int;
    g int;
    looks int := 500;
    line record;
    fits int;
    offered int := 0;
    opened record;
begin
    if p_noted <> '{}' then
        counting := wants_of(p_noted) || array(
            select row(p.run_id, p.idx, -1, p.version_id, 0, 'past', past_name(p.run_id, p.idx), 1, 0, 1, null)::gate_want
            from unnest(p_noted) p where p.state <> 'pending');
        counting := array(select w from unnest(counting) w where (w).kind in ('order', 'past'));
    end if;
    if cardinality(p_entering) > 0 or counting <> '{}' then
        wants := wants_of(p_entering);
        -- In one order, and before any lock of a gate that others can see.
        insert into gate (kind, name, capacity, version_id, period)
        select distinct on (w.kind, w.name) w.kind, w.name, w.capacity, w.version_id, w.period from unnest(wants || counting) w
        where w.name is not null and (select true from gate x where x.kind = w.kind and x.name = w.name) is null
        order by w.kind, w.name, w.version_id desc
        on conflict (kind, name) do nothing;
        arrivals := arrivals_of(wants);
        if counting <> '{}' then
            p_also := p_also || array(
                select x.gate_id from unnest(counting) w cross join lateral (
                    select y.gate_id from gate y where y.kind = w.kind and y.name = w.name offset 0) x);
        end if;
    end if;
    select array_agg(distinct n.gate_id order by n.gate_id), coalesce(bool_or(n.is_check), false) into asked, has_checks
    from (select unnest(p_also), true union all select r.gate_id, false from unnest(p_released) r
          union all select unnest(a.gate_ids), false from unnest(arrivals) a
          union all select unnest(a.checks), true from unnest(arrivals) a) as n(gate_id, is_check);
    held := array(select x.gate_id from gate x where x.gate_id = any(asked) order by x.gate_id for no key update);
    if cardinality(held) < cardinality(asked) then
        raise exception 'a gate that nobody needed was just deleted' using errcode = 'serialization_failure';
    end if;
    at_first := cardinality(held);
    update gate x set used = greatest(x.used - r.weight, 0)
    from (select p.gate_id, sum(p.weight)::int as weight from unnest(p_released) p group by p.gate_id) r
    where x.gate_id = r.gate_id and r.weight > 0;
    update gate x set capacity = w.capacity, version_id = w.version_id, period = w.period
    from (select distinct on (y.kind, y.name) y.kind, y.name, y.capacity, y.version_id, y.period from unnest(wants) y
          where y.kind not in ('pool', 'mutex') order by y.kind, y.name, y.version_id desc) w
    where x.kind = w.kind and x.name = w.name and x.version_id < w.version_id;
    if has_checks then
        perform return_slots(held);
        perform take_places(arrivals);
        if counting <> '{}' then
            perform take_places(arrivals_of(counting));
        end if;
    end if;
    if cardinality(p_also) = 0 and not exists (select 1 from gate_line l where l.blocked_on = any(held)) then
        fresh := arrivals;
    else
        for line in
            select a.gate_ids, a.weights, a.checks, a.needs, array_agg(a order by a.rank, a.run_id, a.idx, a.map_index) as tasks
            from unnest(arrivals) a group by a.gate_ids, a.weights, a.checks, a.needs
        loop
            -- Nobody goes past those who wait already.
            if exists (select 1 from gate_line l where l.blocked_on = any(line.gate_ids || line.checks)) then
                perform join_line(line.gate_ids, line.weights, line.checks, line.needs, line.tasks);
            else
                fresh := fresh || line.tasks;
            end if;
        end loop;
        foreach g in array array(
            select x.gate_id from gate x
            where x.gate_id = any(held)
              and (x.is_behind or (select true from gate_line l where l.blocked_on = x.gate_id limit 1)) order by x.gate_id)
        loop
            select o.held, o.looks, o.admitted into opened from open_gate(g, held, looks) o;
            held := opened.held;
            looks := opened.looks;
            offered := offered + opened.admitted;
        end loop;
    end if;
    if cardinality(fresh) > 0 then
        select f.fitting, f.others into opened from who_fits(fresh) f;
        if opened.fitting is not null then
            offered := offered + let_in(opened.fitting);
        end if;
        for line in
            select a.gate_ids, a.weights, a.checks, a.needs, array_agg(a order by a.rank, a.run_id, a.idx, a.map_index) as tasks
            from unnest(opened.others) a group by a.gate_ids, a.weights, a.checks, a.needs
            order by min(a.rank), min(a.run_id), min(a.idx)
        loop
            fits := coalesce(fits_in(line.gate_ids, line.weights, line.checks, line.needs), cardinality(line.tasks));
            if fits > 0 then
                offered := offered + let_in(line.tasks[1:fits]);
            end if;
            if fits < cardinality(line.tasks) then
                perform join_line(line.gate_ids, line.weights, line.checks, line.needs, line.tasks[fits + 1:]);
            end if;
        end loop;
    end if;
    if has_checks or cardinality(held) > at_first then
        perform set_openings(held);
    end if;
    return offered;
end $$;

CREATE TABLE evertick.account (
    account_id integer NOT NULL,
    name text NOT NULL,
    role text NOT NULL,
    tags text[],
    password_hash text,
    is_disabled boolean DEFAULT false NOT NULL,
    created_by text NOT NULL,
    created_at timestamp with time zone NOT NULL,
    password_changed_at timestamp with time zone,
    CONSTRAINT account_role_check CHECK ((role = ANY (ARRAY['viewer'::text, 'operator'::text, 'editor'::text, 'admin'::text]))),
    CONSTRAINT account_tags_check CHECK ((cardinality(tags) > 0))
);

ALTER TABLE evertick.account ALTER COLUMN account_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.account_account_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

ALTER TABLE evertick.alert ALTER COLUMN alert_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.alert_alert_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.approval (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    epoch integer NOT NULL,
    title text NOT NULL,
    asked_at timestamp with time zone NOT NULL,
    decided_at timestamp with time zone,
    decided_by text,
    is_approved boolean,
    note text,
    fields jsonb,
    CONSTRAINT approval_check CHECK ((((decided_at IS NULL) = (decided_by IS NULL)) AND ((decided_at IS NULL) = (is_approved IS NULL))))
);

CREATE TABLE evertick.arrival (
    arrival_id bigint NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    run_id bigint,
    occurred_at timestamp with time zone NOT NULL,
    update_id bigint,
    CONSTRAINT arrival_check CHECK ((num_nonnulls(run_id, update_id) = 1))
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

ALTER TABLE evertick.arrival ALTER COLUMN arrival_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.arrival_arrival_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.asset_update (
    update_id bigint NOT NULL,
    asset text NOT NULL,
    extra jsonb NOT NULL,
    updated_by text NOT NULL,
    occurred_at timestamp with time zone NOT NULL
);

ALTER TABLE evertick.asset_update ALTER COLUMN update_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.asset_update_update_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.attempt (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    epoch integer NOT NULL,
    attempt smallint NOT NULL,
    session bigint,
    outcome text NOT NULL,
    reason text,
    exit_code integer,
    let_in_at timestamp with time zone,
    taken_at timestamp with time zone,
    started_at timestamp with time zone,
    start_seconds real,
    finished_at timestamp with time zone NOT NULL,
    retry_at timestamp with time zone
)
WITH (autovacuum_vacuum_insert_scale_factor='0.05', autovacuum_freeze_min_age='0', vacuum_truncate=off);

CREATE VIEW evertick.attempts AS
 SELECT k.run_id,
    k.idx,
    k.map_index,
    k.epoch,
    k.attempt,
    k.session,
    (k.state)::text AS outcome,
    k.reason,
    k.exit_code,
    k.started_at,
    k.finished_at,
    k.let_in_at,
    k.taken_at,
        CASE
            WHEN (k.finished_at IS NOT NULL) THEN k.start_seconds
            ELSE NULL::real
        END AS start_seconds,
    NULL::timestamp with time zone AS retry_at
   FROM evertick.task k
  WHERE (((k.started_at IS NOT NULL) OR ((k.session IS NOT NULL) AND (k.finished_at IS NOT NULL))) AND (NOT (EXISTS ( SELECT 1
           FROM evertick.attempt a
          WHERE ((a.run_id = k.run_id) AND (a.idx = k.idx) AND (a.map_index = k.map_index) AND (a.epoch = k.epoch))))))
UNION ALL
 SELECT a.run_id,
    a.idx,
    a.map_index,
    a.epoch,
    a.attempt,
    a.session,
    a.outcome,
    a.reason,
    a.exit_code,
    a.started_at,
    a.finished_at,
    a.let_in_at,
    a.taken_at,
    a.start_seconds,
    a.retry_at
   FROM evertick.attempt a;

CREATE TABLE evertick.awaited (
    kind text NOT NULL,
    name text NOT NULL,
    schedule_id integer NOT NULL,
    CONSTRAINT awaited_kind_check CHECK ((kind = ANY (ARRAY['dag'::text, 'end'::text, 'asset'::text])))
);

ALTER TABLE evertick.backfill ALTER COLUMN backfill_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.backfill_backfill_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.backfill_run (
    run_id bigint NOT NULL,
    backfill_id integer NOT NULL,
    dag_id integer NOT NULL,
    schedule_id integer NOT NULL,
    fire_at timestamp with time zone NOT NULL,
    is_open boolean DEFAULT true NOT NULL
);

CREATE VIEW evertick.blocked AS
SELECT
    NULL::text AS kind,
    NULL::text AS name,
    NULL::bigint AS waiting,
    NULL::timestamp with time zone AS since,
    NULL::jsonb AS detail;

CREATE TABLE evertick.bundle (
    hash text NOT NULL,
    file text NOT NULL,
    archive bytea NOT NULL,
    uses_threads text,
    created_at timestamp with time zone NOT NULL
);

CREATE TABLE evertick.cause (
    schedule_id integer NOT NULL,
    fire_at timestamp with time zone NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    run_id bigint,
    occurred_at timestamp with time zone NOT NULL,
    update_id bigint,
    CONSTRAINT cause_check CHECK ((num_nonnulls(run_id, update_id) = 1))
);

CREATE TABLE evertick.child_run (
    run_id bigint NOT NULL,
    parent_run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    depth integer NOT NULL,
    CONSTRAINT child_run_depth_check CHECK ((depth > 0))
);

CREATE TABLE evertick.cluster (
    system_id bigint NOT NULL,
    timeline bigint NOT NULL,
    first_seen_at timestamp with time zone NOT NULL,
    marked_at timestamp with time zone NOT NULL,
    lsn pg_lsn NOT NULL,
    is_synchronous boolean NOT NULL,
    lost_until pg_lsn
)
WITH (fillfactor='50');

CREATE TABLE evertick.credential (
    credential_id bigint NOT NULL,
    secret_hash bytea NOT NULL,
    account_id integer NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    role text,
    tags text[],
    created_by text NOT NULL,
    created_at timestamp with time zone NOT NULL,
    expires_at timestamp with time zone,
    used_at timestamp with time zone,
    used_from text,
    revoked_at timestamp with time zone,
    CONSTRAINT credential_check CHECK (((expires_at IS NOT NULL) OR (kind = 'token'::text))),
    CONSTRAINT credential_kind_check CHECK ((kind = ANY (ARRAY['token'::text, 'session'::text, 'link'::text]))),
    CONSTRAINT credential_role_check CHECK ((role = ANY (ARRAY['viewer'::text, 'operator'::text, 'editor'::text, 'admin'::text])))
);

ALTER TABLE evertick.credential ALTER COLUMN credential_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.credential_credential_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

ALTER TABLE evertick.dag ALTER COLUMN dag_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.dag_dag_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.dag_version (
    version_id integer NOT NULL,
    dag_id integer NOT NULL,
    number integer NOT NULL,
    hash text NOT NULL,
    bundle_hash text NOT NULL,
    spec jsonb NOT NULL,
    task_count integer NOT NULL,
    run_timeout double precision,
    run_retries integer DEFAULT 0 NOT NULL,
    created_at timestamp with time zone NOT NULL,
    retired_at timestamp with time zone,
    final_run_id bigint,
    CONSTRAINT dag_version_run_retries_check CHECK ((run_retries >= 0)),
    CONSTRAINT dag_version_run_timeout_check CHECK ((run_timeout > (0)::double precision))
);

ALTER TABLE evertick.dag_version ALTER COLUMN version_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.dag_version_version_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.deadline (
    shard smallint NOT NULL,
    due_at timestamp with time zone NOT NULL,
    run_id bigint NOT NULL,
    kind text NOT NULL,
    idx integer DEFAULT '-1'::integer NOT NULL,
    CONSTRAINT deadline_kind_check CHECK ((kind = ANY (ARRAY['start'::text, 'finish'::text, 'task'::text])))
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

CREATE TABLE evertick.default_notice (
    event text NOT NULL,
    sink text NOT NULL,
    every_time boolean NOT NULL,
    CONSTRAINT default_notice_event_check CHECK ((event = ANY (ARRAY['failure'::text, 'deadline'::text])))
);

CREATE TABLE evertick.dispatch (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    epoch integer NOT NULL,
    session bigint NOT NULL,
    executor text NOT NULL,
    owner bigint NOT NULL,
    queue text NOT NULL,
    queued_at timestamp with time zone NOT NULL,
    tries integer DEFAULT 0 NOT NULL,
    tried_at timestamp with time zone,
    submitted_at timestamp with time zone,
    started_at timestamp with time zone,
    nonce text,
    trouble text,
    retry_at timestamp with time zone
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

CREATE TABLE evertick.edge (
    version_id integer NOT NULL,
    src integer NOT NULL,
    dst integer NOT NULL,
    out_of integer
);

CREATE TABLE evertick.episode (
    schedule_id integer NOT NULL,
    task text NOT NULL,
    run_id bigint NOT NULL,
    since timestamp with time zone NOT NULL,
    failures integer NOT NULL
);

CREATE TABLE evertick.event (
    event_id bigint NOT NULL,
    name text NOT NULL,
    key text,
    payload jsonb NOT NULL,
    sent_at timestamp with time zone NOT NULL,
    sent_by text NOT NULL,
    is_heard boolean DEFAULT false NOT NULL
)
WITH (fillfactor='90', autovacuum_vacuum_scale_factor='0.05', vacuum_truncate=off);

ALTER TABLE evertick.event ALTER COLUMN event_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.event_event_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.gate (
    gate_id integer NOT NULL,
    kind evertick.gate_kind NOT NULL,
    name text NOT NULL,
    capacity integer NOT NULL,
    used integer DEFAULT 0 NOT NULL,
    is_behind boolean DEFAULT false NOT NULL,
    version_id integer,
    period double precision,
    opens_at timestamp with time zone,
    CONSTRAINT gate_capacity_check CHECK ((capacity >= 0))
)
WITH (fillfactor='30', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

ALTER TABLE evertick.gate ALTER COLUMN gate_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.gate_gate_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.gate_hold (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    gate_ids integer[] NOT NULL,
    weights integer[] NOT NULL,
    since timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', autovacuum_vacuum_cost_delay='0', vacuum_truncate=off);

CREATE TABLE evertick.gate_line (
    line_id bigint NOT NULL,
    gate_ids integer[] NOT NULL,
    weights integer[] NOT NULL,
    checks integer[] DEFAULT '{}'::integer[] NOT NULL,
    needs bigint[] DEFAULT '{}'::bigint[] NOT NULL,
    queue text,
    blocked_on integer,
    need bigint,
    rank smallint NOT NULL,
    seq bigint NOT NULL,
    since timestamp with time zone NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

ALTER TABLE evertick.gate_line ALTER COLUMN line_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.gate_line_line_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.gate_order (
    gate_id integer NOT NULL,
    version bigint NOT NULL,
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    since timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

CREATE TABLE evertick.gate_pass (
    gate_id integer NOT NULL,
    until timestamp with time zone NOT NULL,
    seq bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

ALTER TABLE evertick.gate_pass ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.gate_pass_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.gate_wait (
    line_id bigint NOT NULL,
    rank smallint NOT NULL,
    seq bigint NOT NULL,
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    version_id integer NOT NULL,
    since timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', autovacuum_vacuum_cost_delay='0', vacuum_truncate=off);

ALTER TABLE evertick.gate_wait ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.gate_wait_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.heard (
    schedule_id integer NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    run_id bigint,
    occurred_at timestamp with time zone NOT NULL,
    update_id bigint,
    CONSTRAINT heard_check CHECK ((num_nonnulls(run_id, update_id) = 1))
);

CREATE TABLE evertick.import_error (
    file text NOT NULL,
    line integer,
    message text NOT NULL,
    detail text DEFAULT ''::text NOT NULL,
    occurred_at timestamp with time zone NOT NULL
);

CREATE TABLE evertick.journal (
    entry_id bigint NOT NULL,
    occurred_at timestamp with time zone NOT NULL,
    verb text NOT NULL,
    actor text NOT NULL,
    dag_id integer,
    run_id bigint,
    idx integer,
    map_index integer,
    detail jsonb NOT NULL,
    origin text DEFAULT NULLIF(current_setting('evertick.origin'::text, true), ''::text),
    request_id text DEFAULT NULLIF(current_setting('evertick.request_id'::text, true), ''::text)
);

ALTER TABLE evertick.journal ALTER COLUMN entry_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.journal_entry_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.lease (
    session bigint NOT NULL,
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    epoch integer NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', autovacuum_vacuum_cost_delay='0', autovacuum_analyze_scale_factor='0', autovacuum_analyze_threshold='50000', vacuum_truncate=off);

CREATE TABLE evertick.schedule (
    schedule_id integer NOT NULL,
    dag_id integer NOT NULL,
    name text NOT NULL,
    version integer NOT NULL,
    spec jsonb NOT NULL,
    params jsonb NOT NULL,
    misfire text NOT NULL,
    window_seconds double precision NOT NULL,
    catchup_limit integer,
    overlap text DEFAULT 'allow'::text NOT NULL,
    start_within double precision,
    finish_within double precision,
    delay_seconds double precision DEFAULT 0 NOT NULL,
    origin text DEFAULT 'code'::text NOT NULL,
    request text,
    changed_by text NOT NULL,
    changed_at timestamp with time zone NOT NULL,
    deleted_at timestamp with time zone,
    CONSTRAINT schedule_catchup_limit_check CHECK ((catchup_limit > 0)),
    CONSTRAINT schedule_finish_within_check CHECK ((finish_within > (0)::double precision)),
    CONSTRAINT schedule_origin_check CHECK ((origin = ANY (ARRAY['code'::text, 'user'::text]))),
    CONSTRAINT schedule_overlap_check CHECK ((overlap = ANY (ARRAY['allow'::text, 'skip'::text, 'queue_one'::text, 'queue_all'::text, 'cancel'::text]))),
    CONSTRAINT schedule_start_within_check CHECK ((start_within > (0)::double precision)),
    CONSTRAINT schedule_version_check CHECK ((version > 0))
);

CREATE TABLE evertick.task_spec (
    version_id integer NOT NULL,
    idx integer NOT NULL,
    name text NOT NULL,
    queue text NOT NULL,
    priority smallint NOT NULL,
    rule evertick.trigger_rule NOT NULL,
    upstream_total integer NOT NULL,
    setup_total integer NOT NULL,
    is_setup boolean NOT NULL,
    is_leaf boolean NOT NULL,
    starts_at_once boolean NOT NULL,
    max_attempts integer NOT NULL,
    rerun_on_loss boolean NOT NULL,
    queue_timeout double precision,
    outlets text[],
    is_gated boolean DEFAULT false NOT NULL,
    is_ordered boolean DEFAULT false NOT NULL,
    awaits_past boolean DEFAULT false NOT NULL,
    defers boolean DEFAULT false NOT NULL,
    is_mapped boolean DEFAULT false NOT NULL,
    notifies boolean DEFAULT false NOT NULL,
    grp integer,
    decides_grp boolean DEFAULT false NOT NULL,
    CONSTRAINT task_spec_max_attempts_check CHECK ((max_attempts > 0)),
    CONSTRAINT task_spec_priority_check CHECK (((priority >= 0) AND (priority <= 9))),
    CONSTRAINT task_spec_queue_timeout_check CHECK ((queue_timeout > (0)::double precision))
);

CREATE VIEW evertick.listed_asset AS
 SELECT name,
    min(since) AS since
   FROM ( SELECT o.name,
            v.created_at AS since
           FROM (((evertick.dag d
             JOIN evertick.dag_version v ON ((v.version_id = d.version_id)))
             JOIN evertick.task_spec s ON ((s.version_id = d.version_id)))
             CROSS JOIN LATERAL unnest(s.outlets) o(name))
          WHERE ((d.deleted_at IS NULL) AND (s.outlets IS NOT NULL))
        UNION ALL
         SELECT w.name,
            c.changed_at
           FROM (evertick.awaited w
             JOIN evertick.schedule c ON ((c.schedule_id = w.schedule_id)))
          WHERE (w.kind = 'asset'::text)) a
  GROUP BY name;

CREATE TABLE evertick.run (
    run_id bigint NOT NULL,
    dag_id integer NOT NULL,
    version_id integer NOT NULL,
    kind evertick.run_kind NOT NULL,
    key text,
    schedule_id integer,
    fire_at timestamp with time zone,
    params jsonb NOT NULL,
    triggered_by text NOT NULL,
    created_at timestamp with time zone NOT NULL
)
WITH (autovacuum_vacuum_insert_scale_factor='0.05', autovacuum_freeze_min_age='0', vacuum_truncate=off);

CREATE VIEW evertick.listed_dag AS
 SELECT d.dag_id,
    d.name AS dag,
    d.paused,
    d.file,
    v.spec,
    ARRAY( SELECT jsonb_array_elements_text(COALESCE((v.spec -> 'tags'::text), '[]'::jsonb)) AS jsonb_array_elements_text) AS tags,
    (EXISTS ( SELECT 1
           FROM evertick.import_error e
          WHERE (e.file = d.file))) AS is_broken,
        CASE
            WHEN (NOT d.paused) THEN ( SELECT min(t.next_due) AS min
               FROM (evertick.schedule c
                 JOIN evertick.schedule_state t ON ((t.schedule_id = c.schedule_id)))
              WHERE ((c.dag_id = d.dag_id) AND (c.deleted_at IS NULL) AND (NOT t.paused)))
            ELSE NULL::timestamp with time zone
        END AS next_due,
    ARRAY( SELECT w.name
           FROM (evertick.schedule c
             JOIN evertick.awaited w ON (((w.schedule_id = c.schedule_id) AND (w.kind = 'asset'::text))))
          WHERE ((c.dag_id = d.dag_id) AND (c.deleted_at IS NULL))) AS assets,
    last.state AS last_state,
    last.started_at AS last_started_at,
    last.finished_at AS last_finished_at
   FROM ((evertick.dag d
     JOIN evertick.dag_version v ON ((v.version_id = d.version_id)))
     LEFT JOIN LATERAL ( SELECT (s.state)::text AS state,
            s.started_at,
            s.finished_at
           FROM (( SELECT x.run_id
                   FROM evertick.run x
                  WHERE (x.dag_id = d.dag_id)
                  ORDER BY x.run_id DESC
                 LIMIT 1) n
             JOIN evertick.run_status s ON ((s.run_id = n.run_id)))) last ON (true))
  WHERE (d.deleted_at IS NULL);

CREATE VIEW evertick.listed_event AS
 SELECT j.entry_id,
    j.occurred_at,
    j.verb,
    j.actor,
    d.name AS dag,
        CASE
            WHEN (r.run_id IS NOT NULL) THEN evertick.run_text(r.key, r.kind, COALESCE(r.fire_at, r.created_at), r.run_id)
            ELSE NULL::text
        END AS text_id,
    r.fire_at,
    s.name AS task,
    j.map_index,
    j.detail,
    j.run_id,
    COALESCE(j.dag_id, ( SELECT x.dag_id
           FROM evertick.run x
          WHERE (x.run_id = j.run_id))) AS dag_id
   FROM ((((evertick.journal j
     LEFT JOIN evertick.run r ON ((r.run_id = j.run_id)))
     LEFT JOIN evertick.run_status b ON ((b.run_id = j.run_id)))
     LEFT JOIN evertick.dag d ON ((d.dag_id = COALESCE(j.dag_id, r.dag_id))))
     LEFT JOIN evertick.task_spec s ON (((s.version_id = b.version_id) AND (s.idx = j.idx))));

CREATE TABLE evertick.note (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    content text NOT NULL,
    written_by text NOT NULL,
    written_at timestamp with time zone NOT NULL
);

CREATE TABLE evertick.runner (
    session bigint NOT NULL,
    runner_id text NOT NULL,
    name text,
    version text NOT NULL,
    host text NOT NULL,
    boot_id text NOT NULL,
    pid_namespace text NOT NULL,
    uid integer NOT NULL,
    pid integer NOT NULL,
    pid_started double precision NOT NULL,
    queues text[] NOT NULL,
    slots integer NOT NULL,
    executor text DEFAULT 'local'::text NOT NULL,
    request text,
    beat bigint DEFAULT 0 NOT NULL,
    beat_at timestamp with time zone NOT NULL,
    watched_beat bigint DEFAULT 0 NOT NULL,
    silent_seconds double precision DEFAULT 0 NOT NULL,
    lost_after_seconds double precision NOT NULL,
    started_at timestamp with time zone NOT NULL,
    gone_at timestamp with time zone,
    gone_reason text,
    match text[] DEFAULT '{}'::text[] NOT NULL,
    CONSTRAINT runner_request_check CHECK ((request = ANY (ARRAY['drain'::text, 'leave'::text])))
)
WITH (fillfactor='30');

CREATE TABLE evertick.task_gate (
    version_id integer NOT NULL,
    idx integer NOT NULL,
    place integer NOT NULL,
    kind evertick.gate_kind NOT NULL,
    name text,
    parts jsonb,
    weight integer NOT NULL,
    capacity integer,
    version jsonb,
    period double precision,
    CONSTRAINT task_gate_capacity_check CHECK ((capacity > 0)),
    CONSTRAINT task_gate_check CHECK (((name IS NULL) <> (parts IS NULL))),
    CONSTRAINT task_gate_check1 CHECK (((kind = 'order'::evertick.gate_kind) = (version IS NOT NULL))),
    CONSTRAINT task_gate_check2 CHECK (((kind = 'rate'::evertick.gate_kind) = (period IS NOT NULL))),
    CONSTRAINT task_gate_period_check CHECK ((period > (0)::double precision)),
    CONSTRAINT task_gate_weight_check CHECK ((weight > 0))
);

CREATE VIEW evertick.listed_task AS
 SELECT r.run_id,
    r.dag_id,
    d.name AS dag,
    b.version_id,
    v.number AS version,
    v.created_at AS version_created_at,
    evertick.run_text(r.key, r.kind, COALESCE(r.fire_at, r.created_at), r.run_id) AS text_id,
    r.fire_at,
        CASE
            WHEN (r.kind = 'manual'::evertick.run_kind) THEN r.created_at
            ELSE COALESCE(r.fire_at, r.created_at)
        END AS due_at,
    s.idx,
    COALESCE(k.map_index, '-1'::integer) AS map_index,
    s.name AS task,
    s.queue,
    s.priority,
    s.max_attempts,
        CASE
            WHEN (k.state IS NULL) THEN 'waiting'::text
            WHEN ((k.state = 'pending'::evertick.task_state) AND (k.not_before IS NOT NULL)) THEN 'retrying'::text
            WHEN ((k.state = 'deferred'::evertick.task_state) AND (NOT s.defers)) THEN 'polling'::text
            ELSE (k.state)::text
        END AS phase,
    COALESCE((k.attempt)::integer, 0) AS attempt,
    k.started_at,
    k.finished_at,
    ((( SELECT count(*) AS count
           FROM evertick.attempt a
          WHERE ((a.run_id = k.run_id) AND (a.idx = k.idx) AND (a.map_index = k.map_index) AND (a.epoch <> k.epoch))))::integer + (((k.started_at IS NOT NULL) OR (EXISTS ( SELECT 1
           FROM evertick.attempt a
          WHERE ((a.run_id = k.run_id) AND (a.idx = k.idx) AND (a.map_index = k.map_index) AND (a.epoch = k.epoch))))))::integer) AS tries,
    COALESCE(k.finished_at, k.started_at, r.created_at) AS changed_at,
    (EXTRACT(epoch FROM (k.finished_at - k.started_at)))::double precision AS seconds,
    k.reason,
    h.host,
    n.content AS note,
    ( SELECT g.name
           FROM evertick.task_gate g
          WHERE ((g.version_id = s.version_id) AND (g.idx = s.idx) AND (g.kind = 'pool'::evertick.gate_kind) AND s.is_gated)
          ORDER BY g.place
         LIMIT 1) AS pool,
    ( SELECT g.weight
           FROM evertick.task_gate g
          WHERE ((g.version_id = s.version_id) AND (g.idx = s.idx) AND (g.kind = 'pool'::evertick.gate_kind) AND s.is_gated)
          ORDER BY g.place
         LIMIT 1) AS slots,
    COALESCE((((v.spec -> 'tasks'::text) -> s.idx) ->> 'kind'::text), 'python'::text) AS kind,
    b.state AS run_status,
    k.state AS task_status,
    k.map_index AS row_map_index
   FROM (((((((evertick.run r
     JOIN evertick.run_status b ON ((b.run_id = r.run_id)))
     JOIN evertick.dag d ON ((d.dag_id = r.dag_id)))
     JOIN evertick.dag_version v ON ((v.version_id = b.version_id)))
     JOIN evertick.task_spec s ON ((s.version_id = b.version_id)))
     LEFT JOIN evertick.task k ON (((k.run_id = r.run_id) AND (k.idx = s.idx))))
     LEFT JOIN evertick.runner h ON ((h.session = k.session)))
     LEFT JOIN evertick.note n ON (((n.run_id = r.run_id) AND (n.idx = s.idx) AND (n.map_index = COALESCE(k.map_index, '-1'::integer)))));

CREATE TABLE evertick.result (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    epoch integer NOT NULL,
    value jsonb NOT NULL
)
WITH (autovacuum_vacuum_insert_scale_factor='0.05', autovacuum_freeze_min_age='0', vacuum_truncate=off, toast.autovacuum_vacuum_insert_scale_factor='0.05', toast.autovacuum_freeze_min_age='0');

CREATE VIEW evertick.listed_output AS
 SELECT t.run_id,
    t.dag_id,
    t.dag,
    t.version_id,
    t.version,
    t.version_created_at,
    t.text_id,
    t.fire_at,
    t.due_at,
    t.idx,
    t.map_index,
    t.task,
    t.queue,
    t.priority,
    t.max_attempts,
    t.phase,
    t.attempt,
    t.started_at,
    t.finished_at,
    t.tries,
    t.changed_at,
    t.seconds,
    t.reason,
    t.host,
    t.note,
    t.pool,
    t.slots,
    t.kind,
    t.run_status,
    t.task_status,
    t.row_map_index,
    e.key
   FROM ((evertick.result v
     JOIN evertick.listed_task t ON (((t.run_id = v.run_id) AND (t.idx = v.idx) AND (t.map_index = v.map_index))))
     CROSS JOIN LATERAL ( SELECT NULL::text AS key
          WHERE (((v.value ->> '$evertick'::text) IS DISTINCT FROM 'outputs'::text) OR ((v.value -> 'value'::text) <> 'null'::jsonb))
        UNION ALL
         SELECT n.key
           FROM jsonb_object_keys(
                CASE
                    WHEN ((v.value ->> '$evertick'::text) = 'outputs'::text) THEN (v.value -> 'named'::text)
                    ELSE '{}'::jsonb
                END) n(key)) e);

CREATE VIEW evertick.listed_run AS
 SELECT r.run_id,
    r.dag_id,
    d.name AS dag,
    s.version_id,
    v.number AS version,
    v.created_at AS version_created_at,
    evertick.run_text(r.key, r.kind, COALESCE(r.fire_at, r.created_at), r.run_id) AS text_id,
        CASE
            WHEN ((r.kind = 'manual'::evertick.run_kind) AND (r.triggered_by ^@ 'run '::text)) THEN 'operator_triggered'::text
            WHEN ((r.kind = 'scheduled'::evertick.run_kind) AND (EXISTS ( SELECT 1
               FROM evertick.cause c
              WHERE ((c.schedule_id = r.schedule_id) AND (c.fire_at = r.fire_at) AND (c.kind = 'asset'::text))))) THEN 'asset_triggered'::text
            ELSE (r.kind)::text
        END AS run_type,
    r.schedule_id,
    r.fire_at,
        CASE
            WHEN (r.kind = 'manual'::evertick.run_kind) THEN r.created_at
            ELSE COALESCE(r.fire_at, r.created_at)
        END AS due_at,
    r.created_at,
    s.started_at,
    s.finished_at,
    COALESCE(s.finished_at, s.started_at, r.created_at) AS changed_at,
    (EXTRACT(epoch FROM (s.finished_at - s.started_at)))::double precision AS seconds,
    (s.state)::text AS state,
    s.reason,
    r.params,
    r.triggered_by,
    n.content AS note,
    s.state AS status,
    s.dag_id AS status_dag_id,
    r.kind AS fact_kind
   FROM ((((evertick.run r
     LEFT JOIN evertick.run_status s ON ((s.run_id = r.run_id)))
     LEFT JOIN evertick.dag d ON ((d.dag_id = r.dag_id)))
     LEFT JOIN evertick.dag_version v ON ((v.version_id = s.version_id)))
     LEFT JOIN evertick.note n ON (((n.run_id = r.run_id) AND (n.idx = '-1'::integer) AND (n.map_index = '-1'::integer))));

CREATE VIEW evertick.listed_update AS
 SELECT o.name AS asset,
    NULL::bigint AS update_id,
    t.run_id,
    t.dag_id,
    t.dag,
    t.text_id,
    t.idx,
    t.task,
    t.map_index,
    t.finished_at AS occurred_at,
    NULL::jsonb AS extra
   FROM ((evertick.listed_task t
     JOIN evertick.task_spec s ON (((s.version_id = t.version_id) AND (s.idx = t.idx))))
     CROSS JOIN LATERAL unnest(s.outlets) o(name))
  WHERE ((s.outlets IS NOT NULL) AND (t.phase = 'success'::text))
UNION ALL
 SELECT u.asset,
    u.update_id,
    NULL::bigint AS run_id,
    NULL::integer AS dag_id,
    NULL::text AS dag,
    NULL::text AS text_id,
    NULL::integer AS idx,
    NULL::text AS task,
    '-1'::integer AS map_index,
    u.occurred_at,
    u.extra
   FROM evertick.asset_update u;

CREATE TABLE evertick.log_chunk (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    epoch integer NOT NULL,
    seq bigint NOT NULL,
    until bigint NOT NULL,
    is_late boolean DEFAULT false NOT NULL,
    content text,
    object_id uuid,
    at integer,
    bytes integer,
    digest bytea,
    CONSTRAINT log_chunk_check CHECK (((content IS NULL) = ((object_id IS NOT NULL) AND (at IS NOT NULL) AND (bytes IS NOT NULL) AND (digest IS NOT NULL))))
)
WITH (autovacuum_vacuum_insert_scale_factor='0.05', autovacuum_freeze_min_age='0', vacuum_truncate=off, toast.autovacuum_vacuum_insert_scale_factor='0.05', toast.autovacuum_freeze_min_age='0');

CREATE TABLE evertick.log_object (
    object_id uuid DEFAULT gen_random_uuid() NOT NULL,
    run_id bigint NOT NULL,
    bytes integer NOT NULL,
    look_at timestamp with time zone
);

CREATE TABLE evertick.log_walk (
    is_only boolean DEFAULT true NOT NULL,
    after bigint NOT NULL,
    CONSTRAINT log_walk_is_only_check CHECK (is_only)
);

CREATE TABLE evertick.log_watch (
    run_id bigint NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

CREATE TABLE evertick.login_try (
    subject text NOT NULL,
    failures integer NOT NULL,
    tried_at timestamp with time zone NOT NULL
);

CREATE TABLE evertick.map_item (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    item jsonb NOT NULL
)
WITH (autovacuum_vacuum_insert_scale_factor='0.05', autovacuum_freeze_min_age='0', vacuum_truncate=off, toast.autovacuum_vacuum_insert_scale_factor='0.05', toast.autovacuum_freeze_min_age='0');

CREATE TABLE evertick.migration (
    number integer NOT NULL,
    name text NOT NULL,
    applied_at timestamp with time zone DEFAULT clock_timestamp() NOT NULL,
    checksum text NOT NULL,
    oldest_program integer NOT NULL
);

CREATE TABLE evertick.moved_run (
    run_id bigint NOT NULL,
    version_id integer NOT NULL
);

CREATE TABLE evertick.notice (
    version_id integer NOT NULL,
    idx integer NOT NULL,
    event text NOT NULL,
    sink text NOT NULL,
    every_time boolean NOT NULL,
    CONSTRAINT notice_event_check CHECK ((event = ANY (ARRAY['success'::text, 'failure'::text, 'retry'::text, 'skipped'::text, 'deadline'::text])))
);

CREATE TABLE evertick.orphan_watch (
    run_id bigint NOT NULL,
    fingerprint text NOT NULL,
    watched_seconds double precision NOT NULL
);

CREATE TABLE evertick.outbox (
    delivery_id bigint NOT NULL,
    shard smallint NOT NULL,
    sink text NOT NULL,
    event text NOT NULL,
    run_id bigint,
    fact jsonb NOT NULL,
    created_at timestamp with time zone NOT NULL,
    waiting_since timestamp with time zone NOT NULL,
    state text DEFAULT 'waiting'::text NOT NULL,
    attempts integer DEFAULT 0 NOT NULL,
    due_at timestamp with time zone NOT NULL,
    ended_at timestamp with time zone,
    answer text,
    CONSTRAINT outbox_check CHECK (((ended_at IS NULL) = (state = 'waiting'::text))),
    CONSTRAINT outbox_state_check CHECK ((state = ANY (ARRAY['waiting'::text, 'sent'::text, 'failed'::text])))
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

ALTER TABLE evertick.outbox ALTER COLUMN delivery_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.outbox_delivery_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.poll (
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    since timestamp with time zone NOT NULL,
    deadline timestamp with time zone,
    polls integer NOT NULL
)
WITH (fillfactor='70', autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

CREATE TABLE evertick.pool_text (
    name text NOT NULL,
    description text NOT NULL
);

CREATE TABLE evertick.quarantine (
    kind text NOT NULL,
    subject_id bigint NOT NULL,
    verb text NOT NULL,
    reason text NOT NULL,
    failures integer NOT NULL,
    since timestamp with time zone NOT NULL,
    failed_at timestamp with time zone NOT NULL,
    retry_at timestamp with time zone,
    CONSTRAINT quarantine_kind_check CHECK ((kind = ANY (ARRAY['schedule'::text, 'run'::text, 'dag'::text])))
);

ALTER TABLE evertick.ready ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.ready_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.remains (
    shard smallint NOT NULL,
    kind text NOT NULL,
    id bigint NOT NULL,
    CONSTRAINT remains_kind_check CHECK ((kind = ANY (ARRAY['run'::text, 'version'::text])))
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

CREATE TABLE evertick.retry_group (
    version_id integer NOT NULL,
    grp integer NOT NULL,
    name text NOT NULL,
    retries integer NOT NULL,
    members integer[] NOT NULL,
    CONSTRAINT retry_group_retries_check CHECK ((retries > 0))
);

CREATE TABLE evertick.retry_line (
    shard smallint NOT NULL,
    queue text NOT NULL,
    due_at timestamp with time zone NOT NULL,
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

CREATE TABLE evertick.retry_slot (
    shard smallint NOT NULL,
    queue text NOT NULL,
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL,
    epoch integer NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

CREATE TABLE evertick.run_group (
    run_id bigint NOT NULL,
    grp integer NOT NULL,
    ended integer DEFAULT 0 NOT NULL,
    more integer DEFAULT 0 NOT NULL,
    retried smallint DEFAULT 0 NOT NULL
)
WITH (fillfactor='50', autovacuum_vacuum_scale_factor='0.05', autovacuum_freeze_min_age='0', vacuum_truncate=off);

ALTER TABLE evertick.run ALTER COLUMN run_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.run_run_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

ALTER TABLE evertick.schedule ALTER COLUMN schedule_id ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME evertick.schedule_schedule_id_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);

CREATE TABLE evertick.schedule_version (
    schedule_id integer NOT NULL,
    version integer NOT NULL,
    change text NOT NULL,
    changed_by text NOT NULL,
    changed_at timestamp with time zone NOT NULL,
    origin text NOT NULL,
    is_held boolean NOT NULL,
    settings jsonb NOT NULL,
    CONSTRAINT schedule_version_change_check CHECK ((change = ANY (ARRAY['publish'::text, 'put'::text, 'pause'::text, 'unpause'::text, 'delete'::text])))
);

CREATE TABLE evertick.scheduler (
    owner text NOT NULL,
    since timestamp with time zone NOT NULL,
    seen_until timestamp with time zone NOT NULL,
    pid integer
)
WITH (fillfactor='50', vacuum_truncate=off);

CREATE TABLE evertick.skip_record (
    schedule_id integer NOT NULL,
    first_at timestamp with time zone NOT NULL,
    last_at timestamp with time zone NOT NULL,
    count bigint NOT NULL,
    reason text NOT NULL,
    recorded_at timestamp with time zone NOT NULL,
    CONSTRAINT skip_record_count_check CHECK ((count > 0))
);

CREATE TABLE evertick.task_child (
    version_id integer NOT NULL,
    idx integer NOT NULL,
    dag text NOT NULL,
    params jsonb NOT NULL,
    given jsonb,
    waits boolean NOT NULL,
    timeout double precision,
    CONSTRAINT task_child_timeout_check CHECK ((timeout > (0)::double precision))
);

CREATE TABLE evertick.task_deadline (
    version_id integer NOT NULL,
    idx integer NOT NULL,
    seconds double precision NOT NULL,
    CONSTRAINT task_deadline_seconds_check CHECK ((seconds > (0)::double precision))
);

CREATE TABLE evertick.task_input (
    version_id integer NOT NULL,
    idx integer NOT NULL,
    src integer NOT NULL
);

CREATE TABLE evertick.task_list (
    version_id integer NOT NULL,
    idx integer NOT NULL,
    place integer NOT NULL,
    src integer,
    length integer,
    CONSTRAINT task_list_check CHECK (((src IS NULL) <> (length IS NULL)))
);

CREATE TABLE evertick.task_mapping (
    version_id integer NOT NULL,
    idx integer NOT NULL,
    how evertick.map_how NOT NULL,
    most integer NOT NULL,
    CONSTRAINT task_mapping_most_check CHECK ((most > 0))
);

CREATE TABLE evertick.task_wait (
    version_id integer NOT NULL,
    idx integer NOT NULL,
    kind evertick.wait_kind NOT NULL,
    until timestamp with time zone,
    seconds double precision,
    at text,
    timezone text,
    parts jsonb,
    lookback double precision DEFAULT 0 NOT NULL,
    timeout double precision,
    on_timeout evertick.task_state DEFAULT 'failed'::evertick.task_state NOT NULL,
    on_reject evertick.task_state DEFAULT 'failed'::evertick.task_state NOT NULL,
    backoff double precision DEFAULT 1 NOT NULL,
    longest double precision,
    CONSTRAINT task_wait_backoff_check CHECK ((backoff >= (1)::double precision)),
    CONSTRAINT task_wait_kind_check CHECK ((kind <> ALL (ARRAY['start'::evertick.wait_kind, 'run'::evertick.wait_kind]))),
    CONSTRAINT task_wait_on_reject_check CHECK ((on_reject = ANY (ARRAY['failed'::evertick.task_state, 'skipped'::evertick.task_state]))),
    CONSTRAINT task_wait_on_timeout_check CHECK ((on_timeout = ANY (ARRAY['failed'::evertick.task_state, 'skipped'::evertick.task_state]))),
    CONSTRAINT task_wait_seconds_check CHECK ((seconds >= (0)::double precision)),
    CONSTRAINT task_wait_timeout_check CHECK ((timeout > (0)::double precision))
);

CREATE VIEW evertick.tasks AS
 SELECT r.run_id,
    s.idx,
    COALESCE(k.map_index, '-1'::integer) AS map_index,
    r.dag_id,
    d.name AS dag,
    x.version_id,
    s.name AS task,
    s.queue,
    s.priority,
    s.max_attempts,
    COALESCE(k.state, 'waiting'::evertick.task_state) AS state,
    COALESCE(k.epoch, 0) AS epoch,
    COALESCE((k.attempt)::integer, 0) AS attempt,
    k.losses,
    k.session,
    k.request,
    k.not_before,
    k.started_at,
    k.finished_at,
    k.exit_code,
        CASE
            WHEN ((k.state = 'pending'::evertick.task_state) AND (k.not_before IS NOT NULL) AND (EXISTS ( SELECT 1
               FROM evertick.retry_line l
              WHERE ((l.shard = ANY (ARRAY( SELECT h.shard
                       FROM evertick.shard h))) AND (l.queue = s.queue) AND (l.due_at = k.not_before) AND (l.run_id = k.run_id) AND (l.idx = k.idx) AND (l.map_index = k.map_index))))) THEN concat_ws('; '::text, k.reason, 'held back: as many retries of its queue are active as max_active_retries allows')
            WHEN (k.state = 'deferred'::evertick.task_state) THEN evertick.waits_for(k.run_id, k.idx, k.map_index)
            ELSE k.reason
        END AS reason
   FROM ((((evertick.run r
     JOIN evertick.run_status x ON ((x.run_id = r.run_id)))
     JOIN evertick.dag d ON ((d.dag_id = r.dag_id)))
     JOIN evertick.task_spec s ON ((s.version_id = x.version_id)))
     LEFT JOIN evertick.task k ON (((k.run_id = r.run_id) AND (k.idx = s.idx))));

CREATE TABLE evertick.timer (
    shard smallint NOT NULL,
    due_at timestamp with time zone NOT NULL,
    run_id bigint NOT NULL,
    idx integer NOT NULL,
    map_index integer NOT NULL
)
WITH (autovacuum_vacuum_scale_factor='0', autovacuum_vacuum_threshold='2000', vacuum_truncate=off);

ALTER TABLE ONLY evertick.account
    ADD CONSTRAINT account_pkey PRIMARY KEY (account_id);

ALTER TABLE ONLY evertick.alert
    ADD CONSTRAINT alert_pkey PRIMARY KEY (alert_id);

ALTER TABLE ONLY evertick.approval
    ADD CONSTRAINT approval_pkey PRIMARY KEY (run_id, idx, map_index, epoch);

ALTER TABLE ONLY evertick.arrival
    ADD CONSTRAINT arrival_pkey PRIMARY KEY (arrival_id);

ALTER TABLE ONLY evertick.asset_update
    ADD CONSTRAINT asset_update_pkey PRIMARY KEY (update_id);

ALTER TABLE ONLY evertick.attempt
    ADD CONSTRAINT attempt_pkey PRIMARY KEY (run_id, idx, map_index, epoch);

ALTER TABLE ONLY evertick.awaited
    ADD CONSTRAINT awaited_pkey PRIMARY KEY (kind, name, schedule_id);

ALTER TABLE ONLY evertick.backfill
    ADD CONSTRAINT backfill_pkey PRIMARY KEY (backfill_id);

ALTER TABLE ONLY evertick.backfill
    ADD CONSTRAINT backfill_request_key UNIQUE (request);

ALTER TABLE ONLY evertick.backfill_run
    ADD CONSTRAINT backfill_run_pkey PRIMARY KEY (run_id);

ALTER TABLE ONLY evertick.bundle
    ADD CONSTRAINT bundle_pkey PRIMARY KEY (hash);

ALTER TABLE ONLY evertick.cause
    ADD CONSTRAINT cause_pkey PRIMARY KEY (schedule_id, fire_at, kind, name);

ALTER TABLE ONLY evertick.child_run
    ADD CONSTRAINT child_run_pkey PRIMARY KEY (run_id);

ALTER TABLE ONLY evertick.cluster
    ADD CONSTRAINT cluster_pkey PRIMARY KEY (system_id, timeline);

ALTER TABLE ONLY evertick.credential
    ADD CONSTRAINT credential_pkey PRIMARY KEY (credential_id);

ALTER TABLE ONLY evertick.credential
    ADD CONSTRAINT credential_secret_hash_key UNIQUE (secret_hash);

ALTER TABLE ONLY evertick.dag
    ADD CONSTRAINT dag_name_key UNIQUE (name);

ALTER TABLE ONLY evertick.dag
    ADD CONSTRAINT dag_pkey PRIMARY KEY (dag_id);

ALTER TABLE ONLY evertick.dag_version
    ADD CONSTRAINT dag_version_dag_id_hash_bundle_hash_key UNIQUE (dag_id, hash, bundle_hash);

ALTER TABLE ONLY evertick.dag_version
    ADD CONSTRAINT dag_version_dag_id_number_key UNIQUE (dag_id, number);

ALTER TABLE ONLY evertick.dag_version
    ADD CONSTRAINT dag_version_pkey PRIMARY KEY (version_id);

ALTER TABLE ONLY evertick.deadline
    ADD CONSTRAINT deadline_pkey PRIMARY KEY (shard, due_at, run_id, kind, idx);

ALTER TABLE ONLY evertick.default_notice
    ADD CONSTRAINT default_notice_pkey PRIMARY KEY (event, sink);

ALTER TABLE ONLY evertick.deferral
    ADD CONSTRAINT deferral_pkey PRIMARY KEY (run_id, idx, map_index);

ALTER TABLE ONLY evertick.dispatch
    ADD CONSTRAINT dispatch_pkey PRIMARY KEY (run_id, idx, map_index, epoch);

ALTER TABLE ONLY evertick.dispatch
    ADD CONSTRAINT dispatch_session_key UNIQUE (session);

ALTER TABLE ONLY evertick.edge
    ADD CONSTRAINT edge_pkey PRIMARY KEY (version_id, src, dst) INCLUDE (out_of);

ALTER TABLE ONLY evertick.episode
    ADD CONSTRAINT episode_pkey PRIMARY KEY (schedule_id, task);

ALTER TABLE ONLY evertick.event
    ADD CONSTRAINT event_pkey PRIMARY KEY (event_id);

ALTER TABLE ONLY evertick.gate_hold
    ADD CONSTRAINT gate_hold_pkey PRIMARY KEY (run_id, idx, map_index);

ALTER TABLE ONLY evertick.gate
    ADD CONSTRAINT gate_kind_name_key UNIQUE (kind, name);

ALTER TABLE ONLY evertick.gate_line
    ADD CONSTRAINT gate_line_gate_ids_weights_checks_needs_queue_key UNIQUE NULLS NOT DISTINCT (gate_ids, weights, checks, needs, queue);

ALTER TABLE ONLY evertick.gate_line
    ADD CONSTRAINT gate_line_pkey PRIMARY KEY (line_id);

ALTER TABLE ONLY evertick.gate_order
    ADD CONSTRAINT gate_order_pkey PRIMARY KEY (gate_id, version, run_id, idx, map_index);

ALTER TABLE ONLY evertick.gate_order
    ADD CONSTRAINT gate_order_run_id_idx_map_index_gate_id_key UNIQUE (run_id, idx, map_index, gate_id);

ALTER TABLE ONLY evertick.gate_pass
    ADD CONSTRAINT gate_pass_pkey PRIMARY KEY (gate_id, until, seq);

ALTER TABLE ONLY evertick.gate
    ADD CONSTRAINT gate_pkey PRIMARY KEY (gate_id);

ALTER TABLE ONLY evertick.gate_wait
    ADD CONSTRAINT gate_wait_pkey PRIMARY KEY (line_id, rank, seq);

ALTER TABLE ONLY evertick.gate_wait
    ADD CONSTRAINT gate_wait_run_id_idx_map_index_key UNIQUE (run_id, idx, map_index);

ALTER TABLE ONLY evertick.heard
    ADD CONSTRAINT heard_pkey PRIMARY KEY (schedule_id, kind, name);

ALTER TABLE ONLY evertick.import_error
    ADD CONSTRAINT import_error_pkey PRIMARY KEY (file);

ALTER TABLE ONLY evertick.journal
    ADD CONSTRAINT journal_pkey PRIMARY KEY (entry_id);

ALTER TABLE ONLY evertick.lease
    ADD CONSTRAINT lease_pkey PRIMARY KEY (session, run_id, idx, map_index);

ALTER TABLE ONLY evertick.log_chunk
    ADD CONSTRAINT log_chunk_pkey PRIMARY KEY (run_id, idx, map_index, epoch, seq);

ALTER TABLE ONLY evertick.log_object
    ADD CONSTRAINT log_object_pkey PRIMARY KEY (object_id);

ALTER TABLE ONLY evertick.log_walk
    ADD CONSTRAINT log_walk_pkey PRIMARY KEY (is_only);

ALTER TABLE ONLY evertick.log_watch
    ADD CONSTRAINT log_watch_pkey PRIMARY KEY (run_id);

ALTER TABLE ONLY evertick.login_try
    ADD CONSTRAINT login_try_pkey PRIMARY KEY (subject);

ALTER TABLE ONLY evertick.map_item
    ADD CONSTRAINT map_item_pkey PRIMARY KEY (run_id, idx, map_index);

ALTER TABLE ONLY evertick.migration
    ADD CONSTRAINT migration_pkey PRIMARY KEY (number);

ALTER TABLE ONLY evertick.moved_run
    ADD CONSTRAINT moved_run_pkey PRIMARY KEY (run_id);

ALTER TABLE ONLY evertick.note
    ADD CONSTRAINT note_pkey PRIMARY KEY (run_id, idx, map_index);

ALTER TABLE ONLY evertick.notice
    ADD CONSTRAINT notice_pkey PRIMARY KEY (version_id, idx, event, sink);

ALTER TABLE ONLY evertick.orphan_watch
    ADD CONSTRAINT orphan_watch_pkey PRIMARY KEY (run_id);

ALTER TABLE ONLY evertick.outbox
    ADD CONSTRAINT outbox_pkey PRIMARY KEY (delivery_id);

ALTER TABLE ONLY evertick.poll
    ADD CONSTRAINT poll_pkey PRIMARY KEY (run_id, idx, map_index);

ALTER TABLE ONLY evertick.pool_text
    ADD CONSTRAINT pool_text_pkey PRIMARY KEY (name);

ALTER TABLE ONLY evertick.quarantine
    ADD CONSTRAINT quarantine_pkey PRIMARY KEY (kind, subject_id);

ALTER TABLE ONLY evertick.ready
    ADD CONSTRAINT ready_pkey PRIMARY KEY (queue, rank, seq);

ALTER TABLE ONLY evertick.remains
    ADD CONSTRAINT remains_pkey PRIMARY KEY (shard, kind, id);

ALTER TABLE ONLY evertick.result
    ADD CONSTRAINT result_pkey PRIMARY KEY (run_id, idx, map_index);

ALTER TABLE ONLY evertick.retry_group
    ADD CONSTRAINT retry_group_pkey PRIMARY KEY (version_id, grp);

ALTER TABLE ONLY evertick.retry_line
    ADD CONSTRAINT retry_line_pkey PRIMARY KEY (shard, queue, due_at, run_id, idx, map_index);

ALTER TABLE ONLY evertick.retry_slot
    ADD CONSTRAINT retry_slot_pkey PRIMARY KEY (shard, queue, run_id, idx, map_index);

ALTER TABLE ONLY evertick.run_group
    ADD CONSTRAINT run_group_pkey PRIMARY KEY (run_id, grp);

ALTER TABLE ONLY evertick.run
    ADD CONSTRAINT run_pkey PRIMARY KEY (run_id);

ALTER TABLE ONLY evertick.run_status
    ADD CONSTRAINT run_status_pkey PRIMARY KEY (run_id);

ALTER TABLE ONLY evertick.runner
    ADD CONSTRAINT runner_pkey PRIMARY KEY (session);

ALTER TABLE ONLY evertick.schedule
    ADD CONSTRAINT schedule_dag_id_name_key UNIQUE (dag_id, name);

ALTER TABLE ONLY evertick.schedule
    ADD CONSTRAINT schedule_pkey PRIMARY KEY (schedule_id);

ALTER TABLE ONLY evertick.schedule_state
    ADD CONSTRAINT schedule_state_pkey PRIMARY KEY (schedule_id);

ALTER TABLE ONLY evertick.schedule_version
    ADD CONSTRAINT schedule_version_pkey PRIMARY KEY (schedule_id, version);

ALTER TABLE ONLY evertick.scheduler
    ADD CONSTRAINT scheduler_pkey PRIMARY KEY (owner);

ALTER TABLE ONLY evertick.shard
    ADD CONSTRAINT shard_pkey PRIMARY KEY (shard);

ALTER TABLE ONLY evertick.skip_record
    ADD CONSTRAINT skip_record_pkey PRIMARY KEY (schedule_id, first_at);

ALTER TABLE ONLY evertick.stored_value
    ADD CONSTRAINT stored_value_pkey PRIMARY KEY (kind, name);

ALTER TABLE ONLY evertick.task_child
    ADD CONSTRAINT task_child_pkey PRIMARY KEY (version_id, idx);

ALTER TABLE ONLY evertick.task_deadline
    ADD CONSTRAINT task_deadline_pkey PRIMARY KEY (version_id, idx);

ALTER TABLE ONLY evertick.task_gate
    ADD CONSTRAINT task_gate_pkey PRIMARY KEY (version_id, idx, place);

ALTER TABLE ONLY evertick.task_input
    ADD CONSTRAINT task_input_pkey PRIMARY KEY (version_id, idx, src);

ALTER TABLE ONLY evertick.task_list
    ADD CONSTRAINT task_list_pkey PRIMARY KEY (version_id, idx, place);

ALTER TABLE ONLY evertick.task_mapping
    ADD CONSTRAINT task_mapping_pkey PRIMARY KEY (version_id, idx);

ALTER TABLE ONLY evertick.task
    ADD CONSTRAINT task_pkey PRIMARY KEY (run_id, idx, map_index);

ALTER TABLE ONLY evertick.task_spec
    ADD CONSTRAINT task_spec_pkey PRIMARY KEY (version_id, idx);

ALTER TABLE ONLY evertick.task_wait
    ADD CONSTRAINT task_wait_pkey PRIMARY KEY (version_id, idx);

ALTER TABLE ONLY evertick.timer
    ADD CONSTRAINT timer_pkey PRIMARY KEY (shard, due_at, run_id, idx, map_index);

CREATE UNIQUE INDEX account_name ON evertick.account USING btree (lower(name));

CREATE UNIQUE INDEX alert_open ON evertick.alert USING btree (schedule_id, kind, task) WHERE (ended_at IS NULL);

CREATE INDEX approval_open ON evertick.approval USING btree (asked_at) WHERE (decided_at IS NULL);

CREATE INDEX awaited_of ON evertick.awaited USING btree (schedule_id);

CREATE INDEX backfill_live ON evertick.backfill USING btree (shard, backfill_id) WHERE ((state = 'running'::text) OR (open_runs > 0));

CREATE INDEX backfill_run_instant ON evertick.backfill_run USING btree (dag_id, schedule_id, fire_at, run_id);

CREATE INDEX backfill_run_open ON evertick.backfill_run USING btree (backfill_id, run_id) WHERE is_open;

CREATE INDEX credential_of_account ON evertick.credential USING btree (account_id, credential_id);

CREATE INDEX dag_timed ON evertick.dag USING btree (dag_id) WHERE has_run_timeout;

CREATE INDEX deferral_due ON evertick.deferral USING btree (shard, wake_at);

CREATE INDEX deferral_key ON evertick.deferral USING btree (key) WHERE (key IS NOT NULL);

CREATE INDEX dispatch_of ON evertick.dispatch USING btree (owner);

CREATE INDEX edge_upstream ON evertick.edge USING btree (version_id, dst, src) INCLUDE (out_of);

CREATE UNIQUE INDEX event_key ON evertick.event USING btree (name, key) WHERE (key IS NOT NULL);

CREATE INDEX event_new ON evertick.event USING btree (event_id) WHERE (NOT is_heard);

CREATE INDEX event_of_name ON evertick.event USING btree (name, sent_at);

CREATE INDEX gate_behind ON evertick.gate USING btree (gate_id) WHERE is_behind;

CREATE INDEX gate_line_blocked ON evertick.gate_line USING btree (blocked_on, need, rank, seq);

CREATE INDEX gate_line_oldest ON evertick.gate_line USING btree (blocked_on, since) WHERE (need > 1);

CREATE INDEX gate_line_taken_back ON evertick.gate_line USING btree (queue) WHERE (queue IS NOT NULL);

CREATE INDEX gate_opens ON evertick.gate USING btree (opens_at) WHERE (opens_at IS NOT NULL);

CREATE INDEX journal_in_time ON evertick.journal USING btree (occurred_at);

CREATE INDEX journal_of_run ON evertick.journal USING btree (run_id, entry_id) WHERE (run_id IS NOT NULL);

CREATE INDEX log_object_look ON evertick.log_object USING btree (look_at) WHERE (look_at IS NOT NULL);

CREATE INDEX log_object_of_run ON evertick.log_object USING btree (run_id);

CREATE INDEX moved_run_version ON evertick.moved_run USING btree (version_id);

CREATE INDEX outbox_waiting ON evertick.outbox USING btree (shard, sink, due_at) WHERE (state = 'waiting'::text);

CREATE INDEX ready_expiry ON evertick.ready USING btree (expires_at) WHERE (expires_at IS NOT NULL);

CREATE INDEX run_active ON evertick.run_status USING btree (dag_id, state, run_id) WHERE (state = ANY (ARRAY['queued'::evertick.run_state, 'running'::evertick.run_state]));

CREATE INDEX run_ended ON evertick.run_status USING btree (dag_id, finished_at) WHERE (finished_at IS NOT NULL);

CREATE INDEX run_filled ON evertick.run USING btree (dag_id, fire_at) WHERE (kind = 'backfill'::evertick.run_kind);

CREATE UNIQUE INDEX run_fire ON evertick.run USING btree (schedule_id, fire_at) WHERE (schedule_id IS NOT NULL);

CREATE UNIQUE INDEX run_instant ON evertick.run USING btree (dag_id, fire_at) WHERE ((kind = 'manual'::evertick.run_kind) AND (fire_at IS NOT NULL));

CREATE UNIQUE INDEX run_key ON evertick.run USING btree (dag_id, key) WHERE (key IS NOT NULL);

CREATE INDEX run_made ON evertick.run USING btree (dag_id, created_at) WHERE (kind = 'manual'::evertick.run_kind);

CREATE INDEX run_of_dag ON evertick.run USING btree (dag_id, run_id);

CREATE INDEX run_of_text ON evertick.run USING btree (dag_id, evertick.run_text(key, kind, COALESCE(fire_at, created_at), run_id));

CREATE INDEX run_unwell ON evertick.run_status USING btree (dag_id, run_id) WHERE (state = ANY (ARRAY['failed'::evertick.run_state, 'canceled'::evertick.run_state]));

CREATE INDEX runner_live ON evertick.runner USING btree (session) WHERE (gone_at IS NULL);

CREATE INDEX schedule_due ON evertick.schedule_state USING btree (shard, next_due) WHERE ((next_due IS NOT NULL) AND (NOT paused) AND (error IS NULL));

CREATE INDEX task_gate_pool ON evertick.task_gate USING btree (name) WHERE (kind = 'pool'::evertick.gate_kind);

CREATE OR REPLACE VIEW evertick.blocked AS
 SELECT 'gate'::text AS kind,
    ((g.kind || ' '::text) || g.name) AS name,
    count(*) AS waiting,
    min(w.since) AS since,
    (jsonb_build_object('gate', g.kind, 'used', g.used, 'capacity', g.capacity, 'holders', evertick.holders_of(g.gate_id, 3)) ||
        CASE
            WHEN (g.kind >= 'order'::evertick.gate_kind) THEN evertick.check_facts(g.gate_id, min(l.need), (0)::bigint)
            ELSE '{}'::jsonb
        END) AS detail
   FROM ((evertick.gate_line l
     JOIN evertick.gate_wait w ON ((w.line_id = l.line_id)))
     JOIN evertick.gate g ON ((g.gate_id = l.blocked_on)))
  GROUP BY g.gate_id
UNION ALL
 SELECT 'no_runner'::text AS kind,
    x.queue AS name,
    (sum(x.waiting))::bigint AS waiting,
    NULL::timestamp with time zone AS since,
    evertick.queue_facts(x.queue, min(x.version_id), min(x.idx)) AS detail
   FROM ( SELECT n.queue,
            n.version_id,
            n.idx,
            n.waiting
           FROM ( SELECT q.queue,
                    k.version_id,
                    k.idx,
                    count(*) AS waiting
                   FROM ((( SELECT y.queue
                           FROM ( SELECT DISTINCT z.queue
                                   FROM evertick.ready z) y
                          WHERE (NOT evertick.is_served_to_all(y.queue, (0)::double precision))) u
                     JOIN evertick.ready q ON ((q.queue = u.queue)))
                     JOIN evertick.task k ON (((k.run_id = q.run_id) AND (k.idx = q.idx) AND (k.map_index = q.map_index))))
                  GROUP BY q.queue, k.version_id, k.idx) n
          WHERE (NOT evertick.is_served(n.queue, n.version_id, n.idx, (0)::double precision))
        UNION ALL
         SELECT l.queue,
            w.version_id,
            w.idx,
            count(*) AS count
           FROM (evertick.gate_line l
             JOIN evertick.gate_wait w ON ((w.line_id = l.line_id)))
          WHERE (l.queue IS NOT NULL)
          GROUP BY l.queue, w.version_id, w.idx) x
  GROUP BY x.queue
UNION ALL
 SELECT
        CASE
            WHEN d.paused THEN 'dag_paused'::text
            ELSE 'run_queued'::text
        END AS kind,
    d.name,
    count(*) AS waiting,
    min(f.created_at) AS since,
    jsonb_build_object('limit', d.max_active_runs, 'active', ( SELECT count(*) AS count
           FROM evertick.run_status a
          WHERE ((a.dag_id = d.dag_id) AND (a.state = ANY (ARRAY['queued'::evertick.run_state, 'running'::evertick.run_state])) AND (a.state = 'running'::evertick.run_state)))) AS detail
   FROM ((evertick.run_status r
     JOIN evertick.dag d ON ((d.dag_id = r.dag_id)))
     JOIN evertick.run f ON ((f.run_id = r.run_id)))
  WHERE ((r.state = 'queued'::evertick.run_state) AND (r.state = ANY (ARRAY['queued'::evertick.run_state, 'running'::evertick.run_state])))
  GROUP BY d.dag_id
UNION ALL
 SELECT 'dag_paused'::text AS kind,
    d.name,
    count(*) AS waiting,
    NULL::timestamp with time zone AS since,
    jsonb_build_object('tasks', true) AS detail
   FROM ((evertick.dag d
     JOIN evertick.run_status r ON (((r.dag_id = d.dag_id) AND (r.state = 'running'::evertick.run_state) AND (r.state = ANY (ARRAY['queued'::evertick.run_state, 'running'::evertick.run_state])))))
     JOIN evertick.task k ON (((k.run_id = r.run_id) AND (k.state = 'pending'::evertick.task_state) AND (k.not_before IS NULL))))
  WHERE d.paused
  GROUP BY d.dag_id
UNION ALL
 SELECT 'retry_line'::text AS kind,
    l.queue AS name,
    count(*) AS waiting,
    min(l.due_at) AS since,
    '{}'::jsonb AS detail
   FROM evertick.retry_line l
  GROUP BY l.queue
UNION ALL
 SELECT 'time'::text AS kind,
    'retries that wait for their time'::text AS name,
    count(*) AS waiting,
    NULL::timestamp with time zone AS since,
    jsonb_build_object('next', min(w.due_at)) AS detail
   FROM evertick.timer w
 HAVING (count(*) > 0)
UNION ALL
 SELECT 'quarantined'::text AS kind,
    ((q.kind || ' '::text) || q.subject_id) AS name,
    1 AS waiting,
    q.since,
    jsonb_build_object('verb', q.verb, 'reason', q.reason) AS detail
   FROM evertick.quarantine q
  WHERE ((q.retry_at IS NULL) OR (q.retry_at > evertick.clock()));
