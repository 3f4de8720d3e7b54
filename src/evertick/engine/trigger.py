"""trigger: starts a run now. Repeating a key returns the same run; with other parameters it fails."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping

from psycopg import AsyncConnection

from evertick.domain.dag import DagSpec, from_json
from evertick.domain.dag_rules import check_run_params
from evertick.domain.errors import Conflict, NotFound
from evertick.store import dags, runs
from evertick.store.dags import DagRow
from evertick.store.db import retry_on_deadlock
from evertick.store.runs import Particulars, Triggered


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
