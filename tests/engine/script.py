"""A day of work in short scenes that together make every move that a task or a run can make today."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from psycopg import AsyncConnection

from evertick.db.queries import runners, runs
from evertick.db.queries.runners import QueuedRow
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.domain.dags.spec import MappedGroup
from evertick.domain.retry import RetryPolicy
from evertick.domain.states import TriggerRule
from evertick.engine.dags import pause, unpause
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.remote_attempts import DispatchResult, NotStarted, claim_for_dispatch, end_queued
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine.remote_agents import as_claim, begin
from tests.engine.world import Runner, later, lead, make_dag, put, set_clock, start

CHAIN: dict[str, list[str]] = {"a": [], "b": ["a"], "c": ["b"]}
MARKS = ("success", "failed", "skipped")

Scene = Callable[[AsyncConnection], Awaitable[None]]


async def play(conn: AsyncConnection, scene: Scene) -> None:
    """One scene, and whatever it left open is ended, so that the next finds nothing in line."""
    await scene(conn)
    for runner in await runners.live(conn):
        await mark_runner_dead(conn, session=runner.session, reason="the scene is over", infra_retries=0)
    for run in await runs.list_newest(conn, limit=1000):
        if run.state in ("queued", "running"):
            await cancel(conn, run_id=run.run_id, actor=Actor("script"))


async def everything_goes_well(conn: AsyncConnection) -> None:
    await put(conn, make_dag("well", CHAIN))
    await start(conn, "well")
    await (await Runner.join(conn)).drain()


async def things_fail_and_skip(conn: AsyncConnection) -> None:
    runner = await Runner.join(conn)
    await put(conn, make_dag("ill", CHAIN))
    for outcome in ("failed", "skipped"):
        await start(conn, "ill")
        await runner.drain({"a": outcome})


async def the_first_success_starts_what_waits_for_one(conn: AsyncConnection) -> None:
    rule = {"join": {"trigger_rule": TriggerRule.ONE_SUCCESS}}
    await put(conn, make_dag("early", {"a": [], "b": [], "join": ["a", "b"]}, per_task=rule))
    await start(conn, "early")
    runner = await Runner.join(conn)
    a, _b = await runner.claim()
    await runner.finish(a)
    await runner.drain()


async def a_retry_waits_for_its_time(conn: AsyncConnection) -> None:
    await put(conn, make_dag("flaky", {"a": []}, task_retry=RetryPolicy(retries=1)))
    await start(conn, "flaky")
    runner, leader = await Runner.join(conn), await lead(conn)
    await set_clock(conn, later(0))
    (a,) = await runner.claim()
    await runner.finish(a, "failed", retry_in=5)
    await set_clock(conn, later(6))
    await promote_due_tasks(conn, shard=0, epoch=leader, limit=10)
    await runner.drain()


async def work_is_given_back_and_lost(conn: AsyncConnection) -> None:
    await put(conn, make_dag("lost", {"a": []}, task_rerun_on_loss=False))
    await start(conn, "lost")
    runner = await Runner.join(conn)
    (a,) = await runner.claim()
    await runner.finish(a, "given_back")
    await runner.claim()
    await mark_runner_dead(conn, session=runner.session, reason="gone", infra_retries=3)


async def a_pause_holds_what_is_available_and_what_follows(conn: AsyncConnection) -> None:
    await put(conn, make_dag("held", {"a": [], "b": ["a"], "x": []}))
    runner = await Runner.join(conn)
    run = await start(conn, "held")
    (a,) = await runner.claim(1)
    await pause(conn, dag="held", actor=Actor("script"))
    await runner.finish(a)
    await start(conn, "held")
    await unpause(conn, dag="held", actor=Actor("script"))
    await pause(conn, dag="held", actor=Actor("script"))
    await cancel(conn, run_id=run, actor=Actor("script"))
    for state in MARKS:
        held = await _held_run(conn)
        await mark(conn, TaskKey(held, 2, -1), state=state, actor=Actor("script"))


async def _held_run(conn: AsyncConnection) -> int:
    """A running run of a paused DAG: its tasks are pending."""
    await unpause(conn, dag="held", actor=Actor("script"))
    run = await start(conn, "held")
    await pause(conn, dag="held", actor=Actor("script"))
    return run


async def runs_are_canceled_in_every_state(conn: AsyncConnection) -> None:
    await put(conn, make_dag("ended", {"a": [], "b": ["a"]}, max_active_runs=1))
    runner = await Runner.join(conn)
    running, queued = await start(conn, "ended"), await start(conn, "ended")
    (a,) = await runner.claim()
    await cancel(conn, run_id=queued, actor=Actor("script"))
    await cancel(conn, run_id=running, actor=Actor("script"))
    await runner.finish(a, "killed", reason="canceled")
    untouched = await start(conn, "ended")
    await cancel(conn, run_id=untouched, actor=Actor("script"))
    await clear(conn, run_id=untouched, chosen=await select_tasks(conn, run_id=untouched), actor=Actor("script"))
    await runner.drain()


async def ended_tasks_are_cleared(conn: AsyncConnection) -> None:
    await put(conn, make_dag("again", CHAIN))
    runner = await Runner.join(conn)
    for outcome in ("success", "failed", "skipped"):
        run = await start(conn, "again")
        await runner.drain({"a": outcome})
        await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("script"))
        await runner.drain()


async def a_running_task_and_its_upstream_are_cleared(conn: AsyncConnection) -> None:
    await put(conn, make_dag("both", CHAIN))
    runner = await Runner.join(conn)
    run = await start(conn, "both")
    (a,) = await runner.claim()
    ((b,), _) = await runner.step([(a, "success", {})], free=1)
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["a", "b"]), actor=Actor("script"))
    await runner.finish(b, "killed")
    await runner.drain()


async def unstarted_tasks_are_marked(conn: AsyncConnection) -> None:
    await put(conn, make_dag("by_hand", CHAIN))
    for state in MARKS:
        run = await start(conn, "by_hand")
        await mark(conn, TaskKey(run, 1, -1), state=state, actor=Actor("script"))
        await mark(conn, TaskKey(run, 0, -1), state=state, actor=Actor("script"))


async def running_tasks_are_marked(conn: AsyncConnection) -> None:
    await put(conn, make_dag("stopped", {"a": []}))
    runner = await Runner.join(conn)
    for state in MARKS:
        run = await start(conn, "stopped")
        (a,) = await runner.claim()
        await mark(conn, TaskKey(run, 0, -1), state=state, actor=Actor("script"))
        await runner.finish(a, "killed")


async def ended_tasks_are_marked_as_something_else(conn: AsyncConnection) -> None:
    await put(conn, make_dag("verdict", {"a": [], "b": ["a"]}))
    runner = await Runner.join(conn)
    for first in MARKS:
        for second in MARKS:
            run = await start(conn, "verdict")
            await runner.drain({"b": first})
            if first != second:
                await mark(conn, TaskKey(run, 1, -1), state=second, actor=Actor("script"))
    for state in MARKS:
        blocked = await start(conn, "verdict")
        await runner.drain({"a": "failed"})
        await mark(conn, TaskKey(blocked, 1, -1), state=state, actor=Actor("script"))
        canceled = await start(conn, "verdict")
        await cancel(conn, run_id=canceled, actor=Actor("script"))
        await mark(conn, TaskKey(canceled, 1, -1), state=state, actor=Actor("script"))


async def what_is_handed_over_ends_in_every_way(conn: AsyncConnection) -> None:
    await put(conn, make_dag("far", {"a": []}))
    runner = await Runner.join(conn, executor="far")
    for state in MARKS:
        run, row = await _handed_over(conn, runner)
        await mark(conn, TaskKey(run, 0, -1), state=state, actor=Actor("script"))
        await _end_queued(conn, row, DispatchResult.STOPPED)
    run, row = await _handed_over(conn, runner)
    await cancel(conn, run_id=run, actor=Actor("script"))
    await _end_queued(conn, row, DispatchResult.STOPPED)
    run, row = await _handed_over(conn, runner)
    await _end_queued(conn, row, DispatchResult.GIVEN_BACK)
    (row,) = await claim_for_dispatch(conn, session=runner.session, queues=["default"], free=9)
    await begin(conn, session=row.session, epoch=row.epoch)
    await Runner(conn, row.session).finish(as_claim(row))


async def _handed_over(conn: AsyncConnection, runner: Runner) -> tuple[int, QueuedRow]:
    run = await start(conn, "far")
    (row,) = await claim_for_dispatch(conn, session=runner.session, queues=["default"], free=9)
    return run, row


async def _end_queued(conn: AsyncConnection, row: QueuedRow, kind: DispatchResult) -> None:
    key = TaskKey(row.run_id, row.idx, row.map_index)
    end = NotStarted(key=key, epoch=row.epoch, session=row.session, kind=kind, reason="script")
    await end_queued(conn, [end], infra_retries=3)


async def a_mapped_group_expands_ends_and_is_cleared(conn: AsyncConnection) -> None:
    runner = await Runner.join(conn)
    groups = (MappedGroup(name="g", mapping=Mapping(lists=(MappedList(argument="x", task="a"),))),)
    inside = {"g.b": {"group": "g"}, "g.c": {"group": "g"}}
    shape = {"a": [], "g.b": ["a"], "g.c": ["g.b"], "d": ["g.c"]}
    await put(conn, make_dag("grouped", shape, per_task=inside, mapped_groups=groups))
    for kind, fields in (("failed", {}), ("success", {"result": []}), ("success", {"result": [1, 2]})):
        run = await start(conn, "grouped")
        (source,) = await runner.claim()
        await runner.step([(source, kind, fields)])
    (first, second) = await runner.claim()
    await runner.step([(first, "success", {}), (second, "failed", {})])
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("script"))
    await runner.drain()


SCENES: list[Scene] = [
    what_is_handed_over_ends_in_every_way,
    everything_goes_well,
    things_fail_and_skip,
    the_first_success_starts_what_waits_for_one,
    a_retry_waits_for_its_time,
    work_is_given_back_and_lost,
    a_pause_holds_what_is_available_and_what_follows,
    runs_are_canceled_in_every_state,
    ended_tasks_are_cleared,
    a_running_task_and_its_upstream_are_cleared,
    unstarted_tasks_are_marked,
    running_tasks_are_marked,
    ended_tasks_are_marked_as_something_else,
    a_mapped_group_expands_ends_and_is_cleared,
]
