"""Updates of assets that an attempt describes: they count when it succeeds, and start what waits for the asset or the alias."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.domain.access import Actor
from evertick.domain.attempt import OutcomeKind
from evertick.domain.dags.spec import AssetSpec
from evertick.domain.errors import LeaseLost, UserError
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedules.dependencies import Asset, Source, any_of
from evertick.engine import asks
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.maintenance import deliver_dependencies
from evertick.engine.tasks import clear, select_tasks
from evertick.engine.waits import update_asset
from tests.engine.test_after import waiting
from tests.engine.test_asks import holder
from tests.engine.world import T0, Runner, later, lead, make_dag, put, set_clock, start, value

ORDERS = AssetSpec(name="orders", uri="s3://orders", group="shop", extra={"owner": "sales"})
DESCRIBED: list[dict[str, object]] = [
    {"asset": "orders", "extra": {"rows": 7}, "alias": None},
    {"asset": "day-1", "uri": "s3://day-1", "extra": {"n": 1}, "asset_extra": {"of": "day"}, "alias": "daily"},
]


@pytest.fixture
async def runner(conn: AsyncConnection) -> Runner:
    retry = RetryPolicy(retries=1, delay_seconds=0)
    options = {"task_outlets": ("orders",), "task_aliases": ("daily",), "task_retry": retry, "task_asks": True}
    await put(conn, make_dag("makes", {"a": []}, assets=(ORDERS,), **options))
    await put(conn, waiting("follows", any_of(Asset("orders"), Source("alias", "daily"))))
    return await Runner.join(conn)


async def test_described_updates_count_when_the_attempt_succeeds(conn: AsyncConnection, runner: Runner) -> None:
    epoch = await lead(conn)
    await start(conn, "makes", key="one")
    (a,) = await runner.claim()
    of = holder(runner, a)
    for _ in range(2):
        assert await asks.put_updates(conn, of, DESCRIBED)
    (again,), _ = await runner.step([(a, "failed", {})], free=1)
    with pytest.raises(LeaseLost):
        await asks.put_updates(conn, of, [])
    assert await value(conn, "select count(*) from listed_update") == 0, "it failed"
    now = holder(runner, again)
    assert await asks.put_updates(conn, now, DESCRIBED[1:])
    assert await asks.ask(conn, now, "asset", {"name": None, "uri": "s3://orders"}) == {
        "name": "orders",
        "uri": "s3://orders",
        "group": "shop",
        "extra": {"owner": "sales"},
    }
    assert await asks.ask(conn, now, "asset", {"name": "unknown", "uri": None}) is None
    assert await asks.ask(conn, now, "aliased", {"alias": "daily"}) == []
    await runner.finish(again, OutcomeKind.SUCCESS)
    listed = "select jsonb_object_agg(asset, extra) from listed_update"
    assert await value(conn, listed) == {"orders": None, "day-1": {"n": 1}}
    assert await value(conn, "select extra from asset where name = 'day-1'") == {"of": "day"}
    assert (await deliver_dependencies(conn, shard=0, epoch=epoch, limit=100)).became_due == 1
    triggers = await value(conn, "select array_agg(kind || ':' || name order by 1) from run_trigger")
    assert triggers == ["alias:daily", "asset:orders"]
    with pytest.raises(UserError, match="at most 1,000"):
        await asks.put_updates(conn, now, DESCRIBED * 501)


async def test_an_update_of_an_asset_reaches_those_that_wait_for_its_alias_and_is_read_by_name_and_alias(
    conn: AsyncConnection, runner: Runner
) -> None:
    epoch = await lead(conn)
    for key in ("one", "two"):
        await start(conn, "makes", key=key)
        (a,) = await runner.claim()
        assert await asks.put_updates(conn, holder(runner, a), DESCRIBED)
        await runner.finish(a, OutcomeKind.SUCCESS)
    await deliver_dependencies(conn, shard=0, epoch=epoch, limit=100)
    await conn.execute("delete from run_trigger")
    await update_asset(conn, asset="day-1", extra={"by": "hand"}, actor=Actor("me"))
    await deliver_dependencies(conn, shard=0, epoch=epoch, limit=100)
    assert await value(conn, "select array_agg(kind || ':' || name) from run_trigger") == ["alias:daily"]
    await start(conn, "makes", key="three")
    (c,) = await runner.claim()
    of = holder(runner, c)

    async def events(**wanted: object) -> list[tuple[object, ...]]:
        found = await asks.ask(conn, of, "asset_events", wanted)
        return [(each["asset"]["name"], each["run"], each["extra"]) for each in found]  # type: ignore[index, union-attr]

    assert await events(name="orders") == [("orders", "one", {"rows": 7}), ("orders", "two", {"rows": 7})]
    assert await events(uri="s3://orders", limit=1, ascending=False) == [("orders", "two", {"rows": 7})]
    assert await events(alias="daily", limit=1) == [("day-1", "one", {"n": 1})]
    assert await events(name="day-1", ascending=False, limit=1) == [("day-1", None, {"by": "hand"})]
    assert await events(name="orders", after="2100-01-01T00:00:00Z") == []
    assert await asks.ask(conn, of, "aliased", {"alias": "daily"}) == [
        {"name": "day-1", "uri": "s3://day-1", "group": "asset", "extra": {"of": "day"}}
    ]


async def test_updates_are_recorded_when_nothing_waits_for_them(conn: AsyncConnection) -> None:
    await put(conn, make_dag("alone", {"a": [], "b": []}, task_outlets=("orders",)))
    runner = await Runner.join(conn)
    await start(conn, "alone", key="one")
    a, b = await runner.claim()
    await runner.step([(a, "success", {}), (b, "failed", {})])
    assert await value(conn, "select array_agg((asset, idx)::text) from listed_update") == ["(orders,0)"]
    assert await value(conn, "select count(*) from dependency_event") == 0


async def test_only_the_attempt_that_succeeds_says_what_it_has_updated(conn: AsyncConnection) -> None:
    retry = RetryPolicy(retries=1, delay_seconds=0)
    options = {"task_outlets": ("orders", "other"), "task_aliases": ("daily",), "task_retry": retry, "task_asks": True}
    await put(conn, make_dag("pair", {"a": [], "b": []}, **options))
    runner = await Runner.join(conn)
    run = await start(conn, "pair", key="one")
    a, b = await runner.claim()
    said: list[dict[str, object]] = [
        {"asset": "orders", "extra": {"rows": 1}, "alias": None},
        {"asset": "other", "extra": {"n": 1}, "alias": "daily"},
    ]
    assert await asks.put_updates(conn, holder(runner, a), said)
    assert await asks.put_updates(conn, holder(runner, b), said)
    (again,), _ = await runner.step([(a, "success", {}), (b, "failed", {})], free=1)
    await runner.finish(again, OutcomeKind.SUCCESS)
    made = "select jsonb_agg(jsonb_build_array(idx, asset, extra) order by idx, asset, extra::text) from asset_update"
    counted = [
        [0, "orders", {"rows": 1}],
        [0, "other", {"n": 1}],
        [0, "other", {}],
        [1, "orders", {}],
        [1, "other", {}],
    ]
    assert await value(conn, f"{made} where occurred_at is not null") == counted, "not what the failed attempt said"
    assert await value(conn, "select array_agg(name) from asset") == ["other"], (
        "an alias names it; outlets are published"
    )
    await clear(conn, run_id=run, chosen=await select_tasks(conn, run_id=run, names=["a"]), actor=Actor("me"))
    (cleared,) = await runner.claim()
    assert await asks.put_updates(conn, holder(runner, cleared), [])
    assert await value(conn, f"{made} where occurred_at is not null") == counted, "what has counted stays"


async def test_a_run_sees_the_updates_since_the_run_before_of_its_schedule(conn: AsyncConnection) -> None:
    await set_clock(conn, T0)
    await put(conn, waiting("follows", any_of(Asset("orders"), Source("alias", "orders"))))
    await conn.execute("insert into asset_alias values ('orders', 'day-1'), ('another', 'unrelated')")
    epoch, runner, second = await lead(conn), await Runner.join(conn), 0

    async def update(asset: str, number: int) -> None:
        nonlocal second
        await set_clock(conn, later(second := second + 1))
        await update_asset(conn, asset=asset, extra={"n": number}, actor=Actor("me"))

    async def fired() -> asks.AttemptHolder:
        await set_clock(conn, later(second))
        await deliver_dependencies(conn, shard=0, epoch=epoch, limit=100)
        await fire_schedules(conn, shard=0, epoch=epoch, batch=100)
        (claim,) = await runner.claim()
        return holder(runner, claim)

    async def seen(of: asks.AttemptHolder) -> list[int]:
        facts = await asks.ask(conn, of, "run", {})
        return [each["extra"]["n"] for each in facts["events"]]  # type: ignore[index, union-attr, call-overload]

    await update("orders", 1)
    await update("unrelated", 2)
    await update("orders", 3)
    await update("day-1", 4)
    one = await fired()
    await update("day-1", 5)
    await update("orders", 6)
    assert await seen(one) == [1, 3, 4]
    two = await fired()
    assert (await seen(one), await seen(two)) == ([1, 3, 4], [5, 6])
