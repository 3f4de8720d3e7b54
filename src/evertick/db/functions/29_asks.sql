-- What a running attempt asks: facts about runs, tasks and outputs, and changes on its behalf. Each question names the
-- attempt with its session and epoch: the answer to one that is no longer held is null.

-- Whether a deferred task waits for a trigger.
create function has_trigger(p_task task) returns boolean language sql stable as $$
    select exists (select 1 from task_trigger w where w.run_id = p_task.run_id and w.idx = p_task.idx
                     and w.map_index = p_task.map_index and w.event is null)
$$;

-- The same for a change: whatever takes the attempt away locks its run first, so it either waits for the change or has
-- happened before.
create function lock_lease(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int)
returns boolean language plpgsql as $$
begin
    perform 1 from run_status s where s.run_id = p_run_id for no key update;
    return holds_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch);
end $$;

-- The type is that of the view `listed_run`.
create function run_facts(p_run_id bigint) returns jsonb language plpgsql stable as $$
begin
    return (select jsonb_build_object(
        'number', r.run_id, 'dag', d.name,
        'run', run_display_id(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id),
        'type', case when r.kind = 'manual' and r.triggered_by ^@ 'run ' then 'operator_triggered'
                     when r.kind = 'scheduled' and exists (
                         select 1 from run_trigger c
                         where c.schedule_id = r.schedule_id and c.fire_at = r.fire_at and c.kind in ('asset', 'alias'))
                     then 'asset_triggered' else r.kind::text end,
        'fire_at', r.fire_at, 'created_at', r.created_at,
        'due_at', case when r.kind = 'manual' then r.created_at else coalesce(r.fire_at, r.created_at) end,
        'started_at', s.started_at, 'finished_at', s.finished_at, 'state', s.state, 'params', r.params,
        'triggered_by', r.triggered_by,
        'interval', (select c.spec->'intervals'->(i.place::int - 1)
                     from schedule c
                     cross join lateral jsonb_array_elements_text(c.spec->'times') with ordinality i(at, place)
                     where c.schedule_id = r.schedule_id and c.spec->>'kind' = 'computed'
                       and i.at::timestamptz = r.fire_at limit 1),
        'partition', (select jsonb_build_array(p.key, p.date) from run_partition p where p.run_id = r.run_id),
        'note', (select n.content from note n where n.run_id = r.run_id and n.idx = -1 and n.map_index = -1))
    from run r join run_status s on s.run_id = r.run_id join dag d on d.dag_id = r.dag_id where r.run_id = p_run_id);
end $$;

-- The tasks of a run, [run, task, map_index, phase], with the phases of the view `listed_task`.
create function tasks_of_runs(p_runs bigint[]) returns jsonb language sql stable as $$
    select coalesce(jsonb_agg(jsonb_build_array(t.run, t.name, t.map_index, t.phase)), '[]')
    from (select run_display_id(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) as run, p.name,
                 coalesce(k.map_index, -1) as map_index,
                 case when k.state is null then 'waiting'
                      when k.state = 'pending' and k.not_before is not null then 'retrying'
                      when k.state = 'deferred' and not p.is_wait
                          and not has_trigger(k) then 'polling' else k.state::text end as phase
          from run r join run_status s on s.run_id = r.run_id join task_spec p on p.version_id = s.version_id
          left join task k on k.run_id = r.run_id and k.idx = p.idx
          where r.run_id = any(p_runs) order by r.run_id, p.idx, k.map_index limit 100000) t
$$;

create function find_run(p_dag text, p_run text) returns bigint language sql stable as $$
    select r.run_id from dag d join run r on r.dag_id = d.dag_id
    where d.name = p_dag and run_display_id(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) = p_run limit 1
$$;

