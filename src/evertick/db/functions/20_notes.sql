-- Texts and values that people add to runs and tasks: notes, and outputs that they set themselves.

-- Writes a note, or deletes it (null). Returns whether there is such a run: its row is locked, so that it cannot be
-- deleted meanwhile and leave the note behind.
create function put_note(p_run_id bigint, p_idx int, p_map_index int, p_content text, p_actor text)
returns boolean language plpgsql as $$
begin
    perform 1 from run_status r where r.run_id = p_run_id for key share;
    if not found then
        return false;
    end if;
    if p_content is null then
        delete from note n where n.run_id = p_run_id and n.idx = p_idx and n.map_index = p_map_index;
    else
        insert into note as n (run_id, idx, map_index, content, written_by, written_at)
        values (p_run_id, p_idx, p_map_index, p_content, p_actor, clock())
        on conflict (run_id, idx, map_index) do update
            set content = excluded.content, written_by = excluded.written_by, written_at = excluded.written_at;
    end if;
    insert into audit_log (occurred_at, action, actor, run_id, idx, map_index, detail)
    values (clock(), 'note', p_actor, p_run_id, nullif(p_idx, -1), case when p_idx >= 0 then p_map_index end,
            jsonb_build_object('is_taken_away', p_content is null));
    return true;
end $$;

-- Sets an output of a task in place of, or in addition to, what it returned; p_name null is the returned value, p_value
-- null deletes it. Only of a task that has succeeded: another could be writing its own. 'done', 'exists' or 'missing'
-- against p_must ('new', 'old'), or null: there is no such task, or it has not succeeded.
create function put_output(p_run_id bigint, p_idx int, p_map_index int, p_name text, p_value jsonb, p_must text,
                           p_actor text)
returns text language plpgsql as $$
declare
    owner task;
    before jsonb;
    named jsonb;
    returned jsonb;
    is_there boolean;
begin
    perform 1 from run_status r where r.run_id = p_run_id for no key update;
    if not found then
        return null;
    end if;
    select * into owner from task k where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
        and k.state = 'success';
    if owner.run_id is null then
        return null;
    end if;
    select v.value into before from result v where v.run_id = p_run_id and v.idx = p_idx and v.map_index = p_map_index;
    named := case when before->>'$evertick' = 'outputs' then before->'named' else '{}' end;
    returned := case when before->>'$evertick' = 'outputs' then nullif(before->'value', 'null') else before end;
    is_there := case when p_name is null then returned is not null else named ? p_name end;
    if p_must = 'new' and is_there then
        return 'exists';
    elsif p_must = 'old' and not is_there then
        return 'missing';
    end if;
    if p_name is null then
        returned := p_value;
    else
        named := case when p_value is null then named - p_name else named || jsonb_build_object(p_name, p_value) end;
    end if;
    if named <> '{}' then
        returned := jsonb_build_object('$evertick', 'outputs', 'value', returned, 'named', named);
    end if;
    if returned is null then
        delete from result v where v.run_id = p_run_id and v.idx = p_idx and v.map_index = p_map_index;
    else
        insert into result as v (run_id, idx, map_index, epoch, value)
            values (p_run_id, p_idx, p_map_index, owner.epoch, returned)
        on conflict (run_id, idx, map_index) do update set epoch = excluded.epoch, value = excluded.value;
    end if;
    insert into audit_log (occurred_at, action, actor, run_id, idx, map_index, detail)
    values (clock(), 'put_output', p_actor, p_run_id, p_idx, p_map_index,
            jsonb_strip_nulls(jsonb_build_object('name', p_name, 'is_taken_away', nullif(p_value is null, false))));
    return 'done';
end $$;
