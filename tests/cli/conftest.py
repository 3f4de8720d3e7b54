"""The program as a fixture: real commands on a real database, in this process."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from evertick.cli.main import main


@dataclass(frozen=True, slots=True)
class Ran:
    """How a command ended and what it wrote."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


async def run_program(*arguments: object) -> Ran:
    """The same in a process of its own, which inherits the environment."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "evertick.cli.main", *map(str, arguments), stdout=PIPE, stderr=PIPE
    )
    out, err = await process.communicate()
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode())


class Cli:
    """Runs commands in a thread: each has an event loop of its own, as in a process of its own."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    async def __call__(self, *arguments: object) -> Ran:
        self._capsys.readouterr()
        status = await asyncio.to_thread(main, [str(each) for each in arguments])
        return Ran(status, *self._capsys.readouterr())

    async def json(self, *arguments: object) -> Any:
        ran = await self(*arguments, "--json")
        assert ran.status == 0, ran.err
        return ran.json

    async def refused(self, *arguments: object, status: int = 2) -> str:
        """The one line that a refused command leaves."""
        ran = await self(*arguments)
        assert (ran.status, ran.err.startswith("Error: ")) == (status, True), ran
        assert "Traceback" not in ran.err
        return ran.err


@pytest.fixture
def nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and no setting from outside."""
    for name in [name for name in os.environ if name.startswith("EVERTICK_")]:
        monkeypatch.delenv(name)
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def cli_without_database(nowhere: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def cli(cli_without_database: Cli, database: str, monkeypatch: pytest.MonkeyPatch) -> Cli:
    monkeypatch.setenv("EVERTICK_DATABASE_URL", database)
    return cli_without_database


@pytest.fixture
def colours(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Calling this makes the output count as a terminal."""

    def turn_on() -> None:
        monkeypatch.delenv("NO_COLOR", raising=False)
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("COLUMNS", "100")
        monkeypatch.setenv("LINES", "30")
        monkeypatch.setenv("TERM", "xterm-256color")

    return turn_on
