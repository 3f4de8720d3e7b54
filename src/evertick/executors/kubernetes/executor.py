"""Runs each attempt as a pod with the attempt's name. The state is always read from Kubernetes, never from memory.

The pod is created first and then the Secret with its token, which the pod owns: after any interruption the next try
completes the pair, and nothing is left behind. The watch only shortens waits.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from typing import Any, Self

from evertick.config import Settings
from evertick.domain.attempt import session_text
from evertick.domain.errors import ExecutorUnavailable, SubmissionRefused
from evertick.domain.executor_options import POD_OPTIONS, TASK_CONTAINER
from evertick.executors.base import Observed, Order, Phase
from evertick.executors.kubernetes.api import Json, KubeApi, Refusal, connected, meaning
from evertick.executors.kubernetes.manifest import (
    KEPT_LABEL,
    OWNER_LABEL,
    SESSION_LABEL,
    UNTIL_ANNOTATION,
    Manifest,
    pod_manifest,
    read_template,
    secret_manifest,
)

_SWEEP_SECONDS = 30.0
# A listing waits for the sweep, which must be short; the rest is left to the next one.
_MOST_SWEPT = 100
_WATCH_SECONDS = 240
# A server or proxy that ends every watch at once is not called without a pause.
_SHORTEST_WATCH_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


class KubernetesExecutor:
    """The remote executor of one namespace of one cluster. Raises InvalidSettings for an unusable template.

    `executor_owner` distinguishes the pods of this installation from others in the same namespace.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self._owner = settings, settings.executor_owner
        image = settings.pod_image or f"evertick:{version('evertick')}"
        self._template = read_template(settings.pod_template, image=image)
        self._selector = f"{OWNER_LABEL}={self._owner},!{KEPT_LABEL}"
        self._kept_selector = f"{OWNER_LABEL}={self._owner},{KEPT_LABEL}"
        self._stuck_since: dict[str, float] = {}
        self._swept_at = -_SWEEP_SECONDS
        self._version: str | None = None
        self._stack = AsyncExitStack()
        self._api: KubeApi

    async def __aenter__(self) -> Self:
        self._api = await self._stack.enter_async_context(connected(self._settings))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def submit(self, order: Order) -> None:
        """Idempotent: if the attempt's own pod exists, continue from there."""
        allowed = self._settings.pod_options or POD_OPTIONS
        manifest = pod_manifest(order, self._template, owner=self._owner, allowed=allowed)
        try:
            pod = await self._create(order, manifest)
            if _may_still_begin(pod):
                await self._give_token(order, pod["metadata"]["uid"])
        except Refusal as refusal:
            raise meaning(refusal) from None

    async def observe(self) -> dict[str, Observed]:
        try:
            pods, self._version = await self._api.list_pods(self._selector)
        except Refusal as refusal:
            raise meaning(refusal, of_task=False) from None
        with suppress(Refusal, ExecutorUnavailable):
            await self._sweep()
        found = {pod["metadata"]["name"]: self._judged(pod) for pod in pods}
        self._stuck_since = {name: since for name, since in self._stuck_since.items() if name in found}
        return found

    async def find(self, name: str) -> Observed | None:
        try:
            pod = await self._api.read_pod(name)
        except Refusal as refusal:
            raise meaning(refusal, of_task=False) from None
        return self._judged(pod) if pod is not None and self._is_ours(pod) else None

    async def cancel(self, name: str, grace_seconds: float) -> None:
        """Delete the pod, or keep it relabeled if it has ended and the policy says so: then it no longer belongs to an
        attempt."""
        try:
            pod = await self._api.read_pod(name)
            if pod is None or not self._is_ours(pod):
                return
            if observed(pod).phase is Phase.ENDED and (until := self._kept_until(pod)) is not None:
                labels, annotations = {KEPT_LABEL: "true"}, {UNTIL_ANNOTATION: until}
                patch: Json = {"metadata": {"labels": labels, "annotations": annotations}}
                if goes_on(pod):
                    # Sidecars would run without end: this ends them, and keeps the pod.
                    patch["spec"] = {"activeDeadlineSeconds": 1}
                await self._api.patch_pod(name, patch)
            else:
                # Never 0: that would remove the pod object while its processes may still run.
                grace = max(1, math.ceil(grace_seconds))
                await self._api.delete_pod(name, uid=pod["metadata"]["uid"], grace_seconds=grace)
        except Refusal as refusal:
            raise meaning(refusal, of_task=False) from None

    async def hints(self) -> AsyncIterator[None]:
        """One after each change, and after every disconnect, during which changes may have been missed."""
        failures = 0
        while True:
            began = time.monotonic()
            try:
                if self._version is None:
                    self._version = await self._api.version(self._selector)
                async for event in self._api.watch_pods(self._selector, self._version, seconds=_WATCH_SECONDS):
                    failures = 0
                    self._version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        yield
                failures = failures + 1 if time.monotonic() - began < _SHORTEST_WATCH_SECONDS else 0
            except Refusal:
                # Mostly 410, too old to continue from: start at the current state.
                self._version = None
                failures += 1
            except ExecutorUnavailable:
                failures += 1
            if failures:
                longest = min(_LONGEST_PAUSE_SECONDS, 0.25 * 2 ** min(failures, 10))
                await asyncio.sleep(longest * random.uniform(0.5, 1.0))
            yield

    async def _create(self, order: Order, manifest: Manifest) -> Json:
        try:
            return await self._api.create_pod(manifest)
        except Refusal as refusal:
            if refusal.reason != "AlreadyExists":
                raise
        pod = await self._api.read_pod(order.name)
        if pod is None:
            raise ExecutorUnavailable(f"pod {order.name} existed and is gone: try again")
        if pod["metadata"].get("labels", {}).get(SESSION_LABEL) != session_text(order.session):
            raise SubmissionRefused(
                f"a pod {order.name} exists that is not the one of {order.what}. Delete it, and try again."
            )
        return pod

    async def _give_token(self, order: Order, pod_uid: str) -> None:
        secret = secret_manifest(order, owner=self._owner, pod_uid=pod_uid)
        try:
            await self._api.create_secret(secret)
        except Refusal as refusal:
            if refusal.reason != "AlreadyExists":
                raise
            there = await self._api.read_secret(order.name)
            if there is not None and _owner_uid(there) == pod_uid:
                return
            # The Secret of a deleted pod with the same name: the garbage collector has not removed it yet.
            await self._api.delete_secret(order.name)
            await self._api.create_secret(secret)

    def _is_ours(self, pod: Json) -> bool:
        labels = pod["metadata"].get("labels") or {}
        return labels.get(OWNER_LABEL) == self._owner and KEPT_LABEL not in labels

    def _judged(self, pod: Json) -> Observed:
        """The pod's state; one that could not start for too long counts as ended, with the reason."""
        found, name = observed(pod), pod["metadata"]["name"]
        if found.phase is not Phase.WAITING or not cannot_start(found.reason):
            self._stuck_since.pop(name, None)
            return found
        stuck_seconds = time.monotonic() - self._stuck_since.setdefault(name, time.monotonic())
        has_timed_out = stuck_seconds >= self._settings.pod_start_timeout_seconds
        return replace(found, phase=Phase.ENDED) if has_timed_out else found

    def _kept_until(self, pod: Json) -> str | None:
        """When an ended pod may be deleted: empty for never, None for now."""
        cleanup, keep_seconds = self._settings.pod_cleanup, self._settings.pod_keep_seconds
        if cleanup == "never" or (cleanup == "on_success" and not has_succeeded(pod)):
            return ""
        if not keep_seconds:
            return None
        return (datetime.now(UTC) + timedelta(seconds=keep_seconds)).isoformat(timespec="seconds")

    async def _sweep(self) -> None:
        """Delete pods that were kept long enough, by any runner. Pods that cannot be deleted now are retried in the
        next sweep."""
        if time.monotonic() - self._swept_at < min(_SWEEP_SECONDS, self._settings.pod_keep_seconds or _SWEEP_SECONDS):
            return
        self._swept_at = time.monotonic()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        kept = (await self._api.list_pods(self._kept_selector))[0]
        over = [pod for pod in kept if (until := _kept_until(pod)) and until <= now]
        for pod in over[:_MOST_SWEPT]:
            with suppress(Refusal):
                await self._api.delete_pod(pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace_seconds=0)


