"""Docker and Podman of a test's own: another socket, other data, no network of their own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import httpx2

from evertick.config import Settings
from evertick.executors.base import RemoteExecutor
from evertick.executors.docker.executor import DockerExecutor
from tests.engines.image import IMAGE, PACKAGES, SOURCE, write_image
from tests.engines.place import write_stand_in
from tests.waiting import eventually_sync

_DOCKERD = "--iptables=false --bridge=none --live-restore --default-ulimit nofile=1024:1024"


class ContainerEngine:
    """`program` is `docker` or `podman`."""

    engine = "docker"
    shows_token = False
    has_hints = True
    agent = "evertick agent"
    refused: ClassVar = [
        ({"image": "localhost/absent:1"}, "(?i)no such image"),
        ({"user": "nobody-here"}, "no user 'nobody-here'|unable to find user"),
        ({"gpus": 1}, "EVERTICK_EXECUTOR_OPTIONS"),
        ({"memory": "much"}, "it must be a size"),
    ]
    unreachable: ClassVar = {"docker_host": "unix:///nonexistent/socket"}

    def __init__(self, program: str, root: Path) -> None:
        self.program, self.root, self.folder = program, root, root / "shared"
        self.socket = root / "s"
        self.command = write_stand_in(self.folder)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        root = self.root
        if self.program == "docker":
            for left in (root / "pid", root / "exec" / "containerd" / "containerd.pid"):
                left.unlink(missing_ok=True)
            files = ["--data-root", f"{root}/data", "--exec-root", f"{root}/exec", "-p", f"{root}/pid"]
            command = ["dockerd", *files, "-H", f"unix://{self.socket}", *_DOCKERD.split()]
        else:
            stores = ["--runtime", "runc", "--root", f"{root}/data", "--runroot", f"{root}/exec"]
            limits = root / "containers.conf"
            # Without limits of its own it asks for more than a container may have that runs tests.
            limits.write_text('[containers]\ndefault_ulimits=["nofile=1024:1024","nproc=1000:1000"]\n')
            command = ["podman", *stores, "system", "service", "--time", "0", f"unix://{self.socket}"]
        self.socket.unlink(missing_ok=True)
        with (root / "log").open("ab") as log:
            # Podman leaves a copy of an imported image in its temporary directory.
            environment = {**os.environ, "CONTAINERS_CONF": f"{root}/containers.conf", "TMPDIR": str(root)}
            self._process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        eventually_sync(lambda: self.client_says("GET", "/_ping") == b"OK" or None, 60)

    def kill(self) -> None:
        """As if the daemon had crashed; containers live on."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()

    def prepare(self) -> None:
        archive = self.root / "image.tar"
        write_image(archive)
        content = archive.read_bytes()
        archive.unlink()
        kind = "application/x-tar"
        said = self.client_says("POST", "/images/create?fromSrc=-&repo=localhost/evertick-test&tag=1", content, kind)
        # Podman 4.3 imports without the tag.
        image = said.decode().rsplit("sha256:", 1)[1].split('"')[0]
        name, tag = IMAGE.rsplit(":", 1)
        self.client_says("POST", f"/images/{image}/tag?repo={name}&tag={tag}")

    def stop(self) -> None:
        for name in self.names_now():
            self.client_says("DELETE", f"/containers/{name}?force=1&v=1")
        assert self._process is not None
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(30)

    def settings(self, **changes: Any) -> dict[str, Any]:
        """With Evertick's source and the shared folder mounted."""
        defaults = self.root / "defaults.toml"
        mounts = [(SOURCE, True), (PACKAGES, True), (self.folder, False)]
        shown = ", ".join(
            f'{{source = "{path}", target = "{path}", read_only = {str(is_fixed).lower()}}}'
            for path, is_fixed in mounts
        )
        defaults.write_text(f'[docker]\nimage = "{IMAGE}"\npull = "never"\nnetwork = "host"\nmounts = [{shown}]\n')
        return {
            "executor": "docker",
            "docker_host": f"unix://{self.socket}",
            "executor_defaults": defaults,
            "executor_options": ("image", "env", "memory", "cpus", "user", "pull", "network", "mounts"),
            "agent_command": self.command,
            **changes,
        }

    def executor(self, settings: Settings) -> RemoteExecutor:
        return DockerExecutor(settings)

    async def kill_attempt(self, name: str) -> None:
        self.client_says("POST", f"/containers/{name}/kill?signal=KILL")

    async def names(self) -> set[str]:
        return set(self.names_now())

    def names_now(self) -> list[str]:
        found = json.loads(self.client_says("GET", "/containers/json?all=1") or b"[]")
        return [each["Names"][0].lstrip("/") for each in found]

    async def shown(self, name: str) -> str:
        return self.client_says("GET", f"/containers/{name}/json").decode()

    def client_says(self, method: str, path: str, body: bytes = b"", kind: str = "application/json") -> bytes:
        """By another client than ours; empty while no daemon listens."""
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=str(self.socket)), timeout=60) as client:
            try:
                return client.request(
                    method, f"http://engine{path}", content=body, headers={"Content-Type": kind}
                ).content
            except httpx2.HTTPError:
                return b""


def is_installed(program: str) -> str | None:
    """What is missing, or None."""
    needed = ["dockerd", "containerd"] if program == "docker" else ["podman", "runc", "catatonit"]
    places = f"{os.environ['PATH']}:/usr/sbin:/usr/libexec/podman:/usr/lib/podman"
    missing = [each for each in needed if shutil.which(each, path=places) is None]
    if missing:
        return f"{missing[0]} is not installed"
    return "it needs root" if os.geteuid() != 0 else None


@contextmanager
def container_engine(program: str, root: Path) -> Iterator[ContainerEngine]:
    made = ContainerEngine(program, root)
    made.start()
    try:
        made.prepare()
        yield made
    finally:
        made.stop()
