-- Dynamic mapping: a task that becomes one instance per element of its inputs (docs/decisions/0017-mapping.md).
--
-- A mapped task waits as one row with map_index -1. When it may start it is pending; at the end of the transaction,
-- where other tasks pass their gates, its instances (0, 1, 2, ...) replace it: tasks like all others. Every downstream
-- task counts each: `task.n_extra` and `run_status.extra_tasks` are how many more there are than the version names.

create function has_instances(p_run_id bigint, p_idx int) returns boolean language sql stable as $$
    select exists (select 1 from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index >= 0)
$$;

-- What a task returned (key null), or an output that it named, from its stored result.
create function output_part(p_value jsonb, p_key text) returns jsonb language sql immutable as $$
    select case when p_value->>'$evertick' is distinct from 'outputs' then case when p_key is null then p_value end
                when p_key is null then nullif(p_value->'value', 'null')
                else p_value->'named'->p_key end
$$;

-- What the instances of a mapped task returned, in their order. One that returned nothing leaves no place.
create function mapped_results(p_run_id bigint, p_idx int) returns jsonb language plpgsql stable as $$
begin
    return (select coalesce(jsonb_agg(v.value order by v.map_index), '[]') from result v
            where v.run_id = p_run_id and v.idx = p_idx and v.map_index >= 0);
end $$;

-- What an instance is called with: the results that it takes as they are, and under '' what it was given of each list.
-- Only a task of a mapped group has no item of its own: the group has it, and results of the group are those of its
-- index.
create function inputs_of_instance(p_run_id bigint, p_version_id int, p_idx int, p_map_index int, p_attempt int)
returns text language plpgsql stable as $$
declare
    given jsonb := (select m.item from map_item m where m.run_id = p_run_id and m.idx = p_idx
                    and m.map_index = p_map_index);
    head int;
begin
    if given is null then
        head := (select s.map_head from task_spec s where s.version_id = p_version_id and s.idx = p_idx);
        given := (select m.item from map_item m where m.run_id = p_run_id and m.idx = head
                  and m.map_index = p_map_index);
        return (select coalesce(jsonb_object_agg(s.name, case
                    when i.src = i.idx then run_of_attempt(p_run_id, p_idx, p_map_index, p_attempt)
                    when s.map_head = head then own.value when s.is_mapped then mapped_results(p_run_id, i.src)
                    else v.value end), '{}')
                from task_input i join task_spec s on s.version_id = i.version_id and s.idx = i.src
                left join result v on v.run_id = p_run_id and v.idx = i.src and v.map_index = -1
                left join result own on own.run_id = p_run_id and own.idx = i.src and own.map_index = p_map_index
                where i.version_id = p_version_id and i.idx = p_idx) || jsonb_build_object('', given);
    end if;
    return (select coalesce(jsonb_object_agg(s.name, case
                when i.src = i.idx then run_of_attempt(p_run_id, p_idx, p_map_index, p_attempt)
                when s.is_mapped then mapped_results(p_run_id, i.src) else v.value end), '{}')
            from task_input i join task_spec s on s.version_id = i.version_id and s.idx = i.src
            left join result v on v.run_id = p_run_id and v.idx = i.src and v.map_index = -1
            where i.version_id = p_version_id and i.idx = p_idx) || jsonb_build_object('', given);
end $$;

-- The length of a list that code makes of outputs of tasks, by {"src": idx}, or {"sum" | "min" | "max": [...]} of such
-- lengths; or why there is none. A dict counts its keys, a mapped task its instances that returned something.
create function list_size(p_head task_ref, p_size jsonb, out n bigint, out instead expansion_error)
language plpgsql stable as $$
declare
    how text;
    part record;
    source record;
    kind text;
