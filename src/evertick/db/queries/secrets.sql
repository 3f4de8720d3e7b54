-- Variables, connections and secrets, as they are stored: encrypted.

-- name: find
-- By their kinds and names, pair by pair.
select v.kind, v.name, v.content, v.key_id, v.description, v.changed_by, v.changed_at
  from unnest(%(kinds)s::text[], %(names)s::text[]) as w(kind, name)
  join stored_value v on v.kind = w.kind and v.name = w.name limit 1000

-- name: lock
-- The same, locked for a change that depends on the current value.
select v.kind, v.name, v.content, v.key_id, v.description, v.changed_by, v.changed_at
  from unnest(%(kinds)s::text[], %(names)s::text[]) as w(kind, name)
  join stored_value v on v.kind = w.kind and v.name = w.name limit 1000 for update of v

-- name: list_all
select kind, name, content, key_id, description, changed_by, changed_at
  from stored_value where %(kind)s::text is null or kind = %(kind)s order by kind, name limit %(limit)s

-- name: names
-- Without the values: a list by name decrypts only its own page.
select name, description from stored_value where kind = %(kind)s order by name limit %(limit)s
