"""What schedules did and would do: next fires, history, skipped fires, and simulating an expression."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Any

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.native.dags import DagName
from evertick.api.native.documents import schedule_of
from evertick.api.native.schedules import Name, find_schedule, parsed
from evertick.api.paging import Page
from evertick.db.queries import schedules
from evertick.db.queries.schedules import ScheduleVersion, Skip
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound, UserError
from evertick.domain.schedules.preview import clock_changes, count_fires, fires_between, outcome_of
from evertick.domain.schedules.spec import describe
from evertick.engine.fire_schedules import fires_of

router = APIRouter(route_class=GuardedRoute, tags=["schedules"])

Count = Annotated[int, Query(ge=1, le=200)]
_LONGEST_SIMULATION = timedelta(days=366 * 5)


class NextFires(BaseModel):
    when: str
    fires: list[datetime]


class Simulate(BaseModel):
    """What an expression would do between two instants. Nothing is saved."""

    model_config = ConfigDict(extra="forbid")
    when: str | list[str] | dict[str, Any]
    timezone: Annotated[str, Field(max_length=100)] | None = None
    first: datetime
    last: datetime
    limit: Annotated[int, Field(ge=1, le=1000)] = 100


class ClockEffect(BaseModel):
    at: datetime
    shift_seconds: float
    effect: str
    fires: list[datetime]


class Simulated(BaseModel):
    when: str
    timezone: str
    count: int
    fires: list[datetime]
    clock_changes: list[ClockEffect]


@router.get("/dags/{dag}/schedules/{name}/next")
@requires(Permission.READ_SCHEDULES)
async def next_fires(dag: DagName, name: Name, caller: Who, count: Count = 10) -> NextFires:
    """From where it stands; none while it is paused."""
    async with caller.reading() as conn:
        row = await find_schedule(caller, conn, dag, name)
    return NextFires(when=schedule_of(row).when, fires=fires_of(row, count))


@router.get("/dags/{dag}/schedules/{name}/history")
@requires(Permission.READ_SCHEDULES)
async def history(dag: DagName, name: Name, caller: Who, count: Count = 50) -> Page[ScheduleVersion]:
    """Every version, the latest first; also of a schedule that was deleted."""
    async with caller.reading() as conn:
        await caller.dag(conn, dag)
        found = await schedules.history(conn, dag=dag, name=name, limit=count)
    if not found:
        raise NotFound(f"DAG {dag} never had a schedule {name!r}.")
    return Page(items=found, next_cursor=None)


@router.get("/dags/{dag}/schedules/{name}/skips")
@requires(Permission.READ_SCHEDULES)
async def skips(dag: DagName, name: Name, caller: Who, count: Count = 50) -> Page[Skip]:
    """Fires that did not run, and why; the latest first."""
    async with caller.reading() as conn:
        await find_schedule(caller, conn, dag, name)
        return Page(items=await schedules.skips(conn, dag=dag, name=name, limit=count), next_cursor=None)


@router.get("/skips")
@requires(Permission.READ_SCHEDULES)
async def all_skips(
    caller: Who,
    dag: Annotated[str | None, Query(max_length=250)] = None,
    name: Annotated[str | None, Query(max_length=250)] = None,
    count: Count = 50,
) -> Page[Skip]:
    """Fires that did not run, of all schedules or of a DAG's, deleted ones included; the latest first."""
    async with caller.reading() as conn:
        dag_ids = [(await caller.dag(conn, dag)).dag_id] if dag is not None else await caller.visible(conn)
        return Page(items=await schedules.skips(conn, dag_ids=dag_ids, name=name, limit=count), next_cursor=None)


@router.post("/schedules/simulate")
@requires(Permission.READ_SCHEDULES)
async def simulate(wanted: Simulate, caller: Who) -> Simulated:
    """When it would fire between two instants, and what each change of the clock does to it."""
    spec = parsed(wanted.when, {"timezone": wanted.timezone})
    first, last = _aware(wanted.first), _aware(wanted.last)
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
        fires=fires_between(spec, first, last, wanted.limit),
        clock_changes=effects,
    )


def _aware(instant: datetime) -> datetime:
    if instant.tzinfo is None:
        raise UserError("Give instants with an offset, as 2030-01-01T00:00:00Z.")
    return instant
