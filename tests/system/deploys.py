"""Deployments over HTTP while the API is killed and its database sessions end: none is ever half published.

`python -m tests.system.deploys --count 1000` does so at full size; a test does it with fewer.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
import hashlib
import io
import os
import random
import signal
import sys
import tarfile
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor, Role
from evertick.engine import accounts
from tests.databases import own_cluster
from tests.ports import own_port
from tests.system.served import environment
from tests.waiting import elapse, eventually

NAME = "shop"
FILE = """from evertick import dag, task
@task
def t(): ...
@dag(description="{release}", schedule="@every 1h")
def {first}():
    t()
@dag(description="{release}")
def {second}():
    t()
"""
BROKEN = "from evertick import dag\nraise ValueError('half done')\n"
# All that users and schedulers can see, in one snapshot.
CURRENT = """
select d.name, v.spec->>'description' from dag d join dag_version v on v.version_id = d.version_id
 where d.deployment = 'shop' and d.deleted_at is null order by 1
"""
STRAY = """
select count(*) from deployment d
 where d.version <> (select coalesce(max(v.number), 0) from deployment_version v where v.deployment = d.name)
    or array(select x.version_id from deployment_dag x where x.deployment = d.name and x.number = d.version order by 1)
       <> array(select g.version_id from dag g where g.deployment = d.name and g.deleted_at is null order by 1)
    or exists (select 1 from schedule c join schedule_state s on s.schedule_id = c.schedule_id
                 join dag g on g.dag_id = c.dag_id
                where g.deployment = d.name and (g.deleted_at is not null) <> (c.deleted_at is not null))
"""
END_SESSIONS = """
select count(pg_terminate_backend(a.pid)) from pg_stat_activity a
 where a.datname = current_database() and a.application_name = 'evertick-api-write'
"""
BUSY = """
select 1 from pg_stat_activity
 where datname = current_database() and state <> 'idle' and application_name = 'evertick-api-write'
