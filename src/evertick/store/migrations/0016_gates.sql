-- Gates: what stands between pending and available. Why lines, why no run lock, why at the end of the transaction:
-- docs/decisions/0013-gates.md.
--
-- Lock order: runs, DAG, gates by id, gate_wait, ready, task, lease. Gates are locked by work_gates alone, once per transaction
-- and at its end. Who takes a pending or available task away deletes from gate_wait first, then from ready, then moves the task.

create type gate_kind as enum ('pool', 'mutex', 'key', 'group', 'task', 'dag');
create type gate_weight as (gate_id int, weight int);
create type gate_want as (run_id bigint, idx int, map_index int, version_id int, rank smallint, kind gate_kind, name text,
                          weight int, capacity int);
create type gate_arrival as (run_id bigint, idx int, map_index int, version_id int, rank smallint, gate_ids int[], weights int[]);

-- A pool is made and changed by people. The others are made by the first task that needs them, with the capacity that the newest
-- version says, and deleted when nobody needs them.
create table gate (
    gate_id    int generated always as identity primary key,
    kind       gate_kind not null,
    name       text not null,
    capacity   int not null check (capacity >= 0),
    used       int not null default 0,
    is_behind  boolean not null default false,   -- somebody could not look at all of its lines: the leader does
    version_id int,
    unique (kind, name)
) with (fillfactor = 30, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index gate_behind on gate (gate_id) where is_behind;

-- What a task needs. Either the name is the same for all runs, or it is made of parts: texts, and paths into the run's parameters.
create table task_gate (
    version_id int not null,
    idx        int not null,
    place      int not null,
    kind       gate_kind not null,
    name       text,
    parts      jsonb,
    weight     int not null check (weight > 0),
    capacity   int check (capacity > 0),
    primary key (version_id, idx, place),
    check ((name is null) <> (parts is null))
);
create index task_gate_pool on task_gate (name) where kind = 'pool';

-- An available, queued or running task with the gates that it holds, in order of their ids. Never updated.
create table gate_hold (
    run_id    bigint not null,
    idx       int not null,
    map_index int not null,
    gate_ids  int[] not null,
    weights   int[] not null,
    since     timestamptz not null,
    primary key (run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);

-- All pending tasks that need exactly these gates: blocked on one of them, where they need so much, and who is first, since when. Whoever
-- changes a line holds the lock of the gate that it is blocked on. A line with a queue has been taken back, because no live
-- runner served that queue: it is blocked on that alone.
create table gate_line (
    line_id    bigint generated always as identity primary key,
    gate_ids   int[] not null,
    weights    int[] not null,
    queue      text,
    blocked_on int,
    need       int,
    rank       smallint not null,
    seq        bigint not null,
    since      timestamptz not null,
    unique nulls not distinct (gate_ids, weights, queue)
) with (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, vacuum_truncate = off);
create index gate_line_blocked on gate_line (blocked_on, need, rank, seq);
create index gate_line_oldest on gate_line (blocked_on, since) where need > 1;
create index gate_line_taken_back on gate_line (queue) where queue is not null;

-- A pending task in its line.
create table gate_wait (
    line_id    bigint not null,
    rank       smallint not null,
    seq        bigint generated always as identity,
    run_id     bigint not null,
    idx        int not null,
    map_index  int not null,
    version_id int not null,
    since      timestamptz not null,
    primary key (line_id, rank, seq),
    unique (run_id, idx, map_index)
) with (autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0,
        vacuum_truncate = off);

-- On the way ------------------------------------------------------------------------------------------------------------------

-- Notes tasks that are pending and must pass their gates at the end of this transaction. The caller holds their runs' locks.
create function enter_gates(p_tasks ended[]) returns void language plpgsql as $$
begin
    if coalesce(cardinality(p_tasks), 0) > 0 then
        perform set_config('evertick.entering', (
            coalesce(nullif(current_setting('evertick.entering', true), ''), '{}')::ended[] || p_tasks)::text, true);
    end if;
end $$;

-- Tasks that are no longer available, queued or running hold nothing: what they held is noted, and counted back at the end.
create function leave_gates(p_tasks ended[]) returns void language plpgsql as $$
declare
    given gate_weight[];
begin
    with left_now as (
        delete from gate_hold h where h.ctid = any(array(
            select x.place from unnest(p_tasks) p cross join lateral (
                select y.ctid as place from gate_hold y
                where y.run_id = p.run_id and y.idx = p.idx and y.map_index = p.map_index offset 0) x))
        returning h.gate_ids, h.weights
    )
    select array_agg(row(s.gate_id, s.weight)::gate_weight) into given
    from (select g.gate_id, sum(g.weight)::int as weight
          from left_now l cross join lateral unnest(l.gate_ids, l.weights) as g(gate_id, weight) group by g.gate_id) s;
    if given is not null then
        perform set_config('evertick.released', (
            coalesce(nullif(current_setting('evertick.released', true), ''), '{}')::gate_weight[] || given)::text, true);
    end if;
end $$;

-- Takes tasks of a run out of their lines, one or all: the first thing to do for whoever takes a pending task away. The gates
-- are looked at again at the end: one may have been reserved for who is gone.
create function quit_lines(p_run_ids bigint[], p_idx int) returns void language plpgsql as $$
declare
    touched gate_weight[];
begin
    with gone as (
        delete from gate_wait w where w.run_id = any(p_run_ids) and (p_idx is null or w.idx = p_idx)
        returning w.line_id
    )
    select array_agg(distinct row(l.blocked_on, 0)::gate_weight) into touched
    from gone g join gate_line l on l.line_id = g.line_id where l.blocked_on is not null;
    if touched is not null then
        perform set_config('evertick.released', (
            coalesce(nullif(current_setting('evertick.released', true), ''), '{}')::gate_weight[] || touched)::text, true);
    end if;
end $$;

-- The end of every verb that moves tasks: what was noted on the way is done. Returns how many tasks became available.
create function pass_gates() returns int language plpgsql as $$
declare
    entering text := nullif(current_setting('evertick.entering', true), '');
    released text := nullif(current_setting('evertick.released', true), '');
begin
    if entering is null and released is null then
        return 0;
    end if;
    perform set_config('evertick.entering', '', true), set_config('evertick.released', '', true);
    return work_gates(coalesce(entering, '{}')::ended[], coalesce(released, '{}')::gate_weight[], '{}');
end $$;

-- What the given tasks need, as far as they are pending and nothing but gates holds them --------------------------------------

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

-- The state and the run's state are looked at again: what was noted on the way may have gone on since.
create function wants_of(p_tasks ended[]) returns gate_want[] language sql stable as $$
    select coalesce(array_agg(row(p.run_id, p.idx, p.map_index, p.version_id,
                                  case when r.kind = 'backfill' then 9 else 9 - s.priority end, g.kind,
                                  case when g.kind = 'group' then p.run_id || '/' || g.name
                                       else coalesce(g.name, gate_name(g.parts, p.run_id)) end,
                                  g.weight, coalesce(g.capacity, case g.kind when 'mutex' then 1000000 else 0 end))::gate_want), '{}')
    from (select distinct run_id, idx, map_index, version_id from unnest(p_tasks)) p
    cross join lateral (select from task k where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
                        and k.state = 'pending' and k.not_before is null offset 0) k
    cross join lateral (select x.priority from task_spec x where x.version_id = p.version_id and x.idx = p.idx offset 0) s
    cross join lateral (select * from task_gate x where x.version_id = p.version_id and x.idx = p.idx offset 0) g
    cross join lateral (select x.kind from run x where x.run_id = p.run_id offset 0) r
    where (select true from run_status r where r.run_id = p.run_id and r.state = 'running')
      and (select true from gate_wait w where w.run_id = p.run_id and w.idx = p.idx and w.map_index = p.map_index) is null
$$;

-- By task, with gates in order of their ids. Two of a task's keys may turn out to be the same one.
create function arrivals_of(p_wants gate_want[]) returns gate_arrival[] language sql stable as $$
    select array_agg(row(t.run_id, t.idx, t.map_index, t.version_id, t.rank, t.gate_ids, t.weights)::gate_arrival
                     order by t.rank, t.run_id, t.idx, t.map_index)
    from (
        select n.run_id, n.idx, n.map_index, n.version_id, n.rank, array_agg(n.gate_id order by n.gate_id) as gate_ids,
               array_agg(n.weight order by n.gate_id) as weights
        from (
            select w.run_id, w.idx, w.map_index, w.version_id, w.rank, g.gate_id, max(w.weight) as weight
            from unnest(p_wants) w
            cross join lateral (select x.gate_id from gate x where x.kind = w.kind and x.name = w.name offset 0) g
            group by w.run_id, w.idx, w.map_index, w.version_id, w.rank, g.gate_id) n
        group by n.run_id, n.idx, n.map_index, n.version_id, n.rank) t
$$;

-- At the gates: everything below is done under the locks of the gates that it names --------------------------------------------

-- How many tasks with these needs fit in now.
create function fits_in(p_gate_ids int[], p_weights int[]) returns int language sql stable as $$
    select min(greatest(g.capacity - g.used, 0) / n.weight)
    from unnest(p_gate_ids, p_weights) as n(gate_id, weight)
    cross join lateral (select x.capacity, x.used from gate x where x.gate_id = n.gate_id offset 0) g
$$;

-- The first of these gates that has no room for one more. Nothing where there is none.
create function blocker_of(p_gate_ids int[], p_weights int[], out gate_id int, out need int) language sql stable as $$
    select n.gate_id, n.weight
    from unnest(p_gate_ids, p_weights) as n(gate_id, weight)
    cross join lateral (select x.capacity, x.used from gate x where x.gate_id = n.gate_id offset 0) g
    where g.capacity - g.used < n.weight order by n.gate_id limit 1
$$;

-- Lets tasks in: they become available and hold their gates. A task that waits no more is left out.
create function let_in(p_tasks gate_arrival[]) returns int language plpgsql as $$
declare
    freed ended[];
    t timestamptz := clock();
begin
    with moved as (
        update task k set state = 'available'
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
    return offer(freed);
end $$;

-- Of tasks that nobody waits before: those for which there is room, counted in their order, and the others. All at once, because
-- a run may begin with thousands of tasks that need a gate each. Whoever does not fit counts, too: no gate gets too many, and
-- what could have slipped in beside is looked at again, line by line.
create function who_fits(p_tasks gate_arrival[], out fitting gate_arrival[], out others gate_arrival[]) language sql stable as $$
    select array_agg(j.whole order by j.place) filter (where j.fits), array_agg(j.whole order by j.place) filter (where not j.fits)
    from (
        select n.place, (array_agg(n.whole))[1] as whole, bool_and(n.running <= g.capacity - g.used) as fits
        from (
            select e.whole, e.place, x.gate_id, sum(x.weight) over (partition by x.gate_id order by e.place) as running
            from (select a as whole, a.gate_ids, a.weights,
                         row_number() over (order by a.rank, a.run_id, a.idx, a.map_index) as place from unnest(p_tasks) a) e
            cross join lateral unnest(e.gate_ids, e.weights) as x(gate_id, weight)) n
        cross join lateral (select x.capacity, x.used from gate x where x.gate_id = n.gate_id offset 0) g
        group by n.place) j
$$;

-- Puts tasks at the end of the line of those who need the same.
create function join_line(p_gate_ids int[], p_weights int[], p_tasks gate_arrival[]) returns void language plpgsql as $$
declare
    line bigint;
    t timestamptz := clock();
begin
    select l.line_id into line from gate_line l
    where l.gate_ids = p_gate_ids and l.weights = p_weights and l.queue is null;
    if not found then
        insert into gate_line (gate_ids, weights, blocked_on, need, rank, seq, since)
        select p_gate_ids, p_weights, coalesce(b.gate_id, p_gate_ids[1]), coalesce(b.need, p_weights[1]), 100, 0, t
        from (select 1) one left join blocker_of(p_gate_ids, p_weights) b on true
        returning line_id into line;
    end if;
    insert into gate_wait (line_id, rank, run_id, idx, map_index, version_id, since)
    select line, p.rank, p.run_id, p.idx, p.map_index, p.version_id, t
    from unnest(p_tasks) with ordinality as p(run_id, idx, map_index, version_id, rank, gate_ids, weights, place) order by p.place;
    perform refresh_line(line);
end $$;

-- Writes down who is first in a line. An empty one is gone.
create function refresh_line(p_line bigint) returns void language plpgsql as $$
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

-- The line for which a gate is kept free: the oldest that needs many slots, once its first has waited for a minute. Without
-- that it could wait for ever, while those who need less come and go. One that needs more than there is keeps nothing.
create function reserved_for(p_gate_id int) returns bigint language sql stable as $$
    select o.line_id from gate g cross join lateral (
        select l.line_id, l.since, l.need from gate_line l
        where l.blocked_on = g.gate_id and l.need > 1 and l.need <= g.capacity order by l.since limit 1) o
    where g.gate_id = p_gate_id and o.since < clock() - interval '60 seconds' and o.need > g.capacity - g.used
$$;

-- Locks what a line needs besides what is held. A gate that comes later in the order may be waited for; an earlier one is only
-- tried, because waiting for it could deadlock. Returns what is held then, null when somebody else has one of them.
create function lock_also(p_held int[], p_gate_ids int[]) returns int[] language plpgsql as $$
declare
    g int;
    top int := (select max(x) from unnest(p_held) x);
begin
    for g in select x from unnest(p_gate_ids) x where x <> all(p_held) order by x loop
        if g > top then
            perform 1 from gate x where x.gate_id = g for no key update;
            top := g;
        else
            perform 1 from gate x where x.gate_id = g for no key update skip locked;
        end if;
        if not found then
            return null;
        end if;
        p_held := p_held || g;
    end loop;
    return p_held;
end $$;

-- Lets in from the lines that are blocked on a gate, the most urgent and oldest first, as long as there is room. A line whose
-- need is larger than what is free is not even looked at; one that finds another of its gates full moves there. p_looks bounds
-- the work of one transaction: what is left over is the leader's.
create function open_gate(p_gate_id int, inout held int[], inout looks int, out admitted int) language plpgsql as $$
declare
    free int;
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
    select g.is_behind into was_behind from gate g where g.gate_id = p_gate_id;
    loop
        select g.capacity - g.used into free from gate g where g.gate_id = p_gate_id;
        exit when coalesce(free, 0) <= 0;
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
        reserved := reserved_for(p_gate_id);
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
        now_held := lock_also(held, line.gate_ids);
        if now_held is null then
            is_left := true;
            set_aside := set_aside || line.line_id;
            continue;
        end if;
        held := now_held;
        select b.gate_id, b.need into block from blocker_of(line.gate_ids, line.weights) b;
        if block.gate_id is not null then
            update gate_line l set blocked_on = block.gate_id, need = block.need where l.line_id = line.line_id;
            continue;
        end if;
        -- Up to the first of the next line: lines with other needs wait no longer for it than they must.
        with first as (
            select w.ctid as place, w.run_id, w.idx, w.map_index, w.version_id, w.rank, w.seq from gate_wait w
            where w.line_id = line.line_id
              and (cardinality(lines) < 2 or (w.rank, w.seq) < (lines[2].rank, lines[2].seq))
            order by w.rank, w.seq limit fits_in(line.gate_ids, line.weights) for update skip locked
        ), gone as (
            delete from gate_wait w where w.ctid = any(array(select f.place from first f))
        )
        select array_agg(row(f.run_id, f.idx, f.map_index, f.version_id, f.rank, line.gate_ids, line.weights)::gate_arrival
                         order by f.rank, f.seq)
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

-- Counts back what was released, lets in who waited, then who enters: the only place where gates are locked and counted.
-- p_also: gates to look at besides.
create function work_gates(p_entering ended[], p_released gate_weight[], p_also int[]) returns int language plpgsql as $$
declare
    wants gate_want[] := '{}';
    arrivals gate_arrival[] := '{}';
    fresh gate_arrival[] := '{}';
    asked int[];
    held int[];
    g int;
    looks int := 500;
    line record;
    fits int;
    offered int := 0;
    opened record;
begin
    if cardinality(p_entering) > 0 then
        wants := wants_of(p_entering);
        -- In one order, and before any lock of a gate that others can see.
        insert into gate (kind, name, capacity, version_id)
        select distinct on (w.kind, w.name) w.kind, w.name, w.capacity, w.version_id from unnest(wants) w
        where (select true from gate x where x.kind = w.kind and x.name = w.name) is null
        order by w.kind, w.name, w.version_id desc
        on conflict (kind, name) do nothing;
        arrivals := arrivals_of(wants);
    end if;
    asked := array(
        select distinct x from (
            select unnest(p_also) union all select r.gate_id from unnest(p_released) r
            union all select unnest(a.gate_ids) from unnest(arrivals) a) as all_of(x) order by x);
    held := array(select x.gate_id from gate x where x.gate_id = any(asked) order by x.gate_id for no key update);
    if cardinality(held) < cardinality(asked) then
        raise exception 'a gate that nobody needed was just deleted' using errcode = 'serialization_failure';
    end if;
    update gate x set used = greatest(x.used - r.weight, 0)
    from (select p.gate_id, sum(p.weight)::int as weight from unnest(p_released) p group by p.gate_id) r
    where x.gate_id = r.gate_id and r.weight > 0;
    update gate x set capacity = w.capacity, version_id = w.version_id
    from (select distinct on (y.kind, y.name) y.kind, y.name, y.capacity, y.version_id from unnest(wants) y
          where y.kind not in ('pool', 'mutex') order by y.kind, y.name, y.version_id desc) w
    where x.kind = w.kind and x.name = w.name and x.version_id < w.version_id;
    if cardinality(p_also) = 0 and not exists (select 1 from gate_line l where l.blocked_on = any(held)) then
        fresh := arrivals;
    else
        for line in
            select a.gate_ids, a.weights, array_agg(a order by a.rank, a.run_id, a.idx, a.map_index) as tasks
            from unnest(arrivals) a group by a.gate_ids, a.weights
        loop
            -- Nobody goes past those who wait already.
            if exists (select 1 from gate_line l where l.blocked_on = any(line.gate_ids)) then
                perform join_line(line.gate_ids, line.weights, line.tasks);
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
            select a.gate_ids, a.weights, array_agg(a order by a.rank, a.run_id, a.idx, a.map_index) as tasks
            from unnest(opened.others) a group by a.gate_ids, a.weights order by min(a.rank), min(a.run_id), min(a.idx)
        loop
            fits := fits_in(line.gate_ids, line.weights);
            if fits > 0 then
                offered := offered + let_in(line.tasks[1:fits]);
            end if;
            if fits < cardinality(line.tasks) then
                perform join_line(line.gate_ids, line.weights, line.tasks[fits + 1:]);
            end if;
        end loop;
    end if;
    return offered;
end $$;

-- What people do with pools ------------------------------------------------------------------------------------------------------

-- Makes a pool or changes its slots; whoever fits in now is let in. Below what is used nothing new is let in until there is room.
create function set_pool(p_name text, p_slots int, p_actor text, out is_new boolean, out admitted int) language plpgsql as $$
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
    admitted := work_gates('{}', '{}', array[id]);
end $$;

-- Returns why not: a DAG that needs it, or 'used', 'unknown'. Null when it is gone.
create function delete_pool(p_name text, p_actor text) returns text language plpgsql as $$
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

-- What the leader does ------------------------------------------------------------------------------------------------------------

-- Whether some runner could take tasks of a queue, or could a moment ago.
create function is_served(p_queue text, p_grace double precision) returns boolean language sql stable as $$
    select exists (select 1 from runner r where p_queue = any(r.queues)
                   and ((r.gone_at is null and r.request is null) or r.gone_at > clock() - make_interval(secs => p_grace)))
$$;

-- Gates that somebody left to the leader, and lines that a runner could serve again.
create function tend_gates(p_shard smallint, p_epoch bigint, p_limit int) returns int language plpgsql as $$
declare
    back ended[];
begin
    perform fence(p_shard, p_epoch);
    with waiting as (
        select w.ctid as place, w.run_id, w.idx, w.map_index, w.version_id
        from gate_line l
        cross join lateral (select x.ctid, x.* from gate_wait x where x.line_id = l.line_id order by x.rank, x.seq limit p_limit) w
        cross join lateral (select from run_status r where r.run_id = w.run_id for no key update skip locked) locked
        where l.queue is not null and is_served(l.queue, 0) limit p_limit
    ), gone as (
        delete from gate_wait w where w.ctid = any(array(select x.place from waiting x))
    )
    select array_agg(row(x.run_id, x.idx, x.map_index, x.version_id, 'pending')::ended) into back from waiting x;
    delete from gate_line l where l.queue is not null
    and (select true from gate_wait w where w.line_id = l.line_id limit 1) is null;
    return work_gates(coalesce(back, '{}'), '{}', array(select g.gate_id from gate g where g.is_behind order by g.gate_id limit p_limit));
end $$;

-- Available tasks that hold gates although no live runner serves their queue, for longer than the grace: they give them back,
-- and come again when a runner does. Returns how many.
create function unadmit(p_shard smallint, p_epoch bigint, p_grace double precision, p_limit int) returns int language plpgsql as $$
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
        select e.queue from each_queue e where e.queue is not null and not is_served(e.queue, p_grace));
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
        select s.queue, 9 - s.priority as rank, c.run_id, c.idx, c.map_index, c.version_id
        from unnest(chosen) c join task_spec s on s.version_id = c.version_id and s.idx = c.idx
    loop
        insert into gate_line (gate_ids, weights, queue, rank, seq, since) values ('{}', '{}', one.queue, 0, 0, t)
        on conflict (gate_ids, weights, queue) do update set rank = 0 returning line_id into line;
        insert into gate_wait (line_id, rank, run_id, idx, map_index, version_id, since)
        values (line, one.rank, one.run_id, one.idx, one.map_index, one.version_id, t);
    end loop;
    perform pass_gates();
    return coalesce(cardinality(chosen), 0);
end $$;

-- Whether a task may hold gates.
create function holds_gates(p_run_id bigint, p_idx int, p_map_index int) returns boolean language sql stable as $$
    select exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
                   and k.state in ('available', 'queued', 'running'))
$$;

-- One slice of the gates: what is used is added up again under the gate's lock, holds of tasks that hold nothing are dropped,
-- whoever was overlooked is let in, and gates that nobody needs are deleted. Gates that somebody works on are passed by.
-- Returns where to go on (null: from the beginning), and how many gates had drifted.
create function reconcile_gates(p_shard smallint, p_epoch bigint, p_after int, p_limit int,
                                out last_gate_id int, out drifted int, out admitted int)
language plpgsql set enable_hashjoin = on as $$
declare
    slice int[];
    stale gate_hold[];
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
    doubtful := array(
        select g.gate_id from gate g
        left join (select n.gate_id, sum(n.weight)::int as weight
                   from gate_hold h cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight)
                   group by n.gate_id) s on s.gate_id = g.gate_id
        where g.gate_id = any(slice)
          and (g.used <> coalesce(s.weight, 0) or (g.kind <> 'pool' and g.used = 0)
               or exists (select 1 from gate_line l where l.blocked_on = g.gate_id and l.need <= g.capacity - g.used)));
    doubtful := doubtful || array(select unnest(x.gate_ids) from unnest(stale) x);
    held := array(select g.gate_id from gate g where g.gate_id = any(doubtful) order by g.gate_id for update skip locked);
    if cardinality(held) = 0 then
        return;
    end if;
    delete from gate_hold h
    where (h.run_id, h.idx, h.map_index) in (select x.run_id, x.idx, x.map_index from unnest(stale) x)
      and h.gate_ids <@ held and not holds_gates(h.run_id, h.idx, h.map_index);
    with repaired as (
        update gate g set used = s.weight
        from (select x.gate_id, coalesce((
                  select sum(n.weight)::int from gate_hold h cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight)
                  where x.gate_id = any(h.gate_ids) and n.gate_id = x.gate_id), 0) as weight
              from unnest(held) as x(gate_id)) s
        where g.gate_id = s.gate_id and g.used <> s.weight
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
          and g.gate_id not in (select unnest(l.gate_ids) from gate_line l)
        returning g.gate_id
    )
    select array(select x from unnest(held) x where x not in (select gate_id from gone)) into held;
    admitted := work_gates('{}', '{}', held);
