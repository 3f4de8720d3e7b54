"""Schedules: list, show, change by compare-and-set, pause, history, skipped fires, and simulate an expression."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar

from annotated_doc import Doc
from annotated_types import Ge, Gt, Le, MaxLen
from psycopg import AsyncConnection

from evertick.db.notify import Channel
from evertick.db.queries import schedules
from evertick.db.queries.schedules import ListedSchedule, ScheduleVersion, Skip
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.dags.validation import check_schedule
from evertick.domain.errors import Conflict, NotFound, PreconditionFailed, UserError
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.preview import clock_changes, count_fires, fires_between, outcome_of
from evertick.domain.schedules.spec import ScheduleSpec, describe, parse_schedule
from evertick.engine import schedules as verbs
from evertick.engine.fire_schedules import UNPLANNABLE, fires_from, fires_of, in_words, read_spec
from evertick.engine.schedules import Missed, preview, put_schedule
from evertick.operations.caller import Caller
from evertick.operations.dags import LONGEST_NAME, DagName, Unpause, catch_up_of, spec_of
from evertick.operations.paging import (
    USUAL_ITEMS,
    Cursor,
    IdempotencyKey,
    IfMatch,
    Limit,
    Page,
    Tagged,
    encode_cursor,
    read_cursor,
)

ScheduleName = Annotated[str, MaxLen(LONGEST_NAME), Doc("The schedule's name.")]
DagFilter = Annotated[str | None, MaxLen(LONGEST_NAME), Doc("Only schedules of this DAG.")]
Count = Annotated[int, Ge(1), Le(200), Doc("Maximum number of items.")]
_Seconds = Annotated[float, Ge(0), Le(10**9)]
_Deadline = Annotated[float, Gt(0), Le(10**9)]
_MOST = 1000
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
    is_paused_itself: bool
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
class PutSchedule:
    """`when`: an expression such as `30 6 * * *`, `@every 5m` or `@daily`, a list of instants, or the fields of a spec."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

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
class Simulate:
    """What an expression would do between two instants. Nothing is saved."""

    __pydantic_config__: ClassVar = {"extra": "forbid"}

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
class Simulated:
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
            conn, dag_ids=dag_ids, after=(after_dag, after_name), limit=limit, deleted=with_deleted
        )
    next_cursor = encode_cursor(found[-1].dag, found[-1].name) if len(found) == limit else None
    return Page(items=[schedule_of(row) for row in found], next_cursor=next_cursor)


async def list_schedules(caller: Caller, *, dag: DagName) -> Page[Schedule]:
    """List the schedules of a DAG."""
    async with caller.read() as conn:
        await caller.dag(conn, dag)
        found = await schedules.list_all(conn, dag=dag, limit=_MOST)
    return Page(items=[schedule_of(row) for row in found], next_cursor=None)


async def show_schedule(caller: Caller, *, dag: DagName, name: ScheduleName) -> Tagged[Schedule]:
    """Show one schedule. Its ETag is its version: send it as If-Match with a change."""
    async with caller.read() as conn:
        row = await find_schedule(caller, conn, dag, name)
    return _tagged(row)


