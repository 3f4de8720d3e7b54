"""One run: trigger, cancel, delete, notes and outputs.

Repeating a trigger with the same key returns the same run; with other parameters it fails.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

from evertick.db.queries import dags, runs
from evertick.db.queries.dags import DagRow
from evertick.db.queries.runs import RunRow
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.spec import DagSpec, from_json
from evertick.domain.dags.validation import check_run_params, check_run_type
from evertick.domain.errors import Conflict, NotFound, UserError
from evertick.domain.schedules.partitions import check_key
from evertick.domain.schedules.run_partitions import is_partitioned, partition_date
from evertick.engine.verbs import did_you_mean, require, unknown


@dataclass(frozen=True, slots=True)
class Triggered:
    """`defers`: some of its first tasks wait for something outside, and the leader has to check them."""

    run_id: int
    is_new: bool
    defers: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Particulars:
    """The properties of a run besides its parameters. `key`: an idempotency key, the same key is the same run; `fire_at`: the
    date that the run is for, of which a DAG has one triggered or scheduled run; `start_at`: it begins then, not now;
    `unique_for`: for so long the same key, or without one the same parameters, are the same run, and not for ever; `partition`:
    the key of the one that it is for, which must be one of the DAG's schedule, and the instant that it stands for."""

    key: str | None = None
    fire_at: datetime | None = None
    note: str | None = None
    start_at: datetime | None = None
    unique_for: timedelta | None = None
    partition: str | None = None
    partition_date: datetime | None = None


@sql_function
async def clear_run_partitions(conn: AsyncConnection, *, run_ids: list[int], actor: Actor) -> None:
    """They are for no partition any more."""


@sql_function
async def trigger_run(
    conn: AsyncConnection,
    *,
    dag_id: int,
    params: dict[str, object],
    actor: Actor,
    key: str | None = None,
    fire_at: datetime | None = None,
    note: str | None = None,
    start_at: datetime | None = None,
    unique_for: timedelta | None = None,
    partition: str | None = None,
    partition_date: datetime | None = None,
) -> Triggered | None:
    """See `Particulars`. None: the DAG was deleted."""


async def trigger(
    conn: AsyncConnection,
    *,
    dag: str,
    params: Mapping[str, object],
    actor: Actor,
    key: str | None = None,
    fire_at: datetime | None = None,
    about: Particulars | None = None,
    accepts_unknown: bool = False,
) -> Triggered:
    """Create a run of the DAG's current version. On a paused DAG it stays queued until the DAG is unpaused.

    `about`: instead of a key and a date; the caller decides what an existing run means. `accepts_unknown`: tasks also
    receive parameters that the DAG does not declare."""
    row, spec = await find_dag(conn, dag)
    check_run_type(spec, "manual")
    checked = check_run_params(spec, params, accepts_unknown=accepts_unknown)
    wanted = with_partition(spec, about or Particulars(key=key, fire_at=fire_at))
    if wanted.unique_for is not None:
        _check_period(wanted)
    made = await trigger_run(conn, dag_id=row.dag_id, params=dict(checked), actor=actor, **asdict(wanted))
    if made is None:
        raise NotFound(f"DAG {dag!r} was deleted while it was being triggered. Publish it again first.")
    if not made.is_new and about is None:
        await refuse_another(conn, made.run_id, wanted, {name: checked[name] for name in params})
    return made


def with_partition(spec: DagSpec, about: Particulars) -> Particulars:
    """With the instant that its partition stands for; an error if the DAG has no such partition."""
    if about.partition is None:
        return about
    check_key(about.partition)
    found = [each.spec for each in spec.schedules if is_partitioned(each.spec)]
    return replace(about, partition_date=partition_date(found[0], about.partition)) if found else about


LONGEST_PERIOD = timedelta(days=3653)


def _check_period(wanted: Particulars) -> None:
    if wanted.fire_at is not None:
        raise UserError("unique_for and fire_at exclude each other: a DAG has one run for each date. Leave one out.")
    if wanted.unique_for is not None and not timedelta(0) < wanted.unique_for <= LONGEST_PERIOD:
        raise UserError(f"unique_for is {wanted.unique_for}: it must be more than 0 and at most ten years.")


