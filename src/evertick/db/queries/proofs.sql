-- The guarantees as questions to a live database: each statement returns what violates one, and nothing else.
--
-- A statement sees one snapshot, and every transaction keeps the guarantees, so a single row is a violation. Those with
-- `runs` read the tasks of these runs by their key; those without read small tables whose rows are live work.

-- name: open_runs
-- The next open runs by the index of open runs. Those in quarantine are known not to work.
select s.dag_id, s.run_id from run_status s
 where s.state in ('queued', 'running') and (s.dag_id, s.state, s.run_id) > (%(dag_id)s::int, 'running'::run_state,
                                                                             %(run_id)s::bigint)
   and s.state = 'running' order by s.dag_id, s.state, s.run_id limit %(limit)s

-- name: ended_runs
-- Runs that ended after `since`, in that order, by the index of each DAG. `until` leaves time for late commits.
select r.run_id, r.finished_at from dag d
  cross join lateral (select x.run_id, x.finished_at from run_status x
                       where x.dag_id = d.dag_id and x.finished_at is not null
                         and (x.finished_at, x.run_id) > (%(since)s::timestamptz, %(run_id)s::bigint)
                         and x.finished_at <= %(until)s::timestamptz
                       order by x.finished_at, x.run_id limit %(limit)s) r
 order by r.finished_at, r.run_id limit %(limit)s

-- name: running_without_lease
select k.run_id, k.idx, k.map_index, format('runs with epoch %%s of session %%s, and no such lease exists', k.epoch,
                                            k.session) as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  cross join lateral (select * from task x where x.run_id = r.run_id and x.state = 'running' offset 0) k
 where not exists (select 1 from lease l where l.session = k.session and l.run_id = k.run_id and l.idx = k.idx
                   and l.map_index = k.map_index and l.epoch = k.epoch) limit %(limit)s

-- name: queued_without_dispatch
select k.run_id, k.idx, k.map_index, format('is queued with epoch %%s, and on the list of no executor', k.epoch)
           as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  cross join lateral (select * from task x where x.run_id = r.run_id and x.state = 'queued' offset 0) k
 where not exists (select 1 from dispatch d where d.run_id = k.run_id and d.idx = k.idx and d.map_index = k.map_index
                   and d.epoch = k.epoch and d.session = k.session) limit %(limit)s

-- name: available_without_place
-- The whole ready queue as one hash, because it has no index by run; nothing of it is read without an available task.
with k as materialized (
    select x.run_id, x.idx, x.map_index from unnest(%(runs)s::bigint[]) r(run_id)
      cross join lateral (select * from task y where y.run_id = r.run_id and y.state = 'available' offset 0) x
)
select k.run_id, k.idx, k.map_index, format('is available, and %%s times in the ready queue', count(q.seq)) as detail
  from k left join ready_task q on q.run_id = k.run_id and q.idx = k.idx and q.map_index = k.map_index
 group by k.run_id, k.idx, k.map_index having count(q.seq) <> 1 limit %(limit)s

-- name: pending_without_timer
select k.run_id, k.idx, k.map_index, format('is pending until %%s, and no timer exists', k.not_before) as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  cross join lateral (select x from task x where x.run_id = r.run_id and x.state = 'pending'
                                             and x.not_before is not null offset 0) p(x)
  cross join lateral (select (p.x).*) k
 where not waits_for_time(p.x) limit %(limit)s

-- name: pending_without_cause
select k.run_id, k.idx, k.map_index, 'is pending, and waits for no time, gate or pause' as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  cross join lateral (select * from task x where x.run_id = r.run_id and x.state = 'pending'
                                             and x.not_before is null offset 0) k
 where not exists (select 1 from gate_waiter w where w.run_id = k.run_id and w.idx = k.idx
                   and w.map_index = k.map_index)
   and not exists (select 1 from run_status s join dag d on d.dag_id = s.dag_id
                    where s.run_id = k.run_id and d.is_paused) limit %(limit)s

-- name: deferred_without_wait
select k.run_id, k.idx, k.map_index, format('is deferred with epoch %%s, and nothing wakes it', k.epoch) as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  cross join lateral (select * from task x where x.run_id = r.run_id and x.state = 'deferred' offset 0) k
 where not exists (select 1 from deferral d where d.run_id = k.run_id and d.idx = k.idx and d.map_index = k.map_index
                   and d.epoch = k.epoch) limit %(limit)s

