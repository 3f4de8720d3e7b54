-- Who plans which shard, and what its leader sees.

-- name: bound_session
-- The leader asks something once per tick. A session that is quiet for as long as the lease lasts is that of a process which is
-- frozen or cut off: the server ends it, and the locks that it holds. No statement may take so long that the lease runs out.
select set_config('statement_timeout', %(statement_ms)s, false), set_config('lock_timeout', %(lock_ms)s, false),
       set_config('idle_session_timeout', %(idle_ms)s, false),
       set_config('idle_in_transaction_session_timeout', %(transaction_ms)s, false)

-- name: stand_by
-- Takes the shard if its lease is over, or if the session of its leader is.
select taken as epoch, is_watched, free_in
  from stand_by(%(shard)s::smallint, %(owner)s::text, %(seconds)s::double precision, %(watches)s::boolean)

-- name: look
-- The one statement of an idle leader.
select read_at, is_watched, next_fire, next_timer, has_line, next_expiry, silent, stranded, overdue, with_room, backfills,
       has_arrivals, next_wake, has_gates, next_opening, has_deliveries, marked_lsn, is_synchronous, troubles
  from look(%(shard)s::smallint, %(epoch)s::bigint, %(seconds)s::double precision, %(watches)s::boolean, %(is_watched)s::boolean,
            %(elapsed)s::double precision, %(lost_after)s::double precision, %(system_id)s::bigint, %(timeline)s::bigint,
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
select resign_shard(%(shard)s::smallint, %(epoch)s::bigint)

-- name: leader
select owner, epoch, lease_until, coalesce(lease_until > clock(), false) as is_live from shard where shard = %(shard)s::smallint

-- name: read_clock
select clock()
