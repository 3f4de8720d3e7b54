"""Several shards and schedulers in the test's own process: shared out evenly, handed over, closed; and no fire is lost."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.engine.set_shards import set_shards
from evertick.services import metrics
from evertick.store.wake import Channel, notify
from tests.engine.world import value
from tests.services.hosting import Said, hosted, quick
from tests.services.test_scheduler import all_fired, make_scheduler, publish_every
from tests.waiting import eventually

DAGS = 8


async def owners(conn: AsyncConnection) -> list[str | None]:
    cursor = await conn.execute("select owner from shard where state <> 'closed' order by shard")
    return [row[0] for row in await cursor.fetchall()]


async def is_shared(conn: AsyncConnection, names: str) -> bool:
    """Whether every one of them leads as many as any other, give or take one."""
    found = Counter(await owners(conn))
    counts = [found[name] for name in names]
    return set(found) <= set(names) and max(counts) - min(counts) <= 1


async def publish_several(conn: AsyncConnection, *, times: int) -> dict[str, list[datetime]]:
    return {f"d{number}": await publish_every(conn, f"d{number}", seconds=0.1, times=times) for number in range(DAGS)}


@pytest.mark.requirement("V1", "B11")
async def test_the_number_of_shards_is_changed_under_load_and_every_fire_happens_once(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    """From one to four, shared by two, and back to two. A scheduler comes and another goes meanwhile."""
    said = {name: Said() for name in "ab"}
    settings = quick(database, tmp_path)
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        await first.enter_async_context(hosted(make_scheduler(settings, said["a"], "a")))
        await said["a"].saw("lead")
        instants = await publish_several(conn, times=40)
        await notify(conn, Channel.PLAN)
        await said["a"].saw("fire")
        await set_shards(conn, shards=4, actor="test")
        await eventually(lambda: is_shared(conn, "a"), 10)
        await eventually(lambda: value(conn, "select count(distinct shard) > 1 from schedule_state"))
        await stack.enter_async_context(hosted(make_scheduler(settings, said["b"], "b")))
        await eventually(lambda: is_shared(conn, "ab"), 10)
        await said["b"].saw("fire")
        await set_shards(conn, shards=2, actor="test")
        await eventually(lambda: value(conn, "select max(shard) = 1 from schedule_state"))
        await conn.execute("update shard set moves_since = moves_since - interval '2 minutes'")
        await eventually(lambda: value(conn, "select count(*) = 2 from shard where state = 'closed'"))
        await first.aclose()
        await eventually(lambda: is_shared(conn, "b"), 10)
        for dag, due in instants.items():
            await all_fired(conn, dag, due)
    assert await value(conn, "select sum(misplaced(shard, 1000)) from shard") == 0
    assert await value(conn, "select count(*) from shard where owner is not null") == 0
    assert await value(conn, "select count(*) from scheduler") == 0, "they said that they left"
    assert said["a"].events("hand_over"), "what was too much was given away, not taken"
    for each in said.values():
        assert not each.events("reconcile"), "nothing was taken for lost"
        assert not each.events("tick_failed") and not each.events("step_failed"), each.all


@pytest.mark.requirement("A10")
async def test_shares_stay_as_they_are_once_they_are_even(database: str, conn: AsyncConnection, tmp_path: Path) -> None:
    await set_shards(conn, shards=5, actor="test")
    settings = quick(database, tmp_path)
    async with AsyncExitStack() as stack:
        for name in "abc":
            await stack.enter_async_context(hosted(make_scheduler(settings, Said(), name)))
        await eventually(lambda: is_shared(conn, "abc"), 10)
        epochs = await value(conn, "select sum(epoch) from shard")
        seen = "select min(seen_until) > %s from scheduler"
        for _ in range(3):
            latest = await value(conn, "select max(seen_until) from scheduler")
            await eventually(lambda: value(conn, seen, latest))  # noqa: B023
        assert await value(conn, "select sum(epoch) from shard") == epochs


async def test_the_setting_says_how_many_shards_a_new_database_has(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    settings = quick(database, tmp_path, shards=3)
    async with hosted(make_scheduler(settings, Said(), "a")):
        await eventually(lambda: is_shared(conn, "a"))
        await eventually(lambda: value(conn, "select count(*) = 3 from shard where owner = 'a'"))
        await eventually(lambda: sum(each.value for each in metrics.SHARD_LEADER.collect()[0].samples) == 3)
    await set_shards(conn, shards=1, actor="test")
    async with hosted(make_scheduler(settings, Said(), "a")):
        await eventually(lambda: value(conn, "select count(*) = 3 from shard where owner = 'a'"))
    assert await value(conn, "select open_shards()") == 1, "what somebody chose stays"


async def test_without_wake_ups_a_shard_that_is_handed_over_is_taken_within_a_tick_or_two(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    await set_shards(conn, shards=2, actor="test")
    plain: dict[str, Any] = {"notify": False}
    async with hosted(make_scheduler(quick(database, tmp_path, **plain), Said(), "a")):
        await eventually(lambda: value(conn, "select count(*) = 2 from shard where owner = 'a'"))
        said = Said()
        async with hosted(make_scheduler(quick(database, tmp_path, **plain), said, "b")):
            await said.saw("lead", shard=1)
            await eventually(lambda: is_shared(conn, "ab"))
