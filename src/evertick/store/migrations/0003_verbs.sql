-- The verbs of runners and planners that must be one round trip. Each names the states it leaves from, and the epoch and
-- session where an attempt exists; what does not match changes nothing and is told back to the caller.

-- Leadership -------------------------------------------------------------------------------------------------------------

-- Planning writes begin here. The shared lock is held to the end of the transaction and a takeover takes it exclusively,
-- so an old leader's commit can never follow a new leader's first. The epoch is read after the lock, in a new statement.
create function fence(p_shard smallint, p_epoch bigint) returns void language plpgsql as $$
begin
    perform pg_advisory_xact_lock_shared(4711, p_shard);
    perform 1 from shard where shard = p_shard and epoch = p_epoch;
    if not found then
        raise exception 'not the leader of shard %: epoch % is over', p_shard, p_epoch using errcode = 'EV001';
    end if;
end $$;

-- Whether that one may take a shard: nobody's lease lasts, and it is not being handed over to another.
create function is_free(s shard, p_owner text) returns boolean language sql stable as $$
    select (s.lease_until is null or s.lease_until < clock()) and s.state <> 'closed'
       and (s.heir is null or s.heir = p_owner or s.heir_until < clock())
$$;

create function take_shard(p_shard smallint, p_owner text, p_seconds double precision) returns bigint
language plpgsql as $$
declare
    taken bigint;
begin
    perform 1 from shard s where s.shard = p_shard and is_free(s, p_owner);
    if not found then
        return null;
    end if;
    perform pg_advisory_xact_lock(4711, p_shard);
    update shard s
    set epoch = s.epoch + 1, owner = p_owner, lease_until = clock() + make_interval(secs => p_seconds), is_watched = false,
        led_since = clock(), heir = null, heir_until = null
    where s.shard = p_shard and is_free(s, p_owner)
    returning s.epoch into taken;
    return taken;
end $$;

create function renew_shard(p_shard smallint, p_epoch bigint, p_seconds double precision) returns boolean
language plpgsql as $$
begin
    update shard set lease_until = clock() + make_interval(secs => p_seconds)
    where shard = p_shard and epoch = p_epoch and lease_until is not null;
    return found;
end $$;

-- Gives the lead back; with an heir, nobody else takes it for so many seconds. Whoever comes next must be able to hold the session lock
-- from its first moment on: one that dies unwatched is waited for until its lease is over. So the lock goes here, and not only with
-- the session. It goes before the commit, and that is no danger: who finds it free waits for this row, and finds it given back.
create function resign_shard(p_shard smallint, p_epoch bigint, p_heir text, p_heir_seconds double precision) returns boolean
language plpgsql as $$
declare
    held boolean := exists (select 1 from shard s where s.shard = p_shard and s.is_watched);
begin
    update shard s
    set lease_until = null, owner = null, is_watched = false, heir = p_heir,
        heir_until = clock() + make_interval(secs => p_heir_seconds)
    where s.shard = p_shard and s.epoch = p_epoch;
    if not found then
        return false;
    end if;
    if held then
        perform pg_advisory_unlock(4712, p_shard);
    end if;
    return true;
end $$;

-- Runs begin -------------------------------------------------------------------------------------------------------------

-- Gives new runs their state. Where nothing holds the DAG back the run starts at once; otherwise admission decides.
create function open_runs(p_run_ids bigint[]) returns int language plpgsql as $$
declare
    started bigint[];
    held int[];
    t timestamptz := clock();
