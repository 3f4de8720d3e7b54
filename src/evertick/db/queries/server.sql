-- The data of `evertick doctor`: facts about the server and the work in it.

-- name: server
-- As a new session of this role sees it. Connections: the maximum, the reserved ones, and the current number.
select current_setting('server_version') as version, current_setting('fsync') as fsync,
    current_setting('full_page_writes') as full_page_writes,
       current_setting('synchronous_commit') as synchronous_commit, current_setting('autovacuum') as autovacuum,
       current_setting('track_counts') as track_counts, current_setting('max_connections')::int as max_connections,
       current_setting('superuser_reserved_connections')::int as kept_connections,
       (select count(*)::int from pg_stat_activity a where a.backend_type = 'client backend') as connections,
       (select r.rolconnlimit from pg_roles r where r.rolname = current_user) as role_limit,
       (select count(*)::int from pg_stat_activity a where a.usename = current_user
           and a.backend_type = 'client backend') as role_connections, clock_timestamp() as at,
       pg_is_in_recovery() as is_standby,
       (select pg_encoding_to_char(d.encoding) from pg_database d where d.datname = current_database()) as encoding

-- name: sealed_by
-- The keys that encrypted stored values, and how many values each.
select key_id, count(*)::int as count from stored_value group by key_id order by key_id limit 100

-- name: stored_logs
-- Whether archived lines exist, and how long ago the first run that waits for archival ended, by the head of the queue.
select exists (select 1 from log_archive_object) as are_there,
       (select extract(epoch from clock() - min(s.finished_at))::float8
          from (select w.run_id from log_archive_queue w order by w.run_id limit 1000) x
          join run_status s on s.run_id = x.run_id and s.state in ('success', 'failed', 'canceled')) as waiting_seconds

-- name: remote
-- The attempts at remote executors by queue: whether a live runner manages them, and how many are stuck.
select d.executor, d.queue, count(*)::int as attempts,
       exists (select 1 from runner r where r.ended_at is null and r.executor = d.executor and d.queue = any(r.queues))
           as has_runner, count(*) filter (where x.is_stuck)::int as stuck,
       max(d.last_error) filter (where x.is_stuck) as trouble
  from dispatch d cross join lateral (
      select d.started_at is null and d.last_error is not null
          and d.queued_at < clock() - interval '10 minutes' as is_stuck) x
 group by d.executor, d.queue order by d.executor, d.queue limit 100

-- The state of the database itself: dead rows, the sessions that keep them from being vacuumed, table sizes.

-- name: dead_rows
-- From the statistics, which lag a second behind: the query is cheap, however large the tables are.
select c.relname as name, pg_stat_get_dead_tuples(c.oid) as dead from pg_class c
 where c.oid = any(%(tables)s::text[]::regclass[]) order by c.relname limit 100

-- name: is_behind
-- Whether work waits for the database: a late schedule, or a long queue. The length of the queue comes from the
-- statistics, because counting also walks over dead rows; but they may be wrong for long about an empty queue.
select exists (select 1 from schedule_state s
                where s.shard = any(array(select h.shard from shard h)) and s.next_due < clock() - interval '1 second'
                  and not s.is_paused and s.error is null)
       or (pg_stat_get_live_tuples('ready_task'::regclass) >= %(line)s::bigint and exists (select 1 from ready_task))

-- name: snapshot_holders
-- Everything that keeps dead rows from being vacuumed here, the oldest first: sessions by their transaction, prepared
-- transactions, replication slots and standbys. Of other roles' sessions a role without pg_read_all_stats sees little.
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
