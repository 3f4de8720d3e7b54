-- Why a task does not run: each gate, queue and limit that it waits for, with the facts.

-- The tasks that hold a gate, the oldest first.
create function gate_holders(p_gate_id int, p_limit int) returns jsonb language sql stable as $$
    select coalesce(jsonb_agg(jsonb_build_object('run_id', x.run_id, 'dag', x.dag, 'task', x.task, 'state', x.state,
                                                 'weight', x.weight, 'since', x.since) order by x.since, x.run_id,
                              x.idx), '[]')
    from (select h.run_id, h.idx, d.name as dag, s.name as task, k.state, n.weight, h.since from gate_holder h
          cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight)
          join task k on k.run_id = h.run_id and k.idx = h.idx and k.map_index = h.map_index
          join task_spec s on s.version_id = k.version_id and s.idx = k.idx join run r on r.run_id = h.run_id
          join dag d on d.dag_id = r.dag_id where n.gate_id = p_gate_id order by h.since, h.run_id, h.idx
          limit p_limit) x
$$;

-- Why a task is not running: every reason, the most binding first, by what decides: `evaluate_trigger_rule` for the
-- upstream, the line's gate, `is_queue_served` for the queue. Stable, so that all of it is of one moment.
create function explain_task(p_run_id bigint, p_idx int, p_map_index int)
returns table (kind text, detail jsonb) language plpgsql stable as $$
declare
    status run_status;
    spec task_spec;
    k task;
    d dag;
    wait gate_waiter;
    line gate_queue;
    most constant int := 10000;
    t timestamptz := clock();
