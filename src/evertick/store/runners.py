"""Runners: registration, heartbeat timeouts, and the cleanup after one that is gone."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection

from evertick.store.rows import all_rows, one_row, one_value
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
    match: list[str] = field(default_factory=list)
    uid: int = 0
    name: str | None = None
    version: str = ""
    request: str | None = None
    lost_after_seconds: float = 0.0
    executor: str = "local"


@dataclass(frozen=True, slots=True)
class LiveRunner:
    session: int
    runner_id: str
    host: str
    boot_id: str
    pid_namespace: str
    uid: int
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
    name: str | None
    version: str
    host: str
    pid: int
    queues: list[str]
    match: list[str]
    slots: int
    request: str | None
    started_at: datetime
    beat_at: datetime
    silent_seconds: float
    busy: int
    executor: str

    @property
    def is_agent(self) -> bool:
        """It represents one remote attempt, and serves no queue."""
        return not self.queues


@dataclass(frozen=True, slots=True)
class AgentsOf:
    """The agents of an executor: there may be thousands, one for each attempt, so they are counted and not listed."""

    executor: str
    running: int
    silent: int


@dataclass(frozen=True, slots=True)
class Reaped:
    """How many attempts were taken from a runner (None: it is alive), and how many could not be moved and were quarantined."""

    reaped: int | None
    refused: int


async def register(conn: AsyncConnection, runner: NewRunner) -> None:
    await conn.execute(sql("runners", "register"), asdict(runner))


async def ask_of(conn: AsyncConnection, *, sessions: list[int], request: str | None, actor: str) -> list[int]:
    """The sessions that had no such request before."""
    params = {"sessions": sessions, "request": request, "actor": actor}
    cursor = await conn.execute(sql("runners", "ask_of"), params)
    return [cast(int, row[0]) for row in await cursor.fetchall()]


async def bury(conn: AsyncConnection, *, session: int, reason: str, infra_retries: int) -> int:
    """The number of attempts that the runner still held."""
    params = {"session": session, "reason": reason, "infra_retries": infra_retries}
    return cast(int, await one_value(conn, sql("runners", "bury"), params))


async def leave(conn: AsyncConnection, session: int) -> None:
    await conn.execute(sql("runners", "leave"), {"session": session})


async def live(conn: AsyncConnection) -> list[LiveRunner]:
    return await all_rows(conn, sql("runners", "live"), {}, LiveRunner)


async def neighbours(conn: AsyncConnection, *, host: str, boot_id: str, pid_namespace: str) -> list[LiveRunner]:
    params = {"host": host, "boot_id": boot_id, "pid_namespace": pid_namespace}
    return await all_rows(conn, sql("runners", "neighbours"), params, LiveRunner)


async def namesakes(conn: AsyncConnection, *, runner_id: str, session: int) -> list[LiveRunner]:
    return await all_rows(conn, sql("runners", "namesakes"), {"runner_id": runner_id, "session": session}, LiveRunner)


async def list_busy(conn: AsyncConnection, *, limit: int = 1000, with_agents: bool = True) -> list[BusyRunner]:
    params = {"limit": limit, "with_agents": with_agents}
    return await all_rows(conn, sql("runners", "list_busy"), params, BusyRunner)


async def count_agents(conn: AsyncConnection, *, silent_seconds: float) -> list[AgentsOf]:
    return await all_rows(conn, sql("runners", "count_agents"), {"silent_seconds": silent_seconds}, AgentsOf)


async def reap(
    conn: AsyncConnection, *, shard: int, epoch: int, session: int, lost_after: float, infra_retries: int
) -> Reaped:
    params = {
        "shard": shard,
        "epoch": epoch,
        "session": session,
        "lost_after": lost_after,
        "infra_retries": infra_retries,
    }
    row = await one_row(conn, sql("runners", "reap"), params, Reaped)
    assert row is not None
    return row