end $$;

-- Why a task does not run -----------------------------------------------------------------------------------------------------------

-- The tasks that hold a gate, the oldest first.
create function holders_of(p_gate_id int, p_limit int) returns jsonb language sql stable as $$
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

-- Why a task is not running: every reason, the most binding first. It asks the functions and rows that decide: `decide` for the
-- upstream, the line's own gate, `is_served` for the queue. Stable, so that all of it is of one moment.
create function why(p_run_id bigint, p_idx int, p_map_index int) returns table (kind text, detail jsonb) language plpgsql stable as $$
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
    if k.state in ('queued', 'running') then
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
                                              'total', spec.upstream_total)
        from edge g
        join task_spec s on s.version_id = g.version_id and s.idx = g.src
        left join task u on u.run_id = p_run_id and u.idx = g.src
        where g.version_id = status.version_id and g.dst = p_idx
          and coalesce(u.state, 'waiting') not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
        order by array_position(array['waiting', 'pending', 'deferred', 'available', 'queued', 'running']::task_state[],
                                coalesce(u.state, 'waiting')) desc, g.src
        limit 10;
        return;
    end if;
    if k.state = 'pending' and k.not_before is not null then
        if k.not_before > t then
            return query select 'time', jsonb_build_object('until', k.not_before, 'attempt', k.attempt, 'reason', k.reason);
        else
            return query select 'retry_line', jsonb_build_object('queue', spec.queue, 'due_at', k.not_before, 'ahead', (
                select count(*) from (select 1 from retry_line l where l.shard = d.shard and l.queue = spec.queue
                                      and l.due_at < k.not_before limit most) x));
        end if;
        return;
    end if;
    if k.state = 'available' then
        return query select case when is_served(spec.queue, 0) then 'in_line' else 'no_runner' end,
            queue_facts(spec.queue) || jsonb_build_object('ahead', (
                select count(*) from (
                    select 1 from ready q join ready mine on mine.queue = q.queue and mine.run_id = p_run_id and mine.idx = p_idx
                                                         and mine.map_index = p_map_index and mine.rank in (9 - spec.priority, 9)
                    where q.queue = spec.queue and (q.rank, q.seq) < (mine.rank, mine.seq) limit most) x));
        return;
    end if;
    select w.* into wait from gate_wait w where w.run_id = p_run_id and w.idx = p_idx and w.map_index = p_map_index;
    select l.* into line from gate_line l where l.line_id = wait.line_id;
    if line.queue is not null then
        return query select 'no_runner', queue_facts(line.queue);
    end if;
    return query
    select 'gate', jsonb_build_object(
        'gate', g.kind, 'name', g.name, 'used', g.used, 'capacity', g.capacity, 'need', n.weight, 'since', wait.since,
        'holders', holders_of(g.gate_id, 5),
        'reserved_for', case when g.capacity - g.used >= n.weight then (
            select jsonb_build_object('run_id', w.run_id, 'task', s.name, 'need', l.need)
            from gate_line l join gate_wait w on w.line_id = l.line_id and w.rank = l.rank and w.seq = l.seq
            join task_spec s on s.version_id = w.version_id and s.idx = w.idx
            where l.line_id = reserved_for(g.gate_id)) end,
        'ahead', case when g.gate_id = line.blocked_on then (
            select count(*) from (
                select 1 from gate_line l join gate_wait w on w.line_id = l.line_id
                where l.blocked_on = g.gate_id and (w.rank, w.seq) < (wait.rank, wait.seq) limit most) x) end)
    from unnest(line.gate_ids, line.weights) as n(gate_id, weight) join gate g on g.gate_id = n.gate_id
    where g.gate_id = line.blocked_on or g.capacity - g.used < n.weight
    order by g.gate_id = line.blocked_on desc, g.gate_id;