begin
    if coalesce(cardinality(p_run_ids), 0) = 0 then
        return 0;
    end if;
    with opened as (
        insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at)
        select r.run_id, r.dag_id, r.version_id,
               case when h.is_held then 'queued'::run_state else 'running' end,
               v.task_count,
               case when h.is_held then null else t end
        from run r join dag d on d.dag_id = r.dag_id join dag_version v on v.version_id = r.version_id
        cross join lateral (select d.paused or d.max_active_runs is not null
                                   or (d.has_turns and r.schedule_id is not null) as is_held) h
        where r.run_id = any(p_run_ids)
        order by r.run_id
        on conflict (run_id) do nothing
        returning run_id, dag_id, state
    )
    select array_agg(run_id) filter (where state = 'running'), array_agg(distinct dag_id) filter (where state = 'queued')
    into started, held from opened;
    -- where no task has a deadline, asking is a look at an empty table
    if exists (select 1 from task_deadline) then
        perform set_task_deadlines(p_run_ids);
    end if;
    if started is not null then
        perform settle(start_runs(started, true));
    end if;
    if held is not null then
        perform admit_runs(held);
    end if;
    return coalesce(cardinality(started), 0);
end $$;

create function trigger_run(p_dag_id int, p_params jsonb, p_key text, p_actor text, p_fire_at timestamptz default null,
                            p_note text default null)
returns table (run_id bigint, is_new boolean, defers boolean) language plpgsql as $$
declare
    made bigint;
begin
    -- An instant of one's own is a key as well: nothing else has a run for it, neither somebody nor a schedule of the DAG.
    insert into run as r (dag_id, version_id, kind, key, fire_at, params, triggered_by, created_at)
    select d.dag_id, d.version_id, 'manual', p_key, p_fire_at, p_params, p_actor, clock()
    from dag d where d.dag_id = p_dag_id and d.deleted_at is null and d.version_id is not null
      and (p_fire_at is null or not exists (
          select 1 from schedule c join run x on x.schedule_id = c.schedule_id and x.fire_at = p_fire_at where c.dag_id = p_dag_id))
    on conflict do nothing
    returning r.run_id into made;
    if made is null then
        return query
            select r.run_id, false, false from run r where r.dag_id = p_dag_id and r.key = p_key
            union all
            select r.run_id, false, false from run r where r.dag_id = p_dag_id and r.fire_at = p_fire_at and r.kind = 'manual'
            union all
            select x.run_id, false, false from schedule c join run x on x.schedule_id = c.schedule_id and x.fire_at = p_fire_at
            where c.dag_id = p_dag_id
            limit 1;
        return;
    end if;
    if p_note is not null then
        insert into note (run_id, idx, map_index, content, written_by, written_at) values (made, -1, -1, p_note, p_actor, clock());
    end if;
    -- The run says itself who triggered it; somebody who also says from where gets it into the audit log.
    if coalesce(current_setting('evertick.origin', true), '') <> '' then
        insert into journal (occurred_at, verb, actor, dag_id, run_id, detail)
        values (clock(), 'trigger', p_actor, p_dag_id, made, jsonb_strip_nulls(jsonb_build_object('key', p_key)));
    end if;
    perform open_runs(array[made]);
    perform pass_gates();
    return query select made, true, coalesce(current_setting('evertick.arrived', true) = 'yes', false);
end $$;

-- What came of due schedules: which moved on, how many of their fires were skipped because of a run that is still open, and how
-- many tasks of such runs were asked to stop.
create type settled as (won int[], overlapped int, canceled int);

-- Settles due schedules. p_plans: [{schedule_id, version, expected, fires: [instant], last_fire, skipped: {first_at, last_at,
-- count, reason}, missing: the same, next_due, overlap, has_deadlines}]; skipped, missing and the last two only where they say
-- something. The cursor moves and its runs are created in this one transaction (V1); a plan whose schedule has moved on, changed
-- or been paused meanwhile is left out. Whoever changes a schedule also settles what it did not do while it was held:
-- p_even_held. Returns the schedules that were settled.
create function settle_schedules(p_plans jsonb, p_even_held boolean default false) returns settled language plpgsql as $$
begin
    perform 1 from schedule_state s
    where s.schedule_id = any(array(select (x->>'schedule_id')::int from jsonb_array_elements(p_plans) x))
    order by s.schedule_id for no key update;
    return settle_locked(p_plans, p_even_held);
end $$;