-- The runs of a DAG by their ids, which an index finds, by their dates, or the newest ones.
create function select_runs(p_dag text, p_runs jsonb, p_dates jsonb) returns bigint[] language sql stable as $$
    select array(
        select r.run_id
        from (select r.run_id, r.fire_at from jsonb_array_elements_text(p_runs) x cross join dag d
              join run r on r.dag_id = d.dag_id
                        and run_display_id(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) = x
              where d.name = p_dag
              union all
              select r.run_id, r.fire_at from dag d join run r on r.dag_id = d.dag_id
              where p_runs is null and d.name = p_dag) r
        where p_dates is null or r.fire_at in (select x::timestamptz from jsonb_array_elements_text(p_dates) x)
        order by r.run_id desc limit 1000)
$$;

-- A named output of a task, of each instance that has it: [[map_index, value], ...].
create function outputs_of(p_run_id bigint, p_task text, p_key text) returns jsonb language sql stable as $$
    select coalesce(jsonb_agg(jsonb_build_array(o.map_index, o.value) order by o.map_index), '[]')
    from (select v.map_index, x.value from run_status s
          join task_spec t on t.version_id = s.version_id and t.name = p_task
          join result v on v.run_id = s.run_id and v.idx = t.idx
          cross join lateral (select output_part(v.value, p_key) as value) x
          where s.run_id = p_run_id and x.value is not null order by v.map_index limit 100000) o
$$;

-- The same of the newest of the last runs up to an instant that has it.
create function latest_outputs_of(p_dag text, p_until timestamptz, p_task text, p_key text)
returns jsonb language sql stable as $$
    select coalesce((
        select o.found
        from (select r.run_id from dag d join run r on r.dag_id = d.dag_id
              where d.name = p_dag and coalesce(r.fire_at, r.created_at) <= p_until
              order by r.run_id desc limit 1000) n
        cross join lateral (select outputs_of(n.run_id, p_task, p_key) as found offset 0) o
        where o.found <> '[]' order by n.run_id desc limit 1), '[]')
$$;

-- An asset by its name or its URI: {"name", "uri", "group", "extra"}, or null if no DAG of now has it.
create function asset_facts(p_name text, p_uri text) returns jsonb language sql stable as $$
    select jsonb_build_object('name', n.name, 'uri', coalesce(a.uri, n.name), 'group', coalesce(a.asset_group, 'asset'),
                              'extra', coalesce(a.extra, '{}'))
    from (select p_name as name where p_name is not null
          union all select x.name from asset x where x.uri = p_uri
          union all select p_uri where p_uri is not null and not exists (select 1 from asset x where x.uri = p_uri)) n
    left join asset a on a.name = n.name
    where a.name is not null
       or exists (select 1 from schedule_dependency w where w.kind = 'asset' and w.name = n.name)
       or exists (select 1 from dag d join task_spec s on s.version_id = d.version_id
                  where d.deleted_at is null and s.outlets @> array[n.name])
    limit 1
$$;

-- An update of an asset, with the task that made it. p_update is a row of asset_update.
create function update_facts(p_update asset_update) returns jsonb language sql stable as $$
    select jsonb_build_object(
        'id', p_update.update_id, 'timestamp', p_update.occurred_at, 'extra', p_update.extra, 'alias', p_update.alias,
        'partition_key', p_update.partition_key,
        'asset', coalesce((select jsonb_build_object('name', a.name, 'uri', a.uri, 'group', a.asset_group,
                                                     'extra', a.extra) from asset a where a.name = p_update.asset),
                          jsonb_build_object('name', p_update.asset, 'uri', p_update.asset, 'group', 'asset',
                                             'extra', '{}'::jsonb)),
        'dag', s.dag, 'run', s.run, 'task', s.task, 'map_index', p_update.map_index)
    from (select 1) o
    left join lateral (
        select d.name as dag, t.name as task,
               run_display_id(r.key, r.kind, coalesce(r.fire_at, r.created_at), r.run_id) as run
        from run r join dag d on d.dag_id = r.dag_id
        join task k on k.run_id = r.run_id and k.idx = p_update.idx and k.map_index = p_update.map_index
        join task_spec t on t.version_id = k.version_id and t.idx = k.idx
        where r.run_id = p_update.run_id) s on true
$$;

