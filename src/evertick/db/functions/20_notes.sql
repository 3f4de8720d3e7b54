-- Texts and values that people add to runs and tasks: notes, and outputs that they set themselves.

-- Writes a note, or deletes it (null). Returns whether the run exists: its lock keeps it from being deleted meanwhile.
create function put_note(p_run_id bigint, p_idx int, p_map_index int, p_content text, p_actor actor)
returns boolean language plpgsql as $$
begin
    perform 1 from run_status r where r.run_id = p_run_id for key share;
    if not found then
        return false;
    elsif p_content is null then
        delete from note n where n.run_id = p_run_id and n.idx = p_idx and n.map_index = p_map_index;
    else
        insert into note as n (run_id, idx, map_index, content, written_by, written_at)
        values (p_run_id, p_idx, p_map_index, p_content, p_actor.name, clock())
        on conflict (run_id, idx, map_index) do update
            set content = excluded.content, written_by = excluded.written_by, written_at = excluded.written_at;
    end if;
    perform write_audit(p_actor, 'note', jsonb_build_object('is_taken_away', p_content is null), p_run_id => p_run_id,
                        p_idx => nullif(p_idx, -1), p_map_index => case when p_idx >= 0 then p_map_index end);
    return true;
end $$;

-- Sets an output of a task in place of, or next to, what it returned (p_name null); p_value null deletes it. Only of a
-- succeeded task: another could be writing. 'done', 'exists' or 'missing' (p_must: 'new', 'old'), or null.
create function put_output(p_run_id bigint, p_idx int, p_map_index int, p_name text, p_value jsonb, p_must text,
                           p_actor actor) returns text language plpgsql as $$
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
    elsif p_name is null then
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
    perform write_audit(p_actor, 'put_output', jsonb_strip_nulls(jsonb_build_object('name', p_name,
                            'is_taken_away', nullif(p_value is null, false), 'is_new', nullif(not is_there, false))),
                        p_run_id => p_run_id, p_idx => p_idx, p_map_index => p_map_index);
    return 'done';
end $$;
