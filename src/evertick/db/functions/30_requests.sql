-- Runs that others ask for: requests of the inbox become runs or dead letters, and delayed runs begin when it is time.
-- Why: docs/decisions/0106-inbox.md.

-- Inserts queued runs that must not begin before a time. Admission passes over them until `start_delayed_runs`.
create function delay_runs(p_run_ids bigint[]) returns void language plpgsql as $$
begin
    insert into run_status (run_id, dag_id, version_id, state, open_tasks)
    select r.run_id, r.dag_id, r.version_id, 'queued', v.task_count
    from run r join dag_version v on v.version_id = r.version_id
    where r.run_id = any(p_run_ids) order by r.run_id
    on conflict (run_id) do nothing;
    if exists (select 1 from task_deadline) then
        perform set_task_deadlines(p_run_ids);
    end if;
end $$;

-- Takes a key for a period: null if it is free, and from now on it stands for the run that `hold_period` names; else
-- the run that it stands for. Another transaction with the same key waits here until this one ends.
create function take_period(p_dag_id int, p_key text, p_for interval) returns bigint language plpgsql as $$
declare
    t timestamptz := clock();
    known bigint;
begin
    insert into unique_period as u (dag_id, key, until, run_id) values (p_dag_id, p_key, t + p_for, 0)
    on conflict (dag_id, key) do update set until = excluded.until, run_id = 0 where u.until <= t
    returning u.run_id into known;
    if found then
        return null;
    end if;
    select u.run_id into known from unique_period u where u.dag_id = p_dag_id and u.key = p_key;
    return known;
end $$;

