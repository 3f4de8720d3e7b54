"""A node that runs pods as local processes: scheduling, images, volumes, termination messages, signals, exit codes.

It has no mount namespaces: where a container mounts something, the path is replaced in its arguments and environment. A termination
message is read from the file that was there before the container began, as from a bind mount: replacing the file hides it.
"""

from __future__ import annotations

import asyncio
import base64
import os
import re
import shutil
import signal
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from evertick.processes.tree import find_by_token, kill_tree
from tests.executors.kubernetes.objects import Failure, Json, Objects, stamp
from tests.waiting import elapse

_MARK = "KUBELET_CONTAINER"
_IMAGE = re.compile(r"[a-z0-9]+([._/:@-]+[a-z0-9_]+)*")
_MOST_MESSAGE = 4096
_STARTED = Path(sys.executable).parent


class Kubelet:
    """`images` are those that can be pulled; any other is not there. `labels` are the node's. `on_start` and `on_end` are told
    of each container's process, `before_exec` is called in it before it becomes the container's program.
    """

    def __init__(self, objects: Objects, folder: Path, *, namespace: str = "default") -> None:
        self.objects, self.folder, self.namespace = objects, folder, namespace
        self.on_start: Callable[[str, int], None] = lambda name, pid: None
        self.on_end: Callable[[str, int, int], None] = lambda name, pid, status: None
        self.before_exec: Callable[[], None] | None = None
        self.node = "node-1"
        self.images = {"evertick:test"}
        self.labels = {"kubernetes.io/os": "linux"}
        self.is_cut_off = False
        self._removal_seconds = 0.0
        self.started: list[str] = []
        self._containers: dict[str, _Container] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def remove_after(self, seconds: float) -> None:
        """As a real one, which takes a second or more to remove a pod that has ended and was deleted."""
        self._removal_seconds, self.objects.removes_ended_at_once = seconds, False

    async def run(self) -> None:
        version = 0
        while True:
            await self.objects.changed(version)
            version = self.objects.version
            pods = self.objects.all_of("pods", self.namespace)
            for pod in pods:
                self._sync(pod)
            self._end_removed({pod["metadata"]["uid"] for pod in pods})

    def pids(self) -> list[int]:
        """The first process of each container that runs."""
        processes = [each.process for each in self._containers.values() if each.process is not None]
        return [process.pid for process in processes if process.returncode is None]

    def container_of(self, name: str) -> _Container:
        return next(each for each in self._containers.values() if each.name == name)

    def kill(self, name: str) -> None:
        """As the kernel does it when a container has used up its memory."""
        container = self.container_of(name)
        container.is_out_of_memory = True
        container.kill()

    def evict(self, name: str, message: str = "The node was low on resource: memory.") -> None:
        container = self.container_of(name)
        container.evicted_for = message
        container.kill()

    def lose(self, name: str) -> None:
        """The node does not answer any more; the pod goes on there, and the cluster wants it gone."""
        self.is_cut_off = True
        self.objects.patch("pods", self.namespace, name, {"status": {"conditions": [_LOST]}}, part="status")
        self.objects.delete("pods", self.namespace, name, {})

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        for container in self._containers.values():
            container.kill()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _end_removed(self, there: set[str]) -> None:
        """A pod that somebody took off the books is ended, too, once its node hears of it."""
        for uid, container in self._containers.items():
            if uid not in there and not container.is_over and not self.is_cut_off:
                container.ask_to_end(container.pod["spec"].get("terminationGracePeriodSeconds", 30))

    def _sync(self, pod: Json) -> None:
        uid = pod["metadata"]["uid"]
        if uid in self._containers:
            if pod["metadata"].get("deletionTimestamp"):
                self._containers[uid].ask_to_end(pod["metadata"]["deletionGracePeriodSeconds"])
                if self._containers[uid].is_over:
                    self._spawn(self._remove(pod))
            return
        if pod["status"]["phase"] != "Pending" or pod["metadata"].get("deletionTimestamp") or self.is_cut_off:
            return
        wanted = pod["spec"].get("nodeSelector") or {}
        if not wanted.items() <= self.labels.items():
            if not pod["status"].get("conditions"):
                self.say(pod, {"conditions": [_unschedulable()]})
            return
        container = _Container(self, pod)
        self._containers[uid] = container
        self._spawn(container.live())

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _remove(self, pod: Json) -> None:
        await elapse(self._removal_seconds)
        with suppress(Failure):
            wanted = {"preconditions": {"uid": pod["metadata"]["uid"]}, "gracePeriodSeconds": 0}
            self.objects.delete("pods", self.namespace, pod["metadata"]["name"], wanted)

    def say(self, pod: Json, status: Json) -> bool:
        """False if the pod is gone, or the node is cut off."""
        if self.is_cut_off:
            return False
        meta = pod["metadata"]
        there = self.objects.find("pods", self.namespace, meta["name"])
        if there is None or there["metadata"]["uid"] != meta["uid"]:
            return False
        self.objects.patch("pods", self.namespace, meta["name"], {"status": status}, part="status")
        return True