-- The same for whoever holds the locks of these schedules.
create function settle_locked(p_plans jsonb, p_even_held boolean) returns settled language plpgsql as $$
declare
    done settled;
    made bigint[];
    t timestamptz := clock();
begin
    done.canceled := 0;
    if jsonb_path_exists(p_plans, '$[*].overlap') then
        select o.plans, o.canceled into p_plans, done.canceled from resolve_overlap(p_plans) o;
    end if;
    -- Every row is found by its key. "is not true", because the index of what is due fits "not paused" as well, and a plan
    -- that was made while there were few schedules takes it and compares each with each (measured: 80 ms for a thousand).
    with plan as materialized (
        select * from jsonb_to_recordset(p_plans) as x(schedule_id int, version int, expected timestamptz,
            next_due timestamptz, last_fire timestamptz, fires timestamptz[], skipped jsonb, overlapped jsonb, missing jsonb)
    ), moved as (
        update schedule_state s
        set next_due = p.next_due, last_fired = coalesce(p.last_fire, s.last_fired)
        from plan p
        where s.schedule_id = p.schedule_id and s.version = p.version and s.next_due = p.expected
          and (p_even_held or (s.paused is not true and s.error is null))
        returning s.schedule_id, p.fires, p.skipped, p.overlapped, p.missing
    ), created as (
        insert into run as r (dag_id, version_id, kind, schedule_id, fire_at, params, triggered_by, created_at)
        select d.dag_id, d.version_id, 'scheduled', f.schedule_id, f.fire_at, c.params, 'schedule', t
        from (select m.schedule_id, unnest(m.fires) as fire_at from moved m) f
        cross join lateral (select * from schedule c where c.schedule_id = f.schedule_id offset 0) c
        cross join lateral (select * from dag d where d.dag_id = c.dag_id offset 0) d
        where d.deleted_at is null
        order by f.fire_at, f.schedule_id
        on conflict (schedule_id, fire_at) where schedule_id is not null do nothing
        returning r.run_id
    ), passed as (
        insert into skip_record (schedule_id, first_at, last_at, count, reason, recorded_at)
        select m.schedule_id, k.first_at, k.last_at, k.count, k.reason, t
        from moved m
        cross join lateral (values (m.skipped), (m.overlapped), (m.missing)) v(skipped)
        cross join lateral jsonb_to_record(v.skipped)
            as k(first_at timestamptz, last_at timestamptz, count bigint, reason text)
        where jsonb_typeof(v.skipped) = 'object'
        on conflict (schedule_id, first_at) do nothing
    )
    select array(select m.schedule_id from moved m), array(select c.run_id from created c),
           coalesce((select sum((m.overlapped->>'count')::int) from moved m where m.overlapped is not null), 0)
    into done.won, made, done.overlapped;
    if done.overlapped > 0 then
        perform join_overlapped(done.won);
    end if;
    perform open_runs(made);
    if jsonb_path_exists(p_plans, '$[*].has_deadlines') then
        perform set_deadlines(made);
    end if;
    return done;
end $$;

-- A schedule that somebody is just changing is passed by: who changes it settles what is due, and it keeps no other waiting. So
-- is one that is not due yet by this clock: it was planned ahead, by a leader whose own clock is fast.
create function fire(p_shard smallint, p_epoch bigint, p_plans jsonb) returns settled language plpgsql as $$
declare
    free int[];
    done settled;
begin
    perform fence(p_shard, p_epoch);
    free := array(
        select s.schedule_id from schedule_state s
        where s.schedule_id = any(array(select (x->>'schedule_id')::int from jsonb_array_elements(p_plans) x))
          and (s.next_due > clock()) is not true and s.shard = p_shard   -- one that has moved is its new leader's
        order by s.schedule_id for no key update skip locked);
    if cardinality(free) < jsonb_array_length(p_plans) then
        p_plans := (select coalesce(jsonb_agg(x), '[]') from jsonb_array_elements(p_plans) x
                    where (x->>'schedule_id')::int = any(free));
    end if;
    done := settle_locked(p_plans, false);
    perform pass_gates();
    return done;
