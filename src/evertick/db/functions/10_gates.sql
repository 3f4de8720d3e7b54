-- Gates: pools, keys, limits and orders between pending and available (docs/decisions/0013-gates.md).
--
-- Lock order: runs, DAG, gates by id, gate_waiter, ready_task, task, lease. Only process_gates locks gates, at the end
-- of a transaction. A verb that takes a pending or available task away deletes from gate_waiter, then ready_task.

-- Which of these ended tasks the next run may wait for.
create function depends_on_past_tasks(p_ended task_ref[], inout fx effects) language plpgsql as $$
begin
    fx.counted := fx.counted || array(
        select e from unnest(p_ended) e
        join task_spec s on s.version_id = (e).version_id and s.idx = (e).idx and s.awaits_past);
end $$;

-- Tasks that are no longer available, queued or running hold no slots: what they held is counted back at the end of the
-- transaction. Those that have ended leave their ordered keys, too; their successors there may be next.
create function release_gates(p_tasks task_ref[], inout fx effects) language plpgsql as $$
declare
    given gate_slots[];
begin
    with left_now as (
        delete from gate_holder h where h.ctid = any(array(
            select x.place from unnest(p_tasks) p cross join lateral (
                select y.ctid as place from gate_holder y
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
    select array_agg(row(s.gate_id, s.weight)::gate_slots) into given
    from (select g.gate_id, sum(g.weight)::int as weight
          from (select n.gate_id, n.weight from left_now l
                cross join lateral unnest(l.gate_ids, l.weights) as n(gate_id, weight)
                union all select o.gate_id, 0 from over o) g group by g.gate_id) s;
    fx.released := fx.released || given;
end $$;

-- Removes tasks of a run from their gate queues: all, those of one index, or one of them. A verb that takes a pending
-- task away calls this first. The gates are processed again at the end: one may have been reserved for a removed task.
create function leave_gate_queues(p_run_ids bigint[], p_idx int, p_map_index int, inout fx effects)
language plpgsql as $$
declare
    touched gate_slots[];
begin
    with gone as (
        delete from gate_waiter w where w.run_id = any(p_run_ids) and (p_idx is null or w.idx = p_idx)
          and (p_map_index is null or w.map_index = p_map_index)
        returning w.queue_id
    )
    select array_agg(distinct row(l.blocked_on, 0)::gate_slots) into touched
    from gone g join gate_queue l on l.queue_id = g.queue_id where l.blocked_on is not null;
    fx.released := fx.released || touched;
end $$;

-- The end of every verb that moves tasks: carries out its effects. Mapped tasks first become their instances, which may
-- end some and start others; tasks that wait for something outside are deferred. The caller reports the rest.
create function apply_effects(inout fx effects) language plpgsql as $$
declare
    arriving task_ref[];
    entering task_ref[] := '{}';
    heads task_ref[];
    outside task_ref[];
begin
    if (cardinality(fx.entering) > 0 or cardinality(fx.released) > 0 or cardinality(fx.counted) > 0) is not true then
        return;
    end if;
    while cardinality(fx.entering) > 0 loop
        arriving := fx.entering;
        fx.entering := null;
        select array_agg(e) filter (where s.is_mapped), array_agg(e) filter (where s.is_wait),
               entering || array_agg(e) filter (where not s.is_mapped and not s.is_wait) into heads, outside, entering
        from unnest(arriving) e
        cross join lateral (select x.is_mapped and (e).map_index = -1 as is_mapped, x.is_wait from task_spec x
                            where x.version_id = (e).version_id and x.idx = (e).idx offset 0) s;
        if outside is not null then
            fx := defer_tasks(outside, fx);
        end if;
        if heads is not null then
            fx := expand_tasks(heads, fx);
        end if;
    end loop;
    fx := process_gates(entering, '{}', fx);
end $$;

-- A name that is longer than an index can hold is shortened, and stays unique.
create function gate_name(p_parts jsonb, p_run_id bigint) returns text language plpgsql stable as $$
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

-- The version of a task on an ordered key. The verb that creates a run checks that its parameter is such a number.
create function order_version(p_version jsonb, p_run_id bigint) returns bigint language plpgsql stable as $$
begin
    if jsonb_typeof(p_version) = 'number' then
        return p_version::bigint;
    end if;
    return (select r.params #>> array(select jsonb_array_elements_text(p_version)) from run r
            where r.run_id = p_run_id)::bigint;
end $$;

-- A task as the name of a gate: what the next run waits for.
create function previous_task_name(p_run_id bigint, p_idx int) returns text language sql immutable as $$
    select p_run_id || '/' || p_idx
$$;

-- The same task of the run before: of its schedule, or of its backfill. Null where there is none, or the task is new.
create function previous_task_of(p_run_id bigint, p_version_id int, p_idx int)
returns text language plpgsql stable as $$
declare
    this run;
    before run_status;
    wanted text;
begin
    select r.* into this from run r where r.run_id = p_run_id;
    select s.* into before from run_status s where s.run_id = case this.kind
        when 'scheduled' then (select r.run_id from run r where r.schedule_id = this.schedule_id
                               and r.fire_at < this.fire_at order by r.fire_at desc limit 1)
        when 'backfill' then (select o.run_id from backfill_run b
                              join backfill_run o on o.dag_id = b.dag_id and o.schedule_id = b.schedule_id
                                                 and o.fire_at < b.fire_at and o.backfill_id = b.backfill_id
                              where b.run_id = p_run_id order by o.fire_at desc, o.run_id desc limit 1) end;
    select s.name into wanted from task_spec s where s.version_id = p_version_id and s.idx = p_idx;
    -- Most runs have the version of the run before, where the index is the same; only otherwise it is looked up.
    return previous_task_name(before.run_id, coalesce(
        (select s.idx from task_spec s where s.version_id = before.version_id and s.idx = p_idx and s.name = wanted),
        (select s.idx from task_spec s where s.version_id = before.version_id and s.name = wanted)));
end $$;

-- The state and the run's state are checked again: a noted task may have moved since.
create function gate_requests_of(p_tasks task_ref[]) returns gate_request[] language sql stable as $$
    select coalesce(array_agg(row(p.run_id, p.idx, p.map_index, p.version_id,
                                  case when r.kind = 'backfill' then 9 else 9 - s.priority end, g.kind,
                                  case g.kind when 'group' then p.run_id || '/' || g.name
                                              when 'past' then previous_task_of(p.run_id, p.version_id, coalesce(
                                                  (select x.idx from task_spec x
                                                   where x.version_id = p.version_id and x.name = g.name), p.idx))
                                              else coalesce(g.name, gate_name(g.parts, p.run_id)) end, g.weight,
                                  coalesce(g.capacity, case g.kind when 'mutex' then 1000000 else 0 end),
                                  case g.kind when 'order' then order_version(g.version, p.run_id) else 1 end,
                                  g.period)::gate_request), '{}')
    from (select distinct run_id, idx, map_index, version_id from unnest(p_tasks)) p
    cross join lateral (select from task k where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
                        and k.state = 'pending' and k.not_before is null offset 0) k
    cross join lateral (select x.priority from task_spec x where x.version_id = p.version_id and x.idx = p.idx offset 0)
        s
    cross join lateral (select * from task_gate x where x.version_id = p.version_id and x.idx = p.idx offset 0) g
    cross join lateral (select x.kind from run x where x.run_id = p.run_id offset 0) r
    where (select r.state from run_status r where r.run_id = p.run_id) = 'running'
      and (select true from gate_waiter w where w.run_id = p.run_id and w.idx = p.idx and w.map_index = p.map_index) is
          null
$$;

-- By task, gates in order of their ids. Two keys of a task may be the same; one that depends on the past may have none.
create function gate_candidates_of(p_wants gate_request[]) returns gate_candidate[] language sql stable as $$
    select array_agg(row(t.run_id, t.idx, t.map_index, t.version_id, t.rank, t.gate_ids, t.weights, t.checks,
                         t.needs)::gate_candidate order by t.rank, t.run_id, t.idx, t.map_index)
    from (select n.run_id, n.idx, n.map_index, n.version_id, n.rank,
                 coalesce(array_agg(n.gate_id order by n.gate_id) filter (where n.is_held), '{}') as gate_ids,
                 coalesce(array_agg(n.weight order by n.gate_id) filter (where n.is_held), '{}') as weights,
                 coalesce(array_agg(n.gate_id order by n.gate_id) filter (where not n.is_held
                          and n.gate_id is not null), '{}') as checks,
                 coalesce(array_agg(n.need order by n.gate_id) filter (where not n.is_held and n.gate_id is not null),
                          '{}') as needs
          from (select w.run_id, w.idx, w.map_index, w.version_id, w.rank, g.gate_id, w.kind < 'order' as is_held,
                       max(w.weight) as weight, max(w.need) as need
                from unnest(p_wants) w
                cross join lateral (select (select x.gate_id from gate x where x.kind = w.kind and x.name = w.name)
                                    offset 0) g(gate_id)
                group by w.run_id, w.idx, w.map_index, w.version_id, w.rank, g.gate_id, is_held) n
          group by n.run_id, n.idx, n.map_index, n.version_id, n.rank) t
$$;

-- Whether the task that a gate is named after, maybe mapped, succeeded or was skipped, or its run was deleted.
create function is_previous_done(p_name text) returns boolean language sql stable as $$
    select not exists (select 1 from run_status r where r.run_id = split_part(p_name, '/', 1)::bigint)
        or coalesce((select bool_and(k.state in ('success', 'skipped')) from task k
                     where k.run_id = split_part(p_name, '/', 1)::bigint and k.idx = split_part(p_name, '/', 2)::int),
                         false)
$$;

-- Up to which need a check lets pass. On an ordered key the need is a version: room is up to the smallest open one.
create function free_slots(p_gate_id int) returns bigint language plpgsql stable as $$
declare
    g gate;
begin
    select x.* into g from gate x where x.gate_id = p_gate_id;
    return case g.kind
        when 'order' then (select o.version from gate_order o where o.gate_id = p_gate_id order by o.version limit 1)
        when 'past' then is_previous_done(g.name)::int
        else g.capacity - g.used end;
end $$;

-- How many tasks with these needs fit in now. Null where nothing limits them.
create function fitting_count(p_gate_ids int[], p_weights int[], p_checks int[], p_needs bigint[])
returns int language sql stable as $$
    select least(
        (select min(greatest(g.capacity - g.used, 0) / n.weight)
         from unnest(p_gate_ids, p_weights) as n(gate_id, weight)
         cross join lateral (select x.capacity, x.used from gate x where x.gate_id = n.gate_id offset 0) g),
        case when p_checks <> '{}' then (
            select min(case when n.need > free_slots(n.gate_id) then 0 when g.kind = 'rate'
                then free_slots(n.gate_id) end)
            from unnest(p_checks, p_needs) as n(gate_id, need)
            cross join lateral (select x.kind from gate x where x.gate_id = n.gate_id offset 0) g) end)
$$;

-- The first of these gates that has no room for one more, and how much is needed there. Null where there is none.
-- Checks come first: a task that waits for others or for a time need not be processed whenever a slot becomes free.
create function blocking_gate(p_gate_ids int[], p_weights int[], p_checks int[], p_needs bigint[], out gate_id int,
                              out need bigint) language plpgsql stable as $$
begin
    if p_checks <> '{}' then
        select n.gate_id, n.need into gate_id, need from unnest(p_checks, p_needs) as n(gate_id, need)
        where n.need > free_slots(n.gate_id) order by n.gate_id limit 1;
        if found then
            return;
        end if;
    end if;
    select n.gate_id, n.weight into gate_id, need from unnest(p_gate_ids, p_weights) as n(gate_id, weight)
    cross join lateral (select x.capacity, x.used from gate x where x.gate_id = n.gate_id offset 0) g
    where g.capacity - g.used < n.weight order by n.gate_id limit 1;
end $$;

-- Records the versions of tasks on their ordered keys. A task that is recorded there keeps its place.
create function reserve_order(p_tasks gate_candidate[]) returns void language sql as $$
    insert into gate_order (gate_id, version, run_id, idx, map_index, since)
    select n.gate_id, n.need, a.run_id, a.idx, a.map_index, clock()
    from unnest(p_tasks) a cross join lateral unnest(a.checks, a.needs) as n(gate_id, need)
    cross join lateral (select x.kind from gate x where x.gate_id = n.gate_id offset 0) g
    where g.kind = 'order'
    on conflict (run_id, idx, map_index, gate_id) do nothing
$$;

-- Frees the slots of rates whose time is over. The instant itself belongs to the next period.
create function expire_rate_slots(p_gate_ids int[]) returns void language sql as $$
    with back as (
        delete from rate_slot p where p.gate_id = any(p_gate_ids) and p.until <= clock() returning p.gate_id
    )
    update gate g set used = g.used - b.slots
    from (select x.gate_id, count(*)::int as slots from back x group by x.gate_id) b where g.gate_id = b.gate_id
$$;

-- When the next slot of these rates becomes free, as far as a task waits for one: the leader processes the gate at that
-- time. Now, if one is free already: it became free while the tasks were processed at another gate.
create function set_next_openings(p_gate_ids int[]) returns void language sql as $$
    update gate g set next_opening = n.next_opening
    from (select x.gate_id, case when not exists (select 1 from gate_queue l where l.blocked_on = x.gate_id) then null
                                 when x.used < x.capacity then clock()
                                 else (select p.until from rate_slot p where p.gate_id = x.gate_id order by p.until
                                       limit 1) end as next_opening
          from gate x where x.gate_id = any(p_gate_ids) and x.kind = 'rate') n
    where g.gate_id = n.gate_id and g.next_opening is distinct from n.next_opening
$$;

-- Lets tasks in: they become available and hold their gates. A task that waits no more is left out.
create function admit_tasks(p_tasks gate_candidate[], inout fx effects) language plpgsql as $$
declare
    freed task_ref[];
    t timestamptz := clock();
begin
    with moved as (
        update task k set state = 'available', admitted_at = t
        from unnest(p_tasks) p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
          and k.state = 'pending' and k.not_before is null
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, p.gate_ids, p.weights
    ), kept as (
        insert into gate_holder (run_id, idx, map_index, gate_ids, weights, since)
        select m.run_id, m.idx, m.map_index, m.gate_ids, m.weights, t from moved m
    ), counted as (
        update gate g set used = g.used + n.weight
        from (select x.gate_id, sum(x.weight)::int as weight
              from moved m cross join lateral unnest(m.gate_ids, m.weights) as x(gate_id, weight) group by x.gate_id) n
        where g.gate_id = n.gate_id
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into freed from moved m;
    -- Tasks that are admitted together have the same gates, or none of them has checks.
    if (p_tasks[1]).checks <> '{}' then
        perform count_rate_slots((p_tasks[1]).checks, coalesce(cardinality(freed), 0));
    end if;
    fx := enqueue_tasks(freed, fx);
end $$;

-- Each admitted task takes a slot of each of its rates for a period.
create function count_rate_slots(p_checks int[], p_count int) returns void language plpgsql as $$
declare
    t timestamptz := clock();
begin
    insert into rate_slot (gate_id, until)
    select g.gate_id, t + make_interval(secs => g.period)
    from gate g cross join generate_series(1, p_count) where g.gate_id = any(p_checks) and g.kind = 'rate';
    update gate g set used = g.used + p_count where g.gate_id = any(p_checks) and g.kind = 'rate';
end $$;

-- Of tasks without an earlier waiter: those for which there is room, counted in their order, and the others. All at
-- once, because a run may begin with thousands of tasks that need a gate each. Tasks that do not fit count, too: no
-- gate gets too many. Smaller ones that fit are processed again, as are tasks with checks or without a gate.
create function split_fitting(p_tasks gate_candidate[], out fitting gate_candidate[], out others gate_candidate[])
language sql stable as $$
    select array_agg(j.whole order by j.place) filter (where j.fits),
           array_agg(j.whole order by j.place) filter (where not j.fits)
    from (select n.place, (array_agg(n.whole))[1] as whole, coalesce(bool_and(n.running <= g.capacity - g.used), false)
                 and bool_and(n.checks = '{}') as fits
          from (select e.whole, e.place, e.checks, x.gate_id,
                       sum(x.weight) over (partition by x.gate_id order by e.place) as running
                from (select a as whole, a.gate_ids, a.weights, a.checks,
                             row_number() over (order by a.rank, a.run_id, a.idx, a.map_index) as place
                      from unnest(p_tasks) a) e
                left join lateral unnest(e.gate_ids, e.weights) as x(gate_id, weight) on true) n
          left join lateral (select x.capacity, x.used from gate x where x.gate_id = n.gate_id offset 0) g on true
          group by n.place) j
$$;

-- Puts tasks at the end of the queue of tasks with the same needs.
create function join_gate_queue(p_gate_ids int[], p_weights int[], p_checks int[], p_needs bigint[],
                                p_tasks gate_candidate[]) returns void language plpgsql as $$
declare
    line bigint;
    t timestamptz := clock();
begin
    select l.queue_id into line from gate_queue l
    where l.gate_ids = p_gate_ids and l.weights = p_weights and l.checks = p_checks and l.needs = p_needs
        and l.queue is null;
    if not found then
        insert into gate_queue (gate_ids, weights, checks, needs, blocked_on, need, rank, seq, since)
        select p_gate_ids, p_weights, p_checks, p_needs, coalesce(b.gate_id, p_gate_ids[1], p_checks[1]),
               coalesce(b.need, p_weights[1], p_needs[1]), 100, 0, t
        from blocking_gate(p_gate_ids, p_weights, p_checks, p_needs) b
        returning queue_id into line;
    end if;
    insert into gate_waiter (queue_id, rank, run_id, idx, map_index, version_id, since)
    select line, p.rank, p.run_id, p.idx, p.map_index, p.version_id, t
    from unnest(p_tasks) with ordinality as p(run_id, idx, map_index, version_id, rank, gate_ids, weights, checks,
                                              needs, place) order by p.place;
    perform refresh_gate_queue(line);
end $$;

-- Records which task is first in a queue. An empty queue is deleted.
create function refresh_gate_queue(p_line bigint) returns void language plpgsql as $$
declare
    head record;
begin
    select w.rank, w.seq, w.since into head from gate_waiter w where w.queue_id = p_line order by w.rank, w.seq limit 1;
    if not found then
        delete from gate_queue l where l.queue_id = p_line;
        return;
    end if;
    update gate_queue l set rank = head.rank, seq = head.seq, since = head.since
    where l.queue_id = p_line and (l.rank, l.seq) is distinct from (head.rank, head.seq);
end $$;

-- The queue for which a gate is kept free: the oldest that needs many slots, once its first task has waited for a
-- minute; tasks that need less could delay it forever. One that needs more than the gate has reserves nothing.
create function reserved_for(p_gate_id int) returns bigint language sql stable as $$
    select o.queue_id from gate g cross join lateral (
        select l.queue_id, l.since, l.need from gate_queue l
        where l.blocked_on = g.gate_id and l.need > 1 and l.need <= g.capacity order by l.since limit 1) o
    where g.gate_id = p_gate_id and o.since < clock() - interval '60 seconds' and o.need > g.capacity - g.used
$$;

-- Locks the other gates that a queue needs. One that comes later in the order may be waited for; an earlier one is only
-- tried, as waiting could deadlock. Returns what is held then, null when another transaction holds one of them.
create function lock_more_gates(p_held int[], p_gate_ids int[]) returns int[] language plpgsql as $$
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
        elsif is_rate then
            perform expire_rate_slots(array[g]);
        end if;
        p_held := p_held || g;
    end loop;
    return p_held;
end $$;

-- Admits tasks from the queues that are blocked on a gate, the most urgent and oldest first, as long as there is room.
-- One that needs more is skipped; one that finds another gate full moves there. p_looks bounds the work.
create function admit_from_gate(p_gate_id int, held int[], looks int, fx effects)
returns gate_result language plpgsql as $$
declare
    free bigint;
    kind gate_kind;
    was_behind boolean;
    is_left boolean := false;
    set_aside bigint[] := '{}';
    reserved bigint;
    lines gate_queue[];
    line gate_queue;
    block record;
    now_held int[];
    taken gate_candidate[];
begin
    select g.needs_admission, g.kind into was_behind, kind from gate g where g.gate_id = p_gate_id;
    loop
        if kind in ('order', 'past') then
            free := free_slots(p_gate_id);
        else
            select g.capacity - g.used into free from gate g where g.gate_id = p_gate_id;
        end if;
        exit when free is null or (free <= 0 and kind <> 'order');
        -- From need to need through the index: there are few different ones, and maybe many lines of each.
        lines := array(
            with recursive needs as (
                (select l.need from gate_queue l where l.blocked_on = p_gate_id and l.need <= free order by l.need
                 limit 1)
                union all
                select (select l.need from gate_queue l
                        where l.blocked_on = p_gate_id and l.need > n.need and l.need <= free order by l.need limit 1)
                from needs n where n.need is not null
            )
            select h.whole from needs n
            cross join lateral (select l as whole, l.rank, l.seq from gate_queue l
                                where l.blocked_on = p_gate_id and l.need = n.need and l.queue_id <> all(set_aside)
                                order by l.rank, l.seq limit 2) h
            where n.need is not null order by h.rank, h.seq limit 2);
        exit when cardinality(lines) = 0;
        reserved := case when kind < 'order' then reserved_for(p_gate_id) end;
        if reserved is not null then
            -- Its first may be gone by now, and with it the reason to keep anything free.
            perform refresh_gate_queue(reserved);
            exit when reserved_for(p_gate_id) = reserved;
            continue;
        end if;
        if looks <= 0 then
            is_left := true;
            exit;
        end if;
        looks := looks - 1;
        line := lines[1];
        now_held := lock_more_gates(held, line.gate_ids || line.checks);
        if now_held is null then
            is_left := true;
            set_aside := set_aside || line.queue_id;
            continue;
        end if;
        held := now_held;
        select b.gate_id, b.need into block from blocking_gate(line.gate_ids, line.weights, line.checks, line.needs) b;
        if block.gate_id is not null then
            update gate_queue l set blocked_on = block.gate_id, need = block.need where l.queue_id = line.queue_id;
            continue;
        end if;
        -- Up to the first of the next line: lines with other needs wait no longer for it than they must.
        with first as (
            select w.ctid as place, w.run_id, w.idx, w.map_index, w.version_id, w.rank, w.seq from gate_waiter w
            where w.queue_id = line.queue_id
              and (cardinality(lines) < 2 or (w.rank, w.seq) < (lines[2].rank, lines[2].seq))
            order by w.rank, w.seq limit fitting_count(line.gate_ids, line.weights, line.checks, line.needs)
            for update skip locked
        ), gone as (
            delete from gate_waiter w where w.ctid = any(array(select f.place from first f))
        )
        select array_agg(row(f.run_id, f.idx, f.map_index, f.version_id, f.rank, line.gate_ids, line.weights,
                             line.checks, line.needs)::gate_candidate order by f.rank, f.seq)
        into taken from first f;
        if taken is not null then
            fx := admit_tasks(taken, fx);
        end if;
        perform refresh_gate_queue(line.queue_id);
        -- No task could be taken although one is first: another transaction is removing it.
        if taken is null and exists (select 1 from gate_queue l where l.queue_id = line.queue_id
                                     and (l.rank, l.seq) = (line.rank, line.seq)) then
            set_aside := set_aside || line.queue_id;
        end if;
    end loop;
    if is_left <> was_behind then
        update gate g set needs_admission = is_left where g.gate_id = p_gate_id;
    end if;
    return row(held, looks, fx)::gate_result;
end $$;

-- Counts back what was released, admits waiting tasks, then entering ones. Only this locks gates. p_also: more gates.
create function process_gates(p_entering task_ref[], p_also int[], inout fx effects) language plpgsql as $$
declare
    wants gate_request[] := '{}';
    arrivals gate_candidate[] := '{}';
    fresh gate_candidate[] := '{}';
    counting gate_request[] := '{}';
    asked int[];
    has_checks boolean;
    held int[];
    at_first int;
    g int;
    looks int := 500;
    line record;
    fits int;
    opened gate_result;
    split record;
begin
    if cardinality(fx.counted) > 0 then
        counting := gate_requests_of(fx.counted) || array(
            select row(p.run_id, p.idx, -1, p.version_id, 0, 'past', previous_task_name(p.run_id, p.idx), 1, 0, 1,
                       null)::gate_request
            from unnest(fx.counted) p where p.state <> 'pending');
        counting := array(select w from unnest(counting) w where (w).kind in ('order', 'past'));
    end if;
    if cardinality(p_entering) > 0 or counting <> '{}' then
        wants := gate_requests_of(p_entering);
        -- In one order, and before any lock of a gate that other transactions can see.
        insert into gate (kind, name, capacity, version_id, period)
        select distinct on (w.kind, w.name) w.kind, w.name, w.capacity, w.version_id, w.period
            from unnest(wants || counting) w
        where w.name is not null and (select true from gate x where x.kind = w.kind and x.name = w.name) is null
        order by w.kind, w.name, w.version_id desc
        on conflict (kind, name) do nothing;
        arrivals := gate_candidates_of(wants);
        if counting <> '{}' then
            p_also := p_also || array(
                select x.gate_id from unnest(counting) w cross join lateral (
                    select y.gate_id from gate y where y.kind = w.kind and y.name = w.name offset 0) x);
        end if;
    end if;
    select array_agg(distinct n.gate_id order by n.gate_id), coalesce(bool_or(n.is_check), false) into asked, has_checks
    from (select unnest(p_also), true union all select r.gate_id, false from unnest(fx.released) r
          union all select unnest(a.gate_ids), false from unnest(arrivals) a
          union all select unnest(a.checks), true from unnest(arrivals) a) as n(gate_id, is_check);
    held := array(select x.gate_id from gate x where x.gate_id = any(asked) order by x.gate_id for no key update);
    if cardinality(held) < cardinality(asked) then
        raise exception 'a gate that no task needed was just deleted' using errcode = 'serialization_failure';
    end if;
    at_first := cardinality(held);
    update gate x set used = greatest(x.used - r.weight, 0)
    from (select p.gate_id, sum(p.weight)::int as weight from unnest(fx.released) p group by p.gate_id) r
    where x.gate_id = r.gate_id and r.weight > 0;
    fx.counted := null;
    fx.released := null;
    update gate x set capacity = w.capacity, version_id = w.version_id, period = w.period
    from (select distinct on (y.kind, y.name) y.kind, y.name, y.capacity, y.version_id, y.period from unnest(wants) y
          where y.kind not in ('pool', 'mutex') order by y.kind, y.name, y.version_id desc) w
    where x.kind = w.kind and x.name = w.name and x.version_id < w.version_id;
    if has_checks then
        perform expire_rate_slots(held);
        perform reserve_order(arrivals);
        if counting <> '{}' then
            perform reserve_order(gate_candidates_of(counting));
        end if;
    end if;
    if cardinality(p_also) = 0 and not exists (select 1 from gate_queue l where l.blocked_on = any(held)) then
        fresh := arrivals;
    else
        for line in
            select a.gate_ids, a.weights, a.checks, a.needs,
                array_agg(a order by a.rank, a.run_id, a.idx, a.map_index) as tasks
            from unnest(arrivals) a group by a.gate_ids, a.weights, a.checks, a.needs
        loop
            -- No task overtakes one that waits already.
            if exists (select 1 from gate_queue l where l.blocked_on = any(line.gate_ids || line.checks)) then
                perform join_gate_queue(line.gate_ids, line.weights, line.checks, line.needs, line.tasks);
            else
                fresh := fresh || line.tasks;
            end if;
        end loop;
        foreach g in array array(
            select x.gate_id from gate x
            where x.gate_id = any(held)
              and (x.needs_admission or (select true from gate_queue l where l.blocked_on = x.gate_id limit 1))
                  order by x.gate_id)
        loop
            opened := admit_from_gate(g, held, looks, fx);
            held := opened.held;
            looks := opened.looks;
            fx := opened.fx;
        end loop;
    end if;
    if cardinality(fresh) > 0 then
        select f.fitting, f.others into split from split_fitting(fresh) f;
        if split.fitting is not null then
            fx := admit_tasks(split.fitting, fx);
        end if;
        for line in
            select a.gate_ids, a.weights, a.checks, a.needs,
                array_agg(a order by a.rank, a.run_id, a.idx, a.map_index) as tasks
            from unnest(split.others) a group by a.gate_ids, a.weights, a.checks, a.needs
            order by min(a.rank), min(a.run_id), min(a.idx)
        loop
            fits := coalesce(fitting_count(line.gate_ids, line.weights, line.checks, line.needs),
                cardinality(line.tasks));
            if fits > 0 then
                fx := admit_tasks(line.tasks[1:fits], fx);
            end if;
            if fits < cardinality(line.tasks) then
                perform join_gate_queue(line.gate_ids, line.weights, line.checks, line.needs, line.tasks[fits + 1:]);
            end if;
        end loop;
    end if;
    if has_checks or cardinality(held) > at_first then
        perform set_next_openings(held);
    end if;
end $$;