-- p_args: an asset by name or uri, or an alias; after, before, limit, ascending. At most 1,000.
create function select_updates(p_args jsonb) returns jsonb language plpgsql stable as $$
declare
    wanted text := asset_facts(p_args->>'name', p_args->>'uri')->>'name';
    since timestamptz := coalesce((p_args->>'after')::timestamptz, '-infinity');
    until timestamptz := coalesce((p_args->>'before')::timestamptz, 'infinity');
    most int := least(coalesce((p_args->>'limit')::int, 1000), 1000);
    is_up boolean := coalesce((p_args->>'ascending')::boolean, true);
begin
    return coalesce((
        select jsonb_agg(update_facts(x.u) order by case when is_up then x.n end, x.n desc)
        from (select f.u, row_number() over (order by (f.u).occurred_at, (f.u).update_id) as n
              from (select y as u from asset_update y
                    where y.occurred_at between since and until
                      and (p_args->>'partition_key' is null or y.partition_key = p_args->>'partition_key')
                      and case when p_args->>'alias' is null then y.asset = wanted else y.alias = p_args->>'alias' end
                    order by case when is_up then y.occurred_at end, y.occurred_at desc limit most) f) x), '[]');
end $$;

-- The updates after which a run of assets was started: those of its partition, or all since the run before of the same
-- schedule. At most 1,000.
create function consumed_updates(p_run_id bigint) returns jsonb language sql stable as $$
    select coalesce(jsonb_agg(update_facts(x.u) order by x.at, x.id), '[]')
    from (select y as u, y.occurred_at as at, y.update_id as id
          from run r join partition_update p on p.schedule_id = r.schedule_id and p.fire_at = r.fire_at
          join asset_update y on y.update_id = p.update_id where r.run_id = p_run_id
          union all
          select distinct on ((u.u).update_id) u.u, (u.u).occurred_at as at, (u.u).update_id as id
          from run r join schedule c on c.schedule_id = r.schedule_id
          join run_trigger k on k.schedule_id = r.schedule_id and k.fire_at = r.fire_at and k.kind in ('asset', 'alias')
          cross join lateral (
              select coalesce(max(p.occurred_at), c.changed_at - interval '1 microsecond') as since from (
                  select y.occurred_at from run_trigger y
                  where y.schedule_id = k.schedule_id and y.fire_at < k.fire_at and (y.kind, y.name) = (k.kind, k.name)
                  order by y.fire_at desc limit 1) p) w
          cross join lateral (
              select y as u from asset_update y
              where y.asset = any(case when k.kind = 'asset' then array[k.name]
                                       else array(select a.asset from asset_alias a where a.alias = k.name) end)
                and y.occurred_at > w.since and y.occurred_at <= k.occurred_at
              order by y.occurred_at desc limit 1000) u
          where r.run_id = p_run_id and not exists (select 1 from run_partition p where p.run_id = r.run_id)
          order by id limit 1000) x
$$;

-- The run of an attempt, and what earlier attempts of its task have left for it. Tasks that always need it are given it
-- with their claim, whose statement does not see the attempt's number in the task's row yet.
create function run_of_attempt(p_run_id bigint, p_idx int, p_map_index int, p_attempt int)
returns jsonb language plpgsql stable as $$
declare
    facts jsonb := run_facts(p_run_id);
begin
    if facts->>'type' = 'asset_triggered' then
        facts := facts || jsonb_build_object('events', consumed_updates(p_run_id));
    end if;
    return facts || jsonb_build_object(
        'polls', (select jsonb_build_array(q.since, q.polls) from sensor_poll q
                  where q.run_id = p_run_id and q.idx = p_idx and q.map_index = p_map_index),
        'input', (select jsonb_build_object('request', a.request, 'decided_at', a.decided_at,
                                            'decided_by', a.decided_by, 'chosen', a.chosen, 'fields', a.fields)
                  from approval a
                  where a.run_id = p_run_id and a.idx = p_idx and a.map_index = p_map_index
                    and a.request is not null and exists (
                      select 1 from sensor_poll q
                      where q.run_id = p_run_id and q.idx = p_idx and q.map_index = p_map_index)
                  order by a.epoch desc limit 1),
        'outputs', (select v.value from result v
                    where v.run_id = p_run_id and v.idx = p_idx and v.map_index = p_map_index),
        'resumed', (select w.given || jsonb_build_object('event', w.event) from task_trigger w
                    where w.run_id = p_run_id and w.idx = p_idx and w.map_index = p_map_index
                      and w.attempt = p_attempt and w.event is not null));
