-- Logs of attempts, in chunks. Lines of an ended attempt may arrive late, and say so.

-- name: append
-- Whether a line is late is the database's word: the session no longer holds that attempt. Of a run that was pruned meanwhile
-- nothing is kept: nobody could read it, and nobody would delete it.
insert into log_chunk (run_id, idx, map_index, epoch, seq, until, is_late, content)
select x.r, x.i, x.m, x.e, x.seq, x.until,
       not exists (select 1 from lease l where l.session = %(session)s::bigint and l.run_id = x.r and l.idx = x.i
                   and l.map_index = x.m and l.epoch = x.e),
       x.content
  from jsonb_to_recordset(%(chunks)s::jsonb) as x(r bigint, i int, m int, e int, seq bigint, until bigint, content text)
 where exists (select 1 from run f where f.run_id = x.r)
on conflict (run_id, idx, map_index, epoch, seq) do nothing

-- name: read
select epoch, seq, is_late, content from log_chunk
 where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s and (epoch, seq) > (%(epoch)s::int, %(seq)s::bigint)
 order by epoch, seq limit %(limit)s

-- name: shipped_until
-- Where to go on with the log of a runner that died.
select coalesce(max(until), 0) from log_chunk
 where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s and epoch = %(epoch)s
