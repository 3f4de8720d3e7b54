"""Looks at the database under test, past every proxy. While the server is away there is no answer, and that is one."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import AsyncConnection

from evertick.db.function_sets import own_set
from tests.waiting import eventually

Row = tuple[Any, ...]
# What somebody leads: the epoch of each shard.
Led = dict[int, int]

# Everything that must be at rest when nothing is left to do.
_OPEN = """
select (select count(*) from run_status where state in ('queued', 'running')) as runs,
       (select count(*) from lease) as leases, (select count(*) from ready_task) as ready,
       (select count(*) from dispatch) as elsewhere,
       (select count(*) from task_timer) + (select count(*) from retry_queue) as timers,
       (select count(*) from schedule_state
         where next_due < clock() - interval '1 second' and not is_paused and error is null) as due
"""
_OPEN_KINDS = ("runs", "leases", "ready", "elsewhere", "timers", "due")


@dataclass(frozen=True, slots=True, kw_only=True)
class Leader:
    shard: int
    owner: str
    epoch: int
    is_live: bool


class Watcher:
    """One connection, opened again when it broke. Each question is bounded in time."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._conn: AsyncConnection[Row] | None = None

    async def rows(self, query: str, *params: object) -> list[Row] | None:
        """The answer; None while there is no server to ask."""
        try:
            conn = await self._connected()
            cursor = await conn.execute(query, params)
            return await cursor.fetchall() if cursor.description is not None else []
        except (psycopg.OperationalError, psycopg.InterfaceError, OSError):
            await self.close()
            return None

    async def value(self, query: str, *params: object) -> Any:
        found = await self.rows(query, *params)
        return found[0][0] if found else None

    async def must(self, query: str, *params: object, within_seconds: float = 60.0) -> list[Row]:
        """The answer, once there is one."""

        async def answer() -> tuple[list[Row]] | None:
            found = await self.rows(query, *params)
            return None if found is None else (found,)

        ((found),) = await eventually(answer, within_seconds, pause_seconds=0.05)
        rows: list[Row] = found
        return rows

    async def leaders(self) -> list[Leader]:
        """Of every shard that has one."""
        found = await self.rows(
            "select shard, leader, epoch, coalesce(lease_until > clock(), false) from shard where leader is not null order by 1"
        )
        return [
            Leader(shard=shard, owner=owner, epoch=epoch, is_live=is_live)
            for shard, owner, epoch, is_live in found or []
        ]

    async def is_led(self) -> bool:
        """Whether somebody leads each shard."""
        led = "select bool_and(coalesce(lease_until > clock(), false)) from shard where state <> 'closed'"
        return bool(await self.value(led))

    async def open_work(self) -> dict[str, int] | None:
        """How much is not finished yet, by kind."""
        found = await self.rows(_OPEN)
        return dict(zip(_OPEN_KINDS, found[0], strict=True)) if found else None

    async def close(self) -> None:
        conn, self._conn = self._conn, None
        if conn is not None:
            with suppress(psycopg.Error, OSError):
                await conn.close()

    async def _connected(self) -> AsyncConnection[Row]:
        if self._conn is None or self._conn.closed or self._conn.broken:
            self._conn = await AsyncConnection.connect(
                self.url,
                autocommit=True,
                connect_timeout=5,
                application_name="chaos-watcher",
                options=f"-c search_path={own_set().search_path} -c statement_timeout=20s -c lock_timeout=10s",
            )
        return self._conn
