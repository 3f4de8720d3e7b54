"""Backfills: which instants get a run, in which order, how many at once, and what happens when somebody interferes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries import backfills as backfills_queries
from evertick.db.queries import runs
from evertick.db.queries.backfills import BackfillRow
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.params import ParamSpec, ParamType
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.errors import Conflict, NotFound, NotLeader, UserError
from evertick.domain.retention import Pace
from evertick.domain.schedules.preview import Reprocess, fires_between
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine import backfills
from evertick.engine.backfills import (
    Advanced,
    BackfillRequest,
    BackfillStep,
    advance,
    advance_backfill,
    create,
    preview,
)
from evertick.engine.dags import delete, pause, unpause
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.retention import Kind, PruneGrant, prune_kind, prune_runs
from evertick.engine.runs import cancel as cancel_run
from evertick.engine.runs import trigger, trigger_run
from evertick.engine.schedules import put_schedule
from evertick.engine.shards import poll_work
from evertick.engine.tasks import clear, mark, select_tasks
from tests.engine import invariants
from tests.engine.world import T0, Runner, lead, make_dag, put, run_state, set_clock, value
from tests.waiting import eventually

HOURLY = "0 * * * *"
BEGIN = T0 - timedelta(hours=10)
ALL = [BEGIN + timedelta(hours=hour) for hour in range(11)]


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


def wish(**fields: Any) -> BackfillRequest:
    return BackfillRequest(**{"dag": "d", "first": BEGIN, "last": T0, **fields})


class Scene:
    """A DAG of one task, the clock at T0, a runner, and the lead."""

    def __init__(self, conn: AsyncConnection, epoch: int, runner: Runner) -> None:
        self.conn, self.epoch, self.runner = conn, epoch, runner

    @classmethod
    async def begin(cls, conn: AsyncConnection, **options: Any) -> Scene:
        await invariants.install(conn)
        await set_clock(conn, T0)
        await put(conn, make_dag("d", {"a": []}, **{"every": HOURLY, **options}))
        return cls(conn, await lead(conn), await Runner.join(conn))

    async def make(self, request: str = "r", **fields: Any) -> int:
        made, _ = await create(self.conn, wish(**fields), request=request, actor=Actor("test"))
        return made.id

    async def step(self, backfill_id: int) -> Advanced:
        return await advance(self.conn, shard=0, epoch=self.epoch, backfill_id=backfill_id)

    async def finish_all(self, kind: str = "success") -> None:
        """Everything that runs ends."""
        for claim in await self.runner.claim():
            await self.runner.finish(claim, kind, no_retry=True)

    async def complete(self, backfill_id: int, kind: str = "success") -> list[datetime]:
        """To its end; the instants of the runs in the order in which they were made."""
        for _ in range(100):
            if (await self.step(backfill_id)).is_over:
                return await self.instants(backfill_id)
            await self.finish_all(kind)
        raise AssertionError(f"no end: {await self.row(backfill_id)}")

    async def instants(self, backfill_id: int) -> list[datetime]:
        query = "select fire_at from backfill_run where backfill_id = %s order by run_id"
        return [row[0] for row in await (await self.conn.execute(query, [backfill_id])).fetchall()]

    async def row(self, backfill_id: int) -> BackfillRow:
        assert await invariants.violations(self.conn) == []
        return await backfills.find_backfill(self.conn, backfill_id)

    async def fired(self, *instants: datetime, kind: str = "success") -> list[int]:
        """The schedule itself fires at these instants, and its runs end so."""
        for instant in instants:
            await self.conn.execute("update schedule_state set next_due = %s", [instant])
            await set_clock(self.conn, instant)
            assert (await fire_schedules(self.conn, shard=0, epoch=self.epoch, batch=10)).runs == 1
            await self.finish_all(kind)
        await set_clock(self.conn, T0)
        await self.conn.execute("update schedule_state set next_due = %s", [T0 + timedelta(hours=1)])
        found = await (await self.conn.execute("select run_id from run where kind = 'scheduled' order by 1")).fetchall()
        return [row[0] for row in found]


@pytest.fixture
async def scene(conn: AsyncConnection) -> Scene:
    return await Scene.begin(conn)


@pytest.mark.requirement("S3")
async def test_a_range_is_run_from_its_oldest_instant_with_both_ends(scene: Scene) -> None:
    made = await scene.make(parallel=3)
    assert await scene.complete(made) == ALL
    row = await scene.row(made)
    assert (row.state, row.total, row.made, row.succeeded, row.left_alone, row.open_runs) == ("done", 11, 11, 11, 0, 0)
    assert (row.done, row.position) == (11, T0)
    assert await value(scene.conn, "select distinct kind::text || triggered_by from run") == f"backfillbackfill {made}"


async def test_the_newest_may_go_first(scene: Scene) -> None:
    assert await scene.complete(await scene.make(newest_first=True, parallel=2)) == ALL[::-1]


async def test_never_more_runs_are_open_than_its_limit(scene: Scene) -> None:
    made = await scene.make(parallel=4)
    for _ in range(3):
        assert (await scene.step(made)).is_over is False
        assert await value(scene.conn, "select count(*) from run_status where state = 'running'") == 4
    (first, *_) = await scene.runner.claim(1)
    await scene.runner.finish(first)
    assert (await scene.step(made)).made == 1
    assert (await scene.row(made)).open_runs == 4


@pytest.mark.requirement("I7")
@pytest.mark.parametrize("newest_first", [False, True])
@pytest.mark.parametrize("expression", ["30 2 * * *", "0 * * * *", "*/30 1-3 * * *"])
async def test_the_instants_are_those_that_fire_across_both_clock_changes(
    scene: Scene, expression: str, newest_first: bool
) -> None:
    spec = parse_schedule(expression, timezone="Europe/Berlin")
    for first, last in (("2025-03-29T12:00", "2025-03-30T12:00"), ("2025-10-25T12:00", "2025-10-26T12:00")):
        expected = fires_between(spec, utc(first), utc(last), 1000)
        options = {"spec": spec, "first": utc(first), "last": utc(last), "parallel": 1000}
        found = await scene.complete(await scene.make(first, newest_first=newest_first, **options))
        assert found == (expected[::-1] if newest_first else expected)


@pytest.mark.parametrize(
    ("reprocess", "again"), [(Reprocess.NONE, []), (Reprocess.FAILED, [ALL[1], ALL[2]]), (Reprocess.ALL, ALL[:3])]
)
async def test_an_instant_that_had_a_run_gets_another_only_if_asked(
    scene: Scene, reprocess: Reprocess, again: list[datetime]
) -> None:
    await scene.fired(ALL[0])
    await scene.fired(ALL[1], kind="failed")
    (*_, last) = await scene.fired(ALL[2])
    await scene.conn.execute("update run_status set state = 'queued' where run_id = %s", [last])
    await scene.conn.execute("update run_status set state = 'canceled' where run_id = %s", [last])
    outlook = await preview(scene.conn, wish(reprocess=reprocess))
    assert outlook.existing == {"success": 1, "failed": 1, "canceled": 1}
    assert outlook.sample == (*again, *ALL[3:])[:5]
    newest = await preview(scene.conn, wish(reprocess=reprocess, newest_first=True, last=ALL[3]))
    assert newest.sample == (ALL[3], *again[::-1])
    made = await scene.make(reprocess=reprocess, parallel=100)
    assert sorted(await scene.complete(made)) == [*again, *ALL[3:]]
    row = await backfills.find_backfill(scene.conn, made)
    assert (row.made, row.left_alone) == (outlook.new_runs(reprocess), 3 - len(again))


async def test_an_instant_whose_run_is_still_open_is_left_alone(scene: Scene) -> None:
    first = await scene.make(parallel=2)
    await scene.step(first)
    second = await scene.make("again", reprocess=Reprocess.ALL, parallel=100)
    await scene.step(second)
    assert await scene.instants(second) == ALL[2:]
    row = await scene.row(second)
    assert (row.left_alone, row.open_runs, row.state) == (2, 9, "running"), "made are all of them, ended none"


async def test_what_another_backfill_ran_counts_as_run(scene: Scene) -> None:
    await scene.complete(await scene.make(parallel=100), kind="failed")
    none = await scene.make("none", parallel=100)
    assert await scene.complete(none) == []
    assert (await scene.row(none)).left_alone == 11
    assert await scene.complete(await scene.make("failed", reprocess=Reprocess.FAILED, parallel=100)) == ALL


@pytest.mark.requirement("V1")
async def test_what_the_schedule_has_still_to_fire_is_left_to_it(scene: Scene) -> None:
    """Its cursor stands at the last two instants of the range: no run of ours before it has decided."""
    await scene.conn.execute("update schedule_state set next_due = %s", [ALL[9]])
    made = await scene.make(parallel=100)
    await scene.step(made)
    await scene.finish_all()
    assert await scene.instants(made) == ALL[:9]
    assert (await scene.step(made)).is_over is False
    assert (await fire_schedules(scene.conn, shard=0, epoch=scene.epoch, batch=10)).runs == 1
    # Fired at the last; the one before was skipped on record, and so is missing.
    await scene.finish_all()
    assert await scene.complete(made) == ALL[:10]
    assert (await scene.row(made)).left_alone == 1


async def test_an_instant_whose_jitter_is_still_running_is_left_to_the_schedule(conn: AsyncConnection) -> None:
    jittered = NamedSchedule(name="main", spec=parse_schedule(HOURLY, jitter_seconds=600))
    scene = await Scene.begin(conn, every=None, schedules=(jittered,))
    delay = await value(conn, "select delay_seconds from schedule")
    assert isinstance(delay, float) and delay > 0
    await conn.execute("update schedule_state set next_due = %s", [T0 + timedelta(seconds=delay)])
    made = await scene.make(parallel=100)
    await scene.step(made)
    assert await scene.instants(made) == ALL[:-1]
    await set_clock(conn, T0 + timedelta(seconds=delay))
    assert (await fire_schedules(conn, shard=0, epoch=scene.epoch, batch=10)).runs == 1
    await scene.finish_all()
    assert await scene.complete(made) == ALL[:-1]
    assert (await backfills.find_backfill(conn, made)).left_alone == 1


@pytest.mark.parametrize("held", ["is_paused = true", "error = 'cannot be planned'"])
async def test_a_schedule_that_fires_nothing_keeps_nobody_waiting(scene: Scene, held: str) -> None:
    await scene.conn.execute("update schedule_state set next_due = %s", [ALL[2]])
    await scene.conn.execute(f"update schedule_state set {held}")  # type: ignore[arg-type]
    assert await scene.complete(await scene.make(parallel=100)) == ALL


@pytest.mark.requirement("V6")
async def test_max_active_runs_holds_and_the_schedule_goes_first(conn: AsyncConnection) -> None:
    scene = await Scene.begin(conn, max_active_runs=1)
    made = await scene.make(parallel=5)
    assert (await scene.step(made)).made == 1
    assert (await scene.step(made)).made == 0
    await set_clock(conn, T0 + timedelta(hours=1))
    assert (await fire_schedules(conn, shard=0, epoch=scene.epoch, batch=10)).runs == 1
    assert (await scene.step(made)).made == 0
    await scene.finish_all()
    # The place that became free is the schedule's, in the same transaction.
    assert await value(
        conn, "select r.kind::text from run r join run_status s using (run_id) where s.state = 'running'"
    ) == ("scheduled")
    assert (await scene.step(made)).made == 0
    await scene.finish_all()
    assert (await scene.step(made)).made == 1


async def test_its_tasks_stand_behind_those_of_everybody_else(conn: AsyncConnection) -> None:
    scene = await Scene.begin(conn, task_priority=9)
    made = await scene.make(parallel=3)
    await scene.step(made)
    await put(conn, make_dag("urgent", {"b": []}, task_priority=1))
    urgent = await trigger_run(conn, dag_id=2, params={}, actor=Actor("test"))
    assert urgent is not None
    claims = await scene.runner.claim(2)
    assert claims[0].run_id == urgent.run_id
    assert await value(conn, "select array_agg(distinct rank) from ready_task") == [9]
    # Pausing takes them out of that line, unpausing puts them back, canceling ends them.
    await pause(conn, dag="d", actor=Actor("test"))
    assert await value(conn, "select count(*) from ready_task") == 0
    await unpause(conn, dag="d", actor=Actor("test"))
    assert await value(conn, "select array_agg(rank) from ready_task") == [9, 9]
    for run_id in (row[0] for row in await (await conn.execute("select run_id from ready_task")).fetchall()):
        await cancel_run(conn, run_id=run_id, actor=Actor("test"))
    assert await value(conn, "select count(*) from ready_task") == 0
    assert await invariants.violations(conn) == []


async def test_runs_of_a_paused_dag_wait_and_a_deleted_one_ends_it(scene: Scene) -> None:
    made = await scene.make()
    await pause(scene.conn, dag="d", actor=Actor("test"))
    assert (await scene.step(made)).made == 1
    (run_id,) = (await (await scene.conn.execute("select run_id from backfill_run")).fetchall())[0]
    assert await run_state(scene.conn, run_id) == "queued"
    assert (await scene.step(made)).made == 0, "no more than may be open at once"
    await unpause(scene.conn, dag="d", actor=Actor("test"))
    assert await run_state(scene.conn, run_id) == "running"
    await delete(scene.conn, dag="d", actor=Actor("test"))
    await scene.finish_all()
    assert (await scene.step(made)).is_over
    row = await scene.row(made)
    assert (row.state, row.reason, row.succeeded) == ("failed", "its DAG was deleted", 1)


async def test_it_is_paused_resumed_and_canceled(scene: Scene) -> None:
    made = await scene.make(parallel=2)
    await scene.step(made)
    assert (await backfills.pause(scene.conn, backfill_id=made, actor=Actor("me"))).state == "paused"
    await scene.finish_all()
    done = await scene.step(made)
    assert (done.made, done.ended) == (0, 2)
    with pytest.raises(Conflict, match="is paused"):
        await backfills.pause(scene.conn, backfill_id=made, actor=Actor("me"))
    assert (await backfills.unpause(scene.conn, backfill_id=made, actor=Actor("me"))).state == "running"
    with pytest.raises(Conflict, match="is running"):
        await backfills.unpause(scene.conn, backfill_id=made, actor=Actor("me"))
    assert (await scene.step(made)).made == 2
    (claim,) = await scene.runner.claim(1)
    canceled = await backfills.cancel(scene.conn, backfill_id=made, leaves_runs=False, actor=Actor("me"))
    assert (canceled.runs, canceled.asked) == (2, 1)
    await scene.runner.finish(claim, "failed")
    assert (await scene.step(made)).is_over
    row = await scene.row(made)
    assert (row.state, row.succeeded, row.canceled, row.made) == ("canceled", 2, 2, 4)
    for verb in (backfills.pause, backfills.unpause):
        with pytest.raises(Conflict, match="is canceled"):
            await verb(scene.conn, backfill_id=made, actor=Actor("me"))
    with pytest.raises(Conflict, match="is over"):
        await backfills.cancel(scene.conn, backfill_id=made, leaves_runs=False, actor=Actor("me"))
    with pytest.raises(NotFound, match="no backfill 99"):
        await backfills.cancel(scene.conn, backfill_id=99, leaves_runs=False, actor=Actor("me"))
    verbs = await value(
        scene.conn, "select array_agg(action order by entry_id) from audit_log where dag_id is not null"
    )
    assert [verb for verb in verbs if verb in ("backfill", "pause", "unpause", "cancel")] == [  # type: ignore[attr-defined]
        "backfill",
        "pause",
        "unpause",
        "cancel",
    ]


async def test_a_canceled_one_may_leave_its_runs(scene: Scene) -> None:
    made = await scene.make(parallel=2)
    await scene.step(made)
    canceled = await backfills.cancel(scene.conn, backfill_id=made, leaves_runs=True, actor=Actor("me"))
    assert (canceled.runs, canceled.asked) == (0, 0)
    assert (await scene.step(made)).is_over is False
    await scene.finish_all()
    assert (await scene.step(made)).is_over
    assert (await scene.row(made)).succeeded == 2


@pytest.mark.parametrize("verb", ["pause", "cancel"])
async def test_one_whose_last_runs_end_later_stays_as_it_was_left(scene: Scene, verb: str) -> None:
    made = await scene.make(parallel=100)
    await scene.step(made)
    if verb == "pause":
        await backfills.pause(scene.conn, backfill_id=made, actor=Actor("me"))
    else:
        await backfills.cancel(scene.conn, backfill_id=made, leaves_runs=True, actor=Actor("me"))
    await scene.finish_all()
    await scene.step(made)
    row = await scene.row(made)
    assert (row.state, row.succeeded) == ("paused" if verb == "pause" else "canceled", 11)
    if verb == "pause":
        await backfills.unpause(scene.conn, backfill_id=made, actor=Actor("me"))
        assert (await scene.step(made)).is_over
        assert (await scene.row(made)).state == "done"


async def test_it_counts_its_runs_as_they_are_after_they_were_cleared_or_marked(scene: Scene) -> None:
    conn, made = scene.conn, await scene.make(last=BEGIN + timedelta(hours=2), parallel=3)
    await scene.complete(made, "failed")

    async def counted() -> tuple[str, int, int, int, int]:
        row = await scene.row(made)
        return row.state, row.open_runs, row.succeeded, row.failed, row.canceled

    assert await counted() == ("done", 0, 0, 3, 0)
    first, second, third = [run.run_id for run in await backfills_queries.failed_runs(conn, backfill_id=made)]
    await mark(conn, TaskKey(first, 0, -1), state="success", actor=Actor("me"))
    for run in (second, third):
        await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["a"]), actor=Actor("me"))
    assert await counted() == ("done", 3, 0, 0, 0)
    assert (await poll_work(conn, shard=0, epoch=scene.epoch, lost_after=90.0)).backfills == [made]
    await scene.step(made)
    assert await counted() == ("done", 2, 1, 0, 0)
    await cancel_run(conn, run_id=third, actor=Actor("me"))
    await scene.finish_all()
    # One more opens and ends before the leader counts: it counts once.
    await mark(conn, TaskKey(second, 0, -1), state="failed", actor=Actor("me"))
    assert (await scene.step(made)).is_over
    assert await counted() == ("done", 0, 1, 1, 1)
    assert [run.run_id for run in await backfills_queries.failed_runs(conn, backfill_id=made)] == [second]


@pytest.mark.requirement("I3", "V9")
async def test_a_clear_waits_for_the_backfill_before_it_locks_the_run(scene: Scene, database: str) -> None:
    made = await scene.make(last=BEGIN)
    await scene.complete(made, "failed")
    run = int(str(await value(scene.conn, "select run_id from run")))
    chosen = await select_tasks(scene.conn, run_id=run, names=["a"])
    verbs: list[Callable[[], Awaitable[object]]] = [
        lambda: mark(scene.conn, TaskKey(run, 0, -1), state="success", actor=Actor("me")),
        lambda: clear(scene.conn, run_id=run, chosen=chosen, actor=Actor("me")),
    ]
    is_waiting = "select 1 from pg_locks where not granted and pid = %s"
    async with await connect(database, purpose=Purpose.SCHEDULER) as holder:
        for verb in verbs:
            async with holder.transaction():
                await holder.execute("select from backfill for no key update")
                doing = asyncio.ensure_future(verb())
                await eventually(lambda: value(holder, is_waiting, scene.conn.info.backend_pid))
                await holder.execute("select from run_status for no key update nowait")
            await doing


async def test_the_same_request_twice_is_one_backfill(scene: Scene) -> None:
    made = [
        await create(scene.conn, wish(), request=request, actor=Actor("test")) for request in ("other", "key", "key")
    ]
    assert [(each.id, each.is_new) for each, _ in made] == [(1, True), (2, True), (2, False)]


async def test_the_same_request_for_something_else_is_refused(scene: Scene) -> None:
    """Where the answer was lost it would seem that this was made, too."""
    await put(scene.conn, make_dag("other", {"a": []}, every=HOURLY))
    number = ParamSpec(name="n", type=ParamType.INTEGER, default=1)
    await put(scene.conn, make_dag("d", {"a": []}, every=HOURLY, params=(number,)))
    beside = NamedSchedule(name="other", spec=parse_schedule(HOURLY))
    await put_schedule(scene.conn, dag="d", schedule=beside, actor=Actor("test"))
    for request, asked in (("key", wish(schedule="main", params={"n": 2})), ("open", wish(schedule="main", last=None))):
        await create(scene.conn, asked, request=request, actor=Actor("test"))
        assert not (await create(scene.conn, asked, request=request, actor=Actor("test")))[0].is_new
    for other in (
        {"dag": "other"},
        {"first": BEGIN - timedelta(hours=1)},
        {"last": T0 - timedelta(hours=1)},
        {"reprocess": Reprocess.ALL},
        {"newest_first": True},
        {"schedule": None, "spec": parse_schedule("@every 2h")},
        {"schedule": "other"},
        {"params": {"n": 3}},
    ):
        asked = wish(**{"schedule": "main", "params": {"n": 2} if other.get("dag") is None else None, **other})
        with pytest.raises(Conflict, match="belongs to another backfill"):
            await create(scene.conn, asked, request="key", actor=Actor("test"))
    await set_clock(scene.conn, T0 + timedelta(hours=5))
    again, _ = await create(scene.conn, wish(schedule="main", last=None), request="open", actor=Actor("test"))
    assert not again.is_new, "its end was left open"


@pytest.mark.parametrize("verb", ["pause", "cancel", "fail", "delete"])
async def test_what_is_done_to_one_is_done_to_no_other(scene: Scene, verb: str) -> None:
    await put(scene.conn, make_dag("other", {"a": []}, every=HOURLY))
    others = [await scene.make(name, dag="other", parallel=2) for name in ("before", "after")]
    made = await scene.make("this", parallel=2)
    for each in (*others, made):
        await scene.step(each)
    (first, second), before = others, [await backfills.find_backfill(scene.conn, each) for each in others]
    assert await scene.instants(first) == ALL[:2] and await scene.instants(second) == ALL[2:4]
    match verb:
        case "pause":
            await backfills.pause(scene.conn, backfill_id=made, actor=Actor("me"))
            assert [await scene.row(each) for each in others] == before
            await backfills.unpause(scene.conn, backfill_id=made, actor=Actor("me"))
        case "cancel":
            await backfills.cancel(scene.conn, backfill_id=made, leaves_runs=False, actor=Actor("me"))
        case "fail":
            assert await backfills.fail_backfill(scene.conn, shard=0, epoch=scene.epoch, backfill_id=made, reason="x")
            assert not await backfills.fail_backfill(
                scene.conn, shard=0, epoch=scene.epoch, backfill_id=made, reason="y"
            )
        case "delete":
            await delete(scene.conn, dag="d", actor=Actor("me"))
            await scene.step(made)
    assert [await scene.row(each) for each in others] == before
    told = "select count(*) from audit_log where action in ('pause', 'unpause', 'cancel') and detail ? 'backfill'"
    assert await value(scene.conn, told) == {"pause": 2, "cancel": 1}.get(verb, 0)
    assert await value(scene.conn, "select count(*) from run_status where state = 'running' and dag_id = 2") == 4
    await scene.finish_all()
    assert (await scene.row(made)).made == 2
    assert sorted(await scene.complete(first) + await scene.complete(second)) == ALL
    for row in [await scene.row(each) for each in others]:
        assert row.succeeded == row.made, "each counts its own"
    (mine,) = await (
        await scene.conn.execute(
            "select created, skipped, succeeded, state from backfill where backfill_id = %s", [made]
        )
    ).fetchall()
    assert mine[:3] == (2, 0, 0)


# Races and crashes ----------------------------------------------------------------------------------------------------


@pytest.mark.requirement("I3", "V1")
async def test_an_old_leader_and_an_old_position_make_nothing(scene: Scene) -> None:
    made = await scene.make(parallel=2)
    old = scene.epoch
    await scene.step(made)
    await scene.finish_all()
    step = BackfillStep(position=None, instants=ALL[:2], is_all=False)
    stale = await advance_backfill(scene.conn, step, shard=0, epoch=old, backfill_id=made)
    assert (stale.made, stale.moved) == (0, False)
    scene.epoch = await lead(scene.conn)
    with pytest.raises(NotLeader):
        await advance(scene.conn, shard=0, epoch=old, backfill_id=made)
    assert await scene.complete(made) == ALL


@pytest.mark.requirement("I3")
async def test_two_that_step_at_once_make_each_run_once(scene: Scene, database: str) -> None:
    made = await scene.make(parallel=100)
    await set_clock(scene.conn, T0)
    async with await connect(database, purpose=Purpose.SCHEDULER) as other:
        await set_clock(other, T0)
        steps = [advance(each, shard=0, epoch=scene.epoch, backfill_id=made) for each in (scene.conn, other)]
        done = await asyncio.gather(*steps)
    assert sorted(each.made for each in done) == [0, 11]
    assert await scene.instants(made) == ALL


@pytest.mark.parametrize("verb", ["pause", "cancel"])
async def test_a_pause_or_cancel_that_comes_first_lets_a_planned_step_make_nothing(
    scene: Scene, database: str, verb: str
) -> None:
    await scene.make("another", parallel=3)
    made = await scene.make(parallel=3)

    async def planned() -> Advanced:
        """A step whose instants were chosen before anybody interfered."""
        step = BackfillStep(position=None, instants=ALL, is_all=True)
        return await advance_backfill(scene.conn, step, shard=0, epoch=scene.epoch, backfill_id=made)

    async with await connect(database, purpose=Purpose.SCHEDULER) as person:
        async with person.transaction():
            if verb == "pause":
                await backfills.pause(person, backfill_id=made, actor=Actor("me"))
            else:
                await backfills.cancel(person, backfill_id=made, leaves_runs=False, actor=Actor("me"))
            during = await planned()
        after = await planned()
    assert (during.made, during.is_over) == (0, False), "it is passed by, and nobody waits"
    assert (after.made, after.is_over) == (0, True)
    assert await value(scene.conn, "select count(*) from run") == 0


@pytest.mark.requirement("V6")
async def test_a_step_waits_for_whoever_changes_the_dag(scene: Scene, database: str) -> None:
    """A DAG whose limit is just being changed is decided about when that is committed."""
    made = await scene.make(parallel=3)
    async with await connect(database, purpose=Purpose.SCHEDULER) as person:
        async with person.transaction():
            await person.execute("update dag set max_active_runs = 1")
            stepping = asyncio.ensure_future(scene.step(made))
            is_waiting = "select count(*) > 0 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
            await eventually(lambda: value(person, is_waiting))
        assert (await stepping).made == 1


@pytest.mark.requirement("I3", "V9")
async def test_a_cancel_locks_all_its_runs_before_it_ends_the_first(scene: Scene, database: str) -> None:
    made = await scene.make(parallel=2)
    await scene.step(made)
    async with await connect(database, purpose=Purpose.SCHEDULER) as holder:
        async with holder.transaction():
            await holder.execute(
                "select from run_status where run_id = (select max(run_id) from run) for no key update"
            )
            doing = asyncio.ensure_future(
                backfills.cancel(scene.conn, backfill_id=made, leaves_runs=False, actor=Actor("me"))
            )
            is_waiting = "select 1 from pg_locks where not granted and pid = %s"
            await eventually(lambda: value(holder, is_waiting, scene.conn.info.backend_pid))
            await holder.execute("select from task for update nowait")
        await doing
    assert await value(scene.conn, "select count(*) from run_status where state = 'canceled'") == 2


async def test_a_step_that_is_rolled_back_is_simply_made_again(scene: Scene) -> None:
    made = await scene.make(parallel=4)
    async with scene.conn.transaction(force_rollback=True):
        assert (await scene.step(made)).made == 4
    assert (await scene.row(made)).position is None
    assert await scene.complete(made) == ALL


async def test_one_that_cannot_be_planned_ends_alone(scene: Scene) -> None:
    broken, sound = await scene.make("broken"), await scene.make("sound")
    await scene.conn.execute('update backfill set spec = \'{"kind": "cron"}\' where backfill_id = %s', [broken])
    assert (await scene.step(broken)).is_over
    row = await scene.row(broken)
    assert (row.state, row.reason) == ("failed", "InvalidSchedule: a schedule of kind cron needs 'expression'")
    assert await scene.complete(sound) == ALL


async def test_one_whose_run_the_database_refuses_ends_alone(scene: Scene) -> None:
    made = await scene.make()
    await scene.conn.execute("alter table run add constraint no_backfill check (kind <> 'backfill')")
    assert (await scene.step(made)).is_over
    assert "PostgreSQL rejected its next run" in str((await scene.row(made)).reason)


async def test_runs_that_were_pruned_keep_it_from_nothing(scene: Scene) -> None:
    made = await scene.make(parallel=3)
    await scene.step(made)
    await scene.finish_all()
    mandate = PruneGrant(shard=0, epoch=scene.epoch, before=T0 + timedelta(days=1), actor=Actor("test"))
    walked = await prune_runs(scene.conn, mandate, after=0, pace=Pace(), now=T0 + timedelta(days=2))
    assert walked.pruned == 3
    assert await value(scene.conn, "select count(*) from backfill_run") == 0
    assert await scene.complete(made) == ALL[3:]
    assert (await scene.row(made)).state == "done"


async def test_one_that_is_over_is_pruned_and_no_other(scene: Scene) -> None:
    conn = scene.conn
    over, late, running, left = [
        await scene.make(name, reprocess=Reprocess.ALL) for name in ("over", "late", "running", "left")
    ]
    await scene.complete(over)
    await scene.step(left)
    await backfills.cancel(conn, backfill_id=left, leaves_runs=True, actor=Actor("ann"))
    await set_clock(conn, T0 + timedelta(days=2))
    await backfills.cancel(conn, backfill_id=late, leaves_runs=False, actor=Actor("ann"))
    elsewhere = await scene.make("elsewhere")
    await conn.execute(
        "update backfill set state = 'done', finished_at = created_at, shard = 1 where backfill_id = %s", [elsewhere]
    )
    mandate = PruneGrant(shard=0, epoch=scene.epoch, before=T0 + timedelta(days=1), actor=Actor("test"))
    await conn.execute("update backfill set finished_at = %s where backfill_id = %s", [T0, elsewhere])
    with pytest.raises(NotLeader):
        await prune_kind(conn, replace(mandate, epoch=scene.epoch - 1), Kind.BACKFILLS, pace=Pace())
    # Of every shard: retention is the first one's, for all.
    assert (await prune_kind(conn, mandate, Kind.BACKFILLS, pace=Pace())).pruned == 2
    assert await value(conn, "select array_agg(backfill_id order by backfill_id) from backfill") == [
        late,
        running,
        left,
    ]
    # The runs that it left have ended and are counted: now it goes too.
    await scene.finish_all()
    await scene.step(left)
    assert (await prune_kind(conn, mandate, Kind.BACKFILLS, pace=Pace())).pruned == 1
    assert (
        await value(
            conn, "select detail->>'backfills' from audit_log where action = 'prune' order by entry_id desc limit 1"
        )
        == "1"
    )


@pytest.mark.parametrize("newest_first", [False, True])
async def test_twenty_years_of_seconds_cost_a_step_no_more_than_a_few(
    conn: AsyncConnection, newest_first: bool
) -> None:
    scene = await Scene.begin(conn)
    spec = parse_schedule("* * * * * *")
    made = await scene.make(spec=spec, first=T0 - timedelta(days=7300), newest_first=newest_first, parallel=2)
    assert (await scene.row(made)).total == 7300 * 86_400 + 1
    assert (await preview(conn, wish(spec=spec, first=T0 - timedelta(days=7300)))).existing is None
    assert (await scene.step(made)).made == 2
    assert await value(conn, "select count(*) from backfill_run") == 2


@pytest.mark.requirement("I7")
@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        # It begins or ends within the hour that never was, or within the first or the second copy of the one that came twice.
        ("2025-03-30T01:00", "2025-03-30T02:00", ["2025-03-30T01:00", "2025-03-30T02:00"]),
        ("2025-03-30T00:30", "2025-03-30T01:00", ["2025-03-30T01:00"]),
        ("2025-10-26T00:30", "2025-10-26T01:30", ["2025-10-26T01:00"]),
        ("2025-10-26T00:00", "2025-10-26T00:59", ["2025-10-26T00:00"]),
    ],
)
async def test_a_range_may_end_at_a_clock_change(scene: Scene, first: str, last: str, expected: list[str]) -> None:
    hourly = parse_schedule("0 * * * *", timezone="Europe/Berlin")
    made = await scene.make(spec=hourly, first=utc(first), last=utc(last), parallel=100)
    assert await scene.complete(made) == [utc(each) for each in expected]


# What cannot be asked for -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"dag": "e"}, "no DAG 'e'"),
        ({"schedule": "nightly"}, "It has: main."),
        ({"last": T0 + timedelta(seconds=1)}, "in the future"),
        ({"first": T0, "last": BEGIN}, "swap them"),
        ({"first": BEGIN + timedelta(minutes=1), "last": BEGIN + timedelta(minutes=2)}, "does not fire from"),
        ({"parallel": 0}, "from 1 to 1000"),
        ({"parallel": 1001}, "from 1 to 1000"),
        ({"params": {"x": 1}}, "x"),
    ],
)
async def test_a_wish_that_cannot_be_is_refused_clearly(scene: Scene, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        await preview(scene.conn, wish(**fields))
    assert words in str(refusal.value)
    assert await value(scene.conn, "select count(*) from backfill") == 0


async def test_one_of_several_schedules_is_named_and_none_needs_an_expression(conn: AsyncConnection) -> None:
    several = tuple(NamedSchedule(name=name, spec=parse_schedule(HOURLY)) for name in ("early", "late"))
    scene = await Scene.begin(conn, every=None, schedules=several)
    with pytest.raises(UserError, match=r"choose one with --schedule. It has: early, late"):
        await preview(conn, wish())
    outlook = await preview(conn, wish(schedule="late"))
    assert (outlook.schedule, outlook.total, outlook.sample) == ("late", 11, tuple(ALL[:5]))
    assert (await preview(conn, wish(schedule="late", newest_first=True))).sample == tuple(ALL[:-6:-1])
    await put(conn, make_dag("idle", {"a": []}))
    with pytest.raises(UserError, match="with --cron or --every"):
        await preview(conn, wish(dag="idle"))
    made = await scene.make(dag="idle", spec=parse_schedule("@every 2h"), parallel=100)
    assert await scene.complete(made) == ALL[::2]


async def test_an_ended_run_of_it_is_as_it_was_made(scene: Scene) -> None:
    made = await scene.make(parallel=1)
    await scene.step(made)
    run_id = int(str(await value(scene.conn, "select run_id from backfill_run")))
    row = await runs.find(scene.conn, run_id)
    assert row is not None
    assert (row.kind, row.fire_at, row.key) == ("backfill", BEGIN, f"backfill__{BEGIN.isoformat()}")
    await scene.finish_all("failed")
    assert await run_state(scene.conn, run_id) == "failed"
    assert [each.run_id for each in await backfills_queries.failed_runs(scene.conn, backfill_id=made)] == [run_id]


async def test_a_second_run_for_an_instant_has_the_number_of_its_backfill_in_its_key(scene: Scene) -> None:
    keys = []
    for request in ("one", "other"):
        made = await scene.make(request, last=BEGIN, reprocess=Reprocess.ALL)
        await scene.complete(made)
        row = await (await scene.conn.execute("select key from run order by run_id desc limit 1")).fetchone()
        keys.append(row[0] if row else None)
    first = f"backfill__{BEGIN.isoformat()}"
    assert keys == [first, f"{first}__{made}"]
    taken = f"backfill__{ALL[1].isoformat()}"
    assert await trigger_run(scene.conn, key=taken, dag_id=1, params={}, actor=Actor("test")) is not None
    made = await scene.make("third", first=ALL[1], last=ALL[1])
    await scene.complete(made)
    assert await value(scene.conn, "select key from run order by run_id desc limit 1") == f"{taken}__{made}"


async def test_a_dag_refuses_runs_of_types_that_it_does_not_allow(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    spec = make_dag("planned", {"a": []}, every="@every 1h")
    await put(conn, replace(spec, run_types=("scheduled", "backfill")))
    with pytest.raises(UserError, match="only runs of these types: scheduled, backfill"):
        await trigger(conn, dag="planned", params={}, actor=Actor("me"))
    wish = BackfillRequest(dag="planned", first=T0 - timedelta(hours=3), last=T0)
    assert (await preview(conn, wish)).total > 1
    await put(conn, replace(spec, run_types=("scheduled", "manual")))
    assert (await trigger(conn, dag="planned", params={}, actor=Actor("me"))).is_new
    with pytest.raises(UserError, match="would be backfill"):
        await preview(conn, wish)
