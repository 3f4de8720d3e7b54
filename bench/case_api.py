"""The latency of the API: reads while the engine works, with a million runs in the database (H4), and a crowd of readers and
writers."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import random
import socket
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager

from bench.case import Bench
from bench.case_history import OLD, fill
from bench.figures import Figure, at_most, median
from bench.house import House, NotMeasured
from bench.work import percentile, run, warm_up

from evertick.domain.access import Actor, Role
from evertick.engine import accounts

_READERS = 4
# A crowd: each client waits for its answer and then this long, as an open page does at most.
CROWD = {"readers": 200, "writers": 20}
CROWD_PAUSE_SECONDS = 1.0
LOAD = "single_warm"


class Asker:
    """A client with one persistent connection that does minimal work, so that it measures the server."""

    def __init__(self, port: int, token: str) -> None:
        self._port, self._token = port, token

    async def __aenter__(self) -> Asker:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    async def seconds(self, path: str, body: str = "") -> float:
        """The seconds until the complete response to a read, or to a POST of this body."""
        began = time.monotonic()
        head = f"{'POST' if body else 'GET'} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {self._token}\r\n"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        self._writer.write(f"{head}{kind}\r\n{body}".encode())
        head = (await self._reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = next(line for line in head.split("\r\n") if line.startswith("content-length:"))
        answer = await self._reader.readexactly(int(length.split(":")[1]))
        if not head.split(" ", 2)[1].startswith("2"):
            raise NotMeasured(f"{path} returned {head.splitlines()[0]}: {answer[:200]!r}")
        return time.monotonic() - began


async def api_reads(bench: Bench) -> list[Figure]:
    """Reads of each kind, four concurrently, during a constant load of one-task runs."""
    await bench.server.make(OLD)
    async with bench.house(OLD) as house, served_api(house) as (port, token):
        await fill(bench, house, bench.size.history)
        await warm_up(house)
        taken: dict[str, list[float]] = defaultdict(list)
        stored = await _count_runs(house)
        async with asyncio.TaskGroup() as group:
            # Warm-up, not measured: connections are opened and statements are planned.
            for _ in range(_READERS):
                group.create_task(_ask_each(port, token, await _paths(house)))
        for _ in bench.rounds():
            paths = await _paths(house)
            load = asyncio.create_task(run(house, LOAD, bench.size.singles["warm"]))
            async with asyncio.TaskGroup() as group:
                for _ in range(_READERS):
                    group.create_task(_read(port, token, itertools.cycle(paths.items()), taken, load))
            await load
    every = [seconds for each in taken.values() for seconds in each]
    about = f"API reads with {stored:,} runs and full load"
    slowest = {name: percentile(each, 0.99) * 1000 for name, each in taken.items()}
    kinds = ", ".join(f"{name} {slowest[name]:.0f}" for name in sorted(slowest, key=lambda name: -slowest[name]))
    return [
        median("api_reads.p50", f"{about}, median", "ms", [percentile(every, 0.5) * 1000]),
        median("api_reads.p99", f"{about}, p99", "ms", [percentile(every, 0.99) * 1000], at_most(50.0)),
        median("api_reads.worst", f"p99 of the slowest kind ({kinds})", "ms", [max(slowest.values())]),
    ]


async def api_crowd(bench: Bench) -> list[Figure]:
    """200 readers and 20 writers at once; each answer must be right."""
    await bench.server.make("crowd")
    all_at_once = {"EVERTICK_API_CONNECTIONS_PER_ADDRESS": "256"}
    async with bench.house("crowd") as house, served_api(house, Role.OPERATOR, all_at_once) as (port, token):
        await warm_up(house)
        paths = await _paths(house)
        await _ask_each(port, token, paths)
        until = time.monotonic() + bench.size.crowd_seconds
        reads, writes = list[float](), list[float]()
        async with asyncio.TaskGroup() as group:
            for number in range(CROWD["readers"]):
                asked = [*paths.values()][number % len(paths) :] + [*paths.values()][: number % len(paths)]
                group.create_task(_visit(port, token, itertools.cycle((path, "") for path in asked), until, reads))
            for _ in range(CROWD["writers"]):
                one_run = itertools.repeat((f"/api/v1/dags/{LOAD}/runs", "{}"))
                group.create_task(_visit(port, token, one_run, until, writes))
    seconds = bench.size.crowd_seconds
    about = f"{CROWD['readers']} readers and {CROWD['writers']} writers for {seconds:.0f} s, no errors"
    return [
        median("api_crowd.p50", f"{about}: median", "ms", [percentile(reads + writes, 0.5) * 1000]),
        median("api_crowd.p99", f"{about}: p99", "ms", [percentile(reads + writes, 0.99) * 1000], at_most(150.0)),
        median("api_crowd.writes", f"{about}: p99 of writes", "ms", [percentile(writes, 0.99) * 1000]),
        median("api_crowd.rate", f"{about}: answers", "1/s", [(len(reads) + len(writes)) / seconds]),
    ]


async def _visit(port: int, token: str, asked: Iterator[tuple[str, str]], until: float, taken: list[float]) -> None:
    async with Asker(port, token) as asker:
        # They do not all come in the same moment.
        await asyncio.sleep(random.uniform(0, CROWD_PAUSE_SECONDS))
        while time.monotonic() < until:
            taken.append(await asker.seconds(*next(asked)))
            await asyncio.sleep(CROWD_PAUSE_SECONDS)


@asynccontextmanager
async def served_api(
    house: House, role: Role = Role.VIEWER, settings: Mapping[str, str] | None = None
) -> AsyncIterator[tuple[int, str]]:
    """Run the API as a further service. Yields its port and a token of a user with this role."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    await accounts.add_user(house.conn, name="bench", role=role, actor=Actor("bench"))
    row = await accounts.find_user(house.conn, "bench")
    issued = await accounts.issue(house.conn, row, kind="token", name="bench", actor=Actor("bench"), seconds=86_400)
    await house.add("api", {"EVERTICK_API_PORT": str(port), "EVERTICK_API_RATE_LIMIT": "0", **(settings or {})})

    async def answers() -> bool:
        try:
            async with Asker(port, issued.secret) as asker:
                await asker.seconds("/api/v1/dags")
        except (OSError, asyncio.IncompleteReadError):
            return False
        return True

    await house.until(answers, "the API responds", pause_seconds=0.2)
    yield port, issued.secret