end $$;

-- Runners ----------------------------------------------------------------------------------------------------------------

create type step_row as (
    kind text, run_id bigint, idx int, map_index int, epoch int, attempt int, version_id int,
    fire_at timestamptz, params text, inputs text, place int, seq bigint);

-- Claims up to p_free available tasks of the queues. MATERIALIZED, because a plan that ran the locking subquery twice
-- would lock more than it takes. Rows are deleted by their place, here and in finish: joined by key, a plan that was made
-- while the table was empty compares each with each (measured: 4 to 13 times slower with 3,000 in line).
-- p_low says where in line to begin, ten ranks for each queue: rows that are gone but cannot be vacuumed yet, because
-- somebody holds an old snapshot, need not be walked over. Without it the look begins at the head.
create function claim(p_session bigint, p_queues text[], p_free int, p_low bigint[]) returns setof step_row
language plpgsql as $$
declare
    wanted int := p_free;
    got int;
    t timestamptz := clock();
begin
    perform 1 from runner where session = p_session and gone_at is null and request is null;
    if not found then
        return;
    end if;
    for n in 1 .. cardinality(p_queues) loop
        exit when wanted <= 0;
        return query
        with picked as materialized (
            select p.* from generate_series(0, 9) k(rank) cross join lateral (
                select r.ctid as place, r.rank, r.seq, r.run_id, r.idx, r.map_index from ready r
                where r.queue = p_queues[n] and r.rank = k.rank
                  and r.seq >= coalesce(p_low[10 * (n - 1) + k.rank + 1], 0)
                order by r.seq limit wanted for update skip locked) p
            limit wanted
        ), taken as (
            delete from ready r where r.ctid = any(array(select p.place from picked p))
        ), moved as (
            update task k
            set state = 'running', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_session,
                started_at = t, finished_at = null, reason = null, exit_code = null
            from picked p
            where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
            returning k.run_id, k.idx, k.map_index, k.epoch, k.attempt, k.version_id, p.rank, p.seq
        ), leased as (
            insert into lease (session, run_id, idx, map_index, epoch)
            select p_session, m.run_id, m.idx, m.map_index, m.epoch from moved m
        )
        select 'claim', m.run_id, m.idx, m.map_index, m.epoch, m.attempt::int, m.version_id, r.fire_at, r.params::text,
               case when m.map_index >= 0 then inputs_of_instance(m.run_id, m.version_id, m.idx, m.map_index) else
               (select jsonb_object_agg(s.name, case when s.is_mapped then results_of(m.run_id, i.src) else v.value end)::text
                from task_input i
                join task_spec s on s.version_id = i.version_id and s.idx = i.src
                left join result v on v.run_id = m.run_id and v.idx = i.src and v.map_index = -1
                where i.version_id = m.version_id and i.idx = m.idx) end, 10 * (n - 1) + m.rank, m.seq
        from moved m join run r on r.run_id = m.run_id
        order by m.rank, m.seq;
        get diagnostics got = row_count;
        wanted := wanted - got;
    end loop;
end $$;

-- The reports as rows. ROWS is an estimate on purpose far too low: with the usual 100 the planner prefers reading all of a
-- table that looks small when the plan is made, and keeps doing so when it has grown (measured: 6 ms of 13 at 10,000 tasks).
-- Volatile, because a stable function would be inlined and its estimate lost.
create function read_reports(p_reports jsonb) returns table (
    run_id bigint, idx int, map_index int, epoch int, kind text, reason text, result jsonb, exit_code int,
    retry_in double precision, no_retry boolean, log text, seq bigint, until bigint, start_in real) rows 5
language sql volatile as $$
    select x.r, x.i, x.m, x.e, x.kind, x.reason, x.result, x.exit_code, x.retry_in, coalesce(x.no_retry, false), x.log,
           coalesce(x.seq, 0), coalesce(x.until, 0), x.start_in
    from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, kind text, reason text, result jsonb,
         exit_code int, retry_in double precision, no_retry boolean, log text, seq bigint, until bigint, start_in real)
