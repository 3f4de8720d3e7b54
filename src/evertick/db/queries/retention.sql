-- Retention: finds rows that are old enough, and deletes them by the functions of the migration that defines them.

-- name: walk_runs
-- From the oldest on, by the key: ids rise with time, so the walk ends where young rows begin. Open runs come again.
select r.run_id as id, r.created_at,
       case when s.state in ('success', 'failed', 'canceled') then s.finished_at end as ended_at
  from run r join run_status s on s.run_id = r.run_id where r.run_id > %(after)s::bigint order by r.run_id
 limit %(batch)s::int

-- name: walk_journal
select entry_id as id, occurred_at as created_at, occurred_at as ended_at
  from audit_log where entry_id > %(after)s::bigint order by entry_id limit %(batch)s::int

-- name: run_at_or_above
-- For a binary search: the id at an instant.
select run_id as id, created_at, null::timestamptz as ended_at from run where run_id >= %(run_id)s::bigint
 order by run_id limit 1

-- name: newest_run_id
select run_id from run order by run_id desc limit 1

-- name: pending_cleanup
-- Objects with pending cleanup, oldest first.
select id from pending_cleanup where shard = %(shard)s::smallint and kind = %(kind)s::text and id > %(after)s::bigint
 order by id limit %(batch)s::int

-- name: count_old
-- For a preview before deleting; the runs themselves are counted by walking over them.
select (select count(*) from audit_log j where j.occurred_at < %(before)s::timestamptz) as journal,
       (select count(*) from skip_record k where k.recorded_at < %(before)s::timestamptz) as skip_records
