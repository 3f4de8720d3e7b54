-- How tasks and runs move. Each move is written once and called by the verbs of the engine. They are stored functions
-- because a skip or a failure cascades level by level inside one transaction, and a transaction must not wait for its
-- client (docs/decisions/0002-stored-moves.md).
--
-- Lock order everywhere: shard fence, schedule_state by id, run_status by id, dag (admission), gates by id,
-- gate_waiter, ready_task, task, lease, dispatch. `claim_tasks` takes no run lock: it skips locked rows of `ready_task`
-- and waits only for the row of the task that it claims. A gate takes tasks from gate_waiter in the same way.
--
-- Groups with retries run again as a whole (docs/decisions/0028-group-retries.md). The tasks after a group count its
-- tasks when all have ended (edge.leaves_group): all at once, or none if it begins again.

-- When a task may start, given how its upstream ended. The twin of domain/dags/trigger_rules.py; a test compares both.
-- Literals are typed where a CASE begins, which avoids a cast per row. Not inlined: setup of the expression costs more.
create function evaluate_trigger_rule(rule trigger_rule, total int, success int, failed int, upstream_failed int,
                                      skipped int, setup_total int, setup_success int, setup_skipped int)
returns rule_decision language plpgsql immutable as $$
begin
    return case when total = 0 then 'run'::rule_decision else case rule
        when 'always' then 'run'::rule_decision
        when 'all_success' then case
            when failed + upstream_failed > 0 then 'upstream_failed'::rule_decision
            when skipped > 0 then 'skip'
            when success >= total then 'run' else 'wait' end
        when 'all_failed' then case
            when success + skipped > 0 then 'skip'::rule_decision
            when failed + upstream_failed >= total then 'run' else 'wait' end
        when 'all_done' then case
            when success + failed + upstream_failed + skipped >= total then 'run'::rule_decision else 'wait' end
        when 'all_done_min_one_success' then case
            when skipped > 0 then 'skip'::rule_decision
            when success + failed + upstream_failed < total then 'wait'
            when success > 0 then 'run' else 'upstream_failed' end
        when 'all_done_setup_success' then case
            when success + failed + upstream_failed + skipped < total then 'wait'::rule_decision
            when setup_total = 0 or setup_success > 0 then 'run'
            when setup_skipped >= setup_total then 'skip' else 'upstream_failed' end
        when 'one_success' then case
            when success > 0 then 'run'::rule_decision
            when success + failed + upstream_failed + skipped < total then 'wait'
            when skipped >= total then 'skip' else 'upstream_failed' end
        when 'one_failed' then case
            when failed + upstream_failed > 0 then 'run'::rule_decision
            when success + skipped >= total then 'skip' else 'wait' end
        when 'one_done' then case
            when success + failed > 0 then 'run'::rule_decision
            when upstream_failed + skipped >= total then 'skip' else 'wait' end
        when 'none_failed' then case
            when failed + upstream_failed > 0 then 'upstream_failed'::rule_decision
            when success + skipped >= total then 'run' else 'wait' end
        when 'none_failed_min_one_success' then case
            when failed + upstream_failed > 0 then 'upstream_failed'::rule_decision
            when skipped >= total then 'skip'
            when success + skipped >= total then 'run' else 'wait' end
        when 'none_skipped' then case
            when skipped > 0 then 'skip'::rule_decision
            when success + failed + upstream_failed >= total then 'run' else 'wait' end
        when 'all_skipped' then case
            when success + failed + upstream_failed > 0 then 'skip'::rule_decision
            when skipped >= total then 'run' else 'wait' end
    end end;
end $$;

create function state_for_decision(d rule_decision, is_held boolean) returns task_state language sql immutable as $$
    select case d when 'run' then case when is_held then 'pending'::task_state else 'available' end
                  when 'skip' then 'skipped' when 'upstream_failed' then 'upstream_failed'
                  else 'waiting' end
$$;

-- Puts the available ones of these tasks into the ready queue, and counts them. Tasks of a backfill get the last rank;
-- an installation without backfills pays nothing for this check. Pending tasks pass their gates at the end of the
-- transaction, unless a pause holds them; they take their place on an ordered key in any case.
create function enqueue_tasks(p_tasks task_ref[], inout fx effects) language plpgsql as $$
declare
    added int;
    has_backfills boolean := exists (select 1 from backfill);
    entering task_ref[];
    held task_ref[];
    now timestamptz := clock();