begin
    if not p_size ? 'src' then
        how := (select k from jsonb_object_keys(p_size) k);
        for part in select l.* from jsonb_array_elements(p_size->how) e cross join lateral list_size(p_head, e) l loop
            instead := part.instead;
            exit when instead.state is not null;
            n := case how when 'min' then least(n, part.n) when 'max' then greatest(n, part.n)
                          else coalesce(n, 0) + part.n end;
        end loop;
        return;
    end if;
    select s.name, k.state, output_part(v.value, null) as list into source from task_spec s
    left join task k on k.run_id = p_head.run_id and k.idx = s.idx and k.map_index = -1
    left join result v on v.run_id = p_head.run_id and v.idx = s.idx and v.map_index = -1
    where s.version_id = p_head.version_id and s.idx = (p_size->>'src')::int;
    if source.state is null then
        n := (select count(*) from result v where v.run_id = p_head.run_id and v.idx = (p_size->>'src')::int
              and v.map_index >= 0 and output_part(v.value, null) is not null);
        return;
    end if;
    kind := jsonb_typeof(source.list);
    if source.state = 'success' and kind = 'array' then
        n := jsonb_array_length(source.list);
    elsif source.state = 'success' and kind = 'object' and not source.list ? '$evertick' then
        n := (select count(*) from jsonb_object_keys(source.list));
    elsif source.state = 'skipped' then
        instead := row('skipped', format('nothing to expand over: task %s was skipped', source.name))::expansion_error;
    elsif source.state <> 'success' then
        instead := row('upstream_failed',
                       format('nothing to expand over: task %s ended as %s', source.name,
                              source.state))::expansion_error;
    else
        instead := row('failed', format('cannot expand over the result of task %s: it is %s, not a list or a dict',
                       source.name, case
                       when source.list->>'$evertick' = 'file' then 'so large that it was put into a file'
                       else coalesce(kind, 'nothing') end))::expansion_error;
    end if;
end $$;

-- The lists of a mapped task in one run, each as an array of what an instance is given of it.
create function mapping_inputs(p_head task_ref, out lists jsonb[], out instead expansion_error)
language plpgsql stable as $$
declare
    source record;
    list jsonb;
    why text;
    sized record;
    how map_mode := (select m.how from task_mapping m where m.version_id = p_head.version_id and m.idx = p_head.idx);
begin
    for source in
        select l.length, l.src, l.size, s.name, s.is_mapped
        from mapping_input l left join task_spec s on s.version_id = l.version_id and s.idx = l.src
        where l.version_id = p_head.version_id and l.idx = p_head.idx order by l.place
    loop
        if source.size is not null then
            select l.* into sized from list_size(p_head, source.size) l;
            instead := sized.instead;
            exit when instead.state is not null;
            source.length := sized.n;
        end if;
        if source.src is null then
            lists := lists || (select coalesce(jsonb_agg(n), '[]') from generate_series(0, source.length - 1) n);
            continue;
        end if;
        list := case when source.is_mapped and has_instances(p_head.run_id, source.src)
            then mapped_results(p_head.run_id, source.src)
                     else (select v.value from result v where v.run_id = p_head.run_id and v.idx = source.src
                           and v.map_index = -1) end;
        why := case
            when list is null and exists (select 1 from task k where k.run_id = p_head.run_id and k.idx = source.src
                                          and k.map_index = -1 and k.state = 'skipped') then ''
            when list->>'$evertick' = 'file' then 'it is so large that it was put into a file; return a list of names '
                'or numbers, and let each instance read its own'
            when list is null or jsonb_typeof(list) <> 'array' then format('it is %s, not a list', coalesce(
                replace(replace(jsonb_typeof(list), 'object', 'a dict'), 'string', 'text'), 'nothing'))
            when how = 'kwargs' and exists (select from jsonb_array_elements(list) e where jsonb_typeof(e) <> 'object')
            then 'expand_kwargs takes a list of dicts, and not all of its elements are' end;
        if why = '' then
            instead.state := 'skipped';
            instead.reason := format('nothing to expand over: task %s was skipped', source.name);
            return;
        elsif why is not null then
            instead.state := 'failed';
            instead.reason := format('cannot expand over the result of task %s: %s', source.name, why);
            return;
        end if;
        lists := lists || list;
    end loop;
end $$;

-- How many instances these lists make, or why none. Instance i gets element (i / stride) % size of each list.
create function count_instances(p_head task_ref, p_lists jsonb[], out n int, out sizes int[], out strides int[],
                                out instead expansion_error) language plpgsql stable as $$
declare
    planned task_mapping;
    total bigint := 1;
begin
    select m.* into planned from task_mapping m where m.version_id = p_head.version_id and m.idx = p_head.idx;
    sizes := array(select jsonb_array_length(l) from unnest(p_lists) l);
    if 0 = all(sizes) or (planned.how = 'product' and 0 = any(sizes)) then
        instead := row('skipped', 'nothing to expand over: the list is empty')::expansion_error;
        return;
    elsif planned.how = 'zip' and (select count(distinct x) from unnest(sizes) x) > 1 then
        instead := row('failed', format('cannot expand lists side by side: they have %s elements',
                                        array_to_string(sizes, ', ')))::expansion_error;
        return;
    end if;
    for place in reverse cardinality(sizes) .. 1 loop
        strides := (case planned.how when 'product' then total else 1 end)::int || strides;
        total := case planned.how when 'product' then total * sizes[place] else sizes[place] end;
        if total > planned.most then
            instead := row('failed',
                           format('expands to %s%s instances, and at most %s are allowed: '
                'give it less, or raise max_instances',
                                            case when place > 1 then 'at least '
                                                else '' end, total, planned.most))::expansion_error;
            return;
        end if;
    end loop;
    n := total;
