-- Remote execution: tasks that a runner submits to an executor elsewhere (docs/decisions/0024-remote-execution.md). A
-- claim moves such a task from available to queued; it runs once an agent begins, with the attempt's own session.
--
-- An agent is the program next to user code in a remote place: a runner with one slot that speaks to the API. Only its
-- way from queued to running is here; the rest is that of every runner (docs/decisions/0029-agents.md).

-- How many more tasks a runner may take: every row of the work list that it owns counts, known to it or not (K8).
create function free_dispatch_slots(p_session bigint) returns int language sql stable as $$
    select r.slots - (select count(*) from dispatch d where d.owner = p_session)::int
    from runner r where r.session = p_session and r.ended_at is null and r.request is null
$$;

-- As claim_selected, for the runner's executor. p_sessions: one new session for each. No lease: nothing runs yet.
create function queue_selected(p_session bigint, p_queues text[], p_places int[], p_seqs bigint[], p_sessions bigint[])
returns setof dispatch_row language plpgsql as $$
declare
    room int;
    t timestamptz := clock();
begin
    -- A claim whose answer never arrived may still be under way: they must count one after the other.
    perform 1 from runner r where r.session = p_session for no key update;
    room := free_dispatch_slots(p_session);
    if coalesce(room, 0) <= 0 then
        return;
    end if;
    return query
    with picked as materialized (
        select w.turn, w.place, r.spot, r.seq, r.queue, r.run_id, r.idx, r.map_index
        from unnest(p_places, p_seqs) with ordinality w(place, seq, turn)
        cross join lateral (
            select q.ctid as spot, q.seq, q.queue, q.run_id, q.idx, q.map_index from ready_task q
            where q.queue = p_queues[w.place / 10 + 1] and q.rank = (w.place % 10)::smallint and q.seq = w.seq
            for update skip locked) r
        limit room
    ), taken as (
        delete from ready_task r where r.ctid = any(array(select p.spot from picked p))
    ), moved as (
        update task k
        set state = 'queued', epoch = k.epoch + 1, attempt = k.attempt + 1, session = p_sessions[p.turn], queued_at = t,
            started_at = null, finished_at = null, reason = null, exit_code = null
        from picked p
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
        returning k.run_id, k.idx, k.map_index, k.epoch, k.session, p.turn, p.place, p.seq, p.queue
    ), listed as (
        insert into dispatch (run_id, idx, map_index, epoch, session, executor, owner, queue, queued_at)
        select m.run_id, m.idx, m.map_index, m.epoch, m.session, r.executor, p_session, m.queue, t
        from moved m cross join (select x.executor from runner x where x.session = p_session) r
    )
    select m.run_id, m.idx, m.map_index, m.epoch, m.session, m.place, m.seq from moved m order by m.turn;
end $$;

-- Claims up to p_free tasks for the runner's executor, in the order of claim; with p_aging, overdue tasks first.
create function claim_for_dispatch(p_session bigint, p_queues text[], p_free int, p_low bigint[],
                                   p_aging double precision, p_sessions bigint[])
returns setof dispatch_row language plpgsql as $$
declare
    places int[] := '{}';
    seqs bigint[] := '{}';
    head_places int[];
    head_seqs bigint[];
begin
    p_free := least(p_free, free_dispatch_slots(p_session));
    if coalesce(p_free, 0) <= 0 then
        return;
    elsif p_aging is not null then
        select coalesce(array_agg(o.place), '{}'), coalesce(array_agg(o.seq), '{}') into places, seqs
        from overdue_queues(p_queues, p_low, p_aging, (p_free + 1) / 2) o;
    end if;
    -- One series for queue and rank, so that no plan can change the order in which they are read.
    select array_agg(h.place), array_agg(h.seq) into head_places, head_seqs from (
        select k.place, p.seq from generate_series(0, 10 * cardinality(p_queues) - 1) k(place) cross join lateral (
            select r.seq from ready_task r
            where r.queue = p_queues[k.place / 10 + 1] and r.rank = (k.place % 10)::smallint
              and r.seq >= coalesce(p_low[k.place + 1], 0) and r.seq <> all(seqs)
            order by r.seq limit p_free for update skip locked) p
        limit p_free - cardinality(places)) h;
    return query select * from queue_selected(p_session, p_queues, places || head_places, seqs || head_seqs,
                                                p_sessions);
end $$;

-- Records the end of attempts that never began. p_reports: [{r, i, m, e, s, kind, reason, retry_in, no_retry}]; s: the
-- attempt's session; kind: 'lost' (infra retries), 'failed' (the task's fault), 'given_back' or 'killed' (it was asked
-- to stop). The caller knows that the executor has nothing under that name: its row of the work list is deleted. An
-- attempt that has begun or has another owner by now stays as it is. Returns the attempts that moved.
create function end_dispatches(p_reports jsonb, p_infra_retries int, fx effects)
returns dispatch_result language plpgsql as $$
declare
    sessions bigint[];
    ended_now task_ref[];
    again task_ref[];
    cleared task_ref[];
    left_now task_ref[];
    retried jsonb;
    t timestamptz := clock();
