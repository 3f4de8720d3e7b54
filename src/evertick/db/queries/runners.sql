-- Runners: their liveness, by their own heartbeat and by the leader's observation.

-- name: register
-- Repeating it after a lost reply is harmless: a session id is generated once per start.
insert into runner (session, runner_id, name, version, host, boot_id, pid_namespace, uid, pid, pid_started, queues,
                    task_patterns, slots, request, lost_after_seconds, executor, heartbeat_at, started_at)
values (%(session)s, %(runner_id)s, %(name)s, %(version)s, %(host)s, %(boot_id)s, %(pid_namespace)s, %(uid)s, %(pid)s,
        %(pid_started)s, %(queues)s, %(match)s, %(slots)s, %(request)s, %(lost_after_seconds)s, %(executor)s, clock(),
        clock())
on conflict (session) do nothing

-- name: ask_of
-- A request to live runners, with its audit entry; null withdraws it. Returns the runners for which it is new.
with asked as (
    update runner r set request = %(request)s::text
     where r.session = any(%(sessions)s::bigint[]) and r.ended_at is null
       and r.request is distinct from %(request)s::text
    returning r.session, r.runner_id
), noted as (
    insert into audit_log (occurred_at, action, actor, origin, request_id, detail)
    select clock(), case when %(request)s::text is null then 'undrain' else 'drain' end, (%(actor)s::actor).*,
           jsonb_strip_nulls(jsonb_build_object('runner', a.runner_id, 'session', a.session::text, 'request',
                                                %(request)s::text))
      from asked a
)
select session from asked

-- name: leave
-- A clean stop: the runner holds nothing.
update runner set ended_at = clock(), end_reason = 'stopped' where session = %(session)s and ended_at is null

-- name: live
select session, runner_id, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots, started_at,
    silent_seconds
  from runner where ended_at is null order by session limit 10000

-- name: peers
-- Live runners on the same machine, in the same boot and PID namespace. Queried once per tick by every runner there.
select session, runner_id, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots, started_at,
    silent_seconds
  from runner
 where ended_at is null and host = %(host)s and boot_id = %(boot_id)s and pid_namespace = %(pid_namespace)s
   -- An agent whose runner lives is that one's to report: it knows what the agent left behind.
   and (queues <> '{}' or not exists (
        select 1 from dispatch d join runner o on o.session = d.owner and o.ended_at is null
            where d.session = runner.session))
 order by session limit 1000

-- name: namesakes
-- Other runners with the same readable id: allowed, and distinguished by session, but seldom intended.
select session, runner_id, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots, started_at,
    silent_seconds
  from runner where ended_at is null and runner_id = %(runner_id)s and session <> %(session)s order by session limit 10

-- name: list_busy
-- Live runners for people: also how many of their slots are taken. The agents of remote attempts come last.
select r.session, r.runner_id, r.name, r.version, r.host, r.pid, r.queues, r.task_patterns as match, r.slots, r.request,
       r.started_at, r.heartbeat_at as beat_at, r.silent_seconds, busy_slots(r.session) as busy, r.executor,
       (select count(*) from task_trigger w where w.session = r.session) as triggers,
       case when cardinality(r.queues) > 0 and r.token_id is null then 'database' else 'https' end as transport
  from runner r where r.ended_at is null and (%(with_agents)s or cardinality(r.queues) > 0)
 order by cardinality(r.queues) = 0, r.runner_id, r.session limit %(limit)s

-- name: count_agents
-- How many attempts run by the agents of each executor, and how many of these agents have been silent for a while.
select r.executor, count(*) as running, count(*) filter (where r.silent_seconds > %(silent_seconds)s) as silent
  from runner r where r.ended_at is null and cardinality(r.queues) = 0 group by r.executor order by r.executor limit 100

-- Agents: remote attempts, for which the API acts.

-- name: held
-- An agent may ask only about its own attempt, while it holds it.
select k.version_id, k.attempt from task k
 where k.run_id = %(run_id)s and k.idx = %(idx)s and k.map_index = %(map_index)s and k.epoch = %(epoch)s
   and k.session = %(session)s and k.state = 'running'

