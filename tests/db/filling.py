"""A database as it looks after a busy while: much history, a full line, many schedules. Made by SQL in a second."""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.domain.retry import RetryPolicy
from tests.engine.world import Runner, later, lead, make_dag, put, set_clock, start

QUEUE = "default"


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """How many runs of two tasks each, and how many schedules."""

    ended: int
    ready: int
    timed: int
    leased: int
    schedules: int


BUSY = Filling(ended=10_000, ready=2_000, timed=500, leased=200, schedules=5_000)
FRESH = Filling(ended=100, ready=20, timed=5, leased=5, schedules=20)


async def fill(conn: AsyncConnection, filling: Filling) -> int:
    """Fill the database, be the leader of shard 0 (its epoch is returned), with the clock at T0."""
    await set_clock(conn, later(0))
    retry = RetryPolicy(retries=1, delay_seconds=0)
    await put(conn, make_dag("past", {"a": [], "b": ["a"]}, task_retry=retry))
    await put(conn, make_dag("many", {"a": []}, every="@every 3600s"))
    await _history(conn, filling.ended)
    await _line(conn, filling.ready + filling.timed + filling.leased)
    await conn.execute(
        "insert into task_timer (shard, due_at, run_id, idx, map_index)"
        " select 0, clock() + run_id * interval '1 hour', run_id, idx, map_index from ready_task order by seq desc limit %s",
        [filling.timed],
    )
    await conn.execute(
        "update task k set state = 'pending', not_before = w.due_at from task_timer w"
        " where k.run_id = w.run_id and k.idx = w.idx"
    )
    await conn.execute("delete from ready_task q using task_timer w where q.run_id = w.run_id")
    other = await Runner.join(conn)
    await other.claim(filling.leased)
    await _schedules(conn, filling.schedules)
    for table in (
        "task",
        "run",
        "run_status",
        "ready_task",
        "lease",
        "task_timer",
        "schedule",
        "schedule_state",
        "log_chunk",
    ):
        await conn.execute(f"analyze {table}")
    return await lead(conn)


async def _history(conn: AsyncConnection, count: int) -> None:
    """Runs that have ended well, with a result and a log each."""
    made = await start(conn, "past")
    await (await Runner.join(conn)).drain()
    for statement in (
        "insert into run (dag_id, version_id, kind, params, triggered_by, created_at)"
        " select dag_id, version_id, kind, params, triggered_by, created_at from run, generate_series(2, %(count)s)"
        " where run_id = %(run)s",
        "insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at, finished_at)"
        " select r.run_id, s.dag_id, s.version_id, s.state, 0, s.started_at, s.finished_at"
        " from run r, run_status s where r.run_id > %(run)s and s.run_id = %(run)s",
        "insert into task (run_id, idx, version_id, state, epoch, attempt, session, started_at, finished_at)"
        " select r.run_id, k.idx, k.version_id, k.state, 1, 1, k.session, k.started_at, k.finished_at"
        " from run r, task k where r.run_id > %(run)s and k.run_id = %(run)s",
        "insert into result select run_id, idx, map_index, 1, '1' from task where run_id >= %(run)s",
        "insert into log_chunk select run_id, idx, map_index, 1, 0, 9, false, 'x' from task where run_id >= %(run)s",
    ):
        await conn.execute(statement, {"run": made, "count": count})


async def _line(conn: AsyncConnection, count: int) -> None:
    """Runs whose first task is available."""
    first = await start(conn, "past")
    await conn.execute(
        "with made as (insert into run (dag_id, version_id, kind, params, triggered_by, created_at)"
        " select dag_id, version_id, kind, params, triggered_by, created_at from run, generate_series(2, %(count)s)"
        " where run_id = %(run)s returning run_id, dag_id, version_id)"
        ", opened as (insert into run_status (run_id, dag_id, version_id, state, open_tasks, started_at)"
        " select run_id, dag_id, version_id, 'running', 2, clock() from made)"
        ", begun as (insert into task (run_id, idx, version_id, state)"
        " select run_id, 0, version_id, 'available' from made)"
        " insert into ready_task (queue, rank, run_id, idx, map_index)"
        " select q.queue, q.rank, m.run_id, 0, -1 from made m, ready_task q where q.run_id = %(run)s order by m.run_id",
        {"run": first, "count": count},
    )


async def _schedules(conn: AsyncConnection, count: int) -> None:
    """Copies of the one schedule, due one after the other."""
    await conn.execute(
        "with made as (insert into schedule"
        " (dag_id, name, version, spec, params, misfire, window_seconds, changed_by, changed_at)"
        " select dag_id, 'copy-' || n, version, spec, params, misfire, window_seconds, changed_by, changed_at"
        " from schedule, generate_series(2, %s) n returning schedule_id)"
        " insert into schedule_state (schedule_id, shard, version, next_due)"
        " select m.schedule_id, s.shard, s.version, s.next_due + m.schedule_id * interval '1 second'"
        " from made m, schedule_state s",
        [count],
    )
