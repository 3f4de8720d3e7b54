-- What the leader polls once per tick, in one round trip; and the views of tasks and attempts.

-- Leases of sessions that are over or unknown (a claim that met the end of its runner). Steps through the index.
create function dead_sessions_with_leases() returns setof bigint language sql stable as $$
    with recursive holder as (
        (select session from lease order by session limit 1)
        union all
        select (select l.session from lease l where l.session > h.session order by l.session limit 1)
        from holder h where h.session is not null
    ), trigger_holder as (
        (select session from task_trigger where session is not null order by session limit 1)
        union all
        select (select w.session from task_trigger w where w.session > h.session order by w.session limit 1)
        from trigger_holder h where h.session is not null
    )
    select x.session from (
        select h.session from holder h
        where exists (select 1 from lease l where l.session = h.session and not is_quarantined('run', l.run_id))
        union select h.session from trigger_holder h) x
    left join runner r on r.session = x.session
    where x.session is not null and (r.session is null or r.ended_at is not null) limit 100
$$;

-- A claim counts as a heartbeat: no attempt is judged by a silence from before. One in the future proves nothing.
create function has_claimed_since(p_session bigint, p_seconds double precision)
returns boolean language sql stable as $$
    select exists (
        select 1 from lease l join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
        where l.session = p_session and k.started_at > clock() - make_interval(secs => p_seconds)
          and k.started_at <= clock())
$$;

-- Whether its heartbeats reach the database through an API.
create function is_served_by_api(p_runner runner) returns boolean language sql immutable as $$
    select p_runner.queues = '{}' or p_runner.token_id is not null
$$;

-- Adds the elapsed time, at most two seconds, to the silence of each runner without a new heartbeat, so that a
-- restarted leader, an outage or a clock jump adds nothing. A locked row is skipped. The silence of an agent, or of a
-- runner over HTTPS, begins anew while no API has answered for a third of the threshold: no one could hear it. The
-- other two thirds are for the last heartbeat before that and the first one after it. Returns the runners that have
-- been silent for too long by our threshold and by their own, and have not claimed since then.
create function detect_dead_runners(p_elapsed double precision, p_lost_after double precision)
returns setof bigint language sql as $$
    with api as materialized (
        select a.heartbeat_seq, case when a.heartbeat_seq > a.observed_seq then 0
                                     else a.silent_seconds + least(p_elapsed, 2) end as silent_seconds
        from agent_api a
    ), api_watched as (
        update agent_api a set silent_seconds = x.silent_seconds, observed_seq = x.heartbeat_seq from api x
        where a.observed_seq < x.heartbeat_seq
           or (p_elapsed > 0 and exists (select 1 from runner r where r.ended_at is null and is_served_by_api(r)))
    ), watched as (
        update runner r
        set silent_seconds = case when r.heartbeat_seq > r.observed_seq or (
                                       is_served_by_api(r) and (select x.silent_seconds from api x)
                                           > greatest(p_lost_after, r.lost_after_seconds) / 3) then 0
                                  else r.silent_seconds + least(p_elapsed, 2) end, observed_seq = r.heartbeat_seq
        where r.session = any(array(select x.session from runner x where x.ended_at is null
                                    for no key update skip locked)) and r.ended_at is null
          and (r.heartbeat_seq > r.observed_seq or p_elapsed > 0)
        returning r.session, r.silent_seconds, greatest(p_lost_after, r.lost_after_seconds) as threshold
    )
    select w.session from watched w
    where w.silent_seconds > w.threshold and not has_claimed_since(w.session, w.threshold) limit 100
$$;

-- The lost runners, without the other parts of poll_work.
create function observe_heartbeats(p_shard smallint, p_epoch bigint, p_elapsed double precision,
                                   p_lost_after double precision, out silent_sessions bigint[],
                                   out dead_sessions bigint[]) language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    silent_sessions := array(select x from detect_dead_runners(p_elapsed, p_lost_after) x);
    dead_sessions := array(select x from dead_sessions_with_leases() x);
end $$;

