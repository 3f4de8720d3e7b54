"""The scheduler in the test's own process, on a real database: on time, whatever else is broken."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.notify import Channel, notify
from evertick.db.queries import shards
from evertick.domain.access import Actor
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.retry import RetryPolicy
from evertick.domain.schedules.dependencies import after
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.finish_and_claim import finish_and_claim
from evertick.engine.publish import publish
from evertick.scheduler.scheduler import Scheduler
from tests.engine.plans import plant
from tests.engine.world import OWN_LOCKS, Runner, end, make_dag, put, start, states, value
from tests.system.hosting import Said, armed, hosted, quick
from tests.system.work import start_with
from tests.waiting import eventually

# No tick comes to help within these tests.
LONG_TICKS: dict[str, Any] = {
    "tick_seconds": 60.0,
    "leader_lease_seconds": 200.0,
    "heartbeat_seconds": 10.0,
    "lost_after_seconds": 300.0,
}
# An idle machine takes 3 ms. A busy one may take longer, but not as long as a step that hangs may take.
LATE_SECONDS = Settings().maintenance_timeout_seconds - 1.0


def make_scheduler(settings: Settings, said: Said, owner: str = "one") -> Scheduler:
    assert settings.database_url is not None
    return Scheduler(settings, url=settings.database_url, owner=owner, log=said.log)


async def publish_every(
    conn: AsyncConnection, dag: str, *, seconds: float, times: int, delay: float = 0.2
) -> list[datetime]:
    """A DAG of one task that fires so many times from `delay` on; returns its instants."""
    first = await shards.read_clock(conn) + timedelta(seconds=delay)
    instants = [first + timedelta(seconds=seconds * number) for number in range(times)]
    spec = parse_schedule(
        timedelta(seconds=seconds), start_at=first, anchor_at=first, end_at=instants[-1] + timedelta(milliseconds=1)
    )
    made = replace(
        make_dag(dag, {"a": []}), schedules=(NamedSchedule(name="main", spec=spec),), misfire=MisfirePolicy.ALL
    )
    await put(conn, make_dag(f"{dag}_bundle", {"a": []}))
    async with conn.transaction():
        await publish(conn, spec=made, file=f"{dag}.py", bundle_hash="b", actor=Actor("test"))
        await start_with(conn, dag, first)
    return instants


async def fired(conn: AsyncConnection, dag: str) -> list[tuple[datetime, float]]:
    """Each fire of the DAG, and how late its run was made."""
    cursor = await conn.execute(
        "select r.fire_at, extract(epoch from r.created_at - r.fire_at)::float from run r join dag d using (dag_id)"
        " where d.name = %s order by 1",
        [dag],
    )
    return await cursor.fetchall()


async def all_fired(conn: AsyncConnection, dag: str, instants: list[datetime]) -> list[float]:
    """Wait until every instant has its run; returns how late each was."""

    async def found() -> list[tuple[datetime, float]] | None:
        rows = await fired(conn, dag)
        return rows if len(rows) >= len(instants) else None

    rows = await eventually(found)
    assert [at for at, _ in rows] == instants
    return [late for _, late in rows]


@pytest.mark.serial
@pytest.mark.requirement("R2", "R3", "A2")
async def test_it_sleeps_until_the_next_due_instant_and_not_until_the_tick(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path, **LONG_TICKS), said)):
        await said.saw("leadership_acquired")
        # So many that a machine that stands still for a second or two does not meet them all at once.
        instants = await publish_every(conn, "pulse", seconds=0.3, times=10)
        await conn.execute("select pg_notify('evertick_plan', '')")
        late = await all_fired(conn, "pulse", instants)
    print(f"late by {max(late) * 1000:.1f} ms at most")
    assert max(late) < LATE_SECONDS
    assert len(said.events("schedules_fired")) >= 2, "it did not fire them all in one go"


@pytest.mark.requirement("R6", "D6")
async def test_it_sleeps_until_the_next_retry_is_due(database: str, conn: AsyncConnection, tmp_path: Path) -> None:
    await put(conn, make_dag("d", {"a": []}, per_task={"a": {"retry": retries(1)}}))
    run_id = await start(conn, "d")
    runner = await Runner.join(conn)
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path, **LONG_TICKS), said)):
        await said.saw("leadership_acquired")
        (claim,) = await runner.claim()
        await runner.finish(claim, "failed", retry_in=0.3)
        assert (await states(conn, run_id))["a"] == "pending"
        await conn.execute("select pg_notify('evertick_plan', '')")
        await eventually(lambda: value(conn, "select count(*) from task where state = 'available'"))


async def retry_soon(conn: AsyncConnection) -> None:
    """Something for `promote` to do in a moment."""
    await put(conn, make_dag("flaky", {"a": []}, per_task={"a": {"retry": retries(1)}}))
    await start(conn, "flaky")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    await runner.finish(claim, "failed", retry_in=0.1)


def retries(count: int) -> RetryPolicy:
    return RetryPolicy(retries=count, delay_seconds=0)


POISON = {
    "no kind": {"spec": {}},
    "an unknown kind": {"spec": {"kind": "lunar"}},
    "a cron that is none": {"spec": {"kind": "cron", "expression": "every now and then"}},
    "an interval of nothing": {"spec": {"kind": "interval", "every_seconds": 0}},
    "an interval that is text": {"spec": {"kind": "interval", "every_seconds": "often"}},
    "a zone that is nowhere": {"spec": {"kind": "cron", "expression": "* * * * *", "timezone": "Atlantis"}},
    "a list": {"spec": [1, 2, 3]},
    "nothing": {"spec": None},
    "an unknown policy": {"misfire": "whatever"},
    "a window without end": {"window_seconds": "Infinity"},
    "a window that is no number": {"window_seconds": "NaN"},
}
HARMLESS = {"a window without end"}


@pytest.mark.requirement("N22", "V11", "I2", "A1")
async def test_a_schedule_that_cannot_be_planned_is_quarantined_and_the_others_fire_on_time(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    """V11, for every kind of poison at once."""
    for number, change in enumerate(POISON.values()):
        await publish_every(conn, f"poison{number}", seconds=0.2, times=2)
        for column, stored in change.items():
            written = json.dumps(stored) if column == "spec" else stored
            await conn.execute(
                f"update schedule set {column} = %s where dag_id = (select dag_id from dag where name = %s)",  # type: ignore[arg-type]
                [written, f"poison{number}"],
            )
    instants = await publish_every(conn, "good", seconds=0.2, times=5)
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path), said)):
        late = await all_fired(conn, "good", instants)
        wanted = len(POISON) - len(HARMLESS)
        await eventually(
            lambda: value(conn, "select count(*) >= %s from schedule_state where error is not null", wanted)
        )
    assert max(late) < LATE_SECONDS
    cursor = await conn.execute(
        "select d.name, s.error from schedule_state s join schedule c using (schedule_id) join dag d using (dag_id)"
        " where s.error is not null"
    )
    errors = dict(await cursor.fetchall())
    expected = {f"poison{number}" for number, what in enumerate(POISON) if what not in HARMLESS}
    assert errors.keys() == expected
    assert all("Publish a corrected schedule" in error for error in errors.values())
    assert {event["event"] for event in said.all if event["level"] == "error"} == {"row_quarantined"}
    assert len(said.events("row_quarantined")) == wanted, "each is told once"


@pytest.mark.requirement("N22", "V11", "A1")
async def test_a_schedule_whose_run_the_database_refuses_is_quarantined_alone(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    """V11: a chunk that is refused is halved until the one that is refused stands alone."""
    names = [f"d{number}" for number in range(9)]
    wanted = {name: await publish_every(conn, name, seconds=0.2, times=3, delay=0.5) for name in names}
    await conn.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin"
        " if new.dag_id = (select dag_id from dag where name = 'd4') then raise exception 'not this one'; end if;"
        " return new; end $$"
    )
    await conn.execute("create trigger refuse before insert on run for each row execute function refuse()")
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path), said)):
        for name in names:
            if name != "d4":
                assert max(await all_fired(conn, name, wanted[name])) < LATE_SECONDS
    assert await fired(conn, "d4") == []
    assert "not this one" in str(await value(conn, "select string_agg(error, '') from schedule_state"))
    assert await value(conn, "select count(*) from schedule_state where error is not null") == 1


BREAKAGES = {
    "promote": "drop function promote_due_tasks",
    "reconcile": "drop function reconcile_runs",
    "reap": "alter table runner rename column observed_seq to lost",
}


@pytest.mark.requirement("A12", "A1", "A2")
@pytest.mark.parametrize("step", BREAKAGES)
async def test_a_step_that_fails_does_not_stop_firing(
    database: str, conn: AsyncConnection, tmp_path: Path, step: str
) -> None:
    await retry_soon(conn)
    await conn.execute(BREAKAGES[step])  # type: ignore[arg-type]
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path), said)):
        instants = await publish_every(conn, "pulse", seconds=0.2, times=5)
        late = await all_fired(conn, "pulse", instants)
        await said.saw("job_failed", job=step)
    assert max(late) < LATE_SECONDS
    assert {event["job"] for event in said.events("job_failed")} == {step}


@pytest.mark.requirement("A12")
async def test_firing_that_fails_stops_neither_retries_nor_reaping(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    await put(conn, make_dag("d", {"a": [], "b": []}, per_task={"a": {"retry": retries(1)}}))
    run_id = await start(conn, "d")
    runner = await Runner.join(conn)
    retried, held = sorted(await runner.claim(), key=lambda claim: claim.idx)
    await runner.finish(retried, "failed", retry_in=0.2)
    await conn.execute("alter table schedule rename to schedule_away")
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path, lost_after_seconds=0.5), said)):
        await said.saw("runner_lost", session=runner.session)
        await eventually(lambda: value(conn, "select count(*) = 2 from task where state = 'available'"))
    assert {event["job"] for event in said.events("job_failed")} == {"fire"}
    assert await states(conn, run_id) == {"a": "available", "b": "available"}
    assert held.epoch == 1


@pytest.mark.requirement("N04", "A10")
@pytest.mark.parametrize("statement", ["fire_schedules", "promote_due_tasks", "poll_work", "try_acquire_shard"])
async def test_a_connection_that_breaks_in_a_step_costs_a_moment(
    database: str, conn: AsyncConnection, tmp_path: Path, statement: str
) -> None:
    """N04."""
    await retry_soon(conn)
    said = Said()
    with armed(f"{statement}:error:1"):
        async with hosted(make_scheduler(quick(database, tmp_path), said)):
            instants = await publish_every(conn, "pulse", seconds=0.2, times=4)
            await all_fired(conn, "pulse", instants)
    assert len(said.events("database_unreachable")) == 1
    assert await value(conn, "select leader is null from shard"), "a clean stop hands the shard over"


@pytest.mark.requirement("A4", "A10")
async def test_a_scheduler_that_lost_leadership_fires_nothing(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    said, settings = Said(), quick(database, tmp_path)
    async with hosted(make_scheduler(settings, said)):
        await said.saw("leadership_acquired")
        await conn.execute(
            "update shard set epoch = epoch + 1, leader = 'other', has_session_lock = false,"
            " lease_until = now() + interval '1 hour'"
        )
        await said.saw("leadership_lost")
        await publish_every(conn, "pulse", seconds=0.1, times=2, delay=0.05)
        stood_by = Said()
        async with hosted(make_scheduler(settings, stood_by, owner="two")):
            await eventually(lambda: value(conn, "select max(next_due) < clock() from schedule_state"))
        assert await fired(conn, "pulse") == []
        assert stood_by.events("leadership_acquired") == []
        await conn.execute("update shard set lease_until = now()")
        await eventually(lambda: value(conn, "select count(*) = 2 from run"))
    assert len(said.events("leadership_acquired")) == 2


@pytest.mark.requirement("K3", "A7", "V8")
async def test_silence_that_nobody_watched_does_not_count(database: str, conn: AsyncConnection, tmp_path: Path) -> None:
    """The scheduler was cut off for longer than the threshold: that is no reason to give up a runner."""
    runner = await Runner.join(conn)
    said = Said()
    scheduler = make_scheduler(quick(database, tmp_path, lost_after_seconds=1.0), said)
    await scheduler.first.tick()
    with armed("poll_work:error:1"):
        await conn.execute(
            "select pg_terminate_backend(pid) from pg_stat_activity where datname = current_database()"
            " and pid <> pg_backend_pid()"
        )
        began = await shards.read_clock(conn)
        await eventually(lambda: value(conn, "select clock() > %s", began + timedelta(seconds=1.5)))
        for _ in range(2):
            with pytest.raises(Exception, match=r"terminat|failpoint"):
                await scheduler.first.tick()
    for _ in range(3):
        await scheduler.first.tick()
    assert await value(conn, "select silent_seconds < 1 from runner where session = %s", runner.session)
    assert said.events("runner_lost") == []
    await scheduler.close()


async def test_a_dag_that_waits_for_another_runs_when_that_has_ended(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    """No tick comes to help: whoever ends the run is told that somebody waits, and wakes the leader."""
    await put(conn, make_dag("first", {"a": []}))
    waiting = NamedSchedule(name="main", spec=parse_schedule(after("first")))
    await put(conn, replace(make_dag("second", {"a": []}), schedules=(waiting,)))
    run_id = await start(conn, "first")
    runner = await Runner.join(conn)
    (claim,) = await runner.claim()
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path, **LONG_TICKS), said)):
        await said.saw("leadership_acquired")
        done = await finish_and_claim(
            conn, session=runner.session, reports=[end(claim, "success")], queues=[], free=0, infra_retries=3
        )
        assert done.has_arrivals
        await notify(conn, Channel.SCHEDULE)
        await eventually(lambda: value(conn, "select count(*) = 1 from run where schedule_id is not null"))
    assert await value(conn, "select array_agg(run_id) from run_trigger") == [run_id]


@pytest.mark.requirement("H1", "I3")
async def test_two_hands_drain_a_burst_and_nothing_fires_twice(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    await put(conn, make_dag("tick", {"a": []}))
    # Who made which run.
    await conn.execute("create table hand (pid int, schedule_id int)")
    await conn.execute(
        "create function note() returns trigger language plpgsql as"
        " $$begin insert into hand values (pg_backend_pid(), new.schedule_id); return new; end$$"
    )
    await conn.execute("create trigger note after insert on run for each row execute function note()")
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path, fire_batch=20), said)):
        await said.saw("leadership_acquired")
        for burst in (1, 2):
            await plant(conn, f"spike{burst}-", 1000, due=await shards.read_clock(conn))
            await conn.execute("select pg_notify('evertick_plan', '')")
            await eventually(lambda burst=burst: value(conn, "select count(*) = %s from run", burst * 1000), 60)  # type: ignore[misc]
    assert await value(conn, "select count(distinct schedule_id) from run") == 2000
    assert await value(conn, "select count(distinct pid) from hand") == 2
    assert said.events("loop_failed") == []


@pytest.mark.requirement("H1", "A12")
async def test_a_burst_worker_that_fails_delays_nothing(database: str, conn: AsyncConnection, tmp_path: Path) -> None:
    """Whoever comes second is refused: the session that leads alone may make runs."""
    await put(conn, make_dag("tick", {"a": []}))
    await conn.execute(
        f"create function note() returns trigger language plpgsql as $$begin"
        f" if not exists (select from {OWN_LOCKS} where classid = 4712 and pid = pg_backend_pid()) then"
        f" raise 'not you' using errcode = '57P05'; end if;"
        f" return new; end$$"
    )
    await conn.execute("create trigger note after insert on run for each row execute function note()")
    said = Said()
    async with hosted(make_scheduler(quick(database, tmp_path, fire_batch=20), said)):
        await said.saw("leadership_acquired")
        await plant(conn, "first", 1, due=await shards.read_clock(conn))
        await eventually(lambda: value(conn, "select count(*) = 1 from run"), 60)
        await plant(conn, "spike", 600, due=await shards.read_clock(conn))
        await conn.execute("select pg_notify('evertick_plan', '')")
        await eventually(lambda: value(conn, "select count(*) = 601 from run"), 60)
    assert await value(conn, "select count(distinct schedule_id) from run") == 601
    assert said.events("database_unreachable", loop="second_hand") or said.events("loop_failed", loop="second_hand")
