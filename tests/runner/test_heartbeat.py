"""The heartbeat on a real database, on a line that dies and on one that hangs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import runners
from evertick.processes.system import boot_seconds
from evertick.runner.database_access import DatabaseHeartbeatLine
from evertick.runner.events import HeartbeatAnswered
from evertick.runner.heartbeat import Heartbeat
from evertick.runner.registration import new_runner
from tests.engine.world import value
from tests.system.hosting import Said, quick
from tests.waiting import eventually

SESSION = 77
LOST_AFTER_SECONDS = 20.0


def line_to(database: str) -> Callable[[], DatabaseHeartbeatLine]:
    return partial(DatabaseHeartbeatLine, database, SESSION)


@contextmanager
def beating(database: str, folder: Path, said: Said, beats: list[HeartbeatAnswered]) -> Iterator[Heartbeat]:
    settings = quick(database, folder, lost_after_seconds=LOST_AFTER_SECONDS)
    heartbeat = Heartbeat(settings, open_line=line_to(database), held=lambda: [], put=beats.append, log=said.log)
    heartbeat.start()
    try:
        yield heartbeat
    finally:
        heartbeat.stop()


@pytest.fixture
async def there(conn: AsyncConnection, database: str, tmp_path: Path) -> AsyncConnection:
    await runners.register(conn, new_runner(SESSION, quick(database, tmp_path)))
    return conn


async def line_of_the_heartbeat(conn: AsyncConnection) -> int:
    """The server's process for it."""
    query = (
        "select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
        " and query like '%%extend_leases(%%'"
    )
    return int(str(await eventually(lambda: value(conn, query))))


async def freeze_while_idle(conn: AsyncConnection, backend: int) -> None:
    """In the middle of a statement it would hold a lock that a fresh line has to wait for."""

    async def is_frozen_idle() -> bool:
        os.kill(backend, signal.SIGSTOP)
        if await value(conn, "select state = 'idle' from pg_stat_activity where pid = %s", backend):
            return True
        os.kill(backend, signal.SIGCONT)
        return False

    await eventually(is_frozen_idle)


@pytest.mark.requirement("K2", "K9", "N18")
async def test_it_beats_and_comes_back_when_its_line_is_cut(
    there: AsyncConnection, database: str, tmp_path: Path
) -> None:
    said, beats = Said(), list[HeartbeatAnswered]()
    began = boot_seconds()
    with beating(database, tmp_path, said, beats):
        await eventually(lambda: len(beats) > 2)
        assert began <= beats[0].sent_at <= boot_seconds()
        await there.execute("select pg_terminate_backend(%s)", [await line_of_the_heartbeat(there)])
        await said.saw("database_unreachable", loop="heartbeat")
        count = len(beats)
        await eventually(lambda: len(beats) > count + 2)
    assert [beat.reply.is_gone for beat in beats] == [False] * len(beats)


@pytest.mark.requirement("K9", "N09")
async def test_a_line_that_hangs_is_replaced_by_a_fresh_one_long_before_the_runner_is_lost(
    there: AsyncConnection, database: str, tmp_path: Path
) -> None:
    said, beats = Said(), list[HeartbeatAnswered]()
    with beating(database, tmp_path, said, beats):
        await eventually(lambda: len(beats) > 2)
        hung = await line_of_the_heartbeat(there)
        await freeze_while_idle(there, hung)
        try:
            await eventually(lambda: any(beat.is_spare for beat in beats), LOST_AFTER_SECONDS / 2)
            await said.saw("database_unreachable", loop="heartbeat")
            count = len(beats)
            await eventually(lambda: len([beat for beat in beats[count:] if not beat.is_spare]) > 2)
        finally:
            os.kill(hung, signal.SIGCONT)
    assert await value(there, "select heartbeat_seq >= %s from runner", len(beats))


async def test_it_can_be_asked_to_beat_at_once(there: AsyncConnection, database: str, tmp_path: Path) -> None:
    beats = list[HeartbeatAnswered]()
    settings = quick(
        database, tmp_path, heartbeat_seconds=1000.0, lost_after_seconds=3600.0, agent_lost_after_seconds=3600.0
    )
    heartbeat = Heartbeat(settings, open_line=line_to(database), held=lambda: [], put=beats.append, log=Said().log)
    heartbeat.start()
    for count in range(1, 4):
        await eventually(lambda count=count: len(beats) == count)  # type: ignore[misc]
        heartbeat.beat_now()
    heartbeat.stop()
