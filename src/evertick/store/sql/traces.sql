-- Finished runs with their attempts, as the source of traces. Queried only if tracing is enabled.

-- name: newest
select coalesce(max(run_id), 0) from run_status

-- name: open_runs
-- By the small index of runs that are not over.
select run_id from run_status where state in ('queued', 'running') limit %(limit)s

-- name: ended_after
-- By the key, after the last poll.
select run_id from run_status
 where run_id > %(after)s and state in ('success', 'failed', 'canceled') order by run_id limit %(limit)s

-- name: runs
select r.run_id, d.name as dag, v.number as version, r.kind, r.fire_at, r.created_at, s.state, s.finished_at, s.reason
  from run r join run_status s on s.run_id = r.run_id join dag d on d.dag_id = r.dag_id
  join dag_version v on v.version_id = r.version_id
 where r.run_id = any(%(run_ids)s::bigint[]) and s.finished_at is not null order by r.run_id limit 1000

-- name: attempts
-- Each with the instant from which only a free slot was missing: the start of its run, the end of the last upstream
-- task, or the end of the previous attempt, whichever came last.
select a.run_id, a.idx, a.map_index, t.name as task, t.queue, a.epoch, a.attempt, a.outcome, a.reason, a.started_at,
    a.finished_at,
       n.runner_id, n.host,
       greatest(r.created_at,
                (select max(u.finished_at) from edge g join task u on u.run_id = a.run_id and u.idx = g.src
                  where g.version_id = r.version_id and g.dst = a.idx and u.finished_at <= a.started_at),
                (select max(b.finished_at) from attempts b
                  where b.run_id = a.run_id and b.idx = a.idx and b.map_index = a.map_index and b.epoch < a.epoch)) as
                      ready_at
  from run r
  join attempts a on a.run_id = r.run_id
  join task_spec t on t.version_id = r.version_id and t.idx = a.idx
  left join runner n on n.session = a.session
 where r.run_id = any(%(run_ids)s::bigint[]) and a.started_at is not null and a.finished_at is not null
 order by a.run_id, a.started_at, a.idx, a.map_index limit %(limit)s