begin
    if coalesce(cardinality(p_tasks), 0) = 0 then
        return;
    end if;
    insert into ready_task (queue, rank, run_id, idx, map_index, expires_at, enqueued_at)
    select s.queue, case when not has_backfills then 9 - s.priority
                         when (select r.kind from run r where r.run_id = t.run_id) = 'backfill' then 9
                         else 9 - s.priority end, t.run_id, t.idx, t.map_index,
           now + make_interval(secs => s.queue_timeout), now
    from unnest(p_tasks) t join task_spec s on s.version_id = t.version_id and s.idx = t.idx
    where t.state = 'available' order by s.queue, s.priority desc, t.run_id, t.idx, t.map_index;
    get diagnostics added = row_count;
    fx.enqueued := coalesce(fx.enqueued, 0) + added;
    if added < cardinality(p_tasks) then
        select array_agg(t) filter (where not d.is_paused), array_agg(t) filter (where d.is_paused and s.has_order_key)
        into entering, held from unnest(p_tasks) t
        cross join lateral (select r.dag_id from run_status r where r.run_id = (t).run_id offset 0) r
        cross join lateral (select x.is_paused from dag x where x.dag_id = r.dag_id offset 0) d
        cross join lateral (select x.has_order_key from task_spec x
                            where x.version_id = (t).version_id and x.idx = (t).idx offset 0) s
        where (t).state = 'pending';
        fx.entering := fx.entering || entering;
        fx.counted := fx.counted || held;
    end if;
end $$;

-- Starts runs: first tasks enter, and waiting rows (of a cleared run) are evaluated again, which may end some of them.
-- The caller holds the runs' locks and has set them running. New runs have no waiting rows.
create function start_runs(p_run_ids bigint[], p_are_new boolean, inout fx effects) language plpgsql as $$
declare
    available task_ref[];
    pending task_ref[];
    evaluated move_result;
begin
    with entering as (
        insert into task (run_id, idx, version_id, state)
        select r.run_id, s.idx, r.version_id, case when s.is_gated or s.is_mapped then 'pending'::task_state
            else 'available' end
        from run_status r join task_spec s on s.version_id = r.version_id and s.is_root
        where r.run_id = any(p_run_ids) and not (s.is_mapped and has_instances(r.run_id, s.idx))
        on conflict (run_id, idx, map_index) do nothing
        returning run_id, idx, map_index, version_id, state
    )
    select array_agg(row(run_id, idx, map_index, version_id, state)::task_ref) filter (where state = 'available'),
           array_agg(row(run_id, idx, map_index, version_id, state)::task_ref) filter (where state = 'pending')
    into available, pending from entering;
    fx := enqueue_tasks(available, fx);
    -- Whatever a pause says by now: an unpause cannot see a run that is not committed, and would not process it later.
    fx.entering := fx.entering || pending;
    if not p_are_new then
        evaluated := evaluate_waiting_tasks(p_run_ids, null, fx);
        fx := complete_tasks(evaluated.tasks, evaluated.fx);
    end if;
end $$;

-- Decides every waiting row of the runs by its counters: what may run is enqueued, what never can ends and is returned.
-- p_idxs: only of these tasks, null for all. The row of a mapped group waits for its lists alone; see 12_mapping.sql.
create function evaluate_waiting_tasks(p_run_ids bigint[], p_idxs int[], fx effects)
returns move_result language plpgsql as $$
declare
    moved task_ref[];
    t timestamptz := clock();
begin
    with decided as (
        update task k set state = n.state, finished_at = case when n.state in ('skipped', 'upstream_failed') then t end
        from (select w.run_id, w.idx, w.map_index,
                     state_for_decision(evaluate_trigger_rule(
                         case when s.map_head is null or w.map_index >= 0 then s.trigger_rule else 'all_done' end,
                         case when s.map_head is null or w.map_index >= 0 then s.upstream_total
                             else s.lists_total end + coalesce(w.n_extra, 0), coalesce(w.n_success, 0),
                                 coalesce(w.n_failed, 0), coalesce(w.n_upstream_failed, 0),
                         coalesce(w.n_skipped, 0), s.setup_total, coalesce(w.n_setup_success, 0),
                         coalesce(w.n_setup_skipped, 0)), s.is_gated or (s.is_mapped and w.map_index = -1)) as state
              from task w join task_spec s on s.version_id = w.version_id and s.idx = w.idx
              where w.run_id = any(p_run_ids) and w.state = 'waiting' and (p_idxs is null or w.idx = any(p_idxs))
                  and (s.map_head is null
                      or is_group_decidable(w.run_id, w.version_id, s.map_head, w.map_index))) n
        where k.run_id = n.run_id and k.idx = n.idx and k.map_index = n.map_index and k.state = 'waiting'
          and n.state <> 'waiting'
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(run_id, idx, map_index, version_id, state)::task_ref) into moved from decided;
    fx := enqueue_tasks(moved, fx);
    return row(array(select m from unnest(moved) m where (m).state in ('skipped', 'upstream_failed')), fx)::move_result;
