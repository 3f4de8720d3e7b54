-- Runs, tasks and DAGs by many filters, with an offset and a total, for clients that page this way. Each statement
-- reads the same rows twice: for their number, up to a bound, and for a page. By id, and for runs in the orders of the
-- pages below, it reads from an index and ends early; any other order sorts all matches, or is refused.

-- name: runs
-- The ids of one page: the sort carries only what the order needs, and runs_by_number fetches the rest. Each time
-- filter appears twice: exactly, and as the indexes support it, with the matching DAGs `within`.
with found as not materialized (
    select *, %(names)s::jsonb->>state as shown from listed_run
     where (%(dag_id)s::int is null or dag_id = %(dag_id)s)
         and (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s))
       and (%(dags)s::text[] is null or dag = any(%(dags)s))
       and (%(after)s::bigint is null or run_id > %(after)s) and (%(before)s::bigint is null or run_id < %(before)s)
       and (%(states)s::run_state[] is null or status = any(%(states)s))
           and (%(kinds)s::run_kind[] is null or fact_kind = any(%(kinds)s))
       and (%(types)s::text[] is null or run_type = any(%(types)s))
           and (%(causes)s::int[] is null or schedule_id = any(%(causes)s))
       and (%(is_of_run)s::boolean is not true or dag_id = any(%(within)s::int[]))
       and (%(is_of_status)s::boolean is not true or status_dag_id = any(%(within)s::int[]))
       and (%(versions)s::int[] is null or version = any(%(versions)s))
       and (%(due)s::tstzrange is null or due_at <@ %(due)s) and (%(fire)s::tstzrange is null or fire_at <@ %(fire)s)
       and (%(due)s::tstzrange is null or schedule_id = any(%(schedules)s::int[])
                and fire_at between %(due_from)s::timestamptz and %(due_to)s::timestamptz
            or fact_kind = 'backfill' and fire_at between %(due_from)s::timestamptz and %(due_to)s::timestamptz
            or fact_kind = 'manual' and created_at between %(due_from)s::timestamptz and %(due_to)s::timestamptz)
       and (%(fire)s::tstzrange is null or schedule_id = any(%(schedules)s::int[])
                and fire_at between %(fire_from)s::timestamptz and %(fire_to)s::timestamptz
            or fact_kind = 'backfill' and fire_at between %(fire_from)s::timestamptz and %(fire_to)s::timestamptz
            or fact_kind = 'manual' and fire_at between %(fire_from)s::timestamptz and %(fire_to)s::timestamptz)
       and (%(started)s::tstzrange is null or started_at <@ %(started)s)
       and (%(started)s::tstzrange is null or finished_at >= %(started_from)s::timestamptz
            or status in ('queued', 'running'))
       and (%(finished)s::tstzrange is null or finished_at <@ %(finished)s)
       and (%(finished)s::tstzrange is null
            or finished_at between %(finished_from)s::timestamptz and %(finished_to)s::timestamptz)
       and (%(changed)s::tstzrange is null or changed_at <@ %(changed)s)
       and (%(changed)s::tstzrange is null
            or finished_at between %(changed_from)s::timestamptz and %(changed_to)s::timestamptz
            or status in ('queued', 'running'))
       and (%(seconds)s::numrange is null or seconds::numeric <@ %(seconds)s)
       and (%(like)s::text[] is null or text_id ilike any(%(like)s))
           and (%(heads)s::text[] is null or text_id ^@ any(%(heads)s))
       and (%(head)s::text is null or text_id ^@ %(head)s)
       and (%(actor_like)s::text[] is null or split_part(triggered_by, ':', 2) ilike any(%(actor_like)s))
       and (%(actor_heads)s::text[] is null or split_part(triggered_by, ':', 2) ^@ any(%(actor_heads)s))
       and (%(dag_like)s::text[] is null or dag ilike any(%(dag_like)s))
           and (%(dag_heads)s::text[] is null or dag ^@ any(%(dag_heads)s))
       and (%(params_like)s::text[] is null or params::text ilike any(%(params_like)s))
       and (%(keys)s::text[] is null or exists (
            select 1 from run_partition p where p.run_id = listed_run.run_id and p.key = any(%(keys)s)))
       and (%(keys_like)s::text[] is null or exists (
            select 1 from run_partition p where p.run_id = listed_run.run_id and p.key ilike any(%(keys_like)s)))
       and (%(keys_heads)s::text[] is null or exists (
            select 1 from run_partition p where p.run_id = listed_run.run_id and p.key ^@ any(%(keys_heads)s)))
       and (%(partition)s::tstzrange is null or exists (
            select 1 from run_partition p where p.run_id = listed_run.run_id and p.date <@ %(partition)s))
       and (%(asset_like)s::text[] is null or exists (
            select 1 from run_trigger c where c.schedule_id = listed_run.schedule_id and c.fire_at = listed_run.fire_at
                and c.kind in ('asset', 'alias')
               and c.name ilike any(%(asset_like)s)))
)
select (select count(*) from (select from found limit %(most)s) x) as total, array(select p.run_id from (
/* page */
    select run_id from found order by /* order */ run_id limit %(limit)s offset %(offset)s
/* page */
    ) p) as run_ids