def _may_still_begin(pod: Json) -> bool:
    return observed(pod).phase is Phase.WAITING and not _is_being_deleted(pod)


def _kept_until(pod: Json) -> str:
    """When it may be deleted; empty for never."""
    return str((pod["metadata"].get("annotations") or {}).get(UNTIL_ANNOTATION, ""))


def _owner_uid(secret: Json) -> Any:
    return next((each.get("uid") for each in secret["metadata"].get("ownerReferences") or []), None)


# Reasons why a container cannot start now, and never will without a change to the cluster or the image.
# What a pod's status means for its attempt. Claims nothing that the cluster has not observed: a pod whose node is
# unreachable counts as running, and only the heartbeat timeout, or the cluster itself, ends it.

CANNOT_START = frozenset(
    {
        "ErrImagePull",
        "ImagePullBackOff",
        "InvalidImageName",
        "ErrImageNeverPull",
        "ImageInspectError",
        "RegistryUnavailable",
        "CreateContainerConfigError",
        "CreateContainerError",
        "RunContainerError",
    }
)
# Reasons of a container's end whose message comes from the container runtime, not from the agent.
_NEVER_BEGAN = ("ContainerCannotRun", "StartError", "ContainerStatusUnknown")
_LONGEST_REASON = 500

Pod = Mapping[str, Any]


