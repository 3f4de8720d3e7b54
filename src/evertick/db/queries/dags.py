"""DAGs, their immutable versions, their bundles, files that could not be loaded, and the pages and grids of DAGs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Jsonb

from evertick.db.statements import all_rows, one_row, one_value, sql

JsonObject = dict[str, object]


JsonList = list[object]


@dataclass(frozen=True, slots=True)
class Published:
    out_dag_id: int
    out_version_id: int
    is_new: bool
    rerouted: int


@dataclass(frozen=True, slots=True)
class DagRow:
    dag_id: int
    name: str
    paused: bool
    version_id: int | None
    max_active_runs: int | None
    file: str
    deleted_at: datetime | None
    number: int | None
    spec: JsonObject | None
    created_at: datetime | None
    uses_threads: str | None


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


@dataclass(frozen=True, slots=True)
class VersionOfDag:
    dag: str
    version_id: int
    number: int
    created_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class DagFilter:
    """`tags`: any of them, and `tag` as well. `like`: a LIKE pattern, case-insensitive."""

    tags: list[str] | None = None
    tag: str | None = None
    like: str | None = None
    paused: bool | None = None


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
    file: str
    name: str


@dataclass(frozen=True, slots=True)
class ImportErrorRow:
    file: str
    line: int | None
    message: str
    detail: str
    occurred_at: datetime


async def publish(
    conn: AsyncConnection, *, dag: JsonObject, seen: list[JsonList], settle: list[JsonObject], actor: str
) -> Published:
    params = {"dag": Jsonb(dag), "seen": Jsonb(seen), "settle": Jsonb(settle), "actor": actor}
    row = await one_row(conn, sql("dags", "publish"), params, Published)
    assert row is not None
    return row


async def put_bundle(
    conn: AsyncConnection, *, bundle_hash: str, file: str, archive: bytes, uses_threads: str | None
) -> None:
    params = {"hash": bundle_hash, "file": file, "archive": archive, "uses_threads": uses_threads}
    await conn.execute(sql("dags", "put_bundle"), params)


async def bundle(conn: AsyncConnection, bundle_hash: str) -> BundleRow | None:
    return await one_row(conn, sql("dags", "bundle"), {"hash": bundle_hash}, BundleRow)


async def of_bundles(conn: AsyncConnection, hashes: Collection[str]) -> list[str]:
    """The names of all DAGs that were ever published from this bundle."""
    cursor = await conn.execute(sql("dags", "of_bundles"), {"hashes": list(hashes)})
    return [cast(str, row[0]) for row in await cursor.fetchall()]


async def pause(
    conn: AsyncConnection,
    *,
    dag_id: int,
    paused: bool,
    seen: list[JsonList],
    settle: list[JsonObject],
    actor: str,
) -> bool:
    """Whether anything changed."""
    params = {
        "dag_id": dag_id,
        "paused": paused,
        "seen": Jsonb(seen),
        "settle": Jsonb(settle),
        "actor": actor,
    }
    return bool(await one_value(conn, sql("dags", "pause"), params))


async def delete(
    conn: AsyncConnection, *, dag_id: int, seen: list[JsonList], settle: list[JsonObject], actor: str
) -> bool:
    params = {"dag_id": dag_id, "seen": Jsonb(seen), "settle": Jsonb(settle), "actor": actor}
    return bool(await one_value(conn, sql("dags", "delete"), params))


async def find(conn: AsyncConnection, name: str) -> DagRow | None:
    return await one_row(conn, sql("dags", "find"), {"name": name}, DagRow)


async def names(conn: AsyncConnection) -> list[str]:
    cursor = await conn.execute(sql("dags", "names_like"))
    return [cast(str, row[0]) for row in await cursor.fetchall()]


async def files(conn: AsyncConnection) -> list[FileDag]:
    return await all_rows(conn, sql("dags", "files"), {}, FileDag)


async def version(conn: AsyncConnection, version_id: int) -> VersionRow | None:
    return await one_row(conn, sql("dags", "version"), {"version_id": version_id}, VersionRow)


async def versions(
    conn: AsyncConnection, *, dag_id: int, limit: int = 10_000, before: int = 2**31 - 1
) -> list[ListedVersion]:
    """Newest first, starting before a number."""
    params = {"dag_id": dag_id, "limit": limit, "before": before}
    return await all_rows(conn, sql("dags", "versions"), params, ListedVersion)


async def queues(conn: AsyncConnection, version_id: int | None) -> list[str]:
    """The queue of each task of a version, in task order."""
    cursor = await conn.execute(sql("dags", "queues"), {"version_id": version_id})
    return [cast(str, row[0]) for row in await cursor.fetchall()]


async def published_route(conn: AsyncConnection, *, dag: str, task: str) -> PublishedRoute | None:
    return await one_row(conn, sql("dags", "published_route"), {"dag": dag, "task": task}, PublishedRoute)


async def put_import_error(conn: AsyncConnection, *, file: str, line: int | None, message: str, detail: str) -> None:
    params = {"file": file, "line": line, "message": message[:4000], "detail": detail[:20000]}
    await conn.execute(sql("dags", "put_import_error"), params)


async def drop_import_error(conn: AsyncConnection, file: str) -> None:
    await conn.execute(sql("dags", "drop_import_error"), {"file": file})


async def import_errors(conn: AsyncConnection) -> list[ImportErrorRow]:
    return await all_rows(conn, sql("dags", "import_errors"), {}, ImportErrorRow)


async def ids_with_tags(conn: AsyncConnection, *, tags: list[str]) -> list[int]:
    """The DAGs that carry any of these tags."""
    cursor = await conn.execute(sql("dags", "ids_with_tags"), {"tags": tags})
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def page(conn: AsyncConnection, wanted: DagFilter, *, after: str, limit: int) -> list[DagRow]:
    params = {**asdict(wanted), "after": after, "limit": limit}
    return await all_rows(conn, sql("dags", "page"), params, DagRow)


async def version_number(conn: AsyncConnection, *, dag_id: int, number: int) -> JsonObject | None:
    params = {"dag_id": dag_id, "number": number}
    return cast("JsonObject | None", await one_value(conn, sql("dags", "version_number"), params))


async def named(conn: AsyncConnection, names: list[str]) -> list[DagRow]:
    """These DAGs, in the order of the given names."""
    rows = await all_rows(conn, sql("dags", "named"), {"names": names, "limit": len(names)}, DagRow)
    found = {row.name: row for row in rows}
    return [found[name] for name in names if name in found]


async def versions_of(conn: AsyncConnection, dag_ids: list[int] | None) -> list[VersionOfDag]:
    return await all_rows(conn, sql("dags", "versions_of"), {"dag_ids": dag_ids}, VersionOfDag)


async def kinds(conn: AsyncConnection, version_ids: list[int]) -> dict[int, list[str]]:
    """The task kinds of these versions, in task order."""
    cursor = await conn.execute(sql("dags", "kinds"), {"version_ids": version_ids})
    return {cast(int, row[0]): cast("list[str]", row[1]) for row in await cursor.fetchall()}


@dataclass(frozen=True, slots=True, kw_only=True)
class DagSelection:
    """`tags`: any of them, and `tag` as well. `like`: a LIKE pattern. `newest`: the state of the newest run."""

    tags: list[str] | None = None
    tag: str | None = None
    like: str | None = None
    paused: bool | None = None
    newest: str | None = None


@dataclass(frozen=True, slots=True)
class ListedDag:
    dag_id: int
    name: str
    paused: bool
    version: int
    task_count: int
    tags: list[str]
    description: str | None
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


async def page_of_dags(conn: AsyncConnection, wanted: DagSelection, *, after: str, limit: int) -> list[ListedDag]:
    params = {**asdict(wanted), "after": after, "limit": limit}
    return await all_rows(conn, sql("dags", "page_of_dags"), params, ListedDag)


async def sorted_page(
    conn: AsyncConnection, wanted: DagSelection, *, by: str, is_down: bool, offset: int, limit: int
) -> list[ListedDag]:
    """`by`: name, next, newest or took. DAGs without a value come last."""
    params = {**asdict(wanted), "by": by, "is_down": is_down, "offset": offset, "limit": limit}
    return await all_rows(conn, sql("dags", "sorted_page"), params, ListedDag)


async def newest_runs(conn: AsyncConnection, *, dag_ids: Sequence[int], each: int) -> list[NewestRun]:
    """The newest `each` runs of each DAG, oldest first."""
    params = {"dag_ids": list(dag_ids), "each": each}
    return await all_rows(conn, sql("dags", "newest_runs"), params, NewestRun)


async def next_fires(conn: AsyncConnection, *, dag_ids: Sequence[int]) -> list[NextFire]:
    return await all_rows(conn, sql("dags", "next_fires"), {"dag_ids": list(dag_ids)}, NextFire)


async def grid(conn: AsyncConnection, *, dag_id: int, before: int, limit: int) -> list[GridRun]:
    """Newest first."""
    params = {"dag_id": dag_id, "before": before, "limit": limit}
    return await all_rows(conn, sql("dags", "grid"), params, GridRun)


async def cells(conn: AsyncConnection, *, run_ids: Sequence[int], limit: int) -> list[GridCell]:
    return await all_rows(conn, sql("dags", "cells"), {"run_ids": list(run_ids), "limit": limit}, GridCell)


async def group_retries(conn: AsyncConnection, *, run_ids: Sequence[int]) -> dict[tuple[int, str], int]:
    """The number of retries of each group, by run and name; groups without a retry are omitted."""
    cursor = await conn.execute(sql("dags", "group_retries"), {"run_ids": list(run_ids)})
    return {(run_id, name): retried for run_id, name, retried in await cursor.fetchall()}
