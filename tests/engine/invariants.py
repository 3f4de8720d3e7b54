"""What is true at all times (V1–V4, V6, V7), as questions to the database. Installed in test databases only."""

from __future__ import annotations

from datetime import datetime

from psycopg import AsyncConnection

from evertick.domain.schedules.spec import next_after, parse_schedule
from evertick.domain.states import RUN_TRANSITIONS, TASK_TRANSITIONS

_VIOLATIONS = """
create or replace function violations() returns setof text language sql as $$
    -- V2: a lease for every running task and for nothing else, one owner each, epochs equal
    select format('V2 running without its lease: %s', (k.run_id, k.idx)) from task k
    where k.state = 'running' and not exists (
        select 1 from lease l where l.session = k.session and l.run_id = k.run_id and l.idx = k.idx
          and l.map_index = k.map_index and l.epoch = k.epoch)
    union all
    select format('V2 lease without its running task: %s', (l.run_id, l.idx)) from lease l
    where not exists (select 1 from task k where k.run_id = l.run_id and k.idx = l.idx and k.map_index = l.map_index
                        and k.state = 'running' and k.epoch = l.epoch and k.session = l.session)
    union all
    select format('V2 two owners: %s', (l.run_id, l.idx)) from lease l group by l.run_id, l.idx, l.map_index having count(*) > 1
    union all
    -- a queued task is on somebody's list, with its own session
    select format('queued and on no list: %s', (k.run_id, k.idx)) from task k
    where k.state = 'queued' and not exists (
        select 1 from dispatch d where d.run_id = k.run_id and d.idx = k.idx and d.map_index = k.map_index
          and d.epoch = k.epoch and d.session = k.session)
    union all
    -- an available task is in line exactly once, a pending one with a time has its timer
    select format('available %s times in line: %s', count(q.seq), (k.run_id, k.idx))
    from task k left join ready_task q on q.run_id = k.run_id and q.idx = k.idx and q.map_index = k.map_index
    where k.state = 'available' group by k.run_id, k.idx, k.map_index having count(q.seq) <> 1
    union all
    select format('in line but %s: %s', k.state, (k.run_id, k.idx))
    from ready_task q join task k on q.run_id = k.run_id and q.idx = k.idx and q.map_index = k.map_index
    where k.state <> 'available'
    union all
    select format('pending until a time without a timer: %s', (k.run_id, k.idx)) from task k
    where k.state = 'pending' and k.not_before is not null and not exists (
        select 1 from task_timer w where w.due_at = k.not_before and w.run_id = k.run_id and w.idx = k.idx
          and w.map_index = k.map_index)
      and not exists (select 1 from retry_queue l where l.due_at = k.not_before and l.run_id = k.run_id and l.idx = k.idx
          and l.map_index = k.map_index)
      and not exists (select 1 from quarantine q where q.kind = 'run' and q.subject_id = k.run_id)
    union all
    -- V7: the counters are what the tasks say, and nothing left to run means closed. A mapped task is one until it has instances
    select format('V7 run %s is %s with %s open and %s extra, the tasks say %s open, %s extra and %s failed leaves, not %s',
                  r.run_id, r.state, r.open_tasks, r.extra_tasks, o.open, c.extra, c.bad, r.failed_leaves)
    from run_status r join dag_version v on v.version_id = r.version_id
    cross join lateral (
        select count(*) filter (where k.state in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed')) as ended,
               count(*) - count(distinct k.idx) as extra,
               count(*) filter (where s.is_leaf and k.state in ('failed', 'canceled', 'upstream_failed')) as bad
        from task k join task_spec s on s.version_id = k.version_id and s.idx = k.idx where k.run_id = r.run_id) c
    cross join lateral (select v.task_count + c.extra - c.ended as open) o
    where r.open_tasks <> o.open or r.extra_tasks <> c.extra
       or (r.state in ('queued', 'running') and o.open = 0)
       or (r.state not in ('queued', 'running') and o.open > 0)
       or (r.state in ('queued', 'running') and r.failed_leaves <> c.bad)
       or (r.state = 'success' and c.bad > 0) or (r.state = 'failed' and c.bad = 0)
    union all
    select format('a mapped task and its instances at once: %s', (k.run_id, k.idx)) from task k
    where k.map_index = -1 and exists (select 1 from task i where i.run_id = k.run_id and i.idx = k.idx and i.map_index >= 0)
    union all
    select format('an instance without what it is given: %s', (k.run_id, k.idx, k.map_index)) from task k
    join task_spec s on s.version_id = k.version_id and s.idx = k.idx
    where k.map_index >= 0 and exists (select 1 from run_status r where r.run_id = k.run_id) and not exists (
        select 1 from map_item m where m.run_id = k.run_id and m.idx = coalesce(s.map_head, k.idx) and m.map_index = k.map_index)
      -- one that is being stopped, of a group that will read its lists again
      and not (s.map_head is not null and k.request is not null)
    union all
    -- what a group with retries has counted is what its tasks say, and one that is over has been heard or was begun again
    select format('group %s of run %s counts otherwise than its tasks', g.group_id, r.run_id)
    from run_status r cross join lateral drifted_groups(r.run_id) g where r.state in ('queued', 'running')
    union all
    -- a waiting row counts exactly the upstream that has ended, and is decided whenever it can be
    select format('upstream counters drifted: %s', (w.run_id, w.idx))
    from task w join run_status r on r.run_id = w.run_id
    join task_spec s on s.version_id = w.version_id and s.idx = w.idx
    cross join lateral (
        select count(*) filter (where u.state = 'success') as s, count(*) filter (where u.state in ('failed', 'canceled')) as f,
               count(*) filter (where u.state = 'upstream_failed') as uf, count(*) filter (where u.state = 'skipped') as sk,
               coalesce(max(more), 0) as more
        from (select case when g.leaves_group is null or not exists (   -- a group with retries is heard of when all of it has ended
                  select 1 from task_spec m left join task o on o.run_id = w.run_id and o.idx = m.idx
                  where m.version_id = g.version_id and m.group_id = g.leaves_group
                    and coalesce(o.state, 'waiting') not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed'))
                  then u.state end as state,
                  count(*) over () - dense_rank() over (order by u.idx) - dense_rank() over (order by u.idx desc) + 1 as more
              from edge g join task u on u.run_id = w.run_id and u.idx = g.src
                  and (g.scope is distinct from 'same_index' or u.map_index = w.map_index)
              where g.version_id = w.version_id and g.dst = w.idx
                and (s.map_head is null or w.map_index >= 0 or g.scope = 'list')) u) c
    where w.state = 'waiting' and (coalesce(w.n_success, 0), coalesce(w.n_failed, 0), coalesce(w.n_upstream_failed, 0),
          coalesce(w.n_skipped, 0), coalesce(w.n_extra, 0)) is distinct from (c.s::int, c.f::int, c.uf::int, c.sk::int, c.more::int)
    union all
    select format('a task that may start is still waiting: %s', (w.run_id, w.idx))
    from task w join run_status r on r.run_id = w.run_id and r.state = 'running'
    join task_spec s on s.version_id = w.version_id and s.idx = w.idx
    cross join lateral (select s.map_head is not null and w.map_index < 0 as is_group) i
    where w.state = 'waiting' and evaluate_trigger_rule(case when i.is_group then 'all_done' else s.trigger_rule end,
          case when i.is_group then s.lists_total else s.upstream_total end + coalesce(w.n_extra, 0),
          coalesce(w.n_success, 0), coalesce(w.n_failed, 0),
          coalesce(w.n_upstream_failed, 0), coalesce(w.n_skipped, 0), s.setup_total, coalesce(w.n_setup_success, 0),
          coalesce(w.n_setup_skipped, 0)) <> 'wait'
      -- an instance of a mapped group that is being stopped holds the group
      and not (s.map_head is not null and exists (
          select 1 from task o join task_spec x on x.version_id = o.version_id and x.idx = o.idx and x.map_head = s.map_head
          where o.run_id = w.run_id and o.map_index >= 0 and o.request is not null))
    union all
    select format('some tasks of a mapped group have instances, others not: %s', (r.run_id, s.map_head))
    from run_status r join task_spec s on s.version_id = r.version_id and s.map_head is not null
    left join task k on k.run_id = r.run_id and k.idx = s.idx and k.map_index >= 0
    where exists (select 1 from map_item m where m.run_id = r.run_id and m.idx = s.map_head)
    group by r.run_id, s.map_head, s.idx
    having count(k.idx) <> (select count(*) from map_item m where m.run_id = r.run_id and m.idx = s.map_head)
    union all
    select format('deferred, and nobody will look at it: %s', (k.run_id, k.idx)) from task k
    where k.state = 'deferred' and not exists (
        select 1 from deferral d where d.run_id = k.run_id and d.idx = k.idx and d.map_index = k.map_index and d.epoch = k.epoch)
    union all
    -- a trigger waits exactly as long as its task, with the same epoch; its session lives, or will be found
    select format('a trigger without its deferred task: %s', (w.run_id, w.idx)) from task_trigger w
    where w.event is null and exists (select 1 from run_status r where r.run_id = w.run_id) and not exists (
        select 1 from task k join deferral d using (run_id, idx, map_index, epoch)
        where k.run_id = w.run_id and k.idx = w.idx and k.map_index = w.map_index and k.epoch = w.epoch
          and k.state = 'deferred' and d.kind = 'trigger')
    union all
    select format('a deferred task without its trigger: %s', (d.run_id, d.idx)) from deferral d
    where d.kind = 'trigger' and not exists (
        select 1 from task_trigger w where w.run_id = d.run_id and w.idx = d.idx and w.map_index = d.map_index
          and w.epoch = d.epoch and w.event is null)
    union all
    select format('a trigger of a dead session: %s', (w.run_id, w.idx)) from task_trigger w join runner r using (session)
    where r.ended_at is not null
    union all
    select format('run %s is running without its first tasks', r.run_id) from run_status r
    where r.state = 'running' and exists (
        select 1 from task_spec s where s.version_id = r.version_id and s.is_root and not exists (
            select 1 from task k where k.run_id = r.run_id and k.idx = s.idx))
    union all
    -- limits hold: never more runs at once than the DAG allows (those it admitted under an older, larger limit aside)
    select format('V1 two runs for one fire: %s', (r.schedule_id, r.fire_at)) from run r
    where r.schedule_id is not null group by r.schedule_id, r.fire_at having count(*) > 1
    union all
    select format('V1 fired and skipped: %s', (r.schedule_id, r.fire_at))
    from run r join skip_record k on k.schedule_id = r.schedule_id and r.fire_at between k.first_at and k.last_at
    union all
    -- a backfill makes at most one run for an instant, keeps to its limit, and its counters are what its runs say
    select format('two runs of backfill %s for %s', b.backfill_id, b.fire_at) from backfill_run b
    group by b.backfill_id, b.fire_at having count(*) > 1
    union all
    select format('backfill %s: %s open, %s allowed, %s counted', b.backfill_id, o.n, b.parallel, b.open_runs) from backfill b
    cross join lateral (select count(*) as n from backfill_run r where r.backfill_id = b.backfill_id and r.is_open) o
    cross join lateral (select count(distinct r.run_id) as n from backfill_run r join audit_log a on a.run_id = r.run_id
                        where r.backfill_id = b.backfill_id and a.action in ('clear', 'mark')) again
    where o.n > b.parallel + again.n or o.n > b.open_runs
    union all
    select format('backfill %s counts %s succeeded, %s failed, %s canceled; its runs: %s', b.backfill_id, b.succeeded, b.failed,
                  b.canceled, o)
    from backfill b cross join lateral (
        select count(*) filter (where s.state = 'success') as succeeded, count(*) filter (where s.state = 'failed') as failed,
               count(*) filter (where s.state = 'canceled') as canceled, count(*) as n
        from backfill_run r join run_status s using (run_id) where r.backfill_id = b.backfill_id and not r.is_open) o
    -- a run that was pruned stays counted
    where o.succeeded > b.succeeded or o.failed > b.failed or o.canceled > b.canceled
       or o.n > o.succeeded + o.failed + o.canceled
    union all
    select format('backfill %s is %s: %s made, %s open, %s counted, %s left alone of %s', b.backfill_id, b.state, b.created,
                  b.open_runs, b.succeeded + b.failed + b.canceled, b.skipped, b.total)
    from backfill b
    where b.created < b.open_runs + b.succeeded + b.failed + b.canceled or b.created + b.skipped > b.total
       or (b.state = 'done' and b.created + b.skipped <> b.total)
    union all
    {GATES}
$$;
"""

