"""Guards that are locks: what a verb waits for before it touches anything, and what it passes by, with real sessions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import LiteralString

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import schedules
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.retry import RetryPolicy
from evertick.engine.dags import delete, pause, unpause
from evertick.engine.deployments import delete as delete_deployment
from evertick.engine.fire_schedules import _fire_schedules
from evertick.engine.maintenance import promote_due_tasks, reconcile_runs
from evertick.engine.runs import cancel
from evertick.engine.shards import acquire_shard, release_shard
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine.plans import ONE, plan
from tests.engine.world import OWN_LOCKS, Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value
from tests.waiting import eventually

RETRIED = RetryPolicy(retries=3, delay_seconds=0)
PATIENCE = "set lock_timeout = '300ms'"

Verb = Callable[["Scene"], Awaitable[object]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Four sessions on one database: one that acts, one that holds a lock, one that looks, and one that prepares.

    Two runs of a DAG with a schedule: in each a task runs, one has ended, and one waits for its retry, due at T0 + 5 s.
    """

    actor: AsyncConnection
    holder: AsyncConnection
    witness: AsyncConnection
    runner: Runner
    leader: int
    runs: tuple[int, int]


@pytest.fixture
async def scene(database: str) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        actor, holder, witness = [
            await stack.enter_async_context(await connect(database, purpose=Purpose.SCHEDULER)) for _ in range(3)
        ]
        await set_clock(actor, later(0))
        leader = await lead(actor)
        shape = {"ended": [], "running": [], "retried": [], "below": ["running"]}
        await put(actor, make_dag("busy", shape, task_retry=RETRIED, every="@every 60s"))
        runner = await Runner.join(actor)
        runs = []
        for _ in range(2):
            runs.append(await start(actor, "busy"))
            ended, _running, retried = await runner.claim()
            await runner.step([(ended, "success", {}), (retried, "failed", {"retry_in": 5})])
        yield Scene(actor=actor, holder=holder, witness=witness, runner=runner, leader=leader, runs=(runs[0], runs[1]))


async def is_waiting(scene: Scene) -> bool:
    query = "select wait_event_type = 'Lock' from pg_stat_activity where pid = %s"
    return bool(await value(scene.witness, query, scene.actor.info.backend_pid))


async def waits_untouching(scene: Scene, *, held: LiteralString, verb: Verb, untouched: LiteralString) -> None:
    """`verb` waits for what `held` locks, and until then every row that `untouched` finds is still free."""
    async with scene.holder.transaction():
        assert (await scene.holder.execute(held)).rowcount
        doing = asyncio.ensure_future(verb(scene))
        await eventually(lambda: is_waiting(scene))
        async with scene.witness.transaction(force_rollback=True):
            assert (await scene.witness.execute(untouched + " for update nowait")).rowcount
    async with asyncio.timeout(60):
        await doing


# A verb locks the run before it touches a task ------------------------------------------------------------------------

FIRST_RUN: LiteralString = "select from run_status where run_id = 1 for no key update"
TASKS: LiteralString = "select from task"


async def finishes(scene: Scene) -> None:
    await scene.runner.step([(running(run), "success", {}) for run in reversed(scene.runs)])


def running(run: int) -> ExchangeRow:
    """The claim of the task that runs in one of the runs."""
    return ExchangeRow("claim", run, 1, -1, 1, 1, 1, None, "{}", None, 0, 1)


async def clears(scene: Scene) -> None:
    run = scene.runs[0]
    await clear(scene.actor, run_id=run, chosen=await select_tasks(scene.actor, run_id=run), actor=Actor("me"))


async def marks(scene: Scene) -> None:
    assert await mark(scene.actor, TaskKey(scene.runs[0], 1, -1), state="success", actor=Actor("me")) == "asked"


async def cancels(scene: Scene) -> None:
    await cancel(scene.actor, run_id=scene.runs[0], actor=Actor("me"))


async def pauses(scene: Scene) -> None:
    await pause(scene.actor, dag="busy", actor=Actor("me"))


async def deletes(scene: Scene) -> None:
    await delete(scene.actor, dag="busy", actor=Actor("me"))


async def deletes_its_deployment(scene: Scene) -> None:
    assert await delete_deployment(scene.actor, "default", expected=0, actor=Actor("me")) == ["busy"]


async def republishes(scene: Scene) -> None:
    await put(scene.actor, make_dag("busy", ONE, every="@every 30s"))


