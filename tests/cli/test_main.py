"""The program as a whole: what it knows, what it loads, how it refuses."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest
import typer
from psycopg import AsyncConnection

from evertick.cli.errors import EXIT_STATUS, RUN_EXIT_STATUS, foreseen
from evertick.cli.main import COMMANDS
from evertick.domain.errors import Conflict, EvertickError, NotFound
from evertick.domain.states import TERMINAL_RUN_STATES
from tests.cli.conftest import Cli
from tests.engine.world import make_dag, put

_HEAVY = {"psycopg", "rich.table", "structlog", "evertick.services", "evertick.store.db", "asyncio"}


def _commands() -> list[tuple[str, ...]]:
    """Every command there is."""
    found: list[tuple[str, ...]] = []
    for name, command in COMMANDS.items():
        app: typer.Typer = import_module(f"evertick.cli.{command.module}").app
        is_group = app.registered_callback or len(app.registered_commands) > 1
        found += [(name, str(each.name)) for each in app.registered_commands] if is_group else [(name,)]
    return found


async def test_help_shows_every_command_and_what_exit_statuses_mean(cli_without_database: Cli) -> None:
    ran = await cli_without_database("--help")
    assert ran.status == 0
    assert all(name in ran.out for name in COMMANDS)
    assert "124 timeout" in ran.out


@pytest.mark.parametrize("command", _commands(), ids=" ".join)
async def test_each_command_teaches_with_an_example(cli_without_database: Cli, command: tuple[str, ...]) -> None:
    ran = await cli_without_database(*command, "--help")
    assert ran.status == 0
    assert f"evertick {' '.join(command)}" in " ".join(ran.out.split("Example:")[1].split())


def test_help_loads_nothing_that_only_commands_need() -> None:
    program = (
        "import sys; from evertick.cli.main import main; before = set(sys.modules); main(['--version']); "
        "print(*sys.modules)"
    )
    loaded = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()
    assert "typer" in loaded
    assert not {"psycopg", "structlog", "evertick.services", "evertick.store.db", "rich.table"} & set(loaded)


async def test_the_version_is_told(cli_without_database: Cli) -> None:
    assert (await cli_without_database("--version")).out.startswith("evertick 0.")


async def test_nothing_to_do_shows_the_help(cli_without_database: Cli) -> None:
    ran = await cli_without_database()
    assert (ran.status, ran.err) == (2, "")
    assert "Usage:" in ran.out
    assert "Usage:" in (await cli_without_database("runs")).out


async def test_a_mistyped_command_is_suggested(cli_without_database: Cli) -> None:
    assert "Did you mean 'runs'?" in await cli_without_database.refused("run")
    assert "Try `evertick runs --help`" in await cli_without_database.refused("runs", "lits")


async def test_an_unknown_option_and_a_missing_argument_are_told(cli_without_database: Cli) -> None:
    assert "--frobnicate" in await cli_without_database.refused("runs", "list", "--frobnicate")
    assert "RUN" in await cli_without_database.refused("runs", "show")


async def test_a_contradicting_setting_is_told(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERTICK_HEARTBEAT_SECONDS", "600")
    assert "EVERTICK_HEARTBEAT_SECONDS" in await cli.refused("runs", "list")


def test_every_error_has_an_exit_status() -> None:
    def tree(kind: type[EvertickError]) -> list[type[EvertickError]]:
        return [kind, *(each for below in kind.__subclasses__() for each in tree(below))]

    assert {kind.code for kind in tree(EvertickError)} == set(EXIT_STATUS)
    assert set(RUN_EXIT_STATUS) == set(TERMINAL_RUN_STATES)


def test_an_error_in_a_task_group_is_still_ours_unless_a_fault_is_beside_it() -> None:
    ours = NotFound("no such thing")
    assert foreseen(ExceptionGroup("", [ExceptionGroup("", [ours]), Conflict("taken")])) is ours
    assert foreseen(ExceptionGroup("", [ours, ZeroDivisionError()])) is None


async def test_ctrl_c_ends_a_watch_quietly(conn: AsyncConnection, database: str, nowhere: Path) -> None:
    await put(conn, make_dag("pulse", {"a": []}))
    await conn.execute("select trigger_run(1, '{}', null, 'test')")
    command = [sys.executable, "-m", "evertick.cli.main", "runs", "watch", "pulse"]
    env = {**os.environ, "EVERTICK_DATABASE_URL": database}
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert "run 1 running" in watching.stdout.readline()
        watching.send_signal(signal.SIGINT)
        assert watching.wait(10) == 130
        assert watching.stderr is not None
        assert watching.stderr.read() == ""


async def test_a_reader_that_leaves_early_causes_no_noise(conn: AsyncConnection, database: str) -> None:
    await put(conn, make_dag("many", {f"t{n}": [] for n in range(2000)}))
    await conn.execute("select trigger_run(1, '{}', null, 'test')")
    command = f"{sys.executable} -m evertick.cli.main tasks list 1 --limit 2000 | head -1"
    env = {**os.environ, "EVERTICK_DATABASE_URL": database}
    ran = subprocess.run(command, shell=True, env=env, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("TASK")
    assert ran.stderr == ""
