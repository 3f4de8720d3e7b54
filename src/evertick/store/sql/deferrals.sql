-- Tasks that wait without a slot.

-- name: children_due
select run_id, idx, map_index, epoch, dag, params, depth, parent_dag, given, own, results
    from children_due(%(shard)s::smallint, %(batch)s::int) limit %(batch)s

-- name: start_child
select start_child(%(shard)s::smallint, %(epoch)s::bigint, %(run_id)s::bigint, %(idx)s::int, %(map_index)s::int,
                   %(task_epoch)s::int,
                   %(dag_id)s::int, %(params)s::jsonb, %(depth)s::int, %(reason)s::text)

-- name: clocks_due
select run_id, idx, map_index, epoch, at, timezone, since from clocks_due(%(shard)s::smallint, %(batch)s::int)
    limit %(batch)s

-- name: set_clocks
select set_clocks(%(shard)s::smallint, %(epoch)s::bigint, %(instants)s::jsonb)

-- name: wake_waits
select looked_at, refused, next_wake from wake_waits(%(shard)s::smallint, %(epoch)s::bigint, %(batch)s::int)
