-- Windows of a task's log by position: in bytes, because a log has no line numbers.

-- name: sizes
-- The size of each attempt's log, in bytes of its spool, and where its last chunk begins.
select epoch, max(until) as size, max(seq) as last from log_chunk
 where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s group by epoch order by epoch limit 1000

-- name: onward
-- From the chunk at a position on, the chunks that could match a search: archived lines are searched only by their
-- reader. The window bounds how much a search reads.
select w.epoch, w.seq, w.until, w.is_late, w.content, w.object_id, w.at, w.bytes, w.digest
  from (select c.epoch, c.seq, c.until, c.is_late, c.content, c.object_id, c.at, c.bytes, c.digest from log_chunk c
         where c.run_id = %(run_id)s and c.idx = %(idx)s and c.map_index = %(map_index)s
           and (c.epoch, c.seq) >= (%(epoch)s::int, coalesce((
                select max(b.seq) from log_chunk b where b.run_id = %(run_id)s and b.idx = %(idx)s
                   and b.map_index = %(map_index)s and b.epoch = %(epoch)s and b.seq <= %(seq)s::bigint), 0))
         order by c.epoch, c.seq limit %(window)s) w
 where w.content is null or ((%(pattern)s::text is null or w.content ~ %(pattern)s)
                             and (%(like)s::text is null or w.content ilike %(like)s))
 order by w.epoch, w.seq limit %(limit)s

-- name: backward
-- Backwards, from the chunk at a position.
select w.epoch, w.seq, w.until, w.is_late, w.content, w.object_id, w.at, w.bytes, w.digest
  from (select c.epoch, c.seq, c.until, c.is_late, c.content, c.object_id, c.at, c.bytes, c.digest from log_chunk c
         where c.run_id = %(run_id)s and c.idx = %(idx)s and c.map_index = %(map_index)s
           and (c.epoch, c.seq) <= (%(epoch)s::int, %(seq)s::bigint)
         order by c.epoch desc, c.seq desc limit %(window)s) w
 where w.content is null or ((%(pattern)s::text is null or w.content ~ %(pattern)s)
                             and (%(like)s::text is null or w.content ilike %(like)s))
 order by w.epoch desc, w.seq desc limit %(limit)s
