-- Logs of attempts, in chunks. Lines of an ended attempt may arrive late, and are marked. A chunk whose lines are archived
-- has a row with the position; sending it again finds that row.

-- name: append
-- The database decides whether a line is late: the session no longer holds that attempt. Lines of a run that was pruned
-- meanwhile are dropped: they could be neither read nor deleted.
insert into log_chunk (run_id, idx, map_index, epoch, seq, until, is_late, content)
select x.r, x.i, x.m, x.e, x.seq, x.until,
       not exists (select 1 from lease l where l.session = %(session)s::bigint and l.run_id = x.r and l.idx = x.i
                   and l.map_index = x.m and l.epoch = x.e),
       x.content
  from jsonb_to_recordset(%(chunks)s::jsonb) as x(r bigint, i int, m int, e int, seq bigint, until bigint, content text)
 where exists (select 1 from run f where f.run_id = x.r)
on conflict (run_id, idx, map_index, epoch, seq) do nothing

-- name: read
select epoch, seq, until, is_late, content, object_id, at, bytes, digest from log_chunk
 where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s
     and (epoch, seq) > (%(epoch)s::int, %(seq)s::bigint)
 order by epoch, seq limit %(limit)s

-- name: news
-- After the last known chunk of each attempt, by the key: an earlier attempt's lines may arrive while a later one
-- writes.
select n.epoch, n.seq, n.until, n.is_late, n.content, n.object_id, n.at, n.bytes, n.digest
  from unnest(%(epochs)s::int[], %(seqs)s::bigint[]) as k(epoch, seq)
 cross join lateral (select c.epoch, c.seq, c.until, c.is_late, c.content, c.object_id, c.at, c.bytes, c.digest
                     from log_chunk c
                      where c.run_id = %(run_id)s and c.idx = %(idx)s and c.map_index = %(map_index)s
                          and c.epoch = k.epoch
                        and c.seq > k.seq order by c.seq limit %(limit)s) n
union all
(select c.epoch, c.seq, c.until, c.is_late, c.content, c.object_id, c.at, c.bytes, c.digest from log_chunk c
  where c.run_id = %(run_id)s and c.idx = %(idx)s and c.map_index = %(map_index)s and c.epoch > %(newest)s::int
  order by c.epoch, c.seq limit %(limit)s)
 order by epoch, seq limit %(limit)s

-- name: shipped_until
-- Where to continue with the log of a runner that died.
select coalesce(max(until), 0) from log_chunk
 where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s and epoch = %(epoch)s
