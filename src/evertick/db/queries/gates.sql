-- Gates: the conditions between pending and available, with their holders and waiters.

-- name: list_gates
-- With the numbers of holders, and of known waiters: the tasks in queues that are blocked on it now.
select g.gate_id, g.kind, g.name, g.capacity as slots, g.used, coalesce(h.holders, 0) as holders,
       coalesce(w.waiters, 0) as waiters, case when g.kind = 'order' then free_slots(g.gate_id) end as version,
       g.period,
       g.gate_id || '-' || g.revision as revision
  from gate g
  left join (select x as gate_id, count(*) as holders from gate_holder, unnest(gate_ids) x group by x
             union all
             select o.gate_id, count(*) from gate_order o
               join task k on k.run_id = o.run_id and k.idx = o.idx and k.map_index = o.map_index
              where k.state in ('available', 'queued', 'running') group by o.gate_id) h on h.gate_id = g.gate_id
  left join (select l.blocked_on, count(*) as waiters from gate_queue l join gate_waiter w on w.queue_id = l.queue_id
              group by l.blocked_on) w on w.blocked_on = g.gate_id
 where g.kind::text = any(%(kinds)s::text[]) order by g.kind, g.name limit %(limit)s

-- name: holders
-- An ordered key has no holders: returns its open tasks that have passed it, with their versions.
select h.run_id, h.idx as task_index, h.map_index, d.name as dag, s.name as task, k.state, n.weight, h.since
  from gate_holder h
  cross join lateral (select x.weight::bigint from unnest(h.gate_ids, h.weights) as x(gate_id, weight)
                       where x.gate_id = %(gate_id)s::int
                      union all
                      select o.version from gate_order o
                       where o.gate_id = %(gate_id)s::int and o.run_id = h.run_id and o.idx = h.idx
                         and o.map_index = h.map_index) as n(weight)
  join task k on k.run_id = h.run_id and k.idx = h.idx and k.map_index = h.map_index
  join task_spec s on s.version_id = k.version_id and s.idx = k.idx join run r on r.run_id = h.run_id
  join dag d on d.dag_id = r.dag_id order by h.since, h.run_id, h.idx limit %(limit)s

-- name: waiters
-- In the order in which they are admitted: on an ordered key by version.
select w.run_id, w.idx as task_index, w.map_index, d.name as dag, s.name as task, 'pending' as state, l.need as weight,
       w.since
  from gate_queue l join gate_waiter w on w.queue_id = l.queue_id
  join task_spec s on s.version_id = w.version_id and s.idx = w.idx join run r on r.run_id = w.run_id
  join dag d on d.dag_id = r.dag_id where l.blocked_on = %(gate_id)s::int
 order by (select l.need from gate g where g.gate_id = l.blocked_on and g.kind = 'order'), w.rank, w.seq limit %(limit)s

-- name: outside_pools
-- The tasks that run or are queued and need no pool, counted up to the cap: an index for each task.
with owned as (
    select k.state, k.version_id, k.idx from (select * from lease limit %(cap)s) l
      join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
    union all
    select k.state, k.version_id, k.idx from (select * from ready_task limit %(cap)s) r
      join task k on k.run_id = r.run_id and k.idx = r.idx and k.map_index = r.map_index
)
select count(*) filter (where o.state = 'running') as running, count(*) filter (where o.state <> 'running') as queued
  from owned o
 where not exists (select 1 from task_gate g where g.version_id = o.version_id and g.idx = o.idx and g.kind = 'pool')

-- name: blocked
select kind, name, waiting, since, detail from blocked order by waiting desc, kind, name limit %(limit)s

-- name: describe_pool
insert into pool_description (name, description) values (%(name)s, %(description)s)
on conflict (name) do update set description = excluded.description

-- name: pool_descriptions
select name, description from pool_description where name = any(%(names)s::text[]) order by name limit 10000
