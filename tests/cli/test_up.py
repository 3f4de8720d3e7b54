"""`evertick up`, as far as it goes without starting anything: folders, banner, refusals, and what children inherit."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from evertick.cli.commands.up import banner, program, put_examples
from evertick.config import Settings, environment_for, read_settings
from evertick.supervisor.postgres_home import PostgresDirectory, PostgresDirectoryLock
from tests.cli.conftest import Cli, run_program


def test_a_missing_folder_is_made_with_the_examples(nowhere: Path) -> None:
    copied = put_examples(Path("dags"))
    assert {"etl.py", "heartbeat.py", "report.py"} <= set(copied)
    assert "pools.py" not in copied, "it needs a pool that is not there yet"
    assert sorted(path.name for path in Path("dags").iterdir()) == copied
    text = banner(Settings(), copied)
    assert "./dags (new, with " in text
    assert "dags trigger etl --wait" in text
    assert "embedded, in ./.evertick" in text
    assert "http://127.0.0.1:8790/monitor/health" in banner(Settings(), copied, "http://127.0.0.1:8790")


def test_an_existing_folder_is_left_alone(nowhere: Path) -> None:
    Path("dags").mkdir()
    assert put_examples(Path("dags")) == []
    assert list(Path("dags").iterdir()) == []
    assert "dags trigger DAG --wait" in banner(Settings(), [])
    assert "./dags (empty: put a DAG file there)" in banner(Settings(), [])


def test_the_banner_says_how_to_reach_another_home_and_hides_the_password(nowhere: Path) -> None:
    assert f"EVERTICK_HOME={nowhere}/there" in banner(Settings(home=Path("there")), [])
    text = banner(Settings(database_url="postgresql://anna:s3cret@db:5432/shop"), [])
    assert "db:5432 (database shop)" in text
    assert "s3cret" not in text


async def test_a_second_one_says_who_holds_the_home(nowhere: Path) -> None:
    home = PostgresDirectory(nowhere / ".evertick")
    home.prepare()
    lock = PostgresDirectoryLock(home)
    await lock.acquire()
    try:
        ran = await run_program("up")
    finally:
        lock.release()
    assert (ran.status, ran.out) == (1, "")
    assert ran.err.startswith(f"Error: {nowhere}/.evertick is held by process {os.getpid()}")
    assert not (nowhere / "dags").exists()


async def test_what_cannot_be_a_folder_is_refused(cli_without_database: Cli, nowhere: Path) -> None:
    (nowhere / "file").write_text("")
    assert "is not a folder" in await cli_without_database.refused("up", "--dags", "file")
    assert "There is no folder file/below" in await cli_without_database.refused("up", "--dags", "file/below")


async def test_only_the_default_folder_is_created_and_without_examples_on_request(
    cli_without_database: Cli, nowhere: Path
) -> None:
    refused = await cli_without_database.refused("up", "--dags", "/tpyo/x")
    assert "There is no folder /tpyo/x. Create it with `mkdir -p /tpyo/x`, or correct --dags" in refused
    assert not (nowhere / ".evertick").exists() and not Path("/tpyo").exists()
    assert put_examples(Path("dags"), are_wanted=False) == []
    assert list(Path("dags").iterdir()) == []


def test_the_banner_shows_a_command_that_another_terminal_has() -> None:
    assert program("/usr/bin/evertick", "evertick") == "evertick"
    cached = "/root/.cache/uv/archive-v0/Xy_1/bin/evertick"
    assert program(cached, cached) == cached, "uvx adds its cache to the PATH of this process only"
    assert program(None, "/opt/evertick/bin/evertick") == "/opt/evertick/bin/evertick"
    assert program(None, "/opt/x/evertick/__main__.py") == f"{sys.executable} -m evertick"


def test_python_runs_the_package() -> None:
    ran = subprocess.run([sys.executable, "-m", "evertick", "--version"], capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("evertick ")


def test_children_get_the_settings_of_the_command_line() -> None:
    settings = Settings(home=Path("h"), runner_slots=3, runner_queues=("a", "b"), listen_notify=False, runner_id="me")
    environment = environment_for(settings, {"PATH": "/bin", "EVERTICK_RUNNER_SLOTS": "99"})
    assert environment["PATH"] == "/bin"
    assert read_settings(environment) == replace(settings, config="none")


_NEVER_ENDING = """
import asyncio, threading
from evertick.cli.commands import up
from evertick.config import Settings

class Supervisor:
    async def run(self):
        asyncio.get_running_loop().run_in_executor(None, threading.Event().wait)

up.LONGEST_END_SECONDS = 0.2
asyncio.run(up._supervise(Supervisor(), Settings()))
"""


def test_one_that_has_stopped_everything_ends_whatever_it_waits_for_and_says_so() -> None:
    ended = subprocess.run([sys.executable, "-c", _NEVER_ENDING], capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "Timeout" in ended.stderr and "in wait" in ended.stderr
