-- State that tasks keep.

-- name: entries
-- One page of an owner's values, from after a key. Expired ones are as good as deleted.
select key, value, expires_at, changed_at, changed_by, writer from state_entry
 where run_id = %(run_id)s and dag_id = %(dag_id)s and owner = %(owner)s and map_index = %(map_index)s
   and key > %(after)s and (%(key)s::text is null or key = %(key)s) and (expires_at is null or expires_at > clock())
 order by key limit %(limit)s

-- name: server_name
-- On a connection of a task, which knows nothing of Evertick: as the function of that name.
select extract(epoch from pg_postmaster_start_time()) || ' ' || current_database()

-- name: set_path
select set_config('search_path', %(path)s, true)

-- name: commit_attempt
select commit_attempt(%(session)s, %(run_id)s, %(idx)s, %(map_index)s, %(epoch)s, %(result)s::jsonb)