end $$;

-- The queued runs of a DAG that may start as far as their schedules are concerned: of a schedule whose runs must not
-- overlap, the oldest, while none of it runs. Not inlined: the admission of other DAGs must not depend on schedules.
create function next_runs_in_order(p_dag_id int) returns setof bigint language plpgsql stable as $$
begin
    return query select x.run_id
    from (select a.run_id, a.state, c.overlap,
                 row_number() over (partition by r.schedule_id order by a.state <> 'running', a.run_id) as place
          from (select y.run_id, y.state from run_status y
                where y.dag_id = p_dag_id and y.state in ('queued', 'running') offset 0) a
          cross join lateral (select y.schedule_id from run y where y.run_id = a.run_id offset 0) r
          left join lateral (select y.overlap from schedule y where y.schedule_id = r.schedule_id offset 0) c on true) x
    where x.state = 'queued' and (x.overlap is null or x.overlap = 'allow' or x.place = 1) order by x.run_id;
end $$;

-- The queued runs of a DAG for which a task of a running run waits, because they were cleared after it had begun. Not
-- by the gates of their own tasks: a task waits for tasks after it as well, and for runs of versions without such a
-- gate.
create function runs_blocking_others(p_dag_id int) returns setof bigint language plpgsql stable as $$
begin
    return query select q.run_id from run_status q
    where q.dag_id = p_dag_id and q.state = 'queued'
      and not exists (select 1 from delayed_run x where x.run_id = q.run_id)
      and exists (select 1 from task_spec s
                  cross join lateral (select x.gate_id from gate x
                                      where x.kind = 'past' and x.name = previous_task_name(q.run_id, s.idx) offset 0) g
                  where s.version_id = q.version_id and s.awaits_past
                    and exists (select 1 from gate_queue l where l.blocked_on = g.gate_id));
end $$;

-- Starts queued runs of the DAGs, oldest first, as far as pause and max_active_runs allow. A run for which a running
-- one waits starts in any case: otherwise both wait. A locked one is skipped (a deadlock), and admitted by reconcile.
create function admit_runs(p_dag_ids int[], fx effects) returns admission_result language plpgsql as $$
declare
    admitted bigint[];
    t timestamptz := clock();
begin
    perform 1 from dag where dag_id = any(p_dag_ids) order by dag_id for no key update;
    with room as (
        select d.dag_id, case when d.max_active_runs is null then 1000 else d.max_active_runs - (
                   select count(*) from run_status a where a.dag_id = d.dag_id and a.state = 'running') end as free,
               case when d.serializes_runs then array(select x from next_runs_in_order(d.dag_id) x) end as turn,
               case when d.depends_on_past then array(select x from runs_blocking_others(d.dag_id) x) end as wanted
        from dag d where d.dag_id = any(p_dag_ids) and not d.is_paused
    ), chosen as (
        select q.run_id from room, lateral (
            select run_id from run_status q
            where q.dag_id = room.dag_id and q.state = 'queued' and (room.turn is null or q.run_id = any(room.turn))
              and not exists (select 1 from delayed_run x where x.run_id = q.run_id)
            order by q.run_id limit greatest(room.free, 0) for no key update skip locked) q
        union
        select q.run_id from room, lateral (
            select run_id from run_status q
            where q.run_id = any(room.wanted) and q.state = 'queued' for no key update skip locked) q
    ), started as (
        update run_status r set state = 'running', started_at = coalesce(r.started_at, t)
        from chosen where r.run_id = chosen.run_id and r.state not in ('running', 'success', 'failed', 'canceled')
        returning r.run_id
    )
    select array_agg(run_id) into admitted from started;
    if admitted is not null then
        fx := start_runs(admitted, false, fx);
    end if;
    return row(coalesce(cardinality(admitted), 0), 0, fx)::admission_result;
end $$;

