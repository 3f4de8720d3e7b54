"""Events that start runs: what arrived and what is due is decided with the pure rules, and applied in one transaction.

Only the leader of shard 0 decides. An event leaves `event_arrival` in the transaction that puts it into a run, a window or a
dead letter, so it counts exactly once for each schedule.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime

from psycopg import AsyncConnection

from evertick.db.queries import requests
from evertick.db.queries.requests import EventSchedule, PendingEvent, WindowRow
from evertick.db.statements import sql_function
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec
from evertick.domain.dags.validation import check_run_params
from evertick.domain.errors import UserError
from evertick.domain.schedules.events import (
    EventMode,
    EventTrigger,
    EventWindow,
    SentEvent,
    add,
    captured,
    close,
    due,
    group_of,
    read_text,
    run_params,
)
from evertick.engine.fire_schedules import JsonObject
from evertick.engine.runs import find_dag
from evertick.engine.verbs import leader_verb

Place = tuple[int, str]


@dataclass(frozen=True, slots=True)
class Routed:
    """`defers`: some first tasks wait for something outside."""

    made: int
    dead: int
    defers: bool


@leader_verb
async def _apply_events(
    conn: AsyncConnection,
    *,
    shard: int,
    epoch: int,
    arrivals: list[int],
    windows: list[JsonObject],
    runs: list[JsonObject],
) -> Routed: ...


@dataclass(slots=True)
class _Open:
    """A window while it is being decided. `run_id`: events of an ordered key wait for it."""

    window: EventWindow
    run_id: int | None = None
    is_run_open: bool = False
    is_changed: bool = False


@dataclass(slots=True)
class _Decision:
    """What one round has decided: the groups of events that become runs, and the windows."""

    windows: dict[Place, _Open]
    groups: list[tuple[EventSchedule, Place | None, tuple[int, ...]]] = field(default_factory=list)


async def route_events(conn: AsyncConnection, *, shard: int, epoch: int, limit: int) -> Routed | None:
    """One batch of arrived events and due windows. None: there was nothing to decide."""
    # In this order: an event that was sent before a window was due, and is committed by now, is not missed.
    waiting = await requests.due_windows(conn, limit=limit)
    arrived = await requests.arrivals(conn, limit=limit)
    if not arrived and not waiting:
        return None
    schedules = {each.schedule_id: each for each in await requests.event_schedules(conn)}
    fitting = _fitting(schedules.values(), arrived)
    places = {place for _, place, _ in fitting if place is not None} - {_place(each) for each in waiting}
    ids, keys = [place[0] for place in places], [place[1] for place in places]
    more = await requests.windows(conn, schedule_ids=ids, group_keys=keys) if places else []
    now = (waiting[0] if waiting else arrived[0]).read_at
    if len(arrived) == limit:
        now = min(now, arrived[-1].sent_at)  # the next ones may belong to a group that is open then
    decision = _decide(schedules, [*waiting, *more], fitting, now=now)
    known = {each.event_id: each for each in arrived}
    needed = sorted({event_id for *_, ids in decision.groups for event_id in ids} - known.keys())
    known |= {each.event_id: each for each in await requests.sent_events(conn, event_ids=needed)} if needed else {}
    runs, of_place = await _runs(conn, decision, {number: row.event for number, row in known.items()})
    windows = [
        _window_row(schedules.get(place[0]), place, each, of_place.get(place))
        for place, each in decision.windows.items()
        if each.is_changed
    ]
    arrivals = [each.event_id for each in arrived]
    return await _apply_events(conn, shard=shard, epoch=epoch, arrivals=arrivals, windows=windows, runs=runs)


def _place(row: WindowRow) -> Place:
    return row.schedule_id, row.group_key


def _fitting(
    schedules: Collection[EventSchedule], arrived: Sequence[PendingEvent]
) -> list[tuple[EventSchedule, Place | None, SentEvent]]:
    """Each event with each schedule that it fits, and the group that it belongs to there."""
    found: list[tuple[EventSchedule, Place | None, SentEvent]] = []
    for arrival in sorted(arrived, key=lambda each: (each.sent_at, each.event_id)):
        for schedule in schedules:
            trigger = read_text(schedule.event)
            parts = None if schedule.is_held else captured(trigger, arrival.event)
            if parts is None:
                continue
            group = group_of(trigger, arrival.event, parts)
            found.append((schedule, None if group is None else (schedule.schedule_id, group), arrival.event))
    return found


def _decide(
    schedules: Mapping[int, EventSchedule],
    rows: Sequence[WindowRow],
    fitting: Sequence[tuple[EventSchedule, Place | None, SentEvent]],
    *,
    now: datetime,
) -> _Decision:
    decision = _Decision({_place(row): _Open(row.window, row.run_id, row.is_run_open) for row in rows})
    for schedule, place, event in fitting:
        if place is None:
            decision.groups.append((schedule, None, (event.event_id,)))
            continue
        there = decision.windows.setdefault(place, _Open(EventWindow()))
        complete, there.window = add(read_text(schedule.event), there.window, event)
        there.is_changed = True
        decision.groups += [(schedule, None, each.event_ids) for each in complete]
    for place, there in decision.windows.items():
        schedule_or_none = schedules.get(place[0])
        if schedule_or_none is None:
            there.window, there.is_changed = EventWindow(), True
        else:
            _release(decision, schedule_or_none, place, there, now)
    return decision


def _release(decision: _Decision, schedule: EventSchedule, place: Place, there: _Open, now: datetime) -> None:
    """Groups that are complete by now. Of an ordered key the next event, once the run of the one before has ended."""
    trigger = read_text(schedule.event)
    if trigger.mode is not EventMode.EACH:
        complete, there.window = close(trigger, there.window, now)
        there.is_changed |= bool(complete)
        decision.groups += [(schedule, None, each.event_ids) for each in complete]
    elif not there.is_run_open:
        first, rest = there.window.event_ids[:1], there.window.event_ids[1:]
        there.is_changed, there.run_id = True, None
        there.window = replace(there.window, event_ids=rest)
        decision.groups += [(schedule, place, first)] if first else []


async def _runs(
    conn: AsyncConnection, decision: _Decision, known: Mapping[int, SentEvent]
) -> tuple[list[JsonObject], dict[Place, int]]:
    """The rows of the runs, and which of them the windows of ordered keys wait for."""
    specs: dict[str, tuple[int, DagSpec]] = {}
    runs: list[JsonObject] = []
    of_place: dict[Place, int] = {}
    for number, (schedule, place, event_ids) in enumerate(decision.groups):
        events = [known[each] for each in event_ids if each in known]
        if not events:
            continue  # pruned meanwhile: they waited for longer than events are kept
        row: JsonObject = {
            "place": number,
            "dag_id": schedule.dag_id,
            "dag": schedule.dag,
            "key": f"{schedule.name}: event {events[-1].event_id}",
            "event": events[-1].name,
        }
        if place is not None:
            of_place[place] = number
        trigger: EventTrigger = read_text(schedule.event)
        given: dict[str, object] = dict(schedule.params)
        try:
            if schedule.dag not in specs:
                found, spec = await find_dag(conn, schedule.dag)
                specs[schedule.dag] = found.dag_id, spec
            spec = specs[schedule.dag][1]
            given = run_params(trigger, events, {each.name for each in spec.params}, schedule.params)
            runs.append({**row, "params": check_run_params(spec, given)})
        except UserError as error:
            runs.append({**row, "params": given, "reason": str(error)})
    return runs, of_place


def _window_row(schedule: EventSchedule | None, place: Place, there: _Open, run: int | None) -> JsonObject:
    window = there.window
    # Of an ordered key: at once, unless a run was made, which it then waits for.
    due_at = None if schedule is None else due(read_text(schedule.event), window)
    return {
        "schedule_id": place[0],
        "group_key": place[1],
        "event_ids": list(window.event_ids),
        "first_at": window.first_at and window.first_at.isoformat(),
        "last_at": window.last_at and window.last_at.isoformat(),
        "due_at": due_at and due_at.isoformat(),
        "run": run,
        "waits_for": there.run_id if there.is_run_open else None,
    }


@sql_function
async def put_webhook(conn: AsyncConnection, *, name: str, webhook: JsonObject, actor: Actor) -> bool:
    """Whether it is new."""


@sql_function
async def delete_webhook(conn: AsyncConnection, *, name: str, actor: Actor) -> bool:
    """Whether there was one."""
