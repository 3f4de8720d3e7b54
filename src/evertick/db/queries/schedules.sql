-- Schedules: the due ones, and the state of each.

-- name: due
-- By the index of live cursors: rows read are rows due. Oldest first; but if more are due than fit, an eighth of the
-- places is for the latest ones: a fire after a burst does not wait for the burst's end. `half`: only the even or the
-- odd ids, so that two processes never take the same row. Fires of a future instant can be requested ahead of time.
with now as materialized (
    select coalesce(%(until)s::timestamptz, clock()) as t
), oldest as materialized (
    select s.schedule_id, s.version, s.next_due from schedule_state s
     where s.shard = %(shard)s::smallint and s.next_due <= (select t from now) and s.next_due is not null
       and not s.is_paused and s.error is null and s.schedule_id <> all(%(passed_over)s::int[])
       and (%(half)s::int is null or mod(s.schedule_id, 2) = %(half)s::int) order by s.next_due limit %(batch)s::int
), newest as materialized (
    select s.schedule_id, s.version, s.next_due from schedule_state s
     where s.shard = %(shard)s::smallint and s.next_due <= (select t from now) and s.next_due is not null
       and not s.is_paused and s.error is null and s.schedule_id <> all(%(passed_over)s::int[])
       and (%(half)s::int is null or mod(s.schedule_id, 2) = %(half)s::int)
       and s.next_due > (select max(o.next_due) from oldest o having count(*) = %(batch)s::int)
     order by s.next_due desc limit %(batch)s::int / 8
), taken as materialized (
    select * from newest union all select * from oldest limit %(batch)s::int
)
select s.schedule_id, s.version, s.next_due, c.spec::text as spec, c.misfire, c.window_seconds, c.catchup_limit,
       c.overlap, c.start_within, c.finish_within, c.delay_seconds,
       case when c.spec ? 'after' then (select jsonb_agg(jsonb_build_array(p.fire_at, p.key, p.date) order by p.fire_at)
           from (select * from partition_ready x where x.schedule_id = s.schedule_id order by x.fire_at limit 101) p)
           end as ready, (select t from now) as read_at
  from taken s cross join lateral (select * from schedule x where x.schedule_id = s.schedule_id offset 0) c
 order by s.next_due, s.schedule_id

-- name: next_due
-- When to wake up, and the database's time.
select min(next_due), clock() from schedule_state
 where shard = %(shard)s::smallint and next_due is not null and not is_paused and error is null

-- name: of_dag
-- Everything that an edit, a pause or a delete must decide first.
select c.schedule_id, s.version, s.next_due, c.spec::text as spec, c.misfire, c.window_seconds, c.catchup_limit,
       c.overlap, c.start_within, c.finish_within, c.delay_seconds,
       case when c.spec ? 'after' then (select jsonb_agg(jsonb_build_array(p.fire_at, p.key, p.date) order by p.fire_at)
           from (select * from partition_ready x where x.schedule_id = s.schedule_id order by x.fire_at limit 101) p)
           end as ready,
       c.name, c.params, s.is_paused as paused, s.is_paused_directly as is_held, c.origin, s.error
  from schedule c join schedule_state s on s.schedule_id = c.schedule_id join dag d on d.dag_id = c.dag_id
 where d.name = %(dag)s and c.deleted_at is null and (%(name)s::text is null or c.name = %(name)s)
 order by c.schedule_id limit 1000

-- name: running_out
-- Computed schedules whose stored instants end within a day. One with fewer instants has an end of its own.
select d.name as dag, c.name, (c.spec->'times'->>-1)::timestamptz as until
  from schedule c join schedule_state s on s.schedule_id = c.schedule_id join dag d on d.dag_id = c.dag_id
 where c.deleted_at is null and not s.is_paused and c.spec->>'kind' = 'computed'
   and jsonb_array_length(c.spec->'times') >= %(fewest)s::int
   and (c.spec->'times'->>-1)::timestamptz < clock() + interval '1 day' order by until limit 100

