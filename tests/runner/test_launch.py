"""What a runner starts, and when: at once, or while the database answers; and what becomes of it if the runner stops first."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import structlog
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.dags.spec import DagSpec, TaskSpec
from evertick.executors.local.executor import LocalExecutor
from evertick.executors.local.fork_server_client import BundlePlace
from evertick.runner.database_access import DatabaseAccess
from evertick.runner.events import LaunchFailed
from evertick.runner.launch import Launcher
from evertick.runner.registration import draw_runner
from evertick.runner.state import RunnerState
from evertick.secrets.backends import SecretProvider
from tests.engine.world import Runner, make_dag, put, start
from tests.waiting import eventually


class Rig:
    """A runner's parts around the one under test. Its bundles never arrive, so that nothing that is started ends."""

    def __init__(
        self,
        url: str,
        folder: Path,
        claims: list[ExchangeRow],
        group: asyncio.TaskGroup,
        settings: Settings | None = None,
    ) -> None:
        self.claims = claims
        self.state = RunnerState(slots=8, lost_after_seconds=90.0, now=0.0)
        self.events: list[LaunchFailed] = []
        chosen = settings or Settings()
        self.access = DatabaseAccess(chosen, url=url, me=draw_runner(chosen), log=structlog.get_logger())
        self.executor = LocalExecutor(
            slots=8, spool_dir=folder, session=1, resolve_bundle=self._never, put=lambda _: None
        )
        self.launcher = Launcher(
            state=self.state,
            executor=self.executor,
            access=self.access,
            grants=SecretProvider(chosen),
            put=self.events.append,
            group=group,
        )
        self.state.add_claims(claims, 0.0)

    def end_something(self) -> None:
        """As an attempt that has ended and waits to be reported."""
        self.state.put_back([Outcome(key=TaskKey(1, 0, -1), epoch=1, kind=OutcomeKind.SUCCESS)])

    async def _never(self, bundle: str, file: str) -> BundlePlace:
        await asyncio.Event().wait()
        raise AssertionError(bundle, file)

    def ended(self) -> list[Outcome]:
        exchange = self.state.next_exchange(0.0)
        return [] if exchange is None else exchange.ended


@pytest.fixture
async def rig(database: str, conn: AsyncConnection, tmp_path: Path) -> AsyncIterator[Rig]:
    await put(conn, make_dag("pair", {"a": [], "b": []}))
    await start(conn, "pair")
    async with asyncio.TaskGroup() as group:
        it = Rig(database, tmp_path, await (await Runner.join(conn)).claim(), group)
        assert len(it.claims) == 2
        async with it.executor:
            yield it
    await it.access.close()


def keys(claims: list[ExchangeRow]) -> set[TaskKey]:
    return {TaskKey(claim.run_id, claim.idx, claim.map_index) for claim in claims}


async def test_with_nothing_to_tell_it_starts_at_once(rig: Rig) -> None:
    await rig.launcher.start(rig.claims, None)
    assert {key for key, _ in rig.executor.held()} == keys(rig.claims)


async def test_while_ends_wait_to_be_told_it_starts_after_they_are_sent(rig: Rig) -> None:
    rig.end_something()
    await rig.launcher.start(rig.claims, None)
    rig.launcher.start_delayed()
    assert rig.executor.held() == [], "whoever asked has not waited for anything yet"
    await asyncio.sleep(0)
    assert {key for key, _ in rig.executor.held()} == keys(rig.claims)
    rig.launcher.start_delayed()
    await asyncio.sleep(0)
    assert rig.state.active == 2, "once: an attempt that runs here cannot be started again"


async def test_what_was_put_off_is_given_back_if_the_runner_stops_first(rig: Rig) -> None:
    rig.end_something()
    await rig.launcher.start(rig.claims, None)
    await rig.executor.stop(grace_seconds=0)
    rig.launcher.start_delayed()
    await asyncio.sleep(0)
    ended = rig.ended()
    assert rig.events, "the loop is woken to report them"
    back = {outcome.key: outcome for outcome in ended if outcome.kind is OutcomeKind.GIVEN_BACK}
    assert set(back) == keys(rig.claims)
    assert all("stopping" in str(outcome.reason) for outcome in back.values())
    assert rig.state.active == 0


class Slow:
    """A keeper of secrets that answers when it is told to."""

    may_answer = threading.Event()

    def get(self, kind: str, name: str) -> str | None:
        assert self.may_answer.wait(30)
        return "a value" if name == "known" else None


@pytest.fixture
async def slow(database: str, conn: AsyncConnection, tmp_path: Path) -> AsyncIterator[Rig]:
    Slow.may_answer.clear()
    tasks = (TaskSpec(name="a", secrets=("known",)), TaskSpec(name="b", secrets=("unknown",)), TaskSpec(name="c"))
    await put(conn, DagSpec(name="three", tasks=tasks))
    await start(conn, "three")
    settings = Settings(secrets_backends=(f"{__name__}:Slow",))
    async with asyncio.TaskGroup() as group:
        it = Rig(database, tmp_path, await (await Runner.join(conn)).claim(), group, settings)
        async with it.executor:
            yield it
        Slow.may_answer.set()
    await it.access.close()


async def test_a_slow_keeper_of_secrets_holds_up_only_those_who_need_it(slow: Rig) -> None:
    await slow.launcher.start(slow.claims, None)
    assert [key.idx for key, _ in slow.executor.held()] == [2]
    Slow.may_answer.set()
    await eventually(lambda: {key.idx for key, _ in slow.executor.held()} == {0, 2} and slow.state.has_ended)
    ended = slow.ended()
    assert [(each.key.idx, each.kind) for each in ended] == [(1, OutcomeKind.FAILED)]
    assert "evertick secrets set unknown" in (ended[0].reason or "")


async def test_what_was_lost_meanwhile_is_not_started(slow: Rig) -> None:
    await slow.launcher.start(slow.claims, None)
    lost = next(claim for claim in slow.claims if claim.idx == 0)
    key = TaskKey(lost.run_id, lost.idx, lost.map_index)
    slow.state.reported([Outcome(key=key, epoch=lost.epoch, kind=OutcomeKind.GIVEN_BACK)], 0.0)
    Slow.may_answer.set()
    await eventually(lambda: slow.state.has_ended)
    await eventually(lambda: not slow.launcher._preparing)
    assert [key.idx for key, _ in slow.executor.held()] == [2]


async def test_claims_that_wait_for_secrets_are_returned_when_the_runner_stops(slow: Rig) -> None:
    await slow.launcher.start(slow.claims, None)
    await slow.launcher.stop()
    ended = slow.ended()
    assert {(each.key.idx, each.kind) for each in ended} == {(0, OutcomeKind.GIVEN_BACK), (1, OutcomeKind.GIVEN_BACK)}
    assert slow.state.active == 1, "the one that has started"
