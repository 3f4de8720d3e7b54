"""Forecasts on the real engine: how good they are, the warning before a deadline is missed, and the count of both."""

from __future__ import annotations

import statistics
from datetime import timedelta

import pytest
from psycopg import AsyncConnection

from evertick.db.queries.monitoring import figures
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.monitoring.figures import count_figures
from evertick.engine.monitoring.forecasts import read_snapshot, record_forecast
from evertick.scheduler.forecaster import Forecaster
from tests.engine.forecast_workloads import Judged, run_workload
from tests.engine.world import Runner, later, lead, make_dag, put, set_clock, start, value
from tests.system.hosting import Said
from tests.waiting import eventually


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, later(0))
    return rollback_conn


async def test_ends_of_runs_are_near_what_was_predicted(conn: AsyncConnection) -> None:
    """The short form of `make forecast`."""
    judged = Judged()
    await run_workload(conn, 4, judged)
    assert statistics.median(judged.errors) < 0.3, judged.text()
    assert sum(judged.inside) >= len(judged.inside) / 2, judged.text()


async def test_a_deadline_that_will_be_missed_is_an_alert_before_it_is_missed(conn: AsyncConnection) -> None:
    await put(conn, make_dag("slow", {"a": [], "b": ["a"]}, every="@every 100s", finish_within_seconds=30.0))
    await conn.execute("insert into default_notification_rule values ('deadline', 'webhook:https://x.example', false)")
    epoch = await lead(conn)
    leader, runner = {"shard": 0, "epoch": epoch}, await Runner.join(conn)
    await count_figures(conn, shard=0, epoch=epoch, limit=10, settle_seconds=0)
    for second in (100, 200, 300):
        await set_clock(conn, later(second))
        await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
        for lasting in (20, 40):
            (claim,) = await runner.claim()
            await set_clock(conn, later(second + lasting))
            await runner.finish(claim)
    await count_figures(conn, shard=0, epoch=epoch, limit=10, settle_seconds=0)
    forecaster = Forecaster(log=Said().log)

    async def is_over() -> bool:
        return (await forecaster.run_slice(conn, leader)).in_seconds >= 60  # type: ignore[arg-type]

    assert not await is_over(), "the simulation has begun"
    await eventually(is_over)
    raised = await value(conn, "select array_agg(kind || ' ' || due_at) from alert where ended_at is null")
    assert raised == [f"will_miss {later(430):%Y-%m-%d %H:%M:%S}+00"]
    assert await value(conn, "select payload->>'alert' from outbox") == "will_miss"
    assert await record_forecast(conn, shard=0, epoch=epoch, bands=[], misses=[]) != [], "no longer expected"
    assert await value(conn, "select count(*) from alert where ended_at is null") == 0


async def test_a_run_whose_schedule_fires_next_after_the_horizon_is_warned_of_as_well(conn: AsyncConnection) -> None:
    await put(conn, make_dag("rare", {"a": []}, every="@every 40h", finish_within_seconds=30.0))
    epoch = await lead(conn)
    await set_clock(conn, later(40 * 3600))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    await conn.execute(
        "insert into task_figure select d.dag_id, 'a', 1, 0, 0, 0, 99, 0, 0, 0, 0, null, '{99,99,99}', clock() from dag d"
    )
    await Runner.join(conn)
    forecaster = Forecaster(log=Said().log)

    async def is_over() -> bool:
        done = await forecaster.run_slice(conn, {"shard": 0, "epoch": epoch})
        return done.in_seconds >= 60

    await eventually(is_over)
    assert await value(conn, "select array_agg(kind) from alert where ended_at is null") == ["will_miss"]


async def test_the_first_band_of_a_run_is_compared_with_its_end(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"t": []}))
    epoch, runner = await lead(conn), await Runner.join(conn)
    await count_figures(conn, shard=0, epoch=epoch, limit=10, settle_seconds=0)
    hit, miss = await start(conn, "d"), await start(conn, "d")
    claims = await runner.claim()

    async def predict(**band: float) -> None:
        bands: list[dict[str, object]] = [{"run": run, "low": 5, "middle": 10, **band} for run in (hit, miss)]
        await record_forecast(conn, shard=0, epoch=epoch, bands=bands, misses=[])

    await predict(high=20)
    await predict(high=100)
    for second, claim in zip((10, 40), claims, strict=True):
        await set_clock(conn, later(second))
        await runner.finish(claim)
    await count_figures(conn, shard=0, epoch=epoch, limit=10, settle_seconds=0)
    known = await figures.accuracy(conn)
    assert known is not None and (known.judged, known.inside, known.error_sum) == (2, 1, 0.75)
    assert await value(conn, "select count(*) from run_forecast") == 0


async def test_a_snapshot_has_what_is_open_and_what_will_begin(conn: AsyncConnection) -> None:
    await put(conn, make_dag("d", {"a": [], "b": ["a"]}, every="@every 60s", max_active_runs=3))
    runner = await Runner.join(conn, slots=7)
    run_id = await start(conn, "d")
    await runner.claim()
    await set_clock(conn, later(30))
    found = await read_snapshot(conn, horizon=timedelta(minutes=5))
    first, *others = found.snapshot.runs
    assert (first.run_id, first.is_started, first.progress[0].elapsed) == (run_id, True, (30.0,))
    assert [each.begins for each in others] == [30, 90, 150, 210, 270]
    assert found.snapshot.runners[0].slots == 7 and found.snapshot.active_limits == {"d": 3}
