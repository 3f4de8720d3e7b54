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
           and a.backend_type = 'client backend') as role_connections,
       clock_timestamp() as at, pg_is_in_recovery() as is_standby,
       (select pg_encoding_to_char(d.encoding) from pg_database d where d.datname = current_database()) as encoding

-- name: sealed_by
-- The keys that encrypted stored values, and how many values each.
select key_id, count(*)::int as count from stored_value group by key_id order by key_id limit 100

-- name: stored_logs
-- Whether archived lines exist, and how long ago the first run that waits for archival ended. The first entries of the
-- queue suffice.
select exists (select 1 from log_object) as are_there,
       (select extract(epoch from clock() - min(s.finished_at))::float8
          from (select w.run_id from log_watch w order by w.run_id limit 1000) x
          join run_status s on s.run_id = x.run_id and s.state in ('success', 'failed', 'canceled')) as waiting_seconds

-- name: far
-- The attempts submitted to remote executors, by executor and queue: how many, whether a live runner manages them, and
-- how many have not started for ten minutes, with the error of one of them.
select d.executor, d.queue, count(*)::int as attempts,
       exists (select 1 from runner r where r.gone_at is null and r.executor = d.executor and d.queue = any(r.queues))
           as has_runner,
       count(*) filter (where x.is_stuck)::int as stuck, max(d.trouble) filter (where x.is_stuck) as trouble
  from dispatch d cross join lateral (
      select d.started_at is null and d.trouble is not null
          and d.queued_at < clock() - interval '10 minutes' as is_stuck) x
 group by d.executor, d.queue order by d.executor, d.queue limit 100
