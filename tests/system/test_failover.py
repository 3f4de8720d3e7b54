"""The primary is lost and its standby takes over: nothing acknowledged is lost if commits waited for it, and a loss is
noticed and told if they did not. Either way no fire is doubled, and an old primary that comes back is left alone.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from evertick.db.connect import Purpose, connect
from evertick.db.function_sets import own_set
from evertick.domain.errors import PostgresUnavailable, StaleServer
from evertick.runtime.connections import ReconnectingConnection
from evertick.runtime.server_watch import ServerWatch
from evertick.scheduler.leadership import Leadership
from tests.engine import invariants
from tests.system.hosting import Said, quick
from tests.system.processes import Installation, Service
from tests.system.two_servers import Member, Pair, two_servers
from tests.system.work import Effect, Published, executed_twice, let_go, publish_work, schedule_now, start_run
from tests.waiting import eventually

# What a writer would leave behind, whoever it is.
TRACES = """
select (select count(*) from run), (select max(run_id) from run), (select sum(epoch) from shard),
       (select max(lease_until) from shard), (select count(*) from runner), (select sum(heartbeat_seq) from runner),
       (select count(*) from audit_log), (select max(lsn) from server_timeline), (select count(*) from task where state = 'success')
"""
FIRES = "select fire_at from run where fire_at is not null order by 1"
SUCCEEDED = "select count(*) = %s from run_status where state = 'success'"


@pytest.fixture
def synchronous(primary_data: Path) -> Iterator[Pair]:
    with two_servers(primary_data, is_synchronous=True) as pair:
        yield pair


@pytest.fixture
def asynchronous(primary_data: Path) -> Iterator[Pair]:
    with two_servers(primary_data, is_synchronous=False) as pair:
        yield pair


@asynccontextmanager
async def installed(pair: Pair, work: Published, folder: Path) -> AsyncIterator[tuple[Installation, str]]:
    """Evertick on both servers, and the name of its database there."""
    name = pair.cluster.create(pair.cluster.template())
    pair.add_standby()
    async with Installation(pair.url(name), folder) as there:
        await invariants.install(there.conn)
        await publish_work(there.conn, work)
        yield there, name
        assert await invariants.violations(there.conn) == []


def traces(member: Member, database: str) -> tuple[Any, ...]:
    with member.connect(database) as conn:
        conn.execute(f"set search_path = {own_set().search_path}")
        found = conn.execute(TRACES).fetchone()
    assert found is not None
    return tuple(found)


async def trigger_until_acknowledged(there: Installation, key: str) -> int:
    """As a client would: the same key again until there is an answer."""
    while True:
        try:
            return await start_run(there.conn, "single", key=key)
        except (psycopg.OperationalError, PostgresUnavailable):
            await there.reconnect()


async def every_one_said(services: list[Service], event: str) -> list[str]:
    """What each says about the change from the first timeline to the second."""
    return [str((await each.saw(event, timeline=2, timeline_before=1)).get("message")) for each in services]


def refuses(service: Service) -> bool:
    return any("timeline 2" in event["error"] for event in service.events("database_unreachable"))


@pytest.mark.requirement("N14", "K10", "E2", "F2", "I3", "I7")
async def test_with_a_synchronous_standby_nothing_is_lost_and_the_old_primary_is_left_alone(
    synchronous: Pair, long: Published, tmp_path: Path
) -> None:
    pair = synchronous
    async with installed(pair, long, tmp_path / "there") as (there, database):
        services = [await there.start("scheduler")]
        services += [await there.start("runner", runner_id=name) for name in ("r1", "r2")]
        instants = await schedule_now(there.conn, long, "alone", every=0.1, times=30)
        through = await start_run(there.conn, "holding")
        await there.begun("hold")
        acknowledged = [await trigger_until_acknowledged(there, f"a{number:02}") for number in range(15)]
        await eventually(lambda: there.value("select is_synchronous from server_timeline"))

        pair.promote()
        pair.crash_first()
        acknowledged += [await trigger_until_acknowledged(there, f"b{number:02}") for number in range(15)]
        told = await every_one_said(services, "failover_detected")
        assert set(told) == {"No acknowledged write is lost."}

        # The old primary is back, can be written to, and is the first in everybody's list.
        pair.first.start(synchronous_standby_names="")
        before = traces(pair.first, database)
        pair.second.break_connections(database)
        acknowledged += [await trigger_until_acknowledged(there, f"c{number:02}") for number in range(15)]
        let_go(there.effects_file)
        assert await there.ended(through) == "success"
        await eventually(lambda: there.value(SUCCEEDED, len(instants) + len(acknowledged) + 1), 30, pause_seconds=0.05)

        # Now it is the only one.
        pair.second.stop()
        await eventually(lambda: all(map(refuses, services)))
        with pytest.raises(StaleServer, match="it is on timeline 1, and this process has seen timeline 2"):
            await connect(there.url, purpose=Purpose.SCHEDULER)
        assert traces(pair.first, database) == before, "something was written to the old primary"
        pair.second.start()
        await there.reconnect()
        assert await there.ended(await trigger_until_acknowledged(there, "d")) == "success"

        assert [row[0] for row in await there.rows(FIRES)] == instants
        found = await there.rows("select run_id from run where key < 'd' order by key")
        assert [row[0] for row in found] == acknowledged
        assert all(service.is_alive for service in services), "a failover ends no service"
        assert executed_twice(there.effects()) == []
        assert await there.value("select count(*) from runner where ended_at is not null") == 0
        assert await there.value("select count(*) from audit_log where action = 'failover'") == 1


@pytest.mark.requirement("N14", "K10", "F2", "I3", "I7", "F8", "K1")
async def test_with_a_lagging_standby_the_loss_is_told_and_no_fire_is_doubled(
    asynchronous: Pair, long: Published, tmp_path: Path
) -> None:
    """Lost are fires, runs, and a claim whose body runs on. The server that is left hands that claim's epoch out again."""
    pair = asynchronous
    async with installed(pair, long, tmp_path / "there") as (there, _):
        schedulers = [await there.start("scheduler"), there.launch("scheduler")]
        runner = await there.start("runner", runner_id="r1")
        services = [*schedulers, runner]
        runner.signal(signal.SIGSTOP)
        held = await start_run(there.conn, "holding")
        instants = await schedule_now(there.conn, long, "alone", every=0.1, times=36)
        await eventually(lambda: there.value("select count(*) >= 3 from run where fire_at is not null"))
        pair.catch_up()
        with pair.lagging():
            mark = await there.value("select lsn from server_timeline")
            runner.signal(signal.SIGCONT)
            first_body = await eventually(lambda: next(iter(bodies(there, held)), None))
            lost = {await start_run(there.conn, "single", key=f"lost{number}") for number in range(40)}
            await eventually(lambda: there.value("select count(*) >= 12 from run where fire_at is not null"))
            await eventually(lambda: there.value("select lsn > %s from server_timeline", mark))
            pair.promote()
            pair.crash_first()
        await there.reconnect()
        told = await every_one_said(schedulers, "writes_lost")
        assert all("Acknowledged writes are lost" in message for message in told)
        # What a runner remembers of the marks may be older than what was lost.
        await eventually(lambda: runner.events("writes_lost") or runner.events("failover_detected"))
        assert await there.value("select count(*) from run where key like 'lost%%'") == 0
        assert len(lost) == 40

        second_body = await eventually(lambda: next(iter(bodies(there, held)[1:]), None))
        let_go(there.effects_file)
        assert await there.ended(held) == "success"
        await eventually(
            lambda: there.value("select count(*) = %s from run where fire_at is not null", len(instants)), 30
        )
        await eventually(lambda: there.value("select count(*) = 0 from run_status where finished_at is null"), 30)
        assert [row[0] for row in await there.rows(FIRES)] == instants
        of_hold = [each for each in there.effects() if (each.run_id, each.task) == (held, "hold")]
        assert [(each.what, each.pid) for each in of_hold] == [
            ("begin", first_body.pid),
            ("begin", second_body.pid),
            ("end", second_body.pid),
        ], "the body of the lost claim was stopped before the claim was made again"
        assert all(service.is_alive for service in services)
        journal = await there.rows(
            "select action from audit_log where action in ('failover', 'writes_lost') order by entry_id"
        )
        assert {verb for (verb,) in journal} == {"failover", "writes_lost"}


