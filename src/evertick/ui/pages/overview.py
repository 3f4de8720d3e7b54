"""The home page: health, running, late and failed runs, waiting tasks with their reasons, and the next fires."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

from fastapi import Request, Response
from psycopg import AsyncConnection

from evertick.api.context import ApiCaller, Who
from evertick.config import Settings
from evertick.db.queries import gates, overview, runners, shards, waits
from evertick.db.queries.overview import CAP, ActivitySummary, QueueLine, Upcoming
from evertick.db.queries.runners import BusyRunner
from evertick.db.queries.shards import Leader, ShardRow
from evertick.domain.access import Permission
from evertick.domain.durations import length
from evertick.domain.explain import Blocked, describe_blocked, kind_of
from evertick.engine.fire_schedules import fires_per_minute
from evertick.ui.layout import page, page_router
from evertick.ui.pages.capacity import SILENT_HEARTBEATS

router = page_router()

SHOWN = 8
_MOST_RUNNERS, _MOST_QUEUES = 1000, 100
# Length of the timeline in minutes, and the maximum number of schedules in it.
MINUTES = 60
_MOST_SCHEDULES = 100
# A fire more than this after its due time is late.
LATE_SECONDS = 1.0

_LATE_WORDS = {
    "not_fired": "did not fire in time",
    "not_started": "did not start in time",
    "not_finished": "did not finish in time",
    "will_miss": "is expected to miss its deadline",
    "set_aside": "cannot be planned",
}


@dataclass(frozen=True, slots=True)
class Sign:
    """One line of health."""

    name: str
    is_well: bool
    text: str
    path: str | None = None


@dataclass(frozen=True, slots=True)
class Minute:
    """One bar of the timeline."""

    at: datetime
    count: int
    height: int
    names: str


@dataclass(frozen=True, slots=True)
class UpcomingSchedule:
    """`at` is the next fire; `counts` has the number of fires of each minute."""

    at: datetime
    dag: str
    schedule: str
    counts: list[int]


@router.get("/", Permission.READ_DAGS)
async def show_overview(request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        dag_ids = await caller.visible_dag_ids(conn)
        activity = await overview.activity(conn, dag_ids=dag_ids)
        signs = await _signs(caller, conn, activity)
        running = await overview.running(conn, dag_ids=dag_ids, limit=SHOWN)
        failing = await overview.failing(conn, dag_ids=dag_ids, limit=SHOWN)
        asked = await waits.list_approvals(conn, dag_ids=dag_ids, limit=SHOWN)
        late = await overview.late(conn, dag_ids=dag_ids, limit=SHOWN)
        sees_gates = caller.principal.may(Permission.READ_GATES)
        blocked = await gates.blocked(conn, limit=SHOWN) if sees_gates else []
        coming = await overview.upcoming(conn, seconds=60 * MINUTES, dag_ids=dag_ids, limit=_MOST_SCHEDULES)
    upcoming = _upcoming(coming, activity.read_at)
    minutes = _timeline(upcoming, activity.read_at)
    return page(
        request,
        "overview.html",
        here="home",
        activity=activity,
        cap=CAP,
        signs=signs,
        is_well=all(each.is_well for each in signs),
        running=running,
        failing=failing,
        asked=asked,
        late=[(each, _LATE_WORDS[each.kind]) for each in late],
        waits=[(each, kind_of(each), _reason(each, activity.read_at)) for each in blocked],
        upcoming=[(each, sum(each.counts) - 1) for each in upcoming[:SHOWN]],
        schedule_count=len(upcoming),
        fire_count=sum(minute.count for minute in minutes),
        is_cut=len(coming) == _MOST_SCHEDULES,
        minutes=minutes,
    )


async def _signs(caller: ApiCaller, conn: AsyncConnection, activity: ActivitySummary) -> list[Sign]:
    """The health lines. Lines about the whole installation need the permissions for it."""
    signs = [Sign("Database", True, "reachable")]
    knows_all = caller.principal.may(Permission.READ_METRICS)
    led = await shards.page(conn)
    leader = await shards.leader(conn, shard=0)
    if len(led) > 1:
        signs.append(_shards_sign(led, knows_all=knows_all))
    elif leader is not None and leader.is_live:
        who = f"{leader.owner} leads{_ticked(leader, activity, caller.context.settings)}" if knows_all else "active"
        signs.append(Sign("Scheduler", True, who))
    else:
        missing = "no scheduler leads, so no schedule fires" if leader is None else leader.missing
        signs.append(Sign("Scheduler", False, f"{missing}. Start one: evertick scheduler"))
    if knows_all:
        signs.append(_on_time(activity))
    if caller.principal.may(Permission.READ_RUNNERS):
        living = await runners.list_busy(conn, limit=_MOST_RUNNERS, with_agents=False)
        lines = await overview.lines(conn, limit=_MOST_QUEUES)
        signs += [_runners_sign(living, caller.context.settings), _queues_sign(lines, activity.read_at)]
    if activity.broken_files and caller.principal.may(Permission.READ_IMPORTS):
        signs.append(Sign("DAG files", False, f"{activity.broken_files} cannot be loaded", "/dags?broken=1"))
    return signs


def _shards_sign(led: list[ShardRow], *, knows_all: bool) -> Sign:
    """Health of several shards: schedules in a shard without a leader do not fire."""
    alone = [str(each.shard) for each in led if not each.is_live]
    path = "/schedulers" if knows_all else None
    if alone:
        shown = ", ".join(alone[:5]) + (" …" if len(alone) > 5 else "")
        return Sign(
            "Schedulers", False, f"no scheduler leads shard {shown} of {len(led)}. Start one: evertick scheduler", path
        )
    owners = sorted({each.owner for each in led if each.owner})
    who = f"{len(owners)} scheduler{'s lead' if len(owners) > 1 else ' leads'} {len(led)} shards"
    return Sign("Schedulers", True, who, path)


def _ticked(leader: Leader, activity: ActivitySummary, settings: Settings) -> str:
    """The age of the last tick, derived from the lease it renewed. Empty if the leader uses another lease length."""
    left = (leader.lease_until - activity.read_at).total_seconds() if leader.lease_until else 0.0
    ago = settings.leader_lease_seconds - left
    return f", last tick {length(ago)} ago" if 0 <= ago <= settings.leader_lease_seconds else ""


def _on_time(activity: ActivitySummary) -> Sign:
    if activity.late:
        since = length((activity.read_at - activity.late_since).total_seconds()) if activity.late_since else ""
        who = f"{activity.late} schedules overdue, the first" if activity.late > 1 else "1 schedule overdue"
        return Sign("On time", False, f"{who} by {since}")
    if activity.lag_median is None or activity.lag_most is None:
        return Sign("On time", True, "nothing has fired yet")
    lag = f"{length(max(activity.lag_median, 0))} after the due time, 95 of 100 within {length(max(activity.lag_most, 0))}"
    return Sign("On time", activity.lag_median <= LATE_SECONDS, f"fires {lag}")


def _runners_sign(living: list[BusyRunner], settings: Settings) -> Sign:
    silent = [each for each in living if each.silent_seconds > SILENT_HEARTBEATS * settings.heartbeat_seconds]
    slots, busy = sum(each.slots for each in living), sum(each.busy for each in living)
    if not living:
        return Sign("Runners", False, "no runner is alive, so no task can run. Start one: evertick runner")
    text = f"{len(living)} alive, {busy} of {slots} slots busy"
    return Sign("Runners", not silent, text + (f", {len(silent)} silent" if silent else ""))


def _queues_sign(lines: list[QueueLine], now: datetime) -> Sign:
    unserved = [each.queue for each in lines if not each.is_served]
    if unserved:
        return Sign("Queues", False, f"no runner serves {', '.join(unserved[:3])}")
    oldest = min((each.oldest_at for each in lines if each.oldest_at), default=None)
    depth = sum(each.depth for each in lines)
    if oldest is None:
        return Sign("Queues", True, "no task is queued")
    return Sign("Queues", True, f"{depth} queued, the oldest for {length(max((now - oldest).total_seconds(), 0))}")


def _reason(each: Blocked, now: datetime) -> str | None:
    """What the tasks wait for, in words."""

    def when(instant: str) -> str:
        seconds = (datetime.fromisoformat(instant) - now).total_seconds()
        return f"in {length(seconds)}" if seconds > 0 else f"{length(-seconds)} ago"

    return describe_blocked(each, when)


def _upcoming(coming: list[Upcoming], now: datetime) -> list[UpcomingSchedule]:
    """Each schedule once, so that a frequent one leaves room for others in the list."""
    found = [
        UpcomingSchedule(row.next_due, row.dag, row.schedule, fires_per_minute(row, now, MINUTES)) for row in coming
    ]
    return sorted((each for each in found if any(each.counts)), key=lambda each: (each.at, each.dag))


def _timeline(found: list[UpcomingSchedule], now: datetime) -> list[Minute]:
    """The fires of each minute."""
    totals = [sum(each.counts[place] for each in found) for place in range(MINUTES)]
    most = max(totals)
    minutes = []
    for place, count in enumerate(totals):
        names = sorted({each.dag for each in found if each.counts[place]})
        minutes.append(
            Minute(
                at=now + timedelta(minutes=place),
                count=count,
                height=max(round(100 * count / most), 6) if count else 0,
                names=", ".join(names[:5]) + (" …" if len(names) > 5 else ""),
            )
        )
    return minutes
