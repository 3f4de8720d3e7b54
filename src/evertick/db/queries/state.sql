-- State that tasks keep.

-- name: entries
-- One page of an owner's values, from after a key. Expired ones are as good as deleted.
select key, value, expires_at, changed_at, changed_by, writer from state_entry
 where run_id = %(run_id)s and dag_id = %(dag_id)s and owner = %(owner)s and map_index = %(map_index)s
   and key > %(after)s and (%(key)s::text is null or key = %(key)s) and (expires_at is null or expires_at > clock())
 order by key limit %(limit)s
