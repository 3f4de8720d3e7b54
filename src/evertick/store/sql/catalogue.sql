-- The DAG catalogue: a page in name order, with the states of the newest runs.

-- name: page
-- From after a name. Only the listed parts of the spec: a large DAG must not slow it down. The newest run is read only
-- if requested.
select d.dag_id, d.name, d.paused, v.number as version, v.task_count, coalesce(v.spec->'tags', '[]') as tags,
       left(v.spec->>'description', 300) as description, d.file
  from dag d join dag_version v on v.version_id = d.version_id
 where d.deleted_at is null and d.name > %(after)s and (%(tags)s::text[] is null or v.spec->'tags' ?| %(tags)s)
   and (%(tag)s::text is null or v.spec->'tags' ? %(tag)s)
   and (%(like)s::text is null or d.name ilike %(like)s) and (%(paused)s::boolean is null or d.paused = %(paused)s)
   and (%(newest)s::run_state is null or %(newest)s = (
       select s.state from run_status s
        where s.run_id = (select n.run_id from run n where n.dag_id = d.dag_id order by n.run_id desc limit 1)))
 order by d.name limit %(limit)s

-- name: sorted_page
-- In another order than by name: each matching DAG costs one or two index probes, and only the page's specs are read.
select d.dag_id, d.name, d.paused, v.number as version, v.task_count, coalesce(v.spec->'tags', '[]') as tags,
       left(v.spec->>'description', 300) as description, d.file
  from (select f.dag_id, f.name, f.weight from (
            select g.dag_id, g.name, case %(by)s::text
                when 'next' then (select min(extract(epoch from s.next_due)) from schedule c
                                  join schedule_state s on s.schedule_id = c.schedule_id
                                   where c.dag_id = g.dag_id and c.deleted_at is null and not s.paused
                                       and s.error is null)
                when 'newest' then (select extract(epoch from n.created_at) from run n where n.dag_id = g.dag_id
                                    order by n.run_id desc limit 1)
                when 'took' then (select extract(epoch from coalesce(s.finished_at, clock()) - s.started_at)
                                    from (select n.run_id from run n where n.dag_id = g.dag_id order by n.run_id desc
                                          limit 1) w
                                    join run_status s on s.run_id = w.run_id)
                end as weight
              from dag g join dag_version x on x.version_id = g.version_id
             where g.deleted_at is null and (%(tags)s::text[] is null or x.spec->'tags' ?| %(tags)s)
               and (%(tag)s::text is null or x.spec->'tags' ? %(tag)s)
               and (%(like)s::text is null or g.name ilike %(like)s)
                   and (%(paused)s::boolean is null or g.paused = %(paused)s)
               and (%(newest)s::run_state is null or %(newest)s = (
                   select s.state from run_status s
                    where s.run_id = (select n.run_id from run n where n.dag_id = g.dag_id order by n.run_id desc
                                      limit 1)))) f
         order by case when %(is_down)s then -f.weight else f.weight end nulls last,
                  case when not %(is_down)s then f.name end, case when %(is_down)s then f.name end desc
         limit %(limit)s offset %(offset)s) p
  join dag d on d.dag_id = p.dag_id join dag_version v on v.version_id = d.version_id
 order by case when %(is_down)s then -p.weight else p.weight end nulls last,
          case when not %(is_down)s then p.name end, case when %(is_down)s then p.name end desc

-- name: newest_runs
-- One index probe per DAG.
select r.dag_id, s.run_id, s.state, r.created_at, r.fire_at, s.started_at, s.finished_at
  from unnest(%(dag_ids)s::int[]) w(dag_id)
 cross join lateral (select n.run_id, n.dag_id, n.created_at, n.fire_at from run n where n.dag_id = w.dag_id
                     order by n.run_id desc limit %(each)s) r
 cross join lateral (select * from run_status x where x.run_id = r.run_id offset 0) s
 order by r.dag_id, s.run_id

-- name: next_fires
-- For each DAG its next schedule, or one that depends on something other than time.
select distinct on (c.dag_id) c.dag_id, c.name, c.spec, s.next_due, s.paused, s.error
  from schedule c join schedule_state s on s.schedule_id = c.schedule_id
 where c.dag_id = any(%(dag_ids)s::int[]) and c.deleted_at is null
 order by c.dag_id, s.next_due nulls last, c.name limit cardinality(%(dag_ids)s::int[])

-- name: grid
-- The newest runs of a DAG, before one run.
select r.run_id, v.number as version, r.kind, r.fire_at, r.created_at, s.state, s.started_at, s.finished_at,
       v.task_count + s.extra_tasks as task_count
  from (select n.run_id from run n where n.dag_id = %(dag_id)s and n.run_id < %(before)s::bigint order by n.run_id desc
        limit %(limit)s) w
  join run r on r.run_id = w.run_id join run_status s on s.run_id = w.run_id
      join dag_version v on v.version_id = r.version_id
 order by r.run_id desc

-- name: cells
-- The tasks of these runs by name, with the instances of a mapped task combined: how many are in each state.
select k.run_id, s.name as task, k.state::text as state, count(*) as count, bool_or(k.map_index >= 0) as is_mapped,
       min(k.started_at) as started_at, max(k.finished_at) as finished_at, max(k.attempt) as attempt
  from unnest(%(run_ids)s::bigint[]) w(run_id)
 cross join lateral (select * from task x where x.run_id = w.run_id offset 0) k
  join task_spec s on s.version_id = k.version_id and s.idx = k.idx
 group by k.run_id, s.name, k.state
 limit %(limit)s

-- name: group_retries
-- The groups of these runs that were retried as a whole. Queried only for DAGs with such groups.
select g.run_id, w.name, g.retried
  from unnest(%(run_ids)s::bigint[]) r(run_id)
 cross join lateral (select * from run_group x where x.run_id = r.run_id and x.retried > 0 offset 0) g
 cross join lateral (select x.version_id from run_status x where x.run_id = g.run_id offset 0) s
  join retry_group w on w.version_id = s.version_id and w.grp = g.grp
 limit 10000
