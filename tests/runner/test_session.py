"""The runner in the test's own process, on a real database and with real children: what it does when things fail."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.connect import Purpose, connect
from evertick.domain.attempt import RunnerRequest
from evertick.observability import metrics
from evertick.runner.runner import Runner
from evertick.runner.session import LocalSession
from tests.engine import invariants
from tests.engine.world import run_state, value
from tests.runner.reach import Reach
from tests.system.hosting import Said, armed, hosted
from tests.system.work import LONG, SMALL, Published, effects, executed_twice, let_go, loaded, publish_work, start_run
from tests.waiting import elapse, eventually


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return loaded(SMALL, tmp_path_factory.mktemp("dags"))


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return loaded(LONG, tmp_path_factory.mktemp("dags"))


@pytest.fixture
def effects_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Children inherit the test's environment."""
    file = tmp_path / "effects"
    file.touch()
    monkeypatch.setenv("EFFECTS", str(file))
    monkeypatch.setenv("RUNNER_NAME", "r0")
    return file


@pytest.fixture
async def there(conn: AsyncConnection, small: Published, effects_file: Path) -> AsyncIterator[AsyncConnection]:
    """A database with the small workload, whose invariants must hold in the end."""
    await publish_work(conn, small, only=["chain", "branch"])
    await invariants.install(conn)
    yield conn
    assert await invariants.violations(conn) == []
    assert executed_twice(effects(effects_file)) == []


def make_runner(reach: Reach, tmp_path: Path, said: Said, **settings: Any) -> Runner:
    return reach.runner(tmp_path / "home", said, **settings)


async def ended(conn: AsyncConnection, run_id: int) -> str:
    async def state() -> str | None:
        found = await run_state(conn, run_id)
        return found if found not in ("queued", "running") else None

    last: str = await eventually(state, 60)
    return last


async def tries(conn: AsyncConnection, run_id: int) -> dict[str, tuple[int, int]]:
    """Epoch and attempt of each task."""
    cursor = await conn.execute("select task, epoch, attempt from all_tasks where run_id = %s", [run_id])
    return {task: (epoch, attempt) for task, epoch, attempt in await cursor.fetchall()}


@pytest.mark.requirement("N17", "K2", "K11")
async def test_a_claim_whose_reply_was_lost_is_given_back_and_runs_again(
    reach: Reach, tmp_path: Path, there: AsyncConnection
) -> None:
    run_id, said = await start_run(there, "chain"), Said()
    with armed("finish_and_claim:drop_reply:1"):
        runner = make_runner(reach, tmp_path, said)
        async with hosted(runner):
            assert await ended(there, run_id) == "success"
    assert await said.saw("claim_reply_lost")
    assert (await tries(there, run_id))["one"] == (2, 1), "a lost claim is not an attempt of the user's"
    row = await there.execute("select outcome, reason from attempt where run_id = %s", [run_id])
    assert await row.fetchall() == [("given_back", "claim_reply_lost")]


@pytest.mark.requirement("A14", "V10")
async def test_what_a_runner_does_is_counted(reach: Reach, tmp_path: Path, there: AsyncConnection) -> None:
    names = ("claims_total", "claims_lost_total", "handoff_latency_seconds_count", "runner_slots", "attempts_running")

    def figures() -> dict[str, float]:
        found = {name: metrics.REGISTRY.get_sample_value(f"evertick_{name}") or 0.0 for name in names}
        ends = metrics.REGISTRY.get_sample_value("evertick_attempts_finished_total", {"outcome": "success"})
        return {**found, "success": ends or 0.0}

    before, run_id = figures(), await start_run(there, "chain")
    with armed("finish_and_claim:drop_reply:1"):
        async with hosted(make_runner(reach, tmp_path, Said())):
            assert await ended(there, run_id) == "success"
    after = figures()
    grown = {name: after[name] - before[name] for name in after}
    # The reply of the first claim was lost, so nobody counted that one; the task was claimed again.
    assert (grown["claims_total"], grown["claims_lost_total"], grown["success"]) == (3, 1, 3)
    assert grown["handoff_latency_seconds_count"] == 2
    assert (after["runner_slots"], after["attempts_running"]) == (4, 0)


