"""Gathers the evidence of one run: what the audit and the tables of the database say, and the logs beside it.

Reads once, after the last fault, past every proxy. Decides nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, LiteralString, TypeVar

from psycopg import AsyncConnection

from tests.chaos import effects as effect_log
from tests.chaos import sink as sink_store
from tests.chaos.audit import refusals
from tests.chaos.evidence import (
    AttemptReport,
    Change,
    ClockReading,
    Evidence,
    LeaderCommit,
    LeaseMove,
    Leftover,
    Need,
    PastAttempt,
    PoolMove,
    ResultRow,
    RunFact,
    RunMove,
    RunnerFact,
    RunnerMove,
    ScheduleMove,
    ScheduleVersion,
    ShardMove,
    Skip,
    TaskMove,
    TaskPlan,
)
from tests.chaos.reading import read_client, read_nemesis
from tests.chaos.record import boot_ns
from tests.chaos.sink import Sink

T = TypeVar("T")

_TASK_MOVES: LiteralString = """
select entry, tx::text::bigint, at_ns, run_id, idx, map_index, old_state, new_state, old_epoch, new_epoch, old_session,
       new_session, attempt, lost_attempts, reason from chaos_audit.task_move order by entry
"""
_RUN_MOVES: LiteralString = """
select entry, tx::text::bigint, at, at_ns, run_id, old_state, new_state, reason from chaos_audit.run_move order by entry
"""
_LEASE_MOVES: LiteralString = """
select entry, tx::text::bigint, at_ns, session, run_id, idx, map_index, epoch, is_gained from chaos_audit.lease_move order by entry
"""
_REPORTS: LiteralString = """
select entry, tx::text::bigint, at_ns, session, run_id, idx, map_index, epoch, coalesce(kind, ''), is_refused
from chaos_audit.report order by entry
"""
_LEADER_COMMITS: LiteralString = """
select place, tx::text::bigint, backend, at_ns, kind, shard, epoch from chaos_audit.leader_commit order by place
"""
_SHARD_MOVES: LiteralString = """
select entry, at, at_ns, shard, old_epoch, new_epoch, owner, state from chaos_audit.shard_move order by entry
"""
_SCHEDULE_MOVES: LiteralString = """
select entry, at, at_ns, schedule_id, version, old_due, new_due, is_paused, error, is_same_version
from chaos_audit.schedule_move order by entry
"""
_SCHEDULE_VERSIONS: LiteralString = """
select v.entry, v.at, v.schedule_id, d.name, v.name, v.version, v.spec, v.misfire, v.window_seconds,
       split_part(v.request, ' ', 1), v.changed_by,
       v.is_deleted, v.overlap
from chaos_audit.schedule_version v join evertick.dag d on d.dag_id = v.dag_id order by v.entry
"""
_RUNNER_MOVES: LiteralString = "select entry, at_ns, session, what, reason from chaos_audit.runner_move order by entry"
_RUNNERS: LiteralString = "select session, runner_id, pid from evertick.runner order by session"
_RUNS: LiteralString = """
select r.run_id, d.name, r.version_id, r.kind::text, r.schedule_id, r.fire_at, r.key, r.triggered_by, r.created_at, s.state::text,
       r.params
from evertick.run r join evertick.dag d on d.dag_id = r.dag_id left join evertick.run_status s on s.run_id = r.run_id
where not exists (select 1 from chaos_audit.old_run o where o.run_id = r.run_id)
order by r.run_id
"""
_SKIPS: LiteralString = """
select schedule_id, first_at, last_at, count, reason, recorded_at from evertick.skip_record order by schedule_id, first_at
"""
_PAST: LiteralString = "select run_id, idx, map_index, epoch, session from evertick.attempt"
_RESULTS: LiteralString = """
select run_id, idx, map_index, epoch from evertick.result r
where not exists (select 1 from chaos_audit.old_run o where o.run_id = r.run_id)
"""
_PLANS: LiteralString = """
select s.version_id, s.idx, s.name, s.max_attempts,
       coalesce(t->'retry', '{}'), coalesce(t->'gates', '[]'), (v.spec->>'max_active_tasks')::int, d.name