async def change(
    caller: Caller,
    *,
    dag: DagName,
    name: ScheduleName,
    body: PutSchedule,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Tagged[Schedule]:
    """Create or replace a schedule. With If-Match only if it has that version (`"v0"`: if it does not exist). Fires that are
    already due still run."""
    found = await save(caller, dag, name, body, expected=_expected(if_match), request=idempotency_key)
    return _tagged(found)


async def delete(caller: Caller, *, dag: DagName, name: ScheduleName, if_match: IfMatch = None) -> None:
    """Delete a schedule. Its runs and its history remain."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await find_schedule(caller, conn, dag, name)
        expected = _expected(if_match)
        await verbs.delete_schedule(conn, dag=dag, name=name, actor=caller.actor, expected_version=expected)


async def pause(caller: Caller, *, dag: DagName, name: ScheduleName, if_match: IfMatch = None) -> Schedule:
    """Pause one schedule. Fires that are already due still run; later fires are recorded as skipped."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await find_schedule(caller, conn, dag, name)
        expected = _expected(if_match)
        await verbs.pause_schedule(conn, dag=dag, name=name, actor=caller.actor, expected_version=expected)
        return schedule_of(await find_schedule(caller, conn, dag, name))


async def unpause(
    caller: Caller, *, dag: DagName, name: ScheduleName, body: Unpause | None = None, if_match: IfMatch = None
) -> UnpausedSchedule:
    """Resume one schedule. While its DAG is paused, the schedule remains paused with it."""
    wanted = body or Unpause()
    catch_up, expected = catch_up_of(wanted), _expected(if_match)
    async with caller.write(Channel.SCHEDULE, Channel.TASKS) as conn:
        row = await find_schedule(caller, conn, dag, name)
        missed = await preview(conn, dag=dag, name=name, catch_up=catch_up)
        if not wanted.is_preview:
            await verbs.unpause_schedule(
                conn, dag=dag, name=name, actor=caller.actor, catch_up=catch_up, expected_version=expected
            )
            row = await find_schedule(caller, conn, dag, name)
    found = schedule_of(row)
    return UnpausedSchedule(**{each.name: getattr(found, each.name) for each in fields(found)}, missed=missed)


async def reset(caller: Caller, *, dag: DagName, name: ScheduleName) -> ResetSchedule:
    """Restore a schedule to the declaration in the DAG's file, also a deleted one."""
    async with caller.write(Channel.SCHEDULE) as conn:
        await caller.dag(conn, dag)
        return ResetSchedule(is_declared=await verbs.reset_schedule(conn, dag=dag, name=name, actor=caller.actor))


async def next_fires(caller: Caller, *, dag: DagName, name: ScheduleName, count: Count = 10) -> NextFires:
    """List the next fires of a schedule; none while it is paused."""
    async with caller.read() as conn:
        row = await find_schedule(caller, conn, dag, name)
    return NextFires(when=in_words(row.spec), fires=fires_of(row, count))


async def history(caller: Caller, *, dag: DagName, name: ScheduleName, count: Count = 50) -> Page[ScheduleVersion]:
    """List every version of a schedule, newest first; also of a deleted schedule."""
    async with caller.read() as conn:
        await caller.dag(conn, dag)
        found = await schedules.history(conn, dag=dag, name=name, limit=count)
    if not found:
        raise NotFound(
            f"DAG {dag!r} never had a schedule {name!r}. List its schedules with `evertick schedules list {dag}`."
        )
    return Page(items=found, next_cursor=None)


async def skips(caller: Caller, *, dag: DagName, name: ScheduleName, count: Count = 50) -> Page[Skip]:
    """List the skipped fires of a schedule with the reasons, newest first."""
    async with caller.read() as conn:
        await find_schedule(caller, conn, dag, name)
        return Page(items=await schedules.skips(conn, dag=dag, name=name, limit=count), next_cursor=None)


async def all_skips(
    caller: Caller,
    *,
    dag: DagFilter = None,
    name: Annotated[str | None, MaxLen(LONGEST_NAME), Doc("Only schedules with this name.")] = None,
    count: Count = 50,
) -> Page[Skip]:
    """List the skipped fires of all schedules or of one DAG's schedules, including deleted ones, newest first."""
    async with caller.read() as conn:
        dag_ids = [(await caller.dag(conn, dag)).dag_id] if dag is not None else await caller.visible_dag_ids(conn)
        return Page(items=await schedules.skips(conn, dag_ids=dag_ids, name=name, limit=count), next_cursor=None)


async def simulate(caller: Caller, *, body: Simulate) -> Simulated:
    """List when an expression would fire between two instants, and the effect of each clock change."""
    spec = parsed(body.when, {"timezone": body.timezone})
    first, last = aware(body.first), aware(body.last)
    if not first <= last <= first + _LONGEST_SIMULATION:
        raise UserError("`last` must not be before `first`, nor more than five years after it.")
    changes = [outcome_of(spec, each) for each in clock_changes(spec.timezone, first, last)]
    effects = [
        ClockEffect(
            at=each.change.at,
            shift_seconds=each.change.shift.total_seconds(),
            effect=each.effect,
            fires=list(each.fires),
        )
        for each in changes
    ]
    return Simulated(
        when=describe(spec),
        timezone=spec.timezone,
        count=count_fires(spec, first, last),
        fires=fires_between(spec, first, last, body.limit),
        clock_changes=effects,
    )


async def save(
    caller: Caller, dag: str, name: str, wanted: PutSchedule, *, expected: int | None, request: str | None = None
) -> ListedSchedule:
    """Create or replace a schedule; with `expected` only if it has that version."""
    async with caller.write(Channel.SCHEDULE) as conn:
        spec = spec_of(await caller.dag(conn, dag))
        schedule = named(name, wanted, spec.timezone)
        check_schedule(spec, schedule)
        try:
            await put_schedule(
                conn, dag=dag, schedule=schedule, actor=caller.actor, expected_version=expected, request=request
            )
        except Conflict as error:
            raise (PreconditionFailed(str(error)) if expected is not None else error) from None
        return await find_schedule(caller, conn, dag, name)


def named(name: str, wanted: PutSchedule, timezone: str) -> NamedSchedule:
    given: dict[str, Any] = {"timezone": wanted.timezone or timezone}
    given |= {"start_at": wanted.start_at, "end_at": wanted.end_at}
    given |= {"anchor_at": wanted.anchor_at, "jitter_seconds": wanted.jitter_seconds}
    return NamedSchedule(
        name=name,
        spec=parsed(wanted.when, given),
        params=wanted.params,
        misfire=wanted.misfire,
        catchup_window_seconds=wanted.catchup_window_seconds,
        catchup_limit=wanted.catchup_limit,
        overlap=wanted.overlap,
        start_within_seconds=wanted.start_within_seconds,
        finish_within_seconds=wanted.finish_within_seconds,
    )


async def find_schedule(caller: Caller, conn: AsyncConnection, dag: str, name: str) -> ListedSchedule:
    """A schedule that exists, of a DAG that the caller may see; or an error that suggests a name."""
    await caller.dag(conn, dag)
    found = await schedules.list_all(conn, dag=dag, limit=_MOST)
    for row in found:
        if row.name == name:
            return row
    names = [row.name for row in found]
    near = difflib.get_close_matches(name, names, n=1)
    advice = f"Did you mean {near[0]!r}?" if near else f"It has: {', '.join(names[:_SHOWN_NAMES]) or 'none'}."
    raise NotFound(f"DAG {dag!r} has no schedule {name!r}. {advice}")


def parsed(when: object, given: dict[str, Any]) -> ScheduleSpec:
    try:
        return read_spec(parse_schedule(when, **given).to_json())
    except UserError:
        raise
    except UNPLANNABLE as error:
        raise UserError(f"This schedule is invalid: {error}") from None


def aware(instant: datetime) -> datetime:
    if instant.tzinfo is None:
        raise UserError("Give instants with an offset, such as 2030-01-01T00:00:00Z.")
    return instant


def upcoming_fires(schedule: Schedule, count: int) -> list[datetime]:
    """The next fires of a schedule; none while it is paused or in error."""
    if schedule.is_paused or schedule.error or schedule.next_due is None:
        return []
    return fires_from(schedule.spec, schedule.next_due, delay_seconds=schedule.delay_seconds, count=count)


def schedule_of(row: ListedSchedule) -> Schedule:
    return Schedule(
        dag=row.dag,
        name=row.name,
        version=row.version,
        when=in_words(row.spec),
        spec=row.spec,
        params=row.params,
        misfire=row.misfire,
        catchup_window_seconds=row.window_seconds,
        catchup_limit=row.catchup_limit,
        overlap=row.overlap,
        start_within_seconds=row.start_within,
        finish_within_seconds=row.finish_within,
        delay_seconds=row.delay_seconds,
        is_paused=row.paused,
        is_paused_itself=row.is_held,
        origin=row.origin,
        error=row.error,
        next_due=row.next_due,
        last_fired=row.last_fired,
        changed_by=row.changed_by,
        changed_at=row.changed_at,
        deleted_at=row.deleted_at,
    )


def schedule_etag(version: int) -> str:
    return f'"v{version}"'


def _tagged(row: ListedSchedule) -> Tagged[Schedule]:
    return Tagged(record=schedule_of(row), etag=schedule_etag(row.version))


def _expected(if_match: str | None) -> int | None:
    if if_match is None or if_match == "*":
        return None
    found = _ETAG.match(if_match)
    if found is None:
        raise PreconditionFailed('If-Match must be the ETag of the schedule, such as "v3".')
    return int(found[1])