end $$;

-- Who serves a queue, how busy they are, and who served it last.
create function queue_facts(p_queue text) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'queue', p_queue,
        'runners', count(*) filter (where r.gone_at is null and r.request is null),
        'draining', count(*) filter (where r.gone_at is null and r.request is not null),
        'slots', coalesce(sum(r.slots) filter (where r.gone_at is null and r.request is null), 0),
        'busy', coalesce(sum((select count(*) from lease l where l.session = r.session))
                         filter (where r.gone_at is null and r.request is null), 0),
        'last', (select jsonb_build_object('runner', x.runner_id, 'until', x.gone_at) from runner x
                 where p_queue = any(x.queues) and x.gone_at is not null order by x.gone_at desc limit 1))
    from runner r where p_queue = any(r.queues)
$$;

-- What holds back the most work now, over all runs: for each cause how many tasks (or runs) wait for it.
create view blocked as
select 'gate' as kind, g.kind || ' ' || g.name as name, count(*) as waiting, min(w.since) as since,
       jsonb_build_object('used', g.used, 'capacity', g.capacity, 'holders', holders_of(g.gate_id, 3)) as detail
from gate_line l join gate_wait w on w.line_id = l.line_id join gate g on g.gate_id = l.blocked_on
group by g.gate_id
union all
select 'no_runner', x.queue, sum(x.waiting)::bigint, null, queue_facts(x.queue)
from (select q.queue, count(*) as waiting from ready q where not is_served(q.queue, 0) group by q.queue
      union all
      select l.queue, count(*) from gate_line l join gate_wait w on w.line_id = l.line_id
      where l.queue is not null group by l.queue) x