end $$;

-- The lists of a mapped task or group, and how many instances they make, or why none.
create function plan_instances(p_head task_ref, out lists jsonb[], out n int, out sizes int[], out strides int[],
                               out instead expansion_error) language plpgsql stable as $$
declare
    given record;
    counted record;
begin
    select l.lists, l.instead into given from mapping_inputs(p_head) l;
    lists := given.lists;
    instead := given.instead;
    if instead.state is null then
        select c.* into counted from count_instances(p_head, lists) c;
        n := counted.n;
        sizes := counted.sizes;
        strides := counted.strides;
        instead := counted.instead;
    end if;
end $$;

-- Stores what each instance is given of each list. Hash joins: lists have no index.
create function store_items(p_head task_ref, p_lists jsonb[], p_n int, p_sizes int[], p_strides int[])
returns void language sql set enable_hashjoin = on as $$
    insert into map_item (run_id, idx, map_index, item)
    select p_head.run_id, p_head.idx, i, jsonb_agg(e.value order by l.place)
    from generate_series(0, p_n - 1) i
    cross join unnest(p_sizes, p_strides) with ordinality l(size, stride, place)
    join (select x.place, e.value, e.place - 1 as spot
          from unnest(p_lists) with ordinality x(list, place)
          cross join jsonb_array_elements(x.list) with ordinality e(value, place)) e
      on e.place = l.place and e.spot = (i / l.stride) % l.size group by i
$$;

-- Replaces a mapped task by its instances, or ends it; returns what it became, nothing if it is not pending. Its epoch
-- continues in them, so that none is issued twice.
create function expand_task(p_head task_ref) returns task_ref[] language plpgsql as $$
declare
    head task;
    plan record;
    made task_ref[];
begin
    select k.* into head from task k
    where k.run_id = p_head.run_id and k.idx = p_head.idx and k.map_index = -1 and k.state = 'pending'
        and k.not_before is null;
    if not found then
        return null;
    end if;
    select p.* into plan from plan_instances(p_head) p;
    if (plan.instead).state is not null then
        update task k set state = (plan.instead).state, reason = (plan.instead).reason, finished_at = clock()
        where k.run_id = p_head.run_id and k.idx = p_head.idx and k.map_index = -1 and k.state = 'pending';
        return array[row(p_head.run_id, p_head.idx, -1, p_head.version_id, (plan.instead).state)::task_ref];
    end if;
    delete from task k where k.run_id = p_head.run_id and k.idx = p_head.idx and k.map_index = -1
        and k.state = 'pending';
    perform store_items(p_head, plan.lists, plan.n, plan.sizes, plan.strides);
    with entering as (
        insert into task (run_id, idx, map_index, version_id, state, epoch)
        select p_head.run_id, p_head.idx, i, p_head.version_id,
               case when s.is_gated or d.is_paused then 'pending'::task_state else 'available' end, head.epoch
        from generate_series(0, plan.n - 1) i, task_spec s, run_status r, dag d
        where s.version_id = p_head.version_id and s.idx = p_head.idx and r.run_id = p_head.run_id
            and d.dag_id = r.dag_id
        returning run_id, idx, map_index, version_id, state
    )
    select array_agg(row(e.run_id, e.idx, e.map_index, e.version_id, e.state)::task_ref order by e.map_index) into made
        from entering e;
    perform count_expansion(p_head, array[p_head.idx], plan.n - 1);
    return made;
end $$;

-- Counts more instances of these tasks: for the run, for groups with retries, and for the tasks downstream.
create function count_expansion(p_head task_ref, p_idxs int[], p_more int) returns void language plpgsql as $$
declare
    added int := p_more * cardinality(p_idxs);
begin
    if p_more = 0 then
        return;
    end if;
    update run_status r set open_tasks = r.open_tasks + added, extra_tasks = r.extra_tasks + added
    where r.run_id = p_head.run_id and r.state = 'running';
    insert into run_group as g (run_id, group_id, more)
    select p_head.run_id, s.group_id, p_more * count(*)::int from task_spec s
    where s.version_id = p_head.version_id and s.idx = any(p_idxs) and s.group_id is not null group by s.group_id
    on conflict (run_id, group_id) do update set more = g.more + excluded.more;
    insert into task as k (run_id, idx, version_id, state, n_extra)
    select p_head.run_id, g.dst, p_head.version_id, 'waiting', p_more * count(*)::int
    from edge g join task_spec s on s.version_id = g.version_id and s.idx = g.dst
    where g.version_id = p_head.version_id and g.src = any(p_idxs) and coalesce(g.scope, 'list') = 'list'
        and not (s.is_mapped and has_instances(p_head.run_id, g.dst)) group by g.dst order by g.dst
    on conflict (run_id, idx, map_index) do update set n_extra = coalesce(k.n_extra, 0) + excluded.n_extra
        where k.state = 'waiting';
    perform recount_upstream(p_head.run_id, array(
        select distinct g.dst from edge g where g.version_id = p_head.version_id and g.src = any(p_idxs)
            and g.scope = 'each_index' and has_instances(p_head.run_id, g.dst)));