-- Completes tasks that have just ended: successors are counted up, evaluated, enqueued, or end as well, level by level;
-- then each run's counters move, and a run without open tasks is closed. The caller holds the runs' locks.
create function complete_tasks(p_ended task_ref[], inout fx effects) language plpgsql as $$
declare
    frontier task_ref[] := coalesce(p_ended, '{}');
    everything task_ref[] := frontier;
    moved task_ref[];
    -- without groups with retries this is one lookup in an empty table
    has_groups boolean := exists (select 1 from retry_group);
    -- for each task of the frontier: whether its end counts outside of its group now; inside it was counted before
    left_groups boolean[];
    to_retry group_ref[] := '{}';
    counted int := 0;
    t timestamptz := clock();
begin
    if cardinality(frontier) = 0 then
        return;
    end if;
    loop
        loop
            -- Most tasks that end have no successor; this check is cheaper than setting up the following steps.
            exit when not exists (select 1 from unnest(frontier) e join edge g on g.version_id = e.version_id
                                  and g.src = e.idx);
            with hit as (
                select e.run_id, g.dst, e.version_id,
                       case g.scope when 'same_index' then e.map_index else -1 end as map_index,
                       count(*) filter (where e.state = 'success')::int as success,
                       count(*) filter (where e.state in ('failed', 'canceled'))::int as failed,
                       count(*) filter (where e.state = 'upstream_failed')::int as upstream_failed,
                       count(*) filter (where e.state = 'skipped')::int as skipped,
                       count(*) filter (where s.is_setup and e.state = 'success')::int as setup_success,
                       count(*) filter (where s.is_setup and e.state = 'skipped')::int as setup_skipped
                from unnest(frontier, left_groups) e(run_id, idx, map_index, version_id, state, has_left)
                join task_spec s on s.version_id = e.version_id and s.idx = e.idx
                join edge g on g.version_id = e.version_id and g.src = e.idx
                    and (g.leaves_group is null) = (e.has_left is null) and g.scope is distinct from 'each_index'
                group by e.run_id, g.dst, e.version_id, 4
            ), total as (
                -- Added up here, not in the update of the conflict: a waiting row changes only under its run's lock,
                -- which we hold. OFFSET 0 looks up each row by its whole key: joined, a plan of small runs reads all
                -- tasks of the run for each (15 ms of 18 per batch in a run of 3,000). A task that no longer waits is
                -- not touched: "on conflict" would lock its row, and could deadlock with a claim.
                select h.run_id, h.dst, h.version_id, h.map_index, coalesce(w.n_success, 0) + h.success as success,
                       coalesce(w.n_failed, 0) + h.failed as failed,
                       coalesce(w.n_upstream_failed, 0) + h.upstream_failed as upstream_failed,
                       coalesce(w.n_skipped, 0) + h.skipped as skipped,
                       coalesce(w.n_setup_success, 0) + h.setup_success as setup_success,
                       coalesce(w.n_setup_skipped, 0) + h.setup_skipped as setup_skipped,
                       coalesce(w.n_extra, 0) as more, w.state is null as is_new
                from hit h
                left join lateral (select * from task k where k.run_id = h.run_id and k.idx = h.dst
                                   and k.map_index = h.map_index offset 0) w
                    on true
                where w.state is null or w.state = 'waiting'
            ), counted as (
                insert into task as k (run_id, idx, map_index, version_id, state, finished_at, n_success, n_failed,
                                       n_upstream_failed, n_skipped, n_setup_success, n_setup_skipped)
                select h.run_id, h.dst, h.map_index, h.version_id, n.state,
                       case when n.state in ('skipped', 'upstream_failed') then t end, h.success, h.failed,
                       h.upstream_failed, h.skipped, h.setup_success, h.setup_skipped
                from total h
                join task_spec s on s.version_id = h.version_id and s.idx = h.dst
                join run_status r on r.run_id = h.run_id
                join dag d on d.dag_id = r.dag_id
                cross join lateral (select case when r.state <> 'running' then 'waiting'::task_state
                                    else state_for_decision(evaluate_trigger_rule(
                    case when s.map_head is null or h.map_index >= 0 then s.trigger_rule else 'all_done' end,
                    case when s.map_head is null or h.map_index >= 0 then s.upstream_total else s.lists_total end
                        + h.more, h.success, h.failed, h.upstream_failed, h.skipped, s.setup_total, h.setup_success,
                    h.setup_skipped), d.is_paused or s.is_gated or (s.is_mapped and h.map_index = -1)) end as state) n
                -- a mapped task that has become its instances waits no more, either
                where not (s.is_mapped and h.is_new and has_instances(h.run_id, h.dst))
                order by h.run_id, h.dst, h.map_index
                on conflict (run_id, idx, map_index) do update set
                    n_success = excluded.n_success, n_failed = excluded.n_failed,
                    n_upstream_failed = excluded.n_upstream_failed, n_skipped = excluded.n_skipped,
                    n_setup_success = excluded.n_setup_success, n_setup_skipped = excluded.n_setup_skipped,
                    state = excluded.state, finished_at = excluded.finished_at
                where k.state = 'waiting'
                returning k.run_id, k.idx, k.map_index, k.version_id, k.state
            )
            select array_agg(row(run_id, idx, map_index, version_id, state)::task_ref) filter (where state <> 'waiting')
            into moved from counted;
            exit when moved is null;
            fx := enqueue_tasks(moved, fx);
            frontier := array(select m from unnest(moved) m where (m).state in ('skipped', 'upstream_failed'));
            left_groups := null;
            exit when cardinality(frontier) = 0;
            everything := everything || frontier;
        end loop;
        exit when not has_groups;
        select l.heard, to_retry || l.again into frontier, to_retry from complete_groups(everything[counted + 1:]) l;
        exit when cardinality(frontier) = 0;
        counted := cardinality(everything);
        left_groups := array_fill(true, array[cardinality(frontier)]);
    end loop;
    if cardinality(to_retry) > 0 then
        -- One more open task until everything is counted again: the run must not end in between.
        update run_status r set open_tasks = r.open_tasks + 1
        where r.run_id = any(array(select a.run_id from unnest(to_retry) a)) and r.state = 'running';
    end if;
    fx := close_finished_runs(everything, fx);
    if cardinality(to_retry) > 0 then
        fx := retry_groups(to_retry, fx);
    end if;
