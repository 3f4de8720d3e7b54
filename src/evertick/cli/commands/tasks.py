"""`evertick tasks`: list, show, explain, clear and mark the tasks of one run, and print their logs. `evertick blocked`.

Output of user code is made safe for the terminal before it is printed.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Annotated

import typer
from rich.table import Table

from evertick.cli import output
from evertick.cli.app import Group, Single
from evertick.cli.commands import local_runs
from evertick.cli.commands.monitoring import reproduce
from evertick.cli.options import Downstream, DryRun, Json, Limit, Run, Task, Yes, confirm, noun, task_instance
from evertick.cli.output import Cell, heading, hint, line, print_json, show, show_list, state, table
from evertick.cli.run_view import attempt_text, task_note, task_table
from evertick.client.connect import Client, open_client, read
from evertick.db.queries.tasks import AttemptRow, TaskRow
from evertick.domain.durations import length, relative, size, took
from evertick.domain.errors import Conflict, EvertickError, NotFound, UserError
from evertick.domain.explain import Blocked, describe, describe_blocked, kind_of
from evertick.domain.states import TERMINAL_TASK_STATES, TaskState
from evertick.engine.tasks import full_name, markable
from evertick.operations.gates import list_blocked
from evertick.operations.paging import record_of
from evertick.operations.runs import ClearRequest, clear_run, show_run
from evertick.operations.task_logs import (
    LEVEL_WORDS,
    LogEnd,
    LogLine,
    NewLines,
    RunLogLine,
    follow_log,
    read_log,
    with_short_paths,
)
from evertick.operations.tasks import (
    MarkRequest,
    TaskDetails,
    TaskExplanation,
    list_tasks,
    mark_task,
    reason_of,
    show_task,
    why_task,
)

app = Group()
blocked_app = Single()

Names = Annotated[list[str], typer.Argument(metavar="TASK", help="The tasks to run again.")]
StateFilter = Annotated[TaskState | None, typer.Option("--state", "-s", help="Only tasks in this state.")]
MarkState = Annotated[str, typer.Argument(metavar="success|failed|skipped", help="The state to set.")]
AllInstances = Annotated[bool, typer.Option("--all", help="All instances of a mapped task, one after the other.")]
Follow = Annotated[bool, typer.Option("--follow", "-f", help="Continue until the task ends.")]
Attempt = Annotated[
    int | None, typer.Option("--attempt", "-a", min=1, help="Only this attempt, as `tasks show` numbers them.")
]

# The streams of a process, as lines of a log name them.
_LEVEL_COLOURS = {"DEBUG": "2", "WARNING": "33", "ERROR": "31", "ERR": "31", "CRITICAL": "1;31", "MARK": "36"}
_SHOWN = 50
_SHOWN_FAILED = 10
_MOST_INSTANCES = 100_000


@app.command("list", epilog="Example: evertick tasks list 12")
def list_command(run: Run, state: StateFilter = None, limit: Limit = 1000, as_json: Json = False) -> None:
    """List the tasks of a run in the order in which they can run."""
    with open_client() as client:
        row = client.call(show_run, run_id=run)
        found, now = client.pages(list_tasks, limit, run_id=run, state=state), client.now
    if as_json:
        return print_json({"run_id": run, "dag": row.dag, "tasks": found})
    if state is not None and not found:
        return show(hint(f"No task of run {run} is {state}."))
    show(task_table(found, now))
    if row.task_count > len(found) and state is None:
        show(hint(f"{len(found):,} of {row.task_count:,} tasks; see more with --limit"))


@app.command("show", epilog="Example: evertick tasks show 12 extract")
def show_command(run: Run, task: Task, all_instances: AllInstances = False, as_json: Json = False) -> None:
    """Show one task: its state, attempts and result. Of a mapped task: how many instances are in each state, and the
    first that failed."""
    name, map_index = task_instance(task)
    with open_client() as client:
        rows = _instances(client, run, task)
        if map_index is None and len(rows) > 1 and not all_instances and not as_json:
            return _show_mapped(run, name, rows, client.now)
        found = [client.call(show_task, run_id=run, task=name, map_index=row.map_index) for row in rows]
        now = client.now
    if as_json:
        shown = [
            {**output.document(each.task), "attempts": each.attempts, "result": each.result, "outputs": each.outputs}
            for each in found
        ]
        return print_json({"run_id": run, "tasks": shown})
    for each in found:
        show(_facts(run, each, now))
        if each.attempts:
            show(heading("Attempts"), _attempts(each.attempts, now))
            show(hint(f"\nShow its log with: evertick tasks logs {run} {shlex.quote(full_name(each.task))}"))


def _show_mapped(run_id: int, name: str, rows: Sequence[TaskRow], now: datetime) -> None:
    counts = Counter(row.state for row in rows)
    states = line(", ").join(state(each, f"{count:,} {each}") for each, count in counts.most_common())
    show(output.facts({"Task": line(name, "bold"), "Run": run_id, "Instances": f"{len(rows):,}", "States": states}))
    failed = [row for row in rows if row.state in (TaskState.FAILED, TaskState.CANCELED)]
    if failed:
        show(heading("Failed"), task_table(failed[:_SHOWN_FAILED], now))
    if len(failed) > _SHOWN_FAILED:
        show(hint(f"and {len(failed) - _SHOWN_FAILED:,} more"))
    example = shlex.quote(full_name((failed or rows)[0]))
    show(hint(f"\nShow one with: evertick tasks show {run_id} {example}, and all with --all"))


@app.command("why", epilog="Example: evertick tasks why 12 load")
def why_command(run: Run, task: Task, as_json: Json = False) -> None:
    """Explain why a task is not running: all reasons, the most binding first, and the holders of its resources."""
    name, map_index = task_instance(task)
    found, now = read(why_task, run_id=run, task=name, map_index=map_index)
    if as_json:
        return print_json(found)
    each: TaskExplanation | None = found
    while each is not None:
        show(line(f"{each.task} of run {run} is {each.state}", "bold"))
        for number, reason in enumerate(each.reasons):
            text = describe(reason_of(reason), _relative_to(now))
            show(line(f"{'  because' if number == 0 else '  and'} {text}"))
        if not each.reasons:
            show(hint("  its state is changing. Try again."))
        each = each.upstream


@app.command("logs", epilog="Example: evertick tasks logs 12 extract -f")
def logs_command(run: Run, task: Task, follow: Follow = False, attempt: Attempt = None, as_json: Json = False) -> None:
    """Print the log of a task; with -f also new lines, until the task ends."""
    refuse_followed_document(follow=follow, as_json=as_json)
    with open_client() as client:
        name, map_index = _first_instance(client, run, task)
        epoch = None if attempt is None else _epoch_of(client, run, name, map_index, attempt)
        batches = _new_lines if follow else _stored_lines
        found = (
            [line for line in lines if epoch in (None, line.epoch)] for lines in batches(client, run, name, map_index)
        )
        if as_json:
            return print_json({"run_id": run, "task": task, "lines": [line for lines in found for line in lines]})
        printer = LogPrinter(partial(_ending, client, run, name, map_index))
        for lines in found:
            printer.print(lines)
        row = client.call(show_task, run_id=run, task=name, map_index=map_index)
        printer.end(row.attempts[-1].epoch if row.attempts and epoch is None else epoch)
    if not printer.has_printed:
        is_over = row.task.state in TERMINAL_TASK_STATES
        shown = (
            f"{task} of run {run} is {row.task.state} and has written nothing"
            if is_over
            else f"{task} of run {run} has written nothing yet"
        )
        show(hint(f"{shown}."))


app.command("reproduce", epilog="Example: evertick tasks reproduce 12 load --debug")(reproduce.reproduce_command)
app.command("test", epilog="Example: evertick tasks test etl transform --for 2026-11-01")(local_runs.test_task_command)


@app.command("clear", epilog="Example: evertick tasks clear 12 transform --downstream")
def clear_command(
    run: Run, task: Names, downstream: Downstream = False, yes: Yes = False, dry_run: DryRun = False
) -> None:
    """Run tasks again. Lists them and asks first; running tasks are stopped first."""
    clear_tasks(run, ClearRequest(tasks=task, with_downstream=downstream), yes=yes, dry_run=dry_run)


@app.command("mark", epilog="Example: evertick tasks mark 12 extract success")
def mark_command(run: Run, task: Task, ended: MarkState) -> None:
    """Set the state of a task. A running task is stopped first; downstream tasks are re-evaluated."""
    name, _ = task_instance(task)
    wanted = markable(ended)
    with open_client() as client:
        rows = [row for row in _instances(client, run, task) if row.state != wanted]
        if not rows:
            raise Conflict(f"Task {task!r} of run {run} is {wanted} already.")
        marks = [MarkRequest(state=wanted, map_index=row.map_index) for row in rows]
        outcomes = {client.call(mark_task, run_id=run, task=name, body=each).outcome for each in marks}
    if "asked" in outcomes:
        show(line(f"{task} of run {run} is running. It is being stopped and will then be {wanted}."))
    else:
        show(line(f"Marked {task} of run {run} as {wanted}."))


@blocked_app.command(epilog="Example: evertick blocked")
def blocked_command(limit: Limit = 50, as_json: Json = False) -> None:
    """List what blocks the most tasks now, over all runs: full pools and keys, queues without a runner, paused DAGs."""
    with open_client() as client:
        found, now = client.pages(list_blocked, limit), client.now

    def cells(each: Blocked) -> list[Cell]:
        since = relative(each.since, now) if each.since else None
        detail = describe_blocked(each, _relative_to(now))
        return [each.waiting, state("pending", kind_of(each)), each.name, since, detail]

    columns = ("#WAITING", "REASON", "NAME", "OLDEST", "DETAIL")
    show_list("blocked", found, columns, cells, as_json=as_json, empty="No blocked tasks.")
    if found and not as_json:
        show(hint("\nExplain one task with: evertick tasks why RUN TASK"))


def clear_tasks(run_id: int, wanted: ClearRequest, *, yes: bool, dry_run: bool) -> None:
    """List what would run again, ask, and clear. Shared by `runs clear` and `tasks clear`."""
    with open_client() as client:
        preview = client.call(clear_run, run_id=run_id, body=replace(wanted, is_preview=True))
        if not preview.tasks:
            kind = "no failed task" if wanted.only_failed else "nothing that has started"
            show(hint(f"There is nothing to clear: run {run_id} has {kind} among these."))
            return
        show(task_table(preview.tasks[:_SHOWN], client.now))
        if (change := preview.version_change) is not None:
            show(line(f"The run continues with version {change.new}; it began with version {change.old}."))
        count = len(preview.tasks)
        if count > _SHOWN:
            show(hint(f"and {noun(count - _SHOWN, 'more task')}"))
        if dry_run:
            show(hint(f"{noun(count, 'task')} would run again; nothing was changed."))
            raise typer.Exit
        confirm(f"Run {noun(count, 'task')} of run {run_id} again?", yes=yes)
        done = client.call(clear_run, run_id=run_id, body=wanted)
    stopped = done.stopping
    stopping = f"; {noun(stopped, 'running task')} will be stopped first" if stopped else ""
    show(line(f"Cleared {noun(done.reopened + stopped, 'task')} of run {run_id}{stopping}."))
    show(hint(f"Follow it with: evertick runs watch {run_id}"))


def _instances(client: Client, run_id: int, task: str) -> list[TaskRow]:
    """The task, or all instances of a mapped task that is named without an index."""
    name, map_index = task_instance(task)
    if map_index is not None:
        return [client.call(show_task, run_id=run_id, task=name, map_index=map_index).task]
    return client.pages(list_tasks, _MOST_INSTANCES, run_id=run_id, task=name)


def _facts(run_id: int, page: TaskDetails, now: datetime) -> Table:
    row = page.task
    values: dict[str, Cell] = {
        "Task": line(full_name(row), "bold"),
        "Name": row.map_name,
        "Run": run_id,
        "State": state(row.state),
        "Note": task_note(row, now),
        "Attempt": attempt_text(row),
        "Queue": f"{row.queue}, priority {row.priority}",
        "Started": f"{output.clock(row.started_at)} ({relative(row.started_at, now)})" if row.started_at else None,
        "Took": took(row.started_at, row.finished_at, now) if row.started_at else None,
        "Exit code": row.exit_code,
        "Result": json.dumps(page.result) if page.result is not None else None,
        **{f"Output {name}": json.dumps(value) for name, value in page.outputs.items()},
    }
    return output.facts(values)


def _attempts(rows: list[AttemptRow], now: datetime) -> Table:
    cells: list[list[Cell]] = []
    for number, row in enumerate(rows, 1):
        lasted = took(row.started_at, row.finished_at, now)
        place = f"{row.runner_id} on {row.host}" if row.runner_id else None
        outcome = state(row.outcome)
        cpu = None if row.cpu_seconds is None else length(row.cpu_seconds)
        memory = None if row.peak_memory_bytes is None else size(row.peak_memory_bytes)
        started = output.clock(row.started_at)
        cells.append([number, outcome, started, lasted, cpu, memory, row.exit_code, place, row.reason])
    return table(("#NUMBER", "OUTCOME", "STARTED", "TOOK", "CPU", "MEMORY", "#EXIT", "RUNNER", "REASON"), cells)


def _relative_to(now: datetime) -> Callable[[str], str]:
    """Instants as all commands show them."""
    return lambda instant: relative(datetime.fromisoformat(instant), now)


# Logs ----------------------------------------------------------------------------------------------------------------


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
    page = client.call(read_log, run_id=run_id, task=task, map_index=map_index)
    yield page.items
    while page.next_cursor is not None:
        page = client.call(read_log, run_id=run_id, task=task, map_index=map_index, cursor=page.next_cursor)
        yield page.items


def _ending(client: Client, run_id: int, task: str, map_index: int, epoch: int) -> list[LogLine] | None:
    """Why an attempt failed, as a line of its log. None: this is a poll of a sensor, which is not an attempt of its own."""
    attempts = client.call(show_task, run_id=run_id, task=task, map_index=map_index).attempts
    for each in attempts:
        if each.epoch == epoch and each.outcome != TaskState.DEFERRED:
            if not each.finished_at or not each.reason or each.outcome == TaskState.SUCCESS:
                return []
            text = f"{each.outcome}: {each.reason}"
            return [LogLine(epoch=epoch, at=each.finished_at, level="MARK", text=text, is_late=False)]
    return None


def _new_lines(client: Client, run_id: int, task: str, map_index: int) -> Iterator[list[LogLine]]:
    for each in client.stream(follow_log, run_id=run_id, task=task, map_index=map_index):
        if isinstance(each, NewLines):
            yield [record_of(LogLine, line, epoch=each.epoch, is_late=each.is_late) for line in each.lines]
        elif isinstance(each, LogEnd) and each.reason is not None:
            raise EvertickError(f"This is not all of the log: {each.reason}")


def refuse_followed_document(*, follow: bool, as_json: bool) -> None:
    if follow and as_json:
        raise UserError("--json prints one document and does not follow: leave out --follow.")


class LogPrinter:
    """Writes lines in the way that fits the output. In the log of a task, each attempt ends with the reason of its failure,
    and a heading stands where another attempt begins; in the log of a run, each line has its task."""

    def __init__(self, ending: Callable[[int], list[LogLine] | None] = lambda _: []) -> None:
        out = output.console()
        self._ending = ending
        self._has_colour = out.is_terminal and out.color_system is not None and not out.no_color
        self._epoch: int | None = None
        self._width = 0
        self.has_printed = False

    def print(self, lines: Sequence[LogLine]) -> None:
        for each in lines:
            if self._epoch not in (None, each.epoch) and not isinstance(each, RunLogLine) and self.end(self._epoch):
                sys.stdout.write("--- next attempt ---\n")
            self._epoch, self.has_printed = each.epoch, True
            sys.stdout.write(self._text(each))
        sys.stdout.flush()

    def end(self, epoch: int | None) -> bool:
        """Write why this attempt failed, if it did. Returns whether it is an attempt."""
        lines = None if epoch is None else self._ending(epoch)
        for each in lines or ():
            self.has_printed = True
            sys.stdout.write(self._text(each))
        return lines is not None

    def _text(self, found: LogLine) -> str:
        at = f"{found.at.astimezone():%H:%M:%S}.{found.at.microsecond // 1000:03}" if found.at else "--:--:--.---"
        late, text = " (late)" if found.is_late else "", with_short_paths(found.text)
        level = LEVEL_WORDS.get(found.level, found.level)
        task = f"{self._padded(found.task)} " if isinstance(found, RunLogLine) else ""
        if not self._has_colour:
            return f"{at} {task}{level:<8} {output.plain(text)}{late}\n"
        tone = _LEVEL_COLOURS.get(found.level, "")
        shown = f"\x1b[{tone}m{level:<8}\x1b[0m" if tone else f"{level:<8}"
        return f"\x1b[2m{at}\x1b[0m {task}{shown} {output.coloured(text)}{late}\n"

    def _padded(self, task: str) -> str:
        """As wide as the longest name so far."""
        name = output.one_line(task)
        self._width = max(self._width, len(name))
        return name.ljust(self._width)