begin
    perform 1 from run_status s
    where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(p_reports) x))
    order by s.run_id for no key update;
    with report as materialized (
        select x.r as run_id, x.i as idx, x.m as map_index, x.e as epoch, x.s as session, x.kind, x.reason,
               coalesce(x.retry_in, 0) as retry_in, coalesce(x.no_retry, false) as no_retry
        from jsonb_to_recordset(p_reports) as x(r bigint, i int, m int, e int, s bigint, kind text, reason text,
             retry_in double precision, no_retry boolean)
    ), decided as (
        select x.*, k.attempt, k.lost_attempts, k.request, k.version_id, s.is_gated, n.state,
               case when n.state <> 'pending' then null
                    when x.kind = 'lost'
                    then t + make_interval(secs => case k.lost_attempts when 0 then 0
                        else least(5 * 2 ^ (k.lost_attempts - 1), 300)
                                           end)
                    else t + make_interval(secs => greatest(x.retry_in, 0)) end as not_before
        from report x
        cross join lateral (select * from task y where y.run_id = x.run_id and y.idx = x.idx
                            and y.map_index = x.map_index offset 0) k
        cross join lateral (select * from task_spec y where y.version_id = k.version_id and y.idx = k.idx offset 0) s
        cross join lateral (select case
            when k.request = 'mark_success' then 'success'::task_state
            when k.request = 'mark_failed' then 'failed'
            when k.request = 'mark_skipped' then 'skipped'
            when k.request in ('cancel', 'clear') then 'canceled'
            when x.kind = 'given_back' then 'pending'
            when x.kind = 'lost' then
                case when s.rerun_on_loss and k.lost_attempts < p_infra_retries then 'pending'::task_state
                    else 'failed' end
            when x.no_retry or k.attempt >= s.max_attempts then 'failed'
            else 'pending' end as state) n
    ), moved as (
        update task k
        set state = d.state,
            attempt = case when d.kind in ('given_back', 'lost') and d.state = 'pending' then d.attempt - 1
                else d.attempt end,
            lost_attempts = case when d.kind = 'lost' then d.lost_attempts + 1 else d.lost_attempts end,
            session = case when d.state = 'pending' and d.kind in ('given_back', 'lost') then null else d.session end,
            request = null, not_before = case when d.not_before > t then d.not_before end,
            finished_at = case when d.state <> 'pending' then t end,
            reason = case when d.request is null or d.state = 'canceled' then d.reason end
        from decided d
        where k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index
          and k.state = 'queued' and k.epoch = d.epoch and k.session = d.session
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, k.not_before, d.session, d.kind,
            d.reason, d.request, d.attempt, d.is_gated, k.admitted_at, k.queued_at
    ), unlisted as (
        delete from dispatch w where w.ctid = any(array(
            select h.ctid from moved m cross join lateral (
                select y.ctid from dispatch y where y.run_id = m.run_id and y.idx = m.idx and y.map_index = m.map_index
                  and y.epoch = m.epoch and y.session = m.session offset 0) h))
    )
    select array_agg(m.session), array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref)
               filter (where m.state <> 'pending' and m.request is distinct from 'clear'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref)
               filter (where m.state = 'pending' and m.not_before is null),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) filter
               (where m.request = 'clear'),
           array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) filter (where m.is_gated),
           jsonb_agg(to_jsonb(m)) filter (where m.state = 'pending')
    into sessions, ended_now, again, cleared, left_now, retried from moved m;
    if left_now is not null then
        fx := release_gates(left_now, fx);
    end if;
    if retried is not null then
        perform record_attempts(null, retried);
    end if;
    fx := complete_tasks(ended_now, fx);
    if again is not null then
        fx := release_pending_tasks(again, fx);
    end if;
    if cleared is not null then
        fx := reopen_tasks(cleared, fx);
    end if;
    return row(sessions, fx)::dispatch_result;
end $$;

create function end_queued(p_reports jsonb, p_infra_retries int, out moved_sessions bigint[], out offered int)
language plpgsql as $$
declare
    fx effects;
    done dispatch_result;
begin
    done := end_dispatches(p_reports, p_infra_retries, fx);
    fx := apply_effects(done.fx);
    moved_sessions := done.sessions;
    offered := coalesce(fx.enqueued, 0);
end $$;

