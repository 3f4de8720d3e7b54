"""Agents in processes of their own, an API that comes and goes, and every way in which they can lose each other (B10, K9)."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from evertick.api.agent.auth import LeasedConnection
from evertick.bundles.bundle import pack
from evertick.config import Settings, user_environment
from evertick.db.queries import logs, runners
from evertick.domain.access import Actor
from evertick.domain.agent_protocol import parse_refusal
from evertick.domain.attempt import RunnerRequest, TaskKey
from evertick.domain.encryption import new_key
from evertick.domain.stored_values import ValueKind
from evertick.engine.runners import mark_runner_dead
from evertick.engine.runs import cancel, trigger
from evertick.engine.secrets import put_value
from evertick.executors.agent_process import AgentProcesses
from evertick.publisher.deployment import load_files
from evertick.runner.database_access import DatabasePeers
from evertick.runner.peer_check import declare_dead_peers
from evertick.runner.remote.session import RemoteSession
from evertick.runner.runner import Runner
from evertick.secrets.agent_tokens import AgentTokens
from evertick.secrets.keyring import load_keyring
from tests.bundles.package_index import from_folder, make_wheel
from tests.chaos.proxy import Mode, Proxy
from tests.engine import invariants
from tests.engine.world import run_state, value
from tests.system.agents import FAR, Farm
from tests.system.hosting import Said, hosted
from tests.system.work import Published, loaded, publish_work
from tests.waiting import elapse, eventually

WITH_PACKAGE = """
# /// script
# dependencies = ["alpha"]
# ///
import alpha
from evertick import dag, task

@task
def version() -> str:
    return alpha.VERSION

@dag
def etl():
    version()
