-- What the database remembers of its migrations.

-- name: lock
-- Transaction-level, so that it also works through a pooler and ends with a process that dies halfway. Tried and never
-- waited for: who waits has a snapshot, and whoever makes an index beside the work waits for everybody that has one.
select pg_try_advisory_xact_lock(%(key)s)

-- name: lock_session
-- The same lock for what cannot be done in a transaction. It ends with the session, too.
select pg_try_advisory_lock(%(key)s)

-- name: unlock_session
select pg_advisory_unlock(%(key)s)

-- name: set_lock_timeout
-- For the rest of the transaction; for the session where there is none.
select set_config('lock_timeout', %(timeout)s, %(is_local)s)

-- name: in_the_way
-- The session that has had a table of ours for longest in one transaction: a migration waits for that one, or for those
-- behind it.
select a.pid, coalesce(nullif(a.application_name, ''), 'a session') as application,
       extract(epoch from clock_timestamp() - a.xact_start)::float8 as seconds
  from pg_stat_activity a
 where a.pid <> pg_backend_pid() and a.datname = current_database() and a.xact_start is not null
   and exists (select 1 from pg_locks l join pg_class c on c.oid = l.relation
                where l.pid = a.pid and c.relnamespace = 'evertick'::regnamespace)
 order by a.xact_start limit 1

-- name: has_record
-- A database that was never migrated has no table to ask.
select to_regclass('evertick.migration') is not null

-- name: applied
-- In order, because a migration builds on all before it. The limit is far above any number of migrations. A database
-- from before the first release may have no oldest_program: what else contradicts is told.
select m.number, m.name, m.applied_at, m.checksum, coalesce((to_jsonb(m) ->> 'oldest_program')::int, m.number)
  from evertick.migration m
 order by m.number
 limit 10000

-- name: record
-- In the migration's own transaction: either both are there or neither is.
insert into evertick.migration (number, name, checksum, oldest_program)
values (%(number)s, %(name)s, %(checksum)s, %(oldest_program)s)