-- name: bundle
-- Only the bundle of the attempt's own version.
select b.archive from dag_version v join bundle b on b.hash = v.bundle_hash
 where v.version_id = %(version_id)s and v.bundle_hash = %(bundle_hash)s

-- name: disturbed
-- The agents that no longer hold their attempt or have a stop request. Runs once a second for all waiting agents.
select s.session from unnest(%(sessions)s::bigint[]) s(session)
  left join lateral (select l.* from lease l where l.session = s.session limit 1) l on true
  left join lateral (select y.request from task y
                      where y.run_id = l.run_id and y.idx = l.idx and y.map_index = l.map_index
                          and y.epoch = l.epoch offset 0) k on true
 where l.session is null or k.request is not null

-- name: has_agents
-- Whether any agent holds an attempt, or any runner came over HTTPS.
select exists (select 1 from runner r where r.ended_at is null and (r.queues = '{}' or r.token_id is not null))

-- name: note_agent_api
-- An API could have heard every agent and runner until now: see detect_dead_runners. Without any nothing is written.
update agent_api set heartbeat_seq = heartbeat_seq + 1
 where exists (select 1 from runner r where r.ended_at is null and (r.queues = '{}' or r.token_id is not null))
returning true

-- Attempts submitted to a remote executor, in the order of their life there.

-- name: list_of
-- All attempts that a runner manages, with their states: none where it is over, or its run was pruned. Each task is
-- found by its whole key. Ages, because the reader's clock is not the database's.
select d.run_id, d.idx, d.map_index, d.epoch, d.session, d.queue, d.tries, d.submitted_at is not null as is_submitted,
       extract(epoch from clock() - d.queued_at)::double precision as queued_seconds,
       extract(epoch from clock() - d.tried_at)::double precision as tried_seconds,
       extract(epoch from d.retry_at - clock())::double precision as retry_seconds, d.last_error as trouble,
       k.state::text as state, k.request::text as request, k.version_id, k.attempt::int as attempt, k.state is null
       and coalesce((select r.end_reason = 'finished' from runner r where r.session = d.session),
                false) as has_finished,
       k.state = 'running' and coalesce((select r.silent_seconds > r.lost_after_seconds / 2 from runner r
                                          where r.session = d.session), false) as is_silent
  from dispatch d
  left join lateral (select x.state, x.request, x.version_id, x.attempt from task x
                      where x.run_id = d.run_id and x.idx = d.idx and x.map_index = d.map_index and x.epoch = d.epoch
                        and x.session = d.session and x.state in ('queued', 'running') offset 0) k on true
 where d.owner = %(owner)s order by d.queued_at, d.run_id, d.idx, d.map_index limit %(limit)s

-- name: not_started
-- Submitted attempts that have not started, the oldest first, for people: with the last error, if any.
select d.executor, d.run_id, d.map_index, g.name as dag, s.name as task, d.queue, d.queued_at, d.tries, d.submitted_at,
       d.last_error as trouble, d.retry_at
  from dispatch d
  join task k on k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index and k.epoch = d.epoch
  join task_spec s on s.version_id = k.version_id and s.idx = d.idx join run_status r on r.run_id = d.run_id
  join dag g on g.dag_id = r.dag_id where d.started_at is null and k.state = 'queued' and k.session = d.session
 order by d.queued_at, d.run_id, d.idx, d.map_index limit %(limit)s

-- name: known
-- The attempts of these that are on the list, whichever runner manages them.
select k.session from unnest(%(sessions)s::bigint[]) s(session)
 cross join lateral (select x.session from dispatch x where x.session = s.session offset 0) k

-- name: note_tries
-- Before each submission: the search for lost attempts counts from here. It also sets when to submit again without a
-- reported result: a call that kills the runner, or fails unexpectedly, is not repeated without a pause. Returns those
-- that may be submitted: not what another runner manages by now, or what may no longer start.
update dispatch d set tries = d.tries + 1, tried_at = clock(),
       retry_at = clock() + make_interval(secs => least(0.5 * 2 ^ least(d.tries, 10), 60))
 where d.session = any(%(sessions)s::bigint[]) and d.owner = %(owner)s::bigint and exists (
       select 1 from task k where k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index
           and k.epoch = d.epoch
         and k.session = d.session and k.state = 'queued' and k.request is null)
