"""Agents over HTTP: the cost of their starts, heartbeats, log lines and ends for the API and the database server."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections import defaultdict
from dataclasses import dataclass, field, replace

import psutil  # type: ignore[import-untyped]
import psycopg
import structlog
from bench.case import Bench
from bench.figures import Figure, Goal, at_most
from bench.house import House
from bench.usage import tree_seconds
from bench.work import percentile, submit

from evertick.agent.api_client import AgentClient
from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.db.queries import runners
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.errors import EvertickError
from evertick.engine.remote_attempts import claim_for_dispatch
from evertick.logs.spool import LogChunk
from evertick.runner.registration import new_runner
from evertick.secrets.agent_tokens import AgentTokens, new_agent_key

_DATABASE = "bench_agents"
DATABASES = (_DATABASE,)
_EXECUTOR = "bench"
_LINE = b"2026-01-01T00:00:00Z INFO a line as a body writes it, with a number or two: 12345 67890\n"
# This many send requests concurrently; the others wait for a response, like agents between two heartbeats.
_AT_ONCE = 16


@dataclass(slots=True)
class Agents:
    """The started agents, the durations of each action, and errors."""

    lines: list[tuple[TaskKey, int, AgentClient]]
    took: defaultdict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    troubles: list[str] = field(default_factory=list)

    async def all_do(self, name: str, act: str) -> None:
        turn = asyncio.Semaphore(_AT_ONCE)

        async def one(key: TaskKey, epoch: int, line: AgentClient) -> None:
            async with turn:
                began = time.perf_counter()
                try:
                    await _ACTS[act](line, key, epoch)
                except EvertickError as error:
                    self.troubles.append(f"{name}: {error}")
                else:
                    self.took[name].append(time.perf_counter() - began)

        async with asyncio.TaskGroup() as group:
            for each in self.lines:
                group.create_task(one(*each))

    async def all_wait(self, seconds: float) -> None:
        """Every agent keeps one long-polling heartbeat open."""
        async with asyncio.TaskGroup() as group:
            for _, _, line in self.lines:
                group.create_task(self._wait(line, seconds))

    async def _wait(self, line: AgentClient, seconds: float) -> None:
        until = time.monotonic() + seconds
        while (rest := until - time.monotonic()) > 0:
            try:
                word, pause = await line.heartbeat(min(rest, Settings().heartbeat_seconds))
            except EvertickError as error:
                self.troubles.append(f"waiting: {error}")
                return
            self.took["waiting"].append(0.0)
            if word != "continue":
                self.troubles.append(f"unexpected answer {word}")
                return
            await asyncio.sleep(pause)


async def _start(line: AgentClient, key: TaskKey, epoch: int) -> None:
    await line.start()


async def _beat(line: AgentClient, key: TaskKey, epoch: int) -> None:
    await line.heartbeat(0.0)


async def _log(line: AgentClient, key: TaskKey, epoch: int) -> None:
    await line.ship([LogChunk(key=key, epoch=epoch, offset=0, end=len(_LINE), content=_LINE)])


async def _finish(line: AgentClient, key: TaskKey, epoch: int) -> None:
    end = 2 * len(_LINE)
    done = Outcome(
        key=key, epoch=epoch, kind=OutcomeKind.SUCCESS, result_json="1", log=_LINE, log_offset=len(_LINE), log_end=end
    )
    await line.finish(done)


_ACTS = {"start": _start, "heartbeat": _beat, "log": _log, "finish": _finish}


async def agents(bench: Bench) -> list[Figure]:
    """Every agent starts, sends a heartbeat and a log line, waits with an open heartbeat, and ends. One API process."""
    count, seconds = bench.size.agents, bench.size.fleet_seconds
    key = new_agent_key()
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = int(free.getsockname()[1])
    await bench.server.make(_DATABASE)
    async with bench.house(_DATABASE, runners=0) as house:
        # Enough connections for all agents at one process, half of them for waiting heartbeats: the default is for a few dozen.
        room = {"EVERTICK_API_CONNECTIONS": str(2 * count + 64)}
        await house.add(
            "api", {"EVERTICK_API_PORT": str(port), "EVERTICK_API_RATE_LIMIT": "0", "EVERTICK_AGENT_KEY": key, **room}
        )
        tokens = AgentTokens(replace(Settings(), agent_key=(key,)))
        them = Agents([
            (name, epoch, AgentClient(f"http://127.0.0.1:{port}", token, log=structlog.get_logger()))
            for name, epoch, token in await _claimed(house, count, tokens)
        ])  # fmt: skip
        await house.until(lambda: _answers(port), "the API responds", pause_seconds=0.2)
        costs: dict[str, tuple[float, float, float]] = {}
        for act in ("start", "heartbeat", "log"):
            bench.say(f"{count:,} agents: {act}")
            costs[act] = await _costed(house, them.all_do(act, act))
        bench.say(f"{count:,} agents wait for {seconds:g} s")
        costs["waiting"] = await _costed(house, them.all_wait(seconds))
        costs["finish"] = await _costed(house, them.all_do("finish", "finish"))
    return _figures(bench, them, costs)


def _figures(bench: Bench, them: Agents, costs: dict[str, tuple[float, float, float]]) -> list[Figure]:
    about, facts = (
        f"{bench.size.agents:,} agents, one API process",
        {"note": "on the machine of the server, EVERTICK_API_CONNECTIONS for all of them"},
    )

    def figure(name: str, what: str, unit: str, value: float, goal: Goal | None = None) -> Figure:
        return Figure(
            name=f"agents.{name}", about=f"{about}: {what}", unit=unit, value=value, goal=goal, settings=facts
        )

    found = [
        figure(
            "troubles",
            f"what went wrong {'; '.join(sorted(set(them.troubles))[:2])}",
            "times",
            float(len(them.troubles)),
            at_most(0),
        )
    ]
    for act in ("start", "heartbeat", "log", "finish"):
        wall, api, server = costs[act]
        done = max(1, len(them.took[act]))
        found += [
            figure(
                f"{act}.p99", f"{act}, {_AT_ONCE} at once, p99", "ms", 1000 * percentile(them.took[act] or [0.0], 0.99)
            ),
            figure(f"{act}.rate", f"{act}, {_AT_ONCE} at once", "1/s", done / wall),
            figure(f"{act}.api", f"{act}, the API's time", "µs each", 1e6 * api / done),
            figure(f"{act}.server", f"{act}, the server's time", "µs each", 1e6 * server / done),
        ]
    wall, api, server = costs["waiting"]
    return [
        *found,
        figure("waiting.api", "waiting, of one core, by the API", "%", 100 * api / wall),
        figure("waiting.server", "waiting, of one core, by the server", "%", 100 * server / wall),
    ]


async def _costed(house: House, work: object) -> tuple[float, float, float]:
    """Elapsed seconds, and CPU seconds of the API process and of the server."""
    with psycopg.connect(house.url, autocommit=True) as conn:
        server = psutil.Process(conn.info.backend_pid).parent()
    api = psutil.Process(house.services["api"].pid)
    before, began = (tree_seconds(api), tree_seconds(server)), time.monotonic()
    await work  # type: ignore[misc]
    return time.monotonic() - began, tree_seconds(api) - before[0], tree_seconds(server) - before[1]


async def _answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


async def _claimed(house: House, count: int, tokens: AgentTokens) -> list[tuple[TaskKey, int, str]]:
    """Submitted attempts, one per agent, each with its start token."""
    await submit(house, "single_warm", count)
    me = replace(
        new_runner(secrets.randbits(62), Settings()),
        runner_id="bench",
        queues=["default"],
        slots=count,
        executor=_EXECUTOR,
    )
    async with await connect(house.url, purpose=Purpose.RUNNER) as conn:
        await runners.register(conn, me)
        rows = []
        while len(rows) < count:
            rows += await claim_for_dispatch(
                conn, session=me.session, queues=["default"], free=min(256, count - len(rows))
            )
    named = [(TaskKey(row.run_id, row.idx, row.map_index), row) for row in rows]
    return [
        (name, row.epoch, tokens.make_start_token(key=name, epoch=row.epoch, session=row.session))
        for name, row in named
    ]
