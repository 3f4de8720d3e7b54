"""Check-ins: jobs that run elsewhere report that they ran, in time, or an alert is raised."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen

from evertick.db.queries.monitoring import checkins
from evertick.db.queries.monitoring.checkins import Checkin
from evertick.domain.attempt import storable_text
from evertick.domain.errors import NotFound, UserError
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine.monitoring import checkins as verbs
from evertick.engine.verbs import require
from evertick.operations.caller import Caller
from evertick.operations.paging import (
    USUAL_ITEMS,
    Cursor,
    Limit,
    Page,
    RequestBody,
    Tagged,
    etag_of,
    page_of,
    read_cursor,
)

CheckinName = Annotated[str, MaxLen(200), Doc("The name of the check-in.")]
_NAME = re.compile(r"[A-Za-z0-9_.:-]{1,200}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckinRequest(RequestBody):
    """`schedule`: when a report is expected: a cron expression, an interval such as `@every 10m`, or the fields of a
    schedule. A report is late `grace_seconds` after that."""

    schedule: Any
    timezone: Annotated[str, MaxLen(100)] = "UTC"
    grace_seconds: Annotated[float, Ge(0), Le(30 * 86_400)] = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckinReport(RequestBody):
    """`has_failed`: the job ran, and failed."""

    message: Annotated[str, MaxLen(1000)] | None = None
    has_failed: bool = False


async def list_checkins(
    caller: Caller,
    *,
    only_late: Annotated[bool, Doc("Only late check-ins, and failures.")] = False,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[Checkin]:
    """List check-ins: when each is expected next, and which are late."""
    (after,) = read_cursor(cursor, "")
    async with caller.read() as conn:
        found = await checkins.list_of(conn, after=after, only_late=only_late, limit=limit)
    return page_of(found, limit, lambda row: (row.name,), lambda row: row)


async def show_checkin(caller: Caller, *, name: CheckinName) -> Checkin:
    """Show one check-in."""
    async with caller.read() as conn:
        return require(await checkins.find(conn, name=_checked(name)), "checkin", repr(name))


async def put_checkin(caller: Caller, *, name: CheckinName, body: CheckinRequest) -> Tagged[Checkin]:
    """Create a check-in or change what it expects. From now on a report that does not arrive in time is an alert."""
    _checked(name)
    spec = parse_schedule(body.schedule, timezone=body.timezone)
    async with caller.write() as conn:
        is_new = await verbs.put_checkin(
            conn, name=name, spec=spec, grace_seconds=body.grace_seconds, actor=caller.actor
        )
        found = require(await checkins.find(conn, name=name), "checkin", repr(name))
    return Tagged(record=found, etag=etag_of(found), is_new=is_new)


async def delete_checkin(caller: Caller, *, name: CheckinName) -> None:
    """Delete a check-in."""
    async with caller.write() as conn:
        if not await verbs.delete_checkin(conn, name=_checked(name), actor=caller.actor):
            raise NotFound(f"There is no check-in {name!r}. List them with `evertick checkins list`.")


async def record_checkin(caller: Caller, *, name: CheckinName, body: CheckinReport | None = None) -> Checkin:
    """Report that a job ran. It ends an open alert; a failure is reported to the recipients of missed deadlines."""
    report = body or CheckinReport()
    message = None if report.message is None else storable_text(report.message)
    async with caller.write() as conn:
        return await verbs.record_checkin(conn, name=_checked(name), message=message, has_failed=report.has_failed)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name):
        raise UserError(f"{name!r:.100} cannot name a check-in: use letters, digits and '_.:-', at most 200.")
    return name
