-- Archiving logs to object storage, by the functions of the migration that defines them.

-- name: watch
select watch_logs(%(shard)s::smallint, %(epoch)s::bigint, %(batch)s::int)

-- name: ended
-- The watched runs that ended long enough ago, and how many bytes of their logs are in the database. The sizes are
-- known without reading the lines. A deleted run has nothing to archive.
select w.run_id, s.finished_at,
       (select coalesce(sum(octet_length(c.content)), 0) from log_chunk c where c.run_id = w.run_id)::bigint as bytes
  from log_watch w
  left join lateral (select r.state, r.finished_at from run_status r where r.run_id = w.run_id offset 0) s on true
 where w.run_id > %(after)s::bigint
   and (s.state is null or (s.state in ('success', 'failed', 'canceled')
                            and s.finished_at < clock() - make_interval(secs => %(seconds)s::float8)))
 order by w.run_id limit %(batch)s::int

-- name: part
-- As many of a run's chunks, after the given one, as fit into an object.
select x.idx, x.map_index, x.epoch, x.seq, x.content
  from (select p.*, sum(octet_length(p.content)) over (order by p.idx, p.map_index, p.epoch, p.seq) as total
          from (select c.idx, c.map_index, c.epoch, c.seq, c.content from log_chunk c
                 where c.run_id = %(run_id)s::bigint and c.content is not null
                   and (c.idx, c.map_index, c.epoch, c.seq)
                       > (%(idx)s::int, %(map_index)s::int, %(epoch)s::int, %(seq)s::bigint)
                 order by c.idx, c.map_index, c.epoch, c.seq limit %(chunks)s::int) p) x
 where x.total - octet_length(x.content) < %(bytes)s::bigint
 order by x.idx, x.map_index, x.epoch, x.seq limit %(chunks)s::int

-- name: list_object
select list_log_object(%(shard)s::smallint, %(epoch)s::bigint, %(run_id)s::bigint, %(bytes)s::int)

-- name: move
select move_logs(%(shard)s::smallint, %(epoch)s::bigint, %(object_id)s::uuid, %(pieces)s::jsonb)

-- name: unwatch
select unwatch_logs(%(shard)s::smallint, %(epoch)s::bigint, %(run_ids)s::bigint[], %(finished)s::timestamptz[])

-- name: dead
select object_id, run_id from dead_log_objects(%(shard)s::smallint, %(epoch)s::bigint, %(batch)s::int)

-- name: forget
select forget_log_objects(%(shard)s::smallint, %(epoch)s::bigint, %(object_ids)s::uuid[])