end $$;

-- Moves each run's counters by the tasks that ended, closes runs that have nothing open (V7), and starts queued ones.
create function close_finished_runs(p_ended task_ref[], inout fx effects) language plpgsql as $$
declare
    limited int[];
    closed bigint[];
    has_updated boolean;
    feeds boolean;
    is_past boolean;
    is_told boolean;
    told bigint[];
    again bigint[];
    -- without failure streaks and default notifications this is a lookup in two empty tables
    has_episodes boolean := exists (select 1 from failure_streak);
    has_defaults boolean := exists (select 1 from default_notification_rule);
    t timestamptz := clock();
begin
    with per_run as (
        select e.run_id, count(*)::int as n,
               count(*) filter (where s.is_leaf and e.state in ('failed', 'canceled', 'upstream_failed'))::int as bad,
               bool_or(s.outlets is not null and e.state = 'success') as has_updated, bool_or(s.awaits_past) as is_past,
               bool_or(s.notifies) as is_told, bool_or(s.feeds_instances) as feeds
        from unnest(p_ended) e join task_spec s on s.version_id = e.version_id and s.idx = e.idx group by e.run_id
    ), counted as (
        update run_status r
        set open_tasks = r.open_tasks - p.n, failed_leaves = r.failed_leaves + p.bad,
            finished_at = case when r.open_tasks = p.n then t else r.finished_at end,
            state = case when r.open_tasks > p.n then r.state
                         when r.cancel_requested then 'canceled'
                         when r.failed_leaves + p.bad > 0 then 'failed'
                         else 'success' end
        from per_run p where r.run_id = p.run_id and r.state not in ('success', 'failed', 'canceled')
        returning r.run_id, r.dag_id, r.version_id, r.state, r.retried, p.has_updated, p.is_past, p.is_told,
            p.feeds
    )
    select array_agg(distinct c.dag_id) filter (where (d.max_active_runs is not null or d.serializes_runs)
                                                and c.state not in ('queued', 'running')),
           array_agg(c.run_id) filter (where case when c.state = 'failed'
                                                       and d.has_run_retries then c.retried < (
                                                           select v.run_retries from dag_version v
                                                           where v.version_id = c.version_id) end),
           array_agg(c.run_id) filter (where d.has_dependents and c.state not in ('queued', 'running')),
           array_agg(c.run_id) filter (where (d.has_notifications or has_episodes
                                              or (has_defaults and c.state = 'failed'))
                                       and c.state not in ('queued', 'running')), bool_or(c.has_updated),
           bool_or(c.is_past), bool_or(c.is_told), bool_or(c.feeds)
    into limited, again, closed, told, has_updated, is_past, is_told, feeds
    from counted c join dag d on d.dag_id = c.dag_id
    where c.has_updated or c.is_past or c.is_told or c.feeds or c.state not in ('queued', 'running');
    if again is not null then
        -- To all others it has not ended.
        closed := (select array_agg(x) from unnest(closed) x where x <> all(again));
        told := (select array_agg(x) from unnest(told) x where x <> all(again));
    end if;
    if feeds then
        fx := count_for_instances(p_ended, fx);
    end if;
    if is_past then
        fx := depends_on_past_tasks(p_ended, fx);
    end if;
    if closed is not null or has_updated then
        fx := record_dependency_events(closed, case when has_updated then p_ended end, fx);
    end if;
    if is_told or told is not null then
        perform notify_ends(case when is_told then p_ended end, told);
    end if;
    if again is not null then
        fx := retry_runs(again, fx);
    end if;
    if limited is not null then
        fx := (admit_runs(limited, fx)).fx;
    end if;
