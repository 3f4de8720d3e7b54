-- The step of H as three prepared statements that a client sends as one pipeline: BEGIN, these, COMMIT. A statement
-- cannot use what the one before it returned without the client in between, so everything that follows from a finish is
-- in the second one. It can take one level: a skip or failure that cascades needs a statement for each further level.

-- name: lock
select 1 from run_status s
where s.run_id = any(array(select (x->>'r')::bigint from jsonb_array_elements(%(reports)s::jsonb) x))
order by s.run_id for no key update

-- name: finish
with report as materialized (
    select x.*, clock_timestamp() as t from read_reports(%(reports)s::jsonb) x
), freed as (
    delete from lease l where l.ctid = any(array(
        select h.place from report x cross join lateral (
            select l.ctid as place from lease l
            where l.session = %(session)s and l.run_id = x.r and l.idx = x.i and l.map_index = x.m and l.epoch = x.e
            offset 0) h))
), moved as (
    update task k
    set state = x.state,
        not_before = case when x.state = 'pending' then x.t end,
        finished_at = case when x.state <> 'pending' then x.t end
    from report x
    where k.run_id = x.r and k.idx = x.i and k.map_index = x.m
      and k.state = 'running' and k.epoch = x.e and k.session = %(session)s
    returning k.run_id, k.idx, k.map_index, k.version_id, k.state, k.epoch, k.attempt, k.started_at, x.t
), past as (
    insert into attempt (run_id, idx, map_index, epoch, attempt, session, outcome, started_at, finished_at)
    select m.run_id, m.idx, m.map_index, m.epoch, m.attempt, %(session)s, 'failed', m.started_at, m.t
    from moved m where m.state = 'pending'
    on conflict (run_id, idx, map_index, epoch) do nothing
), timed as (
    insert into timer (shard, due_at, run_id, idx, map_index)
    select 0, m.t, m.run_id, m.idx, m.map_index from moved m where m.state = 'pending'
    on conflict do nothing
), hit as (
    select e.run_id, g.dst, e.version_id, count(*)::int as success
    from moved e join edge g on g.version_id = e.version_id and g.src = e.idx
    where e.state = 'success'
    group by e.run_id, g.dst, e.version_id
), counted as (
    insert into task as k (run_id, idx, version_id, state, n_success, n_failed, n_upstream_failed, n_skipped,
                           n_setup_success, n_setup_skipped)
    select h.run_id, h.dst, h.version_id, decide(s.upstream_total, h.success, 0), h.success, 0, 0, 0, 0, 0
    from hit h join task_spec s on s.version_id = h.version_id and s.idx = h.dst
    order by h.run_id, h.dst
    on conflict (run_id, idx, map_index) do update set
        n_success = k.n_success + excluded.n_success,
        state = (select decide(s.upstream_total, k.n_success + excluded.n_success, k.n_failed) from task_spec s
                 where s.version_id = k.version_id and s.idx = k.idx)
    where k.state = 'waiting'
    returning k.run_id, k.idx, k.map_index, k.version_id, k.state
), offered as (
    insert into ready (queue, rank, run_id, idx, map_index)
    select s.queue, s.rank, c.run_id, c.idx, c.map_index
    from counted c join task_spec s on s.version_id = c.version_id and s.idx = c.idx
    where c.state = 'available'
    order by s.rank, c.run_id, c.idx, c.map_index
)
update run_status r
set open_tasks = r.open_tasks - p.n,
    finished_at = case when r.open_tasks = p.n then clock_timestamp() end,
    state = case when r.open_tasks = p.n then 'success' else r.state end
from (select m.run_id, count(*)::int as n from moved m where m.state = 'success' group by m.run_id) p
where r.run_id = p.run_id and r.state = 'running'

-- name: claim
with picked as materialized (
    select r.ctid as place, r.run_id, r.idx, r.map_index from ready r
    where r.queue = 'default' and (r.rank, r.seq) >= (0, 0)
    order by r.rank, r.seq limit %(free)s for update skip locked
), taken as (
    delete from ready r where r.ctid = any(array(select p.place from picked p))
), moved as (
    update task k
    set state = 'running', epoch = k.epoch + 1, attempt = k.attempt + 1, session = %(session)s,
        started_at = clock_timestamp(), finished_at = null, reason = null, exit_code = null
    from picked p
    where k.run_id = p.run_id and k.idx = p.idx and k.map_index = p.map_index and k.state = 'available'
    returning k.run_id, k.idx, k.map_index, k.epoch
), leased as (
    insert into lease (session, run_id, idx, map_index, epoch)
    select %(session)s, m.run_id, m.idx, m.map_index, m.epoch from moved m
)
select m.run_id, m.idx, m.map_index, m.epoch from moved m
