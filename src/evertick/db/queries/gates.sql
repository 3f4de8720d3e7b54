-- Gates: the conditions between pending and available, with their holders and waiters.

-- name: set_pool
select is_new, admitted from set_pool(%(name)s::text, %(slots)s::int, %(actor)s::text)

-- name: delete_pool
select delete_pool(%(name)s::text, %(actor)s::text)

-- name: tend
select admitted, next_opening from admit_gated_tasks(%(shard)s::smallint, %(epoch)s::bigint, %(batch)s::int)

-- name: unadmit
select release_admissions(%(shard)s::smallint, %(epoch)s::bigint, %(grace)s::double precision, %(batch)s::int)

-- name: reconcile
select last_gate_id, drifted, admitted
  from reconcile_gates(%(shard)s::smallint, %(epoch)s::bigint, %(after)s::int, %(batch)s::int)

-- name: list
-- With the number of tasks that hold each gate, and of the known waiters: the tasks in queues that are blocked on it
-- now.
select g.gate_id, g.kind, g.name, g.capacity, g.used, coalesce(h.holders, 0) as holders,
    coalesce(w.waiters, 0) as waiters,
       case when g.kind = 'order' then free_slots(g.gate_id) end as version, g.period
  from gate g
  left join (select x as gate_id, count(*) as holders from gate_holder, unnest(gate_ids) x group by x
             union all
             select o.gate_id, count(*) from gate_order o
               join task k on k.run_id = o.run_id and k.idx = o.idx and k.map_index = o.map_index
              where k.state in ('available', 'queued', 'running') group by o.gate_id) h on h.gate_id = g.gate_id
  left join (select l.blocked_on, count(*) as waiters from gate_queue l join gate_waiter w on w.line_id = l.line_id
              group by l.blocked_on) w on w.blocked_on = g.gate_id
 where g.kind::text = any(%(kinds)s::text[])
 order by g.kind, g.name limit %(limit)s

-- name: holders
-- An ordered key has no holders: returns its open tasks that have passed it, with their versions.
select h.run_id, h.idx, h.map_index, d.name as dag, s.name as task, k.state, n.weight, h.since
  from gate_holder h
  cross join lateral (select x.weight::bigint from unnest(h.gate_ids, h.weights) as x(gate_id, weight)
                       where x.gate_id = %(gate_id)s::int
                      union all
                      select o.version from gate_order o where o.gate_id = %(gate_id)s::int and o.run_id = h.run_id
                         and o.idx = h.idx and o.map_index = h.map_index) as n(weight)
  join task k on k.run_id = h.run_id and k.idx = h.idx and k.map_index = h.map_index
  join task_spec s on s.version_id = k.version_id and s.idx = k.idx
  join run r on r.run_id = h.run_id join dag d on d.dag_id = r.dag_id
 order by h.since, h.run_id, h.idx limit %(limit)s

-- name: waiters
-- In the order in which they are admitted: on an ordered key by version.
select w.run_id, w.idx, w.map_index, d.name as dag, s.name as task, 'pending' as state, l.need as weight, w.since
  from gate_queue l
  join gate_waiter w on w.line_id = l.line_id
  join task_spec s on s.version_id = w.version_id and s.idx = w.idx
  join run r on r.run_id = w.run_id join dag d on d.dag_id = r.dag_id
 where l.blocked_on = %(gate_id)s::int
 order by (select l.need from gate g where g.gate_id = l.blocked_on and g.kind = 'order'), w.rank, w.seq limit %(limit)s

-- name: why
-- In the order of the function's result, the most binding first.
select kind, detail from explain_task(%(run_id)s::bigint, %(idx)s::int, %(map_index)s::int) limit 100

-- name: blocked
select kind, name, waiting, since, detail from blocked order by waiting desc, kind, name limit %(limit)s

-- name: describe_pool
insert into pool_description (name, description) values (%(name)s, %(description)s)
on conflict (name) do update set description = excluded.description

-- name: pool_descriptions
select name, description from pool_description where name = any(%(names)s::text[]) order by name limit 10000
