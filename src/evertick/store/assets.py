"""Assets: what updates them, what waits for them, and which runs came after."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.range import Range

from evertick.store.listing import Asked, read_page
from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql

MOST_ASSETS = 100_000


@dataclass(frozen=True, slots=True)
class AssetRow:
    name: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Producer:
    asset: str
    dag: str
    task: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Consumer:
    """`heard_at`: it was updated since the DAG's last run, which now waits for others."""

    asset: str
    dag: str
    since: datetime
    heard_at: datetime | None


@dataclass(frozen=True, slots=True)
class Cause:
    asset: str
    occurred_at: datetime
    source_run_id: int
    source_dag: str | None
    source_text_id: str | None


@dataclass(frozen=True, slots=True)
class ListedUpdate:
    asset: str
    run_id: int
    dag: str
    text_id: str
    task: str
    map_index: int
    finished_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFilter:
    """What is None is not asked."""

    dag_ids: list[int] | None = None
    assets: list[str] | None = None
    dag: str | None = None
    task: str | None = None
    text_id: str | None = None
    map_index: int | None = None
    like: list[str] | None = None
    heads: list[str] | None = None
    occurred: Range[datetime] | None = None


@dataclass(frozen=True, slots=True)
class Follower:
    """A run that was started after an update."""

    asset: str
    source_run_id: int
    dag: str
    text_id: str
    fire_at: datetime | None
    started_at: datetime
    finished_at: datetime | None
    state: str


async def list_updates(conn: AsyncConnection, wanted: UpdateFilter, asked: Asked) -> tuple[list[ListedUpdate], int]:
    """Oldest first unless asked otherwise."""
    return await read_page(conn, sql("assets", "updates"), asdict(wanted), asked, ListedUpdate)


async def followers(
    conn: AsyncConnection, updates: list[ListedUpdate], dag_ids: list[int] | None
) -> dict[tuple[str, int], list[Follower]]:
    """The runs that were started after each, of these DAGs; None for all."""
    params = {
        "assets": sorted({each.asset for each in updates}),
        "run_ids": sorted({each.run_id for each in updates}),
        "dag_ids": dag_ids,
    }
    found: dict[tuple[str, int], list[Follower]] = {}
    for each in await all_rows(conn, sql("assets", "followers"), params, Follower):
        found.setdefault((each.asset, each.source_run_id), []).append(each)
    return found


async def unhear(
    conn: AsyncConnection, *, dag_ids: list[int] | None, asset: str | None, before: datetime | None, actor: str
) -> int:
    params = {"dag_ids": dag_ids, "asset": asset, "before": before, "actor": actor}
    return cast(int, await one_value(conn, sql("assets", "unhear"), params))


async def list_assets(conn: AsyncConnection) -> list[AssetRow]:
    return await all_rows(conn, sql("assets", "list"), {"limit": MOST_ASSETS}, AssetRow)


async def producers(conn: AsyncConnection) -> list[Producer]:
    return await all_rows(conn, sql("assets", "producers"), {}, Producer)


async def consumers(conn: AsyncConnection) -> list[Consumer]:
    return await all_rows(conn, sql("assets", "consumers"), {}, Consumer)


async def causes(conn: AsyncConnection, run_id: int) -> list[Cause]:
    return await all_rows(conn, sql("assets", "causes"), {"run_id": run_id}, Cause)
