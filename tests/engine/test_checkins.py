"""Check-ins: what is expected, when a missing report is an alert, and what a report ends; and the ping of a monitor."""

from __future__ import annotations

import asyncio

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries.monitoring import checkins
from evertick.domain.access import Actor
from evertick.domain.errors import NotFound, NotLeader
from evertick.domain.notifications import headline
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.monitoring.checkins import delete_checkin, put_checkin, raise_late_checkins, record_checkin
from evertick.observability import metrics
from evertick.scheduler.ping import IDLE_SECONDS, PING_SECONDS, Ping
from tests.engine.world import T0, later, lead, make_dag, put, set_clock, value
from tests.notifications.sinks import web_sink
from tests.system.hosting import Said
from tests.waiting import eventually

ACTOR = Actor("test")
HOURLY = parse_schedule("0 * * * *")


@pytest.fixture
async def rolled(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, T0)
    await rollback_conn.execute(
        "insert into default_notification_rule values ('deadline', 'webhook:https://x.example', false)"
    )
    return rollback_conn


async def sent(conn: AsyncConnection) -> list[str]:
    found = await value(conn, "select array_agg(payload->>'alert' order by delivery_id) from outbox")
    return list(found or [])  # type: ignore[call-overload]


async def test_a_report_that_does_not_arrive_is_one_alert_until_the_next_report(rolled: AsyncConnection) -> None:
    epoch = await lead(rolled)

    async def late(seconds: float) -> list[str]:
        await set_clock(rolled, later(seconds))
        return await raise_late_checkins(rolled, shard=0, epoch=epoch)

    assert await put_checkin(rolled, name="backup", spec=HOURLY, grace_seconds=60, actor=ACTOR)
    assert not await put_checkin(rolled, name="backup", spec=HOURLY, grace_seconds=60, actor=ACTOR)
    assert await late(3659) == []
    assert await late(3661) == ["backup"]
    assert await late(3700) == [] and await sent(rolled) == ["no_checkin"]
    found = await record_checkin(rolled, name="backup", message="12 GB", has_failed=False)
    assert (found.late_since, found.message, found.count) == (None, "12 GB", 1)
    assert found.due_at == later(7200)
    assert await late(7259) == []
    # A moment before its instant: it is the report for that instant.
    await set_clock(rolled, later(7180))
    assert (await record_checkin(rolled, name="backup", message=None, has_failed=False)).due_at == later(10_800)
    await record_checkin(rolled, name="backup", message="disk full", has_failed=True)
    assert await sent(rolled) == ["no_checkin", "checkin_failed"]
    fact = await value(rolled, "select payload from outbox order by delivery_id desc limit 1")
    assert headline(fact) == "Check-in backup reported a failure"  # type: ignore[arg-type]
    assert await late(10_861) == ["backup"], "the next one is expected as usual"


async def test_only_the_leader_raises_and_a_deleted_check_in_expects_nothing(rolled: AsyncConnection) -> None:
    epoch = await lead(rolled)
    await put_checkin(rolled, name="backup", spec=HOURLY, grace_seconds=0, actor=ACTOR)
    await set_clock(rolled, later(4000))
    async with rolled.transaction(force_rollback=True):
        assert await raise_late_checkins(rolled, shard=0, epoch=epoch) == ["backup"]
    with pytest.raises(NotLeader):
        async with rolled.transaction():
            await raise_late_checkins(rolled, shard=0, epoch=epoch - 1)
    assert await delete_checkin(rolled, name="backup", actor=ACTOR)
    assert not await delete_checkin(rolled, name="backup", actor=ACTOR)
    assert await raise_late_checkins(rolled, shard=0, epoch=epoch) == []
    with pytest.raises(NotFound):
        await record_checkin(rolled, name="backup", message=None, has_failed=False)


async def test_what_keeps_the_ping_from_being_sent(rolled: AsyncConnection) -> None:
    await put(rolled, make_dag("timed", {"a": []}, every="@every 60s"))

    async def problems(statement: str) -> int:
        async with rolled.transaction(force_rollback=True):
            await rolled.execute(statement)
            return await checkins.unaccounted(rolled, late_seconds=60)

    assert await problems("select 1") == 0
    assert await problems("update schedule_state set next_due = clock() - interval '61 s'") == 1
    assert await problems("update schedule_state set next_due = clock() - interval '59 s'") == 0
    late_and_paused = "update schedule_state set is_paused = true, next_due = clock() - interval '1 h'"
    assert await problems(late_and_paused) == 0
    assert await problems("update schedule_state set error = 'broken', next_due = null") == 1
    violation = (
        "insert into proof_violation (check_name, subject, detail, found_at, seen_at)"
        " values ('{}', 'x', 'x', clock(), clock())"
    )
    assert await problems(violation.format("fire_unanswered")) == 1
    assert await problems(violation.format("gate_over_size")) == 0


async def test_a_monitor_is_pinged_by_the_leader_alone_and_one_that_hangs_delays_nothing(database: str) -> None:
    with web_sink() as monitor:
        settings = Settings(webhook_allowed_networks=("127.0.0.0/8",))
        ping = Ping(settings, url=database, target=f"{monitor.url}/ok", log=Said().log)
        metrics.LEADER.set(0)
        assert await ping.tick() == IDLE_SECONDS and monitor.told == []
        metrics.LEADER.set(1)
        try:
            assert await ping.tick() == PING_SECONDS
            assert [each.path for each in monitor.told] == ["/ok"]
            monitor.status["/broken"] = 500
            said = Said()
            broken = Ping(settings, url=database, target=f"{monitor.url}/broken", log=said.log)
            assert await broken.tick() == PING_SECONDS
            assert said.events("ping_failed")
            monitor.status["/hangs"] = None
            hangs = asyncio.create_task(
                Ping(settings, url=database, target=f"{monitor.url}/hangs", log=Said().log).tick()
            )
            await eventually(lambda: any(each.path == "/hangs" for each in monitor.told))
            assert not hangs.done(), "it waits in a thread, and the loop goes on"
            monitor.released.set()
            assert await hangs == PING_SECONDS
        finally:
            metrics.LEADER.set(0)
            monitor.released.set()
