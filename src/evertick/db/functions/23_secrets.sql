-- Variables, connections and secrets, for tasks that declare them. Stored encrypted, with the id of the key.

-- Whether it is new; null when only a new one was wanted and there is one.
create function put_value(p_kind text, p_name text, p_content text, p_key_id text, p_description text, p_actor actor,
                          p_only_new boolean, out is_new boolean) language plpgsql as $$
begin
    insert into stored_value as v (kind, name, content, key_id, description, changed_by, changed_at)
    values (p_kind, p_name, p_content, p_key_id, p_description, p_actor.name, clock())
    on conflict (kind, name) do update set content = excluded.content, key_id = excluded.key_id,
        description = coalesce(excluded.description, v.description), changed_by = excluded.changed_by,
        changed_at = excluded.changed_at where not p_only_new
    returning v.xmax = 0 into is_new;
    if is_new is null then
        return;
    end if;
    perform write_audit(p_actor, 'put_value', jsonb_build_object('kind', p_kind, 'name', p_name, 'is_new', is_new));
end $$;

create function delete_value(p_kind text, p_name text, p_actor actor) returns boolean language plpgsql as $$
begin
    delete from stored_value v where v.kind = p_kind and v.name = p_name;
    if not found then
        return false;
    end if;
    perform write_audit(p_actor, 'delete_value', jsonb_build_object('kind', p_kind, 'name', p_name));
    return true;
end $$;

-- The same value under another key. One that was changed meanwhile stays as it is: it has the new key already.
create function reencrypt_value(p_kind text, p_name text, p_old text, p_content text, p_key_id text)
returns boolean language plpgsql as $$
begin
    update stored_value v set content = p_content, key_id = p_key_id
    where v.kind = p_kind and v.name = p_name and v.content = p_old;
    return found;
end $$;

-- The values that an attempt declares, for the session that holds it: a runner's role reads only those of what it runs.
-- A task that `asks` may also have variables and connections that it does not declare.
create function values_of_attempt(p_session bigint, p_run_id bigint, p_idx int, p_map_index int, p_epoch int,
                                  p_kinds text[], p_names text[]) returns setof stored_value language sql stable as $$
    select v.* from task k
    cross join lateral (select x.spec->'tasks'->p_idx as spec from dag_version x where x.version_id = k.version_id
                        offset 0) t
    cross join lateral unnest(p_kinds, p_names) as w(kind, name)
    cross join lateral (select x.* from stored_value x where x.kind = w.kind and x.name = w.name offset 0) v
    where k.run_id = p_run_id and k.idx = p_idx and k.map_index = p_map_index
      and holds_lease(p_session, p_run_id, p_idx, p_map_index, p_epoch)
      and (coalesce(t.spec->(w.kind || 's'), '[]'::jsonb) ? w.name
           or (w.kind <> 'secret' and t.spec->>'asks' = 'true')) limit 1000
$$;
