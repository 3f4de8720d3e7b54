"""The contract of executors (`executors/base.py`), on engines that run."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from evertick.config import Settings
from evertick.domain.errors import ExecutorUnavailable, SubmissionRefused
from evertick.executors.base import Observed, Phase, RemoteExecutor
from tests.engines.place import Place, go, lines, order
from tests.waiting import eventually

# An engine starts an interpreter, and a scheduler of its own may come first.
_SECONDS = 60.0


def executor_of(place: Place, **changes: Any) -> RemoteExecutor:
    return place.executor(Settings(**place.settings(**changes)))


async def seen_as(executor: RemoteExecutor, name: str, phase: Phase | None) -> Any:
    async def is_so() -> Observed | bool | None:
        found = await executor.find(name)
        if phase is None:
            return found is None
        return found if found is not None and found.phase is phase else None

    return await eventually(is_so, _SECONDS, pause_seconds=0.1)


async def canceled(executor: RemoteExecutor, name: str, grace_seconds: float) -> None:
    """As a runner does it: again, until it is gone."""

    async def is_gone() -> bool:
        # Podman fails while it is removing a container.
        with suppress(ExecutorUnavailable):
            await executor.cancel(name, grace_seconds)
            return await executor.find(name) is None
        return False

    await eventually(is_gone, _SECONDS, pause_seconds=0.2)


@pytest.mark.requirement("A11")
async def test_an_attempt_runs_once_and_leaves_its_outcome(place: Place) -> None:
    """Submitted three times, seen, read after its end, and removed without a rest."""
    one = order("hold", 1, place.engine, env={"REGION": "eu"})
    async with executor_of(place) as executor:
        assert await executor.find(one.name) is None
        await executor.cancel(one.name, 1.0)
        hints = executor.hints()
        for _ in range(3):
            await executor.submit(one)
        await eventually(lambda: lines(place, "started"), _SECONDS)
        assert (await seen_as(executor, one.name, Phase.RUNNING)).outcome is None
        assert (await executor.observe())[one.name].phase is Phase.RUNNING
        if not place.shows_token:
            assert one.token not in await place.shown(one.name)
        go(place, one.name)
        if place.has_hints:
            await anext(hints)
        ended = await seen_as(executor, one.name, Phase.ENDED)
        assert ended.outcome is not None and b"hold by " in ended.outcome and b"with eu" in ended.outcome
        assert ended.exit_code in (7, None)
        assert (await executor.observe())[one.name].phase is Phase.ENDED
        # A runner whose answer was lost tries again: what has ended must not start again.
        await executor.submit(one)
        assert (await executor.find(one.name)).phase is Phase.ENDED  # type: ignore[union-attr]
        await canceled(executor, one.name, 1.0)
        assert one.name not in await executor.observe() and one.name not in await place.names()
        assert lines(place, "started") == [one.name]


@pytest.mark.requirement("A16")
async def test_attempts_outlive_their_runner_and_a_killed_one_says_so(place: Place) -> None:
    one = order("hold", 2, place.engine)
    async with executor_of(place) as executor:
        await executor.submit(one)
        await eventually(lambda: lines(place, "started"), _SECONDS)
    async with executor_of(place) as executor, executor_of(place, executor_owner="another") as stranger:
        assert (await executor.observe())[one.name].phase is Phase.RUNNING
        assert one.name not in await stranger.observe()
        await place.kill_attempt(one.name)
        ended = await seen_as(executor, one.name, Phase.ENDED)
        assert ended.outcome is None and (ended.reason or ended.exit_code)
        await canceled(executor, one.name, 1.0)


@pytest.mark.parametrize("word", ["hold", "stubborn"])
async def test_a_canceled_attempt_ends_in_peace_or_by_force(place: Place, word: str) -> None:
    one = order(word, 3, place.engine)
    async with executor_of(place) as executor:
        await executor.submit(one)
        await eventually(lambda: lines(place, "started"), _SECONDS)
        await canceled(executor, one.name, 1.0)
    assert lines(place, "stopped") == ([one.name] if word == "hold" else [])


@pytest.mark.requirement("B11")
async def test_what_an_engine_will_never_accept_is_refused_and_an_outage_is_not(place: Place) -> None:
    async with executor_of(place) as executor:
        for wrong, says in place.refused:
            one = order("hold", 4, place.engine, **wrong)
            with pytest.raises(SubmissionRefused, match=says):
                await executor.submit(one)
            assert await executor.find(one.name) is None and one.name not in await place.names()
    if place.unreachable is None:
        return
    async with executor_of(place, **place.unreachable) as executor:
        one = order("hold", 5, place.engine)
        for call in (executor.submit(one), executor.observe(), executor.find(one.name), executor.cancel(one.name, 1.0)):
            with pytest.raises(ExecutorUnavailable):
                await call
