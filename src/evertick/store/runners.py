"""Runners: registration, silence, and the end of one that is gone."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.store.rows import all_rows, one_value
from evertick.store.statements import sql


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRunner:
    session: int
    runner_id: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_started: float
    queues: list[str]
    slots: int


@dataclass(frozen=True, slots=True)
class LiveRunner:
    session: int
    runner_id: str
    host: str
    boot_id: str
    pid_namespace: str
    pid: int
    pid_started: float
    queues: list[str]
    slots: int
    started_at: datetime
    silent_seconds: float


@dataclass(frozen=True, slots=True)
class BusyRunner:
    session: int
    runner_id: str
    host: str
    pid: int
    queues: list[str]
    slots: int
    started_at: datetime
    silent_seconds: float
    busy: int


async def register(conn: AsyncConnection, runner: NewRunner) -> None:
    await conn.execute(sql("runners", "register"), asdict(runner))


async def bury(conn: AsyncConnection, *, session: int, reason: str, infra_retries: int) -> int:
    """How many attempts the runner still held."""
    params = {"session": session, "reason": reason, "infra_retries": infra_retries}
    return cast(int, await one_value(conn, sql("runners", "bury"), params))


async def leave(conn: AsyncConnection, session: int) -> None:
    await conn.execute(sql("runners", "leave"), {"session": session})


async def live(conn: AsyncConnection) -> list[LiveRunner]:
    return await all_rows(conn, sql("runners", "live"), {}, LiveRunner)


async def list_busy(conn: AsyncConnection, *, limit: int = 1000) -> list[BusyRunner]:
    return await all_rows(conn, sql("runners", "list_busy"), {"limit": limit}, BusyRunner)


async def listen_for_silence(conn: AsyncConnection, *, elapsed: float, lost_after: float) -> list[int]:
    """Sessions that were silent for longer than `lost_after` seconds of our own watching."""
    params = {"elapsed": elapsed, "lost_after": lost_after}
    cursor = await conn.execute(sql("runners", "listen_for_silence"), params)
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def unburied(conn: AsyncConnection) -> list[int]:
    cursor = await conn.execute(sql("runners", "unburied"))
    return [cast(int, row[0]) for row in await cursor.fetchall()]