def bodies(there: Installation, run_id: int) -> list[Effect]:
    """Those of the held task that have begun, in order."""
    return [each for each in there.effects() if (each.run_id, each.task, each.what) == (run_id, "hold", "begin")]


@pytest.mark.requirement("N14", "A10", "A4")
async def test_leadership_lost_with_its_server_is_not_mistaken_for_that_of_the_successor(
    asynchronous: Pair, tmp_path: Path
) -> None:
    """The successor's epoch is the same number."""
    pair, said = asynchronous, Said()
    database = pair.cluster.create(pair.cluster.template())
    pair.add_standby()
    settings = quick(pair.url(database), tmp_path)

    async def take(lead: Leadership) -> int:
        async def taken() -> int | None:
            await lead.try_acquire(await lead.connection())
            return lead.epoch

        found: int = await eventually(taken)
        return found

    url = pair.url(database)
    old, new = (
        Leadership(settings, url=each, owner=name, log=said.log)
        for each, name in ((url, "old"), (f"{url}&sslmode=disable", "new"))
    )
    await take(old)
    await old.release()
    pair.catch_up()
    with pair.lagging():
        lost = await take(old)
        pair.promote()
        pair.crash_first()
    assert await take(new) == lost
    await eventually(lambda: answers(old))
    assert old.epoch is None and new.epoch == lost
    (told,) = said.events("leadership_lost")
    assert "belongs to another server" in str(told["error"])
    assert await new.release()
    await old.release()


