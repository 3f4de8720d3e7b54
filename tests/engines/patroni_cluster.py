"""A Patroni cluster of a test's own: etcd and two members, from an environment of its own that `EVERTICK_TEST_PATRONI` names."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from evertick.supervisor.postgres import environment, launch_command, programs
from tests.ports import own_port
from tests.waiting import eventually_sync

# What docs/howto/high-availability.md recommends; ttl is the least that Patroni allows.
DYNAMIC = {
    "ttl": 20,
    "loop_wait": 5,
    "retry_timeout": 5,
    "synchronous_mode": True,
    "maximum_lag_on_failover": 1_048_576,
    "postgresql": {"use_pg_rewind": True, "parameters": {"synchronous_commit": "on", "max_connections": 100}},
}


class Member:
    def __init__(self, name: str, root: Path, etcd: int) -> None:
        self.name, self.root, self.port, self.rest = name, root, own_port(), own_port()
        root.mkdir()
        account = {"username": "evertick", "password": "evertick"}
        address = f"127.0.0.1:{self.port}"
        config: dict[str, Any] = {
            "scope": "evertick",
            "name": name,
            "restapi": {"listen": f"127.0.0.1:{self.rest}", "connect_address": f"127.0.0.1:{self.rest}"},
            "etcd3": {"host": f"127.0.0.1:{etcd}"},
            "bootstrap": {"dcs": DYNAMIC, "initdb": [{"encoding": "UTF8"}, {"locale": "C"}, "data-checksums"]},
            "postgresql": {
                "listen": address,
                "connect_address": address,
                "data_dir": f"{root}/data",
                "bin_dir": str(programs("pginstall")),
                "authentication": {"superuser": account, "replication": account, "rewind": account},
                "pg_hba": [
                    "local all all trust",
                    "host all all 127.0.0.1/32 trust",
                    "host replication all 127.0.0.1/32 trust",
                ],
                "parameters": {"unix_socket_directories": str(root)},
            },
        }
        # JSON is YAML.
        (root / "patroni.yaml").write_text(json.dumps(config))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        python = f"{os.environ['EVERTICK_TEST_PATRONI']}/bin/python"
        command = [python, "-m", "patroni", self.root / "patroni.yaml"]
        with (self.root / "log").open("ab") as log:
            self._process = subprocess.Popen(
                launch_command(self.root, signal.SIGKILL, command),
                env=environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def says(self, path: str) -> dict[str, Any]:
        try:
            found: dict[str, Any] = httpx2.get(f"http://127.0.0.1:{self.rest}{path}", timeout=5).json()
        except (httpx2.HTTPError, ValueError):
            return {}
        return found

    @property
    def is_primary(self) -> bool:
        found = self.says("/patroni")
        return found.get("role") in ("primary", "master") and found.get("state") == "running"

    def kill(self) -> None:
        """The server first, then the member, as if the machine had lost its power."""
        for pid in self._pids():
            os.kill(pid, signal.SIGKILL)
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _pids(self) -> list[int]:
        found = []
        for each in Path("/proc").iterdir():
            if each.name.isdigit():
                try:
                    command = (each / "cmdline").read_bytes()
                except OSError:
                    continue
                if str(self.root).encode() in command:
                    found.append(int(each.name))
        # PostgreSQL's own processes have another title, and end with their parent.
        return sorted(found, reverse=True)


class PatroniCluster:
    def __init__(self, root: Path) -> None:
        self.root, self._etcd_port = root, own_port()
        self.members = [Member(name, root / name, self._etcd_port) for name in ("one", "two")]
        self._etcd: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{own_port()}"
        urls = ["--listen-client-urls", client, "--advertise-client-urls", client]
        urls += [
            "--listen-peer-urls",
            peer,
            "--initial-advertise-peer-urls",
            peer,
            "--initial-cluster",
            f"default={peer}",
        ]
        with (self.root / "etcd.log").open("ab") as log:
            self._etcd = subprocess.Popen(
                [f"{os.environ['EVERTICK_TEST_PATRONI']}/bin/etcd", "--data-dir", f"{self.root}/etcd", *urls],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        for member in self.members:
            member.start()
        eventually_sync(lambda: any(each.is_primary for each in self.members), 90)
        eventually_sync(self.has_synchronous_standby, 90)

    def has_synchronous_standby(self) -> bool:
        found = [each.get("role") for member in self.members for each in member.says("/cluster").get("members", [])]
        return "sync_standby" in found

    @property
    def primary(self) -> Member:
        (found,) = [each for each in self.members if each.is_primary]
        return found

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{each.port}" for each in self.members)
        return f"postgresql://evertick:evertick@{hosts}/postgres"

    def stop(self) -> None:
        for member in self.members:
            member.kill()
        if self._etcd is not None:
            self._etcd.kill()
            self._etcd.wait()


def what_is_missing() -> str | None:
    place = os.environ.get("EVERTICK_TEST_PATRONI")
    return None if place and Path(place, "bin", "etcd").exists() else "EVERTICK_TEST_PATRONI names no environment"


@contextmanager
def patroni_cluster(root: Path) -> Iterator[PatroniCluster]:
    root.mkdir()
    made = PatroniCluster(root)
    try:
        made.start()
        yield made
    finally:
        made.stop()
