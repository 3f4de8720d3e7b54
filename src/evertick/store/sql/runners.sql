-- Runners: who is alive, by their own heartbeat and by our watching.

-- name: register
-- Again after a lost reply is harmless: a session is drawn once per start.
insert into runner (session, runner_id, host, boot_id, pid_namespace, pid, pid_started, queues, slots, started_at)
values (%(session)s, %(runner_id)s, %(host)s, %(boot_id)s, %(pid_namespace)s, %(pid)s, %(pid_started)s, %(queues)s, %(slots)s, clock())
on conflict (session) do nothing

-- name: bury
select bury(%(session)s::bigint, %(reason)s::text, %(infra_retries)s::int)

-- name: leave
-- A clean stop: it holds nothing any more.
update runner set gone_at = clock(), gone_reason = 'stopped' where session = %(session)s and gone_at is null

-- name: live
select session, runner_id, host, boot_id, pid_namespace, pid, pid_started, queues, slots, started_at, silent_seconds
  from runner where gone_at is null order by session limit 10000

-- name: list_busy
-- What people see of live runners: also how many of their slots are taken.
select r.session, r.runner_id, r.host, r.pid, r.queues, r.slots, r.started_at, r.silent_seconds,
       (select count(*) from lease l where l.session = r.session) as busy
  from runner r where r.gone_at is null order by r.runner_id, r.session limit %(limit)s

-- name: listen_for_silence
-- Each tick adds what passed, at most two seconds, while a runner's counter stands still; a new beat sets it to zero. So a
-- restarted leader, an outage or a clock jump adds nothing.
with watched as (
    update runner r
       set silent_seconds = case when r.beat > r.watched_beat then 0
                                 else r.silent_seconds + least(%(elapsed)s::double precision, 2) end,
           watched_beat = r.beat
     where r.gone_at is null
       and (r.beat > r.watched_beat or %(elapsed)s > 0)
    returning r.session, r.silent_seconds
)
select session from watched where silent_seconds > %(lost_after)s::double precision

-- name: unburied
-- Sessions that hold leases although they are gone: a claim that slipped in while its runner was being buried. Steps from
-- session to session through the index, because there are few of them and many leases.
with recursive holder as (
    (select session from lease order by session limit 1)
    union all
    select (select l.session from lease l where l.session > h.session order by l.session limit 1)
      from holder h where h.session is not null
)
select h.session from holder h left join runner r on r.session = h.session
 where h.session is not null and (r.session is null or r.gone_at is not null) limit 100
