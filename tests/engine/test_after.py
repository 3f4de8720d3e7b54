"""A DAG runs after other work: when all, or any, of what it waits for has happened since its last run."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from psycopg import AsyncConnection
from psycopg.errors import LockNotAvailable

from evertick import Asset, after, all_of, any_of, finished
from evertick.db.connect import Purpose, connect
from evertick.db.queries import schedules
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.errors import CyclicDependency, InvalidSchedule, UserError
from evertick.domain.retention import Pace
from evertick.domain.routing import read_pattern
from evertick.domain.schedules.misfire import OverlapPolicy
from evertick.domain.schedules.spec import ScheduleSpec, describe, parse_schedule
from evertick.engine.dags import delete
from evertick.engine.finish_and_claim import PatternClaims, exchange_matching, finish_and_claim
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import deliver_dependencies
from evertick.engine.retention import Kind, PruneGrant, prune_kind
from evertick.engine.schedules import pause_schedule, put_schedule, unpause_schedule
from evertick.engine.waits import _discard_asset_events, update_asset
from tests.engine import invariants
from tests.engine.world import T0, Runner, end, later, lead, make_dag, put, set_clock, start, value
from tests.waiting import eventually

ONE: dict[str, list[str]] = {"t": []}


class Scene:
    """Some DAGs, one that waits, a leader and a runner."""

    def __init__(self, conn: AsyncConnection, epoch: int, runner: Runner) -> None:
        self.conn, self.epoch, self.runner = conn, epoch, runner

    @classmethod
    async def of(cls, conn: AsyncConnection, condition: object, **rules: object) -> Scene:
        await invariants.install(conn)
        await set_clock(conn, T0)
        for name in ("a", "b"):
            await put(conn, make_dag(name, ONE, per_task={"t": {"outlets": (f"data-{name}",)}}))
        waiting = NamedSchedule(name="main", spec=parse_schedule(condition), **rules)  # type: ignore[arg-type]
        await put(conn, replace(make_dag("w", ONE), schedules=(waiting,)))
        return cls(conn, await lead(conn), await Runner.join(conn))

    async def run(self, *dags: str, outcome: str = "success") -> None:
        for dag in dags:
            run_id = await start(self.conn, dag)
            for claim in await self.runner.claim():
                if claim.run_id == run_id:
                    await self.runner.finish(claim, outcome, no_retry=True)

    async def tend(self, seconds: float) -> int:
        """How many runs the DAG that waits has then."""
        await set_clock(self.conn, later(seconds))
        await deliver_dependencies(self.conn, shard=0, epoch=self.epoch, limit=100)
        await fire_schedules(self.conn, shard=0, epoch=self.epoch, batch=100)
        assert await invariants.violations(self.conn) == []
        return int(
            str(await value(self.conn, "select count(*) from run r join dag d using (dag_id) where d.name = 'w'"))
        )

    async def causes(self) -> list[tuple[str, str, int | str | None]]:
        run_id = await value(self.conn, "select max(run_id) from run r join dag d using (dag_id) where d.name = 'w'")
        found = await schedules.causes(self.conn, int(str(run_id)))
        return [(each.kind, each.name, each.run_id or each.updated_by) for each in found]


async def test_all_of_them_since_the_last_run(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after("a", "b"))
    await scene.run("a", "a")
    assert await scene.tend(1) == 0
    await scene.run("b")
    assert await scene.tend(2) == 1
    assert await scene.causes() == [("dag", "a", 2), ("dag", "b", 3)]
    await scene.run("b")
    assert await scene.tend(3) == 1
    await scene.run("a")
    assert await scene.tend(4) == 2
    assert await value(conn, "select count(*) from dependency_event") == 0


async def test_any_of_them(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, any_of("a", "b"))
    await scene.run("a")
    assert await scene.tend(1) == 1
    await scene.run("b")
    assert await scene.tend(2) == 2
    # Several before it fires are one.
    await scene.run("a", "b", "a")
    assert await scene.tend(3) == 3
    assert await scene.causes() == [("dag", "a", 7), ("dag", "b", 6)]


async def test_a_failure_counts_only_for_who_asks_for_any_end(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, any_of("a", Asset("data-a"), all_of(finished("b"), Asset("never"))))
    await scene.run("a", outcome="failed")
    assert await scene.tend(1) == 0
    await put_schedule(
        conn, dag="w", schedule=NamedSchedule(name="main", spec=parse_schedule(after(finished("b")))), actor=Actor("x")
    )
    await scene.run("b", outcome="failed")
    assert await scene.tend(2) == 1
    assert await scene.causes() == [("end", "b", 2)]


async def test_an_asset_is_updated_by_the_task_not_by_the_run(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after(Asset("first")))
    shape = {"load": [], "rest": ["load"]}
    await put(conn, make_dag("a", shape, per_task={"load": {"outlets": ("first", "other")}}))
    await start(conn, "a")
    (claim,) = await scene.runner.claim()
    await scene.runner.finish(claim)
    assert await scene.tend(1) == 1
    assert await scene.causes() == [("asset", "first", 1)]
    assert await value(conn, "select count(*) from dependency_event") == 0


async def test_only_what_somebody_waits_for_is_noted_and_whoever_ends_it_tells_so(conn: AsyncConnection) -> None:
    scene, told = await Scene.of(conn, after(finished("a"), Asset("b"))), []
    for dag in ("b", "a"):
        await start(conn, dag)
        (claim,) = await scene.runner.claim()
        done = await finish_and_claim(
            conn,
            session=scene.runner.session,
            reports=[end(claim, "success")],
            queues=["default"],
            free=0,
            infra_retries=3,
        )
        told.append(done.has_arrivals)
    assert told == [False, True]
    assert await value(conn, "select array_agg(kind || ':' || name) from dependency_event") == ["end:a"]
    assert await value(conn, "select array_agg(name) from dag where has_dependents") == ["a"]


async def test_a_runner_with_patterns_that_claims_more_still_reports_that_a_dependency_ended(
    conn: AsyncConnection,
) -> None:
    scene = await Scene.of(conn, after(finished("a")))
    await start(conn, "a")
    (claim,) = await scene.runner.claim()
    everything = PatternClaims([read_pattern("**")], ("default",), aging_seconds=0)
    session, reports = scene.runner.session, [end(claim, "success")]
    done = await exchange_matching(conn, everything, session=session, reports=reports, free=1, infra_retries=3)
    assert done.has_arrivals


async def test_a_renamed_dependency_is_delivered_under_its_old_name(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after(Asset("a"), "b"))
    await put(conn, waiting("v", after("a")))
    await scene.run("a")
    assert await scene.tend(1) == 0
    assert await value(conn, "select count(*) from dependency_state") == 0, "a DAG of the name of an asset"
    await update_asset(conn, asset="b", extra={}, actor=Actor("ann"))
    assert await value(conn, "select count(*) from dependency_event") == 0, "an asset of the name of a DAG"


async def test_updates_that_count_no_more_are_those_that_were_named(conn: AsyncConnection, database: str) -> None:
    scene = await Scene.of(conn, after(Asset("x"), Asset("y"), "a", Asset("never")))
    await put(conn, waiting("v", after(Asset("x"), Asset("never"))))
    await scene.run("a")
    for second, asset in enumerate(("x", "y"), 1):
        await set_clock(conn, later(second))
        await update_asset(conn, asset=asset, extra={}, actor=Actor("ann"))
    await scene.tend(3)
    w, v = [await value(conn, "select dag_id from dag where name = %s", name) for name in ("w", "v")]

    async def left(**given: object) -> list[str]:
        every = {"dag_ids": None, "asset": None, "before": None, "actor": Actor("ann"), **given}
        await _discard_asset_events(conn, **every)  # type: ignore[arg-type]
        found = "select array_agg(d.name || ':' || h.name order by d.name, h.name) from dependency_state h"
        return await value(conn, found + " join schedule using (schedule_id) join dag d using (dag_id)") or []  # type: ignore[return-value]

    assert await left(before=later(1)) == ["v:x", "w:a", "w:x", "w:y"]
    assert await left(dag_ids=[w], asset="x") == ["v:x", "w:a", "w:y"]
    async with await connect(database, purpose=Purpose.SCHEDULER) as other, other.transaction():
        await other.execute("select from schedule_state for no key update")
        await conn.execute("set lock_timeout = '100ms'")
        with pytest.raises(LockNotAvailable):
            await left(dag_ids=[v])
    assert await left(dag_ids=[v]) == ["w:a", "w:y"]
    assert await left() == ["w:a"], "the end of a run is no update"


async def test_events_are_delivered_in_batches_and_locked_ones_later(conn: AsyncConnection, database: str) -> None:
    scene = await Scene.of(conn, after("a", "b"))
    await scene.run("a", "a", "a", "b")
    left = (
        "select array_agg(event_id - first order by event_id)"
        " from dependency_event, (select min(event_id) first from dependency_event) x"
    )
    async with await connect(database, purpose=Purpose.SCHEDULER) as other:
        async with other.transaction():
            await other.execute("select from dependency_event order by event_id limit 1 for update")
            await conn.execute("set lock_timeout = '100ms'")
            assert (await deliver_dependencies(conn, shard=0, epoch=scene.epoch, limit=2)).has_more
            assert await value(conn, left) == [0, 3]
        await conn.execute("set lock_timeout = 0")
        # Whoever changes a schedule is waited for, whether it becomes due by this or not.
        async with other.transaction():
            await other.execute("select from schedule_state for no key update")
            hearing = asyncio.ensure_future(deliver_dependencies(conn, shard=0, epoch=scene.epoch, limit=1))
            is_waiting = "select 1 from pg_locks where not granted and pid = %s"
            await eventually(lambda: value(other, is_waiting, conn.info.backend_pid))
        await hearing
    assert await scene.tend(1) == 1


async def test_a_dag_that_is_published_after_the_one_that_waits_is_awaited(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after("later"))
    await put(conn, make_dag("later", ONE))
    await scene.run("later")
    assert await scene.tend(1) == 1


async def test_what_happens_more_often_before_it_fires_is_one_run(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after("a"))
    await scene.run("a")
    await deliver_dependencies(conn, shard=0, epoch=scene.epoch, limit=100)
    await scene.run("a")
    assert await scene.tend(1) == 1
    assert await scene.causes() == [("dag", "a", 2)]
    assert await scene.tend(2) == 1


async def test_while_it_is_paused_it_does_not_run_and_says_so(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after("a"))
    await pause_schedule(conn, dag="w", name="main", actor=Actor("x"))
    await scene.run("a")
    assert await scene.tend(1) == 0
    await unpause_schedule(conn, dag="w", name="main", actor=Actor("x"))
    assert await scene.tend(2) == 0
    assert await value(conn, "select array_agg(reason || count) from skip_record") == ["paused1"]
    await scene.run("a")
    assert await scene.tend(3) == 1


async def test_overlap_holds_for_it_as_well(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after("a"), overlap=OverlapPolicy.SKIP)
    await scene.run("a")
    assert await scene.tend(1) == 1
    await scene.run("a")
    assert await scene.tend(2) == 1
    assert await value(conn, "select array_agg(reason) from skip_record") == ["overlap_skip"]


async def test_publishing_again_keeps_the_dependency_state(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after("a", "b"))
    await scene.run("a")
    await scene.tend(1)
    waiting = NamedSchedule(name="main", spec=parse_schedule(after("a", "b")))
    await put(conn, replace(make_dag("w", {"t": [], "u": []}), schedules=(waiting,)))
    await scene.run("b")
    assert await scene.tend(2) == 1


async def test_two_runs_that_end_at_once_are_both_delivered(database: str) -> None:
    """Ends, hearing and firing race; each pair of ends gives one run, and none is lost."""
    async with (
        await connect(database, purpose=Purpose.SCHEDULER) as leader,
        await connect(database, purpose=Purpose.RUNNER) as first,
        await connect(database, purpose=Purpose.RUNNER) as second,
    ):
        scene = await Scene.of(leader, after("a", "b"))
        runners = [await Runner.join(conn, queues=(name,)) for conn, name in ((first, "a"), (second, "b"))]
        for name in ("a", "b"):
            await put(leader, make_dag(name, ONE, per_task={"t": {"queue": name}}))
        for turn in range(1, 15):
            claims = []
            for runner, name in zip(runners, ("a", "b"), strict=True):
                await set_clock(runner.conn, later(turn))
                await start(leader, name)
                claims += await runner.claim(queues=(name,))
            await asyncio.gather(
                *(runner.finish(claim) for runner, claim in zip(runners, claims, strict=True)),
                deliver_dependencies(leader, shard=0, epoch=scene.epoch, limit=1),
            )
            await deliver_dependencies(leader, shard=0, epoch=scene.epoch, limit=1)
            assert await scene.tend(turn) == turn


async def test_causes_of_long_ago_are_pruned(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after("a"))
    for seconds in (1, 2, 3):
        await scene.run("a")
        await scene.tend(seconds)
    given = PruneGrant(shard=0, epoch=scene.epoch, before=later(2.5), actor=Actor("test"), entry=None)
    assert [(await prune_kind(conn, given, Kind.CAUSES, pace=Pace(batch=n))).pruned for n in (1, 10, 10)] == [1, 1, 0]
    assert await scene.causes() == [("dag", "a", 5)]


def test_a_condition_is_stored_and_told_in_words() -> None:
    spec = parse_schedule(after("a", any_of(Asset("s3://x"), finished("b"))))
    assert ScheduleSpec.from_json(spec.to_json()) == spec
    assert describe(spec) == "after a and (asset s3://x or any end of b)"


@pytest.mark.parametrize(
    ("write", "words"),
    [
        (lambda: after(), "after(...) is empty"),
        (lambda: after(any_of()), "after(...) is empty"),
        (lambda: after(3), "takes DAG names"),
        (lambda: after(" "), "is not a valid name for a DAG or an asset"),
        (lambda: after(*(f"d{n}" for n in range(101))), "at most 100"),
    ],
)
def test_a_condition_that_cannot_be_is_refused(write: object, words: str) -> None:
    with pytest.raises(InvalidSchedule) as caught:
        parse_schedule(write())  # type: ignore[operator]
    assert words in str(caught.value)


async def test_an_update_by_a_user_is_delivered_like_that_of_a_task(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, after(Asset("data-a"), Asset("data-b")))
    await update_asset(conn, asset="data-a", extra={"rows": 7}, actor=Actor("ann"))
    await update_asset(conn, asset="other", extra={}, actor=Actor("ann"))
    assert await value(conn, "select array_agg(name) from dependency_event") == ["data-a"], "nobody waits for the other"
    assert await value(conn, "select array_agg(asset order by update_id) from asset_update") == ["data-a", "other"]
    assert await scene.tend(1) == 0
    await update_asset(conn, asset="data-b", extra={}, actor=Actor("bob"))
    assert await scene.tend(2) == 1
    assert await scene.causes() == [("asset", "data-a", "ann"), ("asset", "data-b", "bob")]
    # Whoever comes last is the cause, a task or a person.
    await update_asset(conn, asset="data-a", extra={}, actor=Actor("ann"))
    assert await scene.tend(3) == 1
    await scene.run("a")
    run_a = await value(conn, "select max(run_id) from run")
    assert await scene.tend(4) == 1
    await scene.run("b")
    await update_asset(conn, asset="data-b", extra={}, actor=Actor("bob"))
    assert await scene.tend(5) == 2
    assert await scene.causes() == [("asset", "data-a", run_a), ("asset", "data-b", "bob")]
    journal = "select count(*) from audit_log where action = 'update_asset' and actor = 'ann'"
    assert await value(conn, journal) == 3


@pytest.mark.parametrize(
    ("extra", "told"), [({"n": float("nan")}, "not JSON"), ({"n": "x" * 70_000}, "at most 65,536")]
)
async def test_what_cannot_be_kept_about_an_update_is_refused(
    rollback_conn: AsyncConnection, extra: dict[str, object], told: str
) -> None:
    with pytest.raises(UserError, match=told):
        await update_asset(rollback_conn, asset="orders", extra=extra, actor=Actor("ann"))
    assert await value(rollback_conn, "select count(*) from asset_update") == 0


def waiting(name: str, condition: object, outlets: tuple[str, ...] = ()) -> DagSpec:
    schedule = NamedSchedule(name="main", spec=parse_schedule(condition))
    return replace(make_dag(name, ONE, per_task={"t": {"outlets": outlets}}), schedules=(schedule,))


@pytest.mark.requirement("R1")
async def test_dags_that_would_start_each_other_for_ever_are_refused(rollback_conn: AsyncConnection) -> None:
    conn = rollback_conn
    await put(conn, waiting("b", after("a")))
    await put(conn, waiting("c", after(Asset("orders")), outlets=("rates",)))
    with pytest.raises(CyclicDependency, match="'a' would start itself again endlessly: a → b → a"):
        await put(conn, waiting("a", after("b")))
    with pytest.raises(CyclicDependency, match="a → b → a"):
        await put(conn, waiting("a", any_of("nightly", finished("b"))))
    with pytest.raises(CyclicDependency, match="self → self"):
        await put(conn, waiting("self", after(finished("self"))))
    with pytest.raises(CyclicDependency, match="d → c → d"):
        await put(conn, waiting("d", after(Asset("rates")), outlets=("orders",)))
    await put(conn, waiting("d", after(Asset("rates"))))
    await put(conn, waiting("a", after("b", "nightly")))
    assert await value(conn, "select count(*) from dag where name in ('a', 'b', 'c', 'd')") == 4
    # What was deleted starts nothing any more.
    await delete(conn, dag="b", actor=Actor("ann"))
    await put(conn, waiting("a", after("b")))


async def test_an_edit_that_closes_a_loop_is_refused_and_one_that_breaks_it_is_not(
    rollback_conn: AsyncConnection,
) -> None:
    conn = rollback_conn
    await put(conn, make_dag("a", ONE))
    await put(conn, waiting("b", after("a")))

    async def edit(name: str, condition: object) -> int:
        schedule = NamedSchedule(name=name, spec=parse_schedule(condition))
        return await put_schedule(conn, dag="a", schedule=schedule, actor=Actor("ann"))

    with pytest.raises(CyclicDependency, match="a → b → a"):
        await edit("main", after("b"))
    assert await edit("main", after("c")) == 1
    with pytest.raises(CyclicDependency, match="a → b → a"):
        await edit("second", after("b"))
    assert await edit("main", "@daily") == 2
    # What people set stays when the DAG is published again, and counts then too.
    await edit("main", after("c"))
    with pytest.raises(CyclicDependency, match="c → a → b → c"):
        await put(conn, waiting("c", after("b")))
    await put(conn, make_dag("a", ONE))
    with pytest.raises(CyclicDependency, match="c → a → b → c"):
        await put(conn, waiting("c", after("b")))
