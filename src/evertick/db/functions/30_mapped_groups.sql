-- Mapped groups (docs/decisions/0070-mapped-groups.md). The row of the group's first task, its head, stands for the
-- whole group until its lists are known. Then each task of the group becomes instances that wait, each for its own
-- index.

-- Whether a waiting row of a mapped group may be decided: of an instance, not while its lists are to be read again; of
-- the whole, not while an instance of before is still being stopped.
create function is_group_decidable(p_run_id bigint, p_version_id int, p_head int, p_map_index int)
returns boolean language plpgsql stable as $$
begin
    return case when p_map_index >= 0
        then exists (select 1 from map_item m where m.run_id = p_run_id and m.idx = p_head)
        else not exists (select 1 from task_spec s cross join lateral (
                             select 1 from task k where k.run_id = p_run_id and k.idx = s.idx and k.map_index >= 0
                             limit 1) k
                         where s.version_id = p_version_id and s.map_head = p_head) end;
end $$;

-- Replaces a pending group by the instances of all its tasks and decides them, or ends all of it. Every epoch continues
-- after the highest that an instance of the task was given.
create function expand_group(p_head task_ref, inout fx effects) language plpgsql as $$
declare
    members int[] := array(select s.idx from task_spec s where s.version_id = p_head.version_id
                           and s.map_head = p_head.idx order by s.idx);
    plan record;
    ended task_ref[];
    evaluated move_result;
begin
    perform 1 from task k where k.run_id = p_head.run_id and k.idx = p_head.idx and k.map_index = -1
        and k.state = 'pending' and k.not_before is null;
    if not found then
        return;
    elsif not is_group_decidable(p_head.run_id, p_head.version_id, p_head.idx, -1) then
        update task k set state = 'canceled', finished_at = clock()
        where k.run_id = p_head.run_id and k.idx = p_head.idx and k.map_index = -1 and k.state = 'pending';
        update task k set state = 'waiting', finished_at = null
        where k.run_id = p_head.run_id and k.idx = p_head.idx and k.map_index = -1 and k.state = 'canceled';
        return;
    end if;
    select p.* into plan from plan_instances(p_head) p;
    if (plan.instead).state is not null then
        if has_failed_list(p_head) then
            plan.instead := row('upstream_failed', 'nothing to expand over: a task that returns a list has failed');
        end if;
        with over as (
            insert into task as k (run_id, idx, version_id, state, finished_at, reason)
            select p_head.run_id, i, p_head.version_id, (plan.instead).state, clock(), (plan.instead).reason
            from unnest(members) i order by i
            on conflict (run_id, idx, map_index) do update set state = excluded.state, reason = excluded.reason,
                finished_at = excluded.finished_at where k.state in ('waiting', 'pending')
            returning k.run_id, k.idx, k.map_index, k.version_id, k.state
        )
        select array_agg(row(o.run_id, o.idx, o.map_index, o.version_id, o.state)::task_ref) into ended from over o;
        fx := complete_tasks(ended, fx);
        return;
    end if;
    delete from task k where k.run_id = p_head.run_id and k.idx = any(members) and k.map_index = -1
        and k.state in ('waiting', 'pending');
    perform store_items(p_head, plan.lists, plan.n, plan.sizes, plan.strides);
    insert into task (run_id, idx, map_index, version_id, state, epoch)
    select p_head.run_id, m.idx, i, p_head.version_id, 'waiting', m.epoch
    from (select x as idx, coalesce((select max(a.epoch) from attempt a
                                     where a.run_id = p_head.run_id and a.idx = x), 0) as epoch
          from unnest(members) x) m
    cross join generate_series(0, plan.n - 1) i;
    perform count_expansion(p_head, members, plan.n - 1);
    perform recount_upstream(p_head.run_id, members);
    evaluated := evaluate_waiting_tasks(array[p_head.run_id], members, fx);
    fx := complete_tasks(evaluated.tasks, evaluated.fx);
end $$;

create function has_failed_list(p_head task_ref) returns boolean language sql stable as $$
    select exists (select 1 from edge g join task k on k.run_id = p_head.run_id and k.idx = g.src
                   where g.version_id = p_head.version_id and g.dst = p_head.idx and g.scope = 'list'
                     and k.state in ('failed', 'upstream_failed', 'canceled'))