from evertick.task_spec s join evertick.dag_version v on v.version_id = s.version_id join evertick.dag d on d.dag_id = v.dag_id
left join lateral (select x from jsonb_array_elements(v.spec->'tasks') x where x->>'name' = s.name limit 1) as found(t) on true
"""
_CHANGED_FACTS: LiteralString = "select format('run %s: %s', run_id, what) from chaos_audit.fact_change order by entry"
_LEFTOVERS: LiteralString = """
select 'run', format('run %s of %s is %s', r.run_id, d.name, r.state), r.run_id
from evertick.run_status r join evertick.dag d on d.dag_id = r.dag_id where r.state in ('queued', 'running') and not d.is_paused
union all
select 'task', format('task %s of run %s is %s (epoch %s, session %s)', k.idx, k.run_id, k.state, k.epoch, k.session), k.run_id
from evertick.task k join evertick.run_status r on r.run_id = k.run_id join evertick.dag d on d.dag_id = r.dag_id
where k.state not in ('success', 'failed', 'skipped', 'canceled', 'upstream_failed') and not d.is_paused
union all
select 'lease', format('session %s holds task %s of run %s', session, idx, run_id), run_id from evertick.lease
union all
select 'ready', format('task %s of run %s is in line', q.idx, q.run_id), q.run_id from evertick.ready_task q
union all
select 'dispatch', format('task %s of run %s (epoch %s) is on the list of an executor', x.idx, x.run_id, x.epoch), x.run_id
from evertick.dispatch x
union all
select 'timer', format('task %s of run %s waits for %s', t.idx, t.run_id, t.due_at), t.run_id from evertick.task_timer t
where t.due_at < evertick.clock()
union all
select 'hold', format('task %s of run %s still holds gates', h.idx, h.run_id), h.run_id from evertick.gate_holder h
union all
select 'hold', format('task %s of run %s still is on an ordered key', o.idx, o.run_id), o.run_id from evertick.gate_order o
union all
select 'hold', format('%s %s counts %s used and nobody holds it', g.kind, g.name, g.used), null from evertick.gate g
where g.used <> 0 and g.kind <> 'rate' and not exists (select 1 from evertick.gate_holder h where g.gate_id = any(h.gate_ids))
union all
select 'schedule', format('schedule %s is due since %s', s.schedule_id, s.next_due), null
from evertick.schedule_state s where s.next_due < evertick.clock() - interval '10 seconds' and not s.is_paused and s.error is null
limit 1000
"""
_POOL_MOVES: LiteralString = "select entry, name, capacity from chaos_audit.pool_move order by entry"
_LIMITS_BROKEN: LiteralString = """
select what from chaos_audit.limit_broken
union all
select format('gates had to be put right: %s', detail) from evertick.audit_log
where action = 'reconcile' and detail->'repairs' ? 'gate_drift'
limit 1000
"""
# Who asked is the request's own name where a verb has no key: see the client log.
_CHANGES: LiteralString = """
select 'trigger', key from evertick.run where key is not null
union all
select 'put_schedule', split_part(request, ' ', 1) from chaos_audit.schedule_version where request is not null and not is_deleted
union all
select action, actor from evertick.audit_log where action <> 'put_schedule'
"""
_CLOCK: LiteralString = """
select at_ns, at from chaos_audit.shard_move union all select at_ns, at from chaos_audit.run_move
"""


async def collect(
    conn: AsyncConnection, *, effects: Path, nemesis: Path, client: Path, sink_conn: AsyncConnection | None = None
) -> Evidence:
    """Everything that is known now. `conn` goes straight to the database under test."""
    async with _one_look(conn):
        plans = await _rows(conn, _PLANS, _plan)
        clock = await conn.execute("select evertick.clock()")
        now = await clock.fetchone()
        assert now is not None
        runs = await _rows(conn, _RUNS, RunFact)
        # A body knows a date in every run; only a run of a schedule has it as its due time.
        triggered = {run.run_id for run in runs if run.schedule_id is None}
        lines = effect_log.read(effects)
        return Evidence(
            effects=tuple(line._replace(fire_at=None) if line.run_id in triggered else line for line in lines),
            sink=Sink() if sink_conn is None else await sink_store.read(sink_conn),
            nemesis=read_nemesis(nemesis),
            client=read_client(client),
            task_moves=await _rows(conn, _TASK_MOVES, TaskMove),
            run_moves=await _rows(conn, _RUN_MOVES, RunMove),
            lease_moves=await _rows(conn, _LEASE_MOVES, LeaseMove),
            reports=await _rows(conn, _REPORTS, AttemptReport),
            leader_commits=await _rows(conn, _LEADER_COMMITS, LeaderCommit),
            shard_moves=await _rows(conn, _SHARD_MOVES, ShardMove),
            schedule_moves=await _rows(conn, _SCHEDULE_MOVES, ScheduleMove),
            schedule_versions=await _rows(conn, _SCHEDULE_VERSIONS, ScheduleVersion),
            runner_moves=await _rows(conn, _RUNNER_MOVES, RunnerMove),
            runners=await _rows(conn, _RUNNERS, RunnerFact),
            runs=runs,
            skips=await _rows(conn, _SKIPS, Skip),
            past_attempts=await _rows(conn, _PAST, PastAttempt),
            results=await _rows(conn, _RESULTS, ResultRow),
            plans=dict(plans),
            changed_facts=await _rows(conn, _CHANGED_FACTS, str),
            pool_moves=await _rows(conn, _POOL_MOVES, PoolMove),
            limits_broken=await _rows(conn, _LIMITS_BROKEN, str),
            leftovers=await _rows(conn, _LEFTOVERS, Leftover),
            changes=await _rows(conn, _CHANGES, Change),
            refused=await refusals(conn),
            clock=await _rows(conn, _CLOCK, ClockReading),
            read_at=now[0],
            read_ns=boot_ns(),
        )


def _plan(
    version: int, idx: int, name: str, most: int, retry: Any, gates: list[Any], most_of_dag: int | None, dag: str
) -> tuple[tuple[int, int], TaskPlan]:
    needs = [Need(each["kind"], each["name"], each.get("weight", 1), each.get("capacity")) for each in gates]
    if most_of_dag is not None:
        needs.append(Need("dag", dag, 1, most_of_dag))
    return (version, idx), TaskPlan(name, most, retry, tuple(needs))


@asynccontextmanager
async def _one_look(conn: AsyncConnection) -> AsyncIterator[None]:
    """All tables as of one instant, without the limits of a service's connection."""
    async with conn.transaction():
        await conn.execute("set transaction isolation level repeatable read read only")
        await conn.execute("set local statement_timeout = 0")
        await conn.execute("set local enable_seqscan = on")
        yield


async def _rows(conn: AsyncConnection, query: LiteralString, make: Callable[..., T]) -> tuple[T, ...]:
    cursor = await conn.execute(query)
    rows: Iterable[Any] = await cursor.fetchall()
    return tuple(make(*row) for row in rows)
