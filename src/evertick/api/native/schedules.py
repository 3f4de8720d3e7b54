"""Schedules: reading, changing by compare-and-set, pausing. What they did and would do is in schedule_records.py."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response
from psycopg import AsyncConnection
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Caller, Who
from evertick.api.native.dags import DagName, spec_of
from evertick.api.native.documents import Schedule, schedule_of
from evertick.api.paging import (
    USUAL_ITEMS,
    Cursor,
    IdempotencyKey,
    IfMatch,
    Limit,
    Page,
    cursor,
    put_etag,
    read_cursor,
)
from evertick.db.notify import Channel
from evertick.db.queries import schedules
from evertick.db.queries.schedules import ListedSchedule
from evertick.domain.access import Permission
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.dags.validation import check_schedule
from evertick.domain.errors import Conflict, NotFound, PreconditionFailed, UserError
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.spec import ScheduleSpec, parse_schedule
from evertick.engine import schedules as verbs
from evertick.engine.fire_schedules import UNPLANNABLE, read_spec
from evertick.engine.schedules import CatchUp, put_schedule

router = APIRouter(route_class=GuardedRoute, tags=["schedules"])

Name = Annotated[str, Path(max_length=250, description="The schedule's name.")]
_MOST = 1000
_ETAG = re.compile(r'^"v(\d{1,9})"$')


class PutSchedule(BaseModel):
    """`when`: an expression as `30 6 * * *`, `@every 5m`, `@daily`, instants, or the fields of a spec."""

    model_config = ConfigDict(extra="forbid")
    when: str | list[str] | dict[str, Any]
    timezone: Annotated[str, Field(max_length=100)] | None = None
    start_at: datetime | None = None
    end_at: datetime | None = None
    anchor_at: datetime | None = None
    jitter_seconds: Annotated[float, Field(ge=0, le=10**9)] | None = None
    params: dict[str, Any] = {}
    misfire: MisfirePolicy | None = None
    catchup_window_seconds: Annotated[float, Field(ge=0, le=10**9)] | None = None
    catchup_limit: Annotated[int, Field(ge=1, le=1000)] | None = None
    overlap: OverlapPolicy | None = None
    start_within_seconds: Annotated[float, Field(gt=0, le=10**9)] | None = None
    finish_within_seconds: Annotated[float, Field(gt=0, le=10**9)] | None = None


class CatchUpWish(BaseModel):
    model_config = ConfigDict(extra="forbid")
    catch_up: MisfirePolicy = MisfirePolicy.SKIP
    window_seconds: Annotated[float, Field(ge=0, le=10**9)] | None = None


class ResetSchedule(BaseModel):
    """`is_declared`: the DAG's file has it. If not, it is deleted."""

    is_declared: bool


@router.get("/schedules")
@requires(Permission.READ_SCHEDULES)
async def list_all_schedules(
    caller: Who,
    dag: Annotated[str | None, Query(max_length=250)] = None,
    limit: Limit = USUAL_ITEMS,
    cursor_text: Cursor = None,
) -> Page[Schedule]:
    """Of all DAGs, or of one, in the order of their names."""
    after_dag, after_name = read_cursor(cursor_text, "", "")
    async with caller.reading() as conn:
        dag_ids = [(await caller.dag(conn, dag)).dag_id] if dag is not None else await caller.visible(conn)
        found = await schedules.page(conn, dag_ids=dag_ids, after=(after_dag, after_name), limit=limit)
    next_cursor = cursor(found[-1].dag, found[-1].name) if len(found) == limit else None
    return Page(items=[schedule_of(row) for row in found], next_cursor=next_cursor)


@router.get("/dags/{dag}/schedules")
@requires(Permission.READ_SCHEDULES)
async def list_schedules(dag: DagName, caller: Who) -> Page[Schedule]:
    async with caller.reading() as conn:
        await caller.dag(conn, dag)
        found = await schedules.list_all(conn, dag=dag, limit=_MOST)
    return Page(items=[schedule_of(row) for row in found], next_cursor=None)


@router.get("/dags/{dag}/schedules/{name}")
@requires(Permission.READ_SCHEDULES)
async def show_schedule(dag: DagName, name: Name, response: Response, caller: Who) -> Schedule:
    """Its ETag is its version: send it back as If-Match with a change."""
    async with caller.reading() as conn:
        row = await find_schedule(caller, conn, dag, name)
    put_etag(response, _etag(row.version))
    return schedule_of(row)


