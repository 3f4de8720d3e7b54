-- Queues: how many tasks wait, and which runners serve them.

-- name: depths
-- Skips from queue to queue through the index, and counts each up to the cap: the cost is bounded,
-- however long the queues are.
with recursive line as (
    (select queue from ready order by queue limit 1)
    union all
    select (select r.queue from ready r where r.queue > l.queue order by r.queue limit 1)
      from line l where l.queue is not null
)
select l.queue, (select count(*) from (select 1 from ready r where r.queue = l.queue limit %(cap)s) counted) as depth
  from line l where l.queue is not null limit %(most)s

-- name: list
-- Every queue that has waiting tasks, is served by a live runner, or is the target of a DAG's current version.
-- Depth is counted up to the cap. The first row of each rank has waited longest there.
with recursive line as (
    (select queue from ready order by queue limit 1)
    union all
    select (select r.queue from ready r where r.queue > l.queue order by r.queue limit 1)
      from line l where l.queue is not null
), held as (
    select s.queue, count(*) as running
      from lease l join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
      join task_spec s on s.version_id = k.version_id and s.idx = k.idx group by s.queue
), served as (
    select q.queue, count(*) as runners, count(*) filter (where r.request is not null) as draining,
           count(*) filter (where cardinality(r.match) > 0) as specialised, sum(r.slots) as slots
      from runner r cross join unnest(r.queues) q(queue) where r.gone_at is null group by q.queue
), named as (
    select distinct s.queue from dag d join task_spec s on s.version_id = d.version_id where d.deleted_at is null
), known as (
    select queue from line where queue is not null union select queue from held union select queue from served
    union select queue from named
)
select k.queue, (select count(*) from (select 1 from ready r where r.queue = k.queue limit %(cap)s) counted) as depth,
       (select min(h.offered_at) from generate_series(0, 9) n(rank) cross join lateral (
            select r.offered_at from ready r where r.queue = k.queue and r.rank = n.rank order by r.seq limit 1) h) as
                oldest_at,
       coalesce(h.running, 0) as running, coalesce(s.runners, 0)::int as runners,
           coalesce(s.draining, 0)::int as draining,
       coalesce(s.specialised, 0)::int as specialised, coalesce(s.slots, 0)::int as slots
  from known k left join held h on h.queue = k.queue left join served s on s.queue = k.queue
 order by k.queue limit %(limit)s

-- name: look_in_line
-- For a runner that serves only some tasks: the next rows of each rank of its queues, after its last position.
-- Takes no locks: the runner claims the rows it wants by their position.
select 10 * (n.n - 1) + k.rank as place, r.seq, t.version_id, r.idx,
       extract(epoch from clock() - r.offered_at)::double precision as waited_seconds
  from generate_subscripts(%(queues)s::text[], 1) n(n) cross join generate_series(0, 9) k(rank)
 cross join lateral (
    select q.seq, q.run_id, q.idx, q.map_index, q.offered_at from ready q
     where q.queue = (%(queues)s::text[])[n.n] and q.rank = k.rank
       and q.seq >= (%(begin)s::bigint[])[10 * (n.n - 1) + k.rank + 1]
     order by q.seq limit %(window)s::int) r
 cross join lateral (
    select k.version_id from task k where k.run_id = r.run_id and k.idx = r.idx and k.map_index = r.map_index offset 0)
        t
 order by place, r.seq limit %(window)s::int * 10 * cardinality(%(queues)s::text[])

-- name: names
-- The full names of some tasks of some versions, queried once by each reader that selects tasks by name.
select w.version_id, w.idx, v.dag, s.name as task
  from unnest(%(version_ids)s::int[], %(idxs)s::int[]) w(version_id, idx)
 cross join lateral (
    select s.name from task_spec s where s.version_id = w.version_id and s.idx = w.idx offset 0) s
 cross join lateral (
    select d.name as dag from dag_version v join dag d on d.dag_id = v.dag_id
        where v.version_id = w.version_id offset 0) v

-- name: published
-- The tasks of the current versions and their queues.
select d.name as dag, s.name as task, s.queue
  from dag d join task_spec s on s.version_id = d.version_id where d.deleted_at is null limit %(limit)s
