-- Parts of a task's log by their place in it: bytes are the measure, because a log knows no numbers of lines.

-- name: sizes
-- How far the log of each attempt goes, in bytes of its spool, and where its last chunk begins.
select epoch, max(until) as size, max(seq) as last from log_chunk
 where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s group by epoch order by epoch limit 1000

-- name: onward
-- From the chunk that a place lies in; of them those that could hold what is looked for: of lines that are in the
-- storage only their reader can tell. The window bounds what a search reads.
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
-- The other way, from the chunk that a place lies in.
select w.epoch, w.seq, w.until, w.is_late, w.content, w.object_id, w.at, w.bytes, w.digest
  from (select c.epoch, c.seq, c.until, c.is_late, c.content, c.object_id, c.at, c.bytes, c.digest from log_chunk c
         where c.run_id = %(run_id)s and c.idx = %(idx)s and c.map_index = %(map_index)s
           and (c.epoch, c.seq) <= (%(epoch)s::int, %(seq)s::bigint)
         order by c.epoch desc, c.seq desc limit %(window)s) w
 where w.content is null or ((%(pattern)s::text is null or w.content ~ %(pattern)s)
                             and (%(like)s::text is null or w.content ilike %(like)s))
 order by w.epoch desc, w.seq desc limit %(limit)s