@pytest.mark.requirement("N17", "M5", "F5")
@pytest.mark.parametrize("fault", ["drop_reply", "error"])
@pytest.mark.parametrize("number", [2, 3, 4])
async def test_a_report_whose_reply_was_lost_is_one_event(
    reach: Reach, tmp_path: Path, there: AsyncConnection, fault: str, number: int
) -> None:
    run_id, said = await start_run(there, "chain"), Said()
    with armed(f"finish_and_claim:{fault}:{number}"):
        async with hosted(make_runner(reach, tmp_path, said)):
            assert await ended(there, run_id) == "success"
    assert {attempt for _, attempt in (await tries(there, run_id)).values()} == {1}


@pytest.mark.requirement("K11", "F4")
async def test_a_claim_whose_version_cannot_be_read_is_given_back(
    reach: Reach, tmp_path: Path, there: AsyncConnection
) -> None:
    run_id, said = await start_run(there, "chain"), Said()
    with armed("dags.version:error:1"):
        async with hosted(make_runner(reach, tmp_path, said)):
            assert await ended(there, run_id) == "success"
    assert (await tries(there, run_id))["one"] == (2, 1)


@pytest.mark.requirement("K1", "K11")
async def test_claims_that_wait_for_their_version_are_not_taken_for_lost(
    reach: Reach, database: str, tmp_path: Path, there: AsyncConnection
) -> None:
    runs, said = [await start_run(there, dag) for dag in ("chain", "branch")], Said()
    runner = make_runner(reach, tmp_path, said, heartbeat_seconds=0.05)
    async with await connect(database, purpose=Purpose.SCHEDULER) as blocker:
        await blocker.execute("set idle_in_transaction_session_timeout = 0")
        async with blocker.transaction():
            await blocker.execute("lock table dag_version in access exclusive mode")
            async with hosted(runner):
                await eventually(lambda: value(there, "select count(*) = 2 from lease"))
                beat = await value(there, "select heartbeat_seq from runner")
                await eventually(lambda: value(there, "select heartbeat_seq > %s from runner", int(str(beat)) + 3))
                await blocker.execute("commit")
                assert [await ended(there, run_id) for run_id in runs] == ["success", "success"]
    for run_id in runs:
        assert {epoch for epoch, attempt in (await tries(there, run_id)).values() if attempt} == {1}
    assert said.events("claim_reply_lost") == []


@pytest.mark.requirement("B9")
@pytest.mark.parametrize("fault", ["error", "drop_reply"])
async def test_a_runner_that_cannot_register_tries_again(
    reach: Reach, tmp_path: Path, there: AsyncConnection, fault: str
) -> None:
    said = Said()
    with armed(f"runners.register:{fault}:1"):
        async with hosted(make_runner(reach, tmp_path, said)):
            assert await said.saw("runner_started")
    assert await value(there, "select count(*) from runner where end_reason = 'stopped'") == 1


async def test_a_runner_that_never_reached_the_database_stops_when_it_is_told(tmp_path: Path) -> None:
    said = Said()
    async with hosted(make_runner(Reach(url="postgresql://127.0.0.1:1/nowhere"), tmp_path, said)):
        await said.saw("database_unreachable", loop="register")
    assert said.events("deregister_failed")


@pytest.mark.requirement("V11")
async def test_one_report_that_the_database_refuses_holds_up_no_other(
    reach: Reach, tmp_path: Path, there: AsyncConnection
) -> None:
    """V11. What it refuses here stands for whatever nobody thought of."""
    await there.execute(
        "create function refuse() returns trigger language plpgsql as $$ begin"
        " if new.value = '11' then raise exception 'not this one'; end if; return new; end $$"
    )
    await there.execute("create trigger refuse before insert on result for each row execute function refuse()")
    poison, good = await start_run(there, "chain"), await start_run(there, "branch")
    said = Said()
    async with hosted(make_runner(reach, tmp_path, said)):
        assert await ended(there, good) == "success"
        assert await ended(there, poison) == "failed"
        again = await start_run(there, "branch")
        assert await ended(there, again) == "success"
    reason = await value(there, "select reason from all_tasks where run_id = %s and task = 'two'", poison)
    assert "not this one" in str(reason)