begin
    select r.* into status from run_status r where r.run_id = p_run_id;
    select s.* into spec from task_spec s where s.version_id = status.version_id and s.idx = p_idx;
    select x.* into k from task x where x.run_id = p_run_id and x.idx = p_idx and x.map_index = p_map_index;
    select x.* into d from dag x where x.dag_id = status.dag_id;
    if spec.idx is null then
        return;
    elsif k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed') then
        return query select 'ended', jsonb_build_object('state', k.state, 'at', k.finished_at, 'reason', k.reason);
        return;
    elsif k.state = 'queued' then
        return query select 'queued', explain_dispatch(k);
        return;
    elsif k.state = 'running' then
        return query select 'running', jsonb_build_object('since', k.started_at, 'asked', k.request, 'runner', (
            select r.runner_id from runner r where r.session = k.session));
        return;
    end if;
    return query select 'quarantined', jsonb_build_object('verb', q.verb, 'reason', q.reason, 'retry_at', q.retry_at)
        from quarantine q where (q.kind, q.subject_id) in (('run', p_run_id), ('dag', status.dag_id::bigint))
        and (q.retry_at is null or q.retry_at > t);
    if d.is_paused and (status.state = 'queued' or k.state = 'pending') then
        return query select 'dag_paused', jsonb_build_object('dag', d.name);
    end if;
    if status.state = 'queued' and exists (select 1 from delayed_run w where w.run_id = p_run_id) then
        return query select 'run_delayed', jsonb_build_object('until', w.start_at) from delayed_run w
            where w.run_id = p_run_id;
        return;
    elsif status.state = 'queued' then
        return query select 'run_queued', jsonb_build_object('limit', d.max_active_runs,
            'active', (select count(*) from run_status a where a.dag_id = d.dag_id and a.state = 'running'),
            'ahead', (select count(*) from (select 1 from run_status q where q.dag_id = d.dag_id and q.state = 'queued'
                                            and q.run_id < p_run_id limit most) x));
        return;
    elsif k.state is null or k.state = 'waiting' then
        return query
        select 'upstream', jsonb_build_object('idx', g.src, 'task', s.name, 'state', coalesce(u.state, 'waiting'),
                                              'rule', spec.trigger_rule,
                                              'ended', coalesce(k.n_success, 0) + coalesce(k.n_failed, 0)
                                                       + coalesce(k.n_upstream_failed, 0) + coalesce(k.n_skipped, 0),
                                              'total', case when spec.map_head is null or p_map_index >= 0
                                                  then spec.upstream_total else spec.lists_total end
                                                  + coalesce(k.n_extra, 0))
        -- of a group with retries all tasks, because none counts before all have ended; of a mapped group that is still
        -- one those that return its lists
        from (select e.src, e.scope is not distinct from 'same_index' as is_same from edge e
              where e.version_id = status.version_id and case when spec.map_head is null or p_map_index >= 0
                  then e.dst = p_idx else e.dst = spec.map_head and e.scope = 'list' end
              union select unnest(w.members), false from edge e join retry_group w on w.version_id = e.version_id
                  and w.group_id = e.leaves_group
              where e.version_id = status.version_id and e.dst = p_idx) g
        join task_spec s on s.version_id = status.version_id and s.idx = g.src
        left join task u on u.run_id = p_run_id and u.idx = g.src
            and (not g.is_same or u.map_index = p_map_index)
        where coalesce(u.state, 'waiting') not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
        order by array_position(array['waiting', 'pending', 'deferred', 'available', 'queued', 'running']::task_state[],
                                coalesce(u.state, 'waiting')) desc, g.src
        limit 10;
        return;
    elsif k.state = 'deferred' then
        return query select 'deferred', jsonb_build_object('since', k.started_at,
                'kind', case when a.run_id is null then w.kind else 'approval' end,
                'until', nullif(w.wake_at, 'infinity'), 'deadline', w.deadline, 'run_id', c.run_id, 'dag', h.dag,
                'state', c.state, 'event', substr(w.key, 7), 'title', a.title, 'polls', q.polls,
                'trigger', g.classpath, 'trigger_since', g.since, 'queue', g.queue, 'runner', o.runner_id)
        from (select 1) one
        left join deferral w on w.run_id = p_run_id and w.idx = p_idx and w.map_index = p_map_index
            and w.epoch = k.epoch
        left join run_status c on c.run_id = case when w.kind = 'run' then substr(w.key, 5)::bigint end
        left join trigger_dag_task h on h.version_id = k.version_id and h.idx = p_idx
        left join approval a on a.run_id = p_run_id and a.idx = p_idx and a.map_index = p_map_index
            and a.epoch = k.epoch
        left join sensor_poll q on q.run_id = p_run_id and q.idx = p_idx and q.map_index = p_map_index
        left join task_trigger g on g.run_id = p_run_id and g.idx = p_idx and g.map_index = p_map_index
            and w.kind = 'trigger'
        left join runner o on o.session = g.session;
        return;
    elsif k.state = 'pending' and k.not_before is not null then
        if k.not_before > t then
            return query select 'time',
                jsonb_build_object('until', k.not_before, 'attempt', k.attempt, 'reason', k.reason);
        else
            return query select 'retry_line', jsonb_build_object('queue', spec.queue, 'due_at', k.not_before, 'ahead', (
                select count(*) from (select 1 from retry_queue l
                    where l.shard = any(array(select h.shard from shard h)) and l.queue = spec.queue
                                      and l.due_at < k.not_before limit most) x));
        end if;
        return;
    elsif k.state = 'available' then
        return query select case when is_queue_served(spec.queue, spec.version_id, p_idx, 0) then 'in_line'
                                 else 'no_runner' end, queue_facts(spec.queue, spec.version_id, p_idx)
            || jsonb_build_object('ahead', (
                select count(*)
                from (select 1 from ready_task q
                      join ready_task mine on mine.queue = q.queue and mine.run_id = p_run_id and mine.idx = p_idx
                          and mine.map_index = p_map_index and mine.rank in (9 - spec.priority, 9)
                      where q.queue = spec.queue and (q.rank, q.seq) < (mine.rank, mine.seq) limit most) x));
        return;
    end if;
    select w.* into wait from gate_waiter w where w.run_id = p_run_id and w.idx = p_idx and w.map_index = p_map_index;
    select l.* into line from gate_queue l where l.queue_id = wait.queue_id;
    if line.queue is not null then
        return query select 'no_runner', queue_facts(line.queue, spec.version_id, p_idx);
    end if;
    return query
    select 'gate', jsonb_build_object(
        'gate', g.kind, 'name', g.name, 'used', g.used, 'capacity', g.capacity, 'need', n.need, 'since', wait.since,
        'holders', case when n.is_held then gate_holders(g.gate_id, 5) else '[]' end,
        'reserved_for', case when n.is_held and g.capacity - g.used >= n.need then (
            select jsonb_build_object('run_id', w.run_id, 'dag', y.name, 'task', s.name, 'need', l.need)
            from gate_queue l join gate_waiter w on w.queue_id = l.queue_id and w.rank = l.rank and w.seq = l.seq
            join task_spec s on s.version_id = w.version_id and s.idx = w.idx
            join run r on r.run_id = w.run_id join dag y on y.dag_id = r.dag_id
            where l.queue_id = reserved_for(g.gate_id)) end,
        'ahead', a.ahead) || case when n.is_held then '{}' else gate_facts(g.gate_id, n.need, coalesce(a.ahead, 0)) end
    from (select x.gate_id, x.weight::bigint, true from unnest(line.gate_ids, line.weights) as x(gate_id, weight)
          union all select x.gate_id, x.need, false from unnest(line.checks, line.needs) as x(gate_id, need)) as
              n(gate_id, need, is_held)
    join gate g on g.gate_id = n.gate_id
    cross join lateral (select case when g.gate_id = line.blocked_on then (
        select count(*) from (
            select 1 from gate_queue l join gate_waiter w on w.queue_id = l.queue_id
            where l.blocked_on = g.gate_id and (w.rank, w.seq) < (wait.rank, wait.seq) limit most) x) end as ahead) a
    where g.gate_id = line.blocked_on or n.need > free_slots(g.gate_id)
    order by g.gate_id = line.blocked_on desc, g.gate_id;