end $$;

-- Whether all tasks of a group with retries have ended: only then the tasks after it count any of them.
create function is_group_finished(p_run_id bigint, p_version_id int, p_group_id int)
returns boolean language sql stable as $$
    select coalesce((select g.ended >= cardinality(w.members) + g.more from run_group g
                     join retry_group w on w.version_id = p_version_id and w.group_id = p_group_id
                     where g.run_id = p_run_id and g.group_id = p_group_id), false)
$$;

-- How the upstream of a run's waiting tasks has ended, by the tasks themselves, and how many more there are than the
-- version names, by mapping. p_idxs null: of all that wait. Counted once for all instances of a task, and for each only
-- what it alone waits for. The row of a mapped group counts its lists.
create function count_upstream(p_run_id bigint, p_idxs int[])
returns table (idx int, map_index int, success int, failed int, upstream_failed int, skipped int, setup_success int,
    setup_skipped int, more int) language sql stable as $$
    with counted as (
        select w.idx, w.version_id, w.is_indexed, count(*) filter (where u.state = 'success')::int as success,
               count(*) filter (where u.state in ('failed', 'canceled'))::int as failed,
               count(*) filter (where u.state = 'upstream_failed')::int as upstream_failed,
               count(*) filter (where u.state = 'skipped')::int as skipped,
               count(*) filter (where s.is_setup and u.state = 'success')::int as setup_success,
               count(*) filter (where s.is_setup and u.state = 'skipped')::int as setup_skipped,
               (count(u.idx) - count(distinct g.src) filter (where u.idx is not null))::int as more
        from (select distinct k.idx, k.version_id, k.map_index >= 0 and (
                  select x.map_head is not null from task_spec x where x.version_id = k.version_id
                      and x.idx = k.idx) as is_indexed from task k
              where k.run_id = p_run_id and (p_idxs is null or k.idx = any(p_idxs)) and k.state = 'waiting') w
        left join lateral (select x.src, x.leaves_group is null
            or is_group_finished(p_run_id, x.version_id, x.leaves_group) as is_delivered
                           from edge x where x.version_id = w.version_id and x.dst = w.idx
                               and (x.scope is null or x.scope = 'list' or (w.is_indexed and x.scope = 'each_index'))
                               offset 0) g on true
        left join lateral (select case when g.is_delivered then x.state end as state, x.idx
                           from task x where x.run_id = p_run_id and x.idx = g.src offset 0) u on true
        left join lateral (select x.is_setup from task_spec x where x.version_id = w.version_id
                           and x.idx = g.src offset 0) s on true
        group by w.idx, w.version_id, w.is_indexed
    )
    select c.idx, k.map_index, c.success + coalesce(o.success, 0), c.failed + coalesce(o.failed, 0),
           c.upstream_failed + coalesce(o.upstream_failed, 0), c.skipped + coalesce(o.skipped, 0), c.setup_success,
           c.setup_skipped, c.more
    from counted c
    cross join lateral (select x.map_index from task x where x.run_id = p_run_id and x.idx = c.idx
                        and x.state = 'waiting' and (x.map_index >= 0 or not c.is_indexed)
                        and (x.map_index < 0 or c.is_indexed or not exists (
                            select 1 from task_spec y where y.version_id = c.version_id and y.idx = c.idx
                                and y.map_head is not null)) offset 0) k
    left join lateral (select count(*) filter (where u.state = 'success')::int as success,
                              count(*) filter (where u.state in ('failed', 'canceled'))::int as failed,
                              count(*) filter (where u.state = 'upstream_failed')::int as upstream_failed,
                              count(*) filter (where u.state = 'skipped')::int as skipped
                       from edge x cross join lateral (
                           select y.state from task y where y.run_id = p_run_id and y.idx = x.src
                               and y.map_index = k.map_index offset 0) u
                       where x.version_id = c.version_id and x.dst = c.idx and x.scope = 'same_index') o
        on c.is_indexed
