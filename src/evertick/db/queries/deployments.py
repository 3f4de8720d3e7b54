"""Deployments, their versions, and archives that are being uploaded."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class DeploymentRow:
    """`version` is 0 for a folder, which has none."""

    name: str
    kind: str
    version: int
    source: JsonObject | None
    published_commit: str | None
    problem: str | None
    created_at: datetime
    deleted_at: datetime | None
    dag_count: int


@dataclass(frozen=True, slots=True)
class FailedDeployment:
    name: str
    problem: str


@dataclass(frozen=True, slots=True)
class DeploymentVersionRow:
    number: int
    content_hash: str | None
    commit_hash: str | None
    author: str | None
    message: str | None
    restores: int | None
    deployed_by: str
    deployed_at: datetime
    is_current: bool
    dag_count: int
    is_complete: bool


@dataclass(frozen=True, slots=True)
class DeployedDagRow:
    name: str
    number: int
    file: str
    bundle_hash: str
    spec: JsonObject


@dataclass(frozen=True, slots=True)
class DagChange:
    """The version of a DAG before and after. None: the deployment does not have it."""

    name: str
    before: int | None
    after: int | None


@query
async def find(conn: AsyncConnection, name: str) -> DeploymentRow | None: ...


@query
async def page(conn: AsyncConnection, *, after: str, limit: int) -> list[DeploymentRow]: ...


@query
async def failed(conn: AsyncConnection) -> list[FailedDeployment]: ...


@query
async def versions(
    conn: AsyncConnection, name: str, *, before: int = 2**31 - 1, limit: int = 10000
) -> list[DeploymentVersionRow]: ...


@query
async def dags_of(conn: AsyncConnection, name: str, *, number: int) -> list[DeployedDagRow]: ...


@query
async def changes(conn: AsyncConnection, name: str, *, old: int, new: int) -> list[DagChange]: ...


@query
async def received(conn: AsyncConnection, *, hash: str, owner: str) -> int: ...


@query
async def kept_bytes(conn: AsyncConnection, *, hash: str, owner: str) -> int: ...


@query
async def pieces(conn: AsyncConnection, *, hash: str, owner: str) -> list[bytes]: ...
