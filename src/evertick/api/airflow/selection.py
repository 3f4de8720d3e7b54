"""Selection of tasks for a change: by name, with upstream and downstream tasks, in one run or also in past and future runs."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.api.airflow.labels import RUN_STATES
from evertick.db.queries import dags, listings, run_lists
from evertick.db.queries.listings import ListedTask
from evertick.db.queries.run_lists import ListedRun, PageRequest, RunFilter, between_instants
from evertick.domain.dags.graph import cleared_with
from evertick.domain.dags.spec import DagSpec, from_json
from evertick.domain.errors import NotFound, UserError

# The maximum number of runs that one request may change.
MOST_RUNS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """`names` None selects all tasks. A name with a map index selects that instance only."""

    names: Sequence[tuple[str, int | None]] | None = None
    with_upstream: bool = False
    with_downstream: bool = False
    with_setups: bool = False


async def spec_of_version(conn: AsyncConnection, version_id: int) -> DagSpec:
    version = await dags.version(conn, version_id)
    if version is None:
        raise NotFound("This version of the DAG was pruned.")
    return from_json(json.dumps(version.spec))


async def choose(conn: AsyncConnection, run: ListedRun, choice: Choice, *, is_strict: bool = True) -> list[ListedTask]:
    """The selected tasks of one run. With `is_strict`, a task that the run does not have is an error."""
    spec = await spec_of_version(conn, run.version_id)
    place = {task.name: idx for idx, task in enumerate(spec.tasks)}
    if choice.names is None:
        return await listings.tasks_of(conn, run_id=run.run_id, idxs=range(len(spec.tasks)))
    for name, _ in choice.names:
        if name not in place and is_strict:
            raise NotFound(f"Task with id {name} was not found in run {run.text_id}")
    named = {place[name] for name, _ in choice.names if name in place}
    wider = related(spec, named, up=choice.with_upstream, down=choice.with_downstream)
    if choice.with_setups:
        wider |= cleared_with(spec, named | wider)
    whole = {place[name] for name, at in choice.names if at is None and name in place} | wider
    single = {(place[name], at) for name, at in choice.names if at is not None and name in place}
    rows = await listings.tasks_of(conn, run_id=run.run_id, idxs=named | whole)
    return [row for row in rows if row.idx in whole or (row.idx, row.map_index) in single]


def related(spec: DagSpec, idxs: Collection[int], *, up: bool, down: bool) -> set[int]:
    """The upstream (`up`) and downstream (`down`) tasks of these tasks, without the tasks themselves."""
    found: set[int] = set()
    if down:
        found |= _reached(idxs, [(first, second) for first, second in sorted(spec.edges)])
    if up:
        found |= _reached(idxs, [(second, first) for first, second in sorted(spec.edges, key=lambda e: -e[1])])
    return found - set(idxs)


def _reached(idxs: Collection[int], edges: Sequence[tuple[int, int]]) -> set[int]:
    """The tasks reachable along the edges. Tasks are in topological order, so one pass over the edges is enough."""
    found = set(idxs)
    for source, target in edges:
        if source in found:
            found.add(target)
    return found


async def runs_between(
    conn: AsyncConnection, dag_id: int, first: datetime | None, last: datetime | None
) -> list[ListedRun]:
    """The runs of a DAG with a logical date in the range; a missing end is unbounded."""
    wanted = RunFilter(dag_id=dag_id, fire=between_instants(first, None, last, None), names=RUN_STATES)
    found, _ = await run_lists.list_runs(conn, wanted, PageRequest(limit=MOST_RUNS + 1, is_counted=False))
    if len(found) > MOST_RUNS:
        raise UserError(f"The request selects more than {MOST_RUNS} runs. Narrow it with start_date and end_date.")
    return found


async def runs_around(conn: AsyncConnection, run: ListedRun, *, past: bool, future: bool) -> list[ListedRun]:
    """The run, and the runs of its DAG with earlier or later logical dates."""
    if not past and not future:
        return [run]
    if run.fire_at is None:
        raise UserError("Cannot use include_past or include_future with a run that has no logical_date.")
    return await runs_between(conn, run.dag_id, None if past else run.fire_at, None if future else run.fire_at)
