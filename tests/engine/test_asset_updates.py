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
from evertick.engine.maintenance import deliver_dependencies
from evertick.engine.waits import update_asset
from tests.engine.test_after import waiting
from tests.engine.test_asks import holder
from tests.engine.world import Runner, lead, make_dag, put, start, value

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
    await runner.finish(a, OutcomeKind.SUCCESS)
    await runner.finish(b, OutcomeKind.FAILED)
    assert await value(conn, "select array_agg((asset, idx)::text) from listed_update") == ["(orders,0)"]
    assert await value(conn, "select count(*) from dependency_event") == 0