async def answers(lead: Leadership) -> bool:
    """That its connection broke with the old server is known once it is used."""
    try:
        await (await lead.connection()).execute("select 1")
    except (psycopg.OperationalError, PostgresUnavailable):
        return False
    return True


@pytest.mark.requirement("N14", "E2")
async def test_a_standby_is_refused_and_of_two_primaries_the_younger_is_taken(asynchronous: Pair) -> None:
    pair = asynchronous
    pair.add_standby()
    with pytest.raises(PostgresUnavailable, match="hot standby mode"):
        await connect(pair.second.url, purpose=Purpose.READ)
    async with await connect(pair.url("postgres"), purpose=Purpose.READ) as conn:
        assert conn.info.host == str(pair.first.sockets)
    pair.promote()
    # The same URL stands for a process that knows the old one, another for a process that has just been started.
    for url in (pair.url("postgres"), f"{pair.url('postgres')}&sslmode=disable"):
        for purpose in Purpose:
            async with await connect(url, purpose=purpose) as conn:
                assert conn.info.host == str(pair.second.sockets)


@pytest.mark.requirement("N14")
async def test_a_commit_that_waits_on_the_old_primary_is_given_up_once_the_new_one_is_seen(
    synchronous: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has stopped the old primary. It takes writes, and waits for its standby for ever: none is acknowledged."""
    pair = synchronous
    database = pair.cluster.create(pair.cluster.template())
    pair.add_standby()
    url, said = pair.url(database), Said()
    work, line = ReconnectingConnection(url, Purpose.SCHEDULER), ReconnectingConnection(url, Purpose.MONITOR)
    watch = ServerWatch(url, line.get, said.log)
    conn = await work.get()
    await watch.tick()
    pair.promote()
    writing = asyncio.create_task(
        conn.execute("insert into import_error (file, line, message, occurred_at) values ('f', 1, 'm', now())")
    )
    waiting = "select 1 from pg_stat_activity where wait_event = 'SyncRep'"
    await eventually(lambda: pair.first.rows(waiting))
    monkeypatch.setattr("evertick.runtime.server_watch.LOOK_AROUND_SECONDS", 0.0)
    await watch.tick()
    with pytest.raises(psycopg.OperationalError):
        await writing
    (told,) = said.events("failover_detected")
    assert told["message"] == "No acknowledged write is lost."
    found = await (await work.get()).execute("select count(*) from import_error")
    assert await found.fetchone() == (0,)
    for link in (work, line):
        await link.close()
