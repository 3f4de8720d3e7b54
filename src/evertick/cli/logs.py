"""`evertick tasks logs`: what a task wrote, as it is and while it grows.

Whatever user code wrote is made safe for the terminal before it gets there.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far
from evertick.cli.connection import ask, database_url
from evertick.cli.documents import print_json
from evertick.cli.options import Json, Run, Task, run_number
from evertick.cli.poll import poll
from evertick.cli.tables import console, hint, show
from evertick.cli.text import coloured, plain
from evertick.config import read_settings
from evertick.db.queries import tasks
from evertick.db.queries.tasks import AttemptRow
from evertick.domain.attempt import TaskKey
from evertick.domain.errors import NotFound, UserError
from evertick.domain.states import TERMINAL_TASK_STATES
from evertick.engine.tasks import select_tasks
from evertick.logs.format import Line, lines_of
from evertick.logs.reader import LogArchive, LogReader

if TYPE_CHECKING:
    from evertick.cli.server import Server

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Go on until the task ends.")]
Attempt = Annotated[
    int | None, typer.Option("--attempt", "-a", min=1, help="Only this attempt, as `tasks show` numbers them.")
]

_CHUNKS = 200
_LEVEL_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "ERR": "31", "CRITICAL": "1;31", "MARK": "36"}


def show_logs(run: Run, task: Task, follow: Follow = False, attempt: Attempt = None, as_json: Json = False) -> None:
    """Print what a task wrote. With -f also what it is still writing, until it ends."""
    run_id = run_number(run)
    if follow and as_json:
        raise UserError("--json prints one document when all is written: leave out --follow.")
    if (server := far.far_server()) is not None:
        _show_far(server, run_id, task, attempt, is_followed=follow, as_json=as_json)
        return
    key, epoch = ask(lambda conn: _find(conn, run_id, task, attempt))[0]
    reader = _Reader(key, epoch)
    if as_json:
        ask(reader.read)
        print_json({"run_id": run_id, "task": task, "lines": [line._asdict() for line in reader.lines]})
        return
    printer = _Printer()
    if follow:
        asyncio.run(poll(database_url(read_settings()), lambda conn: _print_new(conn, reader, printer)))
    else:
        ask(lambda conn: _print_new(conn, reader, printer))
    if not printer.has_printed:
        show(hint(f"{task} of run {run_id} has written nothing{'' if follow else ' yet'}."))


def _show_far(server: Server, run_id: int, task: str, attempt: int | None, *, is_followed: bool, as_json: bool) -> None:
    """The same from a server, which sends lines as they come."""
    epoch = None if attempt is None else _epoch_of(far.show_task(server, run_id, task)[0][1], run_id, task, attempt)
    if as_json:
        found = far.log_records(server, run_id, task)
        lines = [each for each in found if epoch in (None, each["epoch"])]
        print_json({"run_id": run_id, "task": task, "lines": lines})
        return
    printer = _Printer()
    for lines_now in far.log_lines(server, run_id, task, is_followed=is_followed):
        printer.print([each for each in lines_now if epoch in (None, each.epoch)])
    if not printer.has_printed:
        show(hint(f"{task} of run {run_id} has written nothing{'' if is_followed else ' yet'}."))


def _epoch_of(made: Sequence[AttemptRow], run_id: int, task: str, attempt: int) -> int:
    if attempt > len(made):
        raise NotFound(
            f"{task} of run {run_id} has {len(made)} attempts. `evertick tasks show {run_id} {task}` lists them."
        )
    return made[attempt - 1].epoch


async def _find(conn: AsyncConnection, run_id: int, task: str, attempt: int | None) -> tuple[TaskKey, int | None]:
    """The task, and the epoch of the attempt that was asked for."""
    row = (await select_tasks(conn, run_id=run_id, names=[task]))[0]
    key = TaskKey(run_id, row.idx, row.map_index)
    if attempt is None:
        return key, None
    return key, _epoch_of(await tasks.attempts(conn, key), run_id, task, attempt)


async def _print_new(conn: AsyncConnection, reader: _Reader, printer: _Printer) -> bool:
    """Print what came since the last look. Whether the task has ended is read first: what it wrote is there by then."""
    row = await tasks.find(conn, reader.key)
    await reader.read(conn)
    printer.print(reader.take())
    return row is None or row.state in TERMINAL_TASK_STATES


class _Reader:
    """Reads on from where it stopped."""

    def __init__(self, key: TaskKey, epoch: int | None) -> None:
        self.key = key
        self.lines: list[Line] = []
        self._epoch = epoch
        self._after = (0, -1) if epoch is None else (epoch, -1)
        self._archive = LogArchive(read_settings())

    async def read(self, conn: AsyncConnection) -> None:
        reader = LogReader(self._archive, lambda: nullcontext(conn))
        while chunks := await reader.read(self.key, after=self._after, limit=_CHUNKS):
            for chunk in chunks:
                self._after = (chunk.epoch, chunk.seq)
                if self._epoch in (None, chunk.epoch):
                    self.lines += lines_of(chunk.content, epoch=chunk.epoch, is_late=chunk.is_late)

    def take(self) -> list[Line]:
        lines, self.lines = self.lines, []
        return lines


class _Printer:
    """Writes lines in the way that fits the output, with a heading where another attempt begins."""

    def __init__(self) -> None:
        out = console()
        self._has_colour = out.is_terminal and out.color_system is not None and not out.no_color
        self._epoch: int | None = None
        self.has_printed = False

    def print(self, lines: list[Line]) -> None:
        for line in lines:
            if self._epoch not in (None, line.epoch):
                sys.stdout.write("--- next attempt ---\n")
            self._epoch, self.has_printed = line.epoch, True
            sys.stdout.write(self._text(line))
        sys.stdout.flush()

    def _text(self, line: Line) -> str:
        at = f"{line.at.astimezone():%H:%M:%S}.{line.at.microsecond // 1000:03}" if line.at else "--:--:--.---"
        late = " (late)" if line.is_late else ""
        if not self._has_colour:
            return f"{at} {line.level:<8} {plain(line.text)}{late}\n"
        tone = _LEVEL_COLOURS.get(line.level, "")
        level = f"\x1b[{tone}m{line.level:<8}\x1b[0m" if tone else f"{line.level:<8}"
        return f"\x1b[2m{at}\x1b[0m {level} {coloured(line.text)}{late}\n"
