-- Agents: the small program beside user code in a remote place is a runner with one slot, that speaks to the API. Only the way from
-- queued to running is here; heartbeats, ends and losses are those of every runner.

-- What a task is given of those above it, as `claim` gives it.
create function inputs_of(p_run_id bigint, p_version_id int, p_idx int, p_map_index int) returns text language plpgsql stable as $$
begin
    if p_map_index >= 0 then
        return inputs_of_instance(p_run_id, p_version_id, p_idx, p_map_index);
    end if;
    return (
        select jsonb_object_agg(s.name, case when s.is_mapped then results_of(p_run_id, i.src) else v.value end)::text
        from task_input i
        join task_spec s on s.version_id = i.version_id and s.idx = i.src
        left join result v on v.run_id = p_run_id and v.idx = i.src and v.map_index = -1
        where i.version_id = p_version_id and i.idx = p_idx);
end $$;

create type started_attempt as (verdict text, attempt int, version_id int, fire_at timestamptz, params text, inputs text);

-- An agent begins the attempt that was dispatched: queued to running, with a lease under the attempt's own session. p_nonce is drawn
-- by the agent's process: the same one again is the same answer, because the first may have been lost; another one is a second agent.
-- p_agent: {runner_id, version, host, boot_id, pid_namespace, uid, pid, pid_started}. The verdict is 'started', 'again', 'duplicate',
-- 'canceled' (somebody wants it stopped: whoever dispatched it confirms that) or 'stale' (it is no longer the task's attempt).
create function start_attempt(p_run_id bigint, p_idx int, p_map_index int, p_epoch int, p_session bigint, p_nonce text,
                              p_agent jsonb, p_lost_after double precision) returns started_attempt language plpgsql as $$
declare
    answer started_attempt;
    found_state task_state;
    asked task_request;
    first_nonce text;
    remote text;
    t timestamptz := clock();
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    select k.state, k.request, k.attempt, k.version_id into found_state, asked, answer.attempt, answer.version_id
    from task k
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.epoch = p_epoch and k.session = p_session
      and k.state in ('queued', 'running')
    for no key update;
    if not found then
        answer.verdict := 'stale';
        return answer;
    end if;
    select d.nonce, d.executor into first_nonce, remote from dispatch d
    where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_epoch and d.session = p_session
    for no key update;
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
    select r.fire_at, r.params::text into answer.fire_at, answer.params from run r where r.run_id = p_run_id;
    answer.inputs := inputs_of(p_run_id, answer.version_id, p_idx, p_map_index);
    if answer.verdict = 'again' then
        return answer;
    end if;
    update task k set state = 'running', started_at = t
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
      and k.state = 'queued' and k.epoch = p_epoch and k.session = p_session and k.request is null;
    insert into runner (session, runner_id, version, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots, executor,
                        lost_after_seconds, beat_at, started_at)
    select p_session, x.runner_id, x.version, x.host, x.boot_id, x.pid_namespace, x.uid, x.pid, x.pid_started, '{}', 1, remote,
           p_lost_after, t, t
    from jsonb_to_record(p_agent) as x(runner_id text, version text, host text, boot_id text, pid_namespace text, uid int, pid int,
                                       pid_started double precision)
    on conflict (session) do nothing;
    insert into lease (session, run_id, idx, map_index, epoch) values (p_session, p_run_id, p_idx, p_map_index, p_epoch);
    update dispatch d set started_at = t, nonce = p_nonce
    where d.run_id = p_run_id and d.idx = p_idx and d.map_index = p_map_index and d.epoch = p_epoch and d.session = p_session;
    return answer;
end $$;

-- How an agent's attempt ended, through the ordinary door; with its only attempt the agent is gone. p_reports: as `finish` has them.
create function finish_attempt(p_session bigint, p_reports jsonb, p_infra_retries int) returns setof step_row language plpgsql as $$
begin
    return query select * from step(p_session, p_reports, p_infra_retries, '{}', 0, null, null);
    update runner r set gone_at = clock(), gone_reason = 'finished'
    where r.session = p_session and r.gone_at is null and not exists (select 1 from lease l where l.session = p_session);
end $$;
