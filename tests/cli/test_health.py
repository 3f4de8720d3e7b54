"""`evertick health`: one look at everything, one exit status."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.observability.health import LoopHealth, ServiceHealth, ServicePhase, track
from evertick.observability.health_endpoint import HealthEndpoint
from tests.cli.conftest import Cli
from tests.engine.world import Runner, lead
from tests.system.hosting import Said


def opened(home: Path, service: str = "runner") -> HealthEndpoint:
    health = ServiceHealth(service, owner="host-1")
    health.phase = ServicePhase.RUNNING
    port = HealthEndpoint(service, health.routes(), settings=Settings(home=home, health_port=0), log=Said().log)
    port.start()
    port.leave_note()
    return port


async def test_a_leader_and_a_runner_are_well(cli: Cli, conn: AsyncConnection) -> None:
    await lead(conn)
    await Runner.join(conn)
    document = await cli.json("health")
    assert document["status"] == document["metadatabase"]["status"] == document["scheduler"]["status"] == "healthy"
    assert document["scheduler"]["leader"] == "test"
    (runner,) = document["runners"]
    assert (runner["status"], runner["host"], runner["running"], runner["slots"]) == ("healthy", "h", 0, 100)
    assert document["processes"] == []
    ran = await cli("health")
    assert ran.status == 0
    assert ran.out.splitlines()[0].split() == ["COMPONENT", "STATUS", "WHERE", "DETAIL"]
    assert [line.split()[:2] for line in ran.out.splitlines()[1:]] == [
        ["database", "healthy"],
        ["leader", "healthy"],
        ["runner", "healthy"],
    ]


async def test_without_a_leader_or_a_runner_it_says_what_to_start(cli: Cli) -> None:
    ran = await cli("health")
    assert ran.status == 1
    assert "Start one with: evertick scheduler" in ran.out
    assert "Start one with: evertick runner" in ran.out


async def test_a_silent_runner_is_not_well(cli: Cli, conn: AsyncConnection) -> None:
    await lead(conn)
    await Runner.join(conn)
    await conn.execute("update runner set silent_seconds = 40")
    ran = await cli("health")
    assert ran.status == 1
    assert "silent for 40 s" in ran.out


async def test_a_database_that_is_away_is_unhealthy_with_its_reason(
    cli_without_database: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERTICK_DATABASE_URL", "postgresql://anna:s3cret@127.0.0.1:1/shop")
    ran = await cli_without_database("health", "--json")
    assert ran.status == 1
    assert "127.0.0.1:1" in ran.json["metadatabase"]["reasons"][0]
    assert "s3cret" not in ran.out


async def test_a_database_without_schema_is_unhealthy(
    cli_without_database: Cli, empty_database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EVERTICK_DATABASE_URL", empty_database)
    ran = await cli_without_database("health")
    assert ran.status == 1
    assert "Run `evertick db migrate`" in ran.out


async def test_where_nothing_runs_it_says_so(cli_without_database: Cli) -> None:
    assert "Evertick is not running in .evertick" in await cli_without_database.refused("health", status=4)


async def test_the_processes_of_this_home_are_asked(cli: Cli, conn: AsyncConnection, nowhere: Path) -> None:
    await lead(conn)
    await Runner.join(conn)
    port = opened(nowhere / ".evertick")
    try:
        ran = await cli("health")
        assert (ran.status, "starting" in ran.out) == (1, True)
        with track(LoopHealth("runner")) as runner, track(LoopHealth("heartbeat")) as heartbeat:
            runner.succeed(1.0)
            heartbeat.succeed(1.0)
            document: Any = await cli.json("health")
        assert [each["url"] for each in document["processes"]] == [port.url]
        # The same, by its address alone.
        ran = await cli("health", "--url", port.url, "--json")
        assert (ran.status, ran.json.keys()) == (1, {"status", "processes"})
    finally:
        port.stop()


async def test_a_process_that_does_not_answer_is_not_well(cli_without_database: Cli) -> None:
    # Held and not listened at: a port that was given back could be somebody else's by now.
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        ran = await cli_without_database("health", "--url", f"http://127.0.0.1:{closed.getsockname()[1]}")
    assert ran.status == 1
    assert "does not answer" in ran.out


@pytest.mark.parametrize("url", ["https://127.0.0.1:1", "localhost:8790", "nonsense"])
async def test_an_address_that_cannot_be_one_is_refused(cli_without_database: Cli, url: str) -> None:
    assert "must look like http://127.0.0.1:8790" in await cli_without_database.refused("health", "--url", url)