-- name: runs_by_number
-- In the order of the ids. Separate from finding them, because this is planned once, and that anew for every query.
select l.run_id, l.dag_id, l.dag, l.version_id, l.version, l.version_created_at, l.text_id, l.run_type, l.fire_at,
    l.due_at, l.created_at, l.started_at, l.finished_at, l.seconds, l.state, l.reason, l.params, l.triggered_by, l.note,
    p.key as partition_key, p.date as partition_date
  from unnest(%(run_ids)s::bigint[]) with ordinality k(run_id, place) join listed_run l on l.run_id = k.run_id
  left join run_partition p on p.run_id = k.run_id
      order by k.place limit 100000

-- Pages of `runs` in an order that an index knows: each takes the place of its page, and reads `found` for listed_run.
-- An index knows the order within a DAG, so a page is read of each DAG: DAGs are few, runs are not.

-- name: dags_of_runs
select dag_id from dag
 where (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s)) and (%(dags)s::text[] is null or name = any(%(dags)s))
   and (%(dag_like)s::text[] is null or name ilike any(%(dag_like)s))
       and (%(dag_heads)s::text[] is null or name ^@ any(%(dag_heads)s)) order by dag_id limit 100000

-- name: schedules_of
-- The schedules of these DAGs, deleted ones included: their runs still exist.
select c.schedule_id from schedule c where c.dag_id = any(%(within)s::int[]) order by c.schedule_id limit 1000000

-- name: schedules_with_causes
-- Each once: skips from one to the next in the index, however many triggers each has.
with recursive found(schedule_id) as (
    select min(schedule_id) from run_trigger
    union all
    select (select min(c.schedule_id) from run_trigger c where c.schedule_id > f.schedule_id) from found f
        where f.schedule_id is not null
)
select schedule_id from found where schedule_id is not null limit 1000000

-- name: runs_of_texts
-- The ids of runs by text, probed in each DAG: the index on texts is per DAG.
select r.run_id from unnest(%(within)s::int[]) g(dag_id) cross join unnest(%(text_ids)s::text[]) t(text_id)
  cross join lateral (select x.run_id from run x
                       where x.dag_id = g.dag_id
                         and run_display_id(x.key, x.kind, coalesce(x.fire_at, x.created_at), x.run_id) = t.text_id
                       offset 0) r
 limit 100000

-- name: page_of_few
-- In any order. The fence (offset 0) prevents a scan of an index in that order until enough rows match, maybe never.
select f.run_id from (select * from listed_run offset 0) f order by /* order */ run_id limit %(limit)s offset %(offset)s

