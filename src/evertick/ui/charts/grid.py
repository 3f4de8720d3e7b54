"""The grid of a DAG: runs as columns, tasks as rows, collapsible groups, one cell per mapped task. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, tzinfo

from evertick.db.queries.dags import GridCell, GridRun
from evertick.domain.dags.spec import TaskSpec

# A cell for several instances shows the first of these states that occurs; states that need attention come first.
PRECEDENCE = (
    "failed",
    "upstream_failed",
    "running",
    "queued",
    "available",
    "pending",
    "deferred",
    "canceled",
    "waiting",
    "skipped",
    "success",
)


@dataclass(frozen=True, slots=True)
class Cell:
    """`state` is displayed; `text` describes all states. `retried` counts the retries of its group."""

    state: str
    text: str
    path: str | None
    count: int
    retried: int = 0


@dataclass(frozen=True, slots=True)
class GridRow:
    """A task or a group. `inside` lists the groups that contain it, outermost first."""

    key: str
    label: str
    is_group: bool
    depth: int
    inside: str
    cells: Sequence[Cell | None]


States = Mapping[str, int]

# Columns from one label of the time axis to the next.
_LABEL_EVERY = 4


def axis_of(instants: Sequence[datetime], zone: tzinfo, every: int = _LABEL_EVERY) -> list[str]:
    """The labels of a time axis: the day where it changes, otherwise the time; columns between labels have an empty one."""
    labels: list[str] = []
    day, last = None, -every
    for place, at in enumerate(instants):
        local = at.astimezone(zone)
        if place - last < every:
            labels.append("")
            continue
        labels.append(f"{local:%H:%M}" if local.date() == day else f"{local.day} {local:%b}")
        day, last = local.date(), place
    return labels


def short_count(count: int) -> str:
    """A number of instances in at most four characters."""
    return str(count) if count < 1000 else f"{count // 1000}k"


def lines_of(
    tasks: Sequence[TaskSpec],
    runs: Sequence[GridRun],
    cells: Iterable[GridCell],
    retried: Mapping[tuple[int, str], int] | None = None,
) -> list[GridRow]:
    """The rows of the grid. A group is placed at its first task; tasks of older versions come last. `retried` counts the
    retries of a group by run and name."""
    again = retried or {}
    states: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
    for cell in cells:
        states[cell.run_id, cell.task][cell.state] += cell.count
    planned = {task.name for task in tasks}
    gone = sorted({name for _, name in states} - planned)
    groups = {task.name: task.group for task in tasks} | dict.fromkeys(gone, None)
    members = _members(groups)
    lines: list[GridRow] = []
    for kind, name, chain in _ordered(groups):
        depth, inside = len(chain), " ".join(chain)
        if kind == "group":
            row = [_group_cell(name, run, members[name], states, again.get((run.run_id, name), 0)) for run in runs]
            lines.append(GridRow(name, name.rpartition(".")[2], True, depth, inside, row))
        else:
            row = [_task_cell(name, run, states.get((run.run_id, name)), name in planned) for run in runs]
            group = groups[name]
            label = name.removeprefix(f"{group}.") if group else name
            lines.append(GridRow(name, label, False, depth, inside, row))
    return lines


def chain_of(group: str | None) -> list[str]:
    """The group's name and the names of the groups that contain it, outermost first: `a.b` is inside `a`."""
    parts = group.split(".") if group else []
    return [".".join(parts[: place + 1]) for place in range(len(parts))]


def _members(groups: Mapping[str, str | None]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name, group in groups.items():
        for each in chain_of(group):
            found[each].append(name)
    return found


def _ordered(groups: Mapping[str, str | None]) -> Iterable[tuple[str, str, list[str]]]:
    """Groups and tasks in the order of their first task, each task directly below its group."""
    place = {name: number for number, name in enumerate(groups)}
    first: dict[str, int] = {}
    for name, group in groups.items():
        for each in chain_of(group):
            first.setdefault(each, place[name])
    keyed = [
        ([*((first[each], each) for each in chain_of(group)), (place[name], "")], name)
        for name, group in groups.items()
    ]
    told: set[str] = set()
    for _, name in sorted(keyed):
        chain = chain_of(groups[name])
        for depth, each in enumerate(chain):
            if each not in told:
                told.add(each)
                yield "group", each, chain[:depth]
        yield "task", name, chain


def shown_state(states: States) -> str:
    return next((state for state in PRECEDENCE if states.get(state)), "waiting")


def _words(states: States) -> str:
    return ", ".join(f"{states[state]} {state.replace('_', ' ')}" for state in PRECEDENCE if states.get(state))


def _task_cell(name: str, run: GridRun, states: States | None, is_planned: bool) -> Cell | None:
    if states is None:
        # A task without a row is waiting, if the run contains it. Only an open run can have such tasks.
        if not is_planned or run.finished_at is not None:
            return None
        states = {"waiting": 1}
    count = sum(states.values())
    words = _words(states) if count > 1 else shown_state(states).replace("_", " ")
    return Cell(shown_state(states), f"{name}, run {run.run_id}: {words}", f"/runs/{run.run_id}/tasks/{name}", count)


def _group_cell(
    name: str, run: GridRun, members: Sequence[str], states: Mapping[tuple[int, str], States], retried: int
) -> Cell | None:
    total: Counter[str] = Counter()
    for member in members:
        total.update(states.get((run.run_id, member), {}))
    if not total:
        return None
    text = f"{name}, run {run.run_id}: {_words(total)}"
    if retried:
        text += f"; retried {'once' if retried == 1 else f'{retried} times'}"
    return Cell(shown_state(total), text, None, sum(total.values()), retried)
