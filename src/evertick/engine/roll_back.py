"""roll back: makes an earlier version of a DAG the current one again, with its spec, its code and its schedules.

Open runs keep their version; new runs use this one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from psycopg import AsyncConnection

from evertick.domain.dag import from_json
from evertick.domain.errors import Conflict, NotFound
from evertick.domain.routing import Routing
from evertick.engine.publish import publish
from evertick.engine.trigger import find_dag_row
from evertick.store import dags
from evertick.store.dags import ListedVersion


@dataclass(frozen=True, slots=True, kw_only=True)
class RolledBack:
    before: int
    now: int
    file: str


async def find_version(conn: AsyncConnection, dag: str, number: int | None) -> ListedVersion:
    """A version by its number; without one, the version before the current."""
    row = await find_dag_row(conn, dag)
    listed = await dags.versions(conn, dag_id=row.dag_id)
    if number is None:
        earlier = [each for each in listed if each.number < (row.number or 0)]
        if not earlier:
            raise NotFound(f"DAG {dag!r} has no version before {row.number}.")
        return earlier[0]
    for each in listed:
        if each.number == number:
            return each
    known = ", ".join(str(each.number) for each in listed[:10])
    raise NotFound(f"DAG {dag!r} has no version {number}; it has: {known}. Old versions are pruned.")


async def roll_back(conn: AsyncConnection, *, dag: str, number: int | None, actor: str, routing: Routing) -> RolledBack:
    row = await find_dag_row(conn, dag)
    wanted = await find_version(conn, dag, number)
    if wanted.is_current:
        raise Conflict(f"DAG {dag!r} is already at version {wanted.number}.")
    found = await dags.version(conn, wanted.version_id)
    if found is None:
        raise NotFound(f"Version {wanted.number} of DAG {dag!r} was pruned just now.")
    spec = from_json(json.dumps(found.spec))
    await publish(conn, spec=spec, file=row.file, bundle_hash=found.bundle_hash, actor=actor, routing=routing)
    return RolledBack(before=row.number or 0, now=wanted.number, file=row.file)