returning d.session

-- name: note_submitted
update dispatch d set submitted_at = coalesce(d.submitted_at, clock()), last_error = null, retry_at = null
 where d.session = any(%(sessions)s::bigint[]) and d.owner = %(owner)s::bigint

-- name: note_troubles
update dispatch d set last_error = x.trouble, retry_at = clock() + make_interval(secs => x.seconds)
  from jsonb_to_recordset(%(troubles)s::jsonb) as x(session bigint, trouble text, seconds double precision)
 where d.session = x.session and d.owner = %(owner)s::bigint

-- Queues: how many tasks wait, and which runners serve them.

-- name: depths
-- Counts each queue up to the cap: the cost is bounded, however long the queues are.
select l.queue, (select count(*) from (select 1 from ready_task r where r.queue = l.queue
    limit %(cap)s) counted) as depth
  from ready_queue l limit %(most)s

-- name: list_all
-- Every queue with waiting tasks, a live runner, or tasks of current versions. Depth is counted up to the cap.
with held as (
    select s.queue, count(*) as running
      from lease l join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
      join task_spec s on s.version_id = k.version_id and s.idx = k.idx group by s.queue
), served as (
    select q.queue, count(*) as runners, count(*) filter (where r.request is not null) as draining,
           count(*) filter (where cardinality(r.task_patterns) > 0) as specialised, sum(r.slots) as slots
      from runner r cross join unnest(r.queues) q(queue) where r.ended_at is null group by q.queue
), named as (
    select distinct s.queue from dag d join task_spec s on s.version_id = d.version_id where d.deleted_at is null
), known as (
    select queue from ready_queue union select queue from held union select queue from served
    union select queue from named
)
select k.queue, (select count(*) from (select 1 from ready_task r where r.queue = k.queue
    limit %(cap)s) counted) as depth,
       (select min(h.enqueued_at) from generate_series(0, 9) n(rank) cross join lateral (
            select r.enqueued_at from ready_task r where r.queue = k.queue and r.rank = n.rank order by r.seq
                limit 1) h) as
                oldest_at, coalesce(h.running, 0) as running, coalesce(s.runners, 0)::int as runners,
           coalesce(s.draining, 0)::int as draining, coalesce(s.specialised, 0)::int as specialised,
       coalesce(s.slots, 0)::int as slots
  from known k left join held h on h.queue = k.queue left join served s on s.queue = k.queue
 order by k.queue limit %(limit)s

-- name: queued_tasks
-- The next rows of each rank of these queues, for a runner that serves only some tasks; it claims them by position.
select 10 * (n.n - 1) + k.rank as place, r.seq, t.version_id, r.idx,
       extract(epoch from clock() - r.enqueued_at)::double precision as waited_seconds
  from generate_subscripts(%(queues)s::text[], 1) n(n) cross join generate_series(0, 9) k(rank)
  cross join lateral (select q.seq, q.run_id, q.idx, q.map_index, q.enqueued_at from ready_task q
                       where q.queue = (%(queues)s::text[])[n.n] and q.rank = k.rank
                         and q.seq >= (%(begin)s::bigint[])[10 * (n.n - 1) + k.rank + 1]
                       order by q.seq limit %(window)s::int) r
  cross join lateral (select k.version_id from task k
                       where k.run_id = r.run_id and k.idx = r.idx and k.map_index = r.map_index offset 0) t
 order by place, r.seq limit %(window)s::int * 10 * cardinality(%(queues)s::text[])

-- name: names
-- The full names of some tasks of some versions, queried once by each reader that selects tasks by name.
select w.version_id, w.idx, v.dag, s.name as task
  from unnest(%(version_ids)s::int[], %(idxs)s::int[]) w(version_id, idx)
  cross join lateral (select s.name from task_spec s where s.version_id = w.version_id and s.idx = w.idx offset 0) s
  cross join lateral (select d.name as dag from dag_version v join dag d on d.dag_id = v.dag_id
                       where v.version_id = w.version_id offset 0) v

-- name: published
-- The tasks of the current versions and their queues.
select d.name as dag, s.name as task, s.queue
  from dag d join task_spec s on s.version_id = d.version_id where d.deleted_at is null limit %(limit)s
