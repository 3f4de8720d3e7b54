"""A runner over HTTPS when the way to the API, the API itself or its tokens fail; and as a process without a database."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.api.app import make_app
from evertick.api.server import serve
from evertick.domain.access import Actor
from evertick.domain.attempt import Outcome, OutcomeKind, TaskKey
from evertick.domain.retry import RetryPolicy
from evertick.engine import runner_tokens
from evertick.engine.finish_and_claim import encode_report
from evertick.engine.runners import mark_runner_dead
from evertick.processes.tree import find_orphans, kill_tree
from evertick.runner.access import Report
from evertick.runner.http_access import HttpAccess
from evertick.runner.registration import draw_runner
from evertick.runtime.listen_socket import bound
from evertick.storage.results import result_files
from tests.engine import invariants
from tests.engine.world import run_state, value
from tests.ports import own_port
from tests.runner.reach import Reach, reaching
from tests.runner.relay import Relay, relay
from tests.runner.test_session import ended, tries
from tests.system.hosting import Said, hosted
from tests.system.work import LONG, SMALL, Published, effects, executed_twice, let_go, loaded, publish_work, start_run
from tests.waiting import eventually


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> tuple[Published, Published]:
    folder = tmp_path_factory.mktemp("dags")
    return loaded(SMALL, folder / "small"), loaded(LONG, folder / "long")


@pytest.fixture
async def there(
    database: str,
    conn: AsyncConnection,
    tmp_path: Path,
    work: tuple[Published, Published],
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[tuple[Reach, Path]]:
    """An API on a database with work, and the file with the effects of tasks."""
    file = tmp_path / "effects"
    file.touch()
    monkeypatch.setenv("EFFECTS", str(file))
    monkeypatch.setenv("RUNNER_NAME", "r0")
    await publish_work(conn, work[0], only=["chain", "branch"])
    await publish_work(conn, work[1], only=["holding"])
    await invariants.install(conn)
    async with reaching("https", database, conn, tmp_path) as reach:
        yield reach, file
    assert await invariants.violations(conn) == []
    assert executed_twice(effects(file)) == []


async def began(file: Path, count: int = 1) -> None:
    await eventually(lambda: sum(each.task == "hold" for each in effects(file)) >= count, 60)


def through(reach: Reach, way: Relay) -> Reach:
    return replace(reach, url=way.url)


@pytest.mark.requirement("K1", "K2", "N17")
async def test_lost_answers_lose_nothing_and_run_nothing_twice(
    there: tuple[Reach, Path], conn: AsyncConnection, tmp_path: Path
) -> None:
    reach, _ = there
    assert reach.api is not None
    said = Said()
    async with relay(reach.api.port) as way, hosted(through(reach, way).runner(tmp_path / "home", said)):
        await said.saw("runner_started")
        for number, match in enumerate(
            (b"/exchange", b"/exchange", b"/exchange", b"/heartbeat", b"/logs", b"/versions")
        ):
            way.loses[match] = number % 3 + 1
            runs = [await start_run(conn, "chain"), await start_run(conn, "branch")]
            assert [await ended(conn, run_id) for run_id in runs] == ["success", "success"], match
            for run_id in runs:
                assert {attempt for _, attempt in (await tries(conn, run_id)).values()} <= {0, 1}
        assert said.events("claim_reply_lost")
    assert await value(conn, "select count(*) from runner where end_reason = 'stopped'") == 1


@pytest.mark.requirement("N28")
async def test_an_api_that_restarts_with_another_key_interrupts_no_task(
    there: tuple[Reach, Path], conn: AsyncConnection, tmp_path: Path
) -> None:
    """The session's token is worth nothing any more, as one that has expired: the runner joins again, as the same session."""
    reach, file = there
    api, said = reach.api, Said()
    assert api is not None
    async with hosted(reach.runner(tmp_path / "home", said)):
        held = await start_run(conn, "holding")
        await began(file)
        await api.close()
        await said.saw("database_unreachable", loop="heartbeat")
        # It ends while nobody can hear of it.
        let_go(file)
        await eventually(lambda: any(each.what == "end" for each in effects(file)))
        api.settings = replace(api.settings, agent_key=("j" * 43,))
        await api.open()
        assert await ended(conn, held) == "success"
        after = await start_run(conn, "chain")
        assert await ended(conn, after) == "success"
    assert await value(conn, "select count(*) from runner") == 1
    assert set((await tries(conn, held)).values()) == {(1, 1)}