GATE_VIOLATIONS = """
    -- V6: what is used is what active tasks hold. That nobody is let in where there is no room: refuse_overfull
    select format('V6 gate %s %s: %s of %s used, its holders have %s', g.kind, g.name, g.used, g.capacity, coalesce(h.weight, 0))
    from gate g left join (
        select n.gate_id, sum(n.weight) as weight from gate_holder x
        cross join lateral unnest(x.gate_ids, x.weights) as n(gate_id, weight) group by n.gate_id) h on h.gate_id = g.gate_id
    where g.used <> coalesce(h.weight, 0) and g.kind <> 'rate'
    union all
    select format('V6 rate %s: %s used, %s taken', g.name, g.used, p.n) from gate g
    cross join lateral (select count(*) as n from rate_slot p where p.gate_id = g.gate_id) p where g.kind = 'rate' and g.used <> p.n
    union all
    -- D5: nobody was let in while a smaller version was open, and who is open is on the key
    select format('D5 version %s of %s was let in after %s had come: %s', o.version, o.gate_id, s.version, (o.run_id, o.idx))
    from gate_order o join gate_holder h on h.run_id = o.run_id and h.idx = o.idx and h.map_index = o.map_index
    join gate_order s on s.gate_id = o.gate_id and s.version < o.version and s.since < h.since
    union all
    select format('D5 on a key but %s: %s', k.state, (o.run_id, o.idx))
    from gate_order o left join task k on k.run_id = o.run_id and k.idx = o.idx and k.map_index = o.map_index
    where k.state is null or k.state not in ('pending', 'available', 'queued', 'running', 'deferred')
    union all
    select format('D5 %s without its place: %s', k.state, (k.run_id, k.idx))
    from task k join task_spec s on s.version_id = k.version_id and s.idx = k.idx and s.has_order_key
    where k.state in ('pending', 'available', 'queued', 'running', 'deferred') and not exists (
        select 1 from gate_order o where o.run_id = k.run_id and o.idx = k.idx and o.map_index = k.map_index)
    union all
    select format('V6 a task holds gates and is %s: %s', k.state, (h.run_id, h.idx))
    from gate_holder h left join task k on k.run_id = h.run_id and k.idx = h.idx and k.map_index = h.map_index
    where k.state is null or k.state not in ('available', 'queued', 'running')
    union all
    select format('V6 %s without holding its gates: %s', k.state, (k.run_id, k.idx))
    from task k join task_spec s on s.version_id = k.version_id and s.idx = k.idx and s.is_gated
    where k.state in ('available', 'queued', 'running') and not exists (
        select 1 from gate_holder h where h.run_id = k.run_id and h.idx = k.idx and h.map_index = k.map_index)
    union all
    select format('V6 two exclusive holders of %s', g.name) from gate_holder h
    cross join lateral unnest(h.gate_ids, h.weights) as n(gate_id, weight) join gate g on g.gate_id = n.gate_id
    where g.kind = 'mutex' and n.weight = g.capacity group by g.name having count(*) > 1
    union all
    select format('in a line but %s: %s', k.state, (w.run_id, w.idx))
    from gate_waiter w left join task k on k.run_id = w.run_id and k.idx = w.idx and k.map_index = w.map_index
    where k.state is distinct from 'pending' or k.not_before is not null
    union all
    select format('in a line that is not there: %s', (w.run_id, w.idx)) from gate_waiter w
    where not exists (select 1 from gate_queue l where l.queue_id = w.queue_id)
    union all
    select format('pending for nothing: %s', (k.run_id, k.idx))
    from task k join run_status r on r.run_id = k.run_id join dag d on d.dag_id = r.dag_id
    where k.state = 'pending' and k.not_before is null and not d.is_paused and not exists (
        select 1 from gate_waiter w where w.run_id = k.run_id and w.idx = k.idx and w.map_index = k.map_index)
    union all
    select format('line %s could be let in: %s of %s %s is free', l.queue_id, g.capacity - g.used, g.kind, g.name)
    from gate_queue l join gate g on g.gate_id = l.blocked_on
    where free_slots(g.gate_id) >= l.need and not g.needs_admission and reserved_for(g.gate_id) is null
      and coalesce(g.next_opening > clock(), true)
      and exists (select 1 from gate_waiter w where w.queue_id = l.queue_id)
"""

