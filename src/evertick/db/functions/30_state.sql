-- What tasks keep: state by key, and the results of steps. An attempt writes while it holds its lease, of whichever
-- run.

-- Keeps an attempt until the transaction ends: it is taken away by deleting its lease. Unlike lock_lease it lets other
-- tasks of the run write at the same time.
create function hold_lease(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int)
returns boolean language plpgsql as $$
begin
    perform 1 from lease l where l.session = p_session and l.run_id = p_run_id and l.idx = p_idx
        and l.map_index = p_map_index and l.epoch = p_epoch for key share;
    return found;
end $$;

-- The owner of a task's state, of that task in this run ('run'), or of an asset's.
create function state_place(p_run_id bigint, p_idx int, p_map_index int, p_scope text, p_asset text)
returns table (run_id bigint, dag_id int, owner text, map_index int) language sql stable as $$
    select case p_scope when 'run' then k.run_id else 0 end, case p_scope when 'asset' then 0 else v.dag_id end,
           case p_scope when 'asset' then p_asset else t.name end,
           case p_scope when 'run' then k.map_index else -1 end
    from task k join dag_version v on v.version_id = k.version_id
    join task_spec t on t.version_id = k.version_id and t.idx = k.idx
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
$$;

-- [[key, value], ...] of one owner, of one key or all. Expired values are as good as deleted.
create function state_of(p_run_id bigint, p_dag_id int, p_owner text, p_map_index int, p_key text)
returns jsonb language sql stable as $$
    select coalesce(jsonb_agg(jsonb_build_array(e.key, e.value) order by e.key), '[]')
    from state_entry e
    where e.run_id = p_run_id and e.dag_id = p_dag_id and e.owner = p_owner and e.map_index = p_map_index
      and (p_key is null or e.key = p_key) and (e.expires_at is null or e.expires_at > clock())
$$;

-- Sets a value (p_value), deletes it (p_value null), or deletes all of the owner (p_key null too). p_writer: the task
-- that changes the state of an asset. Returns whether anything was changed.
create function put_state(p_run_id bigint, p_dag_id int, p_owner text, p_map_index int, p_key text, p_value jsonb,
                          p_expires_at timestamptz, p_by text, p_writer jsonb) returns boolean language plpgsql as $$
declare
    is_new boolean;
begin
    if p_value is null then
        delete from state_entry e
        where e.run_id = p_run_id and e.dag_id = p_dag_id and e.owner = p_owner and e.map_index = p_map_index
          and (p_key is null or e.key = p_key);
        return found;
    end if;
    insert into state_entry (run_id, dag_id, owner, map_index, key, value, expires_at, changed_at, changed_by, writer)
    values (p_run_id, p_dag_id, p_owner, p_map_index, p_key, p_value, p_expires_at, clock(), p_by, p_writer)
    on conflict (run_id, dag_id, owner, map_index, key) do update
        set value = excluded.value, expires_at = excluded.expires_at, changed_at = excluded.changed_at,
            changed_by = excluded.changed_by, writer = excluded.writer
    returning xmax = 0 into is_new;
    if is_new and (select count(*) from (
            select from state_entry e
            where e.run_id = p_run_id and e.dag_id = p_dag_id and e.owner = p_owner and e.map_index = p_map_index
            limit 1001) x) > 1000 then
        raise exception 'state has at most 1,000 keys' using errcode = 'invalid_parameter_value';
    end if;
    return true;
end $$;

-- The same for an attempt; null if it is not held.
create function put_state_for_attempt(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int,
                                      p_scope text, p_asset text, p_key text, p_value jsonb, p_expires_at timestamptz)
returns boolean language plpgsql as $$
declare
    place record;
    writer jsonb;
begin
    if not hold_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch) then
        return null;
    end if;
    select * into place from state_place(p_run_id, p_idx, p_map_index, p_scope, p_asset);
    if p_scope = 'asset' and p_value is not null then
        select jsonb_build_object('dag', f->'dag', 'run', f->'run', 'task', t.owner, 'map_index', p_map_index)
        into writer from run_facts(p_run_id) f, state_place(p_run_id, p_idx, p_map_index, 'task', null) t;
    end if;
    return put_state(place.run_id, place.dag_id, place.owner, place.map_index, p_key, p_value, p_expires_at,
                     format('run %s', p_run_id), writer);
end $$;

-- Stores the result of a finished step of an attempt. The same step again changes nothing: only the answer was lost.
-- Null if the attempt is not held.
create function put_step_for_attempt(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int,
                                     p_name text, p_value jsonb) returns boolean language plpgsql as $$
begin
    if not hold_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch) then
        return null;
    end if;
    insert into step_result (run_id, idx, map_index, name, epoch, value, finished_at)
    values (p_run_id, p_idx, p_map_index, p_name, p_epoch, p_value, clock())
    on conflict (run_id, idx, map_index, name) do nothing;
    if (select count(*) from (select from step_result s
                              where s.run_id = p_run_id and s.idx = p_idx and s.map_index = p_map_index
                              limit 1001) x) > 1000 then
        raise exception 'a task has at most 1,000 steps' using errcode = 'invalid_parameter_value';
    end if;
    return true;
end $$;

-- The same for an operator, with an entry in the audit log, which never has the value.
create function put_state_for_operator(p_run_id bigint, p_dag_id int, p_owner text, p_map_index int, p_key text,
                                       p_value jsonb, p_expires_at timestamptz, p_actor actor)
returns boolean language plpgsql as $$
declare
    is_done boolean;
begin
    is_done := put_state(p_run_id, p_dag_id, p_owner, p_map_index, p_key, p_value, p_expires_at, p_actor.name, null);
    if is_done then
        perform write_audit(p_actor, case when p_value is null then 'delete_state' else 'put_state' end,
                            jsonb_strip_nulls(jsonb_build_object('owner', p_owner, 'key', p_key)),
                            p_dag_id => nullif(p_dag_id, 0), p_run_id => nullif(p_run_id, 0));
    end if;
    return is_done;
end $$;

-- Where an attempt's own connection has to be for `commit_attempt`: on this server, with this path.
create function commit_place() returns jsonb language sql stable as $$
    select jsonb_build_object('path', current_setting('search_path'), 'server', server_name())
$$;

create function server_name() returns text language sql stable as $$
    select extract(epoch from pg_postmaster_start_time()) || ' ' || current_database()
$$;

-- Ends an attempt with success in the transaction of its own writes, on a connection of the task: these, its result,
-- its end and the tasks after it are committed together or not at all. Only while the session holds the attempt, and no
-- operator has asked it to stop. The report of its process, which follows, is dropped as one that was sent again.
create function commit_attempt(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int,
                               p_result jsonb) returns void language plpgsql as $$
declare
    fx effects;
    done finish_result;
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    perform 1 from task k
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index and k.state = 'running'
      and k.epoch = p_epoch and k.session = p_session and k.request is null;
    if not found then
        raise exception 'the attempt was taken away, or is asked to stop' using errcode = 'EV007';
    end if;
    done := finish_attempts(p_session, jsonb_build_array(jsonb_build_object(
        'r', p_run_id, 'i', p_idx, 'm', p_map_index, 'e', p_epoch, 'kind', 'success',
        'result', p_result)), 0, null, fx);
    fx := apply_effects(done.fx);
    -- With the commit of the task, which no process of ours sees.
    perform pg_notify('evertick_ready', '');
    perform pg_notify('evertick_plan', '');
end $$;