-- name: run_counted_wrong
-- A mapped task counts as one until it has instances.
select s.run_id, null::int as idx, null::int as map_index,
       format('is %%s with %%s open and %%s additional tasks; its tasks say %%s open and %%s additional', s.state,
              s.open_tasks, s.extra_tasks, v.task_count + c.extra - c.ended, c.extra) as detail
  from unnest(%(runs)s::bigint[]) r(run_id) join run_status s on s.run_id = r.run_id
  join dag_version v on v.version_id = s.version_id
  cross join lateral (select count(*) filter (where k.state in ('success', 'failed', 'skipped', 'canceled',
                                                                'upstream_failed')) as ended,
                             count(*) - count(distinct k.idx) as extra
                        from task k where k.run_id = s.run_id) c
 where s.extra_tasks <> c.extra or s.open_tasks <> v.task_count + c.extra - c.ended limit %(limit)s

-- name: run_ended_early
select s.run_id, k.idx, k.map_index, format('is %%s, and its run ended as %%s at %%s', k.state, s.state, s.finished_at)
           as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  join run_status s on s.run_id = r.run_id and s.state in ('success', 'failed', 'canceled')
  cross join lateral (select * from task x where x.run_id = s.run_id and x.state not in (
                          'success', 'failed', 'skipped', 'canceled', 'upstream_failed') offset 0) k limit %(limit)s

-- name: run_without_cause
-- inspect_run reads what the reconciliation would repair, or fail in the end because nothing of it can move.
select r.run_id, null::int as idx, null::int as map_index,
       case c.verdict when 'stuck' then 'runs, and nothing of it can move'
                      else 'runs, and its counters do not follow from its tasks' end as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  cross join lateral (select inspect_run(r.run_id, null) as verdict) c
 where c.verdict <> 'sound' and not is_quarantined('run', r.run_id) limit %(limit)s

-- name: run_result_wrong
select s.run_id, null::int as idx, null::int as map_index,
       format('ended as %%s with %%s failed last tasks', s.state, c.failed) as detail
  from unnest(%(runs)s::bigint[]) r(run_id) join run_status s on s.run_id = r.run_id
  cross join lateral (select count(*) filter (where t.is_leaf and k.state in ('failed', 'canceled',
                                                                              'upstream_failed')) as failed
                        from task k join task_spec t on t.version_id = k.version_id and t.idx = k.idx
                       where k.run_id = s.run_id) c
 where (s.state = 'success' and c.failed > 0) or (s.state = 'failed' and c.failed = 0 and s.reason is null)
 limit %(limit)s

-- name: retries_over_budget
select k.run_id, k.idx, k.map_index, format('has used %%s of %%s attempts', k.attempt, t.max_attempts) as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  cross join lateral (select * from task x where x.run_id = r.run_id and x.attempt > 1 offset 0) k
  join task_spec t on t.version_id = k.version_id and t.idx = k.idx where k.attempt > t.max_attempts limit %(limit)s

-- name: attempt_ended_twice
-- A retry writes the end of the attempt down before the task can begin again; a success is only in the task's own row.
-- An operator may mark a task that waits for its retry as successful.
select k.run_id, k.idx, k.map_index, format('succeeded with epoch %%s, which had ended before: %%s', k.epoch,
                                            a.outcome) as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  cross join lateral (select * from task x where x.run_id = r.run_id and x.state = 'success' offset 0) k
  join attempt a on a.run_id = k.run_id and a.idx = k.idx and a.map_index = k.map_index and a.epoch = k.epoch
 where not exists (select 1 from audit_log j where j.run_id = k.run_id
                   and j.action in ('mark', 'clear')) limit %(limit)s

-- name: epoch_went_back
select k.run_id, k.idx, k.map_index, format('has epoch %%s, and %%s of epoch %%s', k.epoch, f.kind, f.epoch) as detail
  from unnest(%(runs)s::bigint[]) r(run_id)
  cross join lateral (select * from task x where x.run_id = r.run_id offset 0) k
  cross join lateral (
      select 'an attempt' as kind, a.epoch from attempt a
       where a.run_id = k.run_id and a.idx = k.idx and a.map_index = k.map_index and a.epoch > k.epoch
      union all
      select 'a result', v.epoch from result v
       where v.run_id = k.run_id and v.idx = k.idx and v.map_index = k.map_index and v.epoch > k.epoch
      union all
      (select 'log lines', c.epoch from log_chunk c
        where c.run_id = k.run_id and c.idx = k.idx and c.map_index = k.map_index and c.epoch > k.epoch limit 1)) f
 limit %(limit)s

