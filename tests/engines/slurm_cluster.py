"""A Slurm cluster of a test's own: a controller and two nodes on this machine, with munge on a socket of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ClassVar

from evertick.config import Settings
from evertick.executors.base import RemoteExecutor
from evertick.executors.slurm import SlurmExecutor
from tests.engines.image import PACKAGES
from tests.engines.place import write_stand_in
from tests.ports import own_port
from tests.waiting import eventually_sync

CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge.sock
CryptoType=crypto/munge
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/spool-%n
SlurmctldPidFile={root}/controller.pid
SlurmdPidFile={root}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SlurmdParameters=config_overrides
ReturnToService=2
SchedulerParameters=batch_sched_delay=0,sched_interval=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
# Ended jobs are forgotten soon, so that tests meet one that was.
MinJobAge=10
KillWait=2
SlurmdTimeout=8
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=16 RealMemory=2000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=16 RealMemory=2000
PartitionName=main Nodes=n[1-2] Default=YES MaxTime=INFINITE State=UP
PartitionName=second Nodes=n2 MaxTime=INFINITE State=UP
"""
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scancel")
_PATH = f"{os.environ['PATH']}:/usr/sbin"


class SlurmCluster:
    engine = "slurm"
    # Owner and root may read the folder.
    shows_token = False
    has_hints = False
    agent = f"{PACKAGES.parents[2]}/bin/evertick agent"
    # An outage is a controller that was killed: see test_slurm.py.
    unreachable = None
    refused: ClassVar = [
        ({"partition": "absent"}, "(?i)invalid partition"),
        ({"memory": "900G"}, "not be satisfied|not available"),
        ({"arguments": ["--uid=0"]}, "EVERTICK_EXECUTOR_OPTIONS"),
        ({"time": "soon"}, "it must be minutes"),
    ]

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.conf = root, root / "shared", root / "slurm.conf"
        self.command = write_stand_in(self.folder)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        for each in ("state", "spool-n1", "spool-n2"):
            (root / each).mkdir()
        host = socket.gethostname().split(".")[0]
        self.conf.write_text(CONF.format(host=host, root=root, ports=[own_port() for _ in range(3)]))

    def start(self, name: str) -> None:
        """`munge`, `controller`, `n1` or `n2`."""
        root = self.root
        commands = {
            "munge": [
                "munged",
                "--foreground",
                "--force",
                f"--socket={root}/munge.sock",
                f"--key-file={root}/munge.key",
            ],
            "controller": ["slurmctld", "-D", "-f", str(self.conf)],
            **{node: ["slurmd", "-D", "-N", node, "-f", str(self.conf)] for node in ("n1", "n2")},
        }
        command = commands[name]
        if name == "munge":
            command += [f"--{what}-file={root}/munged.{what}" for what in ("pid", "seed", "log")]
        program = shutil.which(command[0], path=_PATH)
        assert program is not None
        with (root / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                [program, *command[1:]], stdout=log, stderr=log, start_new_session=True
            )

    def kill(self, name: str) -> None:
        process = self._running.pop(name)
        process.kill()
        process.wait()

    def stop(self) -> None:
        self.says("scancel", "--me")
        for process in reversed(self._running.values()):
            process.terminate()
        for process in self._running.values():
            # A node waits for its jobs.
            with suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()

    def wait_until_idle(self) -> None:
        eventually_sync(lambda: self.says("sinfo", "-h", "-o", "%T").split() in (["idle"], ["mixed"]), 60)

    def says(self, *command: str) -> str:
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
        return done.stdout + done.stderr

    def settings(self, **changes: Any) -> dict[str, Any]:
        return {"executor": "slurm", "slurm_folder": self.folder / "attempts", "agent_command": self.command, **changes}

    def executor(self, settings: Settings) -> RemoteExecutor:
        return SlurmExecutor(settings)

    async def kill_attempt(self, name: str) -> None:
        self.says("scancel", "--me", "--name", name, "--signal=KILL", "--batch")

    async def names(self) -> set[str]:
        """Jobs that go on, and folders of any."""
        active = set(self.says("squeue", "--me", "-h", "-o", "%j").split())
        attempts = self.folder / "attempts"
        return active | ({each.name for each in attempts.iterdir()} if attempts.exists() else set())

    async def shown(self, name: str) -> str:
        number = self.says("squeue", "-h", "--states=all", "-n", name, "-o", "%i").split()[0]
        return self.says("scontrol", "show", "job", "-d", number)


def what_is_missing() -> str | None:
    missing = [each for each in _PROGRAMS if shutil.which(each, path=_PATH) is None]
    if missing:
        return f"{missing[0]} is not installed"
    return "it needs root" if os.geteuid() != 0 else None


@contextmanager
def slurm_cluster(root: Path) -> Iterator[SlurmCluster]:
    root.mkdir()
    made = SlurmCluster(root)
    key = root / "munge.key"
    key.write_bytes(os.urandom(1024))
    key.chmod(0o600)
    before = os.environ.get("SLURM_CONF")
    # Slurm's commands find their cluster by it.
    os.environ["SLURM_CONF"] = str(made.conf)
    try:
        made.start("munge")
        eventually_sync((root / "munge.sock").exists, 30)
        for name in ("controller", "n1", "n2"):
            made.start(name)
        made.wait_until_idle()
        yield made
    finally:
        made.stop()
        if before is None:
            del os.environ["SLURM_CONF"]
        else:
            os.environ["SLURM_CONF"] = before
