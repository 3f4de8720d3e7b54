"""What fifty who poll cost the engine (H4): beside one load they ask and are silent in turn, each for half a second.

A machine like this changes its speed by more, and for longer, than those who poll could: only what lies side by side compares.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import cycle

from bench.case import Bench
from bench.case_api import LOAD, served_api
from bench.case_history import OLD
from bench.figures import Figure, at_least, median
from bench.house import House, NotMeasured
from bench.work import spans, submit, until_over, warm_up

POLLERS = 50
# How often each asks: once a second; and as Airflow's own pages do, every three seconds. None is silence.
POLL_SECONDS = (1.0, 3.0)
_TURNS = (None, *POLL_SECONDS)
_QUESTION = "/api/v1/runs?limit=20"
# What was asked in the turn before is answered by then.
_SETTLE_SECONDS = 0.1

Turn = tuple[float | None, float, float]


class Client(asyncio.Protocol):
    """One connection that is kept, as little work as possible: in life clients are elsewhere, here they take part of the machine."""

    def __init__(self, token: str) -> None:
        self._question = f"GET {_QUESTION} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
        self._answer, self._transport = bytearray(), asyncio.Transport()
        self.is_waiting, self.answers, self.fault = False, 0, ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def ask(self) -> None:
        self.is_waiting = True
        self._transport.write(self._question)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, _, body = self._answer.partition(b"\r\n\r\n")
        _, _, length = bytes(head).lower().partition(b"content-length: ")
        if not length or len(body) < int(length.partition(b"\r\n")[0]):
            return
        if b" 200 " not in head[:20]:
            self.fault = f"{_QUESTION} was answered with {head[:100].decode(errors='replace')}"
        self._answer.clear()
        self.is_waiting, self.answers = False, self.answers + 1

    def connection_lost(self, exc: Exception | None) -> None:
        self.fault = self.fault or f"a connection was lost: {exc}"

    def close(self) -> None:
        self._transport.close()


class Crowd:
    """All of them, evenly spread over the time after which each asks again. Who still waits for an answer lets its turn pass."""

    def __init__(self, clients: Sequence[Client]) -> None:
        self._clients, self._next = clients, cycle(clients)
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None

    def poll(self, seconds: float | None) -> None:
        """From now on, or no more."""
        if self._timer is not None:
            self._timer.cancel()
        if seconds is not None:
            self._ask(self._loop.time(), seconds / len(self._clients))

    def _ask(self, now: float, pause_seconds: float) -> None:
        client = next(self._next)
        if not client.is_waiting:
            client.ask()
        after = now + pause_seconds
        self._timer = self._loop.call_at(after, self._ask, after, pause_seconds)

    def check(self) -> None:
        for client in self._clients:
            if client.fault:
                raise NotMeasured(client.fault)


async def api_pollers(bench: Bench) -> list[Figure]:
    """One-task runs without a pause; what is compared is how many bodies ended while fifty asked for the newest runs, and while
    they did not."""
    await bench.server.make(OLD)
    found: dict[float, list[float]] = defaultdict(list)
    async with (
        bench.house(OLD) as house,
        served_api(house) as (port, token),
        _crowd(port, token) as crowd,
    ):
        await warm_up(house)
        for _ in bench.rounds():
            bodies, seconds, turns = Counter[float | None](), Counter[float | None](), 0
            while turns < bench.size.poll_turns:
                for pause, count, lasted in await _beside_a_load(bench, house, crowd):
                    bodies[pause] += count
                    seconds[pause] += lasted
                    turns += pause is None
            silent = bodies[None] / seconds[None]
            for pause in POLL_SECONDS:
                found[pause].append(bodies[pause] / seconds[pause] / silent)
    return [
        median(
            f"api_pollers.{pause:g}s",
            f"singles.warm with {POLLERS} clients that ask every {pause:g} s ÷ without",
            "ratio",
            ratios,
            at_least(0.95),
        )
        for pause, ratios in found.items()
    ]


async def _beside_a_load(bench: Bench, house: House, crowd: Crowd) -> list[tuple[float | None, int, float]]:
    """How many bodies ended in each turn, and how long it was."""
    run_ids = await submit(house, LOAD, bench.size.polled)
    over = asyncio.create_task(until_over(house, LOAD))
    cycles = await _turns(crowd, over, bench.size.poll_turn_seconds)
    await over
    crowd.check()
    ends = sorted(span.end for span in await spans(house, run_ids))
    return [
        (pause, bisect_left(ends, end) - bisect_left(ends, start), end - start)
        for turns in cycles
        for pause, start, end in turns
        # That all is over is seen a little later than it is.
        if turns[-1][2] <= ends[-1]
    ]


async def _turns(crowd: Crowd, over: asyncio.Task[None], seconds: float) -> list[list[Turn]]:
    """While the load lasts, each kind as often as the others. Another one begins each time: what one leaves behind for the next
    is shared out."""
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
async def _crowd(port: int, token: str) -> AsyncIterator[Crowd]:
    """Each has its connection, and has been answered once: connections to the database are open, statements planned."""
    loop = asyncio.get_running_loop()
    clients = [(await loop.create_connection(lambda: Client(token), "127.0.0.1", port))[1] for _ in range(POLLERS)]
    crowd = Crowd(clients)
    try:
        for client in clients:
            client.ask()
        while any(client.is_waiting for client in clients):
            crowd.check()
            await asyncio.sleep(0.01)
        yield crowd
    finally:
        crowd.poll(None)
        for client in clients:
            client.close()
