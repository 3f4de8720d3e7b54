-- What the database remembers of its migrations.

-- name: lock
-- Transaction-level, so that it also works through a pooler and ends with a process that dies halfway.
select pg_advisory_xact_lock(%(key)s)

-- name: has_record
-- A database that was never migrated has no table to ask.
select to_regclass('evertick.migration') is not null

-- name: applied
-- In order, because a migration builds on all before it. The limit is far above any number of migrations.
select number, name, applied_at, checksum
  from evertick.migration
 order by number
 limit 10000

-- name: record
-- In the migration's own transaction: either both are there or neither is.
insert into evertick.migration (number, name, checksum)
values (%(number)s, %(name)s, %(checksum)s)