@pytest.mark.parametrize("verb", [finishes, clears, marks, cancels], ids=lambda verb: verb.__name__)
async def test_a_verb_locks_the_run_before_it_touches_a_task(scene: Scene, verb: Verb) -> None:
    await waits_untouching(scene, held=FIRST_RUN, verb=verb, untouched=TASKS)


async def test_runs_are_locked_in_the_order_of_their_ids(scene: Scene) -> None:
    """Whoever finishes tasks of two runs, in whatever order, waits for the first before it has the second."""
    await waits_untouching(scene, held=FIRST_RUN, verb=finishes, untouched="select from run_status where run_id = 2")


async def test_pausing_locks_the_runs_before_the_dag(scene: Scene) -> None:
    await waits_untouching(scene, held=FIRST_RUN, verb=pauses, untouched="select from dag")


async def test_unpausing_locks_the_runs_before_the_dag(scene: Scene) -> None:
    await pause(scene.actor, dag="busy", actor=Actor("me"))

    async def unpauses(scene: Scene) -> None:
        await unpause(scene.actor, dag="busy", actor=Actor("me"))

    await waits_untouching(scene, held=FIRST_RUN, verb=unpauses, untouched="select from dag")


@pytest.mark.parametrize("verb", [pauses, deletes, deletes_its_deployment, republishes], ids=lambda verb: verb.__name__)
async def test_whoever_changes_a_dag_locks_its_schedules_first(scene: Scene, verb: Verb) -> None:
    held: LiteralString = "select from schedule_state for no key update"
    await waits_untouching(scene, held=held, verb=verb, untouched="select from dag")


async def test_deleting_locks_the_dag_before_it_ends_the_schedules(scene: Scene) -> None:
    held: LiteralString = "select from dag for no key update"
    await waits_untouching(scene, held=held, verb=deletes, untouched="select from schedule")


# What is passed by ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("E1", "D2", "K1")
async def test_two_runners_that_claim_at_once_get_different_tasks_and_do_not_wait(scene: Scene) -> None:
    await put(scene.actor, make_dag("line", {"a": [], "b": []}))
    await start(scene.actor, "line")
    other = Runner(scene.holder, (await Runner.join(scene.holder)).session)
    await scene.actor.execute(PATIENCE)
    async with scene.holder.transaction():
        (theirs,) = await other.claim(1)
        (mine,) = await scene.runner.claim(1)
    assert theirs.idx != mine.idx


@pytest.mark.requirement("E1")
async def test_pausing_and_unpausing_do_not_wait_for_runs_that_are_over(scene: Scene) -> None:
    await cancel(scene.actor, run_id=scene.runs[0], actor=Actor("me"))
    await scene.runner.finish(running(scene.runs[0]), "killed")
    assert await run_state(scene.actor, scene.runs[0]) == "canceled"
    await scene.actor.execute(PATIENCE)
    async with scene.holder.transaction():
        await scene.holder.execute(FIRST_RUN)
        assert await pause(scene.actor, dag="busy", actor=Actor("me"))
        assert await unpause(scene.actor, dag="busy", actor=Actor("me"))


@pytest.mark.requirement("E1", "V11")
async def test_promoting_passes_by_a_run_that_somebody_works_on(scene: Scene) -> None:
    """Also when the run that is passed by has the earlier timer, and only one may be taken."""
    await set_clock(scene.actor, later(6))
    await scene.actor.execute(PATIENCE)
    async with scene.holder.transaction():
        await scene.holder.execute(FIRST_RUN)
        done = await promote_due_tasks(scene.actor, shard=0, epoch=scene.leader, limit=1)
        assert (done.promoted, done.next_due) == (1, later(5))
    states_then = [(await states(scene.actor, run))["retried"] for run in scene.runs]
    assert states_then == ["pending", "available"]
    assert (await promote_due_tasks(scene.actor, shard=0, epoch=scene.leader, limit=1)).promoted == 1


@pytest.mark.requirement("E1", "V11")
async def test_letting_retries_in_passes_by_a_run_that_somebody_works_on(scene: Scene) -> None:
    await set_clock(scene.actor, later(6))
    await promote_due_tasks(scene.actor, shard=0, epoch=scene.leader, limit=10, bound=0)
    assert await value(scene.actor, "select count(*) from retry_queue") == 2
    await scene.actor.execute(PATIENCE)
    async with scene.holder.transaction():
        await scene.holder.execute(FIRST_RUN)
        done = await promote_due_tasks(scene.actor, shard=0, epoch=scene.leader, limit=1)
    assert (done.promoted, done.has_waiting_retries) == (1, True)
    assert [(await states(scene.actor, run))["retried"] for run in scene.runs] == ["pending", "available"]


