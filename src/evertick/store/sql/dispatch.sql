-- Attempts submitted to a remote executor, in the order of their life there.

-- name: claim
select run_id, idx, map_index, epoch, session, place, seq
  from claim_for_dispatch(%(session)s::bigint, %(queues)s::text[], %(free)s::int, %(low)s::bigint[],
                          %(aging_seconds)s::double precision, %(sessions)s::bigint[])

-- name: claim_rows
select run_id, idx, map_index, epoch, session, place, seq
  from queue_rows(%(session)s::bigint, %(queues)s::text[], %(places)s::int[], %(seqs)s::bigint[],
                  %(sessions)s::bigint[])

-- name: list_of
-- All attempts that a runner manages, with the state of each: none where it is over, or its run was pruned. Each task
-- is found by its whole key, whatever the statistics say. Ages, because the reader's clock is not the database's.
select d.run_id, d.idx, d.map_index, d.epoch, d.session, d.queue, d.tries, d.submitted_at is not null as is_submitted,
       extract(epoch from clock() - d.queued_at)::double precision as queued_seconds,
       extract(epoch from clock() - d.tried_at)::double precision as tried_seconds,
       extract(epoch from d.retry_at - clock())::double precision as retry_seconds, d.trouble,
       k.state::text as state, k.request::text as request, k.version_id, k.attempt::int as attempt,
       k.state is null and coalesce((select r.gone_reason = 'finished' from runner r where r.session = d.session),
                                    false) as has_finished
  from dispatch d
  left join lateral (
      select x.state, x.request, x.version_id, x.attempt from task x
       where x.run_id = d.run_id and x.idx = d.idx and x.map_index = d.map_index and x.epoch = d.epoch
           and x.session = d.session
         and x.state in ('queued', 'running') offset 0) k on true
 where d.owner = %(owner)s order by d.queued_at, d.run_id, d.idx, d.map_index limit %(limit)s

-- name: not_begun
-- Submitted attempts that have not started, the oldest first, for people: with the last error, if any.
select d.executor, d.run_id, d.map_index, g.name as dag, s.name as task, d.queue, d.queued_at, d.tries, d.submitted_at,
    d.trouble, d.retry_at
  from dispatch d join task k on k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index
      and k.epoch = d.epoch
  join task_spec s on s.version_id = k.version_id and s.idx = d.idx
  join run_status r on r.run_id = d.run_id join dag g on g.dag_id = r.dag_id
 where d.started_at is null and k.state = 'queued' and k.session = d.session
 order by d.queued_at, d.run_id, d.idx, d.map_index limit %(limit)s

-- name: known
-- The attempts of these that are on the list, whichever runner manages them.
select k.session from unnest(%(sessions)s::bigint[]) s(session)
 cross join lateral (select x.session from dispatch x where x.session = s.session offset 0) k

-- name: note_tries
-- Before each submission: the search for lost attempts counts from here. It also sets when to submit again if no
-- result is reported: a call that kills the runner, or fails unexpectedly, is not repeated without a pause. Excludes
-- an attempt that another runner manages by now, or that may no longer start. Returns the attempts that may be
-- submitted.
update dispatch d set tries = d.tries + 1, tried_at = clock(),
       retry_at = clock() + make_interval(secs => least(0.5 * 2 ^ least(d.tries, 10), 60))
 where d.session = any(%(sessions)s::bigint[]) and d.owner = %(owner)s::bigint and exists (
       select 1 from task k where k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index
           and k.epoch = d.epoch
         and k.session = d.session and k.state = 'queued' and k.request is null)
returning d.session

-- name: note_submitted
update dispatch d set submitted_at = coalesce(d.submitted_at, clock()), trouble = null, retry_at = null
 where d.session = any(%(sessions)s::bigint[]) and d.owner = %(owner)s::bigint

-- name: note_troubles
update dispatch d set trouble = x.trouble, retry_at = clock() + make_interval(secs => x.seconds)
  from jsonb_to_recordset(%(troubles)s::jsonb) as x(session bigint, trouble text, seconds double precision)
 where d.session = x.session and d.owner = %(owner)s::bigint

-- name: end_queued
select moved_sessions, offered from end_queued(%(reports)s::jsonb, %(infra_retries)s::int)

-- name: adopt
select adopt_dispatches(%(session)s::bigint, %(silent_seconds)s::double precision, %(most)s::int)

-- name: forget
select forget_dispatches(%(sessions)s::bigint[])