_GUARD = """
create or replace function refuse_illegal_move() returns trigger language plpgsql as $$
begin
    if old.state <> new.state and not exists (
        select 1 from legal_move m where m.thing = tg_table_name and m.was = old.state::text and m.becomes = new.state::text) then
        raise exception 'V4 illegal move of %%: %% -> %%', tg_table_name, old.state, new.state;
    end if;
    return new;
end $$;
create or replace function refuse_old_epoch() returns trigger language plpgsql as $$
begin
    if new.epoch < old.epoch or (
        new.state in ('queued', 'running') and old.state not in ('queued', 'running') and new.epoch <= old.epoch) then
        raise exception 'V2 the epoch of (%%, %%) went from %% to %%', new.run_id, new.idx, old.epoch, new.epoch;
    end if;
    return new;
end $$;
create or replace function refuse_change_of_fact() returns trigger language plpgsql as $$
begin
    raise exception 'run facts are append-only';
end $$;
create table if not exists cursor_move (move_id bigint generated always as identity primary key, schedule_id int,
    was_version int, version int, was_due timestamptz, next_due timestamptz, was_paused boolean, spec jsonb, moved_at timestamptz);
-- A capacity may be lowered below what is used; more than it allows is never let in.
create or replace function refuse_overfull() returns trigger language plpgsql as $$
begin
    if new.used > old.used and new.used > new.capacity then
        raise exception 'V6 gate %% %%: %% of %% used', new.kind, new.name, new.used, new.capacity;
    end if;
    return new;
end $$;
create or replace function record_cursor() returns trigger language plpgsql as $$
begin
    if (old.next_due, old.version) is distinct from (new.next_due, new.version) then
        insert into cursor_move (schedule_id, was_version, version, was_due, next_due, was_paused, spec, moved_at)
        select new.schedule_id, old.version, new.version, old.next_due, new.next_due, old.is_paused, c.spec, clock()
        from schedule c where c.schedule_id = new.schedule_id;
    end if;
    return new;
end $$;
create trigger cursor_moves before update on schedule_state for each row execute function record_cursor();
create trigger task_moves before update on task for each row execute function refuse_illegal_move();
create trigger task_epochs before update on task for each row execute function refuse_old_epoch();
create trigger run_moves before update on run_status for each row execute function refuse_illegal_move();
create trigger gate_room before update on gate for each row execute function refuse_overfull();
create trigger run_facts before update on run for each row execute function refuse_change_of_fact();
"""