-- Deletes attempts from the work list of which the executor has nothing any more, by session; returns how many. Only
-- those that have ended, or never existed: what is queued or runs under that very session stays.
create function delete_dispatches(p_sessions bigint[], out forgotten int) language plpgsql as $$
begin
    with over as (
        select d.ctid as place from unnest(p_sessions) s(session)
        cross join lateral (select x.*, x.ctid from dispatch x where x.session = s.session offset 0) d
        left join lateral (
            select true as is_current from task k
            where k.run_id = d.run_id and k.idx = d.idx and k.map_index = d.map_index and k.epoch = d.epoch
              and k.session = d.session and k.state in ('queued', 'running') offset 0) k on true
        where k.is_current is null
    )
    delete from dispatch d where d.ctid = any(array(select o.place from over o));
    get diagnostics forgotten = row_count;
end $$;

-- What a task is given of those above it, as `claim_tasks` gives it.
create function task_inputs(p_run_id bigint, p_version_id int, p_idx int, p_map_index int)
returns text language plpgsql stable as $$
declare
    tried int := (select k.attempt from task k
                  where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index);
begin
    if p_map_index >= 0 then
        return inputs_of_instance(p_run_id, p_version_id, p_idx, p_map_index, tried);
    end if;
    return (select jsonb_object_agg(s.name, case
                when i.src = i.idx then run_of_attempt(p_run_id, p_idx, p_map_index, tried)
                when s.is_mapped then mapped_results(p_run_id, i.src) else v.value end)::text
            from task_input i join task_spec s on s.version_id = i.version_id and s.idx = i.src
            left join result v on v.run_id = p_run_id and v.idx = i.src and v.map_index = -1
            where i.version_id = p_version_id and i.idx = p_idx);
end $$;

-- An agent begins the dispatched attempt: queued to running, with a lease under the attempt's own session. The agent's
-- process draws p_nonce: the same one again gets the same answer, as the first may have been lost; another is a second
-- agent. p_agent: {runner_id, version, host, boot_id, pid_namespace, uid, pid, pid_started}. The verdict is 'started',
-- 'again', 'duplicate', 'canceled' (asked to stop; the runner that dispatched it confirms) or 'stale'.
create function start_attempt(p_run_id bigint, p_idx int, p_map_index int, p_epoch int, p_session bigint, p_nonce text,
                              p_agent jsonb, p_lost_after double precision) returns agent_start language plpgsql as $$
declare
    answer agent_start;
    found_state task_state;
    asked stop_request;
    first_nonce text;
    remote text;
    t timestamptz := clock();
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    select k.state, k.request, k.attempt, k.version_id into found_state, asked, answer.attempt, answer.version_id
    from task k
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.epoch = p_epoch
        and k.session = p_session and k.state in ('queued', 'running') for no key update;
    if not found then
        answer.verdict := 'stale';
        return answer;
    end if;
    select d.nonce, d.executor into first_nonce, remote from dispatch d
    where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_epoch
        and d.session = p_session for no key update;
    if not found then
        answer.verdict := 'stale';
        return answer;
    end if;
    answer.verdict := case when found_state = 'running' and first_nonce is not distinct from p_nonce then 'again'
                           when found_state = 'running' then 'duplicate'
                           when asked is not null then 'canceled'
                           else 'started' end;
    if answer.verdict in ('duplicate', 'canceled') then
        return answer;
    end if;
    select coalesce(r.fire_at, r.created_at), r.params::text into answer.fire_at, answer.params
    from run r where r.run_id = p_run_id;
    answer.inputs := task_inputs(p_run_id, answer.version_id, p_idx, p_map_index);
    if answer.verdict = 'again' then
        return answer;
    end if;
    update task k set state = 'running', started_at = t
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
      and k.state = 'queued' and k.epoch = p_epoch and k.session = p_session and k.request is null;
    insert into runner (session, runner_id, version, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots,
                        executor, lost_after_seconds, heartbeat_at, started_at)
    select p_session, x.runner_id, x.version, x.host, x.boot_id, x.pid_namespace, x.uid, x.pid, x.pid_started, '{}', 1,
           remote, p_lost_after, t, t
    from jsonb_populate_record(null::runner, p_agent) x
    on conflict (session) do nothing;
    insert into lease (session, run_id, idx, map_index, epoch)
        values (p_session, p_run_id, p_idx, p_map_index, p_epoch);
    update dispatch d set started_at = t, nonce = p_nonce
    where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_epoch
        and d.session = p_session;
    return answer;
end $$;

-- How an agent's attempt ended (p_reports: see `finish_attempts`); with its only attempt the agent is gone.
create function finish_attempt(p_session bigint, p_reports jsonb, p_infra_retries int)
returns setof exchange_row language plpgsql as $$
begin
    return query select * from finish_and_claim(p_session, p_reports, p_infra_retries, '{}', 0, null, null);
    update runner r set ended_at = clock(), end_reason = 'finished'
    where r.session = p_session and r.ended_at is null
        and not exists (select 1 from lease l where l.session = p_session);
end $$;