$$;

-- Gives new runs their state. Where nothing holds the DAG back the run starts at once; otherwise admission decides.
create function open_runs(p_run_ids bigint[], inout fx effects) language plpgsql as $$
declare
    started bigint[];
    held int[];
    t timestamptz := clock();
begin
    if coalesce(cardinality(p_run_ids), 0) = 0 then
        return;
    end if;
    with opened as (
        insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at)
        select r.run_id, r.dag_id, r.version_id, case when h.is_held then 'queued'::run_state else 'running' end,
               v.task_count, case when h.is_held then null else t end
        from run r join dag d on d.dag_id = r.dag_id join dag_version v on v.version_id = r.version_id
        cross join lateral (select d.is_paused or d.max_active_runs is not null
                                   or (d.serializes_runs and r.schedule_id is not null) as is_held) h
        where r.run_id = any(p_run_ids) order by r.run_id
        on conflict (run_id) do nothing
        returning run_id, dag_id, state
    )
    select array_agg(run_id) filter (where state = 'running'),
           array_agg(distinct dag_id) filter (where state = 'queued')
    into started, held from opened;
    -- without deadlines of tasks this is a lookup in an empty table
    if exists (select 1 from task_deadline) then
        perform set_task_deadlines(p_run_ids);
    end if;
    if started is not null then
        fx := start_runs(started, true, fx);
    end if;
    if held is not null then
        fx := (admit_runs(held, fx)).fx;
    end if;
end $$;

-- Attempts that are not their task's last: they become history, and waiting tasks get their timer. Not in
-- finish_attempts: a statement pays for every table it names. p_session null: each names its own.
create function record_attempts(p_session bigint, p_retried jsonb) returns void language plpgsql as $$
begin
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, reason, exit_code, admitted_at,
                         queued_at, started_at, startup_seconds, cpu_seconds, peak_memory_bytes, finished_at,
                         retry_at)
    select m.run_id, m.idx, m.map_index, m.epoch, m.attempt, coalesce(p_session, m.session), m.kind, m.reason,
           m.exit_code, m.admitted_at, m.queued_at, m.started_at, m.startup_seconds,
           m.cpu_seconds, m.peak_memory_bytes, clock(), coalesce(m.not_before, clock())
    from jsonb_to_recordset(p_retried) as m(run_id bigint, idx int, map_index int, epoch int, attempt smallint,
        kind text, reason text, exit_code int, admitted_at timestamptz, queued_at timestamptz, started_at timestamptz,
        startup_seconds real, cpu_seconds real, peak_memory_bytes bigint, not_before timestamptz, session bigint)
    on conflict (run_id, idx, map_index, epoch) do nothing;
    insert into task_timer (shard, due_at, run_id, idx, map_index)
    select g.shard, m.not_before, m.run_id, m.idx, m.map_index
    from jsonb_to_recordset(p_retried) as m(run_id bigint, idx int, map_index int, not_before timestamptz)
    join run_status r on r.run_id = m.run_id join dag g on g.dag_id = r.dag_id where m.not_before is not null
    on conflict do nothing;
    perform notify_retries(p_retried);
end $$;

-- Pending tasks that nothing holds become available, unless their DAG is paused. Those with gates pass them first.
create function release_pending_tasks(p_tasks task_ref[], inout fx effects) language plpgsql as $$
declare
    freed task_ref[];
begin
    with moved as (
        update task k set state = 'available'
        from unnest(p_tasks) p join run_status r on r.run_id = p.run_id join dag d on d.dag_id = r.dag_id
        join task_spec s on s.version_id = p.version_id and s.idx = p.idx
        where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'pending'
          and k.not_before is null and not d.is_paused and not s.is_gated and not (s.is_mapped and k.map_index = -1)
        returning k.run_id, k.idx, k.map_index, k.version_id, k.state
    )
    select array_agg(row(m.run_id, m.idx, m.map_index, m.version_id, m.state)::task_ref) into freed from moved m;
    if coalesce(cardinality(freed), 0) < cardinality(p_tasks) then
        fx.entering := fx.entering
            || array(select p from unnest(p_tasks) p
                     join task_spec s on s.version_id = (p).version_id and s.idx = (p).idx
                         and (s.is_gated or (s.is_mapped and (p).map_index = -1))
                     join run_status r on r.run_id = (p).run_id join dag d on d.dag_id = r.dag_id and not d.is_paused);
    end if;
    fx := enqueue_tasks(freed, fx);
