"""A run that fails begins again as a whole, as often as its DAG says; to all others it has not ended meanwhile."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import notifications, runs
from evertick.domain.access import Actor
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.dags.validation import validate
from evertick.domain.errors import InvalidDag
from evertick.domain.notifications import NotificationEvent, NotificationRuleSpec
from evertick.domain.schedules.dependencies import after, finished
from evertick.domain.schedules.spec import parse_schedule
from evertick.domain.states import TriggerRule
from evertick.engine.maintenance import time_out_run
from evertick.engine.runs import cancel
from evertick.engine.tasks import clear, select_tasks
from tests.engine import invariants
from tests.engine.world import T0, Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value

HOOK = "webhook:https://example.com/hook"
CHAIN = {"a": [], "b": ["a"], "c": ["b"]}


@pytest.fixture(autouse=True)
async def watched(conn: AsyncConnection) -> object:
    """Illegal moves raise at once; after each test nothing may be violated."""
    await invariants.install(conn)
    yield
    assert await invariants.violations(conn) == []


async def retried(conn: AsyncConnection, run: int) -> int:
    row = await runs.find(conn, run)
    assert row is not None
    return row.retried


async def test_everything_in_it_runs_again_and_its_history_stays(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", CHAIN, retries=1))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    (a,) = await runner.claim()
    (b,), _ = await runner.step([(a, "success", {})], free=10)
    (again,), _ = await runner.step([(b, "failed", {"reason": "boom"})], free=10)
    assert (again.idx, again.epoch, again.attempt) == (0, 2, 1)
    assert (await run_state(conn, run), await retried(conn, run)) == ("running", 1)
    assert await states(conn, run) == {"a": "running", "b": "waiting", "c": "waiting"}
    history = "select array_agg(idx || ' ' || epoch || ' ' || outcome order by idx) from attempt"
    assert await value(conn, history) == ["0 1 success", "1 1 failed"]
    assert await value(conn, "select count(*) from result") == 0
    await runner.finish(again)
    assert await runner.drain() == ["b", "c"]
    assert await run_state(conn, run) == "success"
    assert await value(conn, "select detail->>'retried' from audit_log where action = 'retry'") == "1"


async def test_after_its_last_it_has_failed_and_a_clear_counts_anew(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", CHAIN, retries=2))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    assert await runner.drain({"b": "failed"}) == ["a", "b"] * 3
    assert (await run_state(conn, run), await retried(conn, run)) == ("failed", 2)
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run), actor=Actor("ann"))
    assert await runner.drain({"b": "failed"}) == ["a", "b"] * 3
    assert await run_state(conn, run) == "failed"


async def test_teardowns_and_handlers_run_each_time_and_mapped_tasks_expand_anew(conn: AsyncConnection) -> None:
    shape = {"setup": [], "many": ["setup"], "down": ["setup", "many"], "handler": ["many"]}
    per_task: dict[str, dict[str, object]] = {
        "setup": {"is_setup": True},
        "many": {"mapping": Mapping(lists=(MappedList(argument="x", length=2),))},
        "down": {"is_teardown": True, "trigger_rule": TriggerRule.ALL_DONE_SETUP_SUCCESS},
        "handler": {"trigger_rule": TriggerRule.ONE_FAILED},
    }
    await put(conn, make_dag("d", shape, per_task=per_task, retries=1))
    run = await start(conn, "d")
    ran = await (await Runner.join(conn)).drain({"many": "failed", "handler": "failed"})
    assert sorted(ran) == sorted(["setup", "many", "many", "down", "handler"] * 2)
    assert await run_state(conn, run) == "failed"


async def test_a_failure_that_the_run_survives_retries_nothing(conn: AsyncConnection) -> None:
    handled = {"handler": {"trigger_rule": TriggerRule.ONE_FAILED}}
    await put(conn, make_dag("d", {"a": [], "handler": ["a"]}, per_task=handled, retries=3))
    run = await start(conn, "d")
    assert await (await Runner.join(conn)).drain({"a": "failed"}) == ["a", "handler"]
    assert (await run_state(conn, run), await retried(conn, run)) == ("success", 0)


async def test_who_is_canceled_does_not_begin_again_and_who_took_too_long_does(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    await put(conn, make_dag("d", {"a": []}, retries=1, run_timeout_seconds=10))
    run = await start(conn, "d")
    await cancel(conn, run_id=run, actor=Actor("ann"))
    assert await run_state(conn, run) == "canceled"
    second = await start(conn, "d")
    epoch = await lead(conn)
    await set_clock(conn, later(11))
    await time_out_run(conn, shard=0, epoch=epoch, run_id=second)
    assert (await run_state(conn, second), await retried(conn, second)) == ("running", 1)
    assert await time_out_run(conn, shard=0, epoch=epoch, run_id=second) is None
    await set_clock(conn, later(22))
    await time_out_run(conn, shard=0, epoch=epoch, run_id=second)
    assert await run_state(conn, second) == "failed"


async def test_to_all_others_it_has_not_ended_meanwhile(conn: AsyncConnection) -> None:
    told = tuple(
        NotificationRuleSpec(event=event, sink=HOOK)
        for event in (NotificationEvent.FAILURE, NotificationEvent.RETRY, NotificationEvent.SUCCESS)
    )
    await put(conn, make_dag("d", {"a": []}, retries=1, notices=told, max_active_runs=1))
    waits = NamedSchedule(name="main", spec=parse_schedule(after(finished("d"))))
    await put(conn, make_dag("next", {"x": []}, schedules=(waits,)))
    first, second = await start(conn, "d"), await start(conn, "d")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed")
    assert await value(conn, "select count(*) from dependency_event") == 0
    assert [await run_state(conn, each) for each in (first, second)] == ["running", "queued"]
    (claim,) = await runner.claim()
    assert claim.run_id == first
    await runner.finish(claim)
    assert await value(conn, "select count(*) from dependency_event") == 1
    assert [each.event for each in reversed(await notifications.list_deliveries(conn))] == ["retry", "success"]
    await runner.drain()


@pytest.mark.requirement("F6")
async def test_the_policy_is_that_of_the_runs_own_version(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"a": []}))
    old = await start(conn, "d")
    await put(conn, make_dag("d", {"a": []}, retries=1))
    new = await start(conn, "d")
    await put(conn, make_dag("d", {"a": []}, retries=5))
    await (await Runner.join(conn)).drain({"a": "failed"})
    assert [(await run_state(conn, each), await retried(conn, each)) for each in (old, new)] == [
        ("failed", 0),
        ("failed", 1),
    ]


@pytest.mark.parametrize("retries", [-1, 101, True, "2"])
def test_a_number_of_retries_that_cannot_be_is_refused(retries: object) -> None:
    with pytest.raises(InvalidDag, match="a run can be retried 0 to 100 times"):
        validate(make_dag("d", CHAIN, retries=retries))
