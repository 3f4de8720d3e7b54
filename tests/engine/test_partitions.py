"""Updates of partitions start a run for each complete partition of the DAGs that wait for them, exactly once."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from psycopg import AsyncConnection

from evertick import Asset, after, any_of, daily, fan_out, hourly, monthly, rollup, static, weekly
from evertick.domain.access import Actor
from evertick.domain.dags.spec import AssetSpec, NamedSchedule
from evertick.domain.errors import InvalidSchedule, NotLeader, UserError
from evertick.domain.schedules.dependencies import each_update
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine import asks
from evertick.engine.fire_schedules import fire_planned, fire_schedules, plan_next_fires
from evertick.engine.maintenance import apply_partition_arrivals, deliver_dependencies, map_arrivals
from evertick.engine.schedules import CatchUp, pause_schedule, unpause_schedule
from evertick.engine.waits import _discard_asset_events, update_asset
from tests.engine import invariants
from tests.engine.test_asks import holder
from tests.engine.world import T0, Runner, later, lead, make_dag, put, set_clock, start, value

ME = Actor("me")
DAYS = Asset("days", partitions=daily())
REGIONS = Asset("regions", partitions=static(["eu", "us", "apac"]))
ONE: dict[str, list[str]] = {"t": []}


class Scene:
    def __init__(self, conn: AsyncConnection, epoch: int, runner: Runner) -> None:
        self.conn, self.epoch, self.runner = conn, epoch, runner
        self._seconds = 0

    @classmethod
    async def of(cls, conn: AsyncConnection, **waits: object) -> Scene:
        await invariants.install(conn)
        await set_clock(conn, T0)
        for name, condition in waits.items():
            await wait(conn, name, condition)
        return cls(conn, await lead(conn), await Runner.join(conn))

    async def tell(self, asset: str, *keys: str) -> None:
        for key in keys:
            await update_asset(self.conn, asset=asset, extra={}, actor=ME, partition=key)

    async def tend(self) -> dict[str, list[str]]:
        """The partitions of all runs by DAG, after a look."""
        self._seconds += 1
        await set_clock(self.conn, later(self._seconds))
        done = await deliver_dependencies(self.conn, shard=0, epoch=self.epoch, limit=100)
        while done.has_partitions and (await map_arrivals(self.conn, shard=0, epoch=self.epoch, limit=100)).mapped:
            pass
        await set_clock(self.conn, later(self._seconds + 0.5))
        while (await fire_schedules(self.conn, shard=0, epoch=self.epoch, batch=100)).runs:
            pass
        assert await invariants.violations(self.conn) == []
        assert await value(self.conn, "select count(*) from partition_arrival") == 0
        return await self.runs()

    async def runs(self) -> dict[str, list[str]]:
        found = await value(
            self.conn,
            "select jsonb_object_agg(name, keys) from (select d.name, jsonb_agg(p.key order by r.run_id) as keys"
            " from run r join dag d using (dag_id) left join run_partition p using (run_id) group by 1) x",
        )
        return found or {}  # type: ignore[return-value]


async def wait(conn: AsyncConnection, name: str, condition: object, **rules: object) -> None:
    schedule = NamedSchedule(name="main", spec=parse_schedule(condition), **rules)  # type: ignore[arg-type]
    await put(conn, replace(make_dag(name, ONE), schedules=(schedule,)))


async def test_a_run_for_each_key_that_its_mappers_lead_to(conn: AsyncConnection) -> None:
    scene = await Scene.of(
        conn,
        same=after(DAYS),
        month=after(rollup(DAYS, monthly())),
        some=after(rollup(DAYS, monthly(), at_least=2)),
        hours=after(fan_out(DAYS, hourly())),
        both=after(DAYS, rollup(REGIONS, "2026-02-01", at_least=-1)),
        one_of=any_of(DAYS, REGIONS),
        any=after(each_update(DAYS)),
        whole=after(Asset("days")),
    )
    await scene.tell("days", "2026-02-01", "2026-02-02")
    found = await scene.tend()
    assert found["same"] == ["2026-02-01", "2026-02-02"] == found["one_of"]
    assert found["some"] == ["2026-02"] and "month" not in found and "both" not in found
    assert len(found["hours"]) == 48 and found["hours"][0] == "2026-02-01T00"
    assert found["any"] == found["whole"] == [None]
    await scene.tell("days", *(f"2026-02-{day:02}" for day in range(3, 28)))
    await scene.tell("regions", "eu", "us")
    found = await scene.tend()
    assert "month" not in found and found["both"] == ["2026-02-01"]
    assert {"eu", "us"} < set(found["one_of"]) and len(found["one_of"]) == 29
    await scene.tell("days", "2026-02-28", "2026-02-28")
    found = await scene.tend()
    assert found["month"] == ["2026-02"] and len(found["same"]) == 28, "the same key twice before a run is one run"
    dates = "select array_agg(date::text order by date) from run_partition p join dag d using (dag_id) where d.name = 'month'"
    assert await value(conn, dates) == ["2026-02-01 00:00:00+00"]
    consumed = (
        "select jsonb_array_length(consumed_updates(run_id)) from run join dag using (dag_id) where name = 'month'"
    )
    assert await value(conn, consumed) == 29


async def test_a_task_updates_the_partition_of_its_run_and_those_that_it_names(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, follows=after(REGIONS), older=after(Asset("regions")))
    regions = AssetSpec(name="regions", uri="", group="asset", extra={}, partitions={"keys": ["eu", "us", "apac"]})
    await put(conn, make_dag("makes", ONE, assets=(regions,), task_outlets=("regions",), task_asks=True))
    await start(conn, "makes", partition="us")
    (claim,) = await scene.runner.claim()
    assert await asks.ask(conn, holder(scene.runner, claim), "partition", {}) == ["us", None]
    await scene.runner.finish(claim, "success")
    assert (await scene.tend())["follows"] == ["us"]
    run = await start(conn, "makes")
    (claim,) = [each for each in await scene.runner.claim() if each.run_id == run]
    named = [{"asset": "regions", "extra": {}, "alias": None, "partition_key": key} for key in ("eu", "apac")]
    assert await asks.put_updates(conn, holder(scene.runner, claim), named)
    await scene.runner.finish(claim, "success")
    found = await scene.tend()
    assert (found["follows"], found["older"]) == (["us", "apac", "eu"], [None, None])
    with pytest.raises(InvalidSchedule, match="'mars' does not exist"):
        await scene.tell("regions", "mars")
    with pytest.raises(InvalidSchedule, match="cannot be the key"):
        await scene.tell("regions", " ")


async def test_keys_without_a_partition_are_recorded_and_start_nothing(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, month=after(rollup(DAYS, monthly())), plain=after(DAYS))
    await scene.tell("days", "someday")
    assert await scene.tend() == {"plain": ["someday"]}
    told = "select detail from audit_log where action = 'refuse_partition'"
    assert "someday" in json.dumps(await value(conn, told))


async def test_pauses_keep_and_changes_drop_what_was_received(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, w=after(rollup(REGIONS, "all")), other=after(rollup(REGIONS, "one")))
    await scene.tell("regions", "eu", "us")
    assert await scene.tend() == {}
    await pause_schedule(conn, dag="w", name="main", actor=ME)
    await scene.tell("regions", "apac")
    assert await scene.tend() == {"other": ["one"]}
    assert await value(conn, "select count(*) from partition_ready") == 1
    await unpause_schedule(conn, dag="w", name="main", actor=ME, catch_up=CatchUp(policy=MisfirePolicy.ALL))
    assert await scene.tend() == {"w": ["all"], "other": ["one"]}
    await scene.tell("regions", "eu", "us")
    await scene.tend()
    await wait(conn, "other", after(rollup(REGIONS, "everything")))
    await pause_schedule(conn, dag="w", name="main", actor=ME)
    await scene.tell("regions", "apac")
    await scene.tend()
    await unpause_schedule(conn, dag="w", name="main", actor=ME)
    assert await scene.tend() == {"w": ["all"], "other": ["one"]}, (
        "one was skipped, the other waits for another key now"
    )
    skipped = "select jsonb_agg(jsonb_build_array(count, reason)) from skip_record"
    assert await value(conn, skipped) == [[1, "paused"]]
    assert await value(conn, "select count(*) from partition_ready") == 0
    assert await _discard_asset_events(conn, dag_ids=None, asset="regions", before=None, actor=ME) == 1
    await scene.tell("regions", "eu", "us")
    assert await scene.tend() == {"w": ["all"], "other": ["one"]}


async def test_nothing_is_mapped_twice_by_a_stale_leader_or_after_a_change(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, w=after(DAYS))
    await scene.tell("days", "2026-02-01")
    await deliver_dependencies(conn, shard=0, epoch=scene.epoch, limit=100)
    arrival = int(str(await value(conn, "select arrival_id from partition_arrival")))
    schedule = int(str(await value(conn, "select schedule_id from schedule")))
    version = int(str(await value(conn, "select version from schedule")))
    row: dict[str, object] = {
        "arrival_id": arrival,
        "version": version,
        "keys": ["k"],
        "source_date": None,
        "problem": None,
    }
    ready: dict[str, object] = {"schedule_id": schedule, "version": version, "key": "k", "date": None}
    with pytest.raises(NotLeader):
        await apply_partition_arrivals(conn, shard=0, epoch=scene.epoch - 1, mapped=[row], ready=[ready])
    for mapped, due in (
        ([{**row, "version": version + 1}], [ready]),
        ([], [ready]),
        ([row], [{**ready, "version": 9}]),
    ):
        done = await apply_partition_arrivals(conn, shard=0, epoch=scene.epoch, mapped=mapped, ready=due)
        assert (done.mapped, done.became_due) == (int(mapped == [row]), 0)
    for expected in (0, 0):
        done = await apply_partition_arrivals(conn, shard=0, epoch=scene.epoch, mapped=[row], ready=[ready])
        assert (done.mapped, done.became_due) == (expected, 0), "its arrival is gone"
    await scene.tell("days", "k")
    assert await scene.tend() == {"w": ["k"]}
    consumed = "select jsonb_array_length(consumed_updates(run_id)) from run"
    assert await value(conn, consumed) == 2


async def test_a_partition_that_is_complete_after_a_plan_was_made_is_not_forgotten(conn: AsyncConnection) -> None:
    scene = await Scene.of(conn, w=after(DAYS))
    await scene.tell("days", "2026-02-01")
    await set_clock(conn, later(1))
    for key in ("2026-02-02", None):
        await deliver_dependencies(conn, shard=0, epoch=scene.epoch, limit=100)
        await map_arrivals(conn, shard=0, epoch=scene.epoch, limit=100)
        if key is not None:
            ahead = await plan_next_fires(conn, shard=0, due_at=later(2), batch=100)
            await scene.tell("days", key)
    assert ahead is not None
    await set_clock(conn, later(2))
    assert (await fire_planned(conn, ahead, shard=0, epoch=scene.epoch, batch=100)).runs == 1
    assert await scene.tend() == {"w": ["2026-02-01", "2026-02-02"]}


async def test_runs_of_times_are_for_their_partition(conn: AsyncConnection) -> None:
    await invariants.install(conn)
    await set_clock(conn, T0)
    spec = parse_schedule({"kind": "cron", "expression": "0 3 * * *", "partitions": daily(offset=-1).to_text()})
    await put(conn, replace(make_dag("w", ONE), schedules=(NamedSchedule(name="main", spec=spec),)))
    epoch = await lead(conn)
    await set_clock(conn, later(3 * 86_400))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=100)
    found = (
        "select jsonb_agg(array[p.key, p.date::text, fire_at::text]) from run left join run_partition p using (run_id)"
    )
    assert await value(conn, found) == [["2030-01-02", "2030-01-02 00:00:00+00", "2030-01-03 03:00:00+00"]]


def test_conditions_that_cannot_be_for_one_partition_are_refused() -> None:
    for wrong, why in (
        (lambda: parse_schedule(after(DAYS, "other")), "so all of them need partitions"),
        (lambda: parse_schedule(after(DAYS, rollup(DAYS, monthly()))), "twice"),
        (lambda: rollup(DAYS, hourly()), "from shorter periods to longer"),
        (lambda: rollup(Asset("x"), monthly()), "has no partitions"),
        (lambda: rollup(Asset("x", partitions=weekly()), monthly()), "weeks do not fit"),
        (lambda: rollup(REGIONS, static(["a", "b"])), "one key"),
        (lambda: rollup(DAYS, monthly(), at_least=0), "at_least"),
        (lambda: static([]), "1 to 10,000"),
        (lambda: daily(timezone="Mars"), "unknown time zone"),
    ):
        with pytest.raises(UserError, match=why):
            wrong()