-- name: page_by_dag
select x.run_id from unnest(%(within)s::int[]) g(dag_id) join dag d on d.dag_id = g.dag_id
  cross join lateral (select f.run_id from listed_run f where f.dag_id = g.dag_id order by f.run_id limit %(reach)s) x
 order by d.name /* way */, x.run_id limit %(limit)s offset %(offset)s

-- name: page_by_text
select x.run_id from unnest(%(within)s::int[]) g(dag_id)
  cross join lateral (select f.run_id, f.text_id from listed_run f
                       where f.dag_id = g.dag_id order by f.text_id /* way */ limit %(reach)s) x
 order by x.text_id /* way */, x.run_id limit %(limit)s offset %(offset)s

-- name: page_by_due
-- Scheduled ones by schedule, the others by DAG.
select x.run_id
  from (select s.run_id, s.at from unnest(%(schedules)s::int[]) c(schedule_id)
          cross join lateral (select f.run_id, f.fire_at as at from listed_run f
                               where f.schedule_id = c.schedule_id order by f.fire_at /* way */ limit %(reach)s) s
        union all
        select o.run_id, o.at from unnest(%(within)s::int[]) g(dag_id)
          cross join lateral ((select f.run_id, f.fire_at as at from listed_run f
                                where f.dag_id = g.dag_id and f.fact_kind = 'backfill'
                                order by f.fire_at /* way */, f.run_id limit %(reach)s)
                              union all
                              (select f.run_id, f.created_at from listed_run f
                                where f.dag_id = g.dag_id and f.fact_kind = 'manual'
                                order by f.created_at /* way */, f.run_id limit %(reach)s)) o) x
 order by x.at /* way */, x.run_id limit %(limit)s offset %(offset)s

-- name: page_by_fire
-- Runs without a logical date come last, and are read only if others are not enough. Then they are many, or few in all.
with known as materialized (
    select x.run_id, x.at
      from (select s.run_id, s.at from unnest(%(schedules)s::int[]) c(schedule_id)
              cross join lateral (select f.run_id, f.fire_at as at from listed_run f
                                   where f.schedule_id = c.schedule_id order by f.fire_at /* way */ limit %(reach)s) s
            union all
            select o.run_id, o.at from unnest(%(within)s::int[]) g(dag_id)
              cross join lateral ((select f.run_id, f.fire_at as at from listed_run f
                                    where f.dag_id = g.dag_id and f.fact_kind = 'backfill'
                                    order by f.fire_at /* way */, f.run_id limit %(reach)s)
                                  union all
                                  (select f.run_id, f.fire_at from listed_run f
                                    where f.dag_id = g.dag_id and f.fact_kind = 'manual' and f.fire_at is not null
                                    order by f.fire_at /* way */, f.run_id limit %(reach)s)) o) x
     order by x.at /* way */, x.run_id limit %(reach)s
)
select x.run_id
  from (select k.run_id, k.at from known k
        union all
        (select f.run_id, null::timestamptz from listed_run f
          where f.fire_at is null order by f.run_id limit greatest(%(reach)s - (select count(*) from known), 0))) x
 order by x.at /* way */ nulls last, x.run_id limit %(limit)s offset %(offset)s

-- name: page_by_end
-- Open ones come last.
with closed as materialized (
    select x.run_id, x.at
      from unnest(%(within)s::int[]) g(dag_id) cross join lateral (
        select f.run_id, f.finished_at as at from listed_run f
         where f.status_dag_id = g.dag_id and f.finished_at is not null order by f.finished_at /* way */, f.run_id
             limit %(reach)s) x
     order by x.at /* way */, x.run_id limit %(reach)s
)
select x.run_id
  from (select k.run_id, k.at from closed k
        union all
        (select f.run_id, null::timestamptz from listed_run f where f.status in ('queued', 'running')
            and f.finished_at is null order by f.run_id limit greatest(%(reach)s - (select count(*) from closed), 0))) x
 order by x.at /* way */ nulls last, x.run_id limit %(limit)s offset %(offset)s

