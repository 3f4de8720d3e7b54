-- Changes since an earlier poll, for live views: read from the rows themselves, so that no task transition has to write
-- anything extra. A row's xmin is the transaction that wrote it; one that was open at the last poll is not older than
-- that poll's oldest open one (`since`), whatever the commit order, and neither are its subtransactions.

-- name: mark
-- The position of a poll. Rows younger than `oldest` may not have been visible.
select pg_snapshot_xmin(s)::text::bigint as oldest, pg_snapshot_xmax(s)::text::bigint as next,
       (select coalesce(max(r.run_id), 0) from run_status r) as newest_run,
       (select coalesce(max(j.entry_id), 0) from audit_log j) as newest_entry, clock() as at
  from pg_current_snapshot() s

-- name: open_run_ids
select run_id from run_status where state in ('queued', 'running') order by run_id desc limit %(limit)s

-- name: changed_runs
-- Changed open runs, by their small index; new runs that are already over, by the key; and those open at the last poll.
select run_id, dag_id, state::text as state, open_tasks, started_at, finished_at, xmin::text::bigint as written_by
  from run_status where state in ('queued', 'running') and age(xmin) between 0 and age(%(since)s::text::xid)
union all
select run_id, dag_id, state::text, open_tasks, started_at, finished_at, xmin::text::bigint from run_status
 where run_id > %(after)s::bigint and state not in ('queued', 'running')
   and age(xmin) between 0 and age(%(since)s::text::xid)
union all
select r.run_id, r.dag_id, r.state::text, r.open_tasks, r.started_at, r.finished_at, r.xmin::text::bigint
  from unnest(%(were_open)s::bigint[]) k
  cross join lateral (select x.*, x.xmin from run_status x
                       where x.run_id = k and x.state not in ('queued', 'running') offset 0) r
 limit %(limit)s

-- name: entries
-- Actions of users and of reconciliation. Only one name of the details: the rest is in the audit log.
select j.entry_id, j.occurred_at, j.action as verb, coalesce(j.dag_id, r.dag_id) as dag_id, j.run_id, s.name as task,
       j.map_index, coalesce(j.detail->>'pool', j.detail->>'runner',
                             case when j.action like '%%\_schedule' then j.detail->>'name' end) as subject,
       (j.detail->>'backfill')::int as backfill, r.state::text as state, j.xmin::text::bigint as written_by
  from audit_log j left join run_status r on r.run_id = j.run_id
  left join task_spec s on s.version_id = r.version_id and s.idx = j.idx
 where j.entry_id > %(after)s::bigint and age(j.xmin) between 0 and age(%(since)s::text::xid) order by j.entry_id
 limit %(limit)s

-- name: watched
-- The newest open runs of the given DAGs, or of all; and those of the runs that just changed, finished ones included.
(select run_id from run_status
  where state in ('queued', 'running')
      and (%(is_all)s or dag_id in (select d.dag_id from dag d where d.name = any(%(dags)s::text[])))
  order by run_id desc limit %(limit)s)
union
select r.run_id from unnest(%(moved)s::bigint[]) m
 cross join lateral (select x.run_id, x.dag_id from run_status x where x.run_id = m offset 0) r
 where %(is_all)s or r.dag_id in (select d.dag_id from dag d where d.name = any(%(dags)s::text[]))

-- name: tasks
-- The changed tasks of these runs, run by run by the key.
select k.run_id, r.dag_id, s.name as task, k.map_index, k.state::text as state, k.attempt, k.started_at, k.finished_at,
       k.written_by
  from unnest(%(run_ids)s::bigint[]) w
  cross join lateral (select r.dag_id from run_status r where r.run_id = w offset 0) r
  cross join lateral (select x.*, x.xmin::text::bigint as written_by from task x
                       where x.run_id = w and age(x.xmin) between 0 and age(%(since)s::text::xid) offset 0) k
  join task_spec s on s.version_id = k.version_id and s.idx = k.idx limit %(limit)s

-- name: tagged_dags
select d.dag_id, d.name, coalesce(v.spec->'tags', '[]') as tags
  from dag d left join dag_version v on v.version_id = d.version_id where d.dag_id = any(%(dag_ids)s::int[])

-- Finished runs with their attempts, as the source of traces. Queried only if tracing is enabled.

-- name: newest
select coalesce(max(run_id), 0) from run_status

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
-- Each with the instant from which only a slot was missing: after the run's start, its upstream and its last attempt.
select a.run_id, a.idx, a.map_index, t.name as task, t.queue, a.epoch, a.attempt, a.outcome, a.reason, a.started_at,
       a.finished_at, n.runner_id, n.host, greatest(r.created_at,
           (select max(u.finished_at) from edge g join task u on u.run_id = a.run_id and u.idx = g.src
             where g.version_id = r.version_id and g.dst = a.idx and u.finished_at <= a.started_at),
           (select max(b.finished_at) from all_attempts b
             where b.run_id = a.run_id and b.idx = a.idx and b.map_index = a.map_index
               and b.epoch < a.epoch)) as ready_at
  from run r join all_attempts a on a.run_id = r.run_id
  join task_spec t on t.version_id = r.version_id and t.idx = a.idx left join runner n on n.session = a.session
 where r.run_id = any(%(run_ids)s::bigint[]) and a.started_at is not null and a.finished_at is not null
 order by a.run_id, a.started_at, a.idx, a.map_index limit %(limit)s
