"""`evertick up` as a person uses it: one command, everything restarted when it dies, nothing left when it stops."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import httpx
import psycopg
import pytest

from evertick.processes.system import children_of
from evertick.processes.tree import find_by_token, kill_tree
from evertick.supervisor.postgres_home import holder_of
from tests.waiting import eventually_sync

QUICK = """
import os
from evertick import dag, task

@task
def beat():
    # Tasks must not learn how to reach the database: the runs of this test would all fail.
    assert "EVERTICK_DATABASE_URL" not in os.environ
    print("beat")

@dag(schedule="@every 300ms")
def quick():
    beat()
"""


class Up:
    """One `evertick up` in a folder of its own."""

    def __init__(self, folder: Path, *options: str, **settings: str) -> None:
        self.folder, self.token = folder, uuid.uuid4().hex
        self._conn: psycopg.Connection | None = None
        self._output = (folder / "output.txt").open("w+")
        environment = {key: value for key, value in os.environ.items() if not key.startswith("EVERTICK_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "evertick.cli.main", "up", *options],
            cwd=folder,
            env={**environment, **settings, "TEST_TOKEN": self.token},
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def output(self) -> str:
        return (self.folder / "output.txt").read_text()

    def wait_for(self, pattern: str, times: int = 1, within_seconds: float = 90.0) -> None:
        def seen() -> bool:
            assert self.process.poll() is None, self.output
            return len(re.findall(pattern, self.output)) >= times

        eventually_sync(seen, within_seconds)

    def finished_runs(self) -> int:
        if self._conn is None or self._conn.closed:
            holder = holder_of(self.folder / ".evertick")
            assert holder is not None
            self._conn = psycopg.connect(holder.url, autocommit=True)
        row = self._conn.execute("select count(*) from evertick.run_status where state = 'success'").fetchone()
        return int(row[0]) if row else 0

    def wait_for_more_runs(self) -> None:
        """Scheduling and running both work now."""
        before = [-1]

        def grown() -> bool:
            try:
                now = self.finished_runs()
            except (psycopg.Error, AssertionError):
                return False
            if before[0] < 0:
                before[0] = now
            return now >= before[0] + 2

        eventually_sync(grown, within_seconds=90.0)

    def child(self, command: str) -> int:
        """A process that `up` or its fork_server started."""
        own = children_of(self.process.pid)
        for pid in [*own, *(below for each in own for below in children_of(each))]:
            if re.search(command, Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()):
                return pid
        raise AssertionError(f"no {command} among the children")

    def service(self, name: str) -> int:
        return self.child(rf"^evertick {name}\b|evertick.cli.main {name}\b")

    def leftovers(self) -> list[int]:
        return [pid for pid in find_by_token(self.token) if pid != os.getpid()]

    def end(self) -> None:
        if self._conn is not None:
            self._conn.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for pid in self.leftovers():
            kill_tree(pid)
        self._output.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a place"
    (made / "dags").mkdir(parents=True)
    (made / "dags" / "quick.py").write_text(QUICK)
    return made


@pytest.fixture
def up(folder: Path) -> Iterator[Up]:
    running = Up(folder)
    yield running
    running.end()


def sign_in_once(up: Up) -> None:
    """The link that it prints leads to a session; the API and the pages answer there, and nowhere without one."""
    up.wait_for(r"/auth/link/evl_\S+")
    link = re.findall(r"http://127\.0\.0\.1:\d+/auth/link/evl_\S+", up.output)[0]
    address = link.split("/auth/")[0]
    assert f"Sign in   {link}" in up.output
    with httpx.Client(base_url=address, timeout=120) as client:
        assert client.get("/api/v1/dags").status_code == 401
        assert client.get("/").headers["location"] == "/login"
        assert client.post(link.removeprefix(address)).status_code == 303
        assert "Running now" in client.get("/").raise_for_status().text
        assert [dag["name"] for dag in client.get("/api/v1/dags").json()["items"]] == ["quick"]


@pytest.mark.long
@pytest.mark.requirement("A9")
def test_up_fires_runs_survives_every_death_and_stops_clean(up: Up) -> None:
    up.wait_for("Evertick is up")
    up.wait_for_more_runs()
    sign_in_once(up)
    for number, name in enumerate(("scheduler", "runner", "publisher", "api"), 1):
        os.kill(up.service(name), signal.SIGKILL)
        up.wait_for(" service_died ", times=number)
        up.wait_for_more_runs()
    os.kill(up.child("postgres"), signal.SIGKILL)
    up.wait_for_more_runs()
    os.kill(up.child("^evertick fork-server"), signal.SIGKILL)
    up.wait_for("each on its own")
    up.wait_for(" service_died ", times=7)
    up.wait_for_more_runs()
    up.process.send_signal(signal.SIGINT)
    assert up.process.wait(timeout=60) == 0
    eventually_sync(lambda: not up.leftovers(), within_seconds=60.0)
    assert "Traceback" not in up.output


def test_a_killed_up_takes_everything_with_it_and_the_next_one_goes_on_until_its_runner_is_dismissed(
    up: Up, folder: Path
) -> None:
    up.wait_for("Evertick is up")
    up.wait_for_more_runs()
    up.process.kill()
    up.process.wait()
    eventually_sync(lambda: not up.leftovers(), within_seconds=60.0)
    again = Up(folder)
    try:
        again.wait_for("Evertick is up")
        again.wait_for_more_runs()
        _dismiss_the_runner(again, folder)
        again.process.send_signal(signal.SIGTERM)
        assert again.process.wait(timeout=60) == 0
        assert "Traceback" not in again.output
    finally:
        again.end()


def _dismiss_the_runner(up: Up, folder: Path) -> None:
    """A killed runner is proven dead and started again; one that was dismissed is not."""
    os.kill(up.service("runner"), signal.SIGKILL)
    up.wait_for(" runner_declared_dead ")
    up.wait_for_more_runs()
    command = [sys.executable, "-m", "evertick.cli.main", "runners", "drain", "--all", "--stop", "--wait"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("EVERTICK_")}
    drained = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert "All of their attempts have ended." in drained.stdout
    up.wait_for("drained and stopped on request")
    assert up.output.count(" service_died ") == 1