end $$;

-- What keeps a task at a check: the smaller versions, the time, the task of the run before.
create function gate_facts(p_gate_id int, p_need bigint, p_ahead bigint) returns jsonb language plpgsql stable as $$
declare
    g gate;
begin
    select x.* into g from gate x where x.gate_id = p_gate_id;
    case g.kind
    when 'order' then
        return jsonb_build_object('ahead', (select count(*)
                                            from (select 1 from gate_order o
                                                  where o.gate_id = p_gate_id and o.version < p_need limit 10000) x),
            'smaller', (select coalesce(jsonb_agg(jsonb_build_object('version', f.version, 'run_id', f.run_id,
                                                  'dag', d.name, 'task', s.name, 'state', k.state) order by f.version,
                                                  f.run_id, f.idx), '[]')
                        from (select o.* from gate_order o where o.gate_id = p_gate_id and o.version < p_need
                              order by o.version, o.run_id, o.idx limit 5) f
                        join task k on k.run_id = f.run_id and k.idx = f.idx and k.map_index = f.map_index
                        join task_spec s on s.version_id = k.version_id and s.idx = k.idx
                        join run r on r.run_id = f.run_id join dag d on d.dag_id = r.dag_id));
    when 'rate' then
        -- Slots become free in the order in which they were taken, and waiting tasks take them again at once.
        return jsonb_build_object('period', g.period, 'until', (
            select p.until from rate_slot p where p.gate_id = p_gate_id order by p.until, p.seq
            offset p_ahead % g.capacity limit 1) + make_interval(secs => g.period * (p_ahead / g.capacity)));
    else
        return (select jsonb_build_object('run_id', b.run_id, 'task', s.name, 'state', coalesce(k.state, 'waiting'),
                                          'run_state', b.state)
                from run_status b
                join task_spec s on s.version_id = b.version_id and s.idx = split_part(g.name, '/', 2)::int
                left join task k on k.run_id = b.run_id and k.idx = s.idx
                where b.run_id = split_part(g.name, '/', 1)::bigint);
    end case;
end $$;

-- How many of a runner's slots are taken: by what it runs, and by what it observes elsewhere.
create function busy_slots(p_session bigint) returns bigint language plpgsql stable as $$
begin
    return (select count(*) from lease l where l.session = p_session)
        + (select count(*) from dispatch d where d.owner = p_session);
end $$;

-- The runners that serve a queue for a task, how busy they are, which did last, and the patterns of the others.
create function queue_facts(p_queue text, p_version_id int, p_idx int) returns jsonb language sql stable as $$
    select jsonb_build_object('queue', p_queue,
           'others', (select coalesce(jsonb_agg(distinct m.pattern), '[]') from runner x
                      cross join unnest(x.task_patterns) as m(pattern)
                      where p_queue = any(x.queues) and x.ended_at is null and x.request is null
                        and not matches_patterns(x.task_patterns, p_version_id, p_idx)),
           'runners', count(*) filter (where r.ended_at is null and r.request is null),
           'draining', count(*) filter (where r.ended_at is null and r.request is not null),
           'slots', coalesce(sum(r.slots) filter (where r.ended_at is null and r.request is null), 0),
           'busy', coalesce(sum(busy_slots(r.session)) filter (where r.ended_at is null and r.request is null), 0),
           'fleet', fleet_facts(p_queue),
           'last', (select jsonb_build_object('runner', x.runner_id, 'until', x.ended_at) from runner x
                    where p_queue = any(x.queues) and x.ended_at is not null
                      and matches_patterns(x.task_patterns, p_version_id, p_idx) order by x.ended_at desc limit 1))
    from runner r where p_queue = any(r.queues) and matches_patterns(r.task_patterns, p_version_id, p_idx)
