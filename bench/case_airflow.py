"""DAG files of Airflow: the light workloads, the first task of a file, and what a file costs in memory.

Needs the Python of an environment with Airflow in EVERTICK_AIRFLOW_PYTHON; `evertick airflow setup` makes one.
"""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

from bench.case import ISOLATIONS, Bench
from bench.figures import Figure, at_least, at_most, median
from bench.house import House, NotMeasured
from bench.work import run

from evertick.processes.system import children_of

_DATABASE = "bench_airflow"
DATABASES = (_DATABASE,)
_FILE = "airflow_light.py"
# As in production: a plugin among Airflow's examples prints at the start and the end of each task.
_SETTINGS = {"AIRFLOW__CORE__LOAD_EXAMPLES": "False"}
_COLD_FILES = 4
_CHAIN_GOALS = {"process": at_most(0.5), "warm": at_most(0.12)}
_FAN_GOALS = {"process": at_most(0.9), "warm": None}
_SINGLES_GOALS = {"process": at_least(120), "warm": at_least(600)}
_SINGLES = {"process": 400, "warm": 1_200}
_ABOUT = {
    "chain": ("40 PythonOperators in sequence, first start to last end", _CHAIN_GOALS),
    "fan": ("1 → 100 (mapped) → 1, first start to last end", _FAN_GOALS),
}


async def airflow(bench: Bench) -> list[Figure]:
    """Each round measures every variant once."""
    if not os.environ.get("EVERTICK_AIRFLOW_PYTHON"):
        raise NotMeasured(
            "EVERTICK_AIRFLOW_PYTHON names no Python with Airflow; make one with `evertick airflow setup`"
        )
    await bench.server.make(_DATABASE)
    samples = defaultdict[str, list[float]](list)
    async with bench.house(_DATABASE, settings=_SETTINGS) as house:
        await house.publish(_FILE, _names("af"))
        await _cold(house, samples)
        for isolation in ISOLATIONS:
            await run(house, f"af_single_{isolation}", 2 * house.slots)
        for _ in bench.rounds():
            for isolation in ISOLATIONS:
                for name in _ABOUT:
                    samples[f"{name}.{isolation}"].append((await run(house, f"af_{name}_{isolation}")).wall)
                done = await run(house, f"af_single_{isolation}", _SINGLES[isolation])
                samples[f"singles.{isolation}"].append(done.per_second)
        samples["memory"] += _private_mib(house)
        facts = await bench.facts(house, "process", done.run_ids)
    found = [
        median(f"airflow.{name}.{isolation}", about, "s", samples[f"{name}.{isolation}"], goals[isolation], facts)
        for name, (about, goals) in _ABOUT.items()
        for isolation in ISOLATIONS
    ]
    for isolation, goal in _SINGLES_GOALS.items():
        about = f"{_SINGLES[isolation]:,} runs of one PythonOperator at once"
        found.append(
            median(f"airflow.singles.{isolation}", about, "tasks/s", samples[f"singles.{isolation}"], goal, facts)
        )
    about = "first task of a file, from the trigger to its first line"
    found.append(median("airflow.cold", about, "ms", samples["cold"], at_most(150), facts))
    about = "private memory of a file's processes without attempts"
    return [*found, median("airflow.memory", about, "MiB", samples["memory"], at_most(20), facts)]


async def _cold(house: House, samples: defaultdict[str, list[float]]) -> None:
    """Each file has its own code, and so its own processes, which do not exist before its first task."""
    for number in range(_COLD_FILES):
        prefix = f"cold{number}"
        await house.publish(_FILE, _names(prefix), PREFIX=f'"{prefix}"')
        done = await run(house, f"{prefix}_single_process")
        samples["cold"].append((done.spans[0].start - done.submitted) * 1000)
    await house.publish(_FILE, _names("af"))


def _names(prefix: str) -> list[str]:
    return [f"{prefix}_{name}_{isolation}" for name in ("chain", "fan", "single") for isolation in ISOLATIONS]


def _private_mib(house: House) -> list[float]:
    """Of each fork server and its reaper: the pages that no other process shares."""
    runner = next(service for name, service in house.services.items() if name.startswith("runner"))
    found = []
    for reaper in children_of(runner.pid):
        servers = children_of(reaper)
        if servers and _is_forked(reaper):
            found.append(sum(map(_private_bytes, (reaper, *servers))) / 2**20)
    if not found:
        raise NotMeasured("no fork server of an Airflow file was found below the runner")
    return found


def _is_forked(pid: int) -> bool:
    return b"zygote_process" in Path(f"/proc/{pid}/cmdline").read_bytes()


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024
