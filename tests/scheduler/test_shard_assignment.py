"""Several shards and schedulers in the test's own process: shared out evenly, handed over, closed; and no fire is lost."""

from __future__ import annotations

from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.notify import Channel, notify
from evertick.domain.access import Actor
from evertick.domain.dags.spec import ChildSpec, NamedSchedule, TaskKind
from evertick.domain.schedules.dependencies import Asset, after
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.shards import set_shards
from evertick.observability import metrics
from evertick.scheduler.leadership import Leadership
from evertick.scheduler.scheduler import AGAIN_SHARE, PATIENCE_SHARE
from tests.engine.world import Runner, make_dag, put, start, value
from tests.scheduler.test_scheduler import all_fired, make_scheduler, publish_every
from tests.system.hosting import Said, hosted, quick
from tests.waiting import eventually

DAGS = 8


async def owners(conn: AsyncConnection) -> list[str | None]:
    cursor = await conn.execute("select leader from shard where state <> 'closed' order by shard")
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
        await said["a"].saw("leadership_acquired")
        instants = await publish_several(conn, times=40)
        await notify(conn, Channel.SCHEDULE)
        await said["a"].saw("schedules_fired")
        await set_shards(conn, shards=4, actor=Actor("test"))
        await eventually(lambda: is_shared(conn, "a"))
        await eventually(lambda: value(conn, "select count(distinct shard) > 1 from schedule_state"))
        await stack.enter_async_context(hosted(make_scheduler(settings, said["b"], "b")))
        await eventually(lambda: is_shared(conn, "ab"))
        await said["b"].saw("schedules_fired")
        await set_shards(conn, shards=2, actor=Actor("test"))
        await eventually(lambda: value(conn, "select max(shard) = 1 from schedule_state"))
        await conn.execute("update shard set rebalancing_since = rebalancing_since - interval '2 minutes'")
        await eventually(lambda: value(conn, "select count(*) = 2 from shard where state = 'closed'"))
        await first.aclose()
        await eventually(lambda: is_shared(conn, "b"))
        for dag, due in instants.items():
            await all_fired(conn, dag, due)
    assert await value(conn, "select sum(misplaced_count(shard, 1000)) from shard") == 0
    assert await value(conn, "select count(*) from shard where leader is not null") == 0
    assert await value(conn, "select count(*) from scheduler") == 0, "they said that they left"
    assert said["a"].events("leadership_transferred"), "what was too much was given away, not taken"
    for each in said.values():
        assert not each.events("drift_repaired"), "nothing was taken for lost"
        assert not each.events("loop_failed") and not each.events("job_failed"), each.all


async def names_apart(conn: AsyncConnection, *bases: str) -> list[str]:
    """Names like these that are in shards 1, 0, 1, 0 … of two."""
    made = "select min(%s || n) from generate_series(1, 30) n where shard_of(%s || n, 2) = %s"
    return [str(await value(conn, made, base, base, 1 - place % 2)) for place, base in enumerate(bases)]


async def have_run(conn: AsyncConnection, runner: Runner, dags: list[str], count: int) -> bool:
    """Whether each of the DAGs has so many runs, all over; what there is to run is run."""
    await runner.drain()
    done = "select count(*) from run_status s join dag d using (dag_id) where d.name = %s and s.state = 'success'"
    return all([await value(conn, done, dag) == count for dag in dags])


