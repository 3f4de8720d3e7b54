-- Runners: their liveness, by their own heartbeat and by the leader's observation.

-- name: register
-- Repeating it after a lost reply is harmless: a session id is generated once per start.
insert into runner (session, runner_id, name, version, host, boot_id, pid_namespace, uid, pid, pid_started, queues,
                    match, slots,
                    request, lost_after_seconds, executor, beat_at, started_at)
values (%(session)s, %(runner_id)s, %(name)s, %(version)s, %(host)s, %(boot_id)s, %(pid_namespace)s, %(uid)s, %(pid)s,
        %(pid_started)s, %(queues)s, %(match)s, %(slots)s, %(request)s, %(lost_after_seconds)s, %(executor)s, clock(),
            clock())
on conflict (session) do nothing

-- name: ask_of
-- A request to live runners, recorded in the journal with its actor; null withdraws it. Returns the runners for which
-- it is new.
with asked as (
    update runner r set request = %(request)s::text
     where r.session = any(%(sessions)s::bigint[]) and r.gone_at is null
       and r.request is distinct from %(request)s::text
    returning r.session, r.runner_id
), noted as (
    insert into journal (occurred_at, verb, actor, detail)
    select clock(), case when %(request)s::text is null then 'undrain' else 'drain' end, %(actor)s::text,
           jsonb_strip_nulls(jsonb_build_object('runner', a.runner_id, 'session', a.session::text, 'request',
                                                %(request)s::text))
      from asked a
)
select session from asked

-- name: bury
select bury(%(session)s::bigint, %(reason)s::text, %(infra_retries)s::int)

-- name: leave
-- A clean stop: the runner holds nothing.
update runner set gone_at = clock(), gone_reason = 'stopped' where session = %(session)s and gone_at is null

-- name: live
select session, runner_id, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots, started_at,
    silent_seconds
  from runner where gone_at is null order by session limit 10000

-- name: neighbours
-- Live runners on the same machine, in the same boot and PID namespace. Queried once per tick by every runner there.
select session, runner_id, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots, started_at,
    silent_seconds
  from runner
 where gone_at is null and host = %(host)s and boot_id = %(boot_id)s and pid_namespace = %(pid_namespace)s
   -- An agent whose runner lives is that one's to report: it knows what the agent left behind.
   and (queues <> '{}' or not exists (
        select 1 from dispatch d join runner o on o.session = d.owner and o.gone_at is null
            where d.session = runner.session))
 order by session limit 1000

-- name: namesakes
-- Other runners with the same readable id: allowed, and distinguished by session, but seldom intended.
select session, runner_id, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots, started_at,
    silent_seconds
  from runner where gone_at is null and runner_id = %(runner_id)s and session <> %(session)s order by session limit 10

-- name: list_busy
-- Live runners for people: also how many of their slots are taken. The agents of remote attempts come last.
select r.session, r.runner_id, r.name, r.version, r.host, r.pid, r.queues, r.match, r.slots, r.request, r.started_at,
    r.beat_at,
       r.silent_seconds, busy_slots(r.session) as busy, r.executor
  from runner r where r.gone_at is null and (%(with_agents)s or cardinality(r.queues) > 0)
 order by cardinality(r.queues) = 0, r.runner_id, r.session limit %(limit)s

-- name: count_agents
-- How many attempts run by the agents of each executor, and how many of these agents have been silent for a while.
select r.executor, count(*) as running, count(*) filter (where r.silent_seconds > %(silent_seconds)s) as silent
  from runner r where r.gone_at is null and cardinality(r.queues) = 0 group by r.executor order by r.executor limit 100

-- name: reap
select reaped, refused
  from reap_runner(%(shard)s::smallint, %(epoch)s::bigint, %(session)s::bigint, %(lost_after)s::double precision,
                   %(infra_retries)s::int)