group by x.queue
union all
select case when d.paused then 'dag_paused' else 'run_queued' end, d.name, count(*), min(f.created_at),
       jsonb_build_object('limit', d.max_active_runs, 'active', (
           select count(*) from run_status a where a.dag_id = d.dag_id and a.state in ('queued', 'running') and a.state = 'running'))
from run_status r join dag d on d.dag_id = r.dag_id join run f on f.run_id = r.run_id
where r.state = 'queued' and r.state in ('queued', 'running')
group by d.dag_id
union all
select 'dag_paused', d.name, count(*), null, jsonb_build_object('tasks', true)
from dag d join run_status r on r.dag_id = d.dag_id and r.state = 'running' and r.state in ('queued', 'running')
join task k on k.run_id = r.run_id and k.state = 'pending' and k.not_before is null
where d.paused
group by d.dag_id
union all
select 'retry_line', l.queue, count(*), min(l.due_at), '{}' from retry_line l group by l.queue
union all
select 'time', 'retries that wait for their time', count(*), null, jsonb_build_object('next', min(w.due_at)) from timer w having count(*) > 0
union all
select 'quarantined', q.kind || ' ' || q.subject_id, 1, q.since, jsonb_build_object('verb', q.verb, 'reason', q.reason)
from quarantine q where q.retry_at is null or q.retry_at > clock();
