"""One task put into any state by hand, in a run of three, so that a verb can be tried on it from there.

The chain is before → subject → after. Whatever its state, the subject is in line and its runner has its epoch and
session, so that nothing but its state can keep a verb from moving it.
"""

from __future__ import annotations

from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.retry import RetryPolicy
from evertick.domain.states import TERMINAL_TASK_STATES, TaskState
from tests.engine.world import Runner, lead, make_dag, names_of, put, start, value

SHAPE = {"before": [], "subject": ["before"], "after": ["subject"]}
BEFORE, SUBJECT, AFTER = 0, 1, 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """The task, its run, and a runner whose claim matches the task's epoch and session."""

    conn: AsyncConnection
    run_id: int
    version_id: int
    runner: Runner
    leader: int
    claim: ExchangeRow

    async def state(self) -> str:
        return str(await self.column("state"))

    async def column(self, name: str) -> object:
        return await value(self.conn, f"select {name} from task where run_id = %s and idx = %s", self.run_id, SUBJECT)


async def place_subject(conn: AsyncConnection, state: TaskState) -> Subject:
    """A fresh run whose subject is in `state`, and whose counters say so."""
    retry = RetryPolicy(retries=1, delay_seconds=0)
    version_id = await put(conn, make_dag("chain", SHAPE, task_retry=retry))
    run_id = await start(conn, "chain")
    runner, leader = await Runner.join(conn), await lead(conn)
    (before,) = await runner.claim()
    assert await names_of(conn, [before]) == ["before"]
    await runner.finish(before)
    (claim,) = await runner.claim()
    await _put_into(conn, claim, state)
    return Subject(conn=conn, run_id=run_id, version_id=version_id, runner=runner, leader=leader, claim=claim)


async def reopen_before(subject: Subject) -> ExchangeRow:
    """Run the task before the subject once more, as if it had not ended: returns its claim."""
    conn, run = subject.conn, subject.run_id
    await conn.execute(
        "update task set n_success = 0 where run_id = %s and idx = %s and state = 'waiting'", [run, SUBJECT]
    )
    await conn.execute(
        "update task set state = 'running', finished_at = null, session = %s where run_id = %s and idx = %s",
        [subject.runner.session, run, BEFORE],
    )
    await conn.execute("insert into lease values (%s, %s, %s, -1, 1)", [subject.runner.session, run, BEFORE])
    await conn.execute("update run_status set open_tasks = open_tasks + 1 where run_id = %s", [run])
    return subject.claim._replace(idx=BEFORE, epoch=1)


async def _put_into(conn: AsyncConnection, claim: ExchangeRow, state: TaskState) -> None:
    is_terminal = state in TERMINAL_TASK_STATES
    await conn.execute(
        "update task set state = %s, finished_at = case when %s then clock() end, n_success = 1,"
        " started_at = case when %s then null else started_at end where run_id = %s and idx = %s",
        [state.value, is_terminal, state is TaskState.QUEUED, claim.run_id, claim.idx],
    )
    # On the list in every state, so that only the state can keep what never began from ending.
    await conn.execute(
        "insert into dispatch (run_id, idx, map_index, epoch, session, executor, owner, queue, queued_at)"
        " select run_id, idx, map_index, epoch, session, 'far', session, 'default', clock() from task"
        " where run_id = %s and idx = %s",
        [claim.run_id, claim.idx],
    )
    await conn.execute(
        "insert into ready_task (queue, rank, run_id, idx, map_index) select queue, 9 - priority, %s, idx, -1"
        " from task_spec where version_id = %s and idx = %s",
        [claim.run_id, claim.version_id, claim.idx],
    )
    if state is TaskState.AVAILABLE:
        await conn.execute("delete from lease where run_id = %s and idx = %s", [claim.run_id, claim.idx])
    await conn.execute(
        "update run_status set open_tasks = %s where run_id = %s", [1 if is_terminal else 2, claim.run_id]
    )
