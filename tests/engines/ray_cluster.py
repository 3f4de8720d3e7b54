"""A Ray cluster of a test's own, from an environment of its own: `EVERTICK_TEST_RAY` names its folder."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

import httpx2

from evertick.config import Settings
from evertick.executors.base import RemoteExecutor
from evertick.executors.ray import RayExecutor
from tests.engines.image import PACKAGES
from tests.engines.place import write_stand_in
from tests.ports import own_port
from tests.waiting import eventually_sync


class RayCluster:
    engine = "ray"
    # Everybody with the dashboard may read a job's variables.
    shows_token = True
    has_hints = False
    agent = f"{PACKAGES.parents[2]}/bin/evertick agent"
    refused: ClassVar = [
        ({"gpus": 1}, "EVERTICK_EXECUTOR_OPTIONS"),
        ({"memory": "much"}, "it must be a size"),
        ({"cpus": -1}, "a number above 0"),
        ({"resources": {"accelerator": "one"}}, "a number above 0"),
    ]
    unreachable: ClassVar = {"ray_address": "http://127.0.0.1:9"}

    def __init__(self, root: Path) -> None:
        self.root, self.folder = root, root / "shared"
        self.command = write_stand_in(self.folder)
        self._port, self._dashboard = own_port(), own_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self.http = httpx2.Client(base_url=self.address, timeout=30)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self._dashboard}"

    def start(self) -> None:
        """A head and a second node. Never `ray stop`: it kills by name."""
        common = ["--num-cpus=8", "--object-store-memory=80000000", "--disable-usage-stats", "--block"]
        head = ["--head", f"--port={self._port}", f"--dashboard-port={self._dashboard}", "--include-dashboard=true"]
        self._run(*head, f"--temp-dir={self.root}/t", *common)

        def is_up() -> bool:
            try:
                return self.http.get("/api/jobs/").status_code == 200
            except httpx2.HTTPError:
                return False

        eventually_sync(is_up, 120)
        self._run(f"--address=127.0.0.1:{self._port}", *common)

    def _run(self, *arguments: str) -> None:
        program = f"{os.environ['EVERTICK_TEST_RAY']}/bin/ray"
        # Nodes of one machine, and clusters that are still ending, would take each other's port for submissions.
        agent = f"--dashboard-agent-listen-port={own_port()}"
        with (self.root / "log").open("ab") as log:
            self._processes.append(
                subprocess.Popen([program, "start", agent, *arguments], stdout=log, stderr=log, start_new_session=True)
            )

    def stop(self) -> None:
        for process in reversed(self._processes):
            process.send_signal(signal.SIGTERM)
        for process in self._processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20)
            # Its children are in its session, and would outlive it.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        self.http.close()

    def settings(self, **changes: Any) -> dict[str, Any]:
        defaults = self.root / "defaults.toml"
        defaults.write_text("[ray]\ncpus = 0.5\n")
        ours: dict[str, Any] = {"executor": "ray", "ray_address": self.address, "executor_defaults": defaults}
        ours["executor_options"] = ("env", "cpus", "memory", "resources")
        return {**ours, "agent_command": self.command, **changes}

    def executor(self, settings: Settings) -> RemoteExecutor:
        return RayExecutor(settings)

    async def kill_attempt(self, name: str) -> None:
        """Its shell with everything below it: they are one process group."""
        for pid in (int(each.name) for each in Path("/proc").iterdir() if each.name.isdigit()):
            try:
                variables = Path(f"/proc/{pid}/environ").read_bytes()
            except OSError:
                continue
            if name.encode() in variables and b"_TOKEN=" in variables:
                os.kill(pid, signal.SIGKILL)

    async def names(self) -> set[str]:
        return {each["submission_id"] for each in self.http.get("/api/jobs/").json() if each["start_time"]}

    async def shown(self, name: str) -> str:
        return self.http.get(f"/api/jobs/{name}").text


def what_is_missing() -> str | None:
    place = os.environ.get("EVERTICK_TEST_RAY")
    return None if place and Path(place, "bin", "ray").exists() else "EVERTICK_TEST_RAY names no environment with Ray"


@contextmanager
def ray_cluster(root: Path) -> Iterator[RayCluster]:
    root.mkdir()
    made = RayCluster(root)
    try:
        made.start()
        yield made
    finally:
        made.stop()
