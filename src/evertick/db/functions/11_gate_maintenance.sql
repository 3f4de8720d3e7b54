-- Pools as operators change them, and what the leader does for the tasks that wait at gates.

-- Creates a pool or changes its slots, and admits tasks that fit now; none while more is used than there are slots.
-- `p_revision`: the gate and the revision that the caller has read, such as 12-3. Another one is not changed.
create function set_pool(p_name text, p_slots int, p_actor actor, p_revision text default null, out is_new boolean,
                         out admitted int, out is_stale boolean)
language plpgsql as $$
declare
    fx effects;
    id int;
    was int;
    stands text;
begin
    select g.gate_id, g.capacity, g.gate_id || '-' || g.revision into id, was, stands from gate g
     where g.kind = 'pool' and g.name = p_name for no key update;
    is_new := not found;
    is_stale := p_revision is not null and p_revision is distinct from stands;
    if is_stale then
        admitted := 0;
        return;
    elsif is_new then
        insert into gate (kind, name, capacity) values ('pool', p_name, p_slots) returning gate_id into id;
    else
        update gate g set capacity = p_slots, revision = g.revision + 1 where g.gate_id = id and g.capacity <> p_slots;
    end if;
    perform write_audit(p_actor, 'set_pool',
                        jsonb_strip_nulls(jsonb_build_object('pool', p_name, 'slots', p_slots, 'was', was)));
    fx := process_gates('{}', array[id], fx);
    admitted := coalesce(fx.enqueued, 0);
end $$;

-- Returns why not: a DAG that needs it, or 'used', 'unknown', 'stale'. Null when it is gone.
create function delete_pool(p_name text, p_actor actor, p_revision text default null) returns text
language plpgsql as $$
declare
    id int;
    is_used boolean;
    stands text;
    why text;
begin
    select g.gate_id, g.used > 0, g.gate_id || '-' || g.revision into id, is_used, stands from gate g
     where g.kind = 'pool' and g.name = p_name for update;
    if not found then
        return 'unknown';
    elsif p_revision <> stands then
        return 'stale';
    elsif is_used or exists (select 1 from gate_queue l where id = any(l.gate_ids)) then
        return 'used';
    end if;
    select d.name into why from task_gate x join dag d on d.version_id = x.version_id and d.deleted_at is null
    where x.kind = 'pool' and x.name = p_name limit 1;
    if found then
        return why;
    end if;
    delete from gate g where g.gate_id = id;
    perform write_audit(p_actor, 'delete_pool', jsonb_build_object('pool', p_name));
    return null;
end $$;

-- Whether some runner could take this task of a queue, or could a moment ago.
create function is_queue_served(p_queue text, p_version_id int, p_idx int, p_grace double precision)
returns boolean language plpgsql stable as $$
begin
    return exists (select 1 from runner r where p_queue = any(r.queues)
                   and ((r.ended_at is null and r.request is null)
                        or r.ended_at > clock() - make_interval(secs => p_grace))
                   and matches_patterns(r.task_patterns, p_version_id, p_idx));
end $$;

-- The same for all tasks of a queue: some runner takes them whatever their names are.
create function is_queue_served_fully(p_queue text, p_grace double precision) returns boolean language sql stable as $$
    select exists (select 1 from runner r where p_queue = any(r.queues) and r.task_patterns = '{}'
                   and ((r.ended_at is null and r.request is null)
                        or r.ended_at > clock() - make_interval(secs => p_grace)))
$$;

-- Whether a runner could take a task now that was released for lack of one. Each task is checked once for all its runs.
create function has_admissible_tasks() returns boolean language sql stable as $$
    select exists (select 1 from gate_queue l
                   cross join lateral (select distinct w.version_id, w.idx from gate_waiter w
                                       where w.queue_id = l.queue_id offset 0) w
                   where l.queue is not null and is_queue_served(l.queue, w.version_id, w.idx, 0))
$$;

-- Gates that a verb left to the leader, rates that have a free slot again, and queues that a runner could serve again.
-- Returns how many tasks were admitted, and when the next slot of a rate for which a task waits becomes free.
create function admit_gated_tasks(p_shard smallint, p_epoch bigint, p_limit int, out admitted int,
                                  out next_opening timestamptz) language plpgsql as $$
declare
    fx effects;
    back task_ref[];
