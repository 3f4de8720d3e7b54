"""One run: trigger, cancel, delete, notes and outputs.

Repeating a trigger with the same key returns the same run; with other parameters it fails.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping

from psycopg import AsyncConnection

from evertick.db.connect import retry_on_deadlock
from evertick.db.queries import dags, listings, runs
from evertick.db.queries.dags import DagRow
from evertick.db.queries.listings import NewOutput
from evertick.db.queries.runs import Particulars, RunRow, Triggered
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.spec import DagSpec, from_json
from evertick.domain.dags.validation import check_run_params
from evertick.domain.errors import Conflict, NotFound, UserError


async def trigger(
    conn: AsyncConnection,
    *,
    dag: str,
    params: Mapping[str, object],
    actor: str,
    key: str | None = None,
    about: Particulars | None = None,
) -> Triggered:
    """Create a run of the DAG's current version. On a paused DAG it stays queued until the DAG is unpaused."""
    row, spec = await find_dag(conn, dag)
    checked = check_run_params(spec, params)
    made = await retry_on_deadlock(
        lambda: runs.trigger(conn, dag_id=row.dag_id, params=checked, key=key, about=about, actor=actor)
    )
    if made is None:
        raise NotFound(f"DAG {dag!r} was deleted while it was being triggered. Publish it again first.")
    if key is not None and not made.is_new:
        await _refuse_other_params(conn, made.run_id, key, {name: checked[name] for name in params})
    return made


async def _refuse_other_params(conn: AsyncConnection, run_id: int, key: str, given: Mapping[str, object]) -> None:
    """A repeated call must have the same params. A param omitted in either call has the DAG's default, which may have changed."""
    run = await runs.find(conn, run_id)
    if run is not None and (other := [name for name in given if run.params.get(name) != given[name]]):
        raise Conflict(f"Key {key!r} belongs to run {run_id}, whose {other[0]!r} differs: choose another key.")


async def find_dag(conn: AsyncConnection, name: str) -> tuple[DagRow, DagSpec]:
    """The DAG and its current spec, or an error that suggests a similar name."""
    row = await find_dag_row(conn, name)
    return row, from_json(json.dumps(row.spec))


async def find_dag_row(conn: AsyncConnection, name: str) -> DagRow:
    """The DAG, even if its spec cannot be parsed: it must still be possible to pause or delete it."""
    row = await dags.find(conn, name)
    if row is None or row.deleted_at is not None or row.spec is None:
        near = difflib.get_close_matches(name, await dags.names(conn), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else " List DAGs with `evertick dags list`."
        raise NotFound(f"There is no DAG {name!r}.{hint}")
    return row


async def cancel(conn: AsyncConnection, *, run_id: int, actor: str, reason: str | None = None) -> int:
    """The number of running tasks that received a stop request."""
    why = reason or f"canceled by {actor}"
    asked = await retry_on_deadlock(lambda: runs.cancel(conn, run_id=run_id, actor=actor, reason=why))
    if asked is None:
        run = await find_run(conn, run_id)
        raise Conflict(f"Run {run_id} of {run.dag} has already ended ({run.state}); there is nothing to cancel.")
    return asked


async def find_run(conn: AsyncConnection, run_id: int) -> RunRow:
    run = await runs.find(conn, run_id)
    if run is None:
        raise NotFound(f"There is no run {run_id}. List runs with `evertick runs list`.")
    return run


async def delete_run(conn: AsyncConnection, *, run_id: int, actor: str) -> None:
    done = await retry_on_deadlock(lambda: runs.delete(conn, run_id=run_id, actor=actor))
    if done is None:
        raise NotFound(f"There is no run {run_id}. List runs with `evertick runs list`.")
    if done == "open":
        raise Conflict(f"Run {run_id} has not ended: cancel it first.")


LONGEST_NOTE = 1000


async def write_note(conn: AsyncConnection, key: TaskKey, *, content: str | None, actor: str) -> None:
    """For a run as a whole, the key has -1 twice. None removes the note."""
    if content is not None and (len(content) > LONGEST_NOTE or "\0" in content):
        raise UserError(f"A note must have at most {LONGEST_NOTE} characters, and no NUL.")
    done = await retry_on_deadlock(lambda: listings.put_note(conn, **key._asdict(), content=content, actor=actor))
    if not done:
        raise NotFound(f"There is no run {key.run_id}. List runs with `evertick runs list`.")


def of_run(run_id: int) -> TaskKey:
    return TaskKey(run_id, -1, -1)


async def put_output(conn: AsyncConnection, key: TaskKey, new: NewOutput, *, actor: str) -> None:
    """Only for a task that has succeeded: any other could be about to return its own value."""
    name = new.name or "the return value"
    done = await retry_on_deadlock(lambda: listings.put(conn, key, new, actor=actor))
    if done is None:
        raise Conflict("Only the outputs of a succeeded task can be changed: wait for its end, or mark it first.")
    if done == "exists":
        raise Conflict(f"Output {name!r} already exists: change it instead.")
    if done == "missing":
        raise NotFound(f"The task has no output {name!r}.")