"""
Shown = list[tuple[str, str]]


def contents(release: int) -> dict[str, str]:
    """A release: two files, and one DAG whose name changes, so that another one is retired."""
    return {
        "one.py": FILE.format(release=release, first="always", second=f"only_{release % 3}"),
        "two.py": FILE.format(release=release, first="second", second="third"),
    }


def shown(release: int) -> Shown:
    return sorted((name, str(release)) for name in ("always", f"only_{release % 3}", "second", "third"))


def packed(files: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb", mtime=0) as plain, tarfile.open(fileobj=plain, mode="w") as archive:
        for name, text in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(text)
            archive.addfile(header, io.BytesIO(text.encode()))
    return made.getvalue()


class Stage:
    """An API process on a database of its own, and what was seen of the deployment."""

    def __init__(self, url: str, folder: Path, seed: int) -> None:
        self._url, self._folder, self._random = url, folder, random.Random(seed)
        self._port = own_port()
        self._process: asyncio.subprocess.Process | None = None
        self.counts: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, count: int, fault_of: Callable[[int], str | None]) -> None:
        """`fault_of` a release: "kill" the API while it is deployed, "cut" its database sessions, or nothing."""
        async with (
            await connect(self._url, purpose=Purpose.SCHEDULER) as conn,
            await connect(self._url, purpose=Purpose.READ) as eyes,
        ):
            await accounts.add_user(conn, name="ci", role=Role.EDITOR, tags=None, actor=Actor("test"))
            row = await accounts.find_user(conn, "ci")
            token = (
                await accounts.issue(conn, row, kind="token", name="ci", actor=Actor("test"), seconds=86_400)
            ).secret
            await self._start()
            watching = asyncio.create_task(self._watch(eyes))
            try:
                for release in range(1, count + 1):
                    await self._deploy(conn, release, token, fault_of(release))
                    if release % 100 == 0:
                        print(f"{release} deployments, {len(self.wrong)} wrong: {dict(self.counts)}", flush=True)
            finally:
                watching.cancel()
                with suppress(asyncio.CancelledError):
                    await watching
                await self._stop()

    async def _deploy(self, conn: AsyncConnection, release: int, token: str, fault: str | None) -> None:
        is_broken = release % 4 == 0
        files = contents(release) | ({"two.py": BROKEN} if is_broken else {})
        before = await self._current(conn)
        request = asyncio.create_task(self._request(packed(files), token))
        if fault is not None:
            with suppress(TimeoutError):
                await asyncio.wait_for(asyncio.shield(request), self._random.uniform(0.05, 1.2))
            if not request.done():
                self.counts[f"{fault} in time"] += 1
            await (self._kill() if fault == "kill" else conn.execute(END_SESSIONS))
        status = await request
        self.counts[f"answer {status}"] += 1
        await self._until_idle(conn)
        after = await self._current(conn)
        allowed = [shown(release)] if status in (200, 201) else [before]
        if status not in (200, 201, 400) and not is_broken:
            allowed.append(shown(release))
        if after not in allowed:
            self.wrong.append(f"release {release}, {fault}, answer {status}: {after} is none of {allowed}")
        self.counts["published"] += after == shown(release)

    async def _request(self, archive: bytes, token: str) -> int:
        """The status of the answer; 0 if there was none."""
        archive_hash = hashlib.sha256(archive).hexdigest()
        headers = {"Authorization": f"Bearer {token}"}
        base = f"http://127.0.0.1:{self._port}/api/v1"
        async with httpx.AsyncClient(headers=headers, timeout=60, trust_env=False) as client:
            try:
                answer = await client.put(f"{base}/uploads/{archive_hash}", content=archive)
                if answer.status_code == 200:
                    answer = await client.put(f"{base}/deployments/{NAME}", json={"archive_hash": archive_hash})
            except httpx.HTTPError:
                return 0
        return answer.status_code

    async def _current(self, conn: AsyncConnection) -> Shown:
        (stray,) = await (await conn.execute(STRAY)).fetchone() or (1,)
        if stray:
            self.wrong.append("the version and the DAGs of the deployment differ")
        return [(name, release) for name, release in await (await conn.execute(CURRENT)).fetchall()]

    async def _watch(self, eyes: AsyncConnection) -> None:
        """Look all the time: what is seen in between is whole, too."""
        while True:
            seen = [(name, release) for name, release in await (await eyes.execute(CURRENT)).fetchall()]
            self.counts["looks"] += 1
            if seen and seen != shown(int(seen[0][1])):
                self.wrong.append(f"seen while deploying: {seen}")
            await elapse(0.02)

    async def _until_idle(self, conn: AsyncConnection) -> None:
        """A killed client's statement may still run in the database."""

        async def is_idle() -> bool:
            return await (await conn.execute(BUSY)).fetchone() is None

        await eventually(is_idle)

    async def _start(self) -> None:
        command = [sys.executable, "-m", "evertick", "api", "--port", str(self._port)]
        env = environment(self._url, self._folder, EVERTICK_API_RATE_LIMIT="0", EVERTICK_HEALTH="off")
        with (self._folder / "api.log").open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(*command, env=env, stdout=log, stderr=log)
        async with httpx.AsyncClient(trust_env=False, timeout=60) as client:

            async def is_ready() -> bool:
                with suppress(httpx.HTTPError):
                    return (await client.get(f"http://127.0.0.1:{self._port}/readyz")).status_code == 200
                return False

            await eventually(is_ready, 60, pause_seconds=0.05)

    async def _kill(self) -> None:
        await self._stop()
        await self._start()

    async def _stop(self) -> None:
        if self._process is not None and self._process.returncode is None:
            os.kill(self._process.pid, signal.SIGKILL)
            await self._process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as home, own_cluster(Path(home, "pg")) as cluster:
        stage = Stage(cluster.database_url(cluster.create(cluster.template())), Path(home), given.seed)
        dice = random.Random(given.seed)
        faults = dice.choices(("kill", "cut", None), (0.1, 0.25, 0.65), k=given.count)
        asyncio.run(stage.run(given.count, lambda release: faults[release - 1]))
    print(f"seed {given.seed}, {given.count} deployments in {time.monotonic() - began:.0f} s: {dict(stage.counts)}")
    for each in stage.wrong[:20]:
        print(f"WRONG: {each}")
    return 1 if stage.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