end $$;

-- Expands mapped tasks and completes those that end by it. Instances with gates, and newly ready mapped tasks, enter.
create function expand_tasks(p_heads task_ref[], inout fx effects) language plpgsql as $$
declare
    head task_ref;
    made task_ref[];
begin
    foreach head in array p_heads loop
        if exists (select 1 from task_spec s where s.version_id = head.version_id and s.map_head = head.idx) then
            fx := expand_group(head, fx);
            continue;
        end if;
        made := expand_task(head);
        if made[1].map_index = -1 then
            fx := complete_tasks(made, fx);
        else
            fx := enqueue_tasks(made, fx);
        end if;
    end loop;
end $$;

-- When all instances of a task wait again, it waits as a whole, to read its lists again, with the highest epoch issued.
create function collapse_instances(p_tasks task_ref[]) returns void language plpgsql as $$
declare
    one record;
begin
    for one in
        select distinct p.run_id, p.idx, p.version_id from unnest(p_tasks) p
        join task_spec s on s.version_id = p.version_id and s.idx = p.idx and s.map_head is null
        where p.map_index >= 0 and not exists (
            select 1 from task k where k.run_id = p.run_id and k.idx = p.idx and k.state <> 'waiting')
        order by p.run_id, p.idx
    loop
        delete from task k where k.run_id = one.run_id and k.idx = one.idx and k.map_index >= 0 and k.state = 'waiting';
        delete from map_item m where m.run_id = one.run_id and m.idx = one.idx;
        insert into task (run_id, idx, version_id, state, epoch)
        select one.run_id, one.idx, one.version_id, 'waiting', coalesce(max(a.epoch), 0)
        from attempt a where a.run_id = one.run_id and a.idx = one.idx
        on conflict (run_id, idx, map_index) do nothing;
    end loop;
    -- of a group whose lists are to be read again
    for one in
        select distinct p.run_id, s.map_head as head, p.version_id from unnest(p_tasks) p
        join task_spec s on s.version_id = p.version_id and s.idx = p.idx and s.map_head is not null
        where p.map_index >= 0 and not exists (
            select 1 from map_item m where m.run_id = p.run_id and m.idx = s.map_head)
        order by p.run_id, s.map_head
    loop
        delete from task k using task_spec s
        where s.version_id = one.version_id and s.map_head = one.head and k.run_id = one.run_id and k.idx = s.idx
          and k.map_index >= 0 and k.state = 'waiting';
        if is_group_decidable(one.run_id, one.version_id, one.head, -1) then
            insert into task (run_id, idx, version_id, state) values (one.run_id, one.head, one.version_id, 'waiting')
            on conflict (run_id, idx, map_index) do nothing;
            perform recount_upstream(one.run_id, array[one.head]);
        end if;
    end loop;
end $$;

-- What runs of these tasks is asked to stop, what has not started ends, and attempts become history. Returns the ended.
create function stop_instances(p_run_id bigint, p_idxs int[], fx effects) returns move_result language plpgsql as $$
declare
    one record;
    taken task_ref[];
begin
    for one in
        select s.idx, s.queue, s.priority from run_status r join task_spec s on s.version_id = r.version_id
        where r.run_id = p_run_id and s.idx = any(p_idxs) order by s.idx
    loop
        fx := leave_gate_queues(array[p_run_id], one.idx, null, fx);
        delete from ready_task q where q.queue = one.queue and q.rank in (9 - one.priority, 9) and q.run_id = p_run_id
            and q.idx = one.idx;
    end loop;
    update task k set request = 'clear'
    where k.run_id = p_run_id and k.idx = any(p_idxs) and k.state in ('queued', 'running')
        and k.request is distinct from 'cancel';
    update task k set state = 'canceled', finished_at = clock(), not_before = null
    where k.run_id = p_run_id and k.idx = any(p_idxs) and k.state in ('waiting', 'pending', 'available', 'deferred');
    delete from deferral d where d.run_id = p_run_id and d.idx = any(p_idxs);
    delete from task_trigger w where w.run_id = p_run_id and w.idx = any(p_idxs);
    taken := array(select row(k.run_id, k.idx, k.map_index, k.version_id, k.state)::task_ref from task k
                   where k.run_id = p_run_id and k.idx = any(p_idxs) and k.state not in ('queued', 'running'));
    fx := release_gates(taken, fx);
    perform record_cleared_attempts(taken);
    return row(taken, fx)::move_result;
