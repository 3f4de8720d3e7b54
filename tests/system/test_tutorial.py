"""The tutorial, typed by a reader into an empty directory: each file is saved, each command run, each output compared."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from evertick.cli.main import main
from tests.source_tree import ROOT
from tests.system.test_up import Up
from tests.waiting import eventually_sync

PAGE = (ROOT / "docs/tutorial/index.md").read_text(encoding="utf-8")
FENCE = re.compile(r"^(?:<!-- (file|exit): (\S+) -->\n\n)?```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A word of an output that is the same on every machine: no time, no duration, no name of a process.
WORD = re.compile(r"[A-Za-z_]{4,}(?![\w:@-])")
# States that a quick task may leave before a command has seen them are not expected, either.
ELSEWHERE = {"runner", "workshop", "running", "pending", "retry"}


@dataclass(frozen=True, slots=True)
class Step:
    """A file to save, or a command with the output that the page shows and its exit status."""

    file: str | None
    text: str
    output: str = ""
    status: int = 0


def steps() -> Iterator[Step]:
    for mark, value, language, body in FENCE.findall(PAGE):
        if mark == "file":
            yield Step(value, body)
        elif language == "console":
            commands = re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", body, re.MULTILINE)
            for place, (command, output) in enumerate(commands, 1):
                status = int(value) if mark == "exit" and place == len(commands) else 0
                yield Step(None, command, output, status)


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    (tmp_path / "dags").mkdir()
    running = Up(tmp_path, "--no-examples", "--port", "0", EVERTICK_RUNNER_ID="runner-1")
    yield running
    running.end()


@pytest.mark.long
def test_the_tutorial_works_as_it_is_written(
    up: Up, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(up.folder)
    for name in ("EVERTICK_HOME", "EVERTICK_DATABASE_URL", "EVERTICK_SERVER"):
        monkeypatch.delenv(name, raising=False)
    up.wait_for(r"/auth/link/evl_\S+")
    eventually_sync(lambda: main(["health"]) == 0, within_seconds=60)  # a reader takes longer to open a terminal
    saved = typed = 0
    for step in steps():
        if step.file is not None:
            path = up.folder / step.file
            reported = len(re.findall(rf"file={path.name}\b", up.output))
            path.write_text(step.text, encoding="utf-8")
            up.wait_for(rf"file={path.name}\b", times=reported + 1)
            saved += 1
        elif step.text.startswith("rm "):
            (up.folder / step.text.removeprefix("rm ")).unlink()
        elif not step.text.startswith("evertick up"):
            capsys.readouterr()
            status = main(shlex.split(step.text)[1:])
            out, err = capsys.readouterr()
            assert status == step.status, f"{step.text}\n{out}{err}"
            missing = set(WORD.findall(step.output)) - set(WORD.findall(out + err)) - ELSEWHERE
            assert not missing, f"{step.text} prints\n{out}{err}"
            typed += 1
    assert saved == 6 and typed > 25
