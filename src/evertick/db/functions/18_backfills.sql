-- Backfills: a range of a DAG's schedule is run again, or for the first time, independently of the schedule itself.
--
-- A backfill is a row with a position: everything before it is done. The leader advances it: in one transaction behind
-- the fence, one function counts the runs that have ended, creates as many as there is room for, and moves the
-- position. So a crash, a pause or a change of leader neither loses nor repeats a run. Its runs have a key of their own
-- and no schedule: what the schedule itself did or skipped stays as it is (V1).

-- Returns the backfill of this request, and whether it is new. p_plan: the columns by their names.
create function create_backfill(p_plan jsonb, p_request text, p_actor text, out id int, out is_new boolean)
language plpgsql as $$
declare
    t timestamptz := clock();
begin
    insert into backfill as b (shard, dag_id, schedule_id, spec, params, first_at, last_at, reprocess, newest_first,
                               parallel,
                               request, state, total, created_by, created_at)
    select d.shard, d.dag_id, x.schedule_id, x.spec, x.params, x.first_at, x.last_at, x.reprocess, x.newest_first,
        x.parallel,
           p_request, 'running', x.total, p_actor, t
    from jsonb_to_record(p_plan) as x(dag_id int, schedule_id int, spec jsonb, params jsonb, first_at timestamptz,
         last_at timestamptz, reprocess text, newest_first boolean, parallel int, total bigint)
    join dag d on d.dag_id = x.dag_id and d.deleted_at is null and d.version_id is not null
    on conflict (request) do nothing
    returning b.backfill_id into id;
    is_new := id is not null;
    if is_new then
        insert into audit_log (occurred_at, action, actor, dag_id, detail)
        values (t, 'backfill', p_actor, (p_plan->>'dag_id')::int,
                (p_plan - 'spec' - 'params' - 'dag_id') || jsonb_build_object('backfill', id));
    else
        select b.backfill_id into id from backfill b where b.request = p_request;
    end if;
end $$;

-- The newest run for an instant, of the schedule or of a backfill. Null if it was deleted.
create function newest_run_for(p_dag_id int, p_schedule_id int, p_instant timestamptz)
returns run_status language sql stable as $$
    select s from (
        (select r.run_id from run r where r.schedule_id = p_schedule_id and r.fire_at = p_instant)
        union all
        (select b.run_id from backfill_run b
         where b.dag_id = p_dag_id and b.schedule_id = coalesce(p_schedule_id, 0) and b.fire_at = p_instant
         order by b.run_id desc limit 1)
    ) made cross join lateral (select x from run_status x where x.run_id = made.run_id offset 0) s(s)
    order by made.run_id desc limit 1
$$;

-- Counts the runs that have ended since the last call. The caller holds the backfill's lock. Returns how many.
create function count_ended_runs(p_backfill_id int) returns int language plpgsql as $$
declare
    n int;
begin
    with over as (
        update backfill_run b set is_open = false
        from (select o.run_id, s.state from backfill_run o
              cross join lateral (select x.state from run_status x where x.run_id = o.run_id offset 0) s
              where o.backfill_id = p_backfill_id and o.is_open and s.state in ('success', 'failed', 'canceled')) e
        where b.run_id = e.run_id and b.is_open
        returning e.state
    ), counted as (
        select count(*) as n, count(*) filter (where o.state = 'success') as succeeded,
               count(*) filter (where o.state = 'failed') as failed,
                   count(*) filter (where o.state = 'canceled') as canceled
        from over o
    ), noted as (
        update backfill b
        set succeeded = b.succeeded + c.succeeded, failed = b.failed + c.failed, canceled = b.canceled + c.canceled
        from counted c where b.backfill_id = p_backfill_id and c.n > 0
    )
    select c.n into n from counted c;
    -- Counted again, not decremented: a run that was deleted before it was counted must not keep the backfill open.
    update backfill b set open_runs
        = (select count(*) from backfill_run o where o.backfill_id = p_backfill_id and o.is_open)
    where b.backfill_id = p_backfill_id;
    return n;
end $$;

