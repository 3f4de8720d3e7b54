"""A runner of an executor elsewhere, on a real database and with an executor that misbehaves (A2, A5, A11, A16, B3, B10, B11)."""

from __future__ import annotations

import math
import random
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.queries.runners import DispatchRow
from evertick.domain.access import Actor
from evertick.domain.agent_protocol import refusal_to_bytes, to_bytes
from evertick.domain.attempt import OutcomeKind, RunnerRequest
from evertick.domain.explain import describe
from evertick.domain.retry import RetryPolicy
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.runners import drain
from evertick.engine.runs import cancel
from evertick.executors.base import Observed, Phase
from evertick.observability import metrics
from evertick.observability.health import ServiceHealth, ServicePhase
from evertick.runner.remote import endings
from evertick.runner.remote.session import RemoteSession
from evertick.runner.runner import Runner
from evertick.secrets.agent_tokens import AgentTokens
from tests.engine import invariants
from tests.engine.reasons import explain
from tests.engine.remote_agents import begin
from tests.engine.world import lead, make_dag, put, run_state, start, states, value
from tests.executors.unruly import Place, UnrulyExecutor, finish, outcome_for, outcome_of
from tests.system.hosting import Said, hosted, quick
from tests.waiting import elapse, eventually

LISTED = "select count(*) from dispatch"


@pytest.fixture
async def place(database: str) -> AsyncIterator[Place]:
    made = Place(database)
    yield made
    await made.close()


@pytest.fixture
async def there(conn: AsyncConnection) -> AsyncIterator[AsyncConnection]:
    await invariants.install(conn)
    yield conn
    assert await invariants.violations(conn) == []


def dispatcher(database: str, folder: Path, place: Place, said: Said, **changes: Any) -> Runner:
    chosen = {"executor": "far", "dispatch_lost_seconds": 1.0, "runner_slots": 100, "stop_grace_seconds": 0.5}
    settings = quick(database, folder / "home", **{**chosen, **changes})
    tokens = AgentTokens(settings)

    def begin(request: RunnerRequest | None) -> RemoteSession:
        executor = UnrulyExecutor(place)
        return RemoteSession(settings, url=database, log=said.log, executor=executor, tokens=tokens, request=request)

    return Runner(settings, url=database, log=said.log, begin=begin)


async def trigger(conn: AsyncConnection, tasks: int = 1, **options: Any) -> int:
    await put(conn, make_dag("d", {f"t{n}": [] for n in range(tasks)}, **options))
    return await start(conn, "d")


async def ended(conn: AsyncConnection, run_id: int, state: str = "success") -> None:
    async def is_over() -> bool:
        return await run_state(conn, run_id) == state

    await eventually(is_over, 60)


async def all_cleaned_up(conn: AsyncConnection, place: Place) -> None:
    async def is_empty() -> bool:
        return await value(conn, LISTED) == 0 and not place.things

    await eventually(is_empty)


async def looked_again(place: Place) -> None:
    """Often enough for whatever follows from a look to have been done."""
    before = place.looks
    place.changed.set()
    await eventually(lambda: place.looks >= before + 3)


def counted(metric: Any) -> float:
    return float(
        sum(sample.value for family in metric.collect() for sample in family.samples if "total" in sample.name)
    )


