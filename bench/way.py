"""The path of a fire in steps, from its due time to the start of the body, from the timestamps of all involved processes.

`make profile ONLY=cron`. Scheduler and runner run as `evertick` runs them, and count the statements that they send.
"""

from __future__ import annotations

import statistics
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from bench.counted import Event, read_events
from bench.house import House, NotMeasured, Server, as_installed
from bench.profile_tables import Shown
from bench.work import percentile, until_over, warm_up

from evertick.db.queries import dags

DATABASE = "bench_way"
_COUNTED = ("scheduler", "runner")
# A longer fire was disturbed, and its statements cannot be distinguished from those of the next one.
_LONGEST_SECONDS = 0.1
_STEPS = (
    "the leader's timer, until it queries the database",
    "reading and planning due schedules",
    "the fire, with its commit",
    "until the wake-up is sent",
    "the wake-up, until the runner requests work",
    "the claim, with its commit",
    "the order, until the body runs",
)


@dataclass(frozen=True, slots=True)
class Fire:
    due: float
    started: float


async def fires(server: Server, folder: Path, count: int) -> list[list[float]]:
    """The milliseconds of each step, for each of that many fires."""

    def launch(service: str, number: int) -> Sequence[str]:
        if service not in _COUNTED:
            return as_installed(service, number)
        return (sys.executable, "-m", "bench.counted", str(folder / f"{service}.json"), service)

    url = await server.make(DATABASE)
    async with House(url=url, folder=folder / "house", launcher=launch) as house:
        await warm_up(house)
        found = await _let_it_tick(house, count)
    await server.drop(DATABASE)
    leader, runner = (read_events(folder / f"{service}.json") for service in _COUNTED)
    ways = [taken_apart(each, leader, runner) for each in found]
    whole = [way for way in ways if way is not None]
    if len(whole) < len(found) / 2:
        raise NotMeasured(f"of {len(found)} fires only {len(whole)} left a trace of each statement on their way")
    return whole


async def _let_it_tick(house: House, count: int) -> list[Fire]:
    await house.publish("ticking.py", ["ticking"])
    row = await dags.find(house.conn, "ticking")
    assert row is not None

    async def has_fired() -> bool:
        cursor = await house.conn.execute("select count(*) from run where dag_id = %s", [row.dag_id])
        found = await cursor.fetchone()
        return found is not None and found[0] > count

    await house.until(has_fired, f"{count} fires", within_seconds=30 + count, pause_seconds=0.25)
    await house.withdraw("ticking.py", ["ticking"])
    await until_over(house, "ticking")
    cursor = await house.conn.execute(
        """select extract(epoch from r.fire_at)::float8, (v.value->>0)::float8
             from run r join result v on v.run_id = r.run_id where r.dag_id = %s order by r.fire_at""",
        [row.dag_id],
    )
    # The first one loads the code; it is the cost of a publish, not of a fire.
    return [Fire(*each) for each in await cursor.fetchall()][1:]


def taken_apart(fire: Fire, leader: Sequence[Event], runner: Sequence[Event]) -> list[float] | None:
    """The durations of the steps of a fire. None if one of its statements is missing."""
    asked = _first(leader, "schedules.due", fire.due)
    fired = _first(leader, "fire_schedules", fire.due)
    woke = _first(leader, "synchronous_commit", fired.at if fired else fire.due)
    claimed = _last(runner, "finish_and_claim", fire.started)
    if fired is None or woke is None or claimed is None or fire.started - fire.due > _LONGEST_SECONDS:
        return None
    begins = [_began(fired) if asked is None or asked.at > fired.at else _began(asked)]
    instants = [fire.due, *begins, _began(fired), fired.at, _began(woke), _began(claimed), claimed.at, fire.started]
    # Out of order: on a busy machine, the previous fire had not ended when this one was due.
    is_its_own = instants == sorted(instants)
    return [1000 * (after - before) for before, after in pairwise(instants)] if is_its_own else None


def _began(event: Event) -> float:
    return event.at - event.seconds


def _first(events: Sequence[Event], name: str, since: float) -> Event | None:
    """The first statement of that name that ended after `since`."""
    later = events[bisect_left(events, since, key=lambda event: event.at) :]
    return next((event for event in later if name in event.name), None)


def _last(events: Sequence[Event], name: str, until: float) -> Event | None:
    """The last statement of that name that ended before `until` and returned something."""
    earlier = events[: bisect_left(events, until, key=lambda event: event.at)]
    return next((event for event in reversed(earlier) if event.name == name and event.rows > 0), None)


def table(ways: Sequence[Sequence[float]]) -> Shown:
    lengths = dict(zip(_STEPS, zip(*ways, strict=True), strict=True))
    lengths["all"] = tuple(sum(way) for way in ways)
    rows = [[name, f"{statistics.median(each):.2f}", f"{percentile(each, 0.9):.2f}"] for name, each in lengths.items()]
    return Shown(title=f"The way of a fire, {len(ways)} of them", heads=["step", "p50 ms", "p90 ms"], rows=rows)
