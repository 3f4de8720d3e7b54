-- Logs of attempts, in chunks. Late lines are marked. A chunk whose lines are archived keeps a row with the position.

-- name: append
-- Late: the session no longer holds that attempt. Lines of a run that was pruned meanwhile are dropped.
insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, is_late, content)
select x.r, x.i, x.m, x.e, x.seq, x.until,
       not exists (select 1 from held_attempt l where l.session = %(session)s::bigint and l.run_id = x.r and l.idx = x.i
                   and l.map_index = x.m and l.epoch = x.e), x.content
  from jsonb_to_recordset(%(chunks)s::jsonb) as x(r bigint, i int, m int, e int, seq bigint, until bigint, content text)
 where exists (select 1 from run f where f.run_id = x.r)
on conflict (run_id, idx, map_index, epoch, seq) do nothing

-- name: read
select epoch, seq, end_offset as until, is_late, content, object_id, object_offset as at, bytes as size, digest
  from log_chunk where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s
   and (epoch, seq) > (%(epoch)s::int, %(seq)s::bigint) order by epoch, seq limit %(limit)s

-- name: news
-- After the last known chunk of each attempt, by the key: an earlier attempt's lines may arrive late.
select n.* from unnest(%(epochs)s::int[], %(seqs)s::bigint[]) as k(epoch, seq)
 cross join lateral (select epoch, seq, end_offset as until, is_late, content, object_id, object_offset as at,
                            bytes as size, digest
                       from log_chunk c
                      where c.run_id = %(run_id)s and c.idx = %(idx)s and c.map_index = %(map_index)s
                        and c.epoch = k.epoch and c.seq > k.seq order by c.seq limit %(limit)s) n
union all
(select epoch, seq, end_offset, is_late, content, object_id, object_offset, bytes, digest from log_chunk c
  where c.run_id = %(run_id)s and c.idx = %(idx)s and c.map_index = %(map_index)s and c.epoch > %(newest)s::int
  order by c.epoch, c.seq limit %(limit)s)
 order by epoch, seq limit %(limit)s

-- name: attempts_in_order
-- Of a run, by their starts: those that its reader has open, which are the earliest, and those after one of them.
select a.idx, a.map_index, a.epoch, s.name as task, a.started_at, coalesce(a.finished_at, r.finished_at) as finished_at,
       a.outcome, a.reason
  from run_status r join all_attempts a on a.run_id = r.run_id
  join task_spec s on s.version_id = r.version_id and s.idx = a.idx
 where r.run_id = %(run_id)s and a.run_id = %(run_id)s and a.started_at is not null
   and ((a.started_at, a.idx, a.map_index, a.epoch)
            > (%(started_at)s::timestamptz, %(idx)s::int, %(map_index)s::int, %(epoch)s::int)
        or (a.idx, a.map_index, a.epoch) in (
            select * from unnest(%(idxs)s::int[], %(indexes)s::int[], %(epochs)s::int[])))
 order by a.started_at, a.idx, a.map_index, a.epoch limit %(limit)s

-- name: of_attempts
-- The next chunks of each of some attempts of a run, by the key.
select k.place, c.epoch, c.seq, c.end_offset as until, c.is_late, c.content, c.object_id, c.object_offset as at,
       c.bytes as size, c.digest
  from unnest(%(idxs)s::int[], %(indexes)s::int[], %(epochs)s::int[], %(seqs)s::bigint[])
       with ordinality as k(idx, map_index, epoch, seq, place)
 cross join lateral (select * from log_chunk c
                      where c.run_id = %(run_id)s and c.idx = k.idx and c.map_index = k.map_index
                        and c.epoch = k.epoch and c.seq >= k.seq order by c.seq limit %(chunks)s) c
 order by k.place, c.seq limit 10000

-- name: shipped_until
-- Where to continue with the log of a runner that died.
select coalesce(max(end_offset), 0) from log_chunk
 where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s and epoch = %(epoch)s

-- Archiving logs to object storage, by the functions of the migration that defines them.

-- name: ended
-- The watched runs that ended long enough ago, with the bytes of their logs here. A deleted run has nothing to archive.
select w.run_id, s.finished_at,
       (select coalesce(sum(octet_length(c.content)), 0) from log_chunk c where c.run_id = w.run_id)::bigint as bytes
  from log_archive_queue w
  left join lateral (select r.state, r.finished_at from run_status r where r.run_id = w.run_id offset 0) s on true
 where w.run_id > %(after)s::bigint and (s.state is null or (s.state in ('success', 'failed', 'canceled')
                                             and s.finished_at < clock() - make_interval(secs => %(seconds)s::float8)))
 order by w.run_id limit %(batch)s::int

-- name: part
-- As many of a run's chunks, after the given one, as fit into an object.
select x.idx, x.map_index, x.epoch, x.seq, x.content
  from (select p.*, sum(octet_length(p.content)) over (order by p.idx, p.map_index, p.epoch, p.seq) as total
          from (select c.idx, c.map_index, c.epoch, c.seq, c.content from log_chunk c
                 where c.run_id = %(run_id)s::bigint and c.content is not null and (c.idx, c.map_index, c.epoch, c.seq)
                       > (%(idx)s::int, %(map_index)s::int, %(epoch)s::int, %(seq)s::bigint)
                 order by c.idx, c.map_index, c.epoch, c.seq limit %(chunks)s::int) p) x
 where x.total - octet_length(x.content) < %(bytes)s::bigint
 order by x.idx, x.map_index, x.epoch, x.seq limit %(chunks)s::int

-- Windows of a task's log by position: in bytes, because a log has no line numbers.

-- name: sizes
-- The size of each attempt's log, in bytes of its spool, and where its last chunk begins.
select epoch, max(end_offset) as size, max(seq) as last from log_chunk
 where run_id = %(run_id)s and idx = %(idx)s and map_index = %(map_index)s group by epoch order by epoch limit 1000

-- name: onward
-- From a position on, in a window: the chunks that could match a search. Archived lines are matched by their reader.
select w.*
  from (select epoch, seq, end_offset as until, is_late, content, object_id, object_offset as at, bytes as size, digest
          from log_chunk c
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
select w.*
  from (select epoch, seq, end_offset as until, is_late, content, object_id, object_offset as at, bytes as size, digest
          from log_chunk c
         where c.run_id = %(run_id)s and c.idx = %(idx)s and c.map_index = %(map_index)s
           and (c.epoch, c.seq) <= (%(epoch)s::int, %(seq)s::bigint)
         order by c.epoch desc, c.seq desc limit %(window)s) w
 where w.content is null or ((%(pattern)s::text is null or w.content ~ %(pattern)s)
                             and (%(like)s::text is null or w.content ilike %(like)s))
 order by w.epoch desc, w.seq desc limit %(limit)s