async def test_what_is_handed_over_runs_and_nothing_of_it_is_left(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    run_id = await trigger(there, 5)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await ended(there, run_id)
        await all_cleaned_up(there, place)
    assert set(place.tries.values()) == {1} and set(place.begun.values()) == {1}
    assert await value(there, "select end_reason from runner where executor = 'far' and queues <> '{}'") == "stopped"


async def test_large_results_of_runs_that_are_gone_are_cleared_away_also_where_nothing_runs_itself(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    left = tmp_path / "home" / "results" / "4711"
    left.mkdir(parents=True)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await eventually(lambda: not left.exists())


async def test_it_says_that_it_is_ready_and_also_while_its_executor_is_away(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    """To whoever asks it is a runner as any other: a probe must not wait for ever, and an outage elsewhere is not its own."""
    health = ServiceHealth("runner", owner="test")
    health.phase = ServicePhase.RUNNING
    assert [each.reason for each in health.complaints()] == ["starting"]
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await eventually(lambda: health.complaints() == [])
        place.is_down = True
        run_id = await trigger(there)
        await eventually(lambda: place.tries)
        assert health.complaints() == []
        place.is_down = False
        await ended(there, run_id)
        await all_cleaned_up(there, place)


@pytest.mark.requirement("A5")
async def test_a_full_pool_leaves_tasks_available_and_counts_it(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.latency_seconds = 0.15
    run_id = await trigger(there, 8)
    before = counted(metrics.DISPATCH_AT_CAPACITY)
    # What its executor has may take its time to begin.
    unheard = "select count(*) from dispatch where submitted_at is null"
    seen: list[int] = []
    async with hosted(dispatcher(database, tmp_path, place, Said(), dispatch_workers=1, dispatch_queue=1)):
        while await run_state(there, run_id) != "success":
            seen.append(int(str(await value(there, unheard))))
            await elapse(0.02)
    assert place.most_at_once == 1
    assert 1 <= max(seen) <= 3, "one in hand, one in line, one that was taken a moment ago"
    assert counted(metrics.DISPATCH_AT_CAPACITY) > before


@pytest.mark.requirement("A11")
@pytest.mark.parametrize("mood", ["down", "late", "busy", "broken"])
async def test_a_submission_that_fails_is_made_again_and_makes_nothing_twice(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place, mood: str
) -> None:
    place.mood = lambda name, tries: mood if tries <= 2 else "fine"
    run_id = await trigger(there, 3)
    said = Said()
    async with hosted(dispatcher(database, tmp_path, place, said)):
        await ended(there, run_id)
        await all_cleaned_up(there, place)
    assert set(place.begun.values()) == {1}
    assert await value(there, "select max(epoch) from task") == 1, "no attempt was given up for it"
    assert said.events("loop_failed" if mood == "broken" else "dispatch_failed")


@pytest.mark.requirement("V11")
async def test_a_submission_that_always_breaks_is_not_made_without_a_pause_and_keeps_no_other(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.mood = lambda name, tries: "broken" if name.split("-")[2] == "0" else "fine"
    run_id, began = await trigger(there, 3), time.monotonic()

    async def are_others_over() -> bool:
        return await states(there, run_id) == {"t0": "queued", "t1": "success", "t2": "success"}

    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await eventually(lambda: max(place.tries.values(), default=0) >= 2)
        await eventually(are_others_over)
        await elapse(1.0)
    assert await are_others_over()
    # The pause of half a second, and then twice as long each time.
    pauses = math.log2((time.monotonic() - began) / 0.5 + 1)
    assert max(place.tries.values()) <= pauses + 1


@pytest.mark.requirement("V11")
async def test_a_version_that_cannot_be_read_fails_its_own_tasks_and_delays_no_other(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    await put(there, make_dag("poison", {"p": []}))
    poison, run_id = await start(there, "poison"), await trigger(there, 3)
    await there.execute("update dag_version set spec = '{}' where spec->>'name' = 'poison'")
    said = Said()
    async with hosted(dispatcher(database, tmp_path, place, said)):
        await ended(there, poison, "failed")
        await ended(there, run_id)
    reason = await value(there, "select reason from task where run_id = %s", poison)
    assert str(reason).startswith("InvalidDag: this release cannot read the published DAG")
    assert not said.events("dispatch_failed", reason="unavailable"), "nobody paused for it"


async def test_what_will_never_be_taken_fails_with_the_reason_and_only_that(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.mood = lambda name, tries: "refused" if name.split("-")[2] == "0" else "fine"
    run_id = await trigger(there, 2, task_retry=RetryPolicy(retries=1, delay_seconds=0))
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await ended(there, run_id, "failed")
        await all_cleaned_up(there, place)
    assert await states(there, run_id) == {"t0": "failed", "t1": "success"}
    assert await value(there, "select reason from task where idx = 0") == "refused by its executor: no such image"
    assert len(place.tries) == 3, "it was retried once, as the user asked"


@pytest.mark.requirement("B3", "B8")
async def test_a_submission_that_was_lost_is_noticed_and_runs_again(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    lost: set[str] = set()

    def lose_first(name: str, tries: int) -> str:
        if lost and name not in lost:
            return "fine"
        lost.add(name)
        return "lost"

    place.mood = lose_first
    run_id = await trigger(there)
    before = counted(metrics.DISPATCH_LOST)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await ended(there, run_id)
    assert counted(metrics.DISPATCH_LOST) == before + 1
    reason = await value(there, "select reason from attempt")
    assert str(reason).startswith("dispatch_lost: its executor does not know it, ")


@pytest.mark.requirement("B11", "N28")
async def test_an_outage_of_the_executor_loses_nothing_and_leaves_what_runs_alone(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "hold"
    first = await trigger(there, 2)
    said = Said()
    failed, unlisted = counted(metrics.DISPATCH_FAILED), counted(metrics.DISPATCH_LOST_LIST_ERROR)
    async with hosted(dispatcher(database, tmp_path, place, said)):
        await eventually(lambda: sum(place.begun.values()) == 2)
        place.is_down = True
        second = await start(there, "d")
        await eventually(lambda: len(place.tries) > 2)
        # Several times as long as it takes for something to be taken for lost.
        await elapse(3.5)
        assert await value(there, "select max(epoch) from task") == 1
        assert await value(there, "select count(*) from attempt") == 0
        assert set((await states(there, first)).values()) == {"running"}
        assert {"available", "queued"} >= set((await states(there, second)).values())
        place.is_down = False
        place.let_go.set()
        await ended(there, first)
        await ended(there, second)
    assert set(place.begun.values()) == {1}
    assert counted(metrics.DISPATCH_FAILED) > failed
    assert counted(metrics.DISPATCH_LOST_LIST_ERROR) > unlisted
    assert await value(there, "select max(epoch) from task") == 1


@pytest.mark.requirement("B10")
async def test_what_ends_without_a_word_is_lost_with_the_reason_of_the_place(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "die"
    run_id = await trigger(there)
    async with hosted(dispatcher(database, tmp_path, place, Said(), infra_retries=0)):
        await ended(there, run_id, "failed")
        await all_cleaned_up(there, place)
    reason = await value(there, "select reason from task")
    assert reason == "agent_lost: its agent ended without reporting an outcome (OOMKilled, exit status 137)"


async def test_what_an_agent_left_behind_counts_before_any_guess(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "leave"
    run_id = await trigger(there)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await ended(there, run_id)
        await all_cleaned_up(there, place)
    assert await value(there, "select value from result") == "far"
    assert await value(there, "select count(*) from runner where ended_at is null and queues = '{}'") == 0


@pytest.mark.requirement("V5")
async def test_what_a_live_agent_left_is_recorded_before_its_silence_takes_the_attempt_away(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    """Half of the silence that is needed for that must have passed: until then it may report by itself, with its log."""
    place.lives = "deaf"
    run_id = await trigger(there)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await eventually(lambda: any(thing.seen.outcome for thing in place.things.values()))
        await looked_again(place)
        assert await states(there, run_id) == {"t0": "running"}
        (thing,) = place.things.values()
        whole, late = thing.seen.outcome or b"", replace(outcome_for(thing.order), kind=OutcomeKind.LOST)
        silent = "update runner set silent_seconds = lost_after_seconds * 0.6 where queues = '{}'"
        await there.execute(silent)
        for not_yet in (whole[:-9], to_bytes(replace(late, result_json=None), session=thing.order.session)):
            thing.seen = replace(thing.seen, outcome=not_yet)
            await looked_again(place)
            assert await states(there, run_id) == {"t0": "running"}
        thing.seen = replace(thing.seen, outcome=whole)
        await ended(there, run_id)
        await all_cleaned_up(there, place)
    assert await value(there, "select value from result") == "far"
    assert await value(there, "select count(*) from attempt") == 0, "nothing was lost"


@pytest.mark.requirement("V5")
async def test_an_attempt_that_a_stale_observation_reports_ended_keeps_running(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "hold"
    run_id = await trigger(there)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await eventually(lambda: place.begun)
        (name,) = place.things
        place.stale[name] = Observed(phase=Phase.ENDED, reason="ImagePullBackOff")
        await looked_again(place)
        assert await states(there, run_id) == {"t0": "running"}
        place.let_go.set()
        await ended(there, run_id)
        await all_cleaned_up(there, place)
    assert await value(there, "select max(epoch) from task") == 1


@pytest.mark.parametrize("grace", [60.0, 0.2])
async def test_an_agent_that_told_its_end_may_leave_by_itself_within_the_grace(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place, grace: float
) -> None:
    place.lives = "linger"
    run_id = await trigger(there)
    async with hosted(dispatcher(database, tmp_path, place, Said(), stop_grace_seconds=grace)):
        await ended(there, run_id)
        (name,) = place.begun
        if grace > 1:
            await looked_again(place)
            assert name in place.things
            place.let_go.set()
        await all_cleaned_up(there, place)
    assert place.taken_away == {name: Phase.ENDED if grace > 1 else Phase.RUNNING}


@pytest.mark.parametrize(
    ("seen", "told"),
    [
        (Observed(phase=Phase.ENDED, reason="ImagePullBackOff"), "ImagePullBackOff"),
        (
            Observed(phase=Phase.ENDED, exit_code=5, outcome=refusal_to_bytes("no token of ours")),
            "exit status 5, its agent: no token of ours",
        ),
    ],
    ids=["with a reason of its place", "with what its agent left behind"],
)
async def test_what_ends_before_it_began_says_why_and_is_dispatched_again(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place, seen: Observed, told: str
) -> None:
    place.lives = "idle"
    run_id = await trigger(there)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        (name,) = await eventually(lambda: list(place.things))
        place.lives = "run"
        place.end(name, seen)
        await ended(there, run_id)
    assert await value(there, "select reason from attempt") == f"dispatch_lost: it ended before it started ({told})"


async def test_what_an_old_look_took_for_ended_may_still_begin(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "idle"
    run_id = await trigger(there)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        (name,) = await eventually(lambda: list(place.things))
        place.stale[name] = Observed(phase=Phase.ENDED, reason="ImagePullBackOff")
        await looked_again(place)
        assert list(place.things) == [name] and await states(there, run_id) == {"t0": "queued"}
        order = place.things[name].order
        assert await begin(there, session=order.session, epoch=order.epoch)
        await finish(there, order)
        await ended(there, run_id)
    assert await value(there, "select max(epoch) from task") == 1


@pytest.mark.parametrize("is_outcome_left", [False, True])
async def test_what_begins_while_it_is_taken_away_is_not_left_to_silence(
    there: AsyncConnection,
    database: str,
    tmp_path: Path,
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    is_outcome_left: bool,
) -> None:
    cancel_there = UnrulyExecutor.cancel
    begun: list[str] = []

    async def cancel_late(executor: UnrulyExecutor, name: str, grace_seconds: float) -> None:
        if not begun:
            begun.append(name)
            order = place.things[name].order
            assert await begin(there, session=order.session, epoch=order.epoch)
        await cancel_there(executor, name, grace_seconds)

    monkeypatch.setattr(UnrulyExecutor, "cancel", cancel_late)
    place.lives = "idle"
    run_id = await trigger(there)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        (name,) = await eventually(lambda: list(place.things))
        place.lives = "run"
        left = outcome_of(place.things[name].order) if is_outcome_left else None
        place.end(name, Observed(phase=Phase.ENDED, reason="ImagePullBackOff", outcome=left))
        await ended(there, run_id)
    assert begun == [name]
    reasons = await value(there, "select array_agg(reason order by epoch) from attempt where reason is not null")
    if is_outcome_left:
        assert reasons is None and await value(there, "select max(epoch) from task") == 1
    else:
        assert reasons == ["agent_lost: it was deleted because it could not start, and had just started"]


async def test_an_agent_that_runs_and_does_not_reach_the_api_is_told_where_it_was_sent(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endings, "UNREACHABLE_API_SECONDS", 0.0)
    place.lives, said = "idle", Said()
    run_id = await trigger(there)

    async def sentence() -> str | None:
        (reason,) = (await explain(there, run_id=run_id, task="t0")).reasons
        return describe(reason) if reason.detail.get("trouble") else None

    async with hosted(dispatcher(database, tmp_path, place, said, agent_api_url="http://elsewhere.example")):
        (name,) = await eventually(lambda: list(place.things))
        place.end(name, Observed(phase=Phase.RUNNING))
        told = await eventually(sentence)
        assert told.startswith("executor far accepted it ") and "the API at http://elsewhere.example" in told
    assert len(said.events("attempt_not_started")) == 1, "it is told once"


@pytest.mark.parametrize(
    ("changes", "phase", "running_seconds", "is_told"),
    [
        ({}, Phase.RUNNING, 31.0, True),
        ({}, Phase.RUNNING, 29.0, False),
        ({}, Phase.ENDED, 31.0, False),
        ({"state": "running"}, Phase.RUNNING, 31.0, False),
        # What is yet to be handed over says itself why not.
        ({"is_submitted": False}, Phase.RUNNING, 31.0, False),
        ({"is_submitted": False}, Phase.WAITING, 0.0, False),
        ({}, Phase.WAITING, 0.0, True),
    ],
)
def test_what_keeps_an_attempt_from_beginning_is_told_when_it_is_sure(
    changes: dict[str, Any], phase: Phase, running_seconds: float, is_told: bool
) -> None:
    row = DispatchRow(1, 0, -1, 1, 5, "far", 1, True, 40.0, 40.0, None, None, "queued", None, 1, 1, False, False)
    seen = Observed(phase=phase, reason="Unschedulable")
    told = endings.problem_of(replace(row, **changes), seen, running_seconds=running_seconds, api_url="http://there")
    assert (told is not None) is is_told


async def test_what_cannot_be_taken_away_now_is_told_by_its_name_and_taken_away_later(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "linger"
    run_id, said = await trigger(there), Said()
    async with hosted(dispatcher(database, tmp_path, place, said)):
        await ended(there, run_id)
        place.is_down = True
        place.let_go.set()
        # As what is left over, or, if no look has shown it yet, as what may be leaving by itself: either way it is named.
        ends = {"clean_up", "confirm_end"}
        (told, *_) = await eventually(
            lambda: [e for e in said.events("executor_unavailable") if e.get("doing") in ends]
        )
        assert told["attempt"] in place.things and not said.events("loop_failed")
        place.is_down = False
        await all_cleaned_up(there, place)


@pytest.mark.parametrize("lives", ["idle", "hold"])
async def test_a_canceled_attempt_is_ended_over_there_and_only_then_confirmed(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place, lives: str
) -> None:
    place.lives = lives
    run_id = await trigger(there)
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await eventually(lambda: place.things and (lives == "idle" or place.begun))
        await cancel(there, run_id=run_id, actor=Actor("me"))
        await ended(there, run_id, "canceled")
        await all_cleaned_up(there, place)
    assert await states(there, run_id) == {"t0": "canceled"}


@pytest.mark.requirement("A16", "N29")
async def test_a_runner_that_died_with_a_full_queue_loses_nothing(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    """Its rows are as a kill leaves them: some never tried, one submitted, one that runs."""
    place.lives, place.mood = "hold", lambda name, tries: "down" if int(name.split("-")[2]) > 1 else "fine"
    run_id = await trigger(there, 6)
    first = dispatcher(database, tmp_path, place, Said())
    async with hosted(first):
        await eventually(lambda: sum(place.begun.values()) == 2 and len(place.tries) > 2)
    assert await value(there, LISTED) == 6 or await value(there, "select count(*) from ready_task") > 0
    place.mood = lambda name, tries: "fine"
    said = Said()
    async with hosted(dispatcher(database, tmp_path, place, said)):
        await said.saw("dispatch_adopted")
        await eventually(lambda: sum(place.begun.values()) == 6)
        place.let_go.set()
        await ended(there, run_id)
        await all_cleaned_up(there, place)
    assert set(place.begun.values()) == {1}
    assert await value(there, "select max(epoch) from task where idx < 2") == 1, "what ran was left alone"


async def test_what_was_never_tried_is_given_back_by_a_runner_that_leaves(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.latency_seconds = 600
    run_id = await trigger(there, 4)
    async with hosted(dispatcher(database, tmp_path, place, Said(), dispatch_workers=1)):
        await eventually(lambda: place.tries)
    found = list((await states(there, run_id)).values())
    assert found.count("available") == 3
    assert await value(there, "select count(*) from dispatch where tries = 0") == 0


async def test_a_runner_that_is_asked_to_leave_stays_until_nothing_is_left(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "hold"
    run_id = await trigger(there)
    runner, said = dispatcher(database, tmp_path, place, Said()), Said()
    async with hosted(runner):
        await eventually(lambda: place.begun)
        session = await value(there, "select session from runner where queues <> '{}'")
        await drain(there, sessions=[int(str(session))], actor=Actor("me"), then_leave=True)
        await start(there, "d")
        await elapse(0.3)
        assert not runner.stop.is_set()
        place.let_go.set()
        await ended(there, run_id)
        await eventually(runner.stop.is_set)
    assert sum(place.begun.values()) == 1, said.all


async def test_a_session_declared_dead_starts_again_and_adopts_its_attempts(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "hold"
    run_id = await trigger(there, 2)
    said = Said()
    async with hosted(dispatcher(database, tmp_path, place, said)):
        await eventually(lambda: sum(place.begun.values()) == 2)
        await there.execute("update runner set ended_at = clock(), end_reason = 'x' where queues <> '{}'")
        await said.saw("dispatch_adopted", attempts=2)
        place.let_go.set()
        await ended(there, run_id)
    assert set(place.begun.values()) == {1}


async def test_a_stray_that_nobody_has_on_a_list_is_taken_away(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "idle"
    await trigger(there)
    said = Said()
    async with hosted(dispatcher(database, tmp_path, place, said)):
        (name,) = await eventually(lambda: list(place.things))
        await there.execute("delete from dispatch")
        await said.saw("orphan_removed", attempt=name)
        await eventually(lambda: name not in place.things)
        await there.execute("select reconcile_runs(0::smallint, %s, 0, 0, 10)", [await lead(there)])


async def test_what_has_ended_and_is_slow_to_vanish_is_no_stray(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    """A kubelet takes a second or more to remove a pod that was deleted; the row is gone by then."""
    place.lives = "hold"
    run_id, said = await trigger(there), Said()
    async with hosted(dispatcher(database, tmp_path, place, said)):
        ((name, thing),) = await eventually(lambda: list(place.things.items()))
        place.let_go.set()
        await ended(there, run_id)
        await all_cleaned_up(there, place)
        thing.seen = replace(thing.seen, is_being_deleted=True)
        place.things[name] = thing
        await looked_again(place)
        assert said.events("orphan_removed") == [] and name in place.things
        # Nobody deletes this one.
        thing.seen = replace(thing.seen, is_being_deleted=False)
        await said.saw("orphan_removed", attempt=name)


@pytest.mark.requirement("V11")
async def test_a_stray_that_cannot_be_taken_away_keeps_no_other_and_hides_nothing(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.lives = "idle"
    await trigger(there, 3)
    said = Said()
    async with hosted(dispatcher(database, tmp_path, place, said)):
        first, *others = sorted(await eventually(lambda: list(place.things) if len(place.things) == 3 else None))
        place.stuck.add(first)
        await there.execute("delete from dispatch")
        await said.saw("executor_unavailable", attempt=first)
        await eventually(lambda: not set(others) & set(place.things))
        before = place.looks
        await eventually(lambda: place.looks >= before + 2)
        place.stuck.clear()
        await eventually(lambda: first not in place.things)
        await there.execute("select reconcile_runs(0::smallint, %s, 0, 0, 10)", [await lead(there)])


async def test_an_executor_whose_hints_break_is_looked_at_all_the_same(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    place.is_mute = True
    run_id = await trigger(there)
    said = Said()
    async with hosted(dispatcher(database, tmp_path, place, said)):
        await said.saw("listen_failed")
        await ended(there, run_id)
        await all_cleaned_up(there, place)


async def test_a_place_where_much_changes_is_not_looked_at_without_a_pause(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    async with hosted(dispatcher(database, tmp_path, place, Said())):
        await eventually(lambda: place.looks)
        before, began = place.looks, time.monotonic()
        while place.looks < before + 5:
            place.changed.set()
            await elapse(0.001)
        assert time.monotonic() - began > 0.15, "at a tick of 0.1 s they are 0.05 s apart at least"


async def test_two_runners_of_one_place_share_its_work(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    run_id = await trigger(there, 30)
    changes = {"runner_slots": 4}
    async with (
        hosted(dispatcher(database, tmp_path / "a", place, Said(), **changes)),
        hosted(dispatcher(database, tmp_path / "b", place, Said(), **changes)),
    ):
        await ended(there, run_id)
        await all_cleaned_up(there, place)
    assert set(place.begun.values()) == {1} and len(place.begun) == 30


@pytest.mark.requirement("A11", "B11", "N27")
async def test_all_kinds_of_trouble_at_once_end_well(
    there: AsyncConnection, database: str, tmp_path: Path, place: Place
) -> None:
    """Every other call goes wrong in some way, and one of the two runners is buried meanwhile."""
    dice = random.Random(29)
    moods = ["fine", "fine", "fine", "late", "busy", "down", "lost"]
    # What was lost once comes through: a second loss of the same task would wait for its time.
    place.mood = lambda name, tries: dice.choice(moods) if tries < 4 and name.split("-")[4] == "1" else "fine"
    place.latency_seconds = 0.02
    run_id = await trigger(there, 40)
    async with (
        hosted(dispatcher(database, tmp_path / "a", place, Said(), infra_retries=100)),
        hosted(dispatcher(database, tmp_path / "b", place, Said(), infra_retries=100)),
    ):
        await eventually(lambda: len(place.begun) > 5)
        bury = (
            "update runner set ended_at = clock(), end_reason = 'x' where session = (select min(owner) from dispatch)"
        )
        await there.execute(bury)
        leader = await lead(there)

        async def is_over() -> bool:
            await promote_due_tasks(there, shard=0, epoch=leader, limit=100)
            return await run_state(there, run_id) == "success"

        await eventually(is_over, 120)
        await all_cleaned_up(there, place)
    assert set(place.begun.values()) == {1}, "never two bodies of one attempt"
    lost = await value(there, "select count(*) from attempt where reason not like 'dispatch_lost: %%'")
    assert lost == 0
