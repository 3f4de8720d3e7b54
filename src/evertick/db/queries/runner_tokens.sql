-- Tokens with which runners join over HTTPS, and what such a runner may read. What it may change is fenced by its
-- session.

-- name: add
with made as (
    insert into runner_token (secret_hash, name, queues, created_by, created_at, expires_at)
    values (%(secret_hash)s, %(name)s, %(queues)s, (%(actor)s::actor).name, clock(),
            clock() + make_interval(secs => %(seconds)s::double precision))
    returning token_id, name, queues, created_by, created_at, expires_at, used_at, used_from, revoked_at
), noted as (
    insert into audit_log (occurred_at, action, actor, origin, request_id, detail)
    select clock(), 'add_runner_token', (%(actor)s::actor).*,
           jsonb_build_object('token', m.name, 'id', m.token_id, 'queues', m.queues, 'expires_at', m.expires_at)
      from made m
)
select *, false as is_expired, 0 as runners from made

-- name: list_all
select t.token_id, t.name, t.queues, t.created_by, t.created_at, t.expires_at, t.used_at, t.used_from, t.revoked_at,
       t.expires_at <= clock() as is_expired,
       (select count(*) from runner r where r.ended_at is null and r.token_id = t.token_id)::int as runners
  from runner_token t where t.revoked_at is null and t.created_by <> 'launcher' order by t.token_id limit %(limit)s

-- name: find
select t.token_id, t.name, t.queues, t.created_by, t.created_at, t.expires_at, t.used_at, t.used_from, t.revoked_at,
       t.expires_at <= clock() as is_expired, 0 as runners
  from runner_token t where t.secret_hash = %(secret_hash)s

-- name: joined
-- A session that joined with a token, alive or not.
select r.session, r.runner_id, r.token_id, r.queues, r.task_patterns as match, r.slots,
    r.ended_at is not null as is_over
  from runner r where r.session = %(session)s and r.token_id is not null

-- name: peers
-- Live runners of the same token on the same machine: only their heirs may say that they are gone.
select r.session, r.runner_id, r.host, r.boot_id, r.pid_namespace, r.uid, r.pid, r.pid_started, r.queues, r.slots,
       r.started_at, r.silent_seconds
  from runner r
 where r.ended_at is null and r.token_id = %(token_id)s::int and r.host = %(host)s and r.boot_id = %(boot_id)s
   and r.pid_namespace = %(pid_namespace)s order by r.session limit 1000

-- name: not_ended
-- Those of these sessions that are alive, or did not join with this token: their logs are not the caller's to ship.
select s.session from unnest(%(sessions)s::bigint[]) s(session)
 where not exists (select 1 from runner r where r.session = s.session and r.ended_at is not null
                   and r.token_id = %(token_id)s::int)

-- name: holds_version
-- Whether the session holds an attempt of that version.
select exists (select 1 from held_attempt l
                 join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
                where l.session = %(session)s and k.version_id = %(version_id)s)

-- name: held_bundle
-- The code of a version of which the session holds an attempt.
select b.archive, b.uses_threads is not null as uses_threads from bundle b
 where b.hash = %(bundle_hash)s and exists (
       select 1 from held_attempt l join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
         join dag_version v on v.version_id = k.version_id
        where l.session = %(session)s and v.bundle_hash = b.hash)

-- name: append_logs
-- Only lines of attempts that this session held, now or earlier. Late: it no longer does.
insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, is_late, content)
select x.r, x.i, x.m, x.e, x.seq, x.until, not h.is_held, x.content
  from jsonb_to_recordset(%(chunks)s::jsonb) as x(r bigint, i int, m int, e int, seq bigint, until bigint, content text)
 cross join lateral (select exists (select 1 from held_attempt l
                                     where l.session = %(session)s::bigint and l.run_id = x.r and l.idx = x.i
                                       and l.map_index = x.m and l.epoch = x.e) as is_held) h
 where exists (select 1 from run f where f.run_id = x.r)
   and (h.is_held
        or exists (select 1 from task k where k.run_id = x.r and k.idx = x.i and k.map_index = x.m and k.epoch = x.e
                   and k.session = %(session)s::bigint)
        or exists (select 1 from attempt a where a.run_id = x.r and a.idx = x.i and a.map_index = x.m and a.epoch = x.e
                   and a.session = %(session)s::bigint))
on conflict (run_id, idx, map_index, epoch, seq) do nothing

-- name: called
-- The waiting runners that have something to learn: they were declared dead, their request changed, or one of their
-- attempts has one. For all waiting runners at once.
select s.session from unnest(%(sessions)s::bigint[], %(requests)s::text[]) s(session, request)
  left join lateral (select r.request, true as is_alive from runner r where r.session = s.session
      and r.ended_at is null) r on true
 where r.is_alive is null or coalesce(r.request, '') <> s.request
    or exists (select 1 from lease l
                 join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
                     and k.epoch = l.epoch
                where l.session = s.session and k.request is not null)

-- Fleets of launched runners.

-- name: fleet_load
-- The queued tasks of these queues, each counted up to the cap, and the triggers that no runner runs there.
select (select count(*) from unnest(%(queues)s::text[]) q(queue)
         cross join lateral (select 1 from ready_task r where r.queue = q.queue limit %(cap)s) c) as queued,
       (select count(*) from (select 1 from task_trigger w
                               where w.session is null and w.event is null and w.queue = any(%(queues)s::text[])
                               limit 1) x) as triggers

-- name: list_fleets
select f.name, f.engine, f.queues, f.least, f.most, f.slots, f.leader, f.lease_until > clock() as is_led, f.desired,
       f.trouble
  from fleet f order by f.name limit %(limit)s

-- name: list_pilots
-- Those of all fleets, the oldest first.
select p.fleet, p.name, p.phase, p.reason, p.created_at, p.submitted_at, p.withdrawn_at is not null as is_withdrawn,
       k.used_at is not null as has_joined, r.session, r.request, coalesce(busy_slots(r.session), 0) as busy
  from pilot p join runner_token k on k.token_id = p.token_id
  left join runner r on r.token_id = p.token_id and r.ended_at is null
 order by p.fleet, p.created_at, p.name, r.started_at limit %(limit)s
