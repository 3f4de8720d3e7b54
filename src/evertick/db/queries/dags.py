"""DAGs, their immutable versions, their bundles, files that could not be loaded, and the pages and grids of DAGs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.statements import query, sql

JsonObject = dict[str, object]


@dataclass(frozen=True, slots=True)
class DagRow:
    dag_id: int
    name: str
    paused: bool
    version_id: int | None
    max_active_runs: int | None
    deployment: str
    file: str
    deleted_at: datetime | None
    number: int | None
    spec: JsonObject | None
    created_at: datetime | None
    uses_threads: str | None


@dataclass(frozen=True, slots=True)
class PublishedBundle:
    hash: str
    archive: bytes


@dataclass(frozen=True, slots=True)
class VersionRow:
    name: str
    bundle_hash: str
    file: str
    uses_threads: str | None
    spec: JsonObject


@dataclass(frozen=True, slots=True)
class ListedVersion:
    version_id: int
    number: int
    hash: str
    bundle_hash: str
    task_count: int
    created_at: datetime
    is_current: bool
    commit_hash: str | None
    author: str | None


@dataclass(frozen=True, slots=True)
class VersionOfDag:
    dag: str
    version_id: int
    number: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DagFilter:
    """`tags`: any of them, and `tag` as well. `like`: a LIKE pattern, case-insensitive. `newest`: the state of the newest run, for
    the lists of the UI only."""

    tags: list[str] | None = None
    tag: str | None = None
    like: str | None = None
    paused: bool | None = None
    newest: str | None = None


@dataclass(frozen=True, slots=True)
class PublishedRoute:
    """The queue in which a task waits now, and the queue that its author declared, if any."""

    queue: str
    written: str | None


@dataclass(frozen=True, slots=True)
class BundleRow:
    file: str
    archive: bytes
    uses_threads: str | None


@dataclass(frozen=True, slots=True)
class FileDag:
    deployment: str
    file: str
    name: str


@dataclass(frozen=True, slots=True)
class DagOwner:
    name: str
    deployment: str
    file: str
    hash: str | None
    bundle_hash: str | None


@dataclass(frozen=True, slots=True)
class ImportErrorRow:
    deployment: str
    file: str
    line: int | None
    message: str
    detail: str
    occurred_at: datetime


@query
async def put_bundle(
    conn: AsyncConnection, *, bundle_hash: str, file: str, archive: bytes, uses_threads: str | None
) -> None: ...


@query
async def bundle(conn: AsyncConnection, bundle_hash: str) -> BundleRow | None: ...


@query
async def published_bundle(conn: AsyncConnection, deployment: str, file: str) -> PublishedBundle | None: ...


@query
async def of_bundles(conn: AsyncConnection, hashes: list[str]) -> list[str]:
    """The names of all DAGs that were ever published from this bundle."""


@query
async def find(conn: AsyncConnection, name: str) -> DagRow | None: ...


@query
async def names(conn: AsyncConnection) -> list[str]: ...


@query
async def files(conn: AsyncConnection, deployment: str | None) -> list[FileDag]:
    """The DAGs of each file of a deployment, or of all."""


@query
async def owners(conn: AsyncConnection, *, names: list[str]) -> list[DagOwner]: ...


@query
async def version(conn: AsyncConnection, version_id: int) -> VersionRow | None: ...


@query
async def versions(
    conn: AsyncConnection, *, dag_id: int, limit: int = 10000, before: int = 2**31 - 1
) -> list[ListedVersion]:
    """Newest first, starting before a number."""


@query
async def queues(conn: AsyncConnection, version_id: int | None) -> list[str]:
    """The queue of each task of a version, in task order."""


@query
async def published_route(conn: AsyncConnection, *, dag: str, task: str) -> PublishedRoute | None: ...


@query
async def put_import_error(
    conn: AsyncConnection, *, file: str, line: int | None, message: str, detail: str, deployment: str = "default"
) -> None: ...


@query
async def drop_import_errors(conn: AsyncConnection, deployment: str, *, files: list[str]) -> None: ...


@query
async def import_errors(conn: AsyncConnection) -> list[ImportErrorRow]: ...


@query
async def ids_with_tags(conn: AsyncConnection, *, tags: list[str]) -> list[int]:
    """The DAGs that carry any of these tags."""


@query
async def page(conn: AsyncConnection, wanted: DagFilter, *, after: str, limit: int) -> list[DagRow]: ...


@query
async def version_number(conn: AsyncConnection, *, dag_id: int, number: int) -> JsonObject | None: ...


@query
async def named(conn: AsyncConnection, names: list[str]) -> list[DagRow]:
    """These DAGs, in the order of the given names."""


@query
async def versions_of(conn: AsyncConnection, dag_ids: list[int] | None) -> list[VersionOfDag]: ...


@query
async def kinds(conn: AsyncConnection, version_ids: list[int]) -> dict[int, list[str]]:
    """The task kinds of these versions, in task order."""


@dataclass(frozen=True, slots=True)
class ListedDag:
    dag_id: int
    name: str
    paused: bool
    version: int
    task_count: int
    owner: str | None
    tags: list[str]
    description: str | None
    deployment: str
    file: str


@dataclass(frozen=True, slots=True)
class NewestRun:
    dag_id: int
    run_id: int
    state: str
    created_at: datetime
    fire_at: datetime | None
    started_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class NextFire:
    dag_id: int
    name: str
    spec: JsonObject
    next_due: datetime | None
    paused: bool
    error: str | None


@dataclass(frozen=True, slots=True)
class GridRun:
    run_id: int
    version: int
    kind: str
    fire_at: datetime | None
    created_at: datetime
    state: str
    started_at: datetime | None
    finished_at: datetime | None
    task_count: int


@dataclass(frozen=True, slots=True)
class GridCell:
    """The number of instances of a task of a run in one state."""

    run_id: int
    task: str
    state: str
    count: int
    is_mapped: bool
    started_at: datetime | None
    finished_at: datetime | None
    attempt: int


@query
async def page_of_dags(conn: AsyncConnection, wanted: DagFilter, *, after: str, limit: int) -> list[ListedDag]: ...


@query
async def sorted_page(
    conn: AsyncConnection, wanted: DagFilter, *, by: str, is_down: bool, offset: int, limit: int
) -> list[ListedDag]:
    """`by`: name, next, newest or took. DAGs without a value come last."""


@query
async def newest_runs(conn: AsyncConnection, *, dag_ids: list[int], each: int) -> list[NewestRun]:
    """The newest `each` runs of each DAG, oldest first."""


@query
async def next_fires(conn: AsyncConnection, *, dag_ids: list[int]) -> list[NextFire]: ...


@query
async def grid(conn: AsyncConnection, *, dag_id: int, before: int, limit: int) -> list[GridRun]:
    """Newest first."""


@query
async def cells(conn: AsyncConnection, *, run_ids: list[int], limit: int) -> list[GridCell]: ...


async def group_retries(conn: AsyncConnection, *, run_ids: Sequence[int]) -> dict[tuple[int, str], int]:
    """The number of retries of each group, by run and name; groups without a retry are omitted."""
    cursor = await conn.execute(sql("dags", "group_retries"), {"run_ids": list(run_ids)})
    return {(run_id, name): retried for run_id, name, retried in await cursor.fetchall()}