-- name: page_by_change
-- A finished run last changed at its end.
select x.run_id
  from (select c.run_id, c.at from unnest(%(within)s::int[]) g(dag_id)
          cross join lateral (select f.run_id, f.finished_at as at from listed_run f
                               where f.status_dag_id = g.dag_id and f.finished_at is not null
                               order by f.finished_at /* way */, f.run_id limit %(reach)s) c
        union all
        select f.run_id, f.changed_at from listed_run f
         where f.status in ('queued', 'running') and f.finished_at is null) x
 order by x.at /* way */, x.run_id limit %(limit)s offset %(offset)s

-- name: page_by_start
-- The latest first. A run ends after its start: a finished run that started after some instant also ended after it.
-- `edge` is an instant after which enough runs have started, found among the last ones to end; among twice as many, so
-- that one long run does not move it far back. The comparison with infinity tells the planner that few ended since.
with closed as materialized (
    select x.run_id, x.at
      from unnest(%(within)s::int[]) g(dag_id)
      cross join lateral (
        select coalesce((
            select n.started_at
              from (select f.started_at from listed_run f where f.status_dag_id = g.dag_id and f.finished_at is not null
                    and f.started_at is not null order by f.finished_at desc limit 2 * %(reach)s) n
             order by n.started_at desc limit 1 offset %(reach)s - 1), '-infinity') as at) edge
      cross join lateral (
        select f.run_id, f.started_at as at from listed_run f
         where f.status_dag_id = g.dag_id and f.finished_at between edge.at and 'infinity' and f.started_at is not null
         order by f.started_at desc, f.run_id limit %(reach)s) x
    union all
    select f.run_id, f.started_at from listed_run f where f.status in ('queued', 'running') and f.finished_at is null
        and f.started_at is not null
)
select x.run_id
  from (select k.run_id, k.at from closed k
        union all
        (select f.run_id, null::timestamptz from listed_run f where f.started_at is null
          order by f.run_id limit greatest(%(reach)s - (select count(*) from closed), 0))) x
 order by x.at desc nulls last, x.run_id limit %(limit)s offset %(offset)s

