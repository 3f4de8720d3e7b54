-- Backfills: a range of a DAG's schedule is run again, or for the first time, independently of the schedule itself.
--
-- A backfill is a row with a position: everything before it is done. In one transaction, one function counts the runs
-- that have ended, creates as many as there is room for, and moves the position: no crash, pause or change of leader
-- loses or repeats a run. Its runs have their own key and no schedule: what the schedule did stays as it is (V1).

-- Returns the backfill of this request, and whether it is new. p_plan: the columns by their names.
create function create_backfill(p_plan jsonb, p_request text, p_actor actor, out id int, out is_new boolean)
language plpgsql as $$
begin
    insert into backfill as b (shard, dag_id, schedule_id, spec, params, first_at, last_at, reprocess, newest_first,
                               parallel, request, state, total, created_by, created_at)
    select d.shard, d.dag_id, x.schedule_id, x.spec, x.params, x.first_at, x.last_at, x.reprocess, x.newest_first,
           x.parallel, p_request, 'running', x.total, p_actor.name, clock()
    from jsonb_populate_record(null::backfill, p_plan) x
    join dag d on d.dag_id = x.dag_id and d.deleted_at is null and d.version_id is not null
    on conflict (request) do nothing
    returning b.backfill_id into id;
    is_new := id is not null;
    if is_new then
        perform write_audit(p_actor, 'backfill', (p_plan - 'spec' - 'params' - 'dag_id')
                            || jsonb_build_object('backfill', id), p_dag_id => (p_plan->>'dag_id')::int);
    else
        select b.backfill_id into id from backfill b where b.request = p_request;
    end if;
end $$;

-- The newest run for an instant, of the schedule or of a backfill; or for a partition, however it was started. Null if
-- it was deleted.
create function newest_run_for(p_dag_id int, p_schedule_id int, p_instant timestamptz, p_key text)
returns run_status language sql stable as $$
    select s from (
        (select r.run_id from run r where r.schedule_id = p_schedule_id and r.fire_at = p_instant and p_key is null)
        union all
        (select b.run_id from backfill_run b
         where b.dag_id = p_dag_id and b.schedule_id = coalesce(p_schedule_id, 0) and b.fire_at = p_instant
           and p_key is null
         order by b.run_id desc limit 1)
        union all
        (select p.run_id from run_partition p where p.dag_id = p_dag_id and p.key = p_key
         order by p.run_id desc limit 1)
    ) made cross join lateral (select x from run_status x where x.run_id = made.run_id offset 0) s(s)
    order by made.run_id desc limit 1
$$;

-- Counts the runs that have ended since the last call. The caller holds the backfill's lock. Returns how many.
create function count_ended_runs(p_backfill_id int, out n int) language plpgsql as $$
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
end $$;

-- Locks the backfill of a run. A function that may open an ended run again calls it before it locks the run:
-- the backfill comes first, as in cancel_backfill.
create function lock_backfill_of_run(p_run_id bigint) returns void language plpgsql as $$
begin
    perform 1 from backfill b
    where b.backfill_id = (select o.backfill_id from backfill_run o where o.run_id = p_run_id) for no key update;
end $$;

-- An ended run opens again: its backfill, which has counted it in this state, counts it as open until it ends again.
-- Without effect on a run of no backfill, and on one that is not counted yet.
create function uncount_backfill_run(p_run_id bigint, p_state run_state) returns void language plpgsql as $$
begin
    with reopened as (
        update backfill_run o set is_open = true where o.run_id = p_run_id and not o.is_open returning o.backfill_id
    )
    update backfill b
    set open_runs = b.open_runs + 1, succeeded = b.succeeded - (p_state = 'success')::int,
        failed = b.failed - (p_state = 'failed')::int, canceled = b.canceled - (p_state = 'canceled')::int
    from reopened r where b.backfill_id = r.backfill_id;
end $$;

-- The instants that get a run now, in order, as far as there is room. One whose newest run is open, or needs no
-- repetition, is skipped. It stops before the first without room, or that the schedule has still to fire.
create function choose_instants(b backfill, p_instants timestamptz[], p_keys text[], p_room int)
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
        cross join lateral newest_run_for((b).dag_id, (b).schedule_id, i.instant, p_keys[i.place]) n
    ), numbered as (
        select c.*, count(*) filter (where c.is_needed) over (order by c.place) as needed,
               bool_or(c.instant >= k.next_due) over (order by c.place) as is_ahead
        from candidate c cross join cursor_at k
    )
    select n.place, n.instant, n.is_needed from numbered n
    where n.needed <= p_room and not n.is_ahead order by n.place
$$;

-- How many runs the backfill may make now: its own limit, and what max_active_runs leaves after open and queued runs,
-- so that a run of the schedule never waits behind more than have already started. The caller holds the DAG's lock.
create function free_backfill_slots(b backfill, d dag) returns int language sql stable as $$
    select greatest(least((b).parallel - (b).open_runs,
        case when (d).max_active_runs is null then (b).parallel
             else (d).max_active_runs - (select count(*) from run_status r
                                         where r.dag_id = (d).dag_id and r.state in ('queued', 'running')) end), 0)::int
$$;