async def install(conn: AsyncConnection) -> None:
    """Every illegal move raises at once; `violations` finds the rest."""
    await conn.execute("create table if not exists legal_move (thing text, was text, becomes text)")
    moves = [("task", was.value, to.value) for was, tos in TASK_TRANSITIONS.items() for to in tos]
    moves += [("run_status", was.value, to.value) for was, tos in RUN_TRANSITIONS.items() for to in tos]
    async with conn.cursor() as cursor:
        await cursor.executemany("insert into legal_move values (%s, %s, %s)", moves)
    await conn.execute(_VIOLATIONS.replace("{GATES}", GATE_VIOLATIONS))
    await conn.execute(_GUARD.replace("%%", "%"))


async def violations(conn: AsyncConnection) -> list[str]:
    cursor = await conn.execute("select * from violations()")
    return [str(row[0]) for row in await cursor.fetchall()] + await _unsettled(conn)


async def gate_violations(conn: AsyncConnection) -> list[str]:
    """Of V6 alone, without anything installed."""
    cursor = await conn.execute(GATE_VIOLATIONS)
    return [str(row[0]) for row in await cursor.fetchall()]


async def _unsettled(conn: AsyncConnection) -> list[str]:
    """V1, for every move of a cursor since the last look: what it passed has exactly one run or one skip record."""
    cursor = await conn.execute(
        "with seen as (delete from cursor_move returning *) select schedule_id, was_version, version, was_due, next_due,"
        " was_paused, spec, moved_at from seen order by move_id"
    )
    found: list[str] = []
    for schedule_id, was_version, version, was_due, next_due, was_paused, spec, moved_at in await cursor.fetchall():
        if was_due is None:
            continue
        if was_version != version:
            if was_due <= moved_at and not was_paused:
                found.append(f"V1 schedule {schedule_id} changed while {was_due} was due and not settled")
            continue
        passed, instant = [], was_due
        while instant is not None and instant <= moved_at and (next_due is None or instant < next_due):
            passed.append(instant)
            instant = next_after(parse_schedule(spec), instant)
        found += await _uncovered(conn, schedule_id, passed)
    return found


async def _uncovered(conn: AsyncConnection, schedule_id: int, passed: list[datetime]) -> list[str]:
    cursor = await conn.execute(
        "select x, (select count(*) from run r where r.schedule_id = %(id)s and r.fire_at = x)"
        " + (select count(*) from skip_record k where k.schedule_id = %(id)s and x between k.first_at and k.last_at)"
        " from unnest(%(passed)s::timestamptz[]) x",
        {"id": schedule_id, "passed": passed},
    )
    return [f"V1 {n} answers for {at} of schedule {schedule_id}" for at, n in await cursor.fetchall() if n != 1]
