"""State and steps: what an attempt keeps while its session holds it, and how long that stays."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from datetime import timedelta

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.db.queries.dags import find
from evertick.db.queries.secrets import AttemptHolder
from evertick.db.queries.state import StateOwner, entries
from evertick.domain.access import Actor
from evertick.domain.attempt import OutcomeKind
from evertick.domain.encryption import Keyring, new_key
from evertick.domain.errors import LeaseLost, UserError
from evertick.domain.retention import Pace
from evertick.domain.retry import RetryPolicy
from evertick.engine import asks
from evertick.engine.dags import delete
from evertick.engine.retention import Kind, PendingCleanup, PruneGrant, prune_kind, prune_runs, sweep
from evertick.engine.runs import Particulars
from evertick.engine.tasks import clear, select_tasks
from tests.engine.test_asks import first_claim, holder
from tests.engine.world import T0, Runner, lead, make_dag, put, set_clock, value

TASK, RUN, ASSET = {"scope": "task"}, {"scope": "run"}, {"scope": "asset", "asset": "orders"}
ADMIN, PACE = Actor("admin"), Pace(batch=100)


@pytest.fixture
async def runner(conn: AsyncConnection) -> Runner:
    retry = RetryPolicy(retries=2, delay_seconds=0)
    await put(conn, make_dag("chain", {"a": []}, task_asks=True, task_retry=retry, accepts_unknown_params=True))
    return await Runner.join(conn)


async def kept(conn: AsyncConnection, of: AttemptHolder, where: dict[str, str], key: str | None = None) -> object:
    return await asks.ask(conn, of, "state", {**where, "key": key})


async def test_state_of_a_task_and_of_an_asset_outlives_runs_and_that_of_a_run_does_not(
    conn: AsyncConnection, runner: Runner
) -> None:
    one = holder(runner, await first_claim(conn, runner))
    two = holder(runner, await first_claim(conn, runner, "two"))
    for number, where in enumerate((TASK, RUN, ASSET)):
        for key in ("b", "a"):
            assert await asks.put_state(conn, one, {**where, "key": key, "value": json.dumps([number, key])})
        assert await kept(conn, one, where) == [["a", [number, "a"]], ["b", [number, "b"]]]
        seen = [] if where is RUN else [["b", [number, "b"]]]
        assert await kept(conn, two, where, "b") == seen
    written = (await entries(conn, StateOwner(dag_id=0, owner="orders")))[0]
    assert written.writer == {"dag": "chain", "run": "one", "task": "a", "map_index": -1}
    assert written.changed_by == f"run {one.key.run_id}"
    assert await asks.put_state(conn, two, {**TASK, "key": "b", "value": '"new"'})
    assert await kept(conn, one, TASK, "b") == [["b", "new"]]
    assert await asks.put_state(conn, one, {**TASK, "key": "b", "value": None})
    assert not await asks.put_state(conn, one, {**TASK, "key": "b", "value": None})
    assert await kept(conn, one, TASK) == [["a", [0, "a"]]]
    assert await asks.put_state(conn, one, {**RUN, "key": None, "value": None})
    assert await kept(conn, one, RUN) == [] and await kept(conn, one, ASSET) != []
    for wrong in ({**TASK, "key": ""}, {**TASK, "key": "x" * 513}, {"scope": "asset", "key": "k"}):
        with pytest.raises(UserError):
            await asks.put_state(conn, one, {**wrong, "value": "1"})
    with pytest.raises(UserError, match="1,048,57"):
        await asks.put_state(conn, one, {**TASK, "key": "big", "value": f'"{"x" * 1_048_576}"'})


async def test_an_owner_has_at_most_a_thousand_keys_and_a_task_as_many_steps(
    conn: AsyncConnection, runner: Runner
) -> None:
    one = holder(runner, await first_claim(conn, runner))
    await conn.execute(
        "insert into state_entry select 0, v.dag_id, 'a', -1, 'k' || n, '1', null, clock(), 'x', null"
        " from dag_version v, generate_series(1, 1000) n"
    )
    await conn.execute(
        "insert into step_result select %s, 0, -1, 's' || n, 1, '1', clock() from generate_series(1, 1000) n",
        [one.key.run_id],
    )
    assert await asks.put_state(conn, one, {**TASK, "key": "k7", "value": "2"})
    with pytest.raises(psycopg.DataError, match="1,000 keys"):
        await asks.put_state(conn, one, {**TASK, "key": "one more", "value": "2"})
    with pytest.raises(psycopg.DataError, match="1,000 steps"):
        await asks.put_step(conn, one, name="one more", value="2")


async def test_steps_stay_for_the_retries_of_a_task_and_go_when_it_is_cleared(
    conn: AsyncConnection, runner: Runner
) -> None:
    a = await first_claim(conn, runner)
    one = holder(runner, a)
    assert await asks.ask(conn, one, "step", {"name": "charge"}) is None
    for text in ('{"id": 7}', '"the same step again changes nothing"'):
        assert await asks.put_step(conn, one, name="charge", value=text)
    (again,), _ = await runner.step([(a, "failed", {})], free=1)
    two = holder(runner, again)
    assert await asks.ask(conn, two, "steps", {}) == ["charge"]
    assert await asks.ask(conn, two, "step", {"name": "charge"}) == {"value": {"id": 7}}
    assert await value(conn, "select epoch from step_result") == a.epoch
    await runner.finish(again, OutcomeKind.SUCCESS)
    await clear(conn, run_id=a.run_id, chosen=await select_tasks(conn, run_id=a.run_id), actor=ADMIN)
    assert await value(conn, "select count(*) from step_result") == 0


async def test_no_write_of_an_attempt_that_was_taken_away_is_accepted(
    conn: AsyncConnection, runner: Runner, database: str
) -> None:
    """Each kind of write, by an older epoch, by another session, and by the attempt itself once it has ended: 60 in all. Also
    while the end is being committed. `make durable` makes 500."""
    ring = Keyring([new_key()])
    a = await first_claim(conn, runner)
    held = holder(runner, a)
    older = AttemptHolder(key=held.key, epoch=held.epoch - 1, session=held.session)
    foreign = AttemptHolder(key=held.key, epoch=held.epoch, session=held.session + 1)
    refused = 0
    async with await connect(database, purpose=Purpose.RUNNER) as other:
        async with conn.transaction():
            assert await asks.put_step(conn, held, name="in time", value="1")
            await runner.step([(a, "success", {"result": "kept"})], free=0)
            late = asyncio.create_task(refusals(other, held, ring))
            await asyncio.sleep(0)
        refused += await late
    for of in (older, foreign, held):
        for _ in range(3):
            refused += await refusals(conn, of, ring)
    assert refused == 10 * 6
    assert await value(conn, "select count(*) from state_entry") == 0
    assert await value(conn, "select array_agg(name) from step_result") == ["in time"]
    assert await value(conn, "select count(*) from stored_value") == 0
    assert await value(conn, "select count(*) from run") == 1
    assert await value(conn, "select value from result") == "kept"


async def refusals(conn: AsyncConnection, of: AttemptHolder, ring: Keyring) -> int:
    writes: list[Callable[[], Awaitable[object]]] = [
        lambda: asks.put_step(conn, of, name="late", value="2"),
        lambda: asks.put_state(conn, of, {**TASK, "key": "k", "value": "2"}),
        lambda: asks.put_state(conn, of, {**ASSET, "key": None, "value": None}),
        lambda: asks.put_outputs(conn, of, "[2]"),
        lambda: asks.put_variable(conn, ring, of, name="region", value="eu"),
        lambda: asks.trigger(conn, of, dag="chain", params={}, about=Particulars(key="late")),
    ]
    count = 0
    for write in writes:
        with pytest.raises(LeaseLost):
            await write()
        count += 1
    return count


async def test_state_goes_with_its_run_its_dag_and_its_time(conn: AsyncConnection, runner: Runner) -> None:
    await set_clock(conn, T0)
    epoch = await lead(conn)
    a = await first_claim(conn, runner)
    one = holder(runner, a)
    soon = (T0 + timedelta(hours=1)).isoformat()
    for where in (TASK, RUN, ASSET):
        await asks.put_state(conn, one, {**where, "key": "stays", "value": "1"})
    await asks.put_state(conn, one, {**TASK, "key": "expires", "value": "1", "expires_at": soon})
    await asks.put_step(conn, one, name="charge", value="1")
    await set_clock(conn, T0 + timedelta(hours=2))
    assert await kept(conn, one, TASK) == [["stays", 1]]
    await runner.finish(a, OutcomeKind.SUCCESS)
    row = await find(conn, "chain")
    assert row is not None
    of = StateOwner(dag_id=row.dag_id, owner="a")
    assert [each.key for each in await entries(conn, of)] == ["stays"]
    grant = PruneGrant(shard=0, epoch=epoch, before=T0 + timedelta(hours=3), actor=ADMIN)
    assert (await prune_kind(conn, grant, Kind.STATE, pace=PACE)).pruned == 1
    await prune_runs(conn, grant, after=0, pace=PACE, now=grant.before)
    await sweep(conn, grant, PendingCleanup.RUN, after=0, pace=PACE)
    assert await value(conn, "select count(*) from step_result") == 0
    assert await value(conn, "select array_agg(owner order by owner) from state_entry") == ["a", "orders"]
    await delete(conn, dag="chain", actor=ADMIN)
    assert await value(conn, "select array_agg(owner) from state_entry") == ["orders"]


async def test_an_operator_changes_state_with_an_entry_in_the_audit_log(conn: AsyncConnection, runner: Runner) -> None:
    one = holder(runner, await first_claim(conn, runner))
    of = StateOwner(dag_id=0, owner="orders")
    assert await asks.change_state(conn, of, key="cursor", value="[7]", actor=ADMIN)
    assert await kept(conn, one, ASSET) == [["cursor", [7]]]
    assert (await entries(conn, of))[0].changed_by == "admin"
    assert await asks.change_state(conn, of, key="cursor", value=None, actor=ADMIN)
    assert not await asks.change_state(conn, of, key="cursor", value=None, actor=ADMIN)
    noted = "select array_agg(action order by entry_id) from audit_log where actor = 'admin'"
    assert await value(conn, noted) == ["put_state", "delete_state"]
