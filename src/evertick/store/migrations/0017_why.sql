-- Around the gates of 0016: what people do with pools, what the leader does for those who wait, and why a task does not run.

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
    admitted := work_gates('{}', '{}', '{}', array[id]);
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

-- Whether some runner could take this task of a queue, or could a moment ago.
create function is_served(p_queue text, p_version_id int, p_idx int, p_grace double precision) returns boolean
language plpgsql stable as $$
begin
    return exists (select 1 from runner r where p_queue = any(r.queues)
                   and ((r.gone_at is null and r.request is null) or r.gone_at > clock() - make_interval(secs => p_grace))
                   and takes(r.match, p_version_id, p_idx));
end $$;

-- The same for all tasks of a queue: some runner takes them whatever their names are.
create function is_served_to_all(p_queue text, p_grace double precision) returns boolean language sql stable as $$
    select exists (select 1 from runner r where p_queue = any(r.queues) and r.match = '{}'
                   and ((r.gone_at is null and r.request is null) or r.gone_at > clock() - make_interval(secs => p_grace)))
$$;

-- Whether something that was taken back for want of a runner could be taken by one now. Each task is asked about once, however
-- many runs wait.
create function can_come_back() returns boolean language sql stable as $$
    select exists (
        select 1 from gate_line l
        cross join lateral (select distinct w.version_id, w.idx from gate_wait w where w.line_id = l.line_id offset 0) w
        where l.queue is not null and is_served(l.queue, w.version_id, w.idx, 0))
$$;

-- Gates that somebody left to the leader, rates that have a slot again, and lines that a runner could serve again. Returns how many
-- were let in, and when the next slot of a rate for which somebody waits comes back.
create function tend_gates(p_shard smallint, p_epoch bigint, p_limit int, out admitted int, out next_opening timestamptz)
language plpgsql as $$
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

-- Available tasks that hold gates although no live runner would take them, for longer than the grace: they give them back,
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

-- Whether a task may hold gates.
create function holds_gates(p_run_id bigint, p_idx int, p_map_index int) returns boolean language sql stable as $$
    select exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
                   and k.state in ('available', 'queued', 'running'))
$$;

-- What a gate should have as used: of a rate the slots that time has not given back, of the others what tasks hold.
create function used_of(p_gate_id int) returns int language sql stable as $$
    select case when (select g.kind = 'rate' from gate g where g.gate_id = p_gate_id)
                then (select count(*) from gate_pass p where p.gate_id = p_gate_id)
                else coalesce((select sum(n.weight) from gate_hold h cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight)
                               where p_gate_id = any(h.gate_ids) and n.gate_id = p_gate_id), 0) end::int
$$;

-- One slice of the gates: what is used is added up again under the gate's lock, holds and places of tasks that have none are
-- dropped, whoever was overlooked is let in, and gates that nobody needs are deleted. Gates that somebody works on are passed by.
-- Returns where to go on (null: from the beginning), and how many gates had drifted.
create function reconcile_gates(p_shard smallint, p_epoch bigint, p_after int, p_limit int,
                                out last_gate_id int, out drifted int, out admitted int)
language plpgsql set enable_hashjoin = on as $$
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

-- What keeps a task at a check: the smaller versions, the time, the task of the run before.
create function check_facts(p_gate_id int, p_need bigint, p_ahead bigint) returns jsonb language plpgsql stable as $$
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

-- How many of a runner's slots are taken: by what it runs, and by what it looks after elsewhere.
create function busy_slots(p_session bigint) returns bigint language plpgsql stable as $$
begin
    return (select count(*) from lease l where l.session = p_session) + (select count(*) from dispatch d where d.owner = p_session);
end $$;

-- Who serves a queue for a task, how busy they are, and who did so last; and the patterns of those that serve the queue for others.
create function queue_facts(p_queue text, p_version_id int, p_idx int) returns jsonb language sql stable as $$
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

-- What holds back the most work now, over all runs: for each cause how many tasks (or runs) wait for it.
create view blocked as
select 'gate' as kind, g.kind || ' ' || g.name as name, count(*) as waiting, min(w.since) as since,
       jsonb_build_object('gate', g.kind, 'used', g.used, 'capacity', g.capacity, 'holders', holders_of(g.gate_id, 3))
       || case when g.kind >= 'order' then check_facts(g.gate_id, min(l.need), 0) else '{}' end as detail
from gate_line l join gate_wait w on w.line_id = l.line_id join gate g on g.gate_id = l.blocked_on
group by g.gate_id
union all
select 'no_runner', x.queue, sum(x.waiting)::bigint, null, queue_facts(x.queue, min(x.version_id), min(x.idx))
from (select n.queue, n.version_id, n.idx, n.waiting
      from (select q.queue, k.version_id, k.idx, count(*) as waiting
            from (select y.queue from (select distinct z.queue from ready z) y where not is_served_to_all(y.queue, 0)) u
            join ready q on q.queue = u.queue
            join task k on k.run_id = q.run_id and k.idx = q.idx and k.map_index = q.map_index
            group by q.queue, k.version_id, k.idx) n
      where not is_served(n.queue, n.version_id, n.idx, 0)
      union all
      select l.queue, w.version_id, w.idx, count(*) from gate_line l join gate_wait w on w.line_id = l.line_id
      where l.queue is not null group by l.queue, w.version_id, w.idx) x
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