-- name: tasks
with found as not materialized (
    select *, %(names)s::jsonb->>phase as shown, %(kinds)s::jsonb->>kind as operator from listed_task
     where (%(run_id)s::bigint is null or run_id = %(run_id)s)
       and (%(run_ids)s::bigint[] is null or run_id = any(%(run_ids)s))
       and (%(dag_id)s::int is null or dag_id = %(dag_id)s)
       and (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s))
       and (%(dags)s::text[] is null or dag = any(%(dags)s)) and (%(groups)s::text[] is null or task ^@ any(%(groups)s))
       and (%(after)s::bigint[] is null or (run_id, idx, map_index) > ((%(after)s)[1], (%(after)s)[2], (%(after)s)[3]))
       and (%(before)s::bigint[] is null
            or (run_id, idx, map_index) < ((%(before)s)[1], (%(before)s)[2], (%(before)s)[3]))
       and (%(is_live)s::boolean is not true or run_status in ('queued', 'running'))
       and (%(is_mapped)s::boolean is null or (map_index >= 0) = %(is_mapped)s)
       and (%(tasks)s::text[] is null or task = any(%(tasks)s))
       and (%(text_ids)s::text[] is null or text_id = any(%(text_ids)s))
       and (%(states)s::text[] is null or coalesce(%(names)s::jsonb->>phase, 'none') = any(%(states)s))
       and (%(plain_states)s::task_state[] is null or task_status = any(%(plain_states)s))
       and (%(pools)s::text[] is null or coalesce(pool, %(no_pool)s) = any(%(pools)s))
       and (%(pool_like)s::text[] is null or coalesce(pool, %(no_pool)s) ilike any(%(pool_like)s))
       and (%(pool_heads)s::text[] is null or coalesce(pool, %(no_pool)s) ^@ any(%(pool_heads)s))
       and (%(queues)s::text[] is null or queue = any(%(queues)s))
       and (%(queue_like)s::text[] is null or queue ilike any(%(queue_like)s))
       and (%(queue_heads)s::text[] is null or queue ^@ any(%(queue_heads)s))
       and (%(operators)s::text[] is null or %(kinds)s::jsonb->>kind = any(%(operators)s))
       and (%(operator_like)s::text[] is null or %(kinds)s::jsonb->>kind ilike any(%(operator_like)s))
       and (%(operator_heads)s::text[] is null or %(kinds)s::jsonb->>kind ^@ any(%(operator_heads)s))
       and (%(versions)s::int[] is null or version = any(%(versions)s))
       and (%(tries)s::int[] is null or tries = any(%(tries)s))
       and (%(map_indexes)s::int[] is null or map_index = any(%(map_indexes)s))
       and (%(due)s::tstzrange is null or due_at <@ %(due)s) and (%(fire)s::tstzrange is null or fire_at <@ %(fire)s)
       and (%(started)s::tstzrange is null or started_at <@ %(started)s)
       and (%(finished)s::tstzrange is null or finished_at <@ %(finished)s)
       and (%(changed)s::tstzrange is null or changed_at <@ %(changed)s)
       and (%(seconds)s::numrange is null or seconds::numeric <@ %(seconds)s)
       and (%(like)s::text[] is null or task ilike any(%(like)s))
       and (%(heads)s::text[] is null or task ^@ any(%(heads)s))
       and (%(run_like)s::text[] is null or text_id ilike any(%(run_like)s))
       and (%(run_heads)s::text[] is null or text_id ^@ any(%(run_heads)s))
       and (%(dag_like)s::text[] is null or dag ilike any(%(dag_like)s))
       and (%(dag_heads)s::text[] is null or dag ^@ any(%(dag_heads)s))
)
select t.total, f.* from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (select run_id, dag_id, dag, version_id, version, version_created_at, text_id, fire_at, due_at, idx,
                            map_index, task, queue, priority, max_attempts, phase, attempt, tries, started_at,
                            finished_at, seconds, reason, host, note, pool, slots, map_name
                       from found order by /* order */ run_id, idx, map_index limit %(limit)s offset %(offset)s) f
      on true

-- name: specs_of_tasks
-- The versions that pass a filter of tasks; with `is_of_tasks` each with a position in it.
select case when %(is_of_tasks)s then (v.version_id::bigint << 32) + s.idx else v.version_id end as spec
  from dag_version v join dag d on d.dag_id = v.dag_id
  left join task_spec s on %(is_of_tasks)s and s.version_id = v.version_id
 where (%(dag_id)s::int is null or v.dag_id = %(dag_id)s)
     and (%(dag_ids)s::int[] is null or v.dag_id = any(%(dag_ids)s))
   and (%(dags)s::text[] is null or d.name = any(%(dags)s))
   and (%(dag_like)s::text[] is null or d.name ilike any(%(dag_like)s))
       and (%(dag_heads)s::text[] is null or d.name ^@ any(%(dag_heads)s))
   and (%(versions)s::int[] is null or v.number = any(%(versions)s))
   and (%(tasks)s::text[] is null or s.name = any(%(tasks)s))
       and (%(queues)s::text[] is null or s.queue = any(%(queues)s))
   and (%(groups)s::text[] is null or s.name ^@ any(%(groups)s))
   and (%(like)s::text[] is null or s.name ilike any(%(like)s))
       and (%(heads)s::text[] is null or s.name ^@ any(%(heads)s)) limit %(limit)s

