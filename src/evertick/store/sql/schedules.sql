-- Schedules: what is due, and where each one stands.

-- name: due
-- By the index of live cursors, oldest first: rows read are rows due, whatever the number of schedules.
select s.schedule_id, s.version, s.next_due, c.spec::text as spec, c.misfire, c.window_seconds, clock() as read_at
  from schedule_state s join schedule c on c.schedule_id = s.schedule_id
 where s.shard = %(shard)s::smallint and s.next_due <= clock() and s.next_due is not null and not s.paused and s.error is null
   and s.schedule_id <> all(%(passed_over)s::int[])
 order by s.next_due limit %(batch)s

-- name: next_due
-- When to wake up, and what the time is there.
select min(next_due), clock() from schedule_state
 where shard = %(shard)s::smallint and next_due is not null and not paused and error is null

-- name: fire
select fire(%(shard)s::smallint, %(epoch)s::bigint, %(plans)s::jsonb)

-- name: set_aside
-- A schedule that cannot be planned leaves the index, with the reason for people to see; the others go on.
select set_schedule_aside(%(shard)s::smallint, %(epoch)s::bigint, %(schedule_id)s::int, %(version)s::int, %(reason)s::text,
                          %(is_tried_again)s::boolean)

-- name: of_dag
-- Everything that an edit, a pause or a delete must settle first.
select c.schedule_id, s.version, s.next_due, c.spec::text as spec, c.misfire, c.window_seconds, c.name, c.params, s.paused, s.error
  from schedule c join schedule_state s on s.schedule_id = c.schedule_id join dag d on d.dag_id = c.dag_id
 where d.name = %(dag)s and c.deleted_at is null
 order by c.schedule_id limit 1000

-- name: list
select c.schedule_id, d.name as dag, c.name, c.version, c.spec, s.next_due, s.last_fired, s.paused, s.error, c.misfire
  from schedule c join schedule_state s on s.schedule_id = c.schedule_id join dag d on d.dag_id = c.dag_id
 where c.deleted_at is null and (%(dag)s::text is null or d.name = %(dag)s)
 order by d.name, c.name limit %(limit)s

-- name: skips
select first_at, last_at, count, reason, recorded_at from skip_record
 where schedule_id = %(schedule_id)s order by first_at desc limit %(limit)s

-- name: put
-- Null: somebody else changed it first.
select put_schedule(%(dag_id)s::int, %(schedule)s::jsonb, %(expected)s::int, %(request)s::text, %(settle)s::jsonb, %(actor)s::text)
