"""An ended run goes on with the newest version of its DAG, if that has the same tasks; nobody's surprise in between."""

from __future__ import annotations

from dataclasses import replace

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runs
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec
from evertick.domain.errors import Conflict
from evertick.domain.retention import Pace
from evertick.domain.retry import RetryPolicy
from evertick.engine.retention import Kind, PruneGrant, prune_kind
from evertick.engine.tasks import clear, newest_version, select_tasks
from tests.engine import invariants
from tests.engine.world import T0, Runner, later, lead, make_dag, put, run_state, set_clock, start, states, value

CHAIN = {"a": [], "b": ["a"], "c": ["b"]}


@pytest.fixture(autouse=True)
async def watched(conn: AsyncConnection) -> object:
    await invariants.install(conn)
    yield
    assert await invariants.violations(conn) == []


async def failed(conn: AsyncConnection) -> tuple[int, Runner]:
    await put(conn, make_dag("d", CHAIN))
    run = await start(conn, "d")
    runner = await Runner.join(conn)
    await runner.drain({"b": "failed"})
    return run, runner


def mended() -> DagSpec:
    return make_dag("d", CHAIN, per_task={"b": {"retry": RetryPolicy(retries=1, delay_seconds=0)}})


async def go_on(conn: AsyncConnection, run: int, version_id: int | None) -> None:
    chosen = await select_tasks(conn, run_id=run, only_failed=True)
    await clear(conn, run_id=run, chosen=chosen, actor=Actor("ann"), version_id=version_id)


async def test_what_is_cleared_runs_with_the_newest_version_and_the_rest_stays(conn: AsyncConnection) -> None:
    run, runner = await failed(conn)
    version = await put(conn, mended())
    newest = await newest_version(conn, run)
    assert (newest.version_id, newest.number, newest.run_number) == (version, 2, 1)
    await go_on(conn, run, newest.version_id)
    (claim,) = await runner.claim()
    assert (claim.version_id, claim.idx) == (version, 1)
    # Its retries are those of the new version.
    await runner.finish(claim, "failed", retry_in=0)
    assert await runner.drain() == ["b", "c"]
    row = await runs.find(conn, run)
    assert row is not None and (row.state, row.version, row.version_id) == ("success", 2, version)
    assert await value(conn, "select version_id from run where run_id = %s", run) != version
    assert await value(conn, "select (detail->>'version_id')::int from audit_log where action = 'clear'") == version
    assert (await newest_version(conn, run)).version_id is None


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ({"a": [], "b": ["a"]}, "c is missing"),
        ({**CHAIN, "x": ["c"]}, "x is new"),
        ({"b": [], "a": ["b"], "c": ["a"]}, "their order differs"),
    ],
)
async def test_a_version_with_other_tasks_is_refused(
    conn: AsyncConnection, shape: dict[str, list[str]], why: str
) -> None:
    run, _ = await failed(conn)
    version = await put(conn, make_dag("d", shape))
    with pytest.raises(Conflict, match=why):
        await newest_version(conn, run)
    # Whoever asks without looking is refused as well, and nothing has changed.
    with pytest.raises(Conflict, match="has other tasks than run"):
        await go_on(conn, run, version)
    assert await run_state(conn, run) == "failed"


async def test_only_an_ended_run_moves_and_only_to_what_is_current(conn: AsyncConnection) -> None:
    run, runner = await failed(conn)
    second = await put(conn, mended())
    third = await put(conn, make_dag("d", CHAIN, max_active_tasks=5))
    with pytest.raises(Conflict, match="Another version was published meanwhile"):
        await go_on(conn, run, second)
    assert await states(conn, run) == {"a": "success", "b": "failed", "c": "upstream_failed"}
    open_run = await start(conn, "d")
    await put(conn, mended())
    with pytest.raises(Conflict, match="is still open"):
        await clear(
            conn, run_id=open_run, chosen=await select_tasks(conn, run_id=open_run), actor=Actor("a"), version_id=second
        )
    assert await value(conn, "select version_id from run_status where run_id = %s", open_run) == third
    await runner.drain()


async def test_a_version_that_a_moved_run_needs_is_not_pruned(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    run, runner = await failed(conn)
    second = await put(conn, mended())
    await go_on(conn, run, second)
    await runner.drain()
    await put(conn, make_dag("d", CHAIN, max_active_tasks=5))
    epoch = await lead(conn)
    given = PruneGrant(shard=0, epoch=epoch, before=later(10), actor=Actor("test"), entry=None)
    await set_clock(conn, later(100))
    await prune_kind(conn, replace(given), Kind.VERSIONS, pace=Pace(batch=10))
    assert await value(conn, "select count(*) from dag_version where version_id = %s", second) == 1