end $$;

-- Counts ended tasks for their groups. Of finished ones: the tasks to count outside, and the groups that begin again.
create function complete_groups(p_ended task_ref[], out heard task_ref[], out again group_ref[]) language plpgsql as $$
declare
    over group_ref[];
begin
    heard := '{}';
    again := '{}';
    with counted as (
        insert into run_group as g (run_id, group_id, ended)
        select e.run_id, s.group_id, count(*)::int from unnest(p_ended) e
        cross join lateral (select x.group_id from task_spec x where x.version_id = e.version_id and x.idx = e.idx
                            offset 0) s
        where s.group_id is not null group by e.run_id, s.group_id order by e.run_id, s.group_id
        on conflict (run_id, group_id) do update set ended = g.ended + excluded.ended
        returning g.run_id, g.group_id, g.ended, g.more
    )
    select array_agg(row(c.run_id, r.version_id, c.group_id)::group_ref) into over from counted c
    cross join lateral (select x.version_id from run_status x where x.run_id = c.run_id offset 0) r
    cross join lateral (select x.members from retry_group x
                        where x.version_id = r.version_id and x.group_id = c.group_id offset 0) w
    where c.ended >= cardinality(w.members) + c.more;
    if over is null then
        return;
    end if;
    again := array(select o from unnest(over) o where should_retry_group(o));
    heard := array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref from unnest(over) o
                   join retry_group w on w.version_id = o.version_id and w.group_id = o.group_id
                   cross join unnest(w.members) m(idx)
                   cross join lateral (select * from task x where x.run_id = o.run_id and x.idx = m.idx offset 0) k
                   where o <> all(again));
end $$;

-- Whether a finished group runs again: a task in it failed, the group failed by that, and it has retries left. Not if
-- it merely could not start, and not in a run that was canceled or timed out.
create function should_retry_group(p_group group_ref) returns boolean language sql stable as $$
    select count(*) filter (where k.state = 'failed') > 0
           and count(*) filter (where s.decides_group and k.state in ('failed', 'canceled', 'upstream_failed')) > 0
    from run_status r join dag_version v on v.version_id = r.version_id
    join run_group g on g.run_id = r.run_id and g.group_id = p_group.group_id
    join retry_group w on w.version_id = r.version_id and w.group_id = p_group.group_id and g.retried < w.retries
    cross join unnest(w.members) m(idx)
    cross join lateral (select x.state from task x where x.run_id = r.run_id and x.idx = m.idx offset 0) k
    cross join lateral (select x.decides_group from task_spec x where x.version_id = r.version_id and x.idx = m.idx
                        offset 0) s
    where r.run_id = p_group.run_id and r.state = 'running' and not r.cancel_requested
      and coalesce(r.started_at + make_interval(secs => v.run_timeout) > clock(), true)
$$;

-- Everything in these groups waits again, but what a branch outside did not choose. The caller holds the runs' locks.
create function retry_groups(p_groups group_ref[], inout fx effects) language plpgsql as $$
declare
    one group_ref;
    what retry_group;
    everything task_ref[] := '{}';
    tries int;
begin
    foreach one in array p_groups loop
        select w.* into what from retry_group w where w.version_id = one.version_id and w.group_id = one.group_id;
        -- Nothing of it has been counted outside, so nothing there is reset.
        update run_group g set retried = g.retried + 1, ended = 0
        where g.run_id = one.run_id and g.group_id = one.group_id returning g.retried into tries;
        perform write_audit(
            system_actor(), 'retry', jsonb_build_object('group', what.name, 'retried', tries, 'failed', (
                select jsonb_agg(distinct s.name) from unnest(what.members) m(idx)
                join task k on k.run_id = one.run_id and k.idx = m.idx and k.state = 'failed'
                join task_spec s on s.version_id = one.version_id and s.idx = m.idx)), p_run_id => one.run_id);
        everything := everything || array(
            select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref
            from unnest(what.members) m(idx)
            cross join lateral (select * from task x where x.run_id = one.run_id and x.idx = m.idx offset 0) k
            where not (k.state = 'skipped' and k.started_at is null and coalesce(k.reason, '') like 'not chosen by %'
                       and not exists (
                select 1 from unnest(what.members) u(idx) join task_spec s on s.version_id = one.version_id
                    and s.idx = u.idx
                where k.reason = format('not chosen by %s', s.name))));
    end loop;
    fx := reopen_tasks(everything, fx);   -- all at once: a group that is still to begin again must not be counted
end $$;
