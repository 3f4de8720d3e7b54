"""Reads what a forecast needs in a few statements, and stores what was predicted, so that it can be compared with the end."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from itertools import groupby

from psycopg import AsyncConnection

from evertick.db.queries.monitoring import figures
from evertick.db.queries.monitoring.figures import DueSchedule, OpenRun, ProgressRow, VersionTask
from evertick.db.queries.shards import read_clock
from evertick.domain.forecast.model import RunModel, RunnerModel, Snapshot, TaskModel, TaskProgress, VersionModel
from evertick.domain.schedules.preview import fires_between
from evertick.domain.schedules.spec import ScheduleSpec
from evertick.engine.fire_schedules import UNPLANNABLE, read_spec
from evertick.engine.verbs import leader_verb

MOST_RUNS, MOST_SCHEDULES = 20_000, 10_000
# As many tasks of future runs are simulated; the runs after that only count as load.
MOST_TASKS = 20_000
MOST_FIRES = 50_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a forecast begins with. `now` is the time of its snapshot; after `simulated_until`, runs only count as load.
    `firing`: the schedules that fire within the horizon, by DAG and name."""

    snapshot: Snapshot
    later: tuple[RunModel, ...]
    now: datetime
    simulated_until: datetime
    schedule_ids: Mapping[tuple[str, str], int] = field(default_factory=dict)
    firing: Collection[tuple[str, str]] = ()


async def read_snapshot(
    conn: AsyncConnection, *, horizon: timedelta, changed: Mapping[tuple[str, str], ScheduleSpec] | None = None
) -> Prediction:
    """Read open runs, and the runs that will begin within the horizon. `changed`: schedules, by their DAG and name, that fire as
    these specs say instead."""
    now = await read_clock(conn)
    until = now + horizon
    runs = await figures.open_runs(conn, limit=MOST_RUNS)
    due = await figures.due_schedules(conn, until=until, limit=MOST_SCHEDULES)
    version_ids = sorted({each.version_id for each in runs} | {each.version_id for each in due})
    tasks = await figures.version_tasks(conn, version_ids=version_ids)
    edges = await figures.version_edges(conn, version_ids=version_ids)
    done = await figures.progress(conn, run_ids=[each.run_id for each in runs])
    serving = await figures.serving(conn)
    known: list[OpenRun | DueSchedule] = [*runs, *due]
    names = {each.version_id: (each.dag, each.dag_id) for each in known}
    versions = _versions(tasks, edges, names)
    opened = _open(runs, versions, done)
    coming = sorted(_coming(due, versions, now, until, changed or {}), key=lambda run: run.begins)
    simulated, later = _divide(coming)
    last = now + timedelta(seconds=simulated[-1].begins) if later else until
    limits = {each.dag: each.max_active_runs for each in known if each.max_active_runs is not None}
    snapshot = Snapshot(
        runs=(*opened, *simulated),
        runners=tuple(RunnerModel(queues=tuple(queues), slots=slots) for queues, slots in serving),
        gates={name: capacity for each in tasks for name, _, capacity in each.gates or ()},
        active_limits=limits,
    )
    # Also those of open runs that do not fire again within the horizon.
    ids = {
        (each.dag, each.schedule): each.schedule_id
        for each in known
        if each.schedule is not None and each.schedule_id is not None
    }
    return Prediction(
        snapshot=snapshot,
        later=tuple(later),
        now=now,
        simulated_until=last,
        schedule_ids=ids,
        firing={(each.dag, each.schedule) for each in due},
    )


def _versions(
    tasks: Sequence[VersionTask], edges: Sequence[tuple[int, int, int]], names: Mapping[int, tuple[str, int]]
) -> dict[int, VersionModel]:
    of_version: dict[int, list[tuple[int, int]]] = {}
    for version_id, src, dst in edges:
        of_version.setdefault(version_id, []).append((src, dst))
    return {
        version_id: VersionModel(
            dag=names[version_id][0],
            dag_id=names[version_id][1],
            tasks=tuple(map(_task, group)),
            edges=tuple(of_version.get(version_id, ())),
        )
        for version_id, group in groupby(tasks, key=lambda task: task.version_id)
    }


def _task(row: VersionTask) -> TaskModel:
    return TaskModel(
        name=row.name,
        queue=row.queue,
        rank=row.rank,
        needs_slot=row.needs_slot,
        gates=tuple((name, weight) for name, weight, _ in row.gates or ()),
        durations=tuple(row.durations),
        skip_share=row.skip_share,
        instances=row.instances,
    )


def _open(runs: Sequence[OpenRun], versions: Mapping[int, VersionModel], done: Sequence[ProgressRow]) -> list[RunModel]:
    progress: dict[int, dict[int, TaskProgress]] = {}
    for each in done:
        progress.setdefault(each.run_id, {})[each.idx] = TaskProgress(
            ended=each.ended,
            elapsed=tuple(each.elapsed),
            waiting=each.waiting,
            wakes_in=each.wakes_in,
            order=each.place,
        )
    return [
        RunModel(
            version=versions[each.version_id],
            run_id=each.run_id,
            schedule=each.schedule,
            due=each.due,
            is_started=each.is_started,
            is_paused=each.is_paused,
            deadline=None if each.finish_within is None else each.due + each.finish_within,
            progress=progress.get(each.run_id, {}),
        )
        for each in runs
        if each.version_id in versions
    ]


def _coming(
    due: Sequence[DueSchedule],
    versions: Mapping[int, VersionModel],
    now: datetime,
    until: datetime,
    changed: Mapping[tuple[str, str], ScheduleSpec],
) -> Iterable[RunModel]:
    left = MOST_FIRES
    for each in due:
        if each.version_id not in versions or left <= 0:
            continue
        delay = timedelta(seconds=each.delay_seconds)
        try:
            spec = changed.get((each.dag, each.schedule)) or read_spec(each.spec)
            fires = fires_between(spec, now - delay, until - delay, min(left, 10_000))
        except UNPLANNABLE:
            continue  # such a schedule is in quarantine, or soon will be
        left -= len(fires)
        for fire in fires:
            begins = (fire + delay - now).total_seconds()
            yield RunModel(
                version=versions[each.version_id],
                schedule=each.schedule,
                due=begins,
                begins=begins,
                deadline=None if each.finish_within is None else begins + each.finish_within,
            )


def _divide(coming: Sequence[RunModel]) -> tuple[list[RunModel], list[RunModel]]:
    tasks = 0
    for place, run in enumerate(coming):
        tasks += len(run.version.tasks)
        if tasks > MOST_TASKS and place:
            return list(coming[:place]), list(coming[place:])
    return list(coming), []


def whole(prediction: Prediction) -> Snapshot:
    """With the runs that are only counted as load."""
    return replace(prediction.snapshot, runs=(*prediction.snapshot.runs, *prediction.later))


@dataclass(frozen=True, slots=True)
class ExpectedMiss:
    """A deadline that will be missed, or will no longer be (`has_ended`)."""

    dag: str
    schedule: str
    run_id: int | None
    due_at: datetime
    has_ended: bool


@leader_verb
async def record_forecast(
    conn: AsyncConnection, *, shard: int, epoch: int, bands: list[dict[str, object]], misses: list[dict[str, object]]
) -> list[ExpectedMiss]:
    """Store the bands of runs that have none yet, and the deadlines that are expected to be missed. Returns the changes."""