-- name: run_without_status
select f.run_id, null::int as idx, null::int as map_index, 'has no status' as detail
  from run f where f.run_id = any(%(runs)s::bigint[])
   and not exists (select 1 from run_status s where s.run_id = f.run_id)
 union all
select s.run_id, null, null, 'has a status, and no run exists' from run_status s
 where s.run_id = any(%(runs)s::bigint[]) and not exists (select 1 from run f where f.run_id = s.run_id) limit %(limit)s

-- name: lease_without_task
select l.run_id, l.idx, l.map_index, format('is %%s, and session %%s has a lease with epoch %%s',
                                            coalesce(k.state::text, 'unknown'), l.session, l.epoch) as detail
  from lease l left join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
 where (k.state = 'running' and k.epoch = l.epoch and k.session = l.session) is not true limit %(limit)s

-- name: two_owners
select l.run_id, l.idx, l.map_index, format('has %%s leases', count(*)) as detail from lease l
 group by l.run_id, l.idx, l.map_index having count(*) > 1 limit %(limit)s

-- name: ready_without_task
select q.run_id, q.idx, q.map_index, format('is %%s, and in the ready queue %%s', coalesce(k.state::text, 'unknown'),
                                            q.queue) as detail
  from ready_task q left join task k on k.run_id = q.run_id and k.idx = q.idx and k.map_index = q.map_index
 where k.state is distinct from 'available' limit %(limit)s

-- name: timer_without_task
-- A timer whose task no longer waits for it is deleted when it is due, so that only an old one is wrong.
select w.run_id, w.idx, w.map_index, format('is %%s, and its timer was due at %%s', coalesce(k.state::text, 'unknown'),
                                            w.due_at) as detail
  from task_timer w left join task k on k.run_id = w.run_id and k.idx = w.idx and k.map_index = w.map_index
 where w.due_at < clock() - interval '10 minutes' and not is_quarantined('run', w.run_id) limit %(limit)s

-- name: waiter_without_task
select w.run_id, w.idx, w.map_index, 
       format('is %%s, and queued at a gate', coalesce(k.state::text, 'unknown')) as detail
  from gate_waiter w left join task k on k.run_id = w.run_id and k.idx = w.idx and k.map_index = w.map_index
 where k.state is distinct from 'pending' or k.not_before is not null limit %(limit)s

-- name: holder_without_task
select h.run_id, h.idx, h.map_index, format('is %%s, and holds gates', coalesce(k.state::text, 'unknown')) as detail
  from gate_holder h left join task k on k.run_id = h.run_id and k.idx = h.idx and k.map_index = h.map_index
 where k.state is null or k.state not in ('available', 'queued', 'running') limit %(limit)s

-- name: gate_counted_wrong
select null::bigint as run_id, null::int as idx, null::int as map_index,
       format('has %%s slots in use, and its holders have %%s', g.used, coalesce(h.weight, 0)) as detail,
       format('%%s %%s', g.kind, g.name) as name
  from gate g left join (select n.gate_id, sum(n.weight) as weight from gate_holder x
                           cross join lateral unnest(x.gate_ids, x.weights) as n(gate_id, weight)
                          group by n.gate_id
                          union all
                         select p.gate_id, count(*) from rate_slot p group by p.gate_id) h on h.gate_id = g.gate_id
 where g.used <> coalesce(h.weight, 0) limit %(limit)s

-- name: gate_over_size
-- The size of a pool or of a limit may be set below its use; that of a mutex is fixed.
select null::bigint as run_id, null::int as idx, null::int as map_index,
       format('has %%s of %%s slots in use', g.used, g.capacity) as detail, format('%%s %%s', g.kind, g.name) as name
  from gate g where g.used > g.capacity and (g.kind = 'mutex' or (g.kind = 'pool' and g.revision = 1)) limit %(limit)s

-- name: event_undelivered
select null::bigint as run_id, null::int as idx, null::int as map_index,
       format('was sent at %%s, and is not delivered', e.sent_at) as detail, format('event %%s', e.event_id) as name
  from event e where not e.is_delivered and e.sent_at < clock() - interval '10 minutes'
 union all
select d.run_id, null, null, format('occurred at %%s, and is not delivered', d.occurred_at),
       format('event of %%s %%s', d.kind, d.name)
  from dependency_event d where d.occurred_at < clock() - interval '10 minutes' limit %(limit)s

