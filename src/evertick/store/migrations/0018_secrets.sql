-- Variables, connections and secrets: values that tasks are given when they declare them. All are stored encrypted; which key
-- a value was encrypted with is told beside it, so that a key that is missing has a name. The database never sees a key.

create table stored_value (
    kind        text not null check (kind in ('variable', 'connection', 'secret')),
    name        text not null,
    content     text not null,
    key_id      text not null,
    description text,
    changed_by  text not null,
    changed_at  timestamptz not null,
    primary key (kind, name)
);

-- Whether it is new; null when only a new one was wanted and there is one.
create function put_value(p_kind text, p_name text, p_content text, p_key_id text, p_description text, p_actor text, p_only_new boolean)
returns boolean language plpgsql as $$
declare
    is_new boolean;
begin
    insert into stored_value as v (kind, name, content, key_id, description, changed_by, changed_at)
    values (p_kind, p_name, p_content, p_key_id, p_description, p_actor, clock())
    on conflict (kind, name) do update
        set content = excluded.content, key_id = excluded.key_id, description = coalesce(excluded.description, v.description),
            changed_by = excluded.changed_by, changed_at = excluded.changed_at
        where not p_only_new
    returning v.xmax = 0 into is_new;
    if is_new is null then
        return null;
    end if;
    insert into journal (occurred_at, verb, actor, detail)
    values (clock(), 'put_value', p_actor, jsonb_build_object('kind', p_kind, 'name', p_name, 'is_new', is_new));
    return is_new;
end $$;

create function delete_value(p_kind text, p_name text, p_actor text) returns boolean language plpgsql as $$
begin
    delete from stored_value v where v.kind = p_kind and v.name = p_name;
    if not found then
        return false;
    end if;
    insert into journal (occurred_at, verb, actor, detail)
    values (clock(), 'delete_value', p_actor, jsonb_build_object('kind', p_kind, 'name', p_name));
    return true;
end $$;

-- The same value under another key. One that was changed meanwhile stays as it is: it has the new key already.
create function reseal_value(p_kind text, p_name text, p_old text, p_content text, p_key_id text) returns boolean
language plpgsql as $$
begin
    update stored_value v set content = p_content, key_id = p_key_id
    where v.kind = p_kind and v.name = p_name and v.content = p_old;
    return found;
end $$;
