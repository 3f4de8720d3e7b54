"""What a pod's status says about its attempt. Pure; claims nothing that the cluster has not seen happen.

A pod whose node cannot be reached is still running as far as anybody knows: only silence, or the cluster itself, ends it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from evertick.domain.pod_options import TASK_CONTAINER
from evertick.execution.remote import Observed, Phase

# Why a container cannot be started now, and without a change to the cluster or the image never will be.
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
# Reasons of a container's end whose message is the container runtime's, and not what the agent left behind.
_NEVER_BEGAN = ("ContainerCannotRun", "StartError", "ContainerStatusUnknown")
_LONGEST_REASON = 500

Pod = Mapping[str, Any]


def observed(pod: Pod) -> Observed:
    """How the attempt of this pod stands."""
    status = pod.get("status") or {}
    ended = _task_state(status, "containerStatuses").get("terminated")
    if ended or status.get("phase") in ("Succeeded", "Failed"):
        return _ended(status, ended or {})
    if "running" in _task_state(status, "containerStatuses") or status.get("phase") in ("Running", "Unknown"):
        return Observed(phase=Phase.RUNNING, reason=_trouble(pod), since=_time(status.get("startTime")))
    created_at = _time((pod.get("metadata") or {}).get("creationTimestamp"))
    return Observed(phase=Phase.WAITING, reason=waiting_reason(status), since=created_at)


def waiting_reason(status: Mapping[str, Any]) -> str | None:
    """Why it has not begun: its container's reason, or that no node has room for it."""
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
    """Its task's container, whatever the others do."""
    status = pod.get("status") or {}
    ended = _task_state(status, "containerStatuses").get("terminated")
    return bool(ended.get("exitCode") == 0 if ended else status.get("phase") == "Succeeded")


def goes_on(pod: Pod) -> bool:
    """Whether something in it still runs, beside a task's container that has ended."""
    return (pod.get("status") or {}).get("phase") not in ("Succeeded", "Failed")


def _ended(status: Mapping[str, Any], ended: Mapping[str, Any]) -> Observed:
    why, message = ended.get("reason"), ended.get("message") or ""
    began = bool(ended) and why not in _NEVER_BEGAN
    # What the whole pod died of (Evicted, DeadlineExceeded, NodeLost) says more than that its container got a signal.
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
    """What may soon end a pod that runs, or may have ended it unseen."""
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


# As people call them.
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
