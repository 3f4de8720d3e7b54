"""Assets: their producers, their consumers, and the runs started after updates."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from psycopg import AsyncConnection
from psycopg.types.range import Range

from evertick.db.queries.run_lists import PageRequest, read_page
from evertick.db.statements import query, sql

MOST_ASSETS = 100_000

# The asset, and the run that updated it or the number of an external update.
Source = tuple[str, int | None, int | None]


@dataclass(frozen=True, slots=True)
class AssetRow:
    name: str
    since: datetime
    uri: str
    asset_group: str
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Producer:
    asset: str
    dag: str
    task: str
    since: datetime


@dataclass(frozen=True, slots=True)
class Consumer:
    """`updated_at`: when it was updated since the DAG's last run; the DAG now waits for its other dependencies."""

    asset: str
    dag: str
    since: datetime
    updated_at: datetime | None


@dataclass(frozen=True, slots=True)
class Asset:
    """An asset with the tasks that update it and the DAGs that wait for it."""

    name: str
    since: datetime
    producers: list[Producer]
    consumers: list[Consumer]
    uri: str
    group: str
    extra: dict[str, Any]


@dataclass(frozen=True, slots=True)
class AssetTrigger:
    """The trigger of a run: another run, or an external update (`update_id`), whose `extra` is missing once it is pruned."""

    asset: str
    occurred_at: datetime
    source_run_id: int | None
    source_dag: str | None
    source_text_id: str | None
    update_id: int | None
    extra: dict[str, Any] | None
    partition_key: str | None


@dataclass(frozen=True, slots=True)
class ListedUpdate:
    """An update by a task of a run, or an external update, which has an `update_id` and `extra` but no run."""

    asset: str
    update_id: int | None
    run_id: int | None
    dag: str | None
    text_id: str | None
    task: str | None
    map_index: int
    occurred_at: datetime
    extra: dict[str, Any] | None
    partition_key: str | None

    @property
    def source(self) -> Source:
        return self.asset, self.run_id, self.update_id


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateFilter:
    """A filter that is None does not apply."""

    dag_ids: list[int] | None = None
    assets: list[str] | None = None
    dag: str | None = None
    task: str | None = None
    text_id: str | None = None
    map_index: int | None = None
    like: list[str] | None = None
    heads: list[str] | None = None
    occurred: Range[datetime] | None = None
    partition: str | None = None


@dataclass(frozen=True, slots=True)
class Follower:
    """A run that was started after an update."""

    asset: str
    source_run_id: int | None
    update_id: int | None
    dag: str
    text_id: str
    fire_at: datetime | None
    started_at: datetime
    finished_at: datetime | None
    state: str


async def list_updates(
    conn: AsyncConnection, wanted: UpdateFilter, asked: PageRequest
) -> tuple[list[ListedUpdate], int]:
    """Oldest first by default."""
    never_null = frozenset({"map_index"})
    return await read_page(conn, sql("assets", "updates"), asdict(wanted), asked, ListedUpdate, never_null=never_null)


@query
async def followers(
    conn: AsyncConnection, *, assets: list[str], run_ids: list[int], update_ids: list[int], dag_ids: list[int] | None
) -> list[Follower]: ...


async def followers_of(
    conn: AsyncConnection, updates: list[ListedUpdate], dag_ids: list[int] | None
) -> dict[Source, list[Follower]]:
    """The runs that were started after each update, of these DAGs; None for all."""
    found: dict[Source, list[Follower]] = {}
    for each in await followers(
        conn,
        assets=sorted({each.asset for each in updates}),
        run_ids=sorted({each.run_id for each in updates if each.run_id is not None}),
        update_ids=sorted({each.update_id for each in updates if each.update_id is not None}),
        dag_ids=dag_ids,
    ):
        found.setdefault((each.asset, each.source_run_id, each.update_id), []).append(each)
    return found


@query
async def is_known(conn: AsyncConnection, asset: str) -> bool: ...


async def list_whole(conn: AsyncConnection) -> list[Asset]:
    """All assets by name, each with its producers and consumers."""
    return await _whole(conn, await list_assets(conn), None)


async def page(conn: AsyncConnection, *, like: str | None, after: str, limit: int) -> list[Asset]:
    """One page of assets after a name, with their producers and consumers."""
    found = await list_page(conn, like=like, after=after, limit=limit)
    return await _whole(conn, found, [row.name for row in found])


async def _whole(conn: AsyncConnection, found: list[AssetRow], names: list[str] | None) -> list[Asset]:
    makers: dict[str, list[Producer]] = {}
    takers: dict[str, list[Consumer]] = {}
    for maker in await producers(conn, names):
        makers.setdefault(maker.asset, []).append(maker)
    for taker in await consumers(conn, names):
        takers.setdefault(taker.asset, []).append(taker)
    return [
        Asset(
            row.name, row.since, makers.get(row.name, []), takers.get(row.name, []), row.uri, row.asset_group, row.extra
        )
        for row in found
    ]


@query
async def list_page(conn: AsyncConnection, *, like: str | None, after: str, limit: int) -> list[AssetRow]: ...


@query
async def list_assets(conn: AsyncConnection, *, limit: int = MOST_ASSETS) -> list[AssetRow]: ...


@query
async def partitions(conn: AsyncConnection, asset: str) -> dict[str, Any] | None: ...


@query
async def producers(conn: AsyncConnection, names: list[str] | None = None) -> list[Producer]: ...


@query
async def consumers(conn: AsyncConnection, names: list[str] | None = None) -> list[Consumer]: ...


@query
async def causes(conn: AsyncConnection, run_id: int) -> list[AssetTrigger]: ...


@dataclass(frozen=True, slots=True)
class UnmappedUpdate:
    """An update of a partition of an asset, and a schedule that waits for such updates. `spec` as it is stored."""

    arrival_id: int
    schedule_id: int
    version: int
    spec: str
    asset: str
    key: str
    source_date: datetime | None


@dataclass(frozen=True, slots=True)
class PendingUpdate:
    """An update that counts for a partition of a schedule's runs, which is not complete yet."""

    schedule_id: int
    key: str
    asset: str
    source_key: str
    source_date: datetime | None


@dataclass(frozen=True, slots=True)
class RunPartition:
    """`date`: the instant that the key stands for."""

    key: str
    date: datetime | None


@query
async def partition_of_run(conn: AsyncConnection, run_id: int) -> RunPartition | None: ...


@dataclass(frozen=True, slots=True)
class AssetPartition:
    """A partition with its last update, by a run or from outside."""

    key: str
    updated_at: datetime
    updated_by: str
    run_id: int | None


@query
async def partitions_of_asset(
    conn: AsyncConnection, *, asset: str, before: str | None, limit: int
) -> list[AssetPartition]: ...


@query
async def arrivals(conn: AsyncConnection, *, limit: int) -> list[UnmappedUpdate]: ...


@query
async def pending(conn: AsyncConnection, *, schedule_ids: list[int], keys: list[str]) -> list[PendingUpdate]: ...
