"""Tokens with which runners join over HTTPS, and what such a runner may read."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.queries.logs import NewChunk, chunk_document
from evertick.db.queries.runners import ListedRunner
from evertick.db.statements import query, sql
from evertick.domain.access import Actor


@dataclass(frozen=True, slots=True)
class RunnerTokenRow:
    """`runners`: how many live runners joined with it."""

    token_id: int
    name: str
    queues: list[str]
    created_by: str
    created_at: datetime
    expires_at: datetime
    used_at: datetime | None
    used_from: str | None
    revoked_at: datetime | None
    is_expired: bool
    runners: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NewRunnerToken:
    secret_hash: bytes
    name: str
    queues: list[str]
    seconds: float


@dataclass(frozen=True, slots=True)
class JoinedRow:
    """A session over HTTPS, with what its token lets it claim."""

    session: int
    runner_id: str
    token_id: int
    queues: list[str]
    match: list[str]
    slots: int
    is_over: bool


@dataclass(frozen=True, slots=True)
class HeldBundle:
    archive: bytes
    uses_threads: bool


@query
async def add(conn: AsyncConnection, token: NewRunnerToken, *, actor: Actor) -> RunnerTokenRow: ...


@query
async def list_all(conn: AsyncConnection, *, limit: int) -> list[RunnerTokenRow]:
    """Those that were not revoked."""


@query
async def find(conn: AsyncConnection, *, secret_hash: bytes) -> RunnerTokenRow | None: ...


@query
async def joined(conn: AsyncConnection, session: int) -> JoinedRow | None: ...


@query
async def peers(
    conn: AsyncConnection, *, token_id: int, host: str, boot_id: str, pid_namespace: str
) -> list[ListedRunner]: ...


@query
async def not_ended(conn: AsyncConnection, *, token_id: int, sessions: list[int]) -> set[int]: ...


@query
async def holds_version(conn: AsyncConnection, *, session: int, version_id: int) -> bool: ...


@query
async def held_bundle(conn: AsyncConnection, *, session: int, bundle_hash: str) -> HeldBundle | None: ...


async def append_logs(conn: AsyncConnection, *, session: int, chunks: list[NewChunk]) -> None:
    """Only lines of attempts that this session held."""
    params = {"session": session, "chunks": chunk_document(chunks)}
    await conn.execute(sql("runner_tokens", "append_logs"), params)


@query
async def called(conn: AsyncConnection, *, sessions: list[int], requests: list[str]) -> set[int]:
    """Those of these waiting runners that have something to learn; `requests`: what each knows, '' for none."""


# Fleets of launched runners, and the load that decides their size


@dataclass(frozen=True, slots=True)
class FleetLoad:
    """`triggers`: 1 if a trigger waits for a runner."""

    queued: int
    triggers: int


@dataclass(frozen=True, slots=True)
class FleetRow:
    """`is_led`: its launcher is alive."""

    name: str
    engine: str
    queues: list[str]
    least: int
    most: int
    slots: int
    leader: str
    is_led: bool
    desired: int
    trouble: str | None


@dataclass(frozen=True, slots=True)
class ListedPilotRow:
    """A launched runner. `session`: of the runner that joined."""

    fleet: str
    name: str
    phase: str
    reason: str | None
    created_at: datetime
    submitted_at: datetime | None
    is_withdrawn: bool
    has_joined: bool
    session: int | None
    request: str | None
    busy: int


@query
async def fleet_load(conn: AsyncConnection, *, queues: list[str], cap: int) -> FleetLoad: ...


@query
async def list_fleets(conn: AsyncConnection, *, limit: int) -> list[FleetRow]: ...


@query
async def list_pilots(conn: AsyncConnection, *, limit: int) -> list[ListedPilotRow]: ...
