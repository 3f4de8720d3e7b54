"""The cost of more runners on one PostgreSQL: CPU time per task by kind of process, batch sizes and context switches.

`make profile ONLY=runners`. Unlike wall-clock time, CPU time shows whether runners wait for each other or only share two
cores.
"""

from __future__ import annotations

import statistics
import threading
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import psycopg
from bench.case_runners import counting_runners
from bench.counted import Event, read_events
from bench.house import House, Server
from bench.profile_tables import Shown
from bench.usage import own_seconds, tree_seconds
from bench.work import Done, fill_slots, run, warm_up

DATABASE = "bench_crowd"
RUNNERS = (1, 2, 4, 8)
TASKS = 5_000
# Interval of sampling the sessions. Each sample costs the server a tenth of a millisecond.
_SESSIONS = "select coalesce(wait_event_type || ': ' || wait_event, 'on a processor') from pg_stat_activity"
_HOT = "where datname = current_database() and application_name = 'evertick-runner' and state = 'active'"


async def crowds(server: Server, folder: Path, rounds: int) -> list[Shown]:
    """The medians of several rounds; each round measures every number of runners."""
    found: dict[int, list[Counter[str]]] = defaultdict(list)
    waits: dict[int, Counter[str]] = defaultdict(Counter)
    url = await server.make(DATABASE)
    for number in range(rounds):
        for count in RUNNERS:
            place = folder / f"{number}-{count}"
            (place / "counts").mkdir(parents=True)
            launcher = counting_runners(place / "counts")
            async with House(url=url, folder=place / "house", runners=count, launcher=launcher) as house:
                await fill_slots(house, "warm")
                await warm_up(house)
                before = _spent(house)
                with _Waits(url) as seen:
                    done = await run(house, "single_warm", TASKS)
                spent = _spent(house)
                spent.subtract(before)
            waits[count] += seen.counts
            found[count].append(_costs(spent, done, place / "counts"))
    await server.drop(DATABASE)
    return [_table(found), _waits(waits)]


def _spent(house: House) -> Counter[str]:
    """CPU seconds so far, and the number of context switches."""
    spent: Counter[str] = Counter()
    for name, service in house.services.items():
        top = psutil.Process(service.pid)
        if not name.startswith("runner"):
            continue
        own = own_seconds(top)
        spent["runners"] += own
        spent["attempts"] += tree_seconds(top) - own
        for process in (top, *top.children(recursive=True)):
            with suppress(psutil.Error):
                switches = process.num_ctx_switches()
                spent["switches"] += switches.voluntary + switches.involuntary
    with psycopg.connect(house.url) as conn:
        server = psutil.Process(conn.info.backend_pid).parent()
        assert server is not None
        spent["postgres"] += tree_seconds(server)
    return spent


def _costs(spent: Counter[str], done: Done, folder: Path) -> Counter[str]:
    events = [event for path in folder.glob("*.json") for event in read_events(path)]
    steps = [event for event in events if _is_meant(event, done)]
    costs: Counter[str] = Counter(
        {f"{name}, µs": 1e6 * spent[name] / TASKS for name in ("runners", "attempts", "postgres")}
    )
    costs["all, µs"] = sum(costs.values())
    costs["tasks per second"] = done.per_second
    costs["tasks per step"] = TASKS / len(steps)
    costs["ms per step"] = 1000 * statistics.mean(event.seconds for event in steps)
    costs["changes of process"] = spent["switches"] / TASKS
    return costs


def _is_meant(event: Event, done: Done) -> bool:
    return (
        event.name == "finish_and_claim"
        and done.spans[0].start <= event.at - event.seconds / 2 <= done.spans[-1].end + 0.05
    )


def _table(found: dict[int, list[Counter[str]]]) -> Shown:
    names = list(next(iter(found.values()))[0])
    rows = [
        [str(count), *(_number(statistics.median(each[name] for each in costs)) for name in names)]
        for count, costs in found.items()
    ]
    return Shown(title="Per task, and what steps were like", heads=["runners", *names], rows=rows)


def _waits(waits: dict[int, Counter[str]]) -> Shown:
    """The wait events of active sessions that claim and finish tasks, as shares of all samples."""
    names = [name for name, _ in sum(waits.values(), Counter[str]()).most_common(6)]
    rows = [
        [str(count), *(f"{100 * seen[name] / max(1, seen.total()):.0f} %" for name in names)]
        for count, seen in waits.items()
    ]
    return Shown(title="What steps were doing in the database", heads=["runners", *names], rows=rows)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


class _Waits:
    """Samples the sessions periodically, in its own thread."""

    def __init__(self, url: str) -> None:
        self._url, self.counts = url, Counter[str]()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Waits:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        with psycopg.connect(self._url, autocommit=True) as conn:
            while not self._over.wait(0.02):
                self.counts.update(row[0] for row in conn.execute(f"{_SESSIONS} {_HOT}").fetchall())