@pytest.mark.requirement("K8")
async def test_a_runner_far_away_claims_in_advance_and_never_runs_more_than_its_slots(
    there: tuple[Reach, Path], conn: AsyncConnection, tmp_path: Path
) -> None:
    reach, file = there
    assert reach.api is not None
    said = Said()
    async with (
        relay(reach.api.port) as way,
        hosted(through(reach, way).runner(tmp_path / "home", said, runner_slots=2)),
    ):
        way.delay_seconds = 0.1
        runs = [await start_run(conn, "chain") for _ in range(12)]
        assert {await ended(conn, run_id) for run_id in runs} == {"success"}
    assert said.events("loop_failed") == []
    spans = sorted(
        (each.nanoseconds, 1 if each.what == "begin" else -1) for each in effects(file) if each.what in ("begin", "end")
    )
    running = [sum(step for _, step in spans[: n + 1]) for n in range(len(spans))]
    assert max(running) <= 2
    held = "select max(n) from (select count(*) as n from attempt group by run_id, idx) t"
    assert await value(conn, held) in (None, 1), "what was not needed was returned at most once"


@pytest.mark.requirement("V3", "K1")
async def test_a_runner_that_was_cut_off_and_declared_dead_stops_its_tasks_and_begins_again(
    there: tuple[Reach, Path], conn: AsyncConnection, tmp_path: Path
) -> None:
    reach, file = there
    assert reach.api is not None
    said = Said()
    async with relay(reach.api.port) as way, hosted(through(reach, way).runner(tmp_path / "home", said)):
        held = await start_run(conn, "holding")
        await began(file)
        way.cut()
        await said.saw("database_unreachable", loop="heartbeat")
        session = int(str(await value(conn, "select session from runner")))
        await mark_runner_dead(conn, session=session, reason="agent_lost: silent", infra_retries=3)
        way.is_cut = False
        await said.saw("session_declared_dead")
        # The next session takes the task again, and the first body is gone by then.
        await began(file, 2)
        let_go(file)
        assert await ended(conn, held) == "success"
    assert await value(conn, "select count(*) from runner where end_reason = 'stopped'") == 1


@pytest.mark.requirement("A11")
async def test_a_runner_whose_token_is_revoked_ends_after_its_last_task_and_cannot_join_again(
    there: tuple[Reach, Path], conn: AsyncConnection, tmp_path: Path
) -> None:
    reach, file = there
    said = Said()
    runner = reach.runner(tmp_path / "home", said)
    async with hosted(runner):
        held = await start_run(conn, "holding")
        await began(file)
        await runner_tokens.revoke(conn, 1, actor=Actor("test"))
        await said.saw("drain_requested")
        waiting = await start_run(conn, "chain")
        let_go(file)
        await said.saw("runner_exited")
        held_state = "select state = 'success' from all_tasks where run_id = %s and task = 'hold'"
        assert await value(conn, held_state, held)
    assert await run_state(conn, waiting) == "running", "nothing new was claimed"
    again = Said()
    async with hosted(reach.runner(tmp_path / "home", again)):
        refusal = await again.saw("join_refused")
    assert "was revoked: make a new one" in refusal["message"]