end $$;

-- p_verb: run, ended_run (with the task that failed last, or ended last), xcoms, latest_xcoms, runs, previous_run,
-- tasks, dag, asset, asset_events, aliased, state, steps or step. {"value": …}, or null if the attempt is not held.
create function answer_ask(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int, p_verb text,
                           p_args jsonb) returns jsonb language plpgsql stable as $$
declare
    found_value jsonb;
begin
    if not holds_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch) then
        return null;
    end if;
    case p_verb
    when 'partition' then
        select jsonb_build_array(p.key, p.date) into found_value from run_partition p where p.run_id = p_run_id;
    when 'run' then
        found_value := run_of_attempt(p_run_id, p_idx, p_map_index, (
            select k.attempt::int from task k
            where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index));
    when 'xcoms' then
        found_value := outputs_of(coalesce(find_run(p_args->>'dag', p_args->>'run'), 0), p_args->>'task',
                                  p_args->>'key');
    when 'latest_xcoms' then
        found_value := latest_outputs_of(p_args->>'dag', (p_args->>'until')::timestamptz, p_args->>'task',
                                         p_args->>'key');
    when 'runs' then
        select coalesce(jsonb_agg(run_facts(n)), '[]') into found_value
        from unnest(select_runs(p_args->>'dag', nullif(p_args->'runs', 'null'), nullif(p_args->'dates', 'null'))) n;
    when 'previous_run' then
        select run_facts(x.run_id) into found_value
        from (select r.run_id, r.fire_at from dag d join run r on r.dag_id = d.dag_id
              join run_status s on s.run_id = r.run_id
              where d.name = p_args->>'dag' and r.fire_at < (p_args->>'before')::timestamptz
                and (p_args->>'state' is null or s.state::text = p_args->>'state')
              order by r.run_id desc limit 1000) x
        order by x.fire_at desc limit 1;
    when 'tasks' then
        found_value := tasks_of_runs(select_runs(p_args->>'dag', nullif(p_args->'runs', 'null'),
                                                 nullif(p_args->'dates', 'null')));
    when 'ended_run' then
        select run_facts(r.run_id) || jsonb_build_object('last', (
            select jsonb_build_array(p.name, k.map_index, k.attempt) from task k
            join task_spec p on p.version_id = k.version_id and p.idx = k.idx
            where k.run_id = r.run_id and k.finished_at is not null
            order by k.state = 'failed' and s.state = 'failed' desc, k.finished_at desc, k.idx desc limit 1))
        into found_value
        from run r join run_status s on s.run_id = r.run_id join dag d on d.dag_id = r.dag_id
        where r.run_id = (p_args->>'number')::bigint and d.name = p_args->>'dag';
    when 'dag' then
        select jsonb_build_object('dag', d.name, 'is_paused', d.is_paused, 'file', d.file) into found_value
        from dag d where d.name = p_args->>'dag' and d.deleted_at is null;
    when 'state' then
        select state_of(o.run_id, o.dag_id, o.owner, o.map_index, p_args->>'key') into found_value
        from state_place(p_run_id, p_idx, p_map_index, p_args->>'scope', p_args->>'asset') o;
    when 'asset' then
        found_value := asset_facts(p_args->>'name', p_args->>'uri');
    when 'asset_events' then
        found_value := select_updates(p_args);
    when 'aliased' then
        select coalesce(jsonb_agg(asset_facts(a.asset, null) order by a.asset), '[]') into found_value
        from asset_alias a where a.alias = p_args->>'alias';
    when 'commit_place' then
        found_value := commit_place();
    when 'steps' then
        select coalesce(jsonb_agg(s.name), '[]') into found_value from step_result s
        where s.run_id = p_run_id and s.idx = p_idx and s.map_index = p_map_index;
    when 'step' then
        select jsonb_build_object('value', s.value) into found_value from step_result s
        where s.run_id = p_run_id and s.idx = p_idx and s.map_index = p_map_index and s.name = p_args->>'name';
    else
        raise exception 'ask % is unknown', p_verb using errcode = 'invalid_parameter_value';
    end case;
    return jsonb_build_object('value', found_value);
