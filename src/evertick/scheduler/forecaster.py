"""The leader's forecast: it warns of deadlines that will be missed, and stores what it predicts, to measure how good it is.

The simulation runs in a thread: it may take half a second, and nothing waits for it. Never part of planning.
"""

from __future__ import annotations

import asyncio
from datetime import timedelta
from random import Random

from psycopg import AsyncConnection

from evertick.domain.forecast.model import Snapshot
from evertick.domain.forecast.simulate import Forecast, forecast
from evertick.engine.monitoring.forecasts import Prediction, read_snapshot, record_forecast
from evertick.observability import metrics
from evertick.observability.logging import Log
from evertick.processes.system import boot_seconds
from evertick.scheduler.leadership import LeaderKey
from evertick.scheduler.maintenance_jobs import Rerun

FORECAST_SECONDS = 60.0
# The pause between two checks whether the simulation has ended.
POLL_SECONDS = 0.2
# The pause after a forecast, as a multiple of its duration.
PAUSE_FACTOR = 99
HORIZON = timedelta(hours=24)
# A deadline is reported if it is missed in so many of the repetitions.
LIKELY = 0.8
MOST_STORED = 500
# Half of that of a forecast on request: it shares a process with the planning.
_EFFORT = 20_000


class Forecaster:
    """A forecast takes two calls or more: one reads the snapshot and starts the simulation, one stores the result. The
    jobs of the leader in between do not wait for it."""

    def __init__(self, *, log: Log) -> None:
        self._log = log
        self._prediction: Prediction | None = None
        self._simulation: asyncio.Task[Forecast] | None = None
        self._started_at = 0.0

    async def run_slice(self, conn: AsyncConnection, leader: LeaderKey) -> Rerun:
        if leader["shard"] != 0:
            return Rerun()
        if self._prediction is None or self._simulation is None:
            self._started_at = boot_seconds()
            self._prediction = await read_snapshot(conn, horizon=HORIZON)
            self._simulation = asyncio.create_task(asyncio.to_thread(_forecast, self._prediction.snapshot))
            return Rerun(in_seconds=POLL_SECONDS)
        if not self._simulation.done():
            return Rerun(in_seconds=POLL_SECONDS)
        prediction, simulation = self._prediction, self._simulation
        self._prediction = self._simulation = None
        await self._record(conn, leader, prediction, simulation.result())
        return Rerun(in_seconds=max(FORECAST_SECONDS, (boot_seconds() - self._started_at) * PAUSE_FACTOR))

    async def _record(self, conn: AsyncConnection, leader: LeaderKey, prediction: Prediction, found: Forecast) -> None:
        misses: list[dict[str, object]] = []
        bands: list[dict[str, object]] = []
        for each in found.runs:
            run, end = each.run, each.end
            if run.deadline is not None and run.schedule is not None and each.lateness >= LIKELY:
                due_at = prediction.now + timedelta(seconds=run.deadline)
                schedule_id = prediction.schedule_ids[run.version.dag, run.schedule]
                misses.append({"schedule": schedule_id, "run": run.run_id, "due": due_at.isoformat()})
            if run.run_id is not None and run.is_started and end is not None and len(bands) < MOST_STORED:
                bands.append({"run": run.run_id, "low": end.low, "middle": end.middle, "high": end.high})
        for miss in await record_forecast(conn, **leader, bands=bands, misses=misses):
            if not miss.has_ended:
                metrics.ALERTS.labels(kind="will_miss").inc()
            self._log.warning(
                "deadline_miss_averted" if miss.has_ended else "deadline_miss_expected",
                dag=miss.dag,
                schedule=miss.schedule,
                run=miss.run_id,
                due_at=miss.due_at.isoformat(),
            )


def _forecast(snapshot: Snapshot) -> Forecast:
    return forecast(snapshot, Random, effort=_EFFORT)