"""
CANARY = "canary-51c0ffee"


@pytest.fixture(scope="session")
def far(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return loaded(FAR, tmp_path_factory.mktemp("far"))


@pytest.fixture
async def farm(database: str, tmp_path: Path) -> AsyncIterator[Farm]:
    async with Farm(database, tmp_path, secret_keys=(new_key(),), result_spill_bytes=2048) as made:
        await invariants.install(made.conn)
        yield made
        assert await invariants.violations(made.conn) == []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):  # the second if it ends between open and read
        return False


async def test_an_agent_runs_its_attempt_and_tells_how_it_ended(farm: Farm, far: Published) -> None:
    row = await farm.dispatch(far, "quick")
    agent = await farm.start(row)
    assert await agent.ended() == 0, agent.said()
    assert (await farm.task(row)).state == "success" and await farm.result(row) == {"rows": 5}
    assert "".join(each.content for each in await logs.read(farm.conn, agent.key)).endswith("counting\n")
    outcome = agent.outcome()
    assert outcome is not None and (outcome["kind"], outcome["result"]) == ("success", '{"rows":5}')
    # A second agent with the same token comes too late, and runs nothing.
    late = await farm.start(row)
    assert await late.ended() == 5 and "agent_start_failed" in late.said() and "kind" not in (late.outcome() or {})


async def test_a_failure_is_told_with_its_exit_code(farm: Farm, far: Published) -> None:
    row = await farm.dispatch(far, "failing")
    agent = await farm.start(row)
    assert await agent.ended() == 1, agent.said()
    task = await farm.task(row)
    assert (task.state, task.exit_code) == ("failed", 7)


async def test_large_results_and_inputs_travel_as_files(farm: Farm, far: Published) -> None:
    make = await farm.start(await farm.dispatch(far, "large"))
    assert await make.ended() == 0, make.said()
    row = await farm.claim()
    take = await farm.start(row, EVERTICK_HOME=str(farm.folder / "another"))
    assert await take.ended() == 0, take.said()
    assert await farm.result(row) == 5000
    assert await value(farm.conn, "select value->>'$evertick' from result where idx = 0") == "file"


async def test_an_agent_builds_the_environment_of_its_attempt_or_gives_it_back(farm: Farm, tmp_path: Path) -> None:
    folder, wheels = tmp_path / "own", tmp_path / "wheels"
    folder.mkdir()
    make_wheel(wheels, "alpha", "2.0")
    (folder / "etl.py").write_text(WITH_PACKAGE)
    (found,) = await load_files(folder, ["etl.py"], Settings(home=tmp_path / "publisher"), from_folder(wheels))
    assert found.error is None
    specs = tuple(each.spec for each in found.dags)
    own = Published("etl.py", specs, pack(folder, "etl.py", found.closure, found.lock))
    row = await farm.dispatch(own, "etl")
    agent = await farm.start(row, **from_folder(wheels))
    assert await agent.ended() == 0, agent.said()
    assert await farm.result(row) == "2.0"
    row = await farm.dispatch(own, "etl")
    elsewhere = {"EVERTICK_HOME": str(tmp_path / "elsewhere")}
    agent = await farm.start(row, **from_folder(tmp_path / "nothing"), **elsewhere)
    assert await agent.ended() == 3, agent.said()
    task = await farm.task(row)
    assert task.state == "pending"
    assert str(task.reason).startswith("environment_failed: ")


async def test_an_agent_without_room_for_its_inputs_says_so_and_the_task_runs_again(farm: Farm, far: Published) -> None:
    row = await farm.dispatch(far, "large")
    assert await (await farm.start(row)).ended() == 0
    row = await farm.claim()
    agent = await farm.start(row, EVERTICK_RESULTS_FOLDER="/proc/nowhere")
    assert await agent.ended() == 1, agent.said()
    reason = await value(farm.conn, "select reason from attempt where idx = 1")
    assert str(reason).startswith("its large inputs could not be stored on the agent's machine: ")
    assert (await farm.task(row)).state == "available"


async def test_the_api_clears_large_results_away_whose_runs_are_gone(database: str, tmp_path: Path) -> None:
    left = tmp_path / "api" / "results" / "4711"
    left.mkdir(parents=True)
    async with Farm(database, tmp_path):
        await eventually(lambda: not left.exists())


async def test_a_secret_is_seen_by_nobody_else_and_tokens_by_no_user_code(farm: Farm, far: Published) -> None:
    keyring = load_keyring(farm.settings)
    await put_value(farm.conn, keyring, kind=ValueKind.SECRET, name="db", value=CANARY, actor=Actor("test"))
    row = await farm.dispatch(far, "secret")
    key = TaskKey(row.run_id, row.idx, row.map_index)
    token = farm.tokens.make_start_token(key=key, epoch=row.epoch, session=row.session)
    agent = await farm.start(row, EVERTICK_AGENT_TOKEN=token)
    seen = [Path(f"/proc/{agent.process.pid}/cmdline").read_bytes()]
    assert await agent.ended() == 0, agent.said()
    log = "".join(each.content for each in await logs.read(farm.conn, agent.key))
    assert await farm.result(row) == ["EVERTICK_WARM_PARENT"], "of ours user code sees the mark of its process alone"
    assert "using ***" in log and "environment ['EVERTICK_WARM_PARENT']" in log
    for text in (log, agent.said(), seen[0].decode(), agent.outcome_file.read_text()):
        assert CANARY not in text and "eva_" not in text and token not in text
    for place in farm.folder.rglob("*"):
        if place.is_file() and "token-" not in place.name:
            assert CANARY.encode() not in place.read_bytes(), place


async def test_a_cancel_kills_the_body_and_is_confirmed(farm: Farm, far: Published) -> None:
    row = await farm.dispatch(far, "lasting")
    agent = await farm.start(row)
    body = await farm.begun(agent)
    await cancel(farm.conn, run_id=row.run_id, actor=Actor("test"))
    assert await agent.ended() == 3, agent.said()
    assert not is_alive(body) and (await farm.task(row)).state == "canceled"


async def test_a_pod_that_is_deleted_gives_its_attempt_back(farm: Farm, far: Published) -> None:
    row = await farm.dispatch(far, "lasting")
    agent = await farm.start(row)
    body = await farm.begun(agent)
    agent.signal(signal.SIGTERM)
    assert await agent.ended() == 3, agent.said()
    outcome = agent.outcome()
    assert not is_alive(body) and outcome is not None and outcome["kind"] == "given_back"
    assert str(outcome["reason"]).startswith("its pod was deleted or evicted")
    assert (await farm.task(row)).state == "available"


async def test_an_outage_of_the_api_kills_nothing_and_loses_no_line(farm: Farm, far: Published) -> None:
    row = await farm.dispatch(far, "talking")
    agent = await farm.start(row)
    body = await farm.begun(agent)
    await farm.close_api()
    # Longer than several heartbeats and than it takes the body to end meanwhile.
    farm.go()
    await eventually(agent.outcome, 30)
    await elapse(1.5)
    assert agent.process.returncode is None, "it holds an outcome that nobody has heard"
    await farm.open_api()
    assert await agent.ended() == 0, agent.said()
    assert not is_alive(body) and (await farm.task(row)).state == "success"
    text = "".join(each.content for each in await logs.read(farm.conn, agent.key))
    said = [line.split("line ")[1] for line in text.splitlines() if "line " in line]
    assert said == [str(number) for number in range(400)], "no gap, no double, in order"
    assert "heartbeat_recovered" in agent.said() or "api_recovered" in agent.said()


@pytest.mark.parametrize("is_set_for_the_agent", [True, False])
async def test_an_outcome_is_left_behind_when_the_api_does_not_come_back(
    database: str, tmp_path: Path, far: Published, is_set_for_the_agent: bool
) -> None:
    """In any case before the API would declare the agent lost: half of that time is its patience."""
    async with Farm(database, tmp_path, agent_lost_after_seconds=60.0 if is_set_for_the_agent else 2.0) as farm:
        await _leave_outcome(farm, far, {"EVERTICK_AGENT_REPORT_SECONDS": "0.5"} if is_set_for_the_agent else {})


async def _leave_outcome(farm: Farm, far: Published, environment: dict[str, str]) -> None:
    row = await farm.dispatch(far, "lasting")
    agent = await farm.start(row, **environment)
    await farm.begun(agent)

    async def renewed() -> object:
        return await value(farm.conn, "select heartbeat_seq from agent_api")

    first = await renewed()
    await eventually(lambda: _differs(renewed, first), 30)
    await farm.close_api()
    last = await renewed()
    farm.go()
    assert await agent.ended(20) == 4, agent.said()
    assert await renewed() == last, "no API could hear it"
    outcome = agent.outcome()
    assert outcome is not None and (outcome["kind"], outcome["result"]) == ("success", '"went"')
    assert (await farm.task(row)).state == "running", "whoever finds the outcome tells it"


async def _differs(read: Callable[[], Awaitable[object]], first: object) -> bool:
    return await read() != first


async def test_an_agent_whose_token_was_signed_with_another_key_leaves_what_to_look_at(
    farm: Farm, far: Published, tmp_path: Path
) -> None:
    row = await farm.dispatch(far, "quick")
    farm.tokens = AgentTokens(Settings(home=tmp_path / "another"))
    agent = await farm.start(row)
    assert await agent.ended() == 5, agent.said()
    assert "EVERTICK_AGENT_KEY" in (parse_refusal(agent.outcome_file.read_bytes()) or "")


async def test_an_attempt_that_was_taken_away_is_killed_and_tells_nothing(farm: Farm, far: Published) -> None:
    row = await farm.dispatch(far, "lasting")
    agent = await farm.start(row)
    body = await farm.begun(agent)
    await mark_runner_dead(farm.conn, session=row.session, reason="agent_lost: test", infra_retries=3)
    assert await agent.ended() == 5, agent.said()
    assert not is_alive(body) and agent.outcome() is None
    assert (await farm.task(row)).state == "available"


async def test_a_killed_agent_leaves_no_process_and_is_declared_dead_by_its_observer(
    farm: Farm, far: Published
) -> None:
    row = await farm.dispatch(far, "lasting")
    agent = await farm.start(row)
    body = await farm.begun(agent)
    os.kill(agent.process.pid, signal.SIGKILL)
    assert await agent.ended() == -signal.SIGKILL
    # Whoever looks after it would report what it left behind; here nobody does any more.
    await runners.leave(farm.conn, farm.runner.session)
    await declare_dead_peers(DatabasePeers(LeasedConnection(farm.conn), settings=Settings()))
    assert not is_alive(body) and (await farm.task(row)).state == "available"


async def test_a_frozen_agents_body_is_stopped_before_another_can_begin(
    database: str, tmp_path: Path, far: Published
) -> None:
    """For tasks that must not run twice: their warm parent counts, and freezing the agent does not help."""
    async with Farm(database, tmp_path, agent_lost_after_seconds=3.0, agent_report_seconds=1.0) as farm:
        row = await farm.dispatch(far, "strict")
        agent = await farm.start(row)
        body = await farm.begun(agent)
        agent.signal(signal.SIGSTOP)
        await eventually(lambda: not is_alive(body), 30)
        await mark_runner_dead(farm.conn, session=row.session, reason="agent_lost: silent", infra_retries=3)
        agent.signal(signal.SIGCONT)
        assert await agent.ended() == 5, agent.said()
        assert (await farm.task(row)).state == "available"


@pytest.mark.parametrize("phase", ["start", "run"])
async def test_lost_answers_change_nothing(farm: Farm, far: Published, phase: str) -> None:
    """What was asked arrives, its answer does not: asked again it is answered alike, and everything happens once."""
    row = await farm.dispatch(far, "lasting")
    with Proxy.start(farm.address.removeprefix("http://")) as proxy:
        port = proxy.listen("agent", speaks="bytes")
        if phase == "start":
            proxy.set("agent", Mode.one_way("up"))
        agent = await farm.start(row, server=f"http://127.0.0.1:{port}")
        if phase == "start":

            async def is_running() -> bool:
                return bool((await farm.task(row)).state == "running")

            await eventually(is_running, 60)
            assert not list(farm.flags.glob("began-*")), "nothing runs before the start is acknowledged"
            proxy.reset("agent")
            proxy.heal()
        await farm.begun(agent)
        proxy.set("agent", Mode.one_way("up"))
        farm.go()

        async def is_over() -> bool:
            return bool((await farm.task(row)).state == "success")

        await eventually(is_over, 60)
        proxy.reset("agent")
        proxy.heal()
        assert await agent.ended() == 0, agent.said()
    assert await farm.result(row) == "went"
    assert (await farm.task(row)).attempt == 1


async def test_a_token_that_expired_while_nobody_answered_is_renewed(
    database: str, tmp_path: Path, far: Published, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.secrets.agent_tokens.CLOCK_LEEWAY_SECONDS", 0)
    async with Farm(database, tmp_path, attempt_token_seconds=1.0) as farm:
        row = await farm.dispatch(far, "lasting")
        agent = await farm.start(row)
        await farm.begun(agent)
        await farm.close_api()
        # A token expires at a whole second, so up to half a second later.
        await elapse(1.7)
        await farm.open_api()
        farm.go()
        assert await agent.ended() == 0, agent.said()
        assert (await farm.task(row)).state == "success"


async def test_a_runner_hands_tasks_to_agents_on_its_machine_and_they_outlive_it(farm: Farm, far: Published) -> None:
    """The whole way: claimed, queued, started by an agent of the executor `process`, and ended; its runner is replaced."""
    await publish_work(farm.conn, far, only=["lasting"])
    await farm.conn.execute("update runner set ended_at = clock()")
    settings = replace(farm.settings, executor="process", agent_api_url=farm.address, tick_seconds=0.1)
    settings = replace(settings, home=farm.folder / "runner", agent_key_file=farm.settings.agent_key_place)
    environment = {**user_environment(), "FLAGS": str(farm.flags)}

    def dispatcher() -> Runner:
        def begin(request: RunnerRequest | None) -> RemoteSession:
            executor = AgentProcesses(settings.home / "agents", environment=environment)
            tokens = AgentTokens(settings)
            return RemoteSession(
                settings, url=farm.url, log=Said().log, executor=executor, tokens=tokens, request=request
            )

        return Runner(settings, url=farm.url, log=Said().log, begin=begin)

    made = await trigger(farm.conn, dag="lasting", params={}, actor=Actor("test"))
    async with hosted(dispatcher()):
        (began,) = await eventually(lambda: list(farm.flags.glob("began-*")), 60)
    assert await value(farm.conn, "select state::text from task") == "running"
    assert is_alive(int(began.name.removeprefix("began-"))), "it goes on without its runner"
    async with hosted(dispatcher()):
        farm.go()

        async def is_over() -> bool:
            return await value(farm.conn, "select count(*) from dispatch") == 0

        await eventually(is_over, 30)
    assert await run_state(farm.conn, made.run_id) == "success"
    assert await value(farm.conn, "select epoch from task") == 1
    agents = settings.home / "agents"
    assert list((agents / "attempts").iterdir()) == list((agents / "home" / "spool").iterdir()) == []
    assert sorted(path.name for path in (agents / "home").iterdir()) == ["bundles", "spool"]