-- The key of a run that is unique for a period: the same key may have another run later.
create function period_key(p_key text) returns text language sql stable as $$
    select p_key || to_char(clock() at time zone 'UTC', ' YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
$$;

-- What a request is unique by: its key, or else its parameters.
create function unique_name(p_key text, p_params jsonb) returns text language sql immutable as $$
    select coalesce('key ' || p_key, 'params ' || encode(sha256(convert_to(p_params::text, 'UTF8')), 'hex'))
$$;

-- One request that was checked. Returns its run, or the run that its key already stands for, or why there is none.
create function request_run(p_row inbox, p_dag_id int, p_params jsonb, out made bigint, out is_new boolean,
                            out refused text) language plpgsql as $$
declare
    known run;
    t timestamptz := clock();
begin
    is_new := false;
    if p_row.unique_for is not null then
        made := take_period(p_dag_id, unique_name(p_row.key, p_params), p_row.unique_for);
        if made is not null then
            return;
        end if;
    end if;
    insert into run as r (dag_id, version_id, kind, key, params, triggered_by, created_at)
    select d.dag_id, d.version_id, 'manual',
           case when p_row.unique_for is null then p_row.key else period_key(p_row.key) end, p_params,
           'enqueue:' || p_row.sent_by, t
    from dag d where d.dag_id = p_dag_id and d.deleted_at is null and d.version_id is not null
    on conflict (dag_id, key) where key is not null do nothing
    returning r.run_id into made;
    if made is null then
        select r.* into known from run r where r.dag_id = p_dag_id and r.key = p_row.key;
        if not found then
            refused := format('DAG %L was deleted', p_row.dag);
        elsif not known.params @> p_row.params then
            refused := format('key %L belongs to run %s, which has other parameters', p_row.key, known.run_id);
        end if;
        made := known.run_id;
        return;
    end if;
    is_new := true;
    if p_row.unique_for is not null then
        update unique_period u set run_id = made
        where u.dag_id = p_dag_id and u.key = unique_name(p_row.key, p_params);
    end if;
    if p_row.run_at > t then
        insert into delayed_run (run_id, start_at) values (made, p_row.run_at);
    end if;
end $$;

-- Requests leave the inbox: each becomes a run, or a dead letter with the reason. p_decisions: [{inbox_id, dag_id,
-- params} or {inbox_id, reason}]. A request that is gone was taken before.
create function take_requests(p_shard smallint, p_epoch bigint, p_decisions jsonb, out made int, out repeated int,
                              out dead int, out next_start timestamptz, out defers boolean) language plpgsql as $$
declare
    fx effects;
    one record;
    done record;
    begun bigint[] := '{}';
    delayed bigint[] := '{}';
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    made := 0;
    repeated := 0;
    dead := 0;
    for one in
        with gone as (
            delete from inbox i where i.ctid = any(array(
                select x.ctid from jsonb_to_recordset(p_decisions) d(inbox_id bigint)
                join inbox x on x.inbox_id = d.inbox_id for update of x skip locked))
            returning i
        )
        select g.i as whole, d.dag_id, d.params, d.reason
        from gone g join jsonb_to_recordset(p_decisions) d(inbox_id bigint, dag_id int, params jsonb, reason text)
            on d.inbox_id = (g.i).inbox_id
        order by d.inbox_id
    loop
        if one.reason is null then
            select * into done from request_run(one.whole, one.dag_id, one.params);
            one.reason := done.refused;
        end if;
        if one.reason is not null then
            insert into dead_letter (dag, params, key, run_at, unique_for, sent_at, sent_by, reason, failed_at)
            values ((one.whole).dag, (one.whole).params, (one.whole).key, (one.whole).run_at, (one.whole).unique_for,
                    (one.whole).sent_at, (one.whole).sent_by, one.reason, t);
            dead := dead + 1;
        elsif not done.is_new then
            repeated := repeated + 1;
        elsif (one.whole).run_at > t then
            delayed := array_append(delayed, done.made);
        else
            begun := array_append(begun, done.made);
        end if;
    end loop;
    perform delay_runs(delayed);
    fx := open_runs(begun, fx);
    fx := apply_effects(fx);
    made := cardinality(begun) + cardinality(delayed);
    next_start := next_start();
    defers := coalesce(fx.wakes_planner, false);
end $$;

-- When a delayed run begins next, or events become a run.
create function next_start() returns timestamptz language sql stable as $$
    select least((select min(w.start_at) from delayed_run w), (
        select w.due_at from event_window w where not is_schedule_held(w.schedule_id) order by w.due_at limit 1))
$$;

-- Delayed runs whose time has come are queued like all others, and start as far as their DAGs allow.
create function start_delayed_runs(p_shard smallint, p_epoch bigint, p_limit int, out started int,
                                   out next_start timestamptz, out defers boolean) language plpgsql as $$
declare
    fx effects;
    done admission_result;
    due bigint[];
begin
    perform fence(p_shard, p_epoch);
    with gone as (
        delete from delayed_run w where w.ctid = any(array(
            select x.ctid from delayed_run x where x.start_at <= clock() order by x.start_at limit p_limit
            for update skip locked))
        returning w.run_id
    )
    select array_agg(g.run_id) into due from gone g;
    started := coalesce(cardinality(due), 0);
    if started > 0 then
        done := admit_runs(array(select distinct r.dag_id from run_status r where r.run_id = any(due) order by 1), fx);
        fx := apply_effects(done.fx);
    end if;
    next_start := next_start();
    defers := coalesce(fx.wakes_planner, false);
end $$;

-- Puts dead letters back into the inbox, as they were sent. Returns how many; one that was replayed before stays.
create function replay_dead_letters(p_letter_ids bigint[], p_actor actor) returns int language plpgsql as $$
declare
    n int;
begin
    with again as (
        update dead_letter l set replayed_at = clock(), replayed_by = p_actor.name
        where l.letter_id = any(p_letter_ids) and l.replayed_at is null
        returning l.*
    )
    insert into inbox (dag, params, key, run_at, unique_for, sent_at, sent_by)
    select a.dag, a.params, a.key, a.run_at, a.unique_for, a.sent_at, a.sent_by from again a order by a.letter_id;
    get diagnostics n = row_count;
    if n > 0 then
        perform write_audit(p_actor, 'replay', jsonb_build_object('letters', to_jsonb(p_letter_ids), 'replayed', n));
    end if;
    return n;
end $$;