@router.put("/dags/{dag}/schedules/{name}", responses={412: {"description": "It is not at that version."}})
@requires(Permission.EDIT_SCHEDULES)
async def change(
    dag: DagName,
    name: Name,
    wanted: PutSchedule,
    response: Response,
    caller: Who,
    if_match: IfMatch = None,
    idempotency_key: IdempotencyKey = None,
) -> Schedule:
    """Create or replace it. With If-Match only from that version on (`"v0"`: it must not exist); what is due still runs."""
    found = await save(caller, dag, name, wanted, expected=_expected(if_match), request=idempotency_key)
    put_etag(response, _etag(found.version))
    return schedule_of(found)


@router.delete("/dags/{dag}/schedules/{name}", status_code=204)
@requires(Permission.EDIT_SCHEDULES)
async def delete(dag: DagName, name: Name, caller: Who, if_match: IfMatch = None) -> None:
    """Its runs and its history stay."""
    async with caller.changing(Channel.PLAN) as conn:
        await find_schedule(caller, conn, dag, name)
        with_version = _expected(if_match)
        await verbs.delete_schedule(conn, dag=dag, name=name, actor=caller.actor, expected_version=with_version)


@router.post("/dags/{dag}/schedules/{name}/pause")
@requires(Permission.PAUSE_SCHEDULES)
async def pause(dag: DagName, name: Name, caller: Who, if_match: IfMatch = None) -> Schedule:
    async with caller.changing(Channel.PLAN) as conn:
        await find_schedule(caller, conn, dag, name)
        with_version = _expected(if_match)
        await verbs.pause_schedule(conn, dag=dag, name=name, actor=caller.actor, expected_version=with_version)
        return schedule_of(await find_schedule(caller, conn, dag, name))


@router.post("/dags/{dag}/schedules/{name}/unpause")
@requires(Permission.PAUSE_SCHEDULES)
async def unpause(
    dag: DagName, name: Name, caller: Who, how: CatchUpWish | None = None, if_match: IfMatch = None
) -> Schedule:
    asked = how or CatchUpWish()
    catch_up = CatchUp(policy=asked.catch_up, window_seconds=asked.window_seconds)
    async with caller.changing(Channel.PLAN, Channel.READY) as conn:
        await find_schedule(caller, conn, dag, name)
        expected = _expected(if_match)
        await verbs.unpause_schedule(
            conn, dag=dag, name=name, actor=caller.actor, catch_up=catch_up, expected_version=expected
        )
        return schedule_of(await find_schedule(caller, conn, dag, name))


@router.post("/dags/{dag}/schedules/{name}/reset")
@requires(Permission.EDIT_SCHEDULES)
async def reset(dag: DagName, name: Name, caller: Who) -> ResetSchedule:
    """Give it back to the code; also one that was deleted."""
    async with caller.changing(Channel.PLAN) as conn:
        await caller.dag(conn, dag)
        return ResetSchedule(is_declared=await verbs.reset_schedule(conn, dag=dag, name=name, actor=caller.actor))


async def save(
    caller: Caller, dag: str, name: str, wanted: PutSchedule, *, expected: int | None, request: str | None = None
) -> ListedSchedule:
    """Create or replace a schedule, from that version on if one is expected."""
    async with caller.changing(Channel.PLAN) as conn:
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
    await caller.dag(conn, dag)
    for row in await schedules.list_all(conn, dag=dag, limit=_MOST):
        if row.name == name:
            return row
    raise NotFound(f"DAG {dag} has no schedule {name!r}.")


def parsed(when: object, given: dict[str, Any]) -> ScheduleSpec:
    try:
        return read_spec(parse_schedule(when, **given).to_json())
    except UserError:
        raise
    except UNPLANNABLE as error:
        raise UserError(f"This is no schedule: {error}") from None


def _etag(version: int) -> str:
    return f'"v{version}"'


def _expected(if_match: str | None) -> int | None:
    if if_match is None or if_match == "*":
        return None
    found = _ETAG.match(if_match)
    if found is None:
        raise PreconditionFailed('If-Match must be the ETag of the schedule, as "v3".')
    return int(found[1])
