"""The one loop of all services: it outlives every tick, backs off, and wakes up when it is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

import psycopg
import pytest

from evertick.domain.errors import PostgresUnavailable
from evertick.runtime.loop import LONGEST_BACK_OFF_SECONDS, back_off, keep_trying, limit_backoff, run_loop
from tests.system.hosting import Said
from tests.waiting import eventually


class Looped:
    """A loop whose ticks follow a script: an error is raised, a number is the delay that the tick asks for."""

    def __init__(self, *script: Exception | float) -> None:
        self._script = list(script)
        self.ticks = 0
        self.wake, self.stop, self.said = asyncio.Event(), asyncio.Event(), Said()

    async def tick(self) -> float:
        self.ticks += 1
        step = self._script.pop(0) if self._script else 60.0
        if isinstance(step, Exception):
            raise step
        return step

    async def run(self, tick: Callable[[], Awaitable[float]] | None = None, **options: float) -> None:
        await run_loop(tick or self.tick, wake=self.wake, stop=self.stop, name="test", log=self.said.log, **options)

    def end(self) -> None:
        self.stop.set()
        self.wake.set()


@pytest.mark.requirement("A1")
@pytest.mark.parametrize(
    ("error", "event"),
    [
        (psycopg.OperationalError("gone"), "database_unreachable"),
        (psycopg.InterfaceError("closed"), "database_unreachable"),
        (PostgresUnavailable("nobody there"), "database_unreachable"),
        (OSError("no route"), "database_unreachable"),
        (psycopg.errors.DiskFull("no space"), "database_unreachable"),
        (psycopg.errors.LockNotAvailable("locked"), "database_unreachable"),
        (psycopg.errors.ReadOnlySqlTransaction("for now"), "database_unreachable"),
        (ZeroDivisionError("a bug"), "loop_failed"),
        (psycopg.errors.UndefinedTable("poison"), "loop_failed"),
        (psycopg.errors.InsufficientPrivilege("permission denied"), "permission_denied"),
    ],
)
async def test_a_tick_that_raises_is_told_and_tried_again(error: Exception, event: str) -> None:
    looped = Looped(error, error)
    async with asyncio.TaskGroup() as group:
        group.create_task(looped.run())
        await eventually(lambda: looped.ticks == 3)
        looped.end()
    assert [said["error"] for said in looped.said.events(event)] == [error, error]
    assert looped.said.events("loop_recovered") == [
        {"event": "loop_recovered", "level": "info", "loop": "test", "after_failures": 2}
    ]


async def test_a_wake_up_ends_the_wait_and_one_that_came_during_a_tick_is_not_lost() -> None:
    looped = Looped()

    async def tick() -> float:
        looped.ticks += 1
        if looped.ticks == 2:
            looped.wake.set()  # somebody calls while we are at it
        return 60.0

    async with asyncio.TaskGroup() as group:
        group.create_task(looped.run(tick))
        await eventually(lambda: looped.ticks == 1)
        looped.wake.set()
        await eventually(lambda: looped.ticks == 3)
        looped.end()
    assert looped.ticks == 3


async def test_a_tick_that_asks_for_no_delay_lets_others_have_their_turn() -> None:
    looped = Looped(*[0.0] * 10_000)
    async with asyncio.TaskGroup() as group:
        group.create_task(looped.run())
        await asyncio.sleep(0)
        turns = 0
        while looped.ticks < 100:
            turns += 1
            await asyncio.sleep(0)
        looped.end()
    assert turns > 90


async def test_the_loop_ends_at_once_when_it_is_told() -> None:
    looped = Looped()
    async with asyncio.TaskGroup() as group:
        group.create_task(looped.run())
        await eventually(lambda: looped.ticks == 1)
        began = time.monotonic()
        looped.end()
    assert time.monotonic() - began < 20
    assert looped.ticks == 1


def test_the_pause_grows_is_spread_and_has_an_end() -> None:
    assert all(0.05 <= back_off(1) / 2 <= 0.1 for _ in range(100))
    assert all(back_off(n) <= LONGEST_BACK_OFF_SECONDS for n in (1, 10, 10**6))
    assert len({back_off(20) for _ in range(20)}) > 1
    assert min(back_off(20) for _ in range(100)) >= LONGEST_BACK_OFF_SECONDS / 2


@pytest.mark.requirement("K9")
async def test_a_loop_that_must_not_be_late_never_pauses_longer_than_it_may() -> None:
    """As the heartbeat: after an outage the first beat is no later than any beat."""
    looped = Looped(*[OSError("away")] * 12)
    limit_backoff(0.02)
    try:
        async with asyncio.TaskGroup() as group:
            group.create_task(looped.run())
            await eventually(lambda: looped.ticks == 13)
            looped.end()
    finally:
        limit_backoff(2 * LONGEST_BACK_OFF_SECONDS)
    pauses = {float(said["retry_in"]) for said in looped.said.events("database_unreachable")}
    assert max(pauses) <= 0.01
    assert len(pauses) > 6, "also a short pause is spread"


@pytest.mark.requirement("K10", "N13")
def test_no_loop_of_a_process_comes_back_later_than_after_half_a_heartbeat() -> None:
    try:
        limit_backoff(0.4)
        assert all(0.1 <= back_off(20) <= 0.2 for _ in range(100))
        assert len({back_off(20) for _ in range(20)}) > 1
        limit_backoff(1000.0)
        assert all(back_off(20) <= LONGEST_BACK_OFF_SECONDS for _ in range(100))
    finally:
        limit_backoff(2 * LONGEST_BACK_OFF_SECONDS)


async def test_what_cannot_be_done_without_is_tried_until_it_works_or_the_service_is_stopped() -> None:
    answers: list[Exception | str] = [
        PostgresUnavailable("not yet"),
        psycopg.errors.InsufficientPrivilege("not you"),
        "here",
    ]
    stop, said = asyncio.Event(), Said()

    async def ask() -> str:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    assert await keep_trying(ask, stop=stop, name="test", log=said.log) == "here"
    assert [each["event"] for each in said.all] == ["database_unreachable", "permission_denied"]
    assert "evertick db roles" in said.all[1]["message"]
    answers = [PostgresUnavailable("never")]
    stop.set()
    with pytest.raises(PostgresUnavailable, match="never"):
        await keep_trying(ask, stop=stop, name="test", log=said.log)
