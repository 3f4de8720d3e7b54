"""Forecasts: when open runs and waiting tasks will end, which deadlines will be missed, and the load of the next hours."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from datetime import datetime, timedelta
from random import Random
from typing import Annotated

from annotated_doc import Doc
from annotated_types import Ge, Le, MaxLen

from evertick.db.queries.monitoring import figures
from evertick.domain.dags.gates import MOST_SLOTS
from evertick.domain.errors import InvalidSchedule, UserError
from evertick.domain.forecast.load import load_of
from evertick.domain.forecast.model import Snapshot, pool_key, with_pools, with_slots
from evertick.domain.forecast.simulate import Forecast, RunForecast, forecast
from evertick.domain.schedules.spec import ScheduleSpec, parse_schedule
from evertick.engine.monitoring.forecasts import Prediction, read_snapshot, whole
from evertick.operations.caller import Caller
from evertick.operations.paging import USUAL_ITEMS, Limit
from evertick.operations.runs import RunId, find_run

MOST_HOURS = 24 * 7
Hours = Annotated[int, Ge(1), Le(MOST_HOURS), Doc("How many hours to look ahead.")]
Changes = Annotated[
    list[str] | None,
    MaxLen(100),
    Doc(
        "What if: `pool:NAME=SLOTS`, `slots:QUEUE=+N` or `slots:QUEUE=-N` for more or fewer slots of runners, or"
        " `schedule:DAG/NAME=SPEC` for another schedule."
    ),
]
_CHANGE = re.compile(r"(pool|slots|schedule):([^=]{1,500})=(.{1,500})", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEta:
    """When a run will end: the middle of the predictions, and the band that contains 80 % of them. `run_id` is None for
    a run that will begin; without an end it does not end in the time that was simulated. `miss_share`: in how many of the
    repetitions it misses its deadline."""

    dag: str
    schedule: str | None
    run_id: int | None
    due_at: datetime
    low_at: datetime | None
    end_at: datetime | None
    high_at: datetime | None
    deadline_at: datetime | None
    miss_share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskEta:
    task: str
    start_at: datetime
    end_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadHour:
    """One hour of a queue. `needed`: the slots that its runs need on average; `backlog`: the slot-hours that are left
    at its end."""

    queue: str
    begins_at: datetime
    slots: int
    needed: float
    used: float
    backlog: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastAccuracy:
    """Of the forecasts whose runs have ended: how many, how many ends were in the band, and the mean relative error."""

    judged: int
    inside_share: float | None
    mean_error: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastReport:
    """`runs`: open ones, then coming ones in the order in which they begin, late ones first. Runs after
    `simulated_until` only count as load."""

    made_at: datetime
    simulated_until: datetime
    repetitions: int
    runs: list[RunEta]
    load: list[LoadHour]
    accuracy: ForecastAccuracy


@dataclass(frozen=True, slots=True, kw_only=True)
class RunForecastReport:
    """A run, and its tasks that have not ended, in the order in which they start."""

    run: RunEta
    tasks: list[TaskEta]


async def show_forecast(
    caller: Caller, *, hours: Hours = 24, change: Changes = None, limit: Limit = USUAL_ITEMS
) -> ForecastReport:
    """Predict when runs end, which deadlines are missed and how loaded the runners are, also for changes not yet made."""
    changes = _read_changes(change or [])
    async with caller.read() as conn:
        visible = await caller.visible_dag_ids(conn)
        found = await read_snapshot(conn, horizon=timedelta(hours=hours), changed=changes.schedules)
        known = await figures.accuracy(conn)
    changes.check(found)
    snapshot = changes.apply(found.snapshot)
    result = await asyncio.to_thread(forecast, snapshot, Random)
    runs = [each for each in result.runs if visible is None or each.run.version.dag_id in visible]
    runs.sort(key=lambda each: (each.lateness < 0.5, each.run.begins, each.run.due, each.run.run_id or 0))
    load = load_of(changes.apply(whole(found)), hours)
    return ForecastReport(
        made_at=found.now,
        simulated_until=found.simulated_until,
        repetitions=result.repetitions,
        runs=[_eta(each, found.now) for each in runs[:limit]],
        load=[
            LoadHour(
                queue=queue,
                begins_at=found.now + timedelta(hours=each.hour),
                slots=each.slots,
                needed=round(each.needed, 4),
                used=round(each.used, 4),
                backlog=round(each.backlog, 4),
            )
            for queue, of_queue in load.items()
            for each in of_queue
        ],
        accuracy=ForecastAccuracy(
            judged=0 if known is None else known.judged,
            inside_share=None if known is None else known.inside / known.judged,
            mean_error=None if known is None else known.error_sum / known.judged,
        ),
    )


async def forecast_run(caller: Caller, *, run_id: RunId) -> RunForecastReport:
    """Predict when a run and its waiting tasks will start and end."""
    async with caller.read() as conn:
        run = await find_run(caller, conn, run_id)
        if run.finished_at is not None:
            raise UserError(f"Run {run_id} has ended.")
        found = await read_snapshot(conn, horizon=timedelta(hours=24))
    result = await asyncio.to_thread(forecast, found.snapshot, Random)
    place = next((n for n, each in enumerate(found.snapshot.runs) if each.run_id == run_id), None)
    if place is None:
        raise UserError(f"Run {run_id} has ended, or is not among the open runs that a forecast reads.")
    return RunForecastReport(run=_eta(result.runs[place], found.now), tasks=_tasks(result, found, place))


def _tasks(result: Forecast, found: Prediction, place: int) -> list[TaskEta]:
    names = found.snapshot.runs[place].version.tasks
    etas = [
        TaskEta(
            task=names[idx].name,
            start_at=found.now + timedelta(seconds=start),
            end_at=found.now + timedelta(seconds=end),
        )
        for (run, idx), (start, end) in result.tasks.items()
        if run == place
    ]
    return sorted(etas, key=lambda each: (each.start_at, each.end_at, each.task))


def _eta(each: RunForecast, now: datetime) -> RunEta:
    def at(seconds: float | None) -> datetime | None:
        return None if seconds is None else now + timedelta(seconds=seconds)

    run, end = each.run, each.end
    return RunEta(
        dag=run.version.dag,
        schedule=run.schedule,
        run_id=run.run_id,
        due_at=now + timedelta(seconds=run.due),
        low_at=at(end.low if end else None),
        end_at=at(end.middle if end else None),
        high_at=at(end.high if end else None),
        deadline_at=at(run.deadline),
        miss_share=round(each.lateness, 3),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Changes:
    pools: dict[str, int]
    slots: dict[str, int]
    schedules: dict[tuple[str, str], ScheduleSpec]

    def apply(self, snapshot: Snapshot) -> Snapshot:
        return with_pools(with_slots(snapshot, self.slots), self.pools)

    def check(self, found: Prediction) -> None:
        """A name that nothing has would silently change nothing."""
        for name in self.pools:
            if pool_key(name) not in found.snapshot.gates:
                raise UserError(f"No task that is open or due uses the pool {name!r}: its size changes nothing.")
        for dag, name in self.schedules:
            if (dag, name) not in found.firing:
                raise UserError(f"DAG {dag!r} has no active schedule {name!r} that fires in this time.")


def _read_changes(texts: list[str]) -> _Changes:
    changes = _Changes(pools={}, slots={}, schedules={})
    for text in texts:
        match = _CHANGE.fullmatch(text)
        if match is None:
            raise UserError(
                f"{text!r:.200} is not a change: write pool:NAME=SLOTS, slots:QUEUE=+N or schedule:DAG/NAME=SPEC."
            )
        kind, name, value = match.groups()
        if kind == "schedule":
            dag, slash, schedule = name.rpartition("/")
            try:
                changes.schedules[dag if slash else name, schedule if slash else "default"] = parse_schedule(value)
            except InvalidSchedule as error:
                raise UserError(f"{text!r:.200}: {error}") from None
        elif not re.fullmatch(r"[+-]?\d{1,7}", value) or abs(int(value)) > MOST_SLOTS:
            raise UserError(f"{text!r:.200}: {value!r:.50} is not a number of slots.")
        elif kind == "pool":
            changes.pools[name] = max(0, int(value))
        else:
            changes.slots[name] = int(value)
    return changes
