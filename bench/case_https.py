"""Runners over HTTPS: a thousand idle ones on one API process, the throughput of one far away, and the latency of a task."""

from __future__ import annotations

import asyncio
import resource
import secrets
import socket
import statistics
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import psutil  # type: ignore[import-untyped]
import psycopg
import structlog
from bench.case import Bench
from bench.figures import Figure, Goal, at_least, at_most
from bench.house import House
from bench.usage import tree_seconds
from bench.work import percentile, run, warm_up

from evertick.config import Settings
from evertick.domain.access import Actor
from evertick.domain.errors import EvertickError
from evertick.engine import runner_tokens
from evertick.processes.identity import process_name
from evertick.runner.http_access import WAIT_SECONDS, HttpAccess
from evertick.runner.registration import new_runner
from evertick.secrets.agent_tokens import new_agent_key

_DATABASE = "bench_https"
DATABASES = (_DATABASE,)
_SLOTS = 32
# Each way: a round trip takes twice as long.
_DELAY_SECONDS = 0.1
_PART_BYTES = 256 * 1024


@dataclass(slots=True)
class Idle:
    """Runners that only wait and send heartbeats, in this process."""

    access: list[HttpAccess]
    beats: list[float] = field(default_factory=list)
    woken: int = 0
    troubles: list[str] = field(default_factory=list)

    async def live(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        async with asyncio.TaskGroup() as group:
            for number, each in enumerate(self.access):
                group.create_task(self._beat(each, until, number / len(self.access)))
                group.create_task(self._wait(each, until, number / len(self.access)))

    async def _beat(self, access: HttpAccess, until: float, share: float) -> None:
        line, pause = access.open_heartbeat(), Settings().heartbeat_seconds
        await asyncio.sleep(share * pause)
        while time.monotonic() < until:
            began = time.perf_counter()
            try:
                await line.beat(list, 30.0)
            except EvertickError as error:
                self.troubles.append(f"heartbeat: {error}")
            self.beats.append(time.perf_counter() - began)
            await asyncio.sleep(min(pause, max(0.0, until - time.monotonic())))
        await line.close()

    async def _wait(self, access: HttpAccess, until: float, share: float) -> None:
        # Not a thousand connections at one moment: the queue of a listening socket is shorter.
        await asyncio.sleep(share * Settings().heartbeat_seconds)

        def wake(_: object) -> None:
            self.woken += 1

        while (rest := until - time.monotonic()) > 0:
            try:
                async with asyncio.timeout(min(rest, 2 * WAIT_SECONDS)):
                    await access._poll_once(wake, lambda: (_SLOTS, None))
            except TimeoutError:
                pass
            except EvertickError as error:
                self.troubles.append(f"poll: {error}")
                await asyncio.sleep(1.0)


def _allow_many_files() -> None:
    """A thousand runners have several thousand connections; services inherit the limit."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def fleet_https(bench: Bench) -> list[Figure]:
    """Idle runners on one API process; then one runner 200 ms away; then a runner next to one with a database."""
    count, seconds = bench.size.fleet_https, bench.size.fleet_seconds
    _allow_many_files()
    await bench.server.make(_DATABASE)
    async with bench.house(_DATABASE, runners=0) as house, AsyncExitStack() as stack:
        port, secret = await _open_api(house, count)
        url = f"http://127.0.0.1:{port}"
        bench.say(f"{count:,} runners join")
        them = Idle([await _join(url, secret) for _ in range(count)])
        bench.say(f"{count:,} runners wait for {seconds:g} s")
        core, server = await _costed(house, them, seconds)
        if them.troubles:
            bench.say(f"{len(them.troubles)} errors, the first: {them.troubles[0]}")
        for each in them.access:
            await each.leave()
            await each.close()
        far = await stack.enter_async_context(_delaying(port))
        slots = {"EVERTICK_RUNNER_SLOTS": str(_SLOTS), "EVERTICK_RUNNER_TOKEN": secret}
        bench.say("a runner that is 200 ms away")
        await house.add("runner-0", {**slots, "EVERTICK_RUNNER_SERVER": f"http://127.0.0.1:{far}"})
        house.runners = 1
        await warm_up(house)
        done = await run(house, "single_warm", bench.size.https_tasks)
        await _stop(house, "runner-0")
        near: dict[str, float] = {}
        for name, reach in (("https", {"EVERTICK_RUNNER_SERVER": url}), ("database", {})):
            bench.say(f"a runner by {name}")
            await house.add("runner-0", {**slots, **reach})
            await warm_up(house)
            took = [await _latency(house) for _ in range(bench.size.submits)]
            near[name] = 1000 * statistics.median(took)
            await _stop(house, "runner-0")
    about = f"{count:,} idle runners over HTTPS, one API process"

    def figure(name: str, what: str, unit: str, value: float, goal: Goal | None = None) -> Figure:
        return Figure(name=f"fleet_https.{name}", about=what, unit=unit, value=value, goal=goal)

    return [
        figure("idle.api", f"{about}: of one core", "%", 100 * core, at_most(100)),
        figure("idle.server", f"{about}: of one core, by PostgreSQL", "%", 100 * server),
        figure("idle.heartbeat", f"{about}: a heartbeat, p99", "ms", 1000 * percentile(them.beats, 0.99)),
        figure("idle.troubles", f"{about}: errors", "errors", float(len(them.troubles)), at_most(0)),
        figure("far", f"one runner of {_SLOTS} slots, 200 ms away", "tasks/s", done.per_second, at_least(200)),
        figure("latency", "from the trigger to the body, over HTTPS, p50", "ms", near["https"], at_most(30)),
        figure("latency.database", "the same with a database connection, p50", "ms", near["database"]),
    ]


async def _latency(house: House) -> float:
    done = await run(house, "single_warm")
    return done.spans[0].start - done.submitted


async def _open_api(house: House, count: int) -> tuple[int, str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    room = {
        "EVERTICK_API_CONNECTIONS": str(4 * count + 64),
        "EVERTICK_API_CONNECTIONS_PER_ADDRESS": str(4 * count + 64),
    }
    room["EVERTICK_API_RATE_LIMIT"] = "0"
    await house.add("api", {"EVERTICK_API_PORT": str(port), "EVERTICK_AGENT_KEY": new_agent_key(), **room})

    async def answers() -> bool:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            return False
        writer.close()
        return True

    await house.until(answers, "the API responds", pause_seconds=0.2)
    _, secret = await runner_tokens.create(house.conn, name="bench", queues=["default"], days=1, actor=Actor("bench"))
    return port, secret


async def _join(url: str, secret: str) -> HttpAccess:
    settings = replace(Settings(), runner_token=secret)
    me = replace(new_runner(secrets.randbits(62), settings), runner_id=f"idle-{process_name()}")
    access = HttpAccess(settings, server=url, me=me, log=structlog.get_logger())
    await access.register(me)
    return access


async def _costed(house: House, them: Idle, seconds: float) -> tuple[float, float]:
    """The shares of a core, of the API process and of the server."""
    with psycopg.connect(house.url, autocommit=True) as conn:
        server = psutil.Process(conn.info.backend_pid).parent()
    api = psutil.Process(house.services["api"].pid)
    before, began = (tree_seconds(api), tree_seconds(server)), time.monotonic()
    await them.live(seconds)
    took = time.monotonic() - began
    return (tree_seconds(api) - before[0]) / took, (tree_seconds(server) - before[1]) / took


async def _stop(house: House, service: str) -> None:
    process = house.services.pop(service)
    process.terminate()
    await process.wait()


@asynccontextmanager
async def _delaying(port: int) -> AsyncIterator[int]:
    """The port of a way to that port on which every byte takes longer, in both directions, whatever else is under way."""

    async def pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        parts: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, part = await parts.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not part:
                    return writer.close()
                writer.write(part)
                await writer.drain()

        writing = asyncio.create_task(write())
        try:
            while True:
                part = await reader.read(_PART_BYTES)
                parts.put_nowait((time.monotonic() + _DELAY_SECONDS, part))
                if not part:
                    return await writing
        except OSError:
            writer.close()
        finally:
            writing.cancel()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream, back = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pass_on(reader, back), pass_on(upstream, writer))

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