-- name: waits
-- The dependencies that start DAGs. Queried when one of them is changed. A deleted schedule has none.
select d.name as dag, c.name, c.origin, c.spec->>'after' as condition
  from (select distinct w.schedule_id from schedule_dependency w) w join schedule c on c.schedule_id = w.schedule_id
  join dag d on d.dag_id = c.dag_id order by d.name, c.name limit 10000

-- name: outlets
-- The assets that the current versions of these DAGs update.
select distinct d.name as dag, o.asset from dag d join task_spec s on s.version_id = d.version_id
  cross join lateral unnest(s.outlets) o(asset)
 where d.name = any(%(dags)s::text[]) limit 100000

-- name: causes
-- The triggers of a run, other than time.
select k.kind, k.name, k.run_id, k.occurred_at, u.updated_by from run r
  join run_trigger k on k.schedule_id = r.schedule_id and k.fire_at = r.fire_at
  left join asset_update u on u.update_id = k.update_id where r.run_id = %(run_id)s order by k.kind, k.name limit 1000

-- name: list_all
select c.schedule_id, d.name as dag, c.name, c.version, c.spec, s.next_due, s.last_fired, s.is_paused as paused,
       s.is_paused_directly as is_held, s.error, c.misfire, c.window_seconds, c.catchup_limit, c.overlap,
       c.start_within, c.finish_within, c.delay_seconds, c.params, c.origin, c.changed_by, c.changed_at, c.deleted_at
  from schedule c join schedule_state s on s.schedule_id = c.schedule_id join dag d on d.dag_id = c.dag_id
 where c.deleted_at is null and (%(dag)s::text is null or d.name = %(dag)s) order by d.name, c.name limit %(limit)s

-- name: of_dags
select c.schedule_id, d.name as dag, c.name, c.version, c.spec, s.next_due, s.last_fired, s.is_paused as paused,
       s.is_paused_directly as is_held, s.error, c.misfire, c.window_seconds, c.catchup_limit, c.overlap,
       c.start_within, c.finish_within, c.delay_seconds, c.params, c.origin, c.changed_by, c.changed_at, c.deleted_at
  from dag d join schedule c on c.dag_id = d.dag_id and c.deleted_at is null
  join schedule_state s on s.schedule_id = c.schedule_id where d.dag_id = any(%(dag_ids)s::int[])
 order by d.name, c.name limit %(limit)s

-- name: page
-- In the order of the DAGs' names and their own, from after one.
select c.schedule_id, d.name as dag, c.name, c.version, c.spec, s.next_due, s.last_fired, s.is_paused as paused,
       s.is_paused_directly as is_held, s.error, c.misfire, c.window_seconds, c.catchup_limit, c.overlap,
       c.start_within, c.finish_within, c.delay_seconds, c.params, c.origin, c.changed_by, c.changed_at, c.deleted_at
  from schedule c join schedule_state s on s.schedule_id = c.schedule_id join dag d on d.dag_id = c.dag_id
 where (%(deleted)s::boolean or (c.deleted_at is null and d.deleted_at is null))
   and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s))
   and (d.name, c.name) > (%(dag)s::text, %(name)s::text) order by d.name, c.name limit %(limit)s

-- name: skips
select d.name as dag, c.name, k.first_at, k.last_at, k.count, k.reason, k.recorded_at
  from skip_record k join schedule c on c.schedule_id = k.schedule_id join dag d on d.dag_id = c.dag_id
 where (%(dag)s::text is null or d.name = %(dag)s) and (%(name)s::text is null or c.name = %(name)s)
   and (%(dag_ids)s::int[] is null or d.dag_id = any(%(dag_ids)s))
   and (%(dag_before)s::text is null or (k.recorded_at, k.first_at, d.name, c.name)
       < (%(recorded_before)s::timestamptz, %(first_before)s::timestamptz, %(dag_before)s, %(name_before)s::text))
 order by k.recorded_at desc, k.first_at desc, d.name desc, c.name desc limit %(limit)s

-- name: history
select v.version, v.change, v.changed_by, v.changed_at, v.origin, v.is_paused_directly as is_held, v.settings
  from schedule_version v join schedule c on c.schedule_id = v.schedule_id join dag d on d.dag_id = c.dag_id
 where d.name = %(dag)s and c.name = %(name)s and v.version < %(before)s::int order by v.version desc limit %(limit)s
