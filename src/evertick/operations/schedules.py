"""Schedules: list, show, change by compare-and-set, pause, history, skipped fires, and simulate an expression."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Annotated, Any

from annotated_doc import Doc
from annotated_types import Ge, Gt, Le, MaxLen
from psycopg import AsyncConnection

from evertick.db.notify import Channel
from evertick.db.queries import schedules
from evertick.db.queries.schedules import ListedSchedule, ScheduleVersion, SkipPlace, SkipRecord
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.dags.validation import check_schedule
from evertick.domain.errors import Conflict, NotFound, PreconditionFailed, UserError
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.preview import clock_changes, count_fires, fires_between, outcome_of
from evertick.domain.schedules.spec import ScheduleSpec, describe, parse_schedule
from evertick.engine import schedules as verbs
from evertick.engine.fire_schedules import UNPLANNABLE, fires_from, fires_of, in_words, read_spec
from evertick.engine.schedules import Missed, preview
from evertick.operations.caller import Caller, similar
from evertick.operations.dags import LONGEST_NAME, CatchUpOptions, DagName, catch_up_of, spec_of
from evertick.operations.paging import (
    USUAL_ITEMS,
    Cursor,
    IdempotencyKey,
    IfMatch,
    Limit,
    Page,
    RequestBody,
    Tagged,
    aware,
    page_of,
    read_cursor,
    record_of,
)

ScheduleName = Annotated[str, MaxLen(LONGEST_NAME), Doc("The schedule's name.")]
DagFilter = Annotated[str | None, MaxLen(LONGEST_NAME), Doc("Only schedules of this DAG.")]
_Seconds = Annotated[float, Ge(0), Le(10**9)]
_Deadline = Annotated[float, Gt(0), Le(10**9)]
_MOST = 1000
_NEWEST_VERSION = 2**31 - 1
_SHOWN_NAMES = 10
_ETAG = re.compile(r'^"v(\d{1,9})"$')
_LONGEST_SIMULATION = timedelta(days=366 * 5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    dag: str
    name: str
    version: int
    when: str
    spec: dict[str, Any]
    params: dict[str, Any]
    misfire: str
    catchup_window_seconds: float
    catchup_limit: int | None
    overlap: str
    start_within_seconds: float | None
    finish_within_seconds: float | None
    delay_seconds: float
    is_paused: bool
    is_paused_directly: bool
    origin: str
    error: str | None
    next_due: datetime | None
    last_fired: datetime | None
    changed_by: str
    changed_at: datetime
    deleted_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class UnpausedSchedule(Schedule):
    """`missed`: the fires that the pause prevented, and whether each one ran now or was skipped."""

    missed: list[Missed]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleRequest(RequestBody):
    """`when`: an expression such as `30 6 * * *`, `@every 5m` or `@daily`, a list of instants, or the fields of a spec."""

    when: str | Sequence[str] | dict[str, Any]
    timezone: Annotated[str, MaxLen(100)] | None = None
    start_at: datetime | None = None
    end_at: datetime | None = None
    anchor_at: datetime | None = None
    jitter_seconds: _Seconds | None = None
    params: Mapping[str, Any] = field(default_factory=dict)
    misfire: MisfirePolicy | None = None
    catchup_window_seconds: _Seconds | None = None
    catchup_limit: Annotated[int, Ge(1), Le(1000)] | None = None
    overlap: OverlapPolicy | None = None
    start_within_seconds: _Deadline | None = None
    finish_within_seconds: _Deadline | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ResetSchedule:
    """`is_declared`: the DAG's file declares the schedule. If it does not, the schedule is deleted."""

    is_declared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class NextFires:
    when: str
    fires: list[datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest(RequestBody):
    """What an expression would do between two instants. Nothing is saved."""

    when: str | Sequence[str] | dict[str, Any]
    timezone: Annotated[str, MaxLen(100)] | None = None
    first: datetime
    last: datetime
    limit: Annotated[int, Ge(1), Le(1000)] = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockEffect:
    at: datetime
    shift_seconds: float
    effect: str
    fires: list[datetime]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationResult:
    when: str
    timezone: str
    count: int
    fires: list[datetime]
    clock_changes: list[ClockEffect]


async def list_all_schedules(
    caller: Caller,
    *,
    dag: DagFilter = None,
    with_deleted: Annotated[bool, Doc("Also deleted schedules.")] = False,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[Schedule]:
    """List the schedules of all DAGs or of one DAG, by DAG and name."""
    after_dag, after_name = read_cursor(cursor, "", "")
    async with caller.read() as conn:
        dag_ids = [(await caller.dag(conn, dag)).dag_id] if dag is not None else await caller.visible_dag_ids(conn)
        found = await schedules.page(
            conn, dag_ids=dag_ids, dag=after_dag, name=after_name, limit=limit, deleted=with_deleted
        )
    return page_of(found, limit, lambda row: (row.dag, row.name), schedule_of)


async def list_schedules(
    caller: Caller, *, dag: DagName, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[Schedule]:
    """List the schedules of a DAG."""
    return await list_all_schedules(caller, dag=dag, limit=limit, cursor=cursor)


async def show_schedule(caller: Caller, *, dag: DagName, name: ScheduleName) -> Tagged[Schedule]:
    """Show one schedule. Its ETag is its version: send it as If-Match with a change."""
    async with caller.read() as conn:
        row = await find_schedule(caller, conn, dag, name)
    return _tagged(row)


async def put_schedule(
    caller: Caller,
    *,
    dag: DagName,
    name: ScheduleName,
    body: ScheduleRequest,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Tagged[Schedule]:
    """Create or replace a schedule. With If-Match only if it has that version (`"v0"`: if it does not exist). Fires that are
    already due still run."""
    return await save(caller, dag, name, body, expected=_expected(if_match), request=idempotency_key)


async def delete_schedule(caller: Caller, *, dag: DagName, name: ScheduleName, if_match: IfMatch = None) -> None:
    """Delete a schedule. Its runs and its history remain."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await find_schedule(caller, conn, dag, name)
        await verbs.delete_schedule(conn, dag=dag, name=name, actor=caller.actor, expected_version=_expected(if_match))


async def pause_schedule(caller: Caller, *, dag: DagName, name: ScheduleName, if_match: IfMatch = None) -> Schedule:
    """Pause one schedule. Fires that are already due still run; later fires are recorded as skipped."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await find_schedule(caller, conn, dag, name)
        await verbs.pause_schedule(conn, dag=dag, name=name, actor=caller.actor, expected_version=_expected(if_match))
        return schedule_of(await find_schedule(caller, conn, dag, name))


async def unpause_schedule(
    caller: Caller, *, dag: DagName, name: ScheduleName, body: CatchUpOptions | None = None, if_match: IfMatch = None
) -> UnpausedSchedule:
    """Resume one schedule. While its DAG is paused, the schedule remains paused with it."""
    wanted = body or CatchUpOptions()
    catch_up, expected = catch_up_of(wanted), _expected(if_match)
    async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
        row = await find_schedule(caller, conn, dag, name)
        missed = await preview(conn, dag=dag, name=name, catch_up=catch_up)
        if not wanted.is_preview:
            await verbs.unpause_schedule(
                conn, dag=dag, name=name, actor=caller.actor, catch_up=catch_up, expected_version=expected
            )
            row = await find_schedule(caller, conn, dag, name)
    return record_of(UnpausedSchedule, schedule_of(row), missed=missed)


async def reset_schedule(caller: Caller, *, dag: DagName, name: ScheduleName) -> ResetSchedule:
    """Restore a schedule to the declaration in the DAG's file, also a deleted one."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await caller.dag(conn, dag)
        return ResetSchedule(is_declared=await verbs.reset_schedule(conn, dag=dag, name=name, actor=caller.actor))


async def list_next_fires(caller: Caller, *, dag: DagName, name: ScheduleName, limit: Limit = 10) -> NextFires:
    """List the next fires of a schedule; none while it is paused."""
    async with caller.read() as conn:
        row = await find_schedule(caller, conn, dag, name)
    return NextFires(when=in_words(row.spec), fires=fires_of(row, limit))


async def list_schedule_versions(
    caller: Caller, *, dag: DagName, name: ScheduleName, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[ScheduleVersion]:
    """List every version of a schedule, newest first; also of a deleted schedule."""
    (before,) = read_cursor(cursor, _NEWEST_VERSION)
    async with caller.read() as conn:
        await caller.dag(conn, dag)
        found = await schedules.history(conn, dag=dag, name=name, limit=limit, before=min(before, _NEWEST_VERSION))
    if not found and cursor is None:
        raise NotFound(
            f"DAG {dag!r} never had a schedule {name!r}. List its schedules with `evertick schedules list {dag}`."
        )
    return page_of(found, limit, lambda row: (row.version,), lambda row: row)


async def list_schedule_skips(
    caller: Caller, *, dag: DagName, name: ScheduleName, limit: Limit = USUAL_ITEMS, cursor: Cursor = None
) -> Page[SkipRecord]:
    """List the skipped fires of a schedule with the reasons, newest first."""
    async with caller.read() as conn:
        await find_schedule(caller, conn, dag, name)
        return await _skips(conn, limit, cursor, dag=dag, name=name)


async def list_skips(
    caller: Caller,
    *,
    dag: DagFilter = None,
    name: Annotated[str | None, MaxLen(LONGEST_NAME), Doc("Only schedules with this name.")] = None,
    limit: Limit = USUAL_ITEMS,
    cursor: Cursor = None,
) -> Page[SkipRecord]:
    """List the skipped fires of all schedules or of one DAG's schedules, including deleted ones, newest first."""
    async with caller.read() as conn:
        dag_ids = [(await caller.dag(conn, dag)).dag_id] if dag is not None else await caller.visible_dag_ids(conn)
        return await _skips(conn, limit, cursor, dag_ids=dag_ids, name=name)


async def _skips(conn: AsyncConnection, limit: int, cursor: str | None, **wanted: Any) -> Page[SkipRecord]:
    recorded, first, dag, name = read_cursor(cursor, *[None if cursor is None else ""] * 4)
    before = SkipPlace(recorded_before=recorded, first_before=first, dag_before=dag, name_before=name)
    found = await schedules.skips(conn, limit=limit, before=before, **wanted)
    return page_of(
        found, limit, lambda row: (str(row.recorded_at), str(row.first_at), row.dag, row.name), lambda row: row
    )


async def simulate_schedule(caller: Caller, *, body: SimulationRequest) -> SimulationResult:
    """List when an expression would fire between two instants, and the effect of each clock change."""
    spec = parsed(body.when, {"timezone": body.timezone})
    first, last = aware(body.first), aware(body.last)
    if not first <= last <= first + _LONGEST_SIMULATION:
        raise UserError("`last` must not be before `first`, nor more than five years after it.")
    changes = [outcome_of(spec, each) for each in clock_changes(spec.timezone, first, last)]
    effects = [
        record_of(
            ClockEffect,
            each.change,
            shift_seconds=each.change.shift.total_seconds(),
            effect=each.effect,
            fires=list(each.fires),
        )
        for each in changes
    ]
    return SimulationResult(
        when=describe(spec),
        timezone=spec.timezone,
        count=count_fires(spec, first, last),
        fires=fires_between(spec, first, last, body.limit),
        clock_changes=effects,
    )


async def save(
    caller: Caller, dag: str, name: str, wanted: ScheduleRequest, *, expected: int | None, request: str | None = None
) -> Tagged[Schedule]:
    """Create or replace a schedule; with `expected` only if it has that version."""
    async with caller.write(Channel.SCHEDULE) as conn:
        spec = spec_of(await caller.dag(conn, dag))
        schedule = named(name, wanted, spec.timezone)
        check_schedule(spec, schedule)
        is_new = not await schedules.of_dag(conn, dag=dag, name=name)
        try:
            await verbs.put_schedule(
                conn, dag=dag, schedule=schedule, actor=caller.actor, expected_version=expected, request=request
            )
        except Conflict as error:
            raise (PreconditionFailed(str(error)) if expected is not None else error) from None
        return _tagged(await find_schedule(caller, conn, dag, name), is_new=is_new)


def named(name: str, wanted: ScheduleRequest, timezone: str) -> NamedSchedule:
    times = {each: getattr(wanted, each) for each in ("start_at", "end_at", "anchor_at", "jitter_seconds")}
    spec = parsed(wanted.when, {"timezone": wanted.timezone or timezone, **times})
    return record_of(NamedSchedule, wanted, name=name, spec=spec)


async def find_schedule(caller: Caller, conn: AsyncConnection, dag: str, name: str) -> ListedSchedule:
    """A schedule that exists, of a DAG that the caller may see; or an error that suggests a name."""
    await caller.dag(conn, dag)
    found = await schedules.list_all(conn, dag=dag, limit=_MOST)
    for row in found:
        if row.name == name:
            return row
    names = [row.name for row in found]
    advice = similar(name, names, f"It has: {', '.join(names[:_SHOWN_NAMES]) or 'none'}.")
    raise NotFound(f"DAG {dag!r} has no schedule {name!r}. {advice}")


def parsed(when: object, given: dict[str, Any]) -> ScheduleSpec:
    try:
        return read_spec(parse_schedule(when, **given).to_json())
    except UserError:
        raise
    except UNPLANNABLE as error:
        raise UserError(f"This schedule is invalid: {error}") from None


def upcoming_fires(schedule: Schedule, count: int) -> list[datetime]:
    """The next fires of a schedule; none while it is paused or in error."""
    if schedule.is_paused or schedule.error or schedule.next_due is None:
        return []
    return fires_from(schedule.spec, schedule.next_due, delay_seconds=schedule.delay_seconds, count=count)


def schedule_of(row: ListedSchedule) -> Schedule:
    return record_of(
        Schedule,
        row,
        when=in_words(row.spec),
        catchup_window_seconds=row.window_seconds,
        start_within_seconds=row.start_within,
        finish_within_seconds=row.finish_within,
        is_paused=row.paused,
        is_paused_directly=row.is_held,
    )


def schedule_etag(version: int) -> str:
    return f'"v{version}"'


def _tagged(row: ListedSchedule, *, is_new: bool = False) -> Tagged[Schedule]:
    return Tagged(record=schedule_of(row), etag=schedule_etag(row.version), is_new=is_new)


def _expected(if_match: str | None) -> int | None:
    if if_match is None or if_match == "*":
        return None
    found = _ETAG.match(if_match)
    if found is None:
        raise PreconditionFailed('If-Match must be the ETag of the schedule, such as "v3".')
    return int(found[1])
