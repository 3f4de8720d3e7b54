"""`figures`, `forecast`, `checkins` and `tasks reproduce` on a real database, as an operator types them."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.attempts.protocol import start_frame
from evertick.domain.access import Actor
from evertick.domain.attempt import AttemptOrder, Isolation, TaskKey
from evertick.engine.monitoring.figures import count_figures
from evertick.engine.runs import trigger
from tests.cli.conftest import Cli
from tests.engine.world import Runner, lead, make_dag, put, start
from tests.system.work import Published, loaded, publish_work

SOURCE = """
import os
from evertick import *

@task
def rows():
    return [1, 2, 3]

@task(retries=1)
def total(found, context):
    print("sum of", found, "for", context.params["day"], "attempt", context.attempt)
    if sum(found) > 5:
        raise ValueError(f"too many: {sum(found)}")

@task(secrets=["key"])
def secret(context):
    return len(context.secrets["key"])

@dag(params={"day": "monday"})
def broken():
    total(rows())
    shell("echo in $EVERTICK_DAG of $EVERTICK_RUN_ID; exit 3", name="command")
    secret()
"""


@pytest.fixture(scope="session")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return loaded(SOURCE, tmp_path_factory.mktemp("reproduced"))


async def test_figures_and_a_forecast_of_what_has_run(cli: Cli, conn: AsyncConnection) -> None:
    assert "No run has ended yet" in (await cli("figures")).out
    await put(conn, make_dag("etl", {"a": [], "b": ["a"]}))
    epoch, runner = await lead(conn), await Runner.join(conn, slots=1)
    await count_figures(conn, shard=0, epoch=epoch, limit=10, settle_seconds=0)
    await start(conn, "etl")
    await runner.drain()
    await count_figures(conn, shard=0, epoch=epoch, limit=10, settle_seconds=0)
    assert [(each["dag"], each["succeeded"]) for each in (await cli.json("figures"))["figures"]] == [("etl", 1)]
    assert [each["task"] for each in (await cli.json("figures", "etl"))["figures"]] == ["", "a", "b"]
    run = await start(conn, "etl")
    found = await cli.json("forecast")
    assert [(each["run_id"], each["end_at"] is not None) for each in found["runs"]] == [(run, True)]
    assert found["load"][0]["slots"] == 1
    assert (await cli.json("forecast", "--if", "slots:default=+3"))["load"][0]["slots"] == 4
    assert {each["task"] for each in (await cli.json("forecast", run))["tasks"]} == {"a", "b"}
    assert "80 % BETWEEN" in (await cli("forecast")).out and "STARTS" in (await cli("forecast", run)).out
    for wrong, why in (("pools=3", "is not a change"), ("pool:x=3", "uses the pool"), ("slots:default=x", "number")):
        assert why in (await cli("forecast", "--if", wrong)).err
    assert "has no active schedule" in (await cli("forecast", "--if", "schedule:etl/main=@hourly")).err


async def test_check_ins_from_their_creation_to_their_end(cli: Cli, conn: AsyncConnection) -> None:
    assert "Created check-in backup" in (await cli("checkins", "set", "backup", "0 3 * * *", "--grace", "30m")).out
    assert "Changed check-in backup" in (await cli("checkins", "set", "backup", "@hourly")).out
    assert "Recorded a report" in (await cli("checkins", "report", "backup", "--message", "12 GB", "--failed")).out
    (only,) = (await cli.json("checkins", "list"))["checkins"]
    assert (only["name"], only["message"], only["has_failed"], only["count"]) == ("backup", "12 GB", True, 1)
    assert "12 GB" in (await cli("checkins", "list")).out
    assert "no checkin 'other'" in (await cli("checkins", "report", "other")).err
    assert "cannot name a check-in" in (await cli("checkins", "set", "a b", "@hourly")).err
    assert (await cli("checkins", "delete", "backup", "--yes")).status == 0
    assert (await cli("checkins", "delete", "backup", "--yes")).status == 2


async def test_a_failed_attempt_is_reproduced_with_its_code_inputs_and_parameters(
    cli: Cli, conn: AsyncConnection, broken: Published, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERTICK_HOME", str(tmp_path / "home"))
    await publish_work(conn, broken)
    run = (await trigger(conn, dag="broken", params={}, actor=Actor("test"))).run_id
    runner = await Runner.join(conn)
    for _ in range(3):
        for claim in await runner.claim():
            result = {"result": [1, 2, 3]} if claim.idx == 0 else {}
            await runner.finish(claim, "success" if claim.idx == 0 else "failed", no_retry=True, **result)

    async def reproduced(*arguments: object, typed: str = "") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "evertick.cli.main", "tasks", "reproduce", *map(str, arguments)]
        return await asyncio.to_thread(
            subprocess.run, command, input=typed, capture_output=True, text=True, env=dict(os.environ), check=False
        )

    failed = await reproduced(run, "total")
    assert failed.returncode == 1
    assert "sum of [1, 2, 3] for monday attempt 1" in failed.stdout
    assert "ValueError: too many: 6" in failed.stderr and "work.py" in failed.stderr
    debugged = await reproduced(run, "total", "--debug", typed="next\np found\nquit\n")
    assert "[1, 2, 3]" in debugged.stdout and "(Pdb)" in debugged.stdout
    command = await reproduced(run, "command")
    assert (command.returncode, f"in broken of {run}" in command.stdout) == (3, True)
    assert "run the command in a terminal" in (await reproduced(run, "secret")).stderr
    shell = await reproduced(run, "total", "--shell", typed="echo $EVERTICK_INPUTS\n")
    assert '{"rows": [1, 2, 3]}' in shell.stdout
    assert (await reproduced(run, "total", "--attempt", 9)).returncode == 2


def test_a_typed_secret_reaches_only_the_process_of_the_task(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(SOURCE)
    order = AttemptOrder(
        key=TaskKey(1, 3, -1),
        epoch=1,
        session=0,
        attempt=1,
        dag="broken",
        task="secret",
        version_id=1,
        bundle="",
        file="work.py",
        fire_at="2030-01-01T00:00:00+00:00",
        params_json="{}",
        inputs_json="{}",
        timeout_seconds=None,
        isolation=Isolation.PROCESS,
    )
    given = json.dumps({"variable": {}, "connection": {}, "secret": {"key": "hunter22"}})
    reader, writer = os.pipe()
    arguments = [str(tmp_path), "work.py", str(reader), str(tmp_path), "run"]
    with subprocess.Popen(
        [sys.executable, "-m", "evertick.attempts.reproduce", *arguments],
        pass_fds=[reader],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        os.close(reader)
        with os.fdopen(writer, "wb") as orders:
            orders.write(start_frame(1, replace(order, granted_json=given)))
        _, told = process.communicate()
    assert (process.returncode, "result: 8" in told, "hunter22" in told) == (0, True, False)
