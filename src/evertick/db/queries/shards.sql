-- Shard leadership, and the leader's poll.

-- name: bound_session
-- The leader sends a statement once per tick. A session that is silent for the length of the lease belongs to a
-- process that is frozen or cut off: the server ends it, and releases its locks. No statement may run so long that the
-- lease expires.
select set_config('statement_timeout', %(statement_ms)s, false), set_config('lock_timeout', %(lock_ms)s, false),
       set_config('idle_session_timeout', %(idle_ms)s, false),
       set_config('idle_in_transaction_session_timeout', %(transaction_ms)s, false)

-- name: stand_by
-- Takes the shard if its lease has expired, or if the session of its leader has ended.
select taken as epoch, has_session_lock as is_watched, free_in, shard_count as of_shards
  from try_acquire_shard(%(shard)s::smallint, %(owner)s::text, %(seconds)s::double precision, %(watches)s::boolean)

-- name: look
-- The one statement of an idle leader.
select read_at, has_session_lock as is_watched, next_fire, next_timer, has_line, next_expiry, silent, stranded, overdue,
    with_room,
    backfills,
       has_arrivals, next_wake, has_gates, next_opening, has_deliveries, marked_lsn, is_synchronous,
           shard_count as of_shards,
           has_moves, troubles
  from poll_work(%(shard)s::smallint, %(epoch)s::bigint, %(seconds)s::double precision, %(watches)s::boolean,
            %(is_watched)s::boolean,
            %(elapsed)s::double precision, %(lost_after)s::double precision, %(system_id)s::bigint,
                %(timeline)s::bigint,
            %(lsn)s::bigint)

-- name: listen
-- A part of `poll_work`, for when `poll_work` as a whole fails.
select silent, stranded
  from observe_heartbeats(%(shard)s::smallint, %(epoch)s::bigint, %(elapsed)s::double precision,
      %(lost_after)s::double precision)

-- name: renew
-- Renews only the lease, for when `poll_work` as a whole fails.
select renew_shard(%(shard)s::smallint, %(epoch)s::bigint, %(seconds)s::double precision)

-- name: resign
-- A graceful shutdown transfers leadership immediately instead of letting the lease expire.
select release_shard(%(shard)s::smallint, %(epoch)s::bigint, null, null)

-- name: leader
-- The leader of one shard; and for all shards how many there are, their leaders, and which ones have none.
select s.leader as owner, s.epoch, s.lease_until, coalesce(s.lease_until > clock(), false) as is_live,
    s.shard_count as of_shards,
       array(select distinct x.leader from shard x where x.lease_until > clock() and x.leader is not null order by 1
             limit 1000) as leaders,
       array(select x.shard from shard x where x.state <> 'closed' and (x.lease_until > clock()) is not true order by 1
             limit 1000) as unled
  from shard s where s.shard = %(shard)s::smallint

-- name: read_clock
select clock()

-- name: survey
-- Registers this scheduler as live, and returns the distribution of the shards if there is more than one.
select shard, state, leader as owner, successor as heir, is_free, free_in, live
  from survey_shards(%(owner)s::text, %(seconds)s::double precision, %(watches)s::boolean) order by shard limit 1000

-- name: leave
-- A stopping scheduler is no longer counted.
delete from scheduler where owner = %(owner)s::text

-- name: hand_over
-- To a scheduler that leads fewer. If it does not take the shard in time, any scheduler may.
select release_shard(%(shard)s::smallint, %(epoch)s::bigint, %(heir)s::text, %(seconds)s::double precision)

-- name: move_out
select moved, is_over, is_closed from rebalance_shard(%(shard)s::smallint, %(epoch)s::bigint, %(batch)s::int)

-- name: set_shards
select set_shard_count(%(shards)s::int, %(actor)s::text, %(if_never_chosen)s::boolean)

-- name: page
-- Every shard that is led or should be, for people. `misplaced`: rows still to be moved to another shard,
-- counted up to the cap.
select s.shard, s.state, s.leader as owner, s.epoch, s.leader_since as led_since, s.lease_until,
    coalesce(s.lease_until > clock(), false) as is_live,
       (select count(*) from dag d where d.shard = s.shard and d.deleted_at is null) as dags,
       case when s.rebalancing_since is null then 0 else misplaced_count(s.shard, %(cap)s::int) end as misplaced
  from shard s where s.state <> 'closed' order by s.shard limit 1000

-- name: schedulers
-- The schedulers that could lead. Empty with a single shard: schedulers then do not register.
select owner, since from scheduler where seen_until > clock() order by owner limit 1000
