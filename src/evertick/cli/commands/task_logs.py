"""`evertick tasks logs`: what a task wrote, and what it is still writing.

What user code wrote is made safe for the terminal before it is printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from evertick.cli.options import Json, Run, Task, run_number, task_instance
from evertick.cli.output import console, hint, print_json, show
from evertick.cli.text import coloured, plain
from evertick.client.connect import Client, open_client
from evertick.domain.errors import EvertickError, NotFound, UserError
from evertick.operations.task_logs import LogEnd, LogLine, NewLines, follow_log, read_log
from evertick.operations.tasks import list_tasks, show_task

Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the task ends.")]
Attempt = Annotated[
    int | None, typer.Option("--attempt", "-a", min=1, help="Only this attempt, as `tasks show` numbers them.")
]

_LEVEL_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "ERR": "31", "CRITICAL": "1;31", "MARK": "36"}


def logs_command(run: Run, task: Task, follow: Follow = False, attempt: Attempt = None, as_json: Json = False) -> None:
    """Print what a task wrote; with -f also what it is still writing, until it ends."""
    run_id = run_number(run)
    if follow and as_json:
        raise UserError("--json prints one document when all is written: leave out --follow.")
    with open_client() as client:
        name, map_index = _first_instance(client, run_id, task)
        epoch = None if attempt is None else _epoch_of(client, run_id, name, map_index, attempt)
        read = _new_lines if follow else _stored_lines
        found = (
            [line for line in lines if epoch in (None, line.epoch)] for lines in read(client, run_id, name, map_index)
        )
        if as_json:
            print_json({"run_id": run_id, "task": task, "lines": [line for lines in found for line in lines]})
            return
        printer = _Printer()
        for lines in found:
            printer.print(lines)
    if not printer.has_printed:
        show(hint(f"{task} of run {run_id} has written nothing{'' if follow else ' yet'}."))


def _first_instance(client: Client, run_id: int, task: str) -> tuple[str, int]:
    """The task with its map index; of a mapped task that is named without one, the first instance."""
    name, map_index = task_instance(task)
    if map_index is None:
        map_index = client.pages(list_tasks, 1, run_id=run_id, task=name)[0].map_index
    return name, map_index


def _epoch_of(client: Client, run_id: int, task: str, map_index: int, attempt: int) -> int:
    found = client.call(show_task, run_id=run_id, task=task, map_index=map_index).attempts
    if attempt > len(found):
        raise NotFound(
            f"{task} of run {run_id} has {len(found)} attempts. List them with `evertick tasks show {run_id} {task}`."
        )
    return found[attempt - 1].epoch


def _stored_lines(client: Client, run_id: int, task: str, map_index: int) -> Iterator[list[LogLine]]:
    cursor = None
    while True:
        page = client.call(read_log, run_id=run_id, task=task, map_index=map_index, cursor=cursor)
        yield page.items
        cursor = page.next_cursor
        if cursor is None:
            return


def _new_lines(client: Client, run_id: int, task: str, map_index: int) -> Iterator[list[LogLine]]:
    for each in client.stream(follow_log, run_id=run_id, task=task, map_index=map_index):
        if isinstance(each, NewLines):
            yield [
                LogLine(epoch=each.epoch, at=line.at, level=line.level, text=line.text, is_late=each.is_late)
                for line in each.lines
            ]
        elif isinstance(each, LogEnd) and each.reason is not None:
            raise EvertickError(f"This is not all of the log: {each.reason}")


class _Printer:
    """Writes lines in the way that fits the output, with a heading where another attempt begins."""

    def __init__(self) -> None:
        out = console()
        self._has_colour = out.is_terminal and out.color_system is not None and not out.no_color
        self._epoch: int | None = None
        self.has_printed = False

    def print(self, lines: Sequence[LogLine]) -> None:
        for line in lines:
            if self._epoch not in (None, line.epoch):
                sys.stdout.write("--- next attempt ---\n")
            self._epoch, self.has_printed = line.epoch, True
            sys.stdout.write(self._text(line))
        sys.stdout.flush()

    def _text(self, line: LogLine) -> str:
        at = f"{line.at.astimezone():%H:%M:%S}.{line.at.microsecond // 1000:03}" if line.at else "--:--:--.---"
        late = " (late)" if line.is_late else ""
        if not self._has_colour:
            return f"{at} {line.level:<8} {plain(line.text)}{late}\n"
        tone = _LEVEL_COLOURS.get(line.level, "")
        level = f"\x1b[{tone}m{line.level:<8}\x1b[0m" if tone else f"{line.level:<8}"
        return f"\x1b[2m{at}\x1b[0m {level} {coloured(line.text)}{late}\n"