_LOST = {
    "type": "DisruptionTarget",
    "status": "True",
    "reason": "DeletionByTaintManager",
    "message": "Taint manager: deleting due to NoExecute taint",
}


def _unschedulable() -> Json:
    message = "0/1 nodes are available: 1 node(s) didn't match Pod's node affinity/selector."
    return {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": message}


class _Container:
    """The task's container of one pod, from its scheduling to its end."""

    def __init__(self, kubelet: Kubelet, pod: Json) -> None:
        self.kubelet, self.pod = kubelet, pod
        self.name: str = pod["metadata"]["name"]
        self.spec: Json = pod["spec"]["containers"][0]
        self.folder = kubelet.folder / pod["metadata"]["uid"]
        self.is_out_of_memory = False
        self.is_over = False
        self.evicted_for: str | None = None
        self.process: asyncio.subprocess.Process | None = None
        self.mark = f"{_MARK}={uuid.uuid4()}"
        self._ending: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()

    async def live(self) -> None:
        kubelet = self.kubelet
        try:
            bound = kubelet.objects.get("pods", kubelet.namespace, self.name)
            bound["spec"]["nodeName"] = kubelet.node
            kubelet.objects.replace("pods", kubelet.namespace, self.name, bound)
        except Failure:
            self.is_over = True
            return  # deleted before it was bound
        kubelet.say(self.pod, {"conditions": [{"type": "PodScheduled", "status": "True"}], "startTime": stamp()})
        try:
            if await self._prepare():
                await self._run()
        finally:
            self.is_over = True
            self.kill()
        with suppress(Failure):
            there = kubelet.objects.get("pods", kubelet.namespace, self.name)
            if there["metadata"].get("deletionTimestamp") and not kubelet.is_cut_off:
                await kubelet._remove(there)

    def ask_to_end(self, grace_seconds: float) -> None:
        self._asked.set()
        if self.process is not None and self._ending is None:
            with suppress(ProcessLookupError):
                self.process.send_signal(signal.SIGTERM)
            self._ending = asyncio.create_task(self._kill_later(grace_seconds))

    async def _kill_later(self, grace_seconds: float) -> None:
        await elapse(grace_seconds)
        self.kill()

    def kill(self) -> None:
        """Everything in the container, as the end of its PID namespace does."""
        if self.process is None:
            return
        if self.process.returncode is None:
            kill_tree(self.process.pid)
        for pid in find_by_token(self.mark):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    async def _prepare(self) -> bool:
        """Wait for what it needs. False if it was deleted meanwhile."""
        for missing in (self._image_trouble, self._volume_trouble, self._variable_trouble):
            said = ""
            while trouble := missing():
                if trouble[0] != said:
                    said = trouble[0]
                    reason = {"reason": trouble[0], "message": trouble[1]} if trouble[1] else {"reason": trouble[0]}
                    self._state({"waiting": reason})
                if not await self._something_changed():
                    return False
                if trouble[0] == "ErrImagePull":
                    self._state(
                        {"waiting": {"reason": "ImagePullBackOff", "message": f"Back-off pulling image {trouble[2]}"}}
                    )
                    said = "ErrImagePull"
        return not self._asked.is_set()

    async def _something_changed(self) -> bool:
        """Until the cluster changed or a moment passed, as a kubelet that tries again; False when asked to end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(0.02):
                await self._asked.wait()
        return not self._asked.is_set()

    def _image_trouble(self) -> tuple[str, ...] | None:
        image = self.spec["image"]
        if not _IMAGE.fullmatch(image):
            return "InvalidImageName", f'Failed to apply default image tag "{image}": invalid reference format'
        if image not in self.kubelet.images:
            return "ErrImagePull", f"failed to pull and unpack image: {image}: not found", image
        return None

    def _volume_trouble(self) -> tuple[str, ...] | None:
        for volume in self.pod["spec"].get("volumes") or []:
            if "secret" in volume and self._secret(volume["secret"]["secretName"]) is None:
                return "ContainerCreating", ""
        return None

    def _variable_trouble(self) -> tuple[str, ...] | None:
        for source in self.spec.get("envFrom") or []:
            name = (source.get("secretRef") or {}).get("name")
            if name and self._secret(name) is None:
                return "CreateContainerConfigError", f'secret "{name}" not found'
        return None

    def _secret(self, name: str) -> dict[str, bytes] | None:
        found = self.kubelet.objects.find("secrets", self.kubelet.namespace, name)
        return None if found is None else {key: base64.b64decode(text) for key, text in found["data"].items()}

    async def _run(self) -> None:
        moved = self._mount()
        message = self.folder / "termination-log"
        message.touch()
        moved[self.spec.get("terminationMessagePath", "/dev/termination-log")] = str(message)
        held = os.open(message, os.O_RDONLY)
        words = [self._here(word, moved) for word in (*self.spec.get("command", []), *self.spec.get("args", []))]
        environment = self._environment(moved)
        try:
            with (self.folder / "log").open("wb") as log:
                self.process = await asyncio.create_subprocess_exec(
                    *words,
                    env=environment,
                    stdout=log,
                    stderr=log,
                    cwd=self.folder,
                    start_new_session=True,
                    preexec_fn=self.kubelet.before_exec,
                )
        except OSError as error:
            os.close(held)
            said = f"failed to create containerd task: {error}"
            return self._end({"exitCode": 128, "reason": "StartError", "message": said})
        self.kubelet.started.append(self.name)
        self.kubelet.on_start(self.name, self.process.pid)
        if self._asked.is_set():
            self.ask_to_end(self.pod["spec"].get("terminationGracePeriodSeconds", 30))
        self._state({"running": {"startedAt": stamp()}}, phase="Running")
        code = await self._exit_code()
        self.kubelet.on_end(self.name, self.process.pid, code)
        self.kill()
        if self._ending is not None:
            self._ending.cancel()
        text = os.pread(held, _MOST_MESSAGE, 0).decode("utf-8", "replace")
        os.close(held)
        why = "OOMKilled" if self.is_out_of_memory else "Completed" if code == 0 else "Error"
        ended: Json = {"exitCode": code, "reason": why, "startedAt": stamp(), "finishedAt": stamp()}
        self._end(ended | ({"message": text} if text else {}))

    async def _exit_code(self) -> int:
        assert self.process is not None
        deadline = self.pod["spec"].get("activeDeadlineSeconds")
        try:
            async with asyncio.timeout(deadline):
                code = await self.process.wait()
        except TimeoutError:
            self.evicted_for, self._deadline_reason = (
                "Pod was active on the node longer than the specified deadline",
                True,
            )
            self.kill()
            code = await self.process.wait()
        return code if code >= 0 else 128 - code

    _deadline_reason = False

    def _end(self, ended: Json) -> None:
        status: Json = {"phase": "Succeeded" if ended["exitCode"] == 0 else "Failed"}
        if self.evicted_for is not None:
            reason = "DeadlineExceeded" if self._deadline_reason else "Evicted"
            status |= {"phase": "Failed", "reason": reason, "message": self.evicted_for}
        self._state({"terminated": ended}, **status)

    def _state(self, state: Json, **status: Any) -> None:
        one = {"name": self.spec["name"], "image": self.spec["image"], "state": state, "restartCount": 0}
        self.kubelet.say(self.pod, {"containerStatuses": [one], **status})

    def _mount(self) -> dict[str, str]:
        """Where each mounted path really is."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        places: dict[str, Path] = {}
        for volume in self.pod["spec"].get("volumes") or []:
            place = places[volume["name"]] = self.folder / "volumes" / volume["name"]
            place.mkdir(parents=True)
            if "secret" in volume:
                for name, content in (self._secret(volume["secret"]["secretName"]) or {}).items():
                    (place / name).write_bytes(content)
                    (place / name).chmod(volume["secret"].get("defaultMode", 0o644))
        return {mount["mountPath"]: str(places[mount["name"]]) for mount in self.spec.get("volumeMounts") or []}

    def _environment(self, moved: dict[str, str]) -> dict[str, str]:
        name, value = self.mark.split("=")
        path = f"{_STARTED}:{os.environ.get('PATH', '')}"
        found = {"PATH": path, "HOME": str(self.folder), "HOSTNAME": self.name, "LANG": "C.UTF-8", name: value}
        if "PYTHONPATH" in os.environ:
            found["PYTHONPATH"] = os.environ["PYTHONPATH"]
        for source in self.spec.get("envFrom") or []:
            if secret := self._secret((source.get("secretRef") or {}).get("name", "")):
                found |= {key: content.decode() for key, content in secret.items()}
        return found | {each["name"]: self._here(self._value(each), moved) for each in self.spec.get("env") or []}

    def _value(self, variable: Json) -> str:
        """As written, or the pod's name where that is asked for; no other field is known here."""
        if "valueFrom" in variable:
            assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}, variable
            return self.name
        return str(variable.get("value", ""))

    @staticmethod
    def _here(text: str, moved: dict[str, str]) -> str:
        for path in sorted(moved, key=len, reverse=True):
            text = text.replace(path, moved[path])
        return text


@asynccontextmanager
async def kubelet(
    objects: Objects, folder: Path, *, change: Callable[[Kubelet], None] = lambda _: None
) -> AsyncIterator[Kubelet]:
    """A node, until the end of the block; then nothing of its pods runs any more."""
    node = Kubelet(objects, folder)
    change(node)
    loop = asyncio.create_task(node.run())
    try:
        yield node
    finally:
        loop.cancel()
        await node.stop()
