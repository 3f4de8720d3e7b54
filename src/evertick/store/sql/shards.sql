-- Who plans which shard, and what its leader sees.

-- name: bound_session
-- The leader asks something once per tick. A session that is quiet for as long as the lease lasts is that of a process
-- which is frozen or cut off: the server ends it, and the locks that it holds. No statement may take so long that the
-- lease runs out.
select set_config('statement_timeout', %(statement_ms)s, false), set_config('lock_timeout', %(lock_ms)s, false),
       set_config('idle_session_timeout', %(idle_ms)s, false),
       set_config('idle_in_transaction_session_timeout', %(transaction_ms)s, false)

-- name: stand_by
-- Takes the shard if its lease is over, or if the session of its leader is.
select taken as epoch, is_watched, free_in, of_shards
  from stand_by(%(shard)s::smallint, %(owner)s::text, %(seconds)s::double precision, %(watches)s::boolean)

-- name: look
-- The one statement of an idle leader.
select read_at, is_watched, next_fire, next_timer, has_line, next_expiry, silent, stranded, overdue, with_room,
    backfills,
       has_arrivals, next_wake, has_gates, next_opening, has_deliveries, marked_lsn, is_synchronous, of_shards,
           has_moves, troubles
  from look(%(shard)s::smallint, %(epoch)s::bigint, %(seconds)s::double precision, %(watches)s::boolean,
            %(is_watched)s::boolean,
            %(elapsed)s::double precision, %(lost_after)s::double precision, %(system_id)s::bigint,
                %(timeline)s::bigint,
            %(lsn)s::bigint)

-- name: listen
-- What `look` does in passing, for when a look as a whole fails.
select silent, stranded
  from listen(%(shard)s::smallint, %(epoch)s::bigint, %(elapsed)s::double precision, %(lost_after)s::double precision)

-- name: renew
-- The lease alone, for when a look as a whole fails.
select renew_shard(%(shard)s::smallint, %(epoch)s::bigint, %(seconds)s::double precision)

-- name: resign
-- A clean stop hands over at once instead of letting the lease run out.
select resign_shard(%(shard)s::smallint, %(epoch)s::bigint, null, null)

-- name: leader
-- Of one shard; and of all, how many there are, who leads them, and which of them nobody does.
select s.owner, s.epoch, s.lease_until, coalesce(s.lease_until > clock(), false) as is_live, s.of_shards,
       array(select distinct x.owner from shard x where x.lease_until > clock() and x.owner is not null order by 1
             limit 1000) as leaders,
       array(select x.shard from shard x where x.state <> 'closed' and (x.lease_until > clock()) is not true order by 1
             limit 1000) as unled
  from shard s where s.shard = %(shard)s::smallint

-- name: read_clock
select clock()

-- name: survey
-- Says that we are there, and how the shards are distributed; where there is more than one.
select shard, state, owner, heir, is_free, free_in, live
  from survey(%(owner)s::text, %(seconds)s::double precision, %(watches)s::boolean) order by shard limit 1000

-- name: leave
-- A scheduler that stops is not counted any more.
delete from scheduler where owner = %(owner)s::text

-- name: hand_over
-- To somebody who leads less. If that one does not take it in time, anybody may.
select resign_shard(%(shard)s::smallint, %(epoch)s::bigint, %(heir)s::text, %(seconds)s::double precision)

-- name: move_out
select moved, is_over, is_closed from move_out(%(shard)s::smallint, %(epoch)s::bigint, %(batch)s::int)

-- name: set_shards
select set_shards(%(shards)s::int, %(actor)s::text, %(if_never_chosen)s::boolean)

-- name: page
-- Every shard that is led or should be, for people. `misplaced`: what is still to be moved to another one, counted no
-- further than the cap.
select s.shard, s.state, s.owner, s.epoch, s.led_since, s.lease_until,
    coalesce(s.lease_until > clock(), false) as is_live,
       (select count(*) from dag d where d.shard = s.shard and d.deleted_at is null) as dags,
       case when s.moves_since is null then 0 else misplaced(s.shard, %(cap)s::int) end as misplaced
  from shard s where s.state <> 'closed' order by s.shard limit 1000

-- name: schedulers
-- Who could lead. Only where there is more than one shard: otherwise nobody says so.
select owner, since from scheduler where seen_until > clock() order by owner limit 1000