-- name: task_rows
-- As `all_tasks`, for tasks with a row, filtered by the row's own columns: the rest is looked up for one page. With the
-- joins in between a million runs were hashed to count ten thousand tasks. Rows of a deleted run remain for a while.
with found as not materialized (
    select k.run_id, k.idx, k.map_index from task k
      cross join lateral (select from run_status b where b.run_id = k.run_id offset 0) b
     where (%(plain_states)s::task_state[] is null or k.state = any(%(plain_states)s))
       and (%(version_ids)s::int[] is null or k.version_id = any(%(version_ids)s))
       and (%(places)s::bigint[] is null or (k.version_id::bigint << 32) + k.idx = any(%(places)s))
       and (%(started)s::tstzrange is null or k.started_at <@ %(started)s)
       and (%(finished)s::tstzrange is null or k.finished_at <@ %(finished)s)
       and (%(is_mapped)s::boolean is null or (k.map_index >= 0) = %(is_mapped)s)
       and (%(map_indexes)s::int[] is null or k.map_index = any(%(map_indexes)s))
       and (%(after)s::bigint[] is null
            or (k.run_id, k.idx, k.map_index) > ((%(after)s)[1], (%(after)s)[2], (%(after)s)[3]))
       and (%(before)s::bigint[] is null
            or (k.run_id, k.idx, k.map_index) < ((%(before)s)[1], (%(before)s)[2], (%(before)s)[3]))
)
select t.total, f.* from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (
      select l.run_id, l.dag_id, l.dag, l.version_id, l.version, l.version_created_at, l.text_id, l.fire_at, l.due_at,
             l.idx, l.map_index, l.task, l.queue, l.priority, l.max_attempts, l.phase, l.attempt, l.tries, l.started_at,
             l.finished_at, l.seconds, l.reason, l.host, l.note, l.pool, l.slots, l.map_name
        from (select p.*, row_number() over () as place
                from (select * from found
                       where t.total > 0 or %(most)s = 0 order by /* order */ run_id, idx, map_index
                       limit %(limit)s offset %(offset)s) p) k
        cross join lateral (select * from listed_task x
                             where x.run_id = k.run_id and x.idx = k.idx and x.row_map_index = k.map_index offset 0) l
       order by k.place) f on true

-- name: dags
with found as not materialized (
    select * from listed_dag
     where (%(seen_tags)s::text[] is null or tags && %(seen_tags)s)
       and (%(any_tags)s::text[] is null or tags && %(any_tags)s)
       and (%(all_tags)s::text[] is null or tags @> %(all_tags)s)
       and (%(owners)s::text[] is null or coalesce(spec->>'owner', 'evertick') = any(%(owners)s))
       and (%(paused)s::boolean is null or paused = %(paused)s)
       and (%(is_broken)s::boolean is null or is_broken = %(is_broken)s)
       and (%(like)s::text[] is null or dag ilike any(%(like)s))
       and (%(heads)s::text[] is null or dag ^@ any(%(heads)s))
       and (%(name_like)s::text[] is null or dag ilike any(%(name_like)s))
       and (%(name_heads)s::text[] is null or dag ^@ any(%(name_heads)s))
       and (%(last_states)s::text[] is null or last_state = any(%(last_states)s))
       and (%(last_started)s::tstzrange is null or last_started_at <@ %(last_started)s)
       and (%(last_finished)s::tstzrange is null or last_finished_at <@ %(last_finished)s)
       and (%(has_assets)s::boolean is null or (cardinality(assets) > 0) = %(has_assets)s)
       and (%(asset_like)s::text[] is null or exists (select 1 from unnest(assets) a where a ilike any(%(asset_like)s)))
)
select t.total, f.* from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (select dag from found order by /* order */ dag limit %(limit)s offset %(offset)s) f on true

-- name: run_by_number
select l.run_id, l.dag_id, dag, version_id, version, version_created_at, text_id, run_type, fire_at,
       coalesce((select w.start_at from delayed_run w where w.run_id = %(run_id)s::bigint), due_at) as due_at,
       created_at, started_at, finished_at, seconds, state, reason, params, triggered_by, note,
       p.key as partition_key, p.date as partition_date
  from listed_run l left join run_partition p on p.run_id = l.run_id
 where l.dag_id = %(dag_id)s and l.run_id = %(run_id)s::bigint