begin
    perform fence(p_shard, p_epoch);
    with waiting as (
        select w.ctid as place, w.run_id, w.idx, w.map_index, w.version_id from gate_queue l
        cross join lateral (select x.ctid, x.* from gate_waiter x
                            where x.queue_id = l.queue_id and is_queue_served(l.queue, x.version_id, x.idx, 0)
                            order by x.rank, x.seq limit p_limit) w
        cross join lateral (select from run_status r where r.run_id = w.run_id for no key update skip locked) locked
        where l.queue is not null limit p_limit
    ), gone as (
        delete from gate_waiter w where w.ctid = any(array(select x.place from waiting x))
    )
    select array_agg(row(x.run_id, x.idx, x.map_index, x.version_id, 'pending')::task_ref) into back from waiting x;
    delete from gate_queue l where l.queue is not null
    and (select true from gate_waiter w where w.queue_id = l.queue_id limit 1) is null;
    fx := process_gates(coalesce(back, '{}'), array(
        (select g.gate_id from gate g where g.needs_admission order by g.gate_id limit p_limit)
        union
        (select g.gate_id from gate g where g.next_opening <= clock() order by g.next_opening limit p_limit)), fx);
    admitted := coalesce(fx.enqueued, 0);
    select min(g.next_opening) into next_opening from gate g where g.next_opening is not null;
end $$;

-- Available tasks that no live runner would take give their gates back after the grace. Returns how many.
create function release_admissions(p_shard smallint, p_epoch bigint, p_grace double precision, p_limit int)
returns int language plpgsql as $$
declare
    fx effects;
    dead text[];
    chosen task_ref[];
    one record;
    line bigint;
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    dead := array(
        with recursive each_queue as (
            (select q.queue from ready_task q order by q.queue limit 1)
            union all
            select (select q.queue from ready_task q where q.queue > e.queue order by q.queue limit 1)
            from each_queue e where e.queue is not null
        )
        select e.queue from each_queue e where e.queue is not null and not is_queue_served_fully(e.queue, p_grace));
    if cardinality(dead) = 0 then
        return 0;
    end if;
    chosen := array(
        select row(h.run_id, h.idx, h.map_index, k.version_id, 'pending')::task_ref
        from gate_holder h
        cross join lateral (select x.version_id from task x where x.run_id = h.run_id and x.idx = h.idx
                            and x.map_index = h.map_index and x.state = 'available' offset 0) k
        cross join lateral (select x.queue from task_spec x where x.version_id = k.version_id
                            and x.idx = h.idx offset 0) s
        cross join lateral (select from run_status r where r.run_id = h.run_id for no key update skip locked) locked
        where h.since < t - make_interval(secs => p_grace) and s.queue = any(dead)
          and not is_queue_served(s.queue, k.version_id, h.idx, p_grace) limit p_limit);
    if cardinality(chosen) = 0 then
        return 0;
    end if;
    with gone as (
        delete from ready_task q
        where q.queue = any(dead)
            and (q.run_id, q.idx, q.map_index) in (select c.run_id, c.idx, c.map_index from unnest(chosen) c)
        returning q.run_id, q.idx, q.map_index
    ), moved as (
        update task k set state = 'pending' from gone g
        where k.run_id = g.run_id and k.idx = g.idx and k.map_index = g.map_index and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into chosen from moved m;
    fx := release_gates(chosen, fx);
    for one in
        select s.queue, case when r.kind = 'backfill' then 9
            else 9 - s.priority end as rank, c.run_id, c.idx, c.map_index, c.version_id
        from unnest(chosen) c join task_spec s on s.version_id = c.version_id and s.idx = c.idx
            join run r on r.run_id = c.run_id
    loop
        insert into gate_queue (gate_ids, weights, queue, rank, seq, since) values ('{}', '{}', one.queue, 0, 0, t)
        on conflict (gate_ids, weights, checks, needs, queue) do update set rank = 0 returning queue_id into line;
        insert into gate_waiter (queue_id, rank, run_id, idx, map_index, version_id, since)
        values (line, one.rank, one.run_id, one.idx, one.map_index, one.version_id, t);
    end loop;
    fx := apply_effects(fx);
    return coalesce(cardinality(chosen), 0);
end $$;

-- Whether a task may hold gates.
create function holds_gates(p_run_id bigint, p_idx int, p_map_index int) returns boolean language sql stable as $$
    select exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
                   and k.state in ('available', 'queued', 'running'))
