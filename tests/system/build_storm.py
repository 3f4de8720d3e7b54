"""`make build-storm`: publish and run DAG files with ever new packages, while publishers and runners of one machine are
killed. Each process that uses an environment checks that it is whole, and each task that it is that of its code.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from pathlib import Path

from psycopg import AsyncConnection

from evertick.bundles.bundle import contents
from evertick.db.connect import Purpose, connect
from evertick.db.queries import dags
from evertick.domain.access import Actor
from evertick.engine.runs import trigger
from evertick.processes.tree import find_by_token, kill_tree
from tests.bundles.package_index import from_folder, make_wheel
from tests.databases import own_cluster
from tests.waiting import elapse, eventually

PACKAGES, VERSIONS, MODULES, FILES = 4, 12, 25, 3
KILLED = ("publisher", "runner")
LONGEST_BUILD_SECONDS = 1.0
DAG = """
# /// script
# dependencies = {dependencies}
# ///
import importlib
import json
import sys
from pathlib import Path

from evertick import dag, task

NUMBER = {number}
WANTED = {wanted!r}


def check():
    # The packages of this environment, which is whole.
    try:
        packages = json.loads(Path(sys.prefix, "evertick.json").read_text())["packages"]
        installed = dict(each.split() for each in packages)
        names = [(name, version, f"{{name}}_{{n}}") for name, version in installed.items() for n in range({modules})]
        found = [(name, version, importlib.import_module(module).VERSION) for name, version, module in names]
        assert all(version == seen for _, version, seen in found), found
    except Exception as error:
        report(error)
        raise
    return installed


def report(problem):
    with open({violations!r}, "a") as file:
        print(NUMBER, sys.prefix, repr(problem), file=file)


# Another version of this file may be here by now: then the publisher loads it again.
check()


@task
def work():
    if (installed := check()) != WANTED:
        report(f"{{installed}} instead of {{WANTED}}")
    return NUMBER


@dag
def storm_{file}():
    work()
"""


class Storm:
    def __init__(self, folder: Path, url: str, seed: str) -> None:
        self.folder, self.url, self.dice, self.token = folder, url, random.Random(seed), uuid.uuid4().hex
        self.violations = folder / "violations"
        self.violations.touch()
        (folder / "dags").mkdir()
        for package in range(PACKAGES):
            for version in range(1, VERSIONS + 1):
                make_wheel(folder / "wheels", f"p{package}", str(version), modules=MODULES)
        self.kills = Counter[str]()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, service: str) -> None:
        ours = {
            "EVERTICK_DATABASE_URL": self.url,
            # Two machines: what the publisher has built, the runner has to build, too.
            "EVERTICK_HOME": str(self.folder / f"{service}-home"),
            "EVERTICK_DAGS_FOLDER": str(self.folder / "dags"),
            "EVERTICK_HEALTH_PORT": "0",
            "EVERTICK_HEARTBEAT_SECONDS": "1",
            "EVERTICK_LOST_AFTER_SECONDS": "5",
            "EVERTICK_INFRA_RETRIES": "1000",
            "TEST_TOKEN": self.token,
        }
        with (self.folder / f"{service}.log").open("ab") as log:
            command = [sys.executable, "-m", "evertick.cli.main", service]
            env = {**from_folder(self.folder / "wheels"), **ours}
            self._processes[service] = subprocess.Popen(command, cwd=self.folder, env=env, stdout=log, stderr=log)

    def kill(self, service: str) -> None:
        """Its uv processes live on, as they do when a service crashes."""
        self._processes[service].send_signal(signal.SIGKILL)
        self._processes[service].wait()
        self.kills[service] += 1
        self.start(service)

    def end(self) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        for pid in find_by_token(self.token):
            kill_tree(pid)

    def write(self, number: int) -> str:
        """Another version of one of the files, with other packages."""
        chosen = self.dice.sample(range(PACKAGES), self.dice.randint(1, PACKAGES))
        wanted = {f"p{package}": str(self.dice.randint(1, VERSIONS)) for package in chosen}
        file = self.dice.randrange(FILES)
        text = DAG.format(
            dependencies=json.dumps([f"{name}=={version}" for name, version in wanted.items()]),
            number=number,
            wanted=wanted,
            modules=MODULES,
            violations=str(self.violations),
            file=file,
        )
        draft = self.folder / f"storm_{file}.py"
        draft.write_text(text)
        draft.replace(self.folder / "dags" / draft.name)
        return draft.stem

    async def strike(self, service: str, *, share: float) -> None:
        """Kill it with this probability, at some moment while it resolves, builds or loads."""
        if self.dice.random() < share:
            await elapse(self.dice.uniform(0, LONGEST_BUILD_SECONDS))
            await asyncio.to_thread(self.kill, service)


async def _is_published(conn: AsyncConnection, name: str, number: int) -> bool:
    found = await dags.published_bundle(conn, "default", f"{name}.py")
    return found is not None and f"NUMBER = {number}\n".encode() in contents(found.archive, found.hash)[f"{name}.py"]


async def play(folder: Path, url: str, *, times: int, seed: str, share: float) -> Counter[str]:
    """Returns how often each service was killed, once every run has succeeded."""
    storm = Storm(folder, url, seed)
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        try:
            for service in ("scheduler", *KILLED):
                storm.start(service)
            runs: dict[int, int] = {}
            for number in range(times):
                name = storm.write(number)
                await storm.strike("publisher", share=share)

                async def is_published(name: str = name, number: int = number) -> bool:
                    return await _is_published(conn, name, number)

                await eventually(is_published, 120, pause_seconds=0.05)
                runs[(await trigger(conn, dag=name, params={}, actor=Actor("storm"))).run_id] = number
                await storm.strike("runner", share=share)

            async def are_over() -> bool:
                over = "select count(*) from run_status where finished_at is not null"
                return await _one(conn, over) == len(runs)

            await eventually(are_over, 400, pause_seconds=0.2)
        finally:
            await asyncio.to_thread(storm.end)
        seen = storm.violations.read_text()
        assert not seen, seen
        rows = await conn.execute("select run_id, value from result")
        assert dict(await rows.fetchall()) == runs
    return storm.kills


async def _one(conn: AsyncConnection, query: str) -> object:
    cursor = await conn.execute(query)  # type: ignore[arg-type]
    row = await cursor.fetchone()
    return row and row[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=200)
    parser.add_argument("--seed", default=str(random.SystemRandom().randrange(10**6)))
    options = parser.parse_args()
    began = time.monotonic()
    print(f"{options.times} versions, seed {options.seed} ...", file=sys.stderr)
    with tempfile.TemporaryDirectory() as folder, own_cluster(Path(folder) / "postgres") as cluster:
        url = cluster.database_url(cluster.create(cluster.template()))
        place = Path(folder) / "storm"
        place.mkdir()
        kills = asyncio.run(play(place, url, times=options.times, seed=options.seed, share=0.5))
    told = " and ".join(f"{count} of the {service}" for service, count in kills.items())
    print(f"Every run succeeded in a whole environment, with {told} killed ({time.monotonic() - began:.0f} s).")


if __name__ == "__main__":
    main()
