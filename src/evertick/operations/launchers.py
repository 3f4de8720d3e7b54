"""Fleets of launched runners, for people."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from evertick.db.queries import runner_tokens
from evertick.db.queries.runner_tokens import FleetRow, ListedPilotRow
from evertick.domain.attempt import session_text
from evertick.domain.fleets import MOST_FLEETS, MOST_RUNNERS
from evertick.operations.caller import Caller
from evertick.operations.paging import USUAL_ITEMS, Cursor, Limit, Page, record_of, short_page


class LaunchState(StrEnum):
    REQUESTED = "requested"
    STARTING = "starting"
    RUNNING = "running"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchedRunner:
    """`reason`: the engine's words. `session`: of the runner, once it has joined. `busy`: its tasks."""

    name: str
    state: LaunchState
    reason: str | None
    requested_at: datetime
    session: str | None
    busy: int


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """`desired`: the runners that its queues need now. `leader`: its launcher; `is_led`: that one is alive. `trouble`:
    why none can be started."""

    fleet: str
    engine: str
    queues: list[str]
    min: int
    max: int
    slots: int
    desired: int
    starting: int
    running: int
    draining: int
    leader: str
    is_led: bool
    trouble: str | None
    runners: list[LaunchedRunner]


async def list_launchers(caller: Caller, *, limit: Limit = USUAL_ITEMS, cursor: Cursor = None) -> Page[FleetStatus]:
    """List the fleets of launched runners: how many are needed, starting, running and draining, and why."""
    found = await read_fleets(caller)
    return short_page(found, limit, cursor, lambda fleet: (fleet.fleet,), lambda fleet: fleet)


async def read_fleets(caller: Caller) -> list[FleetStatus]:
    async with caller.read() as conn:
        rows = await runner_tokens.list_fleets(conn, limit=10 * MOST_FLEETS)
        pilots = await runner_tokens.list_pilots(conn, limit=10 * MOST_RUNNERS)
    return [_fleet(row, [_launched(each) for each in pilots if each.fleet == row.name]) for row in rows]


def _launched(row: ListedPilotRow) -> LaunchedRunner:
    # One that has joined and has no session is about to end.
    if row.is_withdrawn or row.request is not None or (row.has_joined and row.session is None):
        state = LaunchState.DRAINING
    elif row.session is not None:
        state = LaunchState.RUNNING
    else:
        state = LaunchState.STARTING if row.submitted_at else LaunchState.REQUESTED
    session = None if row.session is None else session_text(row.session)
    return record_of(LaunchedRunner, row, state=state, session=session, requested_at=row.created_at)


def _fleet(row: FleetRow, launched: list[LaunchedRunner]) -> FleetStatus:
    def count(*states: LaunchState) -> int:
        return sum(each.state in states for each in launched)

    return record_of(
        FleetStatus,
        row,
        fleet=row.name,
        min=row.least,
        max=row.most,
        starting=count(LaunchState.REQUESTED, LaunchState.STARTING),
        running=count(LaunchState.RUNNING),
        draining=count(LaunchState.DRAINING),
        runners=launched,
    )
