"""The node of our tests runs pods as real processes, and the executor sees what becomes of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from evertick.executors.base import Observed, Phase, RemoteExecutor
from evertick.processes.tree import find_by_token
from tests.executors.kubernetes.conftest import MakeExecutor, order
from tests.executors.kubernetes.kubelet import Kubelet
from tests.executors.kubernetes.objects import Json
from tests.executors.kubernetes.server import ApiServer
from tests.waiting import eventually


def shell_pod(server: ApiServer, name: str, script: str, **spec: Any) -> None:
    """A pod with a program of its own, beside the executor's."""
    task = {"name": "task", "image": "evertick:test", "command": ["sh", "-c", script], "env": spec.pop("env", [])}
    labels = {"evertick.io/owner": "evertick"}
    body: Json = {
        "metadata": {"name": name, "labels": labels},
        "spec": {"containers": [task | spec.pop("task", {})], **spec},
    }
    server.objects.create("pods", "default", body)


async def seen(executor: RemoteExecutor, name: str, phase: Phase) -> Observed:
    async def is_so() -> Observed | None:
        found = await executor.find(name)
        return found if found is not None and found.phase is phase else None

    found: Observed = await eventually(is_so)
    return found


async def gone(executor: RemoteExecutor, name: str) -> None:
    async def is_so() -> bool:
        return await executor.find(name) is None

    await eventually(is_so)


async def test_a_pod_gets_its_secret_as_a_file_and_leaves_its_message(
    server: ApiServer, node: Kubelet, executor: RemoteExecutor
) -> None:
    script = 'cat /in/token > "$OUT"; exit 3'
    server.objects.create("secrets", "default", {"metadata": {"name": "s"}, "stringData": {"token": "hello"}})
    shell_pod(
        server,
        "a",
        script,
        env=[{"name": "OUT", "value": "/dev/termination-log"}],
        task={"volumeMounts": [{"name": "in", "mountPath": "/in"}]},
        volumes=[{"name": "in", "secret": {"secretName": "s", "defaultMode": 0o440}}],
    )
    found = await seen(executor, "a", Phase.ENDED)
    assert (found.exit_code, found.outcome, found.reason) == (3, b"hello", "exit code 3")


async def test_the_executor_s_own_pod_waits_for_its_secret_and_starts_the_agent(
    server: ApiServer, node: Kubelet, executor: RemoteExecutor
) -> None:
    await executor.submit(order())
    await eventually(lambda: order().name in node.started)
    running = node.container_of(order().name)
    assert running.process is not None
    assert order().token not in Path(f"/proc/{running.process.pid}/cmdline").read_text(errors="replace")
    token = Path(running.folder / "volumes" / "evertick-start" / "token")
    assert token.read_text() == order().token
    assert token.stat().st_mode & 0o777 == 0o440


async def test_deletion_is_a_signal_then_a_kill_of_all(
    server: ApiServer, node: Kubelet, executor: RemoteExecutor
) -> None:
    shell_pod(server, "kind", "trap 'exit 0' TERM; while :; do sleep 0.01; done")
    shell_pod(server, "stubborn", "trap '' TERM; setsid sleep 600 & while :; do sleep 0.01; done")
    for name in ("kind", "stubborn"):
        await seen(executor, name, Phase.RUNNING)
        await executor.cancel(name, 1)
    await gone(executor, "kind")
    await gone(executor, "stubborn")
    assert find_by_token(node.container_of("stubborn").mark) == []


@pytest.mark.requirement("B10")
async def test_memory_eviction_deadline_and_a_crash_are_told_apart(
    server: ApiServer, node: Kubelet, executor: RemoteExecutor
) -> None:
    for name in ("oom", "evicted", "crashed"):
        shell_pod(server, name, "sleep 600")
        await seen(executor, name, Phase.RUNNING)
    shell_pod(server, "late", "sleep 600", activeDeadlineSeconds=0.05)
    node.kill("oom")
    node.evict("evicted")
    crashed = node.container_of("crashed").process
    assert crashed is not None
    os.kill(crashed.pid, signal.SIGSEGV)
    found = {name: await seen(executor, name, Phase.ENDED) for name in ("oom", "evicted", "crashed", "late")}
    assert (found["oom"].reason, found["oom"].exit_code) == ("OOMKilled", 137)
    assert found["evicted"].reason == "Evicted: The node was low on resource: memory."
    assert (found["crashed"].reason, found["crashed"].exit_code) == ("exit code 139", 139)
    assert (found["late"].reason or "").startswith("DeadlineExceeded: ")


async def test_images_places_and_variables_that_are_missing_keep_a_pod_waiting(
    server: ApiServer, node: Kubelet, executor: RemoteExecutor
) -> None:
    await executor.submit(order(1, image="absent:1"))
    await executor.submit(order(2, image="NOT/an//Image"))
    await executor.submit(order(3, node_selector={"gpu": "yes"}))
    await executor.submit(order(4, env_secrets=["absent"]))
    wanted = ["ImagePullBackOff", "InvalidImageName", "Unschedulable", "CreateContainerConfigError"]

    async def are_told() -> bool:
        found = await executor.observe()
        reasons = [(found[order(run_id).name].reason or "").split(":")[0] for run_id in (1, 2, 3, 4)]
        return reasons == wanted

    await eventually(are_told)
    node.images.add("absent:1")
    await eventually(lambda: order(1).name in node.started)
    for run_id in (1, 2, 3, 4):
        await executor.cancel(order(run_id).name, 1)
        await gone(executor, order(run_id).name)


async def test_a_lost_node_ends_nothing_until_the_cluster_says_so(
    server: ApiServer, node: Kubelet, executor: RemoteExecutor
) -> None:
    shell_pod(server, "a", "sleep 600")
    await seen(executor, "a", Phase.RUNNING)
    node.lose("a")
    found = await executor.find("a")
    assert found is not None
    assert (found.phase, (found.reason or "").split(":")[0]) == (Phase.RUNNING, "NodeLost")
    server.objects.delete("pods", "default", "a", {"gracePeriodSeconds": 0})
    assert await executor.find("a") is None


async def test_what_a_container_cannot_do_is_told(
    server: ApiServer, node: Kubelet, make_executor: MakeExecutor
) -> None:
    shell_pod(server, "a", "", task={"command": ["/no/such/program"]})
    async with make_executor() as executor:
        found = await seen(executor, "a", Phase.ENDED)
    assert (found.exit_code, found.outcome) == (128, None)
    assert (found.reason or "").startswith("StartError: failed to create containerd task")


async def test_a_pod_that_is_taken_off_the_books_ends_and_one_that_waits_never_begins(
    server: ApiServer, node: Kubelet, tmp_path: Path
) -> None:
    lives: list[tuple[str, str]] = []
    node.on_start = lambda name, pid: lives.append(("began", name))
    node.on_end = lambda name, pid, status: lives.append(("ended", name))
    name_of_pod = {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    shell_pod(server, "a", f'touch {tmp_path}/"$WHO"; exec sleep 600', env=[name_of_pod])
    shell_pod(server, "b", "exec sleep 600", task={"image": "absent:1"})
    await eventually(lambda: (tmp_path / "a").exists())
    (pid,) = await eventually(node.pids)
    for name in ("a", "b"):
        server.objects.delete("pods", "default", name, {"gracePeriodSeconds": 0})
    node.images.add("absent:1")
    await eventually(lambda: not node.pids())
    await eventually(lambda: all(each.is_over for each in (node.container_of("a"), node.container_of("b"))))
    assert lives == [("began", "a"), ("ended", "a")]
    assert not Path(f"/proc/{pid}").exists()