def observed(pod: Pod) -> Observed:
    """The state of this pod's attempt."""
    status = pod.get("status") or {}
    ended = _task_state(status).get("terminated")
    if ended or status.get("phase") in ("Succeeded", "Failed"):
        return _ended(pod, ended or {})
    if "running" in _task_state(status) or status.get("phase") in ("Running", "Unknown"):
        return Observed(phase=Phase.RUNNING, reason=_trouble(pod), since=_time(status.get("startTime")))
    created_at = _time((pod.get("metadata") or {}).get("creationTimestamp"))
    return Observed(phase=Phase.WAITING, reason=waiting_reason(status), since=created_at)


def waiting_reason(status: Mapping[str, Any]) -> str | None:
    """Why it has not started: its container's reason, or that no node has room for it."""
    for kind in ("containerStatuses", "initContainerStatuses"):
        for container in status.get(kind) or []:
            waiting = (container.get("state") or {}).get("waiting") or {}
            if waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
                return _said(waiting["reason"], waiting.get("message"))
    for condition in status.get("conditions") or []:
        if condition.get("type") == "PodScheduled" and condition.get("status") == "False":
            return _said(condition.get("reason") or "Unschedulable", condition.get("message"))
    return None


def cannot_start(reason: str | None) -> bool:
    return reason is not None and reason.split(":")[0] in CANNOT_START


def has_succeeded(pod: Pod) -> bool:
    """The task's container, whatever the state of the others."""
    status = pod.get("status") or {}
    ended = _task_state(status).get("terminated")
    return bool(ended.get("exitCode") == 0 if ended else status.get("phase") == "Succeeded")


def goes_on(pod: Pod) -> bool:
    """Whether another container still runs after the task's container has ended."""
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _ended(pod: Pod, ended: Mapping[str, Any]) -> Observed:
    status = pod.get("status") or {}
    why, message = ended.get("reason"), ended.get("message") or ""
    began = bool(ended) and why not in _NEVER_BEGAN
    # The pod's own reason (Evicted, DeadlineExceeded, NodeLost) is more precise than its container's signal.
    if status.get("reason"):
        reason: str | None = _said(status["reason"], status.get("message"))
    elif disruption := _disruption(status):
        reason = disruption
    elif why in (None, "Completed"):
        reason = None
    elif why == "Error":
        reason = f"exit code {ended.get('exitCode')}" if ended.get("exitCode") is not None else "Error"
    else:
        reason = _said(why, None if began else message)
    return Observed(
        phase=Phase.ENDED,
        reason=reason,
        exit_code=ended.get("exitCode"),
        outcome=message.encode() if began and message else None,
        since=_time(ended.get("finishedAt")),
        is_being_deleted=_is_being_deleted(pod),
    )


def _is_being_deleted(pod: Pod) -> bool:
    return bool((pod.get("metadata") or {}).get("deletionTimestamp"))


def _trouble(pod: Pod) -> str | None:
    """A condition that may soon end a running pod, or may have ended it unobserved."""
    status = pod.get("status") or {}
    if status.get("reason"):
        return _said(status["reason"], status.get("message"))
    if disruption := _disruption(status):
        return disruption
    if _is_being_deleted(pod):
        return "it is being deleted"
    return "NodeLost: its node does not answer" if status.get("phase") == "Unknown" else None


def _disruption(status: Mapping[str, Any]) -> str | None:
    for condition in status.get("conditions") or []:
        if condition.get("type") == "DisruptionTarget" and condition.get("status") == "True":
            return _said(
                _DISRUPTIONS.get(condition.get("reason", ""), condition.get("reason")), condition.get("message")
            )
    return None


# Readable names.
_DISRUPTIONS = {
    "DeletionByTaintManager": "NodeLost",
    "DeletionByPodGC": "NodeLost",
    "EvictionByEvictionAPI": "Evicted",
    "PreemptionByScheduler": "Preempted",
    "TerminationByKubelet": "Evicted",
}


def _task_state(status: Mapping[str, Any]) -> Mapping[str, Any]:
    for container in status.get("containerStatuses") or []:
        if container.get("name") == TASK_CONTAINER:
            return container.get("state") or {}
    return {}


def _said(reason: object, message: object) -> str:
    text = f"{reason}: {' '.join(str(message).split())}" if message else str(reason)
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"


def _time(text: object) -> datetime | None:
    return datetime.fromisoformat(text) if isinstance(text, str) else None
