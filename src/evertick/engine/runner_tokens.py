"""Runners over HTTPS: the tokens with which they join, their sessions, and the fleets of them that launchers start.

A token is random or derived, shown once and stored as a hash; it limits its runners to its queues. Once it is revoked or
expired, its runners take no new work and end with their last attempt.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from psycopg import AsyncConnection

from evertick.db.queries import runner_tokens
from evertick.db.queries.runner_tokens import NewRunnerToken, RunnerTokenRow
from evertick.db.queries.runners import NewRunner
from evertick.db.statements import sql_function
from evertick.domain.access import Actor, check_name
from evertick.domain.attempt import HeartbeatReply, TaskKey
from evertick.domain.errors import Forbidden, NotFound, NotLeader, Unauthenticated, UserError
from evertick.domain.routing import check_queue
from evertick.engine.runners import ExtendRow, heartbeat_reply

PREFIX = "evr_"
TOKEN_DAYS, MOST_TOKEN_DAYS = 30.0, 3650.0
MOST_QUEUES = 100


@sql_function
async def _join_runner(conn: AsyncConnection, token_id: int, origin: str, runner: dict[str, object]) -> bool: ...


@sql_function(retries=False)
async def extend_joined(conn: AsyncConnection, *, session: int, held: list[list[int]]) -> list[ExtendRow]:
    """As `extend_leases`, for a runner over HTTPS."""


@sql_function
async def _revoke_runner_token(conn: AsyncConnection, token_id: int, *, actor: Actor) -> list[int] | None: ...


def hash_of(secret: str) -> bytes:
    return hashlib.sha256(secret.encode()).digest()


async def create(
    conn: AsyncConnection, *, name: str, queues: Sequence[str], days: float, actor: Actor
) -> tuple[RunnerTokenRow, str]:
    """The token and its secret, which is not stored."""
    if not 0 < days <= MOST_TOKEN_DAYS:
        raise UserError(f"A token for runners lasts up to {MOST_TOKEN_DAYS:g} days, not {days:g}.")
    named = list(dict.fromkeys(check_queue(queue) for queue in queues))
    if not 0 < len(named) <= MOST_QUEUES:
        raise UserError(f"A token for runners needs 1 to {MOST_QUEUES} queues, not {len(named)}.")
    secret = PREFIX + secrets.token_urlsafe(32)
    new = NewRunnerToken(
        secret_hash=hash_of(secret), name=check_name(name, "token"), queues=named, seconds=days * 86_400
    )
    return await runner_tokens.add(conn, new, actor=actor), secret


async def revoke(conn: AsyncConnection, token_id: int, *, actor: Actor) -> list[int]:
    """The sessions that joined with it. They drain, and end."""
    sessions = await _revoke_runner_token(conn, token_id, actor=actor)
    if sessions is None:
        raise NotFound(f"There is no valid token {token_id} for runners. List them with `evertick runners token list`.")
    return sessions


async def find_token(conn: AsyncConnection, secret: str) -> RunnerTokenRow:
    """The token, if runners may join with it. Raises Unauthenticated with the reason."""
    row = await runner_tokens.find(conn, secret_hash=hash_of(secret)) if secret.startswith(PREFIX) else None
    if row is None:
        raise Unauthenticated(
            "This is no token for runners of this installation. Make one with `evertick runners token create`."
        )
    if row.revoked_at is not None or row.is_expired:
        happened = "was revoked" if row.revoked_at is not None else f"expired at {row.expires_at:%Y-%m-%d %H:%M} UTC"
        raise Unauthenticated(
            f"The runner token {row.name!r} {happened}: make a new one with `evertick runners token create`."
        )
    return row


async def join(conn: AsyncConnection, token: RunnerTokenRow, runner: NewRunner, *, origin: str) -> None:
    """Register a session. Repeating it after a lost reply is harmless."""
    if foreign := [queue for queue in runner.queues if queue not in token.queues]:
        allowed = ", ".join(token.queues)
        raise Forbidden(f"The runner token {token.name!r} is for the queues {allowed}, not for {', '.join(foreign)}.")
    if not await _join_runner(conn, token.token_id, origin, asdict(runner)):
        raise Unauthenticated(f"A runner can no longer join with the token {token.name!r}: it was revoked or expired.")


async def extend_over_https(
    conn: AsyncConnection, *, session: int, held: Sequence[tuple[TaskKey, int]]
) -> HeartbeatReply:
    return heartbeat_reply(await extend_joined(conn, session=session, held=[[*key, epoch] for key, epoch in held]))


# Fleets of launched runners: the lead of one, and the changes of its leader, fenced by its epoch ------------------------


@dataclass(frozen=True, slots=True)
class PilotRow:
    """A launched runner, and the session that joined. `is_expired`: its token, so that it leaves."""

    name: str
    phase: str
    reason: str | None
    is_submitted: bool
    is_withdrawn: bool
    has_joined: bool
    is_expired: bool
    session: int | None
    request: str | None
    busy: int
    slots: int | None
    joined_seconds: float | None
    silent_seconds: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenPilot:
    """What the engine says about a launched runner."""

    name: str
    phase: str
    reason: str | None
    is_submitted: bool


@sql_function
async def renew_fleet_lease(
    conn: AsyncConnection, fleet: str, *, leader: str, epoch: int | None, seconds: float, spec: dict[str, object]
) -> int | None:
    """The epoch of the lead, taken or kept; None: another launcher leads. `epoch`: of an earlier lead."""


@sql_function
async def leave_fleet(conn: AsyncConnection, fleet: str, *, epoch: int) -> bool: ...


@sql_function
async def pilots_of(conn: AsyncConnection, fleet: str) -> list[PilotRow]: ...


@sql_function
async def _add_pilots(
    conn: AsyncConnection, fleet: str, *, epoch: int, token_seconds: float, pilots: list[dict[str, str]]
) -> list[str] | None: ...


@sql_function
async def _note_fleet(
    conn: AsyncConnection, fleet: str, *, epoch: int, desired: int, trouble: str | None, seen: list[dict[str, object]]
) -> bool: ...


@sql_function
async def withdraw_pilot(conn: AsyncConnection, fleet: str, *, epoch: int, name: str) -> str | None:
    """`draining`: it has joined, and ends with its last attempt. `withdrawn`: it cannot join any more. None: it has
    ended, or the epoch is over."""


@sql_function
async def end_pilot(
    conn: AsyncConnection, fleet: str, *, epoch: int, name: str, reason: str, infra_retries: int
) -> int | None:
    """The number of attempts that were taken from it. None: it was ended before, or the epoch is over."""


async def add_pilots(
    conn: AsyncConnection, fleet: str, *, epoch: int, token_seconds: float, secrets: Mapping[str, str]
) -> list[str]:
    """Those of these runners, by name, that the fleet's limit allows. `secrets`: their join tokens."""
    pilots = [{"name": name, "hash": hash_of(secret).hex()} for name, secret in secrets.items()]
    added = await _add_pilots(conn, fleet, epoch=epoch, token_seconds=token_seconds, pilots=pilots)
    if added is None:
        raise _over(fleet, epoch)
    return added


async def note_fleet(
    conn: AsyncConnection, fleet: str, *, epoch: int, desired: int, trouble: str | None, seen: Sequence[SeenPilot]
) -> None:
    documents: list[dict[str, object]] = [
        {"name": each.name, "phase": each.phase, "reason": each.reason, "is_submitted": each.is_submitted}
        for each in seen
    ]
    if not await _note_fleet(conn, fleet, epoch=epoch, desired=desired, trouble=trouble, seen=documents):
        raise _over(fleet, epoch)


def _over(fleet: str, epoch: int) -> NotLeader:
    return NotLeader(f"epoch {epoch} of fleet {fleet} is over; nothing was changed")