-- Whether a run has taken longer than its DAG allows, and something in it is still running that was not asked to stop.
create function is_run_overdue(p_run_id bigint) returns boolean language sql stable as $$
    select exists (
        select 1 from run_status r join dag_version v on v.version_id = r.version_id
        where r.run_id = p_run_id and r.state = 'running' and not r.cancel_requested
          and r.started_at + make_interval(secs => v.run_timeout) <= clock()
          and (v.task_count + r.extra_tasks > (select count(*) from task k where k.run_id = r.run_id)
               or exists (select 1 from task k where k.run_id = r.run_id
                          and (k.state in ('waiting', 'pending', 'available', 'deferred')
                               or (k.state in ('queued', 'running') and k.request is null)))))
$$;

-- By the index of open runs, and only of DAGs that limit the time of a run.
create function overdue_runs(p_shard smallint) returns setof bigint language sql stable as $$
    select late.run_id from (
        select r.run_id from dag d
        cross join lateral (select x.run_id, x.version_id, x.started_at from run_status x
                            where x.dag_id = d.dag_id and x.state in ('queued', 'running')
                                and x.state = 'running' offset 0) r
        cross join lateral (select x.run_timeout from dag_version x where x.version_id = r.version_id offset 0) v
        where d.has_run_timeout and d.shard = p_shard and r.started_at + make_interval(secs => v.run_timeout) <= clock()
        offset 0) late
    where is_run_overdue(late.run_id) and not is_quarantined('run', late.run_id) limit 100
$$;

-- DAGs with queued runs that could start, skipped because of a lock. Steps from DAG to DAG by the index of open runs.
create function dags_with_free_slots(p_shard smallint) returns setof int language sql stable as $$
    with recursive active as (
        (select r.dag_id from run_status r where r.state in ('queued', 'running') order by r.dag_id limit 1)
        union all
        select (select r.dag_id from run_status r where r.state in ('queued', 'running') and r.dag_id > a.dag_id
                order by r.dag_id limit 1)
        from active a where a.dag_id is not null
    )
    select d.dag_id from active a
    cross join lateral (select x.dag_id, x.max_active_runs, x.serializes_runs, x.depends_on_past from dag x
                        where x.dag_id = a.dag_id and x.shard = p_shard and not x.is_paused offset 0) d
    where (select true from run_status q
           where q.dag_id = d.dag_id and q.state in ('queued', 'running') and q.state = 'queued'
             and not exists (select 1 from delayed_run x where x.run_id = q.run_id) limit 1)
      and (((d.max_active_runs is null or d.max_active_runs > (
                select count(*) from run_status q
                where q.dag_id = d.dag_id and q.state in ('queued', 'running') and q.state = 'running'))
            and (not d.serializes_runs or exists (select 1 from next_runs_in_order(d.dag_id))))
           or (d.depends_on_past and exists (select 1 from runs_blocking_others(d.dag_id))))
      and not is_quarantined('dag', d.dag_id) limit 100
$$;

-- Everything that the leader must know, in one round trip: the lease is renewed, silence is added up, and the answer
-- says what is due now, and when next. p_seconds and p_elapsed are null for a call that only reads. Each part fails on
-- its own and reports it in `errors`; a locked row is read again in a moment. A mark that the leader remembers
-- (server_timeline) is advanced as well, which saves a transaction per second; an older stored mark stays, for the
-- process that reports the loss. What exists once for all shards (silence, ready queue, gates, arrivals, outbox, marks)
-- is for shard 0.
create function poll_work(p_shard smallint, p_epoch bigint, p_seconds double precision, p_watches boolean,
                          p_is_watched boolean, p_elapsed double precision, p_lost_after double precision,
                          p_system_id bigint, p_timeline bigint, p_lsn bigint, out read_at timestamptz,
                          out has_session_lock boolean, out next_fire timestamptz, out next_timer timestamptz,
                          out has_waiting_retries boolean, out next_expiry timestamptz, out silent_sessions bigint[],
                          out dead_sessions bigint[], out overdue bigint[], out dags_with_free_slots int[],
                          out backfills int[], out has_arrivals boolean, out next_wake timestamptz,
                          out has_gates boolean, out next_opening timestamptz, out has_deliveries boolean,
                          out has_requests boolean, out next_start timestamptz,
                          out marked_lsn bigint, out is_synchronous boolean, out shard_count smallint,
                          out has_moves boolean, out errors text[]) language plpgsql as $$