-- The instants that get a run now, in their order: as many as there is room for. An instant whose newest run is still
-- open, or needs no repetition, is skipped. It stops before the first instant without room, and before the first that
-- the schedule itself has still to fire.
create function choose_instants(b backfill, p_instants timestamptz[], p_room int)
returns table (place bigint, instant timestamptz, is_needed boolean) language sql stable as $$
    with cursor_at as (
        select coalesce((select s.next_due - make_interval(secs => c.delay_seconds)
                         from schedule_state s join schedule c on c.schedule_id = s.schedule_id
                         where s.schedule_id = (b).schedule_id and s.is_paused is not true and s.error is null),
                             'infinity') as next_due
    ), candidate as (
        select i.place, i.instant,
               case when n.run_id is null then true
                    when n.state in ('queued', 'running') then false
                    else (b).reprocess = 'all' or ((b).reprocess = 'failed' and n.state in ('failed', 'canceled'))
                        end as is_needed
        from unnest(p_instants) with ordinality i(instant, place)
        cross join lateral newest_run_for((b).dag_id, (b).schedule_id, i.instant) n
    ), numbered as (
        select c.*, count(*) filter (where c.is_needed) over (order by c.place) as needed,
               bool_or(c.instant >= k.next_due) over (order by c.place) as is_ahead
        from candidate c cross join cursor_at k
    )
    select n.place, n.instant, n.is_needed from numbered n
    where n.needed <= p_room and not n.is_ahead
    order by n.place
$$;

-- How many runs the backfill may make now: its own limit, and what max_active_runs leaves after the runs that are open
-- or wait, so that a run of the schedule never waits behind more of ours than have already started. The caller holds
-- the DAG's lock.
create function free_backfill_slots(b backfill, d dag) returns int language sql stable as $$
    select greatest(least((b).parallel - (b).open_runs,
        case when (d).max_active_runs is null then (b).parallel
             else (d).max_active_runs - (select count(*) from run_status r
                                         where r.dag_id = (d).dag_id and r.state in ('queued', 'running')) end), 0)::int
$$;

-- One step of a backfill. p_instants: the instants after p_position in its order; p_is_all: there are no more than
-- these. It advances only from the position that the caller has seen. Returns how many runs were created and ended,
-- whether it advanced at all, and whether it is finished.
create function advance_backfill(p_shard smallint, p_epoch bigint, p_backfill_id int, p_position timestamptz,
                                 p_instants timestamptz[], p_is_all boolean, out made int, out ended int,
                                 out moved boolean, out is_over boolean)
language plpgsql as $$
declare
    b backfill;
    d dag;
    room int;
    chosen timestamptz[];
    needed timestamptz[];
    runs bigint[];
    t timestamptz := clock();
begin
    perform fence(p_shard, p_epoch);
    made := 0;
    ended := 0;
    moved := false;
    is_over := false;
    -- Another transaction is changing it: the next step continues.
    perform 1 from backfill x where x.backfill_id = p_backfill_id and x.shard = p_shard for no key update skip locked;
    if not found then
        return;
    end if;
    ended := count_ended_runs(p_backfill_id);
    select * into b from backfill x where x.backfill_id = p_backfill_id and x.shard = p_shard;
    if b.state = 'running' and not b.is_planned and b.position is not distinct from p_position then
        select * into d from dag x where x.dag_id = b.dag_id for no key update;
        if d.deleted_at is not null or d.version_id is null then
            update backfill x set state = 'failed', finished_at = t, reason = 'its DAG was deleted'
            where x.backfill_id = p_backfill_id and x.state = 'running';
        elsif not d.is_paused and not is_quarantined('dag', d.dag_id) then
            room := free_backfill_slots(b, d);
            if room > 0 then
                select array_agg(c.instant order by c.place),
                    array_agg(c.instant order by c.place) filter (where c.is_needed)
                into chosen, needed from choose_instants(b, p_instants, room) c;
            end if;
            chosen := coalesce(chosen, '{}');
            with created as (
                insert into run as r (dag_id, version_id, kind, key, fire_at, params, triggered_by, created_at)
                select d.dag_id, d.version_id, 'backfill',
                    format('backfill:%s:%s', p_backfill_id, i.instant at time zone 'UTC'),
                       i.instant, b.params, format('backfill %s', p_backfill_id), t
                from unnest(needed) with ordinality i(instant, place) order by i.place
                on conflict (dag_id, key) where key is not null do nothing
                returning r.run_id, r.fire_at
            ), listed as (
                insert into backfill_run (run_id, backfill_id, dag_id, schedule_id, fire_at)
                select c.run_id, p_backfill_id, d.dag_id, coalesce(b.schedule_id, 0), c.fire_at from created c
            )
            select array_agg(c.run_id order by c.run_id) into runs from created c;
            made := coalesce(cardinality(runs), 0);
            moved := cardinality(chosen) > 0 or (p_is_all and cardinality(p_instants) = 0);
            update backfill x
            set position = coalesce(chosen[cardinality(chosen)], x.position),
                created = x.created + advance_backfill.made,
                skipped = x.skipped + cardinality(chosen) - advance_backfill.made,
                open_runs = x.open_runs + advance_backfill.made,
                is_planned = p_is_all and cardinality(chosen) = cardinality(p_instants)
            where x.backfill_id = p_backfill_id and x.state = 'running' and x.position is not distinct from p_position;
            perform open_runs(runs);
        end if;
    end if;
    update backfill x set state = 'done', finished_at = t
    where x.backfill_id = p_backfill_id and x.state = 'running' and x.is_planned and x.open_runs = 0;
    is_over := not exists (select 1 from backfill x where x.backfill_id = p_backfill_id
                           and (x.state = 'running' or x.open_runs > 0));
    perform apply_effects();
