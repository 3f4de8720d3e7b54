"""The supervisor's reading of what its children print: whatever that is, it must not end the supervisor."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from evertick.config import Settings
from evertick.supervisor.fork_server import ServiceForkServer
from evertick.supervisor.supervisor import Supervisor, _how_it_ended, _next_line
from tests.system.hosting import Said


async def test_a_line_that_is_too_long_is_dropped_and_the_next_one_is_read() -> None:
    stream = asyncio.StreamReader(limit=100)
    stream.feed_data(b"first\n" + b"x" * 1000 + b"\nlast\n")
    stream.feed_eof()
    lines = []
    while line := await _next_line(stream):
        lines.append(line)
    assert lines[0] == b"first\n"
    assert lines[-1] == b"last\n"


@pytest.mark.parametrize("line", [b"17\n", b"null\n", b"[1]\n", b'"text"\n', b"\xff\xfe\n", b"{\n", b"\n"])
def test_what_is_no_event_is_passed_on_as_it_is(line: bytes, tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(
        Settings(home=tmp_path), environment={}, fork_server=ServiceForkServer(), say=said.append, log=Said().log
    )
    supervisor._relay(supervisor.children[0], line)
    assert said == [line.decode("utf-8", "replace").rstrip()]


@pytest.mark.parametrize(
    ("form", "expected"), [("json", '{"service": "runner", "event": "task_finished"}'), ("text", "task_finished")]
)
def test_events_are_shown_in_the_form_that_was_asked_for(form: str, expected: str, tmp_path: Path) -> None:
    said: list[str] = []
    supervisor = Supervisor(
        Settings(home=tmp_path, log=form),
        environment={},
        fork_server=ServiceForkServer(),
        say=said.append,
        log=Said().log,
    )
    supervisor._relay(supervisor.children[1], b'{"service": "runner", "event": "task_finished"}\n')
    assert expected in said[0]


@pytest.mark.parametrize(
    ("code", "text"),
    [(0, "exit status 0"), (3, "exit status 3"), (-9, "killed by SIGKILL"), (-99, "killed by signal 99")],
)
def test_how_a_child_ended_is_said_in_words(code: int, text: str) -> None:
    assert _how_it_ended(code) == text
