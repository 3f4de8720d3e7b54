"""Guards of tasks that wait without a slot, one by one: no late word, no stale list and no second start changes anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import psycopg
import pytest
from psycopg import AsyncConnection
from psycopg.errors import CheckViolation, UniqueViolation

from evertick.db.connect import Purpose, connect
from evertick.db.queries import waits as waits_queries
from evertick.db.queries.waits import ApprovalRow, ChildDue, ClockDue
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.spec import ChildSpec, TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from evertick.domain.retry import RetryPolicy
from evertick.engine.finish_and_claim import finish_and_claim
from evertick.engine.tasks import clear, mark, select_tasks
from evertick.engine.waits import (
    _decide_approval,
    clock_row,
    set_clock_waits,
    start_child_run,
    wake,
    wake_deferred_tasks,
)
from tests.engine.world import Runner, end, later, lead, make_dag, put, set_clock, start, states, value
from tests.waiting import eventually

ROW = "select (epoch, key)::text from deferral"
APPROVE = WaitSpec(kind=WaitKind.APPROVAL, name="Release?")
NO_WAITS = [("kind", "'run'"), ("seconds", "-1"), ("timeout", "0"), ("on_timeout", "'success'")]
NO_WAITS += [("on_reject", "'success'"), ("backoff", "0.5")]
APPROVAL = (
    "insert into approval (run_id, idx, map_index, epoch, title, asked_at, decided_at, decided_by, is_approved)"
    " select -1, 0, -1, 1, 't', clock(), "
)


def wait(column: str, nonsense: str) -> str:
    """A wait that makes no sense in this."""
    given = {"version_id": "-1", "idx": "0", "kind": "'time'", column: nonsense}
    return f"insert into wait_spec ({', '.join(given)}) values ({', '.join(given.values())})"


class Scene:
    """A run whose only task starts another DAG."""

    def __init__(self, conn: AsyncConnection, leader: int, run: int) -> None:
        self.conn, self.leader, self.run = conn, leader, run

    @classmethod
    async def set(cls, conn: AsyncConnection, *, waits: bool = True) -> Scene:
        await set_clock(conn, later(0))
        await put(conn, make_dag("child", {"work": []}))
        call = {"kind": TaskKind.TRIGGER, "child": ChildSpec(dag="child", waits=waits)}
        await put(conn, make_dag("parent", {"call": []}, per_task={"call": call}))
        return cls(conn, await lead(conn), await start(conn, "parent"))

    async def wake(self) -> None:
        await wake(self.conn, shard=0, epoch=self.leader, batch=10)

    async def due(self) -> list[ChildDue]:
        return await waits_queries.child_runs_due(self.conn, shard=0, limit=10)

    async def start_child(self, due: ChildDue) -> int | None:
        dag = await value(self.conn, "select dag_id from dag where name = 'child'")
        return await start_child_run(
            self.conn,
            due,
            shard=0,
            epoch=self.leader,
            dag_id=dag,  # type: ignore[arg-type]
            params={},
            reason=None,
        )

    async def wake_waits(self) -> int:
        return (await wake_deferred_tasks(self.conn, shard=0, epoch=self.leader, limit=10)).looked_at

    async def mark(self, state: str) -> None:
        await mark(self.conn, TaskKey(self.run, 0, -1), state=state, actor=Actor("test"))

    async def defer_again(self) -> None:
        """It ends by hand and is cleared, before the leader came by."""
        await self.mark("failed")
        await self.clear()

    async def clear(self) -> None:
        chosen = await select_tasks(self.conn, run_id=self.run)
        await clear(self.conn, run_id=self.run, chosen=chosen, actor=Actor("test"))

    async def state(self) -> str:
        return (await states(self.conn, self.run))["call"]

    async def runs(self) -> int:
        found = await value(self.conn, "select count(*) from run")
        assert isinstance(found, int)
        return found


@pytest.fixture
async def scene(rollback_conn: AsyncConnection) -> Scene:
    return await Scene.set(rollback_conn)


@pytest.fixture
async def other(database: str) -> AsyncIterator[AsyncConnection]:
    async with await connect(database, purpose=Purpose.SCHEDULER) as conn:
        yield conn


@pytest.mark.parametrize(
    ("error", "statement"),
    [
        (CheckViolation, "insert into trigger_dag_task values (-1, 0, 'd', '{}', null, true, 0)"),
        (
            UniqueViolation,
            "insert into trigger_dag_task select -1, 0, 'd', '{}', null, true from generate_series(1, 2)",
        ),
        (CheckViolation, "insert into child_run values (-1, 1, 0, -1, 0)"),
        (UniqueViolation, "insert into child_run select -1, 1, 0, -1, 1 from generate_series(1, 2)"),
        (
            UniqueViolation,
            "insert into deferral select -1, 0, -1, 1, 0, 'time', null, clock() from generate_series(1, 2)",
        ),
        (
            UniqueViolation,
            "insert into wait_spec (version_id, idx, kind) select -1, 0, 'time' from generate_series(1, 2)",
        ),
        *((CheckViolation, wait(column, nonsense)) for column, nonsense in NO_WAITS),
        *((CheckViolation, APPROVAL + half) for half in ("clock(), null, true", "clock(), 'me', null")),
        (UniqueViolation, APPROVAL + "null, null, null::bool from generate_series(1, 2)"),
        (UniqueViolation, "insert into sensor_poll select -1, 0, -1, clock(), null, 0 from generate_series(1, 2)"),
        (
            UniqueViolation,
            "insert into event (name, key, payload, sent_at, sent_by)"
            " select 'n', 'k', '1', clock(), 'me' from generate_series(1, 2)",
        ),
    ],
)
async def test_the_tables_refuse(rollback_conn: AsyncConnection, error: type[Exception], statement: str) -> None:
    with pytest.raises(error):
        await rollback_conn.execute(statement)  # type: ignore[arg-type]


async def test_only_what_is_pending_and_waits_for_no_time_is_deferred(rollback_conn: AsyncConnection) -> None:
    await put(rollback_conn, make_dag("a", {"t": []}, task_retry=RetryPolicy(retries=1)))
    run, runner = await start(rollback_conn, "a"), await Runner.join(rollback_conn)
    defer = "select defer_tasks(array[row(run_id, 0, -1, version_id, 'pending')::task_ref], null) from run where run_id = %s"
    await rollback_conn.execute(defer, [run])
    assert (await states(rollback_conn, run))["t"] == "available"
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=60)
    await rollback_conn.execute(defer, [run])
    assert (await states(rollback_conn, run))["t"] == "pending"


async def test_what_is_deferred_again_starts_anew_whatever_the_last_time_left_behind(scene: Scene) -> None:
    await scene.wake()
    first = await value(scene.conn, ROW)
    await scene.defer_again()
    assert await value(scene.conn, ROW) == "(2,)" != first
    await scene.wake()
    assert await scene.runs() == 3


async def test_a_row_that_was_left_behind_makes_way_and_that_of_the_same_wait_stays(scene: Scene) -> None:
    await scene.mark("failed")
    left_behind = "insert into deferral values (%s, 0, -1, 1, 0, 'run', 'run:7', 'infinity')"
    await scene.conn.execute(left_behind, [scene.run])
    await scene.clear()
    assert await value(scene.conn, ROW) == "(2,)"
    await scene.wake()
    before = await value(scene.conn, ROW)
    again = "select begin_waits(array[row(run_id, 0, -1, version_id, 'deferred')::task_ref], null) from run where run_id = %s"
    await scene.conn.execute(again, [scene.run])
    assert await value(scene.conn, ROW) == before != "(2,)"


async def test_a_poll_is_noted_whatever_was_left_behind(rollback_conn: AsyncConnection) -> None:
    await set_clock(rollback_conn, later(0))
    poll = {"wait": WaitSpec(kind=WaitKind.POLL, seconds=1)}
    await put(rollback_conn, make_dag("a", {"t": []}, per_task={"t": poll}))
    run, runner = await start(rollback_conn, "a"), await Runner.join(rollback_conn)
    (claim,) = await runner.claim()
    await rollback_conn.execute("insert into deferral values (%s, 0, -1, 0, 0, 'run', 'run:7', 'infinity')", [run])
    await runner.finish(claim, "deferred")
    assert await value(rollback_conn, ROW) == "(1,)"


async def waiting_for(conn: AsyncConnection, wait: WaitSpec) -> Scene:
    """A run whose only task waits for that."""
    await set_clock(conn, later(0))
    await put(conn, make_dag("a", {"t": []}, per_task={"t": {"kind": TaskKind.WAIT, "wait": wait}}))
    return Scene(conn, await lead(conn), await start(conn, "a"))


async def decide(conn: AsyncConnection, asked: ApprovalRow) -> bool:
    return await _decide_approval(conn, asked, is_approved=True, actor=Actor("ann"), note=None, fields={}, chosen=None)


async def test_an_answer_counts_for_the_question_that_is_open_and_no_longer(rollback_conn: AsyncConnection) -> None:
    scene = await waiting_for(rollback_conn, APPROVE)
    (old,) = await waits_queries.list_approvals(scene.conn)
    await scene.defer_again()
    (new,) = await waits_queries.list_approvals(scene.conn)
    assert not await decide(scene.conn, old), "it was asked anew"
    await scene.conn.execute("update approval set decided_at = clock(), decided_by = 'bob', is_approved = false")
    assert not await decide(scene.conn, new), "somebody was first"
    await scene.conn.execute("update approval set decided_at = null, decided_by = null, is_approved = null")
    assert await decide(scene.conn, new)
    answered = "select array_agg(epoch) from approval where decided_at is not null"
    assert await value(scene.conn, answered) == [new.epoch]
    await scene.conn.execute("update approval set decided_at = null, decided_by = null, is_approved = null")
    assert not await decide(scene.conn, new), "it waits no more"
    assert await value(scene.conn, answered) is None


async def test_who_decides_locks_the_run_before_the_question(conn: AsyncConnection, other: AsyncConnection) -> None:
    await waiting_for(conn, APPROVE)
    (asked,) = await waits_queries.list_approvals(conn)
    is_waiting = "select 1 from pg_locks where not granted and pid = %s"
    async with other.transaction():
        await other.execute("select from run_status for no key update")
        deciding = asyncio.ensure_future(decide(conn, asked))
        await eventually(lambda: value(other, is_waiting, conn.info.backend_pid))
        await other.execute("select from approval for update nowait")
    assert await deciding


async def test_a_time_of_day_becomes_an_instant_once_and_for_the_wait_that_was_read(
    rollback_conn: AsyncConnection,
) -> None:
    scene = await waiting_for(rollback_conn, WaitSpec(kind=WaitKind.CLOCK, until="06:00:00"))

    async def read() -> ClockDue:
        (due,) = await waits_queries.clock_waits_due(scene.conn, shard=0, limit=10)
        return due

    async def set_clock_of(due: ClockDue, seconds: float) -> object:
        row = {**clock_row(due), "wake_at": later(seconds).isoformat()}
        await set_clock_waits(scene.conn, shard=0, epoch=scene.leader, instants=[row])
        return await value(scene.conn, "select (epoch, kind, wake_at) = (2, 'time', %s) from deferral", later(5))

    old = await read()
    await scene.defer_again()
    assert not await set_clock_of(old, 5)
    new = await read()
    assert await set_clock_of(new, 5)
    assert await set_clock_of(new, 9), "as it was"


async def test_a_list_that_is_stale_changes_no_other_wait_and_undoes_no_later_word(
    rollback_conn: AsyncConnection,
) -> None:
    scene = await waiting_for(rollback_conn, WaitSpec(kind=WaitKind.EVENT, name="file"))
    await scene.conn.execute("create temporary table stale on commit drop as select * from deferral")
    look = "select evaluate_waits(array(select row(s.*)::deferral from stale s))"
    await scene.conn.execute("update deferral set wake_at = %s", [later(1)])
    await scene.conn.execute(look)
    assert await value(scene.conn, "select wake_at from deferral") == later(1)
    await scene.defer_again()
    await scene.conn.execute(look)
    assert await value(scene.conn, "select (epoch, wake_at) = (2, %s) from deferral", later(0))


async def test_whoever_ends_a_run_that_somebody_waits_for_tells_so(scene: Scene) -> None:
    await scene.wake()
    await put(scene.conn, make_dag("nobody", {"t": []}))
    await start(scene.conn, "nobody")
    runner = await Runner.join(scene.conn)
    told = {}
    for claim in await runner.claim():
        done = await finish_and_claim(
            scene.conn,
            session=runner.session,
            reports=[end(claim, "success")],
            queues=["default"],
            free=0,
            infra_retries=3,
        )
        told[claim.run_id] = done.has_arrivals
    assert list(told.values()) == [True, False]


async def test_a_run_is_started_when_it_is_due_and_once(scene: Scene) -> None:
    await scene.conn.execute("update deferral set wake_at = %s", [later(1)])
    assert await scene.due() == []
    await set_clock(scene.conn, later(1))
    assert len(await scene.due()) == 1
    await scene.wake()
    await scene.conn.execute("update deferral set wake_at = %s", [later(1)])
    assert await scene.due() == []


async def test_a_late_word_ends_nothing(scene: Scene) -> None:
    over = "select end_waits(array[row(%s, 0, -1, 1, 'skipped', 'late', '1')::wait_result], null)"
    await scene.wake()
    await scene.defer_again()
    await scene.conn.execute(over, [scene.run])
    assert (await scene.state(), await value(scene.conn, ROW)) == ("deferred", "(2,)"), "of the wait before"
    assert await value(scene.conn, "select count(*) from result") == 0
    await scene.conn.execute("update task set epoch = 1 where run_id = %s", [scene.run])
    await scene.mark("success")
    await scene.conn.execute(over, [scene.run])
    assert await scene.state() == "success"


async def test_a_stale_list_starts_nothing_and_leaves_the_new_wait_alone(scene: Scene) -> None:
    (due,) = await scene.due()
    await scene.defer_again()
    assert await scene.start_child(due) is None
    assert (await scene.state(), await value(scene.conn, ROW), await scene.runs()) == ("deferred", "(2,)", 1)
    (due,) = await scene.due()
    await scene.mark("success")
    assert await scene.start_child(due) is None
    assert (await scene.state(), await value(scene.conn, ROW), await scene.runs()) == ("success", None, 1)


@pytest.mark.parametrize("change", ["deleted_at = clock()", "version_id = null"])
async def test_a_dag_that_has_just_gone_is_not_started(scene: Scene, change: str) -> None:
    (due,) = await scene.due()
    await scene.conn.execute(f"update dag set {change} where name = 'child'")  # type: ignore[arg-type]
    assert await scene.start_child(due) is None
    assert (await scene.state(), await scene.runs()) == ("deferred", 1), "the next look says why"


@pytest.mark.parametrize("waits", [True, False])
async def test_a_waited_for_dag_lists_its_waiting_tasks(rollback_conn: AsyncConnection, waits: bool) -> None:
    scene = await Scene.set(rollback_conn, waits=waits)
    await scene.wake()
    assert await value(scene.conn, "select array_agg(name) from dag where has_dependents") == (
        ["child"] if waits else None
    )


async def test_the_run_is_locked_to_start_its_child_and_passed_by_to_wake_it(
    conn: AsyncConnection, other: AsyncConnection
) -> None:
    scene = await Scene.set(conn)
    (due,) = await scene.due()
    await conn.execute("set lock_timeout = '300ms'")
    lock = "select from run_status where run_id = %s for no key update"
    async with other.transaction():
        await other.execute(lock, [scene.run])
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await scene.start_child(due)
    await scene.start_child(due)
    await (await Runner.join(conn)).drain()
    async with other.transaction():
        await other.execute(lock, [scene.run])
        assert await scene.wake_waits() == 0
    assert await scene.wake_waits() == 1
    assert await scene.state() == "success"


async def test_who_has_no_run_yet_is_not_woken_by_its_end(scene: Scene) -> None:
    assert await scene.wake_waits() == 0
    assert await scene.state() == "deferred"


async def test_a_run_that_was_pruned_ends_who_waits_for_it(scene: Scene) -> None:
    await scene.wake()
    child = await value(scene.conn, "delete from run_status where run_id <> %s returning run_id", scene.run)
    await scene.conn.execute("update deferral set wake_at = clock()")
    await scene.wake()
    reason = await value(scene.conn, "select reason from task where run_id = %s", scene.run)
    assert reason == f"run {child} that it waited for was pruned"


@pytest.mark.parametrize("change", ["ended", "deferred again"])
async def test_what_a_wait_that_is_over_left_behind_goes(scene: Scene, change: str) -> None:
    await scene.wake()
    if change == "ended":
        await scene.conn.execute(
            "update task set state = 'success', finished_at = clock() where run_id = %s", [scene.run]
        )
    else:
        await scene.conn.execute("update task set epoch = 7 where run_id = %s", [scene.run])
    await scene.conn.execute("update deferral set wake_at = clock()")
    assert await scene.wake_waits() == 1
    assert await value(scene.conn, "select count(*) from deferral") == 0


async def test_who_still_waits_is_looked_at_again_later(scene: Scene) -> None:
    await scene.wake()
    await set_clock(scene.conn, later(700))
    assert await scene.wake_waits() == 1
    assert await value(scene.conn, "select wake_at from deferral") == later(1300)