$$;

-- Records how attempts ended. p_reports: [{r, i, m, e, kind, reason, result, exit_code, retry_in, no_retry, log, seq, until,
-- start_in}]. Returns the reports that were refused because the attempt is no longer the session's, and how many tasks were offered.
-- The same report twice is one event: the second finds the task ended by that very attempt and is silently dropped.
-- p_unchosen: tasks that a branch among them has skipped, which end with it.
create function finish(p_session bigint, p_reports jsonb, p_infra_retries int, p_unchosen ended[] default null,
                       out refused ended[], out offered int) language plpgsql as $$
declare
    moved_now ended[];
    ended_now ended[];
    again ended[];
    cleared ended[];
    retried jsonb;
    polled jsonb;
    left_now ended[];
    t timestamptz := clock();
begin
    perform 1 from run_status s
    where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(p_reports) x))
    order by s.run_id for no key update;
    with report as materialized (
        select * from read_reports(p_reports)
    ), decided as (
        select x.*, k.attempt, k.losses, k.started_at, k.request, k.version_id, s.is_gated,
               case when n.state = 'pending' and x.kind = 'lost'
                    then t + make_interval(secs => case k.losses when 0 then 0 else least(5 * 2 ^ (k.losses - 1), 300) end)
                    when n.state = 'pending' then t + make_interval(secs => greatest(coalesce(x.retry_in, 0), 0))
               end as not_before,
               n.state
        from report x
        join task k on k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
        join task_spec s on s.version_id = k.version_id and s.idx = k.idx
        cross join lateral (select case
            when k.request = 'mark_success' then 'success'::task_state
            when k.request = 'mark_failed' then 'failed'
            when k.request = 'mark_skipped' then 'skipped'
            when x.kind = 'success' then 'success'
            when x.kind = 'skipped' then 'skipped'
            when k.request in ('cancel', 'clear') then 'canceled'
            when x.kind = 'deferred' then 'deferred'
            when x.kind = 'given_back' then 'pending'
            when x.kind = 'lost' then
                case when s.rerun_on_loss and k.losses < p_infra_retries then 'pending'::task_state else 'failed' end
            when x.no_retry or k.attempt >= s.max_attempts then 'failed'
            else 'pending' end as state) n
    ), freed as (
        delete from lease l where l.ctid = any(array(
            select h.ctid from report x cross join lateral (
                select y.ctid from lease y
                where y.session = p_session and y.run_id = x.run_id and y.idx = x.idx and y.map_index = x.map_index
                  and y.epoch = x.epoch offset 0) h))
    ), moved as (
        update task k
        set state = d.state,
            -- what was given back or lost never came from the user's own retries
            attempt = case when d.kind in ('given_back', 'lost') and d.state = 'pending' then d.attempt - 1
                           when d.state = 'deferred' then 0   -- it went well: errors are counted anew
                           else d.attempt end,
            losses = case when d.kind = 'lost' then d.losses + 1 else d.losses end,
            session = case when d.kind in ('given_back', 'lost') then null else p_session end,
            request = null,
            not_before = case when d.not_before > t then d.not_before end,
            start_seconds = d.start_in,
            finished_at = case when d.state not in ('pending', 'deferred') then t end,
            exit_code = d.exit_code,
            reason = case when d.request is null or d.state = 'canceled' or d.kind in ('failed', 'timed_out', 'lost')
                          then d.reason end
        from decided d
        where k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index
          and k.state = 'running' and k.epoch = d.epoch and k.session = p_session
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, k.not_before, d.kind, d.reason,
                  d.result, d.request, d.exit_code, d.attempt, d.started_at, d.log, d.seq, d.until, d.is_gated,
                  k.let_in_at, k.taken_at, k.start_seconds
    ), kept as (
        insert into result (run_id, idx, map_index, epoch, value)
        select m.run_id, m.idx, m.map_index, m.epoch, m.result from moved m
        where m.state = 'success' and m.result is not null
        on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value
    ), logged as (
        insert into log_chunk (run_id, idx, map_index, epoch, seq, until, content)
        select m.run_id, m.idx, m.map_index, m.epoch, m.seq, m.until, m.log from moved m where m.log is not null
        on conflict (run_id, idx, map_index, epoch, seq) do nothing
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended)
               filter (where m.state not in ('pending', 'deferred') and m.request is distinct from 'clear'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended)
               filter (where m.state = 'pending' and m.not_before is null),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) filter (where m.request = 'clear'),
           jsonb_agg(to_jsonb(m) - array['result', 'log']) filter (where m.state = 'pending'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) filter (where m.is_gated),
           jsonb_agg(to_jsonb(m) - 'log') filter (where m.state = 'deferred')
    into moved_now, ended_now, again, cleared, retried, left_now, polled from moved m;
    if left_now is not null then
        perform leave_gates(left_now);
    end if;
    if retried is not null then
        perform remember(p_session, retried);
    end if;
    if polled is not null then
        perform note_polls(polled);
    end if;
    if coalesce(cardinality(moved_now), 0) < jsonb_array_length(p_reports) then
        select array_agg(row(x.run_id, x.idx, x.map_index, x.epoch, 'failed')::ended) into refused
        from read_reports(p_reports) x
        where not exists (select 1 from unnest(moved_now) m
                          where m.run_id = x.run_id and m.idx = x.idx and m.map_index = x.map_index)
          and not exists (select 1 from task k where k.run_id = x.run_id and k.idx = x.idx and k.map_index = x.map_index
                          and k.epoch = x.epoch and k.session = p_session and k.state <> 'running');
    end if;
    offered := settle(ended_now || p_unchosen);
    if again is not null then
        offered := offered + release(again);
    end if;
    if cleared is not null then
        offered := offered + reopen(cleared);
    end if;