end $$;

-- Resets all instances of mapped tasks that are cleared as a whole: what runs is asked to stop, what has not started
-- ends, and what has ended waits again. One that is being stopped stands for all until its end. Returns the reset ones.
-- Of a mapped group only if all of its tasks are cleared; else each instance is cleared by itself, with its item.
create function reset_instances(p_run_id bigint, p_idxs int[], fx effects) returns move_result language plpgsql as $$
declare
    one record;
    done move_result;
    everything task_ref[] := '{}';
begin
    for one in
        select s.idx from run_status r join task_spec s on s.version_id = r.version_id
        where r.run_id = p_run_id and s.idx = any(p_idxs) and s.is_mapped and s.map_head is null
            and has_instances(p_run_id, s.idx) order by s.idx
    loop
        done := stop_instances(p_run_id, array[one.idx], fx);
        fx := done.fx;
        if exists (select 1 from task k where k.run_id = p_run_id and k.idx = one.idx
                   and k.state in ('queued', 'running')) then
            delete from task k where k.run_id = p_run_id and k.idx = one.idx and k.state not in ('queued', 'running');
        else
            update task k set state = 'waiting', finished_at = null
            where k.run_id = p_run_id and k.idx = one.idx
              and k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed');
            perform collapse_instances(done.tasks);
        end if;
        everything := everything || done.tasks;
    end loop;
    for one in
        select s.version_id, s.map_head from run_status r join task_spec s on s.version_id = r.version_id
        where r.run_id = p_run_id and s.idx = any(p_idxs) and s.map_head is not null
        group by s.version_id, s.map_head
        having count(*) = (select count(*) from task_spec x where x.version_id = s.version_id
                           and x.map_head = s.map_head) order by s.map_head
    loop
        done := reset_group(p_run_id, one.version_id, one.map_head, fx);
        fx := done.fx;
        everything := everything || done.tasks;
    end loop;
    return row(everything, fx)::move_result;
end $$;

-- An instance never waits for upstream tasks: if one was reopened and something upstream of it runs again, too, its
-- inputs are outdated, and the task is reset as a whole. The same for the tasks downstream. Returns what was reset. The
-- instances of a mapped group do wait: they are reset only with a task that returns one of its lists.
create function collapse_unready(p_tasks task_ref[], fx effects) returns move_result language plpgsql as $$
declare
    frontier task_ref[] := p_tasks;
    one record;
    back move_result;
    everything task_ref[] := '{}';
    taken task_ref[];
begin
    while cardinality(frontier) > 0 loop
        taken := '{}';
        for one in
            select c.run_id, c.version_id, s.map_head, array_agg(c.idx) as idxs
            from (select p.run_id, p.version_id, p.idx from unnest(frontier) p
                  union
                  select p.run_id, p.version_id, g.dst from unnest(frontier) p
                  join edge g on g.version_id = p.version_id and g.src = p.idx
                      and coalesce(g.scope, 'list') = 'list') c
            join task_spec s on s.version_id = c.version_id and s.idx = c.idx
            where exists (select 1 from task k
                          where k.run_id = c.run_id and k.idx = c.idx and k.map_index >= 0 and k.state = 'waiting')
              and exists (select 1 from edge g left join task u on u.run_id = c.run_id and u.idx = g.src
                          where g.version_id = c.version_id and g.dst = coalesce(s.map_head, c.idx)
                            and (g.scope is null or g.scope = 'list')
                            and (coalesce(u.state, 'waiting') not in ('success', 'failed', 'skipped', 'canceled',
                                 'upstream_failed') or not (g.leaves_group is null
                                     or is_group_finished(c.run_id, c.version_id, g.leaves_group))))
            group by c.run_id, c.version_id, s.map_head order by c.run_id, s.map_head
        loop
            if one.map_head is null then
                back := reset_instances(one.run_id, one.idxs, fx);
            else
                back := reset_group(one.run_id, one.version_id, one.map_head, fx);
            end if;
            fx := back.fx;
            taken := taken || back.tasks;
        end loop;
        everything := everything || taken;
        frontier := taken;
    end loop;
    return row(everything, fx)::move_result;
end $$;