-- name: run_of_key
select run_id from run where dag_id = %(dag_id)s and key = %(key)s

-- name: tasks_of
-- Some tasks of one run, by their positions in it, with the columns of the run's task list.
select t.run_id, t.dag_id, t.dag, t.version_id, t.version, t.version_created_at, t.text_id, t.fire_at, t.due_at, t.idx,
       t.map_index, t.task, t.queue, t.priority, t.max_attempts, t.phase, t.attempt, t.tries, t.started_at,
       t.finished_at, t.seconds, t.reason, t.host, t.note, t.pool, t.slots, t.map_name
  from listed_task t where t.run_id = %(run_id)s and t.idx = any(%(idxs)s::int[]) order by t.idx, t.map_index
 limit %(limit)s

-- name: active_runs
-- The number of a DAG's open runs.
select count(*) from run_status r where r.dag_id = %(dag_id)s and r.state in ('queued', 'running')

-- name: note
select content, written_by, written_at from note where run_id = %(run_id)s and idx = %(idx)s
    and map_index = %(map_index)s

-- name: tags
-- The tags of the DAGs that the caller may see.
select distinct x.tag from listed_dag d cross join lateral unnest(d.tags) x(tag)
 where %(seen_tags)s::text[] is null or d.tags && %(seen_tags)s order by x.tag limit 100000

-- name: count_runs
-- The number of runs of each of some DAGs in each state: reads all of them.
select d.name, s.state::text as state, count(*) as count from run_status s join dag d on d.dag_id = s.dag_id
 where d.name = any(%(dags)s::text[]) group by d.name, s.state order by d.name, s.state limit 100000

-- Return values and named outputs of tasks: listed by many filters, and set by hand.

-- name: list
-- With the position of each in its run; the values are read one by one.
with found as not materialized (
    select * from listed_output
     where (%(run_id)s::bigint is null or run_id = %(run_id)s) and (%(dag_id)s::int is null or dag_id = %(dag_id)s)
       and (%(dag_ids)s::int[] is null or dag_id = any(%(dag_ids)s))
       and (%(text_ids)s::text[] is null or text_id = any(%(text_ids)s))
       and (%(tasks)s::text[] is null or task = any(%(tasks)s))
       and (%(map_indexes)s::int[] is null or map_index = any(%(map_indexes)s))
       and (%(keys)s::text[] is null or coalesce(key, %(returned)s) = any(%(keys)s))
       and (%(key_like)s::text[] is null or coalesce(key, %(returned)s) ilike any(%(key_like)s))
       and (%(key_heads)s::text[] is null or coalesce(key, %(returned)s) ^@ any(%(key_heads)s))
       and (%(like)s::text[] is null or task ilike any(%(like)s))
       and (%(heads)s::text[] is null or task ^@ any(%(heads)s))
       and (%(run_like)s::text[] is null or text_id ilike any(%(run_like)s))
       and (%(run_heads)s::text[] is null or text_id ^@ any(%(run_heads)s))
       and (%(dag_like)s::text[] is null or dag ilike any(%(dag_like)s))
       and (%(dag_heads)s::text[] is null or dag ^@ any(%(dag_heads)s))
       and (%(due)s::tstzrange is null or due_at <@ %(due)s) and (%(fire)s::tstzrange is null or fire_at <@ %(fire)s)
)
select t.total, f.* from (select count(*) as total from (select from found limit %(most)s) x) t
  left join lateral (select run_id, dag, text_id, fire_at, due_at, idx, map_index, task, started_at, finished_at, key
                       from found order by /* order */ run_id, idx, map_index, key nulls first
                      limit %(limit)s offset %(offset)s) f on true