async def test_dags_of_different_shards_run_after_each_other_and_start_each_other(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    """Each of two schedulers leads one of the shards. Then there are three, and the same goes on while DAGs move."""
    await set_shards(conn, shards=2, actor=Actor("test"))
    dags = await names_apart(conn, "first", "then", "parent", "child")
    first, then, parent, child = dags
    await put(conn, make_dag(first, {"t": []}, per_task={"t": {"outlets": ("data",)}}))
    waiting = NamedSchedule(name="main", spec=parse_schedule(after(first, Asset("data"))))
    await put(conn, replace(make_dag(then, {"t": []}), schedules=(waiting,)))
    await put(conn, make_dag(child, {"t": []}))
    call = {"kind": TaskKind.TRIGGER, "child": ChildSpec(dag=child, params={}, waits=True)}
    await put(conn, make_dag(parent, {"call": [], "last": ["call"]}, per_task={"call": call}))
    runner, said = await Runner.join(conn), {name: Said() for name in "ab"}
    async with AsyncExitStack() as stack:
        for name in "ab":
            await stack.enter_async_context(hosted(make_scheduler(quick(database, tmp_path), said[name], name)))
        await eventually(lambda: is_shared(conn, "ab"))
        for count, shards in ((1, 2), (2, 3)):
            await set_shards(conn, shards=shards, actor=Actor("test"))
            await start(conn, first)
            await start(conn, parent)
            await eventually(partial(have_run, conn, runner, dags, count))
        await eventually(lambda: value(conn, "select sum(misplaced_count(shard, 1000)) = 0 from shard"))
    assert await value(conn, "select count(*) from run") == 2 * len(dags)
    for each in said.values():
        assert each.events("leadership_acquired") and not each.events("drift_repaired")


@pytest.mark.requirement("A10")
async def test_shares_stay_as_they_are_once_they_are_even(database: str, conn: AsyncConnection, tmp_path: Path) -> None:
    await set_shards(conn, shards=5, actor=Actor("test"))
    settings = quick(database, tmp_path)
    async with AsyncExitStack() as stack:
        for name in "abc":
            await stack.enter_async_context(hosted(make_scheduler(settings, Said(), name)))
        await eventually(lambda: is_shared(conn, "abc"))
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
        await eventually(lambda: value(conn, "select count(*) = 3 from shard where leader = 'a'"))
        await eventually(lambda: sum(each.value for each in metrics.SHARD_LEADER.collect()[0].samples) == 3)
    await set_shards(conn, shards=1, actor=Actor("test"))
    async with hosted(make_scheduler(settings, Said(), "a")):
        await eventually(lambda: value(conn, "select count(*) = 3 from shard where leader = 'a'"))
    assert await value(conn, "select open_shard_count()") == 1, "what somebody chose stays"


async def test_without_wake_ups_a_shard_that_is_handed_over_is_taken_within_a_tick_or_two(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    await set_shards(conn, shards=2, actor=Actor("test"))
    plain: dict[str, Any] = {"listen_notify": False}
    async with hosted(make_scheduler(quick(database, tmp_path, **plain), Said(), "a")):
        await eventually(lambda: value(conn, "select count(*) = 2 from shard where leader = 'a'"))
        said = Said()
        async with hosted(make_scheduler(quick(database, tmp_path, **plain), said, "b")):
            await said.saw("leadership_acquired", shard=1)
            await eventually(lambda: is_shared(conn, "ab"))


@pytest.mark.requirement("A10", "N02")
async def test_a_leader_that_nobody_could_watch_asks_for_that_again_before_the_next_tick(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    """Who was frozen before it still holds the session lock. If this one died before it has it, its lease would be waited for."""
    settings = quick(database, tmp_path, tick_seconds=1.0, leader_lease_seconds=30.0)
    await conn.execute("select pg_advisory_lock(4712, 0)")
    lead = Leadership(settings, url=database, owner="a", log=Said().log)
    own = await lead.connection()
    await lead.try_acquire(own)
    assert lead.epoch is not None and lead.tick_seconds < 0.5
    await conn.execute("select pg_advisory_unlock(4712, 0)")
    await eventually(lambda: lead.is_renewal_due)
    assert (await lead.poll_work(own)).has_session_lock
    assert lead.tick_seconds == 1.0 and not lead.is_renewal_due
    await lead.release()


@pytest.mark.requirement("A10", "N01", "N03")
def test_what_is_promised_of_takeovers_fits_the_default_settings() -> None:
    """Half a second is left for connecting and for a machine that is busy."""
    settings = Settings()
    taken_in = settings.tick_seconds * (PATIENCE_SHARE + AGAIN_SHARE)
    assert settings.tick_seconds + taken_in <= 2.0 - 0.5, "killed: everybody looks once per tick"
    # Deaf but not mute: the server hears one more renewal, a tick after the leader has heard the last answer.
    assert settings.tick_seconds + settings.leader_lease_seconds + taken_in <= 6.0 - 0.5
