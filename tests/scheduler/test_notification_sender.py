"""The leader sends what is in the outbox: a sink that hangs, is dead or poisoned holds up nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import notifications
from evertick.db.queries.notifications import Delivery
from evertick.domain.dags.params import ParamSpec, ParamType
from evertick.domain.notifications import NotificationEvent, NotificationRuleSpec
from evertick.observability import metrics
from evertick.scheduler.scheduler import Scheduler
from tests.engine.world import Runner, make_dag, put, start, value
from tests.notifications.sinks import web_sink
from tests.system.hosting import Said, hosted, quick
from tests.waiting import eventually


def scheduler(database: str, folder: Path, said: Said, **changes: Any) -> Scheduler:
    settings = quick(database, folder, webhook_allowed_networks=("127.0.0.1",), **changes)
    return Scheduler(settings, url=database, owner="one", log=said.log)


async def write(conn: AsyncConnection, sink: str, count: int = 1) -> None:
    await conn.execute(
        "insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at)"
        """ select 0, %s, 'failure', '{"event": "failure", "dag": "d"}', clock(), clock(), clock()"""
        " from generate_series(1, %s)",
        [sink, count],
    )


async def ended(conn: AsyncConnection, sink: str, count: int = 1) -> list[Delivery]:
    async def found() -> list[Delivery] | None:
        rows = [
            each
            for each in await notifications.list_deliveries(conn, notifications.DeliveryFilter(sink=sink), limit=1000)
            if each.ended_at is not None
        ]
        return rows if len(rows) >= count else None

    rows: list[Delivery] = await eventually(found, 60)
    return rows


@pytest.mark.requirement("F7")
async def test_a_dead_a_hanging_and_a_poisoned_sink_hold_up_no_other(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    said = Said()
    with web_sink() as hook:
        hook.status["/hangs"] = None
        hangs, dead, good = f"webhook:{hook.url}/hangs", "webhook:http://127.0.0.1:1/", f"webhook:{hook.url}/good"
        await write(conn, hangs, 10)
        await write(conn, dead, 5000)
        await write(conn, "poison")
        await write(conn, good, 30)
        await put(
            conn, make_dag("d", {"a": []}, notices=(NotificationRuleSpec(event=NotificationEvent.SUCCESS, sink=good),))
        )
        run_id = await start(conn, "d")
        async with hosted(scheduler(database, tmp_path, said)):
            await said.saw("leadership_acquired")
            assert {each.state for each in await ended(conn, good, 30)} == {"sent"}
            (poison,) = await ended(conn, "poison")
            assert (poison.state, poison.attempts) == ("failed", 1)
            # A run goes on, and is told.
            await (await Runner.join(conn)).drain()
            assert run_id in {each.run_id for each in await ended(conn, good, 31)}
            tried = await value(conn, "select sum(attempts) from outbox where sink = %s", dead)
            assert 1 <= int(str(tried)) <= 30, "a sink that is down is tried now and then, not by all that wait for it"
        hook.released.set()
    assert len(hook.ids("/good")) == len(set(hook.ids("/good"))) == 31
    assert not said.events("loop_failed")


async def test_it_tries_again_and_gives_up_after_so_many(database: str, conn: AsyncConnection, tmp_path: Path) -> None:
    said = Said()
    with web_sink() as hook:
        hook.status["/"] = 503
        sink = f"webhook:{hook.url}/"
        await write(conn, sink)
        async with hosted(scheduler(database, tmp_path, said, notify_attempts=2)):
            await said.saw("delivery_attempted", outcome="failed", attempt=1, answer="HTTP 503 thanks")
            await conn.execute("update outbox set due_at = clock()")
            (row,) = await ended(conn, sink)
        assert (row.state, row.attempts, row.answer) == ("failed", 2, "HTTP 503 thanks")
        assert hook.ids() == [str(row.delivery_id)] * 2


async def test_what_waits_too_long_is_given_up_and_counted(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    sink = "webhook:http://127.0.0.1:1/"
    await write(conn, sink, 3)
    await conn.execute("update outbox set waiting_since = clock() - interval '2 hours', due_at = clock()")
    given_up = metrics.NOTIFICATIONS.labels(outcome="given_up")
    before = given_up._value.get()
    async with hosted(scheduler(database, tmp_path, Said(), notify_expire_hours=1.0)):
        rows = await ended(conn, sink, 3)
        # They are counted once it is recorded: a service that is stopped in between counts nothing.
        await eventually(lambda: given_up._value.get() == before + 3)
    assert {each.state for each in rows} == {"failed"}


async def test_the_settings_become_who_is_told_of_every_dag(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    said = Said()
    with web_sink() as hook:
        sink = f"webhook:{hook.url}/"
        await put(conn, make_dag("d", {"a": []}))
        async with hosted(scheduler(database, tmp_path, said, notify_on_failure=(sink,))):
            await eventually(lambda: value(conn, "select count(*) = 1 from default_notification_rule"))
            run_id = await start(conn, "d")
            await (await Runner.join(conn)).drain({"a": "failed"})
            await ended(conn, sink)
        assert [(each.json["dag"], each.json["run"]) for each in hook.told] == [("d", run_id)]
        async with hosted(scheduler(database, tmp_path, said)):
            await eventually(lambda: value(conn, "select count(*) = 0 from default_notification_rule"))


async def test_a_callback_becomes_one_run_of_its_dag(database: str, conn: AsyncConnection, tmp_path: Path) -> None:
    said = Said()
    event = ParamSpec(name="event", type=ParamType.OBJECT, default={})
    await put(conn, make_dag("d.callback.tell", {"tell": []}, params=(event,)))
    await write(conn, "call:d.callback.tell")
    await write(conn, "call:d.callback.gone")
    async with hosted(scheduler(database, tmp_path, said)):
        (called,) = await ended(conn, "call:d.callback.tell")
        gone = await said.saw("delivery_attempted", outcome="failed")
        # Sent twice because nobody knew: still one run.
        await conn.execute(
            "update outbox set state = 'waiting', ended_at = null, due_at = clock() where state = 'sent'"
        )
        await said.saw("delivery_attempted", outcome="sent", attempt=2)
    assert (called.state, called.answer) == ("sent", "run 1")
    assert "There is no DAG 'd.callback.gone'" in gone["answer"]
    assert await value(conn, "select count(*) from run") == 1
    params = await value(conn, "select params from run")
    assert params == {"event": {"event": "failure", "dag": "d", "delivery": str(called.delivery_id)}}
