-- Who plans which shard.

-- name: take
-- Null while somebody else's lease lasts.
select take_shard(%(shard)s::smallint, %(owner)s::text, %(seconds)s::double precision)

-- name: renew
select renew_shard(%(shard)s::smallint, %(epoch)s::bigint, %(seconds)s::double precision)

-- name: resign
-- A clean stop hands over at once instead of letting the lease run out.
select resign_shard(%(shard)s::smallint, %(epoch)s::bigint)

-- name: leader
select owner, epoch, lease_until, coalesce(lease_until > clock(), false) as is_live from shard where shard = %(shard)s::smallint

-- name: read_clock
select clock()
