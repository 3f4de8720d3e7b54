"""The cost of fifty polling clients for the engine (H4): during one load they poll and pause in turn, half a second each.

The machine's speed varies more, and for longer, than the clients could cause, so only adjacent intervals are comparable.
"""

from __future__ import annotations

import asyncio
import socket
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle

import psutil  # type: ignore[import-untyped]
from bench.case import Bench
from bench.case_api import LOAD, served_api
from bench.case_history import OLD
from bench.figures import Figure, at_least, median
from bench.house import House, NotMeasured
from bench.usage import own_seconds
from bench.work import spans, submit, until_over, warm_up

POLLERS = 50
# Polling intervals: three seconds as in Airflow's UI, to which the goal applies, and one second. None means no polling.
GOAL_SECONDS = 3.0
POLL_SECONDS = (GOAL_SECONDS, 1.0)
_TURNS = (None, *POLL_SECONDS)
_QUESTION = "/api/v1/runs?limit=20"
# By then, requests of the previous turn have been answered.
_SETTLE_SECONDS = 0.1
_MOST_PASSED = 0.02

Turn = tuple[float | None, float, float]


class Client:
    """A client with one persistent connection and minimal work, because it shares the machine with the server. It reads a
    response only before its next request; until then, the kernel buffers it."""

    def __init__(self, port: int, token: str) -> None:
        self._question = f"GET {_QUESTION} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setblocking(False)
        self._answer, self._is_answered = b"", True

    def ask(self) -> bool:
        """Send a request. False if the previous response has not arrived."""
        is_free = self.is_answered()
        if is_free:
            self._answer, self._is_answered = b"", False
            self._socket.send(self._question)
        return is_free

    def is_answered(self) -> bool:
        if not self._is_answered:
            self._answer += self._received()
            head, end, body = self._answer.partition(b"\r\n\r\n")
            if end and b" 200 " not in head[:20]:
                raise NotMeasured(f"{_QUESTION} returned {head[:100]!r}")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            self._is_answered = bool(end) and len(body) >= int(length)
        return self._is_answered

    def _received(self) -> bytes:
        try:
            data = self._socket.recv(1_000_000)
        except BlockingIOError:
            return b""
        if not data:
            raise NotMeasured("the API closed the connection of a polling client")
        return data

    def close(self) -> None:
        self._socket.close()


class Crowd:
    """All clients; their requests are spread evenly over the polling interval."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._pause, self._next = 1 / len(clients), cycle(clients)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self.questions, self._passed = 0, 0
        self._fault: Exception | None = None

    def poll(self, seconds: float | None) -> None:
        """Start polling at this interval, or stop."""
        if self._fault is not None:
            raise self._fault
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            self._ask(self._loop.time(), seconds * self._pause)

    def _ask(self, now: float, pause_seconds: float) -> None:
        after = now + pause_seconds
        self._timer = self._loop.call_at(after, self._ask, after, pause_seconds)
        try:
            is_asked = next(self._next).ask()
            self.questions += is_asked
            self._passed += not is_asked
        except (OSError, NotMeasured) as error:
            self._timer.cancel()
            self._fault = error

    def check(self) -> None:
        if self._passed > _MOST_PASSED * self.questions:
            raise NotMeasured(
                f"{self._passed} requests in addition to {self.questions} were not sent because a response was missing"
            )


async def api_pollers(bench: Bench) -> list[Figure]:
    """One-task runs without a pause. Compares how many bodies ended while fifty clients polled the newest runs and while they did
    not."""
    await bench.server.make(OLD)
    found: dict[float, list[float]] = defaultdict(list)
    costs: list[float] = []
    async with bench.house(OLD) as house, served_api(house) as (port, token), _crowd(house, port, token) as crowd:
        await warm_up(house)
        api = psutil.Process(house.services["api"].pid)
        for _ in bench.rounds():
            bodies, seconds, turns = Counter[float | None](), defaultdict[float | None, float](float), 0
            spent, asked = own_seconds(api), crowd.questions
            while turns < bench.size.poll_turns:
                for pause, count, lasted in await _beside_a_load(bench, house, crowd):
                    bodies[pause] += count
                    seconds[pause] += lasted
                    turns += pause is None
            costs.append((own_seconds(api) - spent) / (crowd.questions - asked) * 1000)
            silent = bodies[None] / seconds[None]
            for pause in POLL_SECONDS:
                found[pause].append(bodies[pause] / seconds[pause] / silent)
    ratios = [
        median(
            f"api_pollers.{pause:g}s",
            f"singles.warm with {POLLERS} clients that poll every {pause:g} s ÷ without",
            "ratio",
            each,
            at_least(0.95) if pause == GOAL_SECONDS else None,
        )
        for pause, each in found.items()
    ]
    cost = median("api_pollers.cpu", "processor time of the API for each of these requests, under load", "ms", costs)
    return [*ratios, cost]


async def _beside_a_load(bench: Bench, house: House, crowd: Crowd) -> list[tuple[float | None, int, float]]:
    """The polling interval, the number of ended bodies and the duration of each turn."""
    run_ids = await submit(house, LOAD, bench.size.polled)
    over = asyncio.create_task(until_over(house, LOAD))
    cycles = await _turns(crowd, over, bench.size.poll_turn_seconds)
    await over
    ends = sorted(span.end for span in await spans(house, run_ids))
    return [
        (pause, bisect_left(ends, end) - bisect_left(ends, start), end - start)
        for turns in cycles
        for pause, start, end in turns
        # The end of the load is noticed a little late.
        if turns[-1][2] <= ends[-1]
    ]


async def _turns(crowd: Crowd, over: asyncio.Task[None], seconds: float) -> list[list[Turn]]:
    """Turns of all kinds, equally often, during the load. The first kind rotates, so that effects of one turn on the next are
    distributed evenly."""
    whole: list[list[Turn]] = []
    for start in cycle(range(len(_TURNS))):
        turns: list[Turn] = []
        for pause in (*_TURNS[start:], *_TURNS[:start]):
            crowd.poll(pause)
            await asyncio.sleep(min(_SETTLE_SECONDS, seconds))
            began = time.time()
            await asyncio.sleep(seconds)
            turns.append((pause, began, time.time()))
            if over.done():
                crowd.poll(None)
                return whole
        whole.append(turns)
    raise AssertionError


@asynccontextmanager
async def _crowd(house: House, port: int, token: str) -> AsyncIterator[Crowd]:
    """Connect all clients and send one request each, so that database connections are open and statements planned."""
    clients = [Client(port, token) for _ in range(POLLERS)]
    try:
        for client in clients:
            client.ask()

        async def are_answered() -> bool:
            return all(client.is_answered() for client in clients)

        await house.until(are_answered, "all clients received a response")
        crowd = Crowd(clients)
        yield crowd
        crowd.check()
    finally:
        for client in clients:
            client.close()
