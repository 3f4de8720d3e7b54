"""The program as a whole: what it knows, what it loads, how it refuses."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE

import pytest
from psycopg import AsyncConnection

from evertick.cli.errors import EXIT_STATUS, RUN_EXIT_STATUS, foreseen
from evertick.cli.main import COMMANDS, load_app
from evertick.domain.errors import Conflict, EvertickError, NotFound
from evertick.domain.states import TERMINAL_RUN_STATES
from tests.cli.conftest import Cli
from tests.engine.world import make_dag, put, start


def _commands() -> list[tuple[str, ...]]:
    """Every command there is."""
    found: list[tuple[str, ...]] = []
    for name, command in COMMANDS.items():
        app = load_app(command)
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


async def test_only_what_a_command_needs_is_loaded() -> None:
    program = "import sys; from evertick.cli.main import main; main(['--version']); print(*sys.modules)"
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", program, stdout=PIPE)
    loaded = (await process.communicate())[0].decode().split()
    assert "typer" in loaded
    assert not {"psycopg", "structlog", "evertick.runtime", "evertick.db", "rich.table"} & set(loaded)


async def test_the_version_is_told(cli_without_database: Cli) -> None:
    assert (await cli_without_database("--version")).out.startswith("evertick 0.")


async def test_nothing_to_do_shows_the_help(cli_without_database: Cli) -> None:
    ran = await cli_without_database()
    assert (ran.status, ran.err) == (2, "")
    assert "Usage:" in ran.out
    assert "Usage:" in (await cli_without_database("runs")).out


async def test_a_mistyped_command_is_suggested(cli_without_database: Cli) -> None:
    assert "Did you mean 'schedules', 'scheduler'?" in await cli_without_database.refused("schedule")
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


async def test_ctrl_c_ends_a_watch_quietly(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("pulse", {"a": []}))
    run = await start(conn, "pulse")
    watching = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "evertick.cli.main", "runs", "watch", "pulse", stdout=PIPE, stderr=PIPE
    )
    assert watching.stdout is not None
    assert f"run {run} running" in (await watching.stdout.readline()).decode()
    watching.send_signal(signal.SIGINT)
    _, errors = await watching.communicate()
    assert (watching.returncode, errors) == (130, b"")


async def test_a_reader_that_leaves_early_causes_no_noise(cli: Cli, conn: AsyncConnection) -> None:
    await put(conn, make_dag("many", {f"{'t' * 200}{n}": [] for n in range(500)}))
    run = await start(conn, "many")
    listing = await asyncio.create_subprocess_shell(
        f"{sys.executable} -m evertick.cli.main tasks list {run} --limit 500 | head -1", stdout=PIPE, stderr=PIPE
    )
    out, errors = await listing.communicate()
    assert out.startswith(b"TASK")
    assert errors == b""