-- The key of a backfill's run, as in Airflow. Where another run of the DAG has it, of another backfill or a user, the
-- backfill's number follows.
create function backfill_run_key(p_backfill_id int, p_dag_id int, p_instant timestamptz)
returns text language sql stable as $$
    select case when exists (
        select 1 from run r
        where r.dag_id = p_dag_id and r.key = k.key and not exists (
            select 1 from backfill_run b where b.run_id = r.run_id and b.backfill_id = p_backfill_id))
        then format('%s__%s', k.key, p_backfill_id) else k.key end
    from (select format('backfill__%s+00:00', to_jsonb(p_instant at time zone 'UTC') #>> '{}') as key) k
$$;

-- One step of a backfill. p_instants: those after p_position in its order; p_is_all: there are no more. It advances
-- only from the position that was seen. p_keys, p_dates: the partitions of the instants; null for none. Returns how
-- many runs were created and ended, if it moved, if it is over. Runs of a paused DAG wait until it is unpaused, like
-- triggered ones.
create function advance_backfill(p_shard smallint, p_epoch bigint, p_backfill_id int, p_position timestamptz,
                                 p_instants timestamptz[], p_is_all boolean, p_keys text[], p_dates timestamptz[],
                                 out made int, out ended int, out moved boolean, out is_over boolean)
language plpgsql as $$
declare
    fx effects;
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
        elsif not is_quarantined('dag', d.dag_id) then
            room := free_backfill_slots(b, d);
            if room > 0 then
                select array_agg(c.instant order by c.place),
                    array_agg(c.instant order by c.place) filter (where c.is_needed)
                into chosen, needed from choose_instants(b, p_instants, p_keys, room) c;
            end if;
            chosen := coalesce(chosen, '{}');
            with created as (
                insert into run as r (dag_id, version_id, kind, key, fire_at, params, triggered_by, created_at)
                select d.dag_id, d.version_id, 'backfill',
                    backfill_run_key(p_backfill_id, d.dag_id, i.instant), i.instant, b.params,
                       format('backfill %s', p_backfill_id), t
                from unnest(needed) with ordinality i(instant, place) order by i.place
                on conflict (dag_id, key) where key is not null do nothing
                returning r.run_id, r.fire_at
            ), listed as (
                insert into backfill_run (run_id, backfill_id, dag_id, schedule_id, fire_at)
                select c.run_id, p_backfill_id, d.dag_id, coalesce(b.schedule_id, 0), c.fire_at from created c
            )
            select array_agg(c.run_id order by c.run_id) into runs from created c;
            made := coalesce(cardinality(runs), 0);
            if p_keys is not null then
                insert into run_partition (run_id, dag_id, key, date)
                select r.run_id, r.dag_id, p.key, p.date
                from unnest(p_instants, p_keys, p_dates) as p(instant, key, date)
                join run r on r.run_id = any(runs) and r.fire_at = p.instant;
            end if;
            moved := cardinality(chosen) > 0 or (p_is_all and cardinality(p_instants) = 0);
            update backfill x
            set position = coalesce(chosen[cardinality(chosen)], x.position),
                created = x.created + advance_backfill.made,
                skipped = x.skipped + cardinality(chosen) - advance_backfill.made,
                open_runs = x.open_runs + advance_backfill.made,
                is_planned = p_is_all and cardinality(chosen) = cardinality(p_instants)
            where x.backfill_id = p_backfill_id and x.state = 'running' and x.position is not distinct from p_position;
            fx := open_runs(runs, fx);
        end if;
    end if;
    update backfill x set state = 'done', finished_at = t
    where x.backfill_id = p_backfill_id and x.state = 'running' and x.is_planned and x.open_runs = 0;
    is_over := not exists (select 1 from backfill x where x.backfill_id = p_backfill_id
                           and (x.state = 'running' or x.open_runs > 0));
    fx := apply_effects(fx);
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
create function pause_backfill(p_backfill_id int, p_paused boolean, p_actor actor)
returns boolean language plpgsql as $$
begin
    update backfill b set state = case when p_paused then 'paused' else 'running' end
    where b.backfill_id = p_backfill_id and b.state = case when p_paused then 'running' else 'paused' end;
    if not found then
        return false;
    end if;
    perform write_audit(p_actor, case when p_paused then 'pause' else 'unpause' end,
                        jsonb_build_object('backfill', p_backfill_id), p_dag_id => b.dag_id)
    from backfill b where b.backfill_id = p_backfill_id;
    return true;
end $$;

-- Cancels: no more runs are created, and open ones are canceled unless p_leaves_runs. Returns how many runs were
-- canceled and tasks asked to stop; null when it has ended already. The runs are locked before the first is closed:
-- closing one takes the DAG's lock, and a transaction that ends another run holds that run and waits for the DAG.
create function cancel_backfill(p_backfill_id int, p_leaves_runs boolean, p_actor actor, out runs int, out asked int)
language plpgsql as $$
declare
    fx effects;
    open bigint[];
    one bigint;
    done stop_result;
begin
    update backfill b set state = 'canceled', finished_at = clock(), reason = format('canceled by %s', p_actor.name)
    where b.backfill_id = p_backfill_id and b.state in ('running', 'paused');
    if not found then
        return;
    end if;
    runs := 0;
    asked := 0;
    perform write_audit(p_actor, 'cancel', jsonb_build_object('backfill', p_backfill_id, 'leaves_runs', p_leaves_runs),
                        p_dag_id => b.dag_id)
    from backfill b where b.backfill_id = p_backfill_id;
    if p_leaves_runs then
        return;
    end if;
    open := array(select r.run_id from run_status r
                  where r.run_id = any(array(select o.run_id from backfill_run o
                                             where o.backfill_id = p_backfill_id and o.is_open))
                    and r.state in ('queued', 'running') order by r.run_id for no key update);
    foreach one in array open loop
        done := stop_run(one, p_actor, format('backfill %s was canceled', p_backfill_id), fx);
        fx := done.fx;
        runs := runs + (done.asked is not null)::int;
        asked := asked + coalesce(done.asked, 0);
    end loop;
    fx := apply_effects(fx);
end $$;