@pytest.mark.requirement("E1", "V11")
async def test_firing_passes_by_a_schedule_that_somebody_changes(scene: Scene) -> None:
    await put(scene.actor, make_dag("other", ONE, every="@every 60s"))
    (first,), (second,) = [await schedules.of_dag(scene.actor, dag=name) for name in ("busy", "other")]
    await scene.actor.execute(PATIENCE)
    plans = [plan(first), plan(second)]
    await set_clock(scene.actor, later(60))
    async with scene.holder.transaction():
        await scene.holder.execute("select from schedule_state where schedule_id = 1 for no key update")
        won = (await _fire_schedules(scene.actor, shard=0, epoch=scene.leader, plans=plans)).won
    assert won == [second.schedule_id]
    done = await _fire_schedules(scene.actor, shard=0, epoch=scene.leader, plans=plans)
    assert done.won == [first.schedule_id]


@pytest.mark.requirement("E1")
async def test_reconcile_leaves_a_run_alone_that_somebody_works_on(scene: Scene) -> None:
    await scene.actor.execute("delete from lease")
    await scene.actor.execute(PATIENCE)
    async with scene.holder.transaction():
        await scene.holder.execute(FIRST_RUN)
        done = await reconcile_runs(scene.actor, shard=0, epoch=scene.leader, limit=10)
        assert done.repaired == ["lease_missing"]
    assert await value(scene.actor, "select array_agg(run_id) from lease") == [scene.runs[1]]


async def test_admission_passes_by_a_queued_run_that_somebody_works_on(scene: Scene) -> None:
    await put(scene.actor, make_dag("limited", ONE, starts_paused=True))
    locked, free = await start(scene.actor, "limited"), await start(scene.actor, "limited")
    await scene.actor.execute(PATIENCE)
    async with scene.holder.transaction():
        await scene.holder.execute("select from run_status where run_id = %s for no key update", [locked])
        await unpause(scene.actor, dag="limited", actor=Actor("me"))
        assert [await run_state(scene.actor, run) for run in (locked, free)] == ["queued", "running"]


# What is waited for ---------------------------------------------------------------------------------------------------


async def test_admission_of_one_dag_is_one_at_a_time(scene: Scene) -> None:
    """Two that count at once would both see the last free place."""
    await put(scene.actor, make_dag("limited", ONE, max_active_runs=1))
    await scene.actor.execute(PATIENCE)
    async with scene.holder.transaction():
        await scene.holder.execute("select from dag where name = 'limited' for no key update")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            await start(scene.actor, "limited")


async def test_a_standby_does_not_wait_while_the_leader_plans(scene: Scene) -> None:
    await scene.actor.execute(PATIENCE)
    async with scene.holder.transaction():
        await set_clock(scene.holder, later(0))
        await _fire_schedules(scene.holder, shard=0, epoch=scene.leader, plans=[])
        assert await acquire_shard(scene.actor, shard=0, owner="standby", seconds=5) is None


@pytest.mark.requirement("A10")
async def test_of_two_that_wait_to_take_over_one_does(scene: Scene, database: str) -> None:
    await release_shard(scene.actor, shard=0, epoch=scene.leader)
    async with await connect(database, purpose=Purpose.SCHEDULER) as rival:
        async with scene.holder.transaction():
            await _fire_schedules(scene.holder, shard=0, epoch=scene.leader, plans=[])
            takes = [
                asyncio.ensure_future(acquire_shard(conn, shard=0, owner="x", seconds=1e9))
                for conn in (scene.actor, rival)
            ]
            waiting = f"select count(*) = 2 from {OWN_LOCKS} where locktype = 'advisory' and not granted"
            await eventually(lambda: value(scene.witness, waiting))
        taken = [await take for take in takes]
    assert sorted(taken, key=str) == [scene.leader + 1, None]


async def test_a_finish_concurrent_with_a_pause_leaves_nothing_queued(scene: Scene) -> None:
    """The pause waits for the finish, and so sees the successor that it has offered."""
    async with scene.holder.transaction():
        other = Runner(scene.holder, scene.runner.session)
        await other.finish(running(scene.runs[0]))
        doing = asyncio.ensure_future(pauses(scene))
        await eventually(lambda: is_waiting(scene))
    await doing
    assert (await states(scene.actor, scene.runs[0]))["below"] == "pending"
    assert await value(scene.actor, "select count(*) from ready_task") == 0