@pytest.mark.long
async def test_two_api_processes_behind_one_address_serve_one_session(
    there: tuple[Reach, Path], database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    reach, _ = there
    assert reach.api is not None
    port, stop, said = own_port(), asyncio.Event(), Said()
    second = asyncio.create_task(
        serve(make_app, reach.api.settings, database, Said().log, bound("127.0.0.1", port), stop)
    )
    async with relay(reach.api.port, port) as way, hosted(through(reach, way).runner(tmp_path / "home", said)):
        for _ in range(5):
            runs = [await start_run(conn, "chain"), await start_run(conn, "branch")]
            assert [await ended(conn, run_id) for run_id in runs] == ["success", "success"]
        assert way.connections > 2
    stop.set()
    await second
    assert said.events("claim_reply_lost") == []


async def test_an_upload_that_broke_off_continues_where_it_ended(
    there: tuple[Reach, Path], conn: AsyncConnection, tmp_path: Path
) -> None:
    reach, _ = there
    assert reach.api is not None
    settings, said = reach.settings(tmp_path / "home"), Said()
    me = draw_runner(settings)
    access = HttpAccess(settings, server=reach.url, me=me, log=said.log)
    await access.register(me)
    run_id = await start_run(conn, "chain")
    answer, _ = await access.exchange([], 1, lambda _: True)
    (claim,) = answer.claims
    content = json.dumps("x" * 400_000)
    named = result_files(settings).put(run_id, content)
    sha256 = json.loads(named)["sha256"]
    path = f"/api/runner/v1/attempts/{run_id}/{claim.idx}/{claim.map_index}/{claim.epoch}/results/{sha256}"
    _, writer = await asyncio.open_connection("127.0.0.1", reach.api.port)
    head = f"PUT {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {access._api._token}\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content.encode()[:150_000])
    await writer.drain()
    part = reach.api.settings.result_place / str(run_id) / f".{sha256}.part"
    await eventually(lambda: part.exists() and part.stat().st_size == 150_000)
    writer.transport.abort()
    key = TaskKey(run_id, claim.idx, claim.map_index)
    outcome = Outcome(key=key, epoch=claim.epoch, kind=OutcomeKind.SUCCESS, result_json=named)
    assert await access.transfers.upload(outcome) == outcome
    assert part.with_name(sha256).read_text() == content and not part.exists()
    assert await access.transfers.upload(outcome) == outcome, "a second time there is nothing to do"
    await access.close()
    report = Report(outcome=outcome, text=encode_report(outcome, policy=RetryPolicy(), attempt=1))
    assert (await access.exchange([report], 0, lambda _: False))[0].refused == []
    await access.close()


@asynccontextmanager
async def process(reach: Reach, folder: Path, name: str, **more: str) -> AsyncIterator[Process]:
    """`evertick runner --server`, in an environment that names no database."""
    (folder / "token").write_text(f"{reach.secret}\n")
    kept = {key: text for key, text in os.environ.items() if not key.startswith("EVERTICK_")}
    ours = {"EVERTICK_HOME": str(folder / name), "EVERTICK_LOG": "json", "EVERTICK_HEARTBEAT_SECONDS": "0.2"}
    options = ["--server", reach.url, "--token-file", str(folder / "token"), "--slots", "4", "--id", name]
    made = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "evertick.cli.main", "runner", *options),
        env={**kept, **ours, "RUNNER_NAME": name, "EVERTICK_HEALTH_PORT": "0", **more},
        stdout=PIPE,
        stderr=PIPE,
    )
    reading = asyncio.create_task(made.communicate())
    try:
        yield made
    finally:
        if made.returncode is None:
            kill_tree(made.pid)
        await reading


@pytest.mark.long
@pytest.mark.requirement("K1", "N07")
async def test_a_killed_process_is_proven_dead_by_the_next_one_on_its_machine(
    there: tuple[Reach, Path], conn: AsyncConnection, tmp_path: Path
) -> None:
    reach, file = there
    async with process(reach, tmp_path, "one") as one:
        held = await start_run(conn, "holding")
        await began(file)
        session = int(str(await value(conn, "select session from runner")))
        one.send_signal(signal.SIGKILL)
        await one.wait()
        async with process(reach, tmp_path, "two"):
            await began(file, 2)
            assert not find_orphans(session)
            let_go(file)
            assert await ended(conn, held) == "success"
    ends: Any = await value(conn, "select end_reason from runner where runner_id = 'one'")
    assert ends == "agent_lost: runner one died" or "died" in str(ends)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--server", "ftp://x"], "is not a server address"),
        (["--server", "https://x", "--token-file", "/nowhere"], "the token file /nowhere cannot be read"),
        (["--server", "https://x"], "needs a join token"),
        (["--server", "https://x", "--token-file", "TOKEN", "--ca-file", "/nowhere"], "certificate authorities"),
        (["--server", "https://x", "--token-file", "TOKEN", "--executor", "process"], "leave out --executor"),
    ],
)
def test_a_wrong_option_is_refused_with_the_next_step(
    options: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from evertick.cli.commands.services import runner_app
    from evertick.domain.errors import InvalidSettings

    (tmp_path / "token").write_text("evr_x")
    monkeypatch.setenv("EVERTICK_HOME", str(tmp_path))
    made = CliRunner().invoke(runner_app, [text.replace("TOKEN", str(tmp_path / "token")) for text in options])
    assert isinstance(made.exception, InvalidSettings) and told in str(made.exception)
