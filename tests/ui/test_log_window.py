"""A log is read in windows: walked through either way every line comes once; a search looks no further than it must."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from psycopg import AsyncConnection

from evertick.domain.attempt import TaskKey
from evertick.domain.errors import UserError
from evertick.store import log_windows
from evertick.ui import log_window
from evertick.ui.log_window import END, START, Place, Sift, Window, plain, read_backward, read_onward, read_place

KEY = TaskKey(1, 0, -1)
Read = Callable[[AsyncConnection, TaskKey, Place, Sift], Awaitable[Window]]


async def write(conn: AsyncConnection, epoch: int, chunks: list[list[str]]) -> None:
    """Each chunk with its lines, as they are shipped."""
    offset = 0
    for lines in chunks:
        content = "".join(f"17000000000{number:05d} {line}\n" for number, line in enumerate(lines))
        await conn.execute(
            "insert into log_chunk (run_id, idx, map_index, epoch, seq, until, content) values (1, 0, -1, %s, %s, %s, %s)",
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


async def walk(conn: AsyncConnection, *, back: bool, sift: Sift) -> tuple[list[str], int]:
    """All lines, window by window, and how many windows."""
    place, count = END if back else START, 0
    found: list[str] = []
    while True:
        window = await (read_backward if back else read_onward)(conn, KEY, place, sift)
        texts = [line.text for _, line in window.lines]
        found = texts + found if back else found + texts
        count += 1
        assert count < 100
        if window.is_start if back else window.is_end:
            return found, count
        place = window.first if back else window.next


@pytest.mark.parametrize("back", [False, True])
async def test_every_line_comes_once_and_in_order(rollback_conn: AsyncConnection, lines: list[str], back: bool) -> None:
    found, windows = await walk(rollback_conn, back=back, sift=Sift())
    assert found == lines
    assert windows >= len(lines) // log_window.MOST_LINES


@pytest.mark.parametrize("back", [False, True])
@pytest.mark.parametrize(
    ("sift", "expected"),
    [
        (Sift(level="error"), ["e1 it broke", "e2 it broke"]),
        (Sift(level="warning"), ["e1 it broke", "e1 100% odd_", "e2 it broke", "e2 100% odd_"]),
        (Sift(find="C3 N7"), ["e1 c3 n7", "e2 c3 n7"]),
        (Sift(find="100% odd_"), ["e1 100% odd_", "e2 100% odd_"]),
        (Sift(find="odd_", level="error"), []),
        (Sift(find="%"), ["e1 100% odd_", "e2 100% odd_"]),
        (Sift(find="not there"), []),
    ],
)
async def test_a_search_finds_all_that_fits(
    rollback_conn: AsyncConnection, lines: list[str], sift: Sift, expected: list[str], back: bool
) -> None:
    found, _ = await walk(rollback_conn, back=back, sift=sift)
    assert found == expected


async def test_a_window_may_begin_anywhere(rollback_conn: AsyncConnection, lines: list[str]) -> None:
    sizes = await log_windows.sizes(rollback_conn, KEY)
    assert [size.epoch for size in sizes] == [1, 2]
    window = await read_onward(rollback_conn, KEY, Place(2, sizes[1].size // 2, 0), Sift())
    assert window.lines[0][1].text.startswith("e2 c7 ")
    again = await read_onward(rollback_conn, KEY, window.lines[5][0], Sift())
    assert again.lines[0][1] == window.lines[5][1]
    before = await read_backward(rollback_conn, KEY, again.lines[0][0], Sift())
    assert before.lines[-1][1] == window.lines[4][1]


async def test_a_log_that_grows_is_read_on_from_its_end(rollback_conn: AsyncConnection) -> None:
    first = await read_backward(rollback_conn, KEY, END, Sift())
    assert (first.lines, first.is_start, first.is_end) == ([], True, True)
    await write(rollback_conn, 1, [["OUT one"]])
    second = await read_onward(rollback_conn, KEY, first.next, Sift())
    assert [line.text for _, line in second.lines] == ["one"]
    third = await read_onward(rollback_conn, KEY, second.next, Sift())
    assert third.lines == [] and third.is_end
    await rollback_conn.execute(
        "insert into log_chunk (run_id, idx, map_index, epoch, seq, until, content) values (1, 0, -1, 1, 999, 1010, 'two\n')"
    )
    fourth = await read_onward(rollback_conn, KEY, third.next, Sift())
    assert [line.text for _, line in fourth.lines] == ["two"]


async def test_lines_of_any_length_fit_into_bounded_windows(rollback_conn: AsyncConnection) -> None:
    await write(rollback_conn, 1, [["RAW " + "x" * 16_000] * 4] * 20)
    window = await read_onward(rollback_conn, KEY, START, Sift())
    assert sum(len(line.text) for _, line in window.lines) <= log_window.MOST_CHARACTERS + 16_000
    found, _ = await walk(rollback_conn, back=False, sift=Sift())
    assert len(found) == 80


@pytest.mark.parametrize("text", ["x", "1.2", "-1.0.0", "1.0.0.0", "9" * 30 + ".0.0"])
def test_a_place_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="place in a log"):
        read_place(text, otherwise=START)


def test_colours_are_taken_out_for_who_has_no_script() -> None:
    assert plain("\x1b[1;31mred\x1b[0m \x1b]8;;http://x\x07link\x1b[2K") == "red link"
