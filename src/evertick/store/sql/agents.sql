-- Agents: remote attempts, for which the API acts.

-- name: start
select verdict, attempt, version_id, fire_at, params, inputs
  from start_attempt(%(run_id)s::bigint, %(idx)s::int, %(map_index)s::int, %(epoch)s::int, %(session)s::bigint,
                     %(nonce)s::text,
                     %(agent)s::jsonb, %(lost_after)s::double precision)

-- name: held
-- An agent may ask only about its own attempt, while it holds it.
select k.version_id, k.attempt from task k
 where k.run_id = %(run_id)s and k.idx = %(idx)s and k.map_index = %(map_index)s and k.epoch = %(epoch)s
   and k.session = %(session)s and k.state = 'running'

-- name: inputs
select inputs_of(%(run_id)s::bigint, %(version_id)s::int, %(idx)s::int, %(map_index)s::int)

-- name: bundle
-- Only the bundle of the attempt's own version.
select b.archive from dag_version v join bundle b on b.hash = v.bundle_hash
 where v.version_id = %(version_id)s and v.bundle_hash = %(bundle_hash)s

-- name: disturbed
-- The agents that no longer hold their attempt or have a stop request. Runs once a second for all waiting agents.
select s.session from unnest(%(sessions)s::bigint[]) s(session)
  left join lateral (select l.* from lease l where l.session = s.session limit 1) l on true
  left join lateral (select y.request from task y
                      where y.run_id = l.run_id and y.idx = l.idx and y.map_index = l.map_index
                          and y.epoch = l.epoch offset 0) k on true
 where l.session is null or k.request is not null

-- name: finish
select kind, run_id, idx, map_index, epoch, attempt, version_id, fire_at, params, inputs, place, seq
  from finish_attempt(%(session)s::bigint, %(reports)s::jsonb, %(infra_retries)s::int)