end $$;

-- Attempts that are not their task's last: they become history, and the ones that have to wait get their timer. Apart from
-- finish, because a statement pays for every table it names, and most attempts are the last. p_session null: each names its own.
create function remember(p_session bigint, p_retried jsonb) returns void language plpgsql as $$
begin
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, reason, exit_code, let_in_at, taken_at, started_at,
                         start_seconds, finished_at, retry_at)
    select m.run_id, m.idx, m.map_index, m.epoch, m.attempt, coalesce(p_session, m.session), m.kind, m.reason, m.exit_code, m.let_in_at,
           m.taken_at, m.started_at, m.start_seconds, clock(), coalesce(m.not_before, clock())
    from jsonb_to_recordset(p_retried) as m(run_id bigint, idx int, map_index int, epoch int, attempt smallint, kind text,
         reason text, exit_code int, let_in_at timestamptz, taken_at timestamptz, started_at timestamptz, start_seconds real,
         not_before timestamptz, session bigint)
    on conflict (run_id, idx, map_index, epoch) do nothing;
    insert into timer (shard, due_at, run_id, idx, map_index)
    select g.shard, m.not_before, m.run_id, m.idx, m.map_index
    from jsonb_to_recordset(p_retried) as m(run_id bigint, idx int, map_index int, not_before timestamptz)
    join run_status r on r.run_id = m.run_id
    join dag g on g.dag_id = r.dag_id
    where m.not_before is not null
    on conflict do nothing;
    perform tell_retries(p_retried);
end $$;

-- Pending tasks that nothing holds any more become available at once, unless their DAG is paused. Those with gates pass them first.
create function release(p_tasks ended[]) returns int language plpgsql as $$
declare
    freed ended[];
