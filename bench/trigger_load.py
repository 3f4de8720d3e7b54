"""A thousand triggers that wait at once: their process, its memory and CPU time, a kill -9 of it, and how fast events arrive.

    python -m bench.trigger_load [--count 1000] [--python /opt/airflow/bin/python]

Prints each figure with its goal, and ends with 1 if one is missed. Measure on a quiet machine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from psycopg import AsyncConnection
from tests.databases import own_cluster
from tests.engine.world import value
from tests.system.hosting import Said, hosted
from tests.waiting import eventually

from evertick.bundles.bundle import pack
from evertick.config import Settings
from evertick.db.connect import Purpose, connect
from evertick.domain.access import Actor
from evertick.domain.deployments import DeploymentChange, DeploymentKind
from evertick.engine.runs import trigger
from evertick.publisher.deployment import LoadedFolder, deploy, load_files
from evertick.runner.runner import Runner
from evertick.scheduler.scheduler import Scheduler

MOST_MIB, MOST_CPU_PERCENT, MOST_P99_MS, MOST_REPLACE_SECONDS = 200, 3.0, 100.0, 3.0
REST_SECONDS, SPREAD_SECONDS = 10.0, 60.0
FILE = """
import asyncio, os, time
from datetime import timedelta
from airflow.sdk import BaseOperator, DAG
from airflow.triggers.base import BaseTrigger, TriggerEvent

class At(BaseTrigger):
    def __init__(self, number, folder):
        super().__init__()
        self.number, self.folder = number, folder
    def serialize(self):
        return f"{type(self).__module__}.At", {"number": self.number, "folder": self.folder}
    async def run(self):
        with open(f"{self.folder}/started", "a") as file:
            file.write(f"{os.getpid()} {self.number}\\n")
        go = f"{self.folder}/go"
        while not os.path.exists(go):
            await asyncio.sleep(5)
        at = float(open(go).read()) + self.number * SPREAD / COUNT
        await asyncio.sleep(max(0, at - time.time()))
        yield TriggerEvent(time.time())

class Wait(BaseOperator):
    template_fields = ("folder",)
    def __init__(self, *, number, **given):
        super().__init__(**given)
        self.number, self.folder = number, "{{ params.folder }}"
    def execute(self, context):
        self.defer(trigger=At(self.number, self.folder), method_name="done", timeout=timedelta(hours=1))
    def done(self, context, event):
        return event

with DAG("load", schedule=None, params={"folder": ""}, is_paused_upon_creation=False):
    Wait.partial(task_id="wait").expand(number=list(range(COUNT)))
"""


async def measure(url: str, home: Path, python: Path, count: int) -> dict[str, tuple[float, float]]:
    """Each figure, and its goal."""
    dags, marks = home / "dags", home / "marks"
    for folder in (dags, marks):
        folder.mkdir()
    (dags / "load.py").write_text(FILE.replace("COUNT", str(count)).replace("SPREAD", str(SPREAD_SECONDS)))
    settings = Settings(database_url=url, home=home, airflow_python=python, load_timeout_seconds=120)
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(home), "AIRFLOW_HOME": str(home)}
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        loaded = await load_files(dags, ["load.py"], settings, environment)
        bundles = {each.file: pack(dags, each.file, each.closure) for each in loaded}
        change = DeploymentChange(name="load", kind=DeploymentKind.UPLOAD, is_whole=True)
        actor = Actor("load")
        await deploy(conn, LoadedFolder(files=loaded, bundles=bundles), change, settings=settings, actor=actor)
        run = (await trigger(conn, dag="load", params={"folder": str(marks)}, actor=actor)).run_id
        said = Said()
        scheduler = Scheduler(settings, url=url, owner="s0", log=said.log)
        runner = Runner(settings, url=url, log=said.log, environment=environment)
        async with hosted(scheduler), hosted(runner):
            return await _measure(conn, run, marks, count)


async def _measure(conn: AsyncConnection, run: int, marks: Path, count: int) -> dict[str, tuple[float, float]]:
    def started() -> Counter[int]:
        file = marks / "started"
        return Counter(int(line.split()[0]) for line in file.read_text().splitlines()) if file.exists() else Counter()

    await eventually(lambda: sum(started().values()) == count, 600)
    found: dict[str, tuple[float, float]] = {"processes": (len(started()), 1)}
    (pid,) = started()
    await asyncio.sleep(2)
    before = _cpu_seconds(pid)
    await asyncio.sleep(REST_SECONDS)
    found["CPU %"] = 100 * (_cpu_seconds(pid) - before) / REST_SECONDS, MOST_CPU_PERCENT
    found["memory MiB"] = _resident_mib(pid), MOST_MIB
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    await eventually(lambda: sum(started().values()) == 2 * count, 60)
    found["replaced after a kill, s"] = time.monotonic() - killed_at, MOST_REPLACE_SECONDS
    await asyncio.sleep(5)
    (marks / "go").write_text(str(time.time() + 6))
    over = "select count(*) = 0 from run_status where run_id = %s and state = 'running'"
    await eventually(lambda: value(conn, over, run), 600)
    lost = "select count(*) from task where run_id = %s and state <> 'success'"
    found["lost"] = float(str(await value(conn, lost, run))), 0
    delays = await conn.execute(
        "select 1000 * (extract(epoch from k.started_at) - (v.value::text)::float8) from task k"
        " join result v using (run_id, idx, map_index) where k.run_id = %s order by 1",
        [run],
    )
    late = [float(row[0]) for row in await delays.fetchall()]
    found["event to running p50, ms"] = late[len(late) // 2], MOST_P99_MS
    found["event to running p99, ms"] = late[int(len(late) * 0.99)], MOST_P99_MS
    return found


def _cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_mib(pid: int) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--python", type=Path, default=Path(".airflow/bin/python").absolute())
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, own_cluster(Path(folder, "pg")) as cluster:
        url = cluster.database_url(cluster.create(cluster.template()))
        home = Path(folder, "home")
        home.mkdir()
        found = asyncio.run(measure(url, home, options.python, options.count))
    for name, (figure, goal) in found.items():
        print(f"{name:26} {figure:8.1f}  goal {goal:g}{'' if figure <= goal else '  MISSED'}")
    sys.exit(any(figure > goal for figure, goal in found.values()))


if __name__ == "__main__":
    main()