declare
    part text;
begin
    perform fence(p_shard, p_epoch);
    read_at := clock();
    errors := '{}';
    has_session_lock := p_is_watched;
    if p_seconds is not null then
        if p_watches and not p_is_watched then
            has_session_lock := pg_try_advisory_lock(4712, p_shard);
        end if;
        update shard s set lease_until = read_at + make_interval(secs => p_seconds),
            has_session_lock = poll_work.has_session_lock
        where s.shard = p_shard and s.epoch = p_epoch and s.lease_until is not null
        returning s.shard_count, s.rebalancing_since is not null into shard_count, has_moves;
        if not found then
            raise exception 'not the leader of shard %: epoch % has resigned', p_shard, p_epoch using errcode = 'EV001';
        end if;
    end if;
    perform set_config('lock_timeout', '50ms', true);
    if p_shard <> 0 then
        dead_sessions := '{}';
        has_arrivals := false;
        has_gates := false;
        has_deliveries := false;
        has_requests := false;
    end if;
    foreach part in array array['fire', 'promote', 'time_out', 'admit', 'backfill', 'wake']
        || case when p_shard = 0 then array['reap', 'expire', 'hear', 'gates', 'notify', 'inbox', 'mark'] end
    loop
        begin
            case part
            when 'fire' then
                select min(s.next_due) into next_fire from schedule_state s
                where s.shard = p_shard and s.next_due is not null and not s.is_paused and s.error is null;
            when 'promote' then
                select min(w.due_at) into next_timer from task_timer w where w.shard = p_shard;
                has_waiting_retries := exists (select 1 from retry_queue l where l.shard = p_shard);
            when 'time_out' then
                overdue := array(select x from overdue_runs(p_shard) x);
            when 'admit' then
                dags_with_free_slots := array(select x from dags_with_free_slots(p_shard) x);
            when 'backfill' then
                backfills := array(select b.backfill_id from backfill b
                                   where b.shard = p_shard and (b.state = 'running' or b.open_runs > 0)
                                   order by b.backfill_id limit 100);
            when 'wake' then
                next_wake := next_wake(p_shard);
            when 'reap' then
                if p_elapsed is not null then
                    silent_sessions := array(select x from detect_dead_runners(p_elapsed, p_lost_after) x);
                end if;
                dead_sessions := array(select x from dead_sessions_with_leases() x);
            when 'expire' then
                select min(q.expires_at) into next_expiry from ready_task q where q.expires_at is not null;
            when 'hear' then
                has_arrivals := exists (select 1 from dependency_event) or exists (select 1 from partition_arrival);
            when 'gates' then
                select min(g.next_opening) into next_opening from gate g where g.next_opening is not null;
                has_gates := exists (select 1 from gate g where g.needs_admission) or has_admissible_tasks();
            when 'notify' then
                has_deliveries := exists (select 1 from outbox o where o.shard = p_shard and o.state = 'waiting');
            when 'inbox' then
                has_requests := exists (select 1 from inbox) or exists (select 1 from event_arrival);
                next_start := next_start();
            when 'mark' then
                update server_timeline c
                set marked_at = clock_timestamp(), lsn = pg_current_wal_insert_lsn(),
                    is_synchronous = current_setting('synchronous_standby_names') <> ''
                                     and current_setting('synchronous_commit') not in ('off', 'local')
                where c.ctid = (select x.ctid from server_timeline x
                                where x.system_id = p_system_id and x.timeline = p_timeline
                                  and x.lsn >= '0/0'::pg_lsn + p_lsn::numeric for no key update skip locked)
                returning (c.lsn - '0/0')::bigint, c.is_synchronous into marked_lsn, poll_work.is_synchronous;
            end case;
        exception when others then
            errors := array_append(errors, part || ': ' || sqlerrm);
        end;
    end loop;
    -- The leader sets its timer by this. Read last: otherwise the timer would be late by the duration of the query.
    read_at := clock();