@pytest.mark.requirement("K9")
async def test_a_lost_connection_costs_nothing_but_a_moment(
    reach: Reach, tmp_path: Path, there: AsyncConnection
) -> None:
    said = Said()
    async with hosted(make_runner(reach, tmp_path, said)):
        await said.saw("runner_started")
        first = await start_run(there, "chain")
        assert await ended(there, first) == "success"
        await cut_everybody_off(there)
        second = await start_run(there, "chain")
        assert await ended(there, second) == "success"
    assert set((await tries(there, second)).values()) == {(1, 1)}


async def cut_everybody_off(conn: AsyncConnection) -> None:
    await conn.execute(
        "select pg_terminate_backend(pid) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )


@pytest.mark.requirement("K1")
async def test_a_lost_lease_ends_its_attempt_while_an_exchange_waits(
    reach: Reach, database: str, tmp_path: Path, conn: AsyncConnection, long: Published, effects_file: Path
) -> None:
    """The answer of a heartbeat does not wait for a statement that waits for a lock."""
    await publish_work(conn, long, only=["holding"])
    said, sessions = Said(), list[LocalSession]()
    settings = reach.settings(tmp_path / "home")

    def begin(request: RunnerRequest | None) -> LocalSession:
        sessions.append(LocalSession(settings, url=reach.url, log=said.log, request=request))
        return sessions[-1]

    async with hosted(Runner(settings, url=reach.url, log=said.log, begin=begin)):
        await start_run(conn, "holding")
        await eventually(lambda: "hold" in {each.task for each in effects(effects_file)})
        async with await connect(database, purpose=Purpose.SCHEDULER) as blocker, blocker.transaction():
            await blocker.execute("set local idle_in_transaction_session_timeout = 0")
            await blocker.execute("lock table ready_task in access exclusive mode")
            await eventually(lambda: value(conn, WAITS_FOR_A_LOCK))
            assert sessions[0]._executor.held()
            await conn.execute("delete from lease")
            await eventually(lambda: not sessions[0]._executor.held())
            assert await value(conn, WAITS_FOR_A_LOCK), "the same exchange still waits"
    assert said.events("task_finished", outcome="killed")


WAITS_FOR_A_LOCK = (
    "select count(*) > 0 from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'"
)


async def test_a_runner_that_leaves_reports_each_attempt_as_it_ends(
    reach: Reach, tmp_path: Path, there: AsyncConnection, long: Published, effects_file: Path
) -> None:
    """Others can go on with what follows while the slowest attempt uses up its grace."""
    await publish_work(there, long, only=["holding"])
    said = Said()
    runner = make_runner(reach, tmp_path, said, stop_grace_seconds=30.0)
    async with hosted(runner):
        slow, quick_one = await start_run(there, "holding"), await start_run(there, "chain")
        await eventually(lambda: {"hold", "three"} <= {each.task for each in effects(effects_file)})
        runner.stop.set()
        runner.wake.set()
        assert await ended(there, quick_one) == "success"
        assert await run_state(there, slow) == "running"
        let_go(effects_file)
    assert await value(there, "select state from all_tasks where task = 'hold'") == "success"
    assert await value(there, "select end_reason from runner") == "stopped"


@pytest.mark.parametrize("why", ["idle", "until"])
async def test_a_runner_leaves_by_itself_with_its_last_task(
    why: str, reach: Reach, tmp_path: Path, there: AsyncConnection, long: Published, effects_file: Path
) -> None:
    """Not while a task runs, however long; and what comes then is left to others."""
    await publish_work(there, long, only=["holding"])
    said, seconds = Said(), {"idle": 0.5, "until": 3.0}[why]
    runner = make_runner(reach, tmp_path, said, **{f"runner_{why}_seconds": seconds})
    async with hosted(runner):
        run_id = await start_run(there, "holding")
        await eventually(lambda: any(each.task == "hold" for each in effects(effects_file)))
        if why == "until":
            await said.saw("leave_decided")
            late = await start_run(there, "chain")
        else:
            await elapse(2 * seconds)
        assert await run_state(there, run_id) == "running" and not runner.stop.is_set()
        let_go(effects_file)
        await said.saw("runner_exited")
        await eventually(runner.stop.is_set)
    assert await value(there, "select state from all_tasks where task = 'hold'") == "success"
    assert await value(there, "select array_agg(end_reason) from runner") == ["stopped"]
    if why == "until":
        assert await value(there, "select attempt from task where run_id = %s and idx = 0", late) == 0