begin
    with moved as (
        update task k set state = 'available'
        from unnest(p_tasks) p
        join run_status r on r.run_id = p.run_id
        join dag d on d.dag_id = r.dag_id
        join task_spec s on s.version_id = p.version_id and s.idx = p.idx
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index
          and k.state = 'pending' and k.not_before is null and not d.paused and not s.is_gated
          and not (s.is_mapped and k.map_index = -1)
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::ended) into freed from moved m;
    if coalesce(cardinality(freed), 0) < cardinality(p_tasks) then
        perform enter_gates(array(
            select p from unnest(p_tasks) p
            join task_spec s on s.version_id = (p).version_id and s.idx = (p).idx and (s.is_gated or (s.is_mapped and (p).map_index = -1))
            join run_status r on r.run_id = (p).run_id
            join dag d on d.dag_id = r.dag_id and not d.paused));
    end if;
    return offer(freed);
end $$;

-- One round trip of a runner: what ended is recorded, what is free is claimed.
-- With p_aging those that waited too long go first (claim_fairly).
create function step(p_session bigint, p_reports jsonb, p_infra_retries int, p_queues text[], p_free int, p_low bigint[],
                     p_aging double precision)
returns setof step_row language plpgsql as $$
declare
    stale ended[];
    offered int := 0;
    claimed int := 0;
    unchosen ended[];
begin
    if p_reports is not null then
        if p_reports @? '$[*].skip' then
            unchosen := skip_unchosen(p_session, p_reports);
        end if;
        select f.refused, f.offered into stale, offered from finish(p_session, p_reports, p_infra_retries, unchosen) f;
        offered := offered + pass_gates();
        return query select 'refused', x.run_id, x.idx, x.map_index, x.version_id, null::int, null::int,
                            null::timestamptz, null::text, null::text, null::int, null::bigint from unnest(stale) x;
    end if;
    if current_setting('evertick.arrived', true) = 'yes' then
        return query select 'arrived', null::bigint, null::int, null::int, null::int, null::int, null::int,
                            null::timestamptz, null::text, null::text, null::int, null::bigint;
    end if;
    if p_free > 0 and p_aging is null then
        return query select * from claim(p_session, p_queues, p_free, p_low);
        get diagnostics claimed = row_count;
    elsif p_free > 0 then
        return query select * from claim_fairly(p_session, p_queues, p_free, p_low, p_aging);
        get diagnostics claimed = row_count;
    end if;
    if offered > claimed then
        return query select 'more', null::bigint, null::int, null::int, null::int, null::int, null::int,
                            null::timestamptz, null::text, null::text, null::int, null::bigint;
    end if;
end $$;

-- A heartbeat. p_held: [[run_id, idx, map_index, epoch]]. The reply names what the runner lost, what is recorded as its own
-- but missing from its list (a claim whose reply was lost), what somebody asked to stop, and what is asked of the runner.
create function extend(p_session bigint, p_held jsonb)
returns table (kind text, run_id bigint, idx int, map_index int, epoch int) language plpgsql as $$
#variable_conflict use_column
declare
    asked text;
begin
    update runner set beat = beat + 1, beat_at = clock() where session = p_session and gone_at is null
    returning request into asked;
    if not found then
        return query select 'gone', null::bigint, null::int, null::int, null::int;
    elsif asked is not null then
        return query select asked, null::bigint, null::int, null::int, null::int;
    end if;
    return query
    with held as (
        select (x->>0)::bigint as run_id, (x->>1)::int as idx, (x->>2)::int as map_index, (x->>3)::int as epoch
        from jsonb_array_elements(p_held) x
    )
    select case when l.run_id is null then 'lost' when h.run_id is null then 'unknown' else 'stop' end,
           coalesce(h.run_id, l.run_id), coalesce(h.idx, l.idx), coalesce(h.map_index, l.map_index),
           coalesce(h.epoch, l.epoch)
    from held h
    full join (select * from lease where session = p_session) l
      on l.run_id = h.run_id and l.idx = h.idx and l.map_index = h.map_index and l.epoch = h.epoch
    left join task k on k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
    where l.run_id is null or h.run_id is null or k.request is not null;
end $$;
