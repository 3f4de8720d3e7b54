"""A log is read in windows: walked through either way every line comes once; a search looks no further than it must. All of it the
same where some of it is in an object storage."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from uuid import uuid4

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.db.queries import logs
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import UserError
from evertick.domain.log_archive import object_name, pack
from evertick.logs import reader as logs_reader
from evertick.logs.reader import LogArchive, LogReader
from evertick.sdk.shell_templates import render_shell
from evertick.storage.object_store import open_store
from evertick.ui import log_view
from evertick.ui.log_view import (
    END,
    START,
    LogFilter,
    LogPosition,
    count_onward,
    fields_in,
    plain,
    read_backward,
    read_onward,
    read_place,
)
from tests.s3_server import S3Server, s3_server

KEY = TaskKey(1, 0, -1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def reader(rollback_conn: AsyncConnection) -> LogReader:
    return LogReader(LogArchive(Settings()), lambda: nullcontext(rollback_conn))


async def move(conn: AsyncConnection, settings: Settings, *, epoch: int) -> None:
    """The lines of an attempt, to the storage."""
    found = await (
        await conn.execute("select seq, content from log_chunk where epoch = %s order by seq", [epoch])
    ).fetchall()
    body, pieces = pack(content for _, content in found)
    object_id, store = uuid4(), open_store(settings)
    assert store is not None
    store.put_bytes(object_name(KEY.run_id, object_id), body)
    for (seq, _), piece in zip(found, pieces, strict=True):
        await conn.execute(
            "update log_chunk set content = null, object_id = %s, object_offset = %s, bytes = %s, digest = %s"
            " where epoch = %s and seq = %s",
            [object_id, piece.at, piece.size, piece.digest, epoch, seq],
        )


async def write(conn: AsyncConnection, epoch: int, chunks: list[list[str]]) -> None:
    """Each chunk with its lines, as they are shipped."""
    offset = 0
    for lines in chunks:
        content = "".join(f"17000000000{number:05d} {line}\n" for number, line in enumerate(lines))
        await conn.execute(
            "insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content) values (1, 0, -1, %s, %s, %s, %s)",
            [epoch, offset, offset + len(content), content],
        )
        offset += len(content)


@pytest.fixture
async def lines(rollback_conn: AsyncConnection) -> list[str]:
    """Two attempts in many chunks; the texts in their order."""
    for epoch in (1, 2):
        chunks = [[f"INFO e{epoch} c{chunk} n{n}" for n in range(40)] for chunk in range(15)]
        chunks[7][3] = f"ERROR e{epoch} it broke"
        chunks[9][0] = f"WARNING e{epoch} 100% odd_"
        await write(rollback_conn, epoch, chunks)
    return [
        line.partition(" ")[2].partition(" ")[2]
        for (content,) in await (
            await rollback_conn.execute("select content from log_chunk order by epoch, seq")
        ).fetchall()
        for line in content.splitlines()
    ]


@pytest.fixture(params=["here", "there"])
async def either(request: pytest.FixtureRequest, rollback_conn: AsyncConnection, lines: list[str]) -> LogReader:
    """The lines of both attempts are in the database, or those of the first are in the storage."""
    settings = Settings()
    if request.param == "there":
        settings = Settings(**request.getfixturevalue("server").settings)
        await move(rollback_conn, settings, epoch=1)
    return LogReader(LogArchive(settings), lambda: nullcontext(rollback_conn))


async def walk(reader: LogReader, *, back: bool, sift: LogFilter) -> tuple[list[str], int]:
    """All lines, window by window, and how many windows."""
    place, count = END if back else START, 0
    found: list[str] = []
    while True:
        window = await (read_backward if back else read_onward)(reader, KEY, place, sift)
        texts = [line.text for _, line in window.lines]
        found = texts + found if back else found + texts
        count += 1
        assert count < 100
        if window.is_start if back else window.is_end:
            return found, count
        place = window.first if back else window.next


@pytest.mark.parametrize("back", [False, True])
async def test_every_line_comes_once_and_in_order(either: LogReader, lines: list[str], back: bool) -> None:
    found, windows = await walk(either, back=back, sift=LogFilter())
    assert found == lines
    assert windows >= len(lines) // log_view.MOST_LINES


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("sift", "expected"),
    [
        (LogFilter(level="error"), ["e1 it broke", "e2 it broke"]),
        (LogFilter(level="warning"), ["e1 it broke", "e1 100% odd_", "e2 it broke", "e2 100% odd_"]),
        (LogFilter(find="C3 N7"), ["e1 c3 n7", "e2 c3 n7"]),
        (LogFilter(find="100% odd_"), ["e1 100% odd_", "e2 100% odd_"]),
        (LogFilter(find="odd_", level="error"), []),
        (LogFilter(find="%"), ["e1 100% odd_", "e2 100% odd_"]),
        (LogFilter(find="not there"), []),
    ],
)
async def test_a_search_finds_all_that_fits(
    either: LogReader, lines: list[str], sift: LogFilter, expected: list[str], back: bool
) -> None:
    found, _ = await walk(either, back=back, sift=sift)
    assert found == expected


async def test_one_line_per_chunk_fills_a_window_and_the_count_of_a_search_is_complete(
    rollback_conn: AsyncConnection, reader: LogReader
) -> None:
    await write(rollback_conn, 1, [[f"INFO {'slow page' if n % 10 == 0 else n}"] for n in range(700)])
    for read, place in ((read_onward, START), (read_backward, END)):
        assert len((await read(reader, KEY, place, LogFilter())).lines) == log_view.MOST_LINES
    place, hits, is_end = START, 0, False
    while not is_end:
        counted = await count_onward(reader, KEY, place, LogFilter(find="slow"))
        hits, place, is_end = hits + counted.hits, counted.next, counted.is_end
    assert hits == 70
    assert (await count_onward(reader, KEY, place, LogFilter(find="slow"))).hits == 0


@pytest.mark.parametrize("back", [False, True])
async def test_a_search_in_the_storage_is_bounded_and_goes_on_where_it_stopped(
    rollback_conn: AsyncConnection, server: S3Server, back: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs_reader, "_ROUNDS", 2)
    chunks = [[f"INFO {number}"] for number in range(100)]
    chunks[5], chunks[95] = [["ERROR first"], ["ERROR last"]]
    await write(rollback_conn, 1, chunks)
    settings = Settings(**server.settings)
    await move(rollback_conn, settings, epoch=1)
    reader = LogReader(LogArchive(settings), lambda: nullcontext(rollback_conn))
    found, windows = await walk(reader, back=back, sift=LogFilter(level="error"))
    assert found == ["first", "last"] and windows == 2


async def test_a_window_may_begin_anywhere(rollback_conn: AsyncConnection, either: LogReader, lines: list[str]) -> None:
    sizes = await logs.sizes(rollback_conn, KEY)
    assert [size.epoch for size in sizes] == [1, 2]
    window = await read_onward(either, KEY, LogPosition(1, sizes[0].size // 2, 0), LogFilter())
    assert window.lines[0][1].text.startswith("e1 c7 ")
    again = await read_onward(either, KEY, window.lines[5][0], LogFilter())
    assert again.lines[0][1] == window.lines[5][1]
    before = await read_backward(either, KEY, again.lines[0][0], LogFilter())
    assert before.lines[-1][1] == window.lines[4][1]


async def test_a_log_that_grows_is_read_on_from_its_end(rollback_conn: AsyncConnection, reader: LogReader) -> None:
    first = await read_backward(reader, KEY, END, LogFilter())
    assert (first.lines, first.is_start, first.is_end) == ([], True, True)
    await write(rollback_conn, 1, [["OUT one"]])
    second = await read_onward(reader, KEY, first.next, LogFilter())
    assert [line.text for _, line in second.lines] == ["one"]
    third = await read_onward(reader, KEY, second.next, LogFilter())
    assert third.lines == [] and third.is_end
    await rollback_conn.execute(
        "insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content) values (1, 0, -1, 1, 999, 1010, 'two\n')"
    )
    fourth = await read_onward(reader, KEY, third.next, LogFilter())
    assert [line.text for _, line in fourth.lines] == ["two"]


async def test_lines_of_any_length_fit_into_bounded_windows(rollback_conn: AsyncConnection, reader: LogReader) -> None:
    await write(rollback_conn, 1, [["RAW " + "x" * 16_000] * 4] * 20)
    window = await read_onward(reader, KEY, START, LogFilter())
    assert sum(len(line.text) for _, line in window.lines) <= log_view.MOST_CHARACTERS + 16_000
    found, _ = await walk(reader, back=False, sift=LogFilter())
    assert len(found) == 80


@pytest.mark.parametrize("text", ["x", "1.2", "-1.0.0", "1.0.0.0", "9" * 30 + ".0.0"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="log position"):
        read_place(text, otherwise=START)


def test_colours_are_taken_out_for_who_has_no_script() -> None:
    assert plain("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b[2K") == "red link"


def test_a_traceback_shows_files_without_the_folder_of_their_bundle() -> None:
    line = f'  File "/home/ann/.evertick/bundles/{"0a" * 32}/shop/orders.py", line 41, in load'
    assert plain(line) == '  File "shop/orders.py", line 41, in load'


@pytest.mark.parametrize("command", ["echo {{ a }} x", "echo '{{ a }} y'", 'echo "z {{ a }}"', "echo x{{ a }}"])
def test_a_rendered_command_reads_as_it_runs(command: str) -> None:
    rendered, values = render_shell(command, {"a": 'it\'s $5 "now"'})
    told = [("command", rendered), *values.items()]
    content = "".join(f"1700000000000000 RENDER {name} = {json.dumps(text)}\n" for name, text in told)
    ((name, shown),) = fields_in(content)
    output = [
        subprocess.run(["sh", "-c", each], capture_output=True, env=values, check=True) for each in (rendered, shown)
    ]
    assert name == "command" and "EVERTICK_VALUE" not in shown and output[0].stdout == output[1].stdout
