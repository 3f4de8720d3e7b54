-- Events that start runs (schedules of the kind event). Why: docs/decisions/0107-events-that-start-runs.md.
--
-- The leader of shard 0 decides which events become which runs, by the times at which they were sent, and applies the
-- decision here: arrivals leave, windows change, and runs begin in one transaction.

-- Whether a person has paused the schedule itself: then its events start nothing. Those of a paused DAG are queued
-- runs.
create function is_schedule_held(p_schedule_id int) returns boolean language sql stable as $$
    select coalesce((select s.is_paused_directly from schedule_state s where s.schedule_id = p_schedule_id), false)
$$;

create function is_run_open(p_run_id bigint) returns boolean language sql stable as $$
    select exists (select 1 from run_status r where r.run_id = p_run_id
                   and r.state not in ('success', 'failed', 'canceled'))
$$;

-- Windows whose run has ended may start the next one.
create function release_event_windows(p_closed bigint[], inout fx effects) language plpgsql as $$
begin
    update event_window w set due_at = clock() where w.run_id = any(p_closed);
    if found then
        fx.wakes_planner := true;
    end if;
end $$;

-- Applies one decision. p_arrivals: the events that it is about; all of them must still be there. p_windows: what is
-- left open, [{schedule_id, group_key, event_ids, first_at, last_at, due_at, run, waits_for}], with the run that the
-- next one waits for, or its place in p_runs; without events and such a run the window goes. p_runs: [{place,
-- schedule_id, dag_id, key, params, event} or with a reason: then it is a dead letter].
create function apply_events(p_shard smallint, p_epoch bigint, p_arrivals bigint[], p_windows jsonb, p_runs jsonb,
                             out made int, out dead int, out defers boolean) language plpgsql as $$
declare
    fx effects;
    gone int;
    t timestamptz := clock();
    begun bigint[];
    places jsonb;
begin
    perform fence(p_shard, p_epoch);
    delete from event_arrival a where a.event_id = any(p_arrivals);
    get diagnostics gone = row_count;
    if gone <> cardinality(p_arrivals) then
        raise exception 'events were taken by another leader' using errcode = 'EV001';
    end if;
    with wanted as (
        select * from jsonb_to_recordset(p_runs) as x(place int, dag_id int, key text, params jsonb, event text,
                                                      reason text)
    ), created as (
        insert into run as r (dag_id, version_id, kind, key, params, triggered_by, created_at)
        select w.dag_id, d.version_id, 'manual', w.key, w.params, 'event ' || w.event, t
        from wanted w join dag d on d.dag_id = w.dag_id and d.deleted_at is null and d.version_id is not null
        where w.reason is null order by w.place
        on conflict (dag_id, key) where key is not null do nothing
        returning r.run_id, r.dag_id, r.key
    )
    select array_agg(c.run_id order by c.run_id), coalesce(jsonb_object_agg(w.place, c.run_id), '{}') into begun, places
    from created c join wanted w on w.dag_id = c.dag_id and w.key = c.key;
    made := coalesce(cardinality(begun), 0);
    -- The end of a run that others wait for wakes the leader: before it can end.
    update dag d set has_dependents = true where not d.has_dependents and d.dag_id in (
        select x.dag_id from jsonb_to_recordset(p_runs) as x(place int, dag_id int)
        join jsonb_to_recordset(p_windows) as w(run int) on w.run = x.place);
    fx := open_runs(begun, fx);
    insert into dead_letter (dag, params, key, sent_at, sent_by, reason, failed_at)
    select x.dag, x.params, x.key, t, 'event ' || x.event, x.reason, t
    from jsonb_to_recordset(p_runs) as x(dag text, params jsonb, key text, event text, reason text)
    where x.reason is not null;
    get diagnostics dead = row_count;
    with wanted as (
        select x.*, coalesce((places->>x.run::text)::bigint, x.waits_for) as run_id
        from jsonb_to_recordset(p_windows) as x(schedule_id int, group_key text, event_ids bigint[],
            first_at timestamptz, last_at timestamptz, due_at timestamptz, run int, waits_for bigint)
    ), emptied as (
        delete from event_window w using wanted x
        where w.schedule_id = x.schedule_id and w.group_key = x.group_key and cardinality(x.event_ids) = 0
            and x.run_id is null
    )
    insert into event_window as w (schedule_id, group_key, event_ids, first_at, last_at, due_at, run_id)
    -- The end of the run makes it due; the regular check covers a lost wake-up.
    select x.schedule_id, x.group_key, x.event_ids, x.first_at, x.last_at,
           case when x.run_id is null then coalesce(x.due_at, t)
                when is_run_open(x.run_id) then t + interval '10 minutes' else t end, x.run_id
    from wanted x where cardinality(x.event_ids) > 0 or x.run_id is not null
    on conflict (schedule_id, group_key) do update set event_ids = excluded.event_ids, first_at = excluded.first_at,
        last_at = excluded.last_at, due_at = excluded.due_at, run_id = excluded.run_id;
    fx := apply_effects(fx);
    defers := coalesce(fx.wakes_planner, false);
end $$;

create function put_webhook(p_name text, p_webhook jsonb, p_actor actor, out is_new boolean) language plpgsql as $$
begin
    insert into webhook as w (name, kind, secret, event, tolerance_seconds, headers, changed_by, changed_at)
    select p_name, x.kind, x.secret, x.event, x.tolerance_seconds, nullif(x.headers, 'null'), p_actor.name, clock()
    from jsonb_to_record(p_webhook) as x(kind text, secret text, event text, tolerance_seconds double precision,
                                         headers jsonb)
    on conflict (name) do update set kind = excluded.kind, secret = excluded.secret, event = excluded.event,
        tolerance_seconds = excluded.tolerance_seconds, headers = excluded.headers, changed_by = excluded.changed_by,
        changed_at = excluded.changed_at
    returning w.xmax = 0 into is_new;
    perform write_audit(p_actor, 'put_webhook', p_webhook || jsonb_build_object('name', p_name, 'is_new', is_new));
end $$;

create function delete_webhook(p_name text, p_actor actor) returns boolean language plpgsql as $$
begin
    delete from webhook w where w.name = p_name;
    if not found then
        return false;
    end if;
    perform write_audit(p_actor, 'delete_webhook', jsonb_build_object('name', p_name));
    return true;
end $$;
