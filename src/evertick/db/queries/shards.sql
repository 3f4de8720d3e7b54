-- Shard leadership, and the leader's poll.

-- name: bound_session
-- The leader sends a statement per tick. A session that is silent for the length of the lease belongs to a process that
-- is frozen or cut off: the server ends it, and releases its locks. No statement may outlast the lease.
select set_config('statement_timeout', (%(statement_seconds)s::float8 * 1000)::int::text, false),
       set_config('lock_timeout', (%(lock_seconds)s::float8 * 1000)::int::text, false),
       set_config('idle_session_timeout', (%(idle_seconds)s::float8 * 1000)::int::text, false),
       set_config('idle_in_transaction_session_timeout', (%(transaction_seconds)s::float8 * 1000)::int::text, false)

-- name: leader
-- The leader of one shard; and for all shards how many there are, their leaders, and which ones have none.
select s.leader as owner, s.epoch, s.lease_until, coalesce(s.lease_until > clock(), false) as is_live,
    s.shard_count as shard_count,
       array(select distinct x.leader from shard x where x.lease_until > clock() and x.leader is not null order by 1
             limit 1000) as leaders,
       array(select x.shard from shard x where x.state <> 'closed' and (x.lease_until > clock()) is not true order by 1
             limit 1000) as unled
  from shard s where s.shard = %(shard)s::smallint

-- name: read_clock
select clock()

-- name: announce_leave
-- A stopping scheduler is no longer counted.
delete from scheduler where owner = %(owner)s::text

-- name: page
-- Every shard that is led or should be, for people. `misplaced`: rows still to be moved, counted up to the cap.
select s.shard, s.state, s.leader as owner, s.epoch, s.leader_since as led_since, s.lease_until,
    coalesce(s.lease_until > clock(), false) as is_live,
       (select count(*) from dag d where d.shard = s.shard and d.deleted_at is null) as dags,
       case when s.rebalancing_since is null then 0 else misplaced_count(s.shard, %(cap)s::int) end as misplaced
  from shard s where s.state <> 'closed' order by s.shard limit 1000

-- name: schedulers
-- The schedulers that could lead. Empty with a single shard: schedulers then do not register.
select owner, since from scheduler where seen_until > clock() order by owner limit 1000