end $$;

-- What an attempt calls its instance of a mapped task. Null if the attempt is not held.
create function name_instance_for_attempt(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int,
                                          p_name text) returns boolean language plpgsql as $$
begin
    if not lock_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch) then
        return null;
    end if;
    update task k set map_name = p_name
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.map_index >= 0
      and k.state = 'running' and k.epoch = p_epoch and k.session = p_session and k.map_name is distinct from p_name;
    return found;
end $$;

-- A run that an attempt triggers; null if the attempt is not held or the DAG was deleted.
create function trigger_for_attempt(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int,
                                    p_dag_id int, p_params jsonb, p_key text, p_fire_at timestamptz, p_note text,
                                    p_partition text, p_partition_date timestamptz, p_actor actor)
returns table (run_id bigint, is_new boolean, defers boolean) language plpgsql as $$
begin
    if lock_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch) then
        return query select * from trigger_run(
            p_dag_id, p_params, p_key, p_actor, p_fire_at, p_note, p_partition => p_partition,
            p_partition_date => p_partition_date);
    end if;
end $$;

-- A variable that an attempt changes; p_content null deletes it. Null if the attempt is not held.
create function put_variable_for_attempt(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int,
                                         p_name text, p_content text, p_key_id text, p_description text, p_actor actor)
returns boolean language plpgsql as $$
begin
    if not lock_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch) then
        return null;
    elsif p_content is null then
        return delete_value('variable', p_name, p_actor);
    end if;
    return put_value('variable', p_name, p_content, p_key_id, p_description, p_actor, false);
end $$;

-- The outputs of an attempt that may not succeed, all together; p_value null deletes them. Null if the attempt is not
-- held. The end of a successful attempt stores its own.
create function put_outputs_for_attempt(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int,
                                        p_value jsonb) returns boolean language plpgsql as $$
begin
    if not lock_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch) then
        return null;
    elsif p_value is null then
        delete from result v where v.run_id = p_run_id and v.idx = p_idx and v.map_index = p_map_index;
        return true;
    end if;
    insert into result (run_id, idx, map_index, epoch, value) values (p_run_id, p_idx, p_map_index, p_epoch, p_value)
    on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value;
    return true;
end $$;

-- What an attempt says about its updates of assets, in place of what it has said before: [{asset, uri, extra, alias,
-- asset_extra}]. They count when it succeeds. Null if the attempt is not held.
create function put_updates_for_attempt(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int,
                                        p_updates jsonb) returns boolean language plpgsql as $$
begin
    if not lock_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch) then
        return null;
    end if;
    delete from asset_update u
    where u.run_id = p_run_id and u.idx = p_idx and u.map_index = p_map_index and u.occurred_at is null;
    insert into asset (name, uri, asset_group, extra, changed_at)
    select distinct on (x.asset) x.asset, coalesce(x.uri, x.asset), 'asset', coalesce(x.asset_extra, '{}'), clock()
    from jsonb_to_recordset(p_updates) as x(asset text, uri text, asset_extra jsonb, alias text)
    where x.alias is not null order by x.asset
    on conflict (name) do nothing;
    insert into asset_update (asset, extra, updated_by, run_id, idx, map_index, epoch, alias, partition_key)
    select x.asset, coalesce(x.extra, '{}'), format('run %s', p_run_id), p_run_id, p_idx, p_map_index, p_epoch, x.alias,
           x.partition_key
    from jsonb_to_recordset(p_updates) as x(asset text, extra jsonb, alias text, partition_key text);
    return true;
end $$;
