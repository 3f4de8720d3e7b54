"""Bodies leave their lines whatever becomes of them, and the fenced store has one row per task whoever writes to it."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick import TaskContext
from evertick.sdk.runtime import entered
from tests.chaos import effects, sink
from tests.chaos.record import boot_ns

FIRE = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(effects.FILE_VARIABLE, str(tmp_path / "effects"))
    monkeypatch.setenv(effects.SERVICE_VARIABLE, "runner-1")
    yield tmp_path / "effects"


def context(epoch: int = 1, **fields: Any) -> TaskContext:
    given = {"run_id": 7, "dag": "d", "task": "group.work", "epoch": epoch, "fire_at": FIRE, "attempt": 2, **fields}
    return TaskContext(**given)


def test_a_body_notes_its_begin_and_its_end(file: Path) -> None:
    before = boot_ns()
    with entered(context(params={"schedule": "hourly"}, map_index=3)), effects.noted():
        pass
    begin, end = effects.read(file)
    assert begin == effects.Effect(
        7, "group.work", 3, 1, 2, os.getpid(), begin.at_ns, "begin", FIRE, "d", "hourly", "runner-1"
    )
    assert end.what == "end"
    assert before <= begin.at_ns <= end.at_ns <= boot_ns()


def test_a_body_that_raises_says_so(file: Path) -> None:
    with pytest.raises(ConnectionError), entered(context()), effects.noted():
        raise ConnectionError
    assert [(line.what, line.fire_at, line.schedule) for line in effects.read(file)] == [
        ("begin", FIRE, ""),
        ("fail", FIRE, ""),
    ]


def test_a_killed_body_leaves_its_begin_and_spoils_no_line(file: Path) -> None:
    def die() -> None:
        with entered(context(epoch=1)), effects.noted():
            os.kill(os.getpid(), signal.SIGKILL)

    def flood(number: int) -> None:
        with entered(context(epoch=number)):
            for _ in range(300):
                effects.note("word")

    fork = multiprocessing.get_context("fork")
    writers = [fork.Process(target=die), *(fork.Process(target=flood, args=[number]) for number in (2, 3, 4))]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    lines = effects.read(file)
    assert [line.what for line in lines if line.epoch == 1] == ["begin"]
    assert len(lines) == 901


def test_a_torn_last_line_is_left_out(file: Path) -> None:
    with entered(context()):
        effects.note("begin")
    with file.open("ab") as half:
        half.write(b"7,group.work,-1,1")
    assert len(effects.read(file)) == 1


def test_what_bodies_need_stands_beside_the_dags(tmp_path: Path) -> None:
    effects.put_beside(tmp_path)
    for name in ("effects.py", "sink.py"):
        text = (tmp_path / name).read_text()
        assert "from tests" not in text and "import tests" not in text


async def test_the_store_takes_one_row_and_refuses_who_was_replaced(
    database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(sink.URL_VARIABLE, database)
    async with await AsyncConnection.connect(database, autocommit=True) as conn:
        await sink.install(conn)
        for epoch, answer in ((1, "written"), (1, "there already"), (3, "there already"), (2, "refused")):
            with entered(context(epoch=epoch)):
                assert sink.fenced_put() == answer
        with entered(context(epoch=2, task="other")):
            assert sink.fenced_put() == "written"
        found = await sink.read(conn)
    assert [(row.task, row.epoch) for row in found.rows] == [("group.work", 1), ("other", 2)]
    assert [(touch.epoch, touch.is_accepted, touch.is_written) for touch in found.touches] == [
        (1, True, True),
        (1, True, False),
        (3, True, False),
        (2, False, False),
        (2, True, True),
    ]
