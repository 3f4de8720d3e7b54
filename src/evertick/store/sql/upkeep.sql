-- The state of the database itself: dead rows, the sessions that keep them from being vacuumed, table sizes.

-- name: dead_rows
-- From the statistics, which lag a second behind: the query is cheap, however large the tables are.
select c.relname as name, pg_stat_get_dead_tuples(c.oid) as dead
  from pg_class c
 where c.oid = any(%(tables)s::text[]::regclass[]) order by c.relname limit 100

-- name: is_behind
-- Whether work waits for the database: a late schedule, or a long queue. The length of the queue comes from the
-- statistics, because counting also walks over dead rows; but they may be wrong for long about an empty queue.
select exists (select 1 from schedule_state s
                where s.shard = any(array(select h.shard from shard h)) and s.next_due < clock() - interval '1 second'
                  and not s.paused and s.error is null)
       or (pg_stat_get_live_tuples('ready'::regclass) >= %(line)s::bigint and exists (select 1 from ready))

-- name: snapshot_holders
-- Everything that keeps dead rows from being vacuumed in this database, the oldest first: sessions by their
-- transaction, prepared transactions, replication slots and standbys that report their horizon. Vacuum itself holds
-- back nothing. Of other roles' sessions a role without pg_read_all_stats sees only that they exist.
select h.kind, h.name, h.pid, h.held_seconds, h.xmin, h.behind from (
    select case when a.backend_type = 'walsender' then 'standby' else 'session' end as kind,
           coalesce(nullif(a.application_name, ''), a.backend_type) as name, a.pid,
           extract(epoch from clock_timestamp() - a.xact_start)::float8 as held_seconds,
           coalesce(a.backend_xmin, a.backend_xid)::text as xmin, age(coalesce(a.backend_xmin, a.backend_xid)) as behind
      from pg_stat_activity a
     where coalesce(a.backend_xmin, a.backend_xid) is not null and a.pid <> pg_backend_pid()
       and (a.datname = current_database() or a.backend_type = 'walsender') and a.backend_type <> 'autovacuum worker'
       and not exists (select 1 from pg_stat_progress_vacuum v where v.pid = a.pid)
    union all
    select 'prepared', p.gid, null, extract(epoch from clock_timestamp() - p.prepared)::float8, p.transaction::text,
           age(p.transaction)
      from pg_prepared_xacts p where p.database = current_database()
    union all
    select 'slot', s.slot_name, s.active_pid, null, s.xmin::text, age(s.xmin)
      from pg_replication_slots s where s.xmin is not null
) h
order by h.behind desc limit 20

-- name: sizes
-- With their indexes and TOAST data.
select c.relname as name, pg_total_relation_size(c.oid) as bytes
  from pg_class c where c.relnamespace = 'evertick'::regnamespace and c.relkind = 'r' order by 2 desc, 1 limit %(limit)s
