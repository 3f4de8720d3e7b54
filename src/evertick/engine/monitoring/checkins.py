"""Check-ins: jobs that run elsewhere report that they ran; the leader raises an alert when a report does not arrive."""

from __future__ import annotations

import json
from datetime import datetime, timedelta

from psycopg import AsyncConnection

from evertick.db.queries.monitoring import checkins
from evertick.db.queries.monitoring.checkins import Checkin
from evertick.db.queries.shards import read_clock
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.errors import Conflict, InvalidSchedule
from evertick.domain.schedules.spec import ScheduleSpec, next_after
from evertick.engine.fire_schedules import read_spec
from evertick.engine.verbs import leader_verb, require

# Clocks differ: a report so soon before its instant is the one for that instant.
EARLY = timedelta(seconds=30)
_TRIES = 3


@sql_function
async def _put_checkin(
    conn: AsyncConnection, *, name: str, spec: str, grace_seconds: float, due_at: datetime, actor: Actor
) -> bool: ...


@sql_function
async def delete_checkin(conn: AsyncConnection, *, name: str, actor: Actor) -> bool: ...


@sql_function
async def _record_checkin(
    conn: AsyncConnection, *, name: str, due_at: datetime, spec: str, message: str | None, has_failed: bool
) -> bool: ...


@leader_verb
async def raise_late_checkins(conn: AsyncConnection, *, shard: int, epoch: int) -> list[str]:
    """Raise an alert for each check-in whose report did not arrive in time. Returns their names."""


async def put_checkin(
    conn: AsyncConnection, *, name: str, spec: ScheduleSpec, grace_seconds: float, actor: Actor
) -> bool:
    """Create or change a check-in; from now on it expects reports. Returns whether it is new."""
    due_at = next_after(spec, await read_clock(conn))
    if due_at is None:
        raise InvalidSchedule("this schedule has no instant in the future, so no report could be expected.")
    return await _put_checkin(
        conn, name=name, spec=spec.to_json(), grace_seconds=grace_seconds, due_at=due_at, actor=actor
    )


async def record_checkin(conn: AsyncConnection, *, name: str, message: str | None, has_failed: bool) -> Checkin:
    """Record a report. If the schedule changes meanwhile, it is read again."""
    for _ in range(_TRIES):
        found = require(await checkins.find(conn, name=name), "checkin", repr(name))
        following = next_after(read_spec(found.spec), await read_clock(conn) + EARLY) or found.due_at
        if await _record_checkin(
            conn, name=name, due_at=following, spec=json.dumps(found.spec), message=message, has_failed=has_failed
        ):
            return require(await checkins.find(conn, name=name), "checkin", repr(name))
    raise Conflict(f"Check-in {name!r} is being changed. Repeat the request.")
