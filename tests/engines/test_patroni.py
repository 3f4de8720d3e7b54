"""A Patroni cluster whose primary is killed while schedules fire and tasks run."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from evertick.db.connect import Purpose, connect
from evertick.domain.errors import PostgresUnavailable
from tests.engines import patroni_cluster
from tests.engines.conftest import heavy, needed
from tests.waiting import elapse, eventually

DAG = """
from evertick import dag, task

@dag(schedule="* * * * * *", misfire="all")
def every_second():
    @task
    def work():
        return 1
    work()
"""
# Patroni's ttl is 20 s, and it looks every 5 s.
_PROMOTION_SECONDS = 60.0


async def rows(url: str, text: str) -> list[Any]:
    conn = await connect(url, purpose=Purpose.READ)
    try:
        return await (await conn.execute(text)).fetchall()  # type: ignore[call-overload, no-any-return]
    finally:
        await conn.close()


class Watch:
    """What readers were told: runs that have succeeded, as the primary said so."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.succeeded: set[int] = set()

    async def look(self) -> None:
        text = "select run_id from run_status where state = 'success' order by run_id desc limit 50"
        self.succeeded |= {run_id for (run_id,) in await rows(self.url, text)}

    async def run(self) -> None:
        while True:
            with suppress(PostgresUnavailable, OSError):
                await self.look()
            await elapse(0.1)


@asynccontextmanager
async def services(url: str, folder: Path) -> AsyncIterator[None]:
    environment = {
        **os.environ,
        "EVERTICK_DATABASE_URL": url,
        "EVERTICK_HEALTH": "off",
        "EVERTICK_HOME": str(folder / "home"),
    }
    program = str(Path(sys.executable).with_name("evertick"))
    dags = folder / "dags"
    dags.mkdir()
    (dags / "seconds.py").write_text(DAG)
    for arguments in (["db", "migrate"], ["deploy", str(dags)]):
        done = await asyncio.create_subprocess_exec(program, *arguments, env=environment)
        assert await done.wait() == 0, arguments
    running = []
    for service in ("scheduler", "runner"):
        with (folder / f"{service}.log").open("wb") as log:
            running.append(
                await asyncio.create_subprocess_exec(program, service, env=environment, stdout=log, stderr=log)
            )
    try:
        yield
    finally:
        for process in running:
            process.kill()
            await process.wait()


@heavy
@pytest.mark.requirement("V5", "V9")
async def test_a_killed_primary_loses_nothing_and_schedules_fire_within_three_seconds(
    root: Path, tmp_path: Path
) -> None:
    needed(patroni_cluster.what_is_missing())
    with patroni_cluster.patroni_cluster(root / "patroni") as cluster:
        url = cluster.url
        async with services(url, tmp_path):
            watch = Watch(url)
            looking = asyncio.create_task(watch.run())
            await eventually(lambda: len(watch.succeeded) >= 10, 60)
            await eventually(cluster.has_synchronous_standby, 60, pause_seconds=0.5)
            old = cluster.primary
            killed_at = time.monotonic()
            old.kill()
            (heir,) = [each for each in cluster.members if each is not old]
            await eventually(lambda: heir.is_primary, _PROMOTION_SECONDS, pause_seconds=0.1)
            promoted_at = time.monotonic()
            before = watch.succeeded.copy()

            async def has_fired() -> bool:
                with suppress(PostgresUnavailable, OSError):
                    await watch.look()
                return bool(watch.succeeded - before)

            await eventually(has_fired, 30, pause_seconds=0.05)
            fired_after = time.monotonic() - promoted_at
            print(f"promoted {promoted_at - killed_at:.1f} s after the kill, next run ended {fired_after:.1f} s later")
            assert fired_after <= 3.0
            # A run for each second again, and the missed ones, too.
            count = len(watch.succeeded)
            await eventually(lambda: len(watch.succeeded) >= count + 20, 60)
            looking.cancel()
        there = {run_id for (run_id,) in await rows(url, "select run_id from run_status where state = 'success'")}
        assert watch.succeeded <= there, f"acknowledged and lost: {sorted(watch.succeeded - there)}"
        twice = "select fire_at from run where fire_at is not null group by fire_at having count(*) > 1"
        assert await rows(url, twice) == []
        seconds = "select extract(epoch from max(fire_at) - min(fire_at))::int + 1, count(distinct fire_at) from run"
        ((spanned, fired),) = await rows(url, seconds)
        assert fired == spanned, "a second without its run"
