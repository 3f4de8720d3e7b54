"""Runs each attempt as a pod with the attempt's name. The state is always read from Kubernetes, never from memory.

The pod is created first and then the Secret with its token, which the pod owns: after any interruption the next try
completes the pair, and nothing is left behind. The watch only shortens waits.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from enum import StrEnum
from types import TracebackType
from typing import Any, Self

from evertick.domain.attempt import session_text
from evertick.domain.errors import ExecutorUnavailable, SubmissionRefused
from evertick.domain.executor_options import POD_OPTIONS
from evertick.executors.base import Observed, Phase, RemoteOrder
from evertick.executors.kubernetes.api import Cluster, Json, KubeApi, Refusal, connected, meaning
from evertick.executors.kubernetes.manifest import (
    KEPT_LABEL,
    OWNER_LABEL,
    SESSION_LABEL,
    UNTIL_ANNOTATION,
    Manifest,
    pod_manifest,
    secret_manifest,
)
from evertick.executors.kubernetes.status import cannot_start, goes_on, has_succeeded, observed

_SWEEP_SECONDS = 30.0
# A listing waits for the sweep, which must be short; the rest is left to the next one.
_MOST_SWEPT = 100
_WATCH_SECONDS = 240
# A server or proxy that ends every watch at once is not called without a pause.
_SHORTEST_WATCH_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0


class Cleanup(StrEnum):
    """Which ended pods are deleted."""

    ALWAYS = "always"
    ON_SUCCESS = "on_success"
    NEVER = "never"


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesOptions:
    """`owner` distinguishes the pods of this installation from others in the same namespace."""

    cluster: Cluster
    template: Manifest
    owner: str = "evertick"
    allowed: tuple[str, ...] = POD_OPTIONS
    cleanup: Cleanup = Cleanup.ALWAYS
    keep_seconds: float = 0.0
    give_up_seconds: float = 300.0


class KubernetesExecutor:
    """The remote executor of one namespace of one cluster."""

    def __init__(self, options: KubernetesOptions) -> None:
        self._options = options
        self._selector = f"{OWNER_LABEL}={options.owner},!{KEPT_LABEL}"
        self._kept_selector = f"{OWNER_LABEL}={options.owner},{KEPT_LABEL}"
        self._stuck_since: dict[str, float] = {}
        self._swept_at = -_SWEEP_SECONDS
        self._version: str | None = None
        self._stack = AsyncExitStack()
        self._api: KubeApi

    async def __aenter__(self) -> Self:
        self._api = await self._stack.enter_async_context(connected(self._options.cluster))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def submit(self, order: RemoteOrder) -> None:
        """Idempotent: if the attempt's own pod exists, continue from there."""
        options = self._options
        manifest = pod_manifest(order, options.template, owner=options.owner, allowed=options.allowed)
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

    async def _create(self, order: RemoteOrder, manifest: Manifest) -> Json:
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
                f"a pod {order.name} exists that does not belong to this attempt. Delete it, and run the task again."
            )
        return pod

    async def _give_token(self, order: RemoteOrder, pod_uid: str) -> None:
        secret = secret_manifest(order, owner=self._options.owner, pod_uid=pod_uid)
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
        return labels.get(OWNER_LABEL) == self._options.owner and KEPT_LABEL not in labels

    def _judged(self, pod: Json) -> Observed:
        """The pod's state; one that could not start for too long counts as ended, with the reason."""
        found, name = observed(pod), pod["metadata"]["name"]
        if found.phase is not Phase.WAITING or not cannot_start(found.reason):
            self._stuck_since.pop(name, None)
            return found
        stuck_seconds = time.monotonic() - self._stuck_since.setdefault(name, time.monotonic())
        return replace(found, phase=Phase.ENDED) if stuck_seconds >= self._options.give_up_seconds else found

    def _kept_until(self, pod: Json) -> str | None:
        """When an ended pod may be deleted: empty for never, None for now."""
        options = self._options
        if options.cleanup is Cleanup.NEVER or (options.cleanup is Cleanup.ON_SUCCESS and not has_succeeded(pod)):
            return ""
        if not options.keep_seconds:
            return None
        return (datetime.now(UTC) + timedelta(seconds=options.keep_seconds)).isoformat(timespec="seconds")

    async def _sweep(self) -> None:
        """Delete pods that were kept long enough, by any runner. Pods that cannot be deleted now are retried in the
        next sweep."""
        if time.monotonic() - self._swept_at < min(_SWEEP_SECONDS, self._options.keep_seconds or _SWEEP_SECONDS):
            return
        self._swept_at = time.monotonic()
        now = datetime.now(UTC).isoformat(timespec="seconds")
        kept = (await self._api.list_pods(self._kept_selector))[0]
        over = [pod for pod in kept if (until := _kept_until(pod)) and until <= now]
        for pod in over[:_MOST_SWEPT]:
            with suppress(Refusal):
                await self._api.delete_pod(pod["metadata"]["name"], uid=pod["metadata"]["uid"], grace_seconds=0)


def _may_still_begin(pod: Json) -> bool:
    return observed(pod).phase is Phase.WAITING and not pod["metadata"].get("deletionTimestamp")


def _kept_until(pod: Json) -> str:
    """When it may be deleted; empty for never."""
    return str((pod["metadata"].get("annotations") or {}).get(UNTIL_ANNOTATION, ""))


def _owner_uid(secret: Json) -> Any:
    return next((each.get("uid") for each in secret["metadata"].get("ownerReferences") or []), None)
