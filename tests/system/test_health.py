"""Health ports of real processes: they tell the truth when the database goes, hangs and comes back."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from tests.cli.conftest import run_program
from tests.system.mortal_postgres import MortalPostgres, mortal_postgres
from tests.system.served import SERVICES, Served, environment, served
from tests.waiting import eventually


@pytest.fixture(scope="module")
def mortal(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MortalPostgres]:
    with mortal_postgres(tmp_path_factory.mktemp("mortal") / "home") as server:
        yield server


@pytest.fixture
def mortal_database(mortal: MortalPostgres) -> str:
    return mortal.cluster.database_url(mortal.cluster.create(mortal.cluster.template()))


@pytest.mark.requirement("B9", "A14")
async def test_the_database_goes_and_comes_back_and_every_service_says_so(
    mortal: MortalPostgres, mortal_database: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    env = environment(mortal_database, tmp_path)
    async with AsyncExitStack() as stack:
        all_of_them = [await stack.enter_async_context(served(name, env, tmp_path)) for name in SERVICES]
        for service in all_of_them:
            await eventually(service.is_ready, 60)
        for name, value in env.items():
            monkeypatch.setenv(name, value)

        async def is_told_to_be_well() -> bool:
            """On a busy machine a service may be late with an answer, and is not well for that moment."""
            return (await run_program("health")).status == 0

        await eventually(is_told_to_be_well, 60)
        await mortal.take_down()
        for name, service in zip(SERVICES, all_of_them, strict=True):

            async def is_away(service: Served = service) -> list[str]:
                return [reason for reason in await service.reasons() if "database unreachable" in reason]

            await eventually(is_away, 60)
            assert (await service.get("/healthz")).status == 200
            document = await service.health()
            database = document["metadatabase"]
            assert document["status"] == document[name]["status"] == database["status"] == "unhealthy"
            assert database["since"] and database["reason"] and database["latest_contact"]
        told = await run_program("health", "--json")
        assert (told.status, told.json["status"]) == (1, "unhealthy")
        assert {each["service"] for each in told.json["processes"]} == set(SERVICES)

        mortal.let_up()
        for service in all_of_them:
            await eventually(service.is_ready, 60)
            await eventually(service.has_database, 60)
            assert await service.metric("evertick_reconnects_total") > 0
        await eventually(is_told_to_be_well, 60)


async def test_a_database_that_never_answers_keeps_the_port_from_nothing(tmp_path: Path) -> None:
    """Somebody accepts the connection and says nothing: a cut network, a hung server."""
    with socket.create_server(("127.0.0.1", 0), backlog=100) as silent:
        url = f"postgresql://127.0.0.1:{silent.getsockname()[1]}/shop"
        async with served("scheduler", environment(url, tmp_path), tmp_path) as service:
            assert (await service.get("/healthz")).status == 200
            assert await service.reasons() == ["starting"]
            assert (await service.health())["metadatabase"]["status"] == "unhealthy"
            service.process.send_signal(signal.SIGTERM)