$$;

-- What the counter of a gate should say: of a rate the slots whose time is not over, of the others what tasks hold.
create function used_slots(p_gate_id int) returns int language sql stable as $$
    select case when (select g.kind = 'rate' from gate g where g.gate_id = p_gate_id)
                then (select count(*) from rate_slot p where p.gate_id = p_gate_id)
                else coalesce((select sum(n.weight) from gate_holder h
                               cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight)
                               where p_gate_id = any(h.gate_ids) and n.gate_id = p_gate_id), 0) end::int
$$;

-- One slice of the gates: counters are computed again, holds and places without a task are deleted, overlooked tasks
-- admitted, and gates without tasks deleted. Locked gates are skipped. Returns where to continue, and the drift.
create function reconcile_gates(p_shard smallint, p_epoch bigint, p_after int, p_limit int, out last_gate_id int,
                                out drifted int, out admitted int) language plpgsql set enable_hashjoin = on as $$
declare
    fx effects;
    slice int[];
    stale gate_holder[];
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
    stale := array(select h from gate_holder h
                   where h.gate_ids && slice and not holds_gates(h.run_id, h.idx, h.map_index));
    gone_places := array(
        select o from gate_order o where o.gate_id = any(slice) and not exists (
            select 1 from task k where k.run_id = o.run_id and k.idx = o.idx and k.map_index = o.map_index
               and k.state in ('pending', 'available', 'queued', 'running', 'deferred')));
    doubtful := array(select g.gate_id from gate g
                      left join (select n.gate_id, sum(n.weight)::int as weight from gate_holder h
                                 cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight)
                                 group by n.gate_id) s on s.gate_id = g.gate_id
                      where g.gate_id = any(slice)
                        and (case g.kind when 'rate' then g.used <> used_slots(g.gate_id)
                                  else g.used <> coalesce(s.weight, 0) end or (g.kind <> 'pool' and g.used = 0)
                             or exists (select 1 from rate_slot p where p.gate_id = g.gate_id and p.until <= clock())
                             or exists (select 1 from gate_queue l
                                        where l.blocked_on = g.gate_id and l.need <= free_slots(g.gate_id))));
    doubtful := doubtful || array(select unnest(x.gate_ids) from unnest(stale) x)
        || array(select x.gate_id from unnest(gone_places) x);
    held := array(select g.gate_id from gate g where g.gate_id = any(doubtful)
                  order by g.gate_id for update skip locked);
    if cardinality(held) = 0 then
        return;
    end if;
    delete from gate_holder h
    where (h.run_id, h.idx, h.map_index) in (select x.run_id, x.idx, x.map_index from unnest(stale) x)
      and h.gate_ids <@ held and not holds_gates(h.run_id, h.idx, h.map_index);
    with dropped as (
        delete from gate_order o
        where (o.gate_id, o.run_id, o.idx, o.map_index) in (select x.gate_id, x.run_id, x.idx, x.map_index
                                                            from unnest(gone_places) x) and o.gate_id = any(held)
        returning o.gate_id
    ), repaired as (
        update gate g set used = s.weight
        from (select x.gate_id, used_slots(x.gate_id) as weight from unnest(held) as x(gate_id)) s
        where g.gate_id = s.gate_id and (g.used <> s.weight or g.gate_id in (select d.gate_id from dropped d))
        returning g.kind, g.name, g.used
    ), noted as (
        insert into audit_log (occurred_at, action, actor, detail)
        select clock(), 'reconcile', 'evertick',
            jsonb_build_object('repairs', array['gate_drift'], 'gate', r.kind || ' ' || r.name,
                                                                    'used', r.used) from repaired r
    )
    select count(*) into drifted from repaired;
    with gone as (
        delete from gate g
        where g.gate_id = any(held) and g.kind <> 'pool' and g.used = 0
          and g.gate_id not in (select unnest(l.gate_ids || l.checks) from gate_queue l)
          and not exists (select 1 from gate_order o where o.gate_id = g.gate_id)
        returning g.gate_id
    )
    select array(select x from unnest(held) x where x not in (select gate_id from gone)) into held;
    fx := process_gates('{}', held, fx);
    admitted := coalesce(fx.enqueued, 0);
end $$;