async def refuse_another(conn: AsyncConnection, run_id: int, wanted: Particulars, given: Mapping[str, object]) -> None:
    """A repeated call must have the same date and params. A param omitted in either call has the DAG's default, which may have
    changed."""
    run = await runs.find(conn, run_id)
    if run is None:
        return
    key, fire_at = wanted.key, wanted.fire_at
    if key is None or run.key != key:
        raise Conflict(
            f"DAG {run.dag!r} already has run {run.run_id} for {fire_at}: clear that run to run it again, or choose another date."
        )
    if other := [name for name in given if run.params.get(name) != given[name]]:
        raise Conflict(f"Key {key!r} belongs to run {run.run_id}, whose {other[0]!r} differs: choose another key.")
    if run.fire_at != fire_at:
        raise Conflict(f"Key {key!r} belongs to run {run.run_id}, which is for another date: choose another key.")


async def find_dag(conn: AsyncConnection, name: str) -> tuple[DagRow, DagSpec]:
    """The DAG and its current spec, or an error that suggests a similar name."""
    row = await find_dag_row(conn, name)
    return row, from_json(json.dumps(row.spec))


async def find_dag_row(conn: AsyncConnection, name: str) -> DagRow:
    """The DAG, even if its spec cannot be parsed: it must still be possible to pause or delete it."""
    row = await dags.find(conn, name)
    if row is None or row.deleted_at is not None or row.spec is None:
        hint = did_you_mean(name, await dags.names(conn), "List DAGs with `evertick dags list`.")
        raise NotFound(f"There is no DAG {name!r}. {hint}")
    return row


@sql_function
async def cancel_run(conn: AsyncConnection, *, run_id: int, actor: Actor, reason: str) -> int | None:
    """The number of tasks with a stop request, or None if the run is not open."""


async def cancel(conn: AsyncConnection, *, run_id: int, actor: Actor, reason: str | None = None) -> int:
    """The number of running tasks that received a stop request."""
    why = reason or f"canceled by {actor.name}"
    asked = await cancel_run(conn, run_id=run_id, actor=actor, reason=why)
    if asked is None:
        run = await find_run(conn, run_id)
        raise Conflict(f"Run {run_id} of {run.dag} has already ended ({run.state}); there is nothing to cancel.")
    return asked


async def find_run(conn: AsyncConnection, run_id: int) -> RunRow:
    return require(await runs.find(conn, run_id), "run", run_id)


@sql_function
async def _delete_run(conn: AsyncConnection, *, run_id: int, actor: Actor) -> str | None:
    """'deleted', 'open', or None: there is no such run."""


async def delete_run(conn: AsyncConnection, *, run_id: int, actor: Actor) -> None:
    if require(await _delete_run(conn, run_id=run_id, actor=actor), "run", run_id) == "open":
        raise Conflict(f"Run {run_id} has not ended: cancel it first.")


LONGEST_NOTE = 1000


@sql_function
async def put_note(conn: AsyncConnection, key: TaskKey, *, content: str | None, actor: Actor) -> bool:
    """Whether the run exists."""


async def write_note(conn: AsyncConnection, key: TaskKey, *, content: str | None, actor: Actor) -> None:
    """For a run as a whole, the key has -1 twice. None removes the note."""
    if content is not None and (len(content) > LONGEST_NOTE or "\0" in content):
        raise UserError(f"A note must have at most {LONGEST_NOTE} characters, and no NUL.")
    if not await put_note(conn, key, content=content, actor=actor):
        raise unknown("run", key.run_id)


def of_run(run_id: int) -> TaskKey:
    return TaskKey(run_id, -1, -1)


@dataclass(frozen=True, slots=True, kw_only=True)
class NewOutput:
    """`name` None: replaces the task's return value. `is_removed`: deleted. `must`: 'new' or 'old'."""

    name: str | None
    must: str
    value: object = None
    is_removed: bool = False


@sql_function
async def _put_output(
    conn: AsyncConnection, key: TaskKey, *, name: str | None, value: Jsonb | None, must: str, actor: Actor
) -> str | None:
    """'done', 'exists', 'missing', or None: there is no such task, or it has not succeeded."""


async def put_output(conn: AsyncConnection, key: TaskKey, new: NewOutput, *, actor: Actor) -> None:
    """Only for a task that has succeeded: any other could be about to return its own value."""
    name = new.name or "the return value"
    value = None if new.is_removed else Jsonb(new.value)
    done = await _put_output(conn, key, name=new.name, value=value, must=new.must, actor=actor)
    if done is None:
        raise Conflict("Only the outputs of a succeeded task can be changed: wait for its end, or mark it first.")
    if done == "exists":
        raise Conflict(f"Output {name!r} already exists: change it instead.")
    if done == "missing":
        raise NotFound(f"The task has no output {name!r}.")
