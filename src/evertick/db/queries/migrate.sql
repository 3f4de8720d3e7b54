-- The database's record of its migrations.

-- name: lock
-- Transaction-level, so that it also works through a pooler and ends with a process that dies halfway. Tried without
-- waiting: a waiting session holds a snapshot, and a concurrent index build waits for every session with a snapshot.
select pg_try_advisory_xact_lock(%(key)s)

-- name: lock_session
-- The same lock for a migration that cannot run in a transaction. It ends with the session, too.
select pg_try_advisory_lock(%(key)s)

-- name: unlock_session
select pg_advisory_unlock(%(key)s)

-- name: set_lock_timeout
-- For the rest of the transaction; outside of one, for the session.
select set_config('lock_timeout', (%(seconds)s::float8 * 1000)::int::text, %(is_local)s)

-- name: in_the_way
-- The session that has held a table of ours the longest in one transaction: a migration waits for it, or behind it.
select a.pid, coalesce(nullif(a.application_name, ''), 'a session') as application,
       extract(epoch from clock_timestamp() - a.xact_start)::float8 as seconds
  from pg_stat_activity a
 where a.pid <> pg_backend_pid() and a.datname = current_database() and a.xact_start is not null
   and exists (select 1 from pg_locks l join pg_class c on c.oid = l.relation
                where l.pid = a.pid and c.relnamespace = 'evertick'::regnamespace)
 order by a.xact_start limit 1

-- name: has_record
-- A database that was never migrated has no such table.
select to_regclass('evertick.migration') is not null

-- name: applied_migrations
-- In order, because a migration builds on all before it. The limit is far above any number of migrations. A database
-- from before the first release may have no oldest_program: other contradictions are still reported.
select to_char(m.number, 'FM0000') || '_' || m.name as label, m.applied_at, m.checksum,
       coalesce((to_jsonb(m) ->> 'oldest_program')::int, m.number) as oldest_program
  from evertick.migration m order by m.number limit 10000

-- name: record
-- In the migration's own transaction: either both are there or neither is.
insert into evertick.migration (number, name, checksum, oldest_program)
values (%(number)s, %(name)s, %(checksum)s, %(oldest_program)s)
