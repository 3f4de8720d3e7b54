-- Backfills: created and controlled by users, advanced by the leader.

-- name: position
-- The data for planning the next step; only for a backfill that could create a run.
select spec::text as spec, first_at, last_at, position, newest_first, state = 'running'
    and not is_planned as is_planning
  from backfill where backfill_id = %(backfill_id)s::int

-- name: find
select b.backfill_id, d.name as dag, c.name as schedule, b.spec, b.params, b.first_at, b.last_at, b.reprocess,
       b.newest_first, b.parallel, b.state, b.reason, b.position, b.total, b.skipped as left_alone, b.created as made,
       b.open_runs, b.succeeded, b.failed, b.canceled, b.created_by, b.created_at, b.finished_at,
       d.is_paused as is_dag_paused
  from backfill b join dag d on d.dag_id = b.dag_id left join schedule c on c.schedule_id = b.schedule_id
 where b.backfill_id = %(backfill_id)s::int

-- name: list_newest
select b.backfill_id, d.name as dag, c.name as schedule, b.spec, b.params, b.first_at, b.last_at, b.reprocess,
       b.newest_first, b.parallel, b.state, b.reason, b.position, b.total, b.skipped as left_alone, b.created as made,
       b.open_runs, b.succeeded, b.failed, b.canceled, b.created_by, b.created_at, b.finished_at,
       d.is_paused as is_dag_paused
  from backfill b join dag d on d.dag_id = b.dag_id left join schedule c on c.schedule_id = b.schedule_id
 where (%(dag)s::text is null or d.name = %(dag)s::text) and b.backfill_id < %(before)s::bigint
   and (%(dag_ids)s::int[] is null or b.dag_id = any(%(dag_ids)s)) order by b.backfill_id desc limit %(limit)s

-- name: existing
-- For a preview: the newest run of each of some instants, or partitions; no row for one without a run.
select i.instant, n.state::text as state
  from unnest(%(instants)s::timestamptz[]) with ordinality i(instant, place)
  cross join lateral newest_run_for(%(dag_id)s::int, %(schedule_id)s::int, i.instant,
                                    (%(keys)s::text[])[i.place]) n
 where n.run_id is not null order by i.instant limit 10000

-- name: failed_runs
-- The latest failed runs, for people.
select r.run_id, r.fire_at from backfill_run r
  cross join lateral (select x.state from run_status x where x.run_id = r.run_id offset 0) s
 where r.backfill_id = %(backfill_id)s::int and s.state = 'failed' order by r.run_id desc limit %(limit)s