-- name: backfill_counted_wrong
-- A run that was deleted stays counted.
select null::bigint as run_id, null::int as idx, null::int as map_index,
       format('is %%s with %%s runs: %%s open, %%s ended, %%s skipped, of %%s', b.state, b.created, b.open_runs,
              b.succeeded + b.failed + b.canceled, b.skipped, b.total) as detail,
       format('backfill %%s', b.backfill_id) as name
  from backfill b
 where (b.state = 'running' or b.open_runs > 0)
   and (b.created < b.open_runs + b.succeeded + b.failed + b.canceled or b.created + b.skipped > b.total)
 limit %(limit)s

-- name: trigger_lost
-- Entries of the audit log that acknowledge a run, with whether it exists. A deleted run has an entry, or a round of
-- retention that deleted runs as old as it: no other round explains why it is missing.
select j.entry_id, j.run_id, j.action = 'trigger' as is_trigger,
       j.action = 'trigger' and not exists (select 1 from run f where f.run_id = j.run_id)
           and not exists (select 1 from audit_log x where x.run_id = j.run_id and x.action = 'delete_run')
           and not exists (select 1 from audit_log x
                            where x.occurred_at > j.occurred_at and x.action = 'prune' and x.detail ? 'runs'
                              and (x.detail->>'before')::timestamptz > j.occurred_at)
           as is_lost
  from audit_log j where j.entry_id > %(after)s::bigint and j.occurred_at <= %(until)s::timestamptz
 order by j.entry_id limit %(limit)s

-- name: first_entry
-- The position before the first entry since an instant.
select coalesce((select j.entry_id - 1 from audit_log j where j.occurred_at >= %(since)s::timestamptz
                  order by j.occurred_at limit 1), (select max(j.entry_id) from audit_log j), 0)

-- name: proven_until
-- The instant up to which every fire has happened: a leader that is behind still owes the later ones. By the index of
-- due schedules. Also where the retention has deleted runs, since when nothing can be proven before it.
select least(%(until)s::timestamptz, (select min(s.next_due) - interval '1 microsecond' from schedule_state s
                                       where s.next_due is not null and not s.is_paused and s.error is null)) as until,
       (select max((j.detail->>'before')::timestamptz) from audit_log j
         where j.action = 'prune' and j.occurred_at > %(since)s::timestamptz) as pruned_before

-- name: schedule_versions
-- All versions of the next schedules, each until the next one. A paused schedule owes nothing until it is unpaused.
select v.schedule_id, v.version, v.changed_at, v.change = 'delete' as is_deleted, v.is_paused_directly,
       (v.settings->'spec')::text as spec, c.delay_seconds,
       lead(v.changed_at) over (partition by v.schedule_id order by v.version) as until
  from (select x.schedule_id, x.delay_seconds from schedule x join schedule_state s on s.schedule_id = x.schedule_id
         where x.schedule_id > %(after)s::int and x.deleted_at is null and not s.is_paused and s.error is null
         order by x.schedule_id limit %(limit)s) c
  join schedule_version v on v.schedule_id = c.schedule_id order by v.schedule_id, v.version

-- name: fire_unanswered
-- Instants that do not have exactly one run or one skip record.
select * from (
select x.schedule_id, x.at, (select count(*) from run f where f.schedule_id = x.schedule_id and f.fire_at = x.at)
           as runs, (select count(*) from (select k.last_at from skip_record k
                                            where k.schedule_id = x.schedule_id and k.first_at <= x.at
                                            order by k.first_at desc limit 1) s where s.last_at >= x.at) as skips
  from unnest(%(ids)s::int[], %(instants)s::timestamptz[]) x(schedule_id, at)) c
 where c.runs + c.skips <> 1
   and not (c.runs + c.skips = 0 and exists (   -- an operator deleted its run
       select 1 from audit_log j where j.action = 'delete_run' and j.occurred_at > c.at
          and (j.detail->>'schedule_id')::int = c.schedule_id and (j.detail->>'fire_at')::timestamptz = c.at))

-- name: cursors
select check_name, position, checked, checked_at from proof_cursor order by check_name limit 1000

-- name: found
-- Violations, those that still hold first.
select p.violation_id, p.check_name, p.run_id,
       (select s.name from run_status b join task_spec s on s.version_id = b.version_id
         where b.run_id = p.run_id and s.idx = p.idx) as task,
       p.map_index, p.subject, p.detail, p.found_at, p.seen_at, p.ended_at
  from proof_violation p where %(with_ended)s or p.ended_at is null
 order by (p.ended_at is null) desc, p.found_at desc, p.violation_id desc limit %(limit)s