end $$;

-- What a deferred task waits for, in a few words; `explain_task` has the details.
create function describe_wait(p_run_id bigint, p_idx int, p_map_index int) returns text language plpgsql stable as $$
begin
    return (select case when d.kind = 'run' then 'waits for run ' || substr(d.key, 5)
                        when d.kind = 'event' then 'waits for event ' || substr(d.key, 7)
                        when d.kind = 'approval' or exists (
                            select 1 from approval a where a.run_id = p_run_id and a.idx = p_idx
                                and a.map_index = p_map_index and a.epoch = d.epoch) then 'waits for a decision'
                        when d.kind = 'trigger' then (select 'waits for trigger ' || w.classpath || ' since '
                                                             || format_utc(w.since)
                                                      from task_trigger w where w.run_id = p_run_id and w.idx = p_idx
                                                        and w.map_index = p_map_index)
                        when d.kind = 'poll' then coalesce((select format('polled %s times since %s, again at ',
                            q.polls,
                                                                 format_utc(q.since))
                                                   from sensor_poll q where q.run_id = p_run_id and q.idx = p_idx
                                                     and q.map_index = p_map_index), 'polled again at ')
                                         || format_utc(d.wake_at)
                        when d.kind = 'time' then 'waits until ' || format_utc(d.wake_at) end
            from deferral d where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index);
end $$;

create function format_utc(p_instant timestamptz) returns text language sql stable as $$
    select to_char(p_instant at time zone 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')
$$;

-- For people: one row per task of each run, including those without a row.
create view all_tasks as
select r.run_id, s.idx, coalesce(k.map_index, -1) as map_index, r.dag_id, d.name as dag, x.version_id, s.name as task,
       s.queue, s.priority, s.max_attempts, coalesce(k.state, 'waiting') as state, coalesce(k.epoch, 0) as epoch,
       coalesce(k.attempt, 0) as attempt, k.lost_attempts as losses, k.session, k.request, k.not_before, k.started_at,
       k.finished_at, k.exit_code, k.map_name,
       case when k.state = 'pending' and k.not_before is not null and exists (
                select 1 from retry_queue l where l.shard = any(array(select h.shard from shard h))
                    and l.queue = s.queue
                    and l.due_at = k.not_before
                   and l.run_id = k.run_id and l.idx = k.idx and l.map_index = k.map_index)
            then concat_ws('; ', k.reason,
                           'held back: as many retries of its queue are active as max_active_retries allows')
            when k.state = 'deferred' then describe_wait(k.run_id, k.idx, k.map_index)
            else k.reason end as reason
from run r
join run_status x on x.run_id = r.run_id
join dag d on d.dag_id = r.dag_id
join task_spec s on s.version_id = x.version_id
left join task k on k.run_id = r.run_id and k.idx = s.idx;

-- An attempt that an executor never began has no start.
create view all_attempts as
select k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.session, k.state::text as outcome, k.reason, k.exit_code,
       k.started_at, k.finished_at, k.admitted_at as let_in_at, k.queued_at as taken_at,
       case when k.finished_at is not null then k.startup_seconds end as start_seconds, null::timestamptz as retry_at,
       case when k.finished_at is not null then k.cpu_seconds end as cpu_seconds,
       case when k.finished_at is not null then k.peak_memory_bytes end as peak_memory_bytes
from task k
where (k.started_at is not null or (k.session is not null and k.finished_at is not null)) and not exists (
    select 1 from attempt a where a.run_id = k.run_id and a.idx = k.idx and a.map_index = k.map_index
        and a.epoch = k.epoch)
union all
select a.run_id, a.idx, a.map_index, a.epoch, a.attempt, a.session, a.outcome, a.reason, a.exit_code, a.started_at,
       a.finished_at, a.admitted_at as let_in_at, a.queued_at as taken_at, a.startup_seconds as start_seconds,
           a.retry_at, a.cpu_seconds, a.peak_memory_bytes
from attempt a;
