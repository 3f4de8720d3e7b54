"""Agents' attempts: started, watched and finished by the API on their behalf."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import datetime
from typing import cast

from psycopg import AsyncConnection
from psycopg.types.json import Json

from evertick.domain.attempt import TaskKey
from evertick.store.rows import one_row, one_value
from evertick.store.statements import sql
from evertick.store.tasks import StepRow


@dataclass(frozen=True, slots=True, kw_only=True)
class NewAgent:
    """The location of the agent's process: a runner on the same machine can prove that it is gone."""

    runner_id: str
    version: str
    host: str
    boot_id: str
    pid_namespace: str
    uid: int
    pid: int
    pid_started: float


@dataclass(frozen=True, slots=True)
class StartedRow:
    verdict: str
    attempt: int | None
    version_id: int | None
    fire_at: datetime | None
    params: str | None
    inputs: str | None


@dataclass(frozen=True, slots=True)
class HeldRow:
    version_id: int
    attempt: int


async def start(
    conn: AsyncConnection, key: TaskKey, *, epoch: int, session: int, nonce: str, agent: NewAgent, lost_after: float
) -> StartedRow:
    params = {**key._asdict(), "epoch": epoch, "session": session, "nonce": nonce}
    row = await one_row(
        conn, sql("agents", "start"), {**params, "agent": Json(asdict(agent)), "lost_after": lost_after}, StartedRow
    )
    assert row is not None
    return row


async def held(conn: AsyncConnection, key: TaskKey, *, epoch: int, session: int) -> HeldRow | None:
    """None: that attempt does not run under this session, or no longer does."""
    params = {**key._asdict(), "epoch": epoch, "session": session}
    return await one_row(conn, sql("agents", "held"), params, HeldRow)


async def inputs(conn: AsyncConnection, key: TaskKey, *, version_id: int) -> str | None:
    params = {**key._asdict(), "version_id": version_id}
    return cast("str | None", await one_value(conn, sql("agents", "inputs"), params))


async def bundle(conn: AsyncConnection, *, version_id: int, bundle_hash: str) -> bytes | None:
    params = {"version_id": version_id, "bundle_hash": bundle_hash}
    return cast("bytes | None", await one_value(conn, sql("agents", "bundle"), params))


async def disturbed(conn: AsyncConnection, sessions: list[int]) -> set[int]:
    """The sessions that no longer hold their attempt, or have a request to stop."""
    cursor = await conn.execute(sql("agents", "disturbed"), {"sessions": sessions})
    return {cast(int, row[0]) for row in await cursor.fetchall()}


async def finish(conn: AsyncConnection, *, session: int, reports_json: str, infra_retries: int) -> list[StepRow]:
    params = {"session": session, "reports": reports_json, "infra_retries": infra_retries}
    cursor = await conn.execute(sql("agents", "finish"), params)
    return [StepRow(*row) for row in await cursor.fetchall()]
