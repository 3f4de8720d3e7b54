-- The identity of this server, and the position of its log when a commit was last acknowledged.

-- name: look
-- The timeline from the name of the current WAL file: the control file shows the old one for a while after a promotion.
select (select system_identifier from pg_control_system()) as system_id,
       case when not pg_is_in_recovery()
            then ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::bigint end as timeline,
       pg_is_in_recovery() as is_standby, pg_backend_pid() as pid, current_setting('search_path') as search_path,
       case when pg_backend_pid() = %(pid)s then pg_try_advisory_lock_shared(%(functions)s) end as holds_functions

-- name: look_without_rights
-- The facts that every role may read.
select null::bigint as system_id, null::bigint as timeline, pg_is_in_recovery() as is_standby, pg_backend_pid() as pid,
       current_setting('search_path') as search_path,
       case when pg_backend_pid() = %(pid)s then pg_try_advisory_lock_shared(%(functions)s) end as holds_functions

-- name: mark_server
-- Of all processes one per second writes; the others read its row, and wait for no lock. A visible row is committed,
-- and on a standby if commits wait for one: that makes it a mark. The first process on a new timeline records and
-- reports it. No row: another process is recording it. A mark from the future comes from a clock that was set back.
with setting as (
    select current_setting('synchronous_standby_names') <> ''
           and current_setting('synchronous_commit') not in ('off', 'local') as is_synchronous
), placed as (
    insert into server_timeline (system_id, timeline, first_seen_at, marked_at, lsn, is_synchronous)
    select %(system_id)s, %(timeline)s, clock_timestamp(), clock_timestamp(), pg_current_wal_insert_lsn(),
           s.is_synchronous
      from setting s
     where not exists (select 1 from server_timeline c where c.system_id = %(system_id)s and c.timeline = %(timeline)s)
    on conflict (system_id, timeline) do nothing
    returning system_id, timeline, lsn, is_synchronous
), told as (
    insert into audit_log (occurred_at, action, actor, detail)
    select clock(), 'failover', %(actor)s, jsonb_build_object('system_id', p.system_id::text, 'timeline', p.timeline)
      from placed p where exists (select 1 from server_timeline)
), moved as (
    update server_timeline c
       set marked_at = clock_timestamp(), lsn = pg_current_wal_insert_lsn(), is_synchronous = s.is_synchronous
      from setting s
     where c.ctid = (select x.ctid from server_timeline x
                      where x.system_id = %(system_id)s and x.timeline = %(timeline)s
                        and (x.marked_at < clock_timestamp() - make_interval(secs => %(seconds)s)
                             or x.marked_at > clock_timestamp())
                     for no key update skip locked)
    returning c.lsn, c.is_synchronous
)
select (newest.lsn - '0/0')::bigint as lsn, newest.is_synchronous
  from (select lsn, is_synchronous from placed
        union all
        select lsn, is_synchronous from moved
        union all
        select c.lsn, c.is_synchronous from server_timeline c
         where c.system_id = %(system_id)s and c.timeline = %(timeline)s) newest
 order by newest.lsn desc limit 1

-- name: marked
-- The newest mark of a timeline in this database.
select (lsn - '0/0')::bigint from server_timeline where system_id = %(system_id)s and timeline = %(timeline)s

-- name: report_loss
-- Many processes may find the same loss: it is reported again only if it is larger than the known one.
with told as (
    insert into server_timeline as c (system_id, timeline, first_seen_at, marked_at, lsn, is_synchronous, lost_until)
    values (%(system_id)s, %(timeline)s, clock_timestamp(), '-infinity', '0/0', false,
            '0/0'::pg_lsn + %(lost_until)s::numeric)
    on conflict (system_id, timeline) do update set lost_until = excluded.lost_until
        where c.lost_until is null or c.lost_until < excluded.lost_until
    returning c.timeline, c.lsn, c.lost_until
)
insert into audit_log (occurred_at, action, actor, detail)
select clock(), 'writes_lost', %(actor)s,
       jsonb_build_object('timeline', t.timeline, 'after', t.lsn::text, 'until', t.lost_until::text)
  from told t

-- name: history
-- For people: the history of the database as a whole.
select system_id, timeline, first_seen_at, lsn::text as lsn, is_synchronous, lost_until::text as lost_until
  from server_timeline order by first_seen_at desc limit %(limit)s