$$;

-- Counts ended tasks for the instances of mapped groups that wait for them, each for all of their instances.
create function count_for_instances(p_ended task_ref[], inout fx effects) language plpgsql as $$
declare
    one record;
    evaluated move_result;
begin
    for one in
        select e.run_id, array_agg(distinct g.dst) as idxs from unnest(p_ended) e
        join task_spec s on s.version_id = e.version_id and s.idx = e.idx and s.feeds_instances
        join task_spec m on m.version_id = s.version_id and (m.idx = s.idx or m.group_id = s.group_id)
        join edge g on g.version_id = m.version_id and g.src = m.idx and g.scope <> 'same_index'
        join run_status r on r.run_id = e.run_id and r.state = 'running'
        where has_instances(e.run_id, g.dst) group by e.run_id order by e.run_id
    loop
        perform recount_upstream(one.run_id, one.idxs);
        evaluated := evaluate_waiting_tasks(array[one.run_id], one.idxs, fx);
        fx := complete_tasks(evaluated.tasks, evaluated.fx);
    end loop;
end $$;

-- What a branch skips when it does not choose a task: in a mapped group only the same index, outside of it all
-- instances of a task of a group, or the whole group as long as it has none.
create function instances_to_skip(p_run_id bigint, p_spec task_spec, p_head int, p_map_index int)
returns table (idx int, map_index int) language plpgsql stable as $$
#variable_conflict use_column
begin
    if p_head is not null then
        return query select p_spec.idx, p_map_index where p_spec.map_head = p_head;
    elsif p_spec.map_head is null then
        return query select p_spec.idx, -1 where not has_instances(p_run_id, p_spec.idx);
    else
        return query select k.idx, k.map_index from task k
            where k.run_id = p_run_id and k.idx = p_spec.idx and k.map_index >= 0
            union all
            select s.idx, -1 from task_spec s where s.version_id = p_spec.version_id and s.map_head = p_spec.map_head
                and is_group_decidable(p_run_id, p_spec.version_id, p_spec.map_head, -1);
    end if;
end $$;

-- With a task of a mapped group that has no instances, the rest of the group: it ended as a whole, and starts as one.
create function with_whole_groups(p_tasks task_ref[]) returns task_ref[] language plpgsql stable as $$
begin
    if not exists (select 1 from unnest(p_tasks) p
                   join task_spec s on s.version_id = p.version_id and s.idx = p.idx and s.map_head is not null
                   where p.map_index = -1) then
        return p_tasks;
    end if;
    return p_tasks || array(
        select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref
        from (select distinct p.run_id, p.version_id, s.map_head from unnest(p_tasks) p
              join task_spec s on s.version_id = p.version_id and s.idx = p.idx and s.map_head is not null
              where p.map_index = -1) h
        join task_spec s on s.version_id = h.version_id and s.map_head = h.map_head
        join task k on k.run_id = h.run_id and k.idx = s.idx and k.map_index = -1
            and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')
        where not exists (select 1 from unnest(p_tasks) p where p.run_id = k.run_id and p.idx = k.idx
                              and p.map_index = -1));
end $$;

-- A mapped group with instances waits as a whole again, to read its lists; while some are being stopped, nothing of it
-- is decided (`is_group_decidable`). Returns the reset instances.
create function reset_group(p_run_id bigint, p_version_id int, p_head int, fx effects)
returns move_result language plpgsql as $$
declare
    members int[] := array(select s.idx from task_spec s where s.version_id = p_version_id and s.map_head = p_head);
    done move_result;
begin
    if is_group_decidable(p_run_id, p_version_id, p_head, -1) then
        return row('{}'::task_ref[], fx)::move_result;
    end if;
    done := stop_instances(p_run_id, members, fx);
    delete from map_item m where m.run_id = p_run_id and m.idx = p_head;
    delete from task k where k.run_id = p_run_id and k.idx = any(members) and k.state not in ('queued', 'running');
    perform collapse_instances(done.tasks);
    return done;
end $$;