end $$;

-- A backfill that cannot be planned, or that the database refuses, ends with the reason; the others continue (V11).
create function fail_backfill(p_shard smallint, p_epoch bigint, p_backfill_id int, p_reason text)
returns boolean language plpgsql as $$
begin
    perform fence(p_shard, p_epoch);
    update backfill b set state = 'failed', finished_at = clock(), reason = left(p_reason, 2000)
    where b.backfill_id = p_backfill_id and b.shard = p_shard and b.state = 'running';
    return found;
end $$;

-- Pauses or resumes. Returns false if its state does not allow it; its open runs continue either way.
create function pause_backfill(p_backfill_id int, p_paused boolean, p_actor text) returns boolean language plpgsql as $$
begin
    update backfill b set state = case when p_paused then 'paused' else 'running' end
    where b.backfill_id = p_backfill_id and b.state = case when p_paused then 'running' else 'paused' end;
    if not found then
        return false;
    end if;
    insert into audit_log (occurred_at, action, actor, dag_id, detail)
    select clock(), case when p_paused then 'pause'
        else 'resume' end, p_actor, b.dag_id, jsonb_build_object('backfill', p_backfill_id)
    from backfill b where b.backfill_id = p_backfill_id;
    return true;
end $$;

-- Cancels: no more runs are created, and open ones are canceled unless they are to be kept. Returns how many runs were
-- canceled and how many tasks are asked to stop; null when it has ended already. The runs are locked before the first
-- is closed: closing one takes the DAG's lock, and a transaction that ends another run holds that run and waits for the
-- DAG.
create function cancel_backfill(p_backfill_id int, p_leaves_runs boolean, p_actor text, out runs int, out asked int)
language plpgsql as $$
declare
    open bigint[];
    one bigint;
    n int;
begin
    update backfill b set state = 'canceled', finished_at = clock(), reason = format('canceled by %s', p_actor)
    where b.backfill_id = p_backfill_id and b.state in ('running', 'paused');
    if not found then
        return;
    end if;
    runs := 0;
    asked := 0;
    insert into audit_log (occurred_at, action, actor, dag_id, detail)
    select clock(), 'cancel', p_actor, b.dag_id,
        jsonb_build_object('backfill', p_backfill_id, 'leaves_runs', p_leaves_runs)
    from backfill b where b.backfill_id = p_backfill_id;
    if p_leaves_runs then
        return;
    end if;
    open := array(
        select r.run_id from run_status r
        where r.run_id = any(array(select o.run_id from backfill_run o where o.backfill_id = p_backfill_id
                                   and o.is_open))
          and r.state in ('queued', 'running')
        order by r.run_id for no key update);
    foreach one in array open loop
        n := stop_run(one, p_actor, format('backfill %s was canceled', p_backfill_id));
        runs := runs + (n is not null)::int;
        asked := asked + coalesce(n, 0);
    end loop;
    perform apply_effects();
end $$;
