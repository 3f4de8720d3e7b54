"""Versions of whole deployments: roll back to one, delete all, and the archives that become one."""

from __future__ import annotations

import json
from dataclasses import dataclass

import psycopg
from psycopg import AsyncConnection

from evertick.db.queries import dags, deployments
from evertick.db.queries.deployments import DeploymentVersionRow
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.dags.spec import from_json
from evertick.domain.deployments import DeploymentChange
from evertick.domain.errors import Conflict, NotFound
from evertick.domain.routing import Routing
from evertick.engine.fire_schedules import JsonObject, plan_end
from evertick.engine.publish import DEPLOYMENT_CHANGED, PublishedDag, publish_all, refusal
from evertick.engine.schedules import read_snapshot, until_unmoved


@sql_function
async def put_upload_piece(conn: AsyncConnection, *, hash: str, owner: str, start: int, content: bytes) -> int:
    """Where the piece ends."""


@sql_function
async def delete_upload(conn: AsyncConnection, *, hash: str, owner: str) -> None: ...


@sql_function
async def note_deployment(
    conn: AsyncConnection, *, name: str, kind: str, source: JsonObject, problem: str | None
) -> None: ...


@sql_function(retries=False)
async def delete_deployment(
    conn: AsyncConnection, *, name: str, expected: int, seen: JsonObject, settle: list[JsonObject], actor: Actor
) -> list[str] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Restored:
    version: int
    restores: int
    dags: list[str]
    retired: list[str]


async def roll_back(
    conn: AsyncConnection, name: str, *, number: int | None, actor: Actor, routing: Routing
) -> Restored:
    """Publish the DAGs of an earlier version again. The deployment gets a new version, so that its number never decreases."""
    listed = await deployments.versions(conn, name)
    wanted = _wanted(name, number, listed)
    if not wanted.is_complete:
        raise NotFound(f"Version {wanted.number} of deployment {name!r} cannot be restored: parts of it were pruned.")
    given = [
        PublishedDag(spec=from_json(json.dumps(row.spec)), file=row.file, bundle_hash=row.bundle_hash)
        for row in await deployments.dags_of(conn, name, number=wanted.number)
    ]
    names = {each.spec.name for each in given}
    retired = sorted(row.name for row in await dags.files(conn, name) if row.name not in names)
    change = DeploymentChange(
        name=name,
        expected=next(each.number for each in listed if each.is_current),
        is_whole=True,
        content_hash=wanted.content_hash,
        commit_hash=wanted.commit_hash,
        author=wanted.author,
        message=wanted.message,
        restores=wanted.number,
    )
    done = await publish_all(conn, change, given, retired=retired, actor=actor, routing=routing)
    if not done.is_new:
        raise Conflict(f"Deployment {name!r} has the DAGs of version {wanted.number} already.")
    return Restored(version=done.version, restores=wanted.number, dags=sorted(names), retired=retired)


async def delete(conn: AsyncConnection, name: str, *, expected: int, actor: Actor) -> list[str] | None:
    """Retire all DAGs of a deployment, which may be at version `expected` only. Returns them; None: it is deleted already."""

    async def once() -> list[str] | None:
        seen, settle = dict[str, object](), list[JsonObject]()
        for row in await dags.files(conn, name):
            before = await read_snapshot(conn, dag=row.name, plan=plan_end)
            seen[row.name], settle = before.seen, [*settle, *before.settle]
        return await delete_deployment(conn, name=name, expected=expected, seen=seen, settle=settle, actor=actor)

    try:
        return await until_unmoved(once)
    except psycopg.Error as error:
        if error.sqlstate != DEPLOYMENT_CHANGED:
            raise
        raise await refusal(conn, name, expected) from None


def _wanted(name: str, number: int | None, listed: list[DeploymentVersionRow]) -> DeploymentVersionRow:
    """A version by its number; without one, the version before the current."""
    if not listed:
        raise Conflict(
            f"Deployment {name!r} has no versions: it is a folder. Roll back its DAGs with `evertick dags rollback`."
        )
    if number is None:
        earlier = [each for each in listed if not each.is_current and each.dag_count]
        if not earlier:
            raise NotFound(f"Deployment {name!r} has only version {listed[0].number}.")
        return earlier[0]
    found = next((each for each in listed if each.number == number), None)
    if found is None:
        known = ", ".join(str(each.number) for each in listed[:10])
        raise NotFound(f"Deployment {name!r} has no version {number}; it has: {known}. Old versions are pruned.")
    if not found.dag_count:
        raise Conflict(f"Version {number} has no DAGs: deployment {name!r} was deleted. Choose another one.")
    if found.is_current:
        raise Conflict(f"Deployment {name!r} is already at version {number}.")
    return found
