"""A Kubernetes cluster of one node beside an installation, and an API of Evertick that its pods reach by a proxy of their own.

The cluster's API can be slow, wrong or away. Pods are real processes, and what is known of services is noted of them as well: when
each began and ended, and under which name the cluster had something. Nothing here injects a fault or judges one.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
from contextlib import AsyncExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from evertick.processes.system import die_with_parent
from tests.chaos.cluster import Cluster
from tests.chaos.members import Member
from tests.chaos.proxy import Proxy
from tests.executors.kubernetes.kubelet import Kubelet
from tests.executors.kubernetes.objects import Change
from tests.executors.kubernetes.server import ApiServer, api_server
from tests.ports import own_port

# What faults are done to: the cluster's API, the way of all agents to ours, our API.
KUBERNETES, AGENTS, API = "kubernetes", "agents", "api-1"
QUEUE = "pods"
IMAGE = "evertick:test"
AGENT_KEY = "k" * 43
SPACE = "default"

# A pod has a host and PIDs of its own: nobody else can prove that its processes are gone.
_ELSEWHERE = """
create function chaos_audit.elsewhere() returns trigger language plpgsql as $$
begin
    new.host := new.runner_id;
    return new;
end $$;
create trigger chaos_elsewhere before insert on evertick.runner for each row
    when (starts_with(new.runner_id, 'et-')) execute function chaos_audit.elsewhere();
"""


class Pods:
    """`server` is the cluster's API, `node` runs the pods, `way` is the agents' to the API of Evertick at `api_url`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster, self.folder = cluster, cluster.folder / "pods"
        self.server = ApiServer()
        self.node = Kubelet(self.server.objects, self.folder / "node")
        # Longer than two looks of a runner.
        self.node.remove_after(2.5)
        self._api_port = own_port()
        self._stack, self._open = AsyncExitStack(), AsyncExitStack()
        self.way: Proxy
        self.api_url: str

    async def __aenter__(self) -> Self:
        self.folder.mkdir()
        async with AsyncExitStack() as stack:
            self.way = stack.enter_context(Proxy.start(f"127.0.0.1:{self._api_port}"))
            self.api_url = f"http://127.0.0.1:{self.way.listen(AGENTS, speaks='http')}"
            stack.push_async_callback(self.close)
            await self.open()
            self._take_notes()
            await self.cluster.watch.must(_ELSEWHERE)
            stack.push_async_callback(self._stop_node, asyncio.create_task(self.node.run()))
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def open(self) -> None:
        """The cluster's API, at the same port as ever."""
        port = int(self.server.url.rpartition(":")[2]) if self.server.url else 0
        await self._open.enter_async_context(api_server(self.server, port=port))

    async def close(self) -> None:
        """Nobody answers there any more; what runs in the cluster goes on."""
        await self._open.aclose()

    async def add_api(self, **settings: Any) -> Member:
        return await self.cluster.add("api", API, api_port=self._api_port, agent_key=(AGENT_KEY,), **settings)

    async def add_runner(self, name: str, **settings: Any) -> Member:
        """One that makes pods. It looks more often than users' do, so that a scenario takes seconds."""
        chosen = {
            "executor": "kubernetes",
            "runner_queues": (QUEUE,),
            "runner_slots": 32,
            "kubeconfig": self.server.write_kubeconfig(self.folder / f"{name}.kubeconfig"),
            "kube_timeout_seconds": 2.0,
            "pod_template": self._write_template(),
            "pod_image": IMAGE,
            "agent_api_url": self.api_url,
            "agent_key": (AGENT_KEY,),
            "tick_seconds": 0.3,
            **settings,
        }
        return await self.cluster.add("runner", name, **chosen)

    def _write_template(self) -> Path:
        cluster = self.cluster
        variables = {
            "CHAOS_EFFECTS": str(cluster.effects_file),
            "CHAOS_FLAGS": str(cluster.flags),
            "CHAOS_SINK_URL": cluster.sink_url,
            "CHAOS_TOKEN": cluster.token,
        }
        env: list[dict[str, Any]] = [{"name": name, "value": text} for name, text in variables.items()]
        env.append({"name": "CHAOS_SERVICE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}})
        file = self.folder / "pod.yaml"
        file.write_text(json.dumps({"spec": {"containers": [{"name": "task", "env": env}]}}))
        return file

    def names(self) -> list[str]:
        """Of the pods that are there."""
        return [str(pod["metadata"]["name"]) for pod in self.server.objects.all_of("pods", SPACE)]

    def are_gone(self) -> bool:
        objects = self.server.objects
        return not objects.all_of("pods", SPACE) and not objects.all_of("secrets", SPACE)

    def agent_pid(self, name: str) -> int:
        process = self.node.container_of(name).process
        assert process is not None, f"{name} has not begun"
        return process.pid

    def token_of(self, name: str) -> str:
        """The start token that the pod has."""
        return base64.b64decode(self.server.objects.get("secrets", SPACE, name)["data"]["token"]).decode()

    def pids(self) -> list[int]:
        return self.node.pids()

    def condition(self) -> str:
        """For people."""
        lines = [f"kubernetes: {dict(self.server.requests)}, refused {dict(self.server.refused)}"]
        lines += [
            f"{pod['metadata']['name']}: {pod['status']}" for pod in self.server.objects.all_of("pods", SPACE)[:20]
        ]
        for log in sorted((self.folder / "node").glob("*/log"))[:10]:
            lines += [f"--- {log.parent.name}", *log.read_text(errors="replace").splitlines()[-8:]]
        return "\n".join(lines)

    def _take_notes(self) -> None:
        record, node, parent = self.cluster.record, self.node, os.getpid()

        def note(change: Change) -> None:
            if change.kind == "pods" and change.type != "MODIFIED":
                tell = record.placed if change.type == "ADDED" else record.displaced
                tell(str(change.now["metadata"]["name"]))

        self.server.objects.on_change = note
        node.on_start, node.on_end = record.started, record.exited
        # Whatever happens to the harness, nothing of the installation outlives it.
        node.before_exec = lambda: die_with_parent(signal.SIGKILL, parent)

    async def _stop_node(self, running: asyncio.Task[None]) -> None:
        running.cancel()
        await self.node.stop()
