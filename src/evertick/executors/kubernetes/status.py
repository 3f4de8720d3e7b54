"""What a pod's status means for its attempt. Pure; claims nothing that the cluster has not observed.

A pod whose node is unreachable counts as running: only the heartbeat timeout, or the cluster itself, ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from evertick.domain.executor_options import TASK_CONTAINER
from evertick.executors.base import Observed, Phase

# Reasons why a container cannot start now, and never will without a change to the cluster or the image.
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
    ended = _task_state(status, "containerStatuses").get("terminated")
    if ended or status.get("phase") in ("Succeeded", "Failed"):
        return _ended(status, ended or {})
    if "running" in _task_state(status, "containerStatuses") or status.get("phase") in ("Running", "Unknown"):
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
    ended = _task_state(status, "containerStatuses").get("terminated")
    return bool(ended.get("exitCode") == 0 if ended else status.get("phase") == "Succeeded")


def goes_on(pod: Pod) -> bool:
    """Whether another container still runs after the task's container has ended."""
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _ended(status: Mapping[str, Any], ended: Mapping[str, Any]) -> Observed:
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
    )


def _trouble(pod: Pod) -> str | None:
    """A condition that may soon end a running pod, or may have ended it unobserved."""
    status = pod.get("status") or {}
    if status.get("reason"):
        return _said(status["reason"], status.get("message"))
    if disruption := _disruption(status):
        return disruption
    if (pod.get("metadata") or {}).get("deletionTimestamp"):
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


def _task_state(status: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    for container in status.get(kind) or []:
        if container.get("name") == TASK_CONTAINER:
            return container.get("state") or {}
    return {}


def _said(reason: object, message: object) -> str:
    text = f"{reason}: {' '.join(str(message).split())}" if message else str(reason)
    return text if len(text) <= _LONGEST_REASON else f"{text[: _LONGEST_REASON - 1]}…"


def _time(text: object) -> datetime | None:
    return datetime.fromisoformat(text) if isinstance(text, str) else None