async def _paths(house: House) -> dict[str, str]:
    """One request of each kind, for recent and for old runs."""
    cursor = await house.conn.execute("select min(run_id), max(run_id) from run")
    oldest, newest = await cursor.fetchone() or (1, 1)
    middle = (oldest + newest) // 2
    return {
        "newest runs": "/api/v1/runs?limit=50",
        "runs of a DAG": f"/api/v1/runs?dag={LOAD}&state=success&limit=50",
        "an old page": "/api/v1/runs?limit=50&cursor=" + _cursor(middle),
        "a run": f"/api/v1/runs/{newest}",
        "its tasks": f"/api/v1/runs/{middle}/tasks",
        "DAGs": "/api/v1/dags",
        "schedules": "/api/v1/schedules",
        "runners": "/api/v1/runners",
        "queues": "/api/v1/queues",
        "health": "/api/v1/health",
        "runs for Airflow's client": f"/api/v2/dags/{LOAD}/dagRuns?limit=25&order_by=-run_id",
        "failed ones for it": f"/api/v2/dags/{LOAD}/dagRuns?limit=25&state=failed",
    }


def _cursor(run_id: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([run_id]).encode()).decode().rstrip("=")


async def _ask_each(port: int, token: str, paths: dict[str, str]) -> None:
    async with Asker(port, token) as asker:
        for path in paths.values():
            await asker.seconds(path)


async def _read(
    port: int, token: str, paths: Iterator[tuple[str, str]], taken: dict[str, list[float]], load: asyncio.Task[object]
) -> None:
    """Read until the load has ended."""
    async with Asker(port, token) as asker:
        while not load.done():
            name, path = next(paths)
            taken[name].append(await asker.seconds(path))
            await asyncio.sleep(0.02)


async def _count_runs(house: House) -> int:
    cursor = await house.conn.execute("select count(*) from run")
    row = await cursor.fetchone()
    return int(row[0]) if row else 0
