"""Logs on their way to a real S3 server, whatever happens to it, and read from there as if they had never left."""

from __future__ import annotations

import gzip
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from inspect import iscoroutinefunction
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.domain.access import Actor
from evertick.domain.errors import StorageUnavailable
from evertick.engine.runs import delete_run
from evertick.engine.tasks import clear, select_tasks
from evertick.logs import archive, reader
from evertick.logs.archive import LogArchiver
from evertick.observability import metrics
from evertick.observability.health import value_of
from evertick.runtime.connections import ReconnectingConnection
from evertick.scheduler.retention import PruneRound, limits_of
from evertick.scheduler.scheduler import Scheduler
from evertick.storage import object_store
from evertick.storage.object_store import open_store
from tests.engine.world import lead, make_dag, put, set_clock, value
from tests.moving import Mover
from tests.s3_faults import Fault, FaultyWay, faulty_way
from tests.s3_server import S3Server, s3_server
from tests.system.hosting import hosted, quick
from tests.waiting import eventually

YESTERDAY = datetime.now(UTC) - timedelta(days=1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def way(server: S3Server) -> Iterator[FaultyWay]:
    with faulty_way(server.settings["storage_endpoint"]) as between:
        yield between


@pytest.fixture
def settings(server: S3Server, way: FaultyWay, request: pytest.FixtureRequest) -> Settings:
    """A place of each test's own."""
    told = {
        **server.settings,
        "storage": f"s3://attic/{abs(hash(request.node.name))}",
        "storage_endpoint": way.endpoint,
    }
    return Settings(**told, log_archive=True, log_archive_after_seconds=60)


@pytest.fixture
async def mover(conn: AsyncConnection, database: str, settings: Settings) -> AsyncIterator[Mover]:
    await set_clock(conn, YESTERDAY)
    await put(conn, make_dag("d", {"t": []}))
    link, epoch = ReconnectingConnection(database, Purpose.SCHEDULER), await lead(conn)
    yield Mover(conn, settings, link, epoch)
    await link.close()


def stored(server: S3Server, settings: Settings) -> list[Path]:
    assert settings.storage is not None
    return [path for path in server.files() if settings.storage.rpartition("/")[2] in path.parts]


async def listed(conn: AsyncConnection) -> object:
    return await value(conn, "select count(*) from log_archive_object")


async def expire(conn: AsyncConnection) -> None:
    """The hour of objects that were never used is over."""
    await conn.execute("update log_archive_object set look_at = clock() - interval '1 day' where look_at is not null")


async def test_the_logs_of_ended_runs_are_moved_in_bounded_objects_and_read_as_before(
    mover: Mover, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "OBJECT_BYTES", 8000)
    large, small = await mover.write(), await mover.write(chunks=1)
    before = [await mover.read(each) for each in (large, small)]
    assert await mover.round() == archive.ROUND_SECONDS
    assert await mover.here() == 1, "what is small is not worth it"
    objects = stored(server, mover.settings)
    assert len(objects) == await listed(mover.conn) == 4 and {path.parent.name for path in objects} == {
        str(large.run_id)
    }
    assert sorted("".join(gzip.decompress(path.read_bytes()).decode() for path in objects)) == sorted(before[0])
    assert [await mover.read(each) for each in (large, small)] == before
    assert await value(mover.conn, "select count(*) from log_archive_queue") == 0
    assert await mover.round() == archive.ROUND_SECONDS and len(stored(server, mover.settings)) == 4


async def test_only_who_leads_moves_and_only_where_somebody_asked_for_it(mover: Mover, settings: Settings) -> None:
    await mover.write()
    moving = mover.moving
    mover.epoch -= 1
    assert await moving.tick() == archive.LOOK_SECONDS
    store = open_store(settings)
    assert store is not None
    idle = LogArchiver(settings, store, link=mover.link, epoch=lambda: None, log=mover.said.log)
    assert await idle.tick() == archive.LOOK_SECONDS
    mover.epoch += 1
    off = LogArchiver(
        replace(settings, log_archive=False), store, link=mover.link, epoch=lambda: mover.epoch, log=mover.said.log
    )
    assert await off.tick() == archive.ROUND_SECONDS
    assert await mover.here() == 10 and await listed(mover.conn) == 0


@pytest.mark.parametrize(
    ("fault", "methods", "told"),
    [
        (Fault.BUSY, ("PUT",), "503 SlowDown"),
        (Fault.CUT, ("PUT",), "cannot be reached"),
        (Fault.SILENT, ("PUT",), "timed out"),
        (Fault.LOST, ("PUT",), "cannot be reached"),
        (Fault.CUT, ("GET",), "broke off"),
        (Fault.WRONG, ("GET",), "different content than was written"),
        (Fault.BUSY, ("GET", "HEAD"), "503"),
    ],
)
async def test_a_fault_of_the_storage_only_delays_the_move_and_leaves_nothing_behind(
    mover: Mover,
    way: FaultyWay,
    server: S3Server,
    monkeypatch: pytest.MonkeyPatch,
    fault: Fault,
    methods: tuple[str, ...],
    told: str,
) -> None:
    monkeypatch.setattr(object_store, "ANSWER_SECONDS", 0.3 if fault is Fault.SILENT else 20.0)
    key = await mover.write()
    before = await mover.read(key)
    way.fault, way.methods = fault, methods
    assert await mover.moving.tick() == 2.0 and await mover.moving.tick() == 4.0
    assert mover.moving.pulse.blocked is not None and told in mover.moving.pulse.blocked
    assert value_of(metrics.LOG_ARCHIVE_FAILING) > 0
    assert await mover.here() == 10 and await mover.read(key) == before
    # From here on the storage answers, if only as quickly as a busy machine can.
    way.fault = None
    monkeypatch.setattr(object_store, "ANSWER_SECONDS", 20.0)
    await mover.round()
    assert await mover.here() == 0 and await mover.read(key) == before
    assert mover.moving.pulse.blocked is None and value_of(metrics.LOG_ARCHIVE_FAILING) == 0
    await expire(mover.conn)
    await mover.round()
    assert len(stored(server, mover.settings)) == await listed(mover.conn) == 1


async def test_a_storage_that_stays_away_gets_no_new_objects_listed(mover: Mover, way: FaultyWay) -> None:
    await mover.write()
    way.fault = Fault.BUSY
    for _ in range(4):
        await mover.moving.tick()
    assert await listed(mover.conn) == 1 and way.asked == ["PUT", "HEAD", "HEAD", "HEAD"]


def test_a_storage_that_is_away_for_days_is_asked_again_every_minute() -> None:
    assert [archive.pause_seconds(failures) for failures in (1, 2, 3)] == [2.0, 4.0, 8.0]
    assert {archive.pause_seconds(failures) for failures in range(6, 5000)} == {60.0}


@pytest.mark.requirement("A3", "V9")
async def test_a_death_at_any_line_loses_nothing_and_doubles_nothing(
    mover: Mover, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows it knows nothing but the database."""
    key = await mover.write()
    before, died = await mover.read(key), 0
    for name in ("pack", "create_archive_object", "put_checked", "archive_logs", "finish_log_archiving"):
        for is_after in (False, True):
            with monkeypatch.context() as broken:
                broken.setattr(archive, name, dying(getattr(archive, name), is_after=is_after))
                with pytest.raises(Died):
                    await mover.round()
            mover.moving = mover.another()
            died += 1
            assert await mover.read(key) == before, (name, is_after)
            if name == "archive_logs" and is_after:
                assert await mover.here() == 0
    await mover.round()
    assert await mover.here() == 0 and await mover.read(key) == before
    assert await value(mover.conn, "select count(*) from log_archive_queue") == 0
    assert await listed(mover.conn) > 1, "what was put for nothing is on the list"
    await expire(mover.conn)
    await mover.round()
    assert len(stored(server, mover.settings)) == await listed(mover.conn) == 1 and died == 10
    assert await mover.read(key) == before


class Died(Exception):
    """The process is gone."""


def dying(work: Callable[..., Any], *, is_after: bool) -> Callable[..., Any]:
    """Dies before it does its work, or when it is done and nobody was told."""
    if not iscoroutinefunction(work):

        def work_plainly(*given: object) -> object:
            if is_after:
                work(*given)
            raise Died

        return work_plainly

    async def work_slowly(*given: object, **named: object) -> object:
        if is_after:
            await work(*given, **named)
        raise Died

    return work_slowly


async def test_what_retention_or_somebody_deletes_goes_from_the_storage_even_after_an_outage_and_a_death(
    mover: Mover, server: S3Server, way: FaultyWay
) -> None:
    keys = [await mover.write() for _ in range(3)]
    await mover.round()
    await set_clock(mover.conn, datetime.now(UTC))
    await delete_run(mover.conn, run_id=keys[0].run_id, actor=Actor("me"))
    assert len(stored(server, mover.settings)) == 3
    now = datetime.now(UTC)
    pruning = PruneRound(limits_of(now, timedelta(days=30)), actor=Actor("test"))
    while not pruning.is_over:
        await pruning.step(mover.conn, epoch=mover.epoch)
    way.fault, way.methods = Fault.BUSY, ("DELETE",)
    await mover.moving.tick()
    assert mover.moving.pulse.blocked is not None and await listed(mover.conn) == 3
    way.fault, way.methods = Fault.LOST, ("DELETE",)
    mover.moving = mover.another()
    await mover.moving.tick()
    assert await listed(mover.conn) == 3, "it is gone, and nobody knows"
    way.fault, mover.moving = None, mover.another()
    await mover.round()
    assert {path.parent.name for path in stored(server, mover.settings)} == {str(each.run_id) for each in keys[1:]}
    assert await listed(mover.conn) == 2 and "1.3.7" in await mover.read(keys[1])


async def test_a_run_that_was_cleared_is_moved_again_with_what_it_wrote_then(mover: Mover, server: S3Server) -> None:
    key = await mover.write()
    await mover.round()
    chosen = await select_tasks(mover.conn, run_id=key.run_id)
    await clear(mover.conn, run_id=key.run_id, chosen=chosen, actor=Actor("me"))
    await mover.write(run_id=key.run_id)
    assert await mover.here() == 10
    both = await mover.read(key)
    assert "1.9.49" in both and "2.0.0" in both
    await mover.round()
    assert await mover.here() == 0 and len(stored(server, mover.settings)) == 2 and await mover.read(key) == both


@pytest.mark.requirement("V11")
async def test_a_run_that_the_database_refuses_holds_up_no_other(mover: Mover) -> None:
    poison, other = await mover.write(), await mover.write()
    await mover.conn.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin"
        f" if old.run_id = {poison.run_id} then raise exception 'no'; end if; return new; end $$"
    )
    await mover.conn.execute("create trigger refuses before update on log_chunk for each row execute function refuse()")
    await mover.round()
    assert await mover.here() == 10 and mover.said.events("log_archive_refused", run_id=poison.run_id)
    assert "1.0.0" in await mover.read(other)
    await mover.conn.execute("drop trigger refuses on log_chunk")
    await mover.round()
    assert await mover.here() == 0


async def test_what_is_gone_or_was_changed_in_the_storage_is_told_in_its_place_and_the_rest_is_read(
    mover: Mover, server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(archive, "OBJECT_BYTES", 15_000)
    key = await mover.write()
    await mover.round()
    first, second = sorted(stored(server, mover.settings), key=lambda path: "1.0.0 " not in text_of(path))
    raw = bytearray(first.read_bytes())
    raw[30] ^= 1
    first.write_bytes(raw)
    store = open_store(mover.settings)
    assert store is not None
    store.remove(f"logs/{key.run_id}/{second.name}")
    told = await mover.read(key)
    assert "MARK" in told and "bytes of this log are missing from the storage, or were changed there" in told
    assert "1.0.0 " not in told and "1.1.0 " in told, "a chunk beside the one that was changed is as it was"
    assert (told.count("MARK"), told.count("INFO")) == (6, 200)


def text_of(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


async def test_a_reader_is_told_that_the_storage_is_away_slow_or_unknown(
    mover: Mover, way: FaultyWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = await mover.write()
    await mover.round()
    for fault, told in ((Fault.BUSY, "503"), (Fault.CUT, "broke off"), (Fault.LOST, "cannot be reached")):
        way.fault = fault
        with pytest.raises(StorageUnavailable, match=told):
            await mover.read(key)
    way.fault = Fault.SILENT
    monkeypatch.setattr(reader, "READ_SECONDS", 0.1)
    with pytest.raises(StorageUnavailable, match=r"returned no lines within 0\.1 s"):
        await mover.read(key)
    mover.settings = Settings()
    with pytest.raises(StorageUnavailable, match="set EVERTICK_STORAGE"):
        await mover.read(key)


async def test_the_leader_moves_logs_by_itself(mover: Mover, database: str, tmp_path: Path, server: S3Server) -> None:
    await mover.write()
    await mover.conn.execute("update shard set lease_until = null")
    settings = quick(database, tmp_path, **server.settings, log_archive=True)
    async with hosted(Scheduler(settings, url=database, owner="one", log=mover.said.log)):
        await eventually(lambda: is_moved(mover), 30)


async def is_moved(mover: Mover) -> bool:
    return await mover.here() == 0