$$;

-- What holds back the most work now, over all runs: for each cause how many tasks (or runs) wait for it.
create view blocked as
select 'gate' as kind, g.kind || ' ' || g.name as name, count(*) as waiting, min(w.since) as since,
       jsonb_build_object('gate', g.kind, 'used', g.used, 'capacity', g.capacity, 'holders', gate_holders(g.gate_id, 3))
       || case when g.kind >= 'order' then gate_facts(g.gate_id, min(l.need), 0) else '{}' end as detail
  from gate_queue l join gate_waiter w on w.queue_id = l.queue_id join gate g on g.gate_id = l.blocked_on
 group by g.gate_id
union all
select 'no_runner', x.queue, sum(x.waiting)::bigint, null, queue_facts(x.queue, min(x.version_id), min(x.idx))
  from (select n.queue, n.version_id, n.idx, n.waiting
          from (select q.queue, k.version_id, k.idx, count(*) as waiting
                  from (select y.queue from (select distinct z.queue from ready_task z) y
                         where not is_queue_served_fully(y.queue, 0)) u
                  join ready_task q on q.queue = u.queue
                  join task k on k.run_id = q.run_id and k.idx = q.idx and k.map_index = q.map_index
                 group by q.queue, k.version_id, k.idx) n
         where not is_queue_served(n.queue, n.version_id, n.idx, 0)
        union all
        select l.queue, w.version_id, w.idx, count(*) from gate_queue l join gate_waiter w on w.queue_id = l.queue_id
         where l.queue is not null group by l.queue, w.version_id, w.idx) x
 group by x.queue
union all
select case when d.is_paused then 'dag_paused' else 'run_queued' end, d.name, count(*), min(f.created_at),
       jsonb_build_object('limit', d.max_active_runs, 'active', (
                              select count(*) from run_status a
                               where a.dag_id = d.dag_id and a.state in ('queued', 'running') and a.state = 'running'))
  from run_status r join dag d on d.dag_id = r.dag_id join run f on f.run_id = r.run_id
 where r.state = 'queued' and r.state in ('queued', 'running') group by d.dag_id
union all
select 'dag_paused', d.name, count(*), null, jsonb_build_object('tasks', true) from dag d
  join run_status r on r.dag_id = d.dag_id and r.state = 'running' and r.state in ('queued', 'running')
  join task k on k.run_id = r.run_id and k.state = 'pending' and k.not_before is null where d.is_paused
 group by d.dag_id
union all
select 'retry_line', l.queue, count(*), min(l.due_at), '{}' from retry_queue l group by l.queue
union all
select 'time', 'retries that wait for their time', count(*), null, jsonb_build_object('next', min(w.due_at))
  from task_timer w having count(*) > 0
union all
select 'quarantined', q.kind || ' ' || q.subject_id, 1, q.since, jsonb_build_object('verb', q.verb, 'reason', q.reason)
  from quarantine q where q.retry_at is null or q.retry_at > clock();

-- For `explain_task`: the runner that observes a queued task, how many were queued before it, and the last error.
create function explain_dispatch(p_task task) returns jsonb language plpgsql stable as $$
begin
    return (
        select jsonb_build_object(
            'executor', d.executor, 'queue', d.queue, 'since', d.queued_at, 'tries', coalesce(d.tries, 0), 'tried_at',
                d.tried_at, 'submitted_at', d.submitted_at, 'trouble', d.last_error, 'retry_at', d.retry_at,
            'asked', p_task.request,
            'runner', (select r.runner_id from runner r where r.session = d.owner and r.ended_at is null),
            'has_runner', exists (select 1 from runner r where r.ended_at is null and r.executor = d.executor
                                  and d.queue = any(r.queues)),
            'ahead', (select count(*) from (
                select 1 from dispatch b where b.owner = d.owner and b.submitted_at is null and b.started_at is null
                  and b.queued_at < d.queued_at limit 10000) x))
        from (select) one left join dispatch d on d.run_id = p_task.run_id and d.idx = p_task.idx
            and d.map_index = p_task.map_index and d.epoch = p_task.epoch);
end $$;
