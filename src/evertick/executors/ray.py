"""Runs each attempt as a Ray job whose submission id is the attempt's name, by the Jobs API of a Ray cluster: plain HTTP, without
Ray's package.

Ray keeps no file of an ended job, only what it wrote: the outcome is its last line. The start token is a variable of the
job, which everybody with access to Ray's dashboard can read; it is good for one start.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import shlex
import time
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime
from typing import Any, Self

from evertick.config import Settings
from evertick.domain.agent_protocol import MOST_BYTES, parse_name
from evertick.domain.engine_options import memory_bytes
from evertick.domain.errors import ExecutorUnavailable, SubmissionRefused
from evertick.executors.base import Observed, Order, Phase
from evertick.executors.http_endpoint import Answer, Ask, HttpEndpoint
from evertick.executors.task_options import Options, TaskOptions

_SECONDS = 30.0
_JOBS = "/api/jobs/"
_OWNER = "evertick_owner"
_MARK = "evertick-outcome "
# Ray fails a job that could not start within 900 s. A submission whose request broke stays pending for ever (ray#62766).
_LONGEST_PENDING_SECONDS = 1200.0
_LONGEST_REASON = 500

# The agent in a folder of its own, which is gone with it. A shell that waits gets the signal, too, and must not end first.
_ENTRYPOINT = """folder=$(mktemp -d) || exit 1
trap : TERM INT
EVERTICK_HOME=$folder/home EVERTICK_AGENT_OUTCOME_FILE=$folder/outcome {command}
code=$?
printf '\\n{mark}%s\\n' "$(base64 2>/dev/null < $folder/outcome | tr -d '\\n')"
rm -rf $folder
exit $code"""

Job = Mapping[str, Any]


class RayExecutor:
    """The jobs of this installation on one cluster. Needs the address of its dashboard."""

    def __init__(self, settings: Settings) -> None:
        self._options, self._owner = TaskOptions("ray", settings), settings.executor_owner
        self._ray = HttpEndpoint(settings.ray_address, setting="EVERTICK_RAY_ADDRESS", token=settings.ray_token)
        self._settings = settings
        self._stopped: set[str] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Jobs keep running."""

    async def submit(self, order: Order) -> None:
        """Ray accepts a submission id once."""
        body = json.dumps(self._body(order, self._options.of(order))).encode()
        answer = await self._ask(Ask(method="POST", path=_JOBS, body=body))
        if answer.is_good or await self._job(order.name) is not None:
            return
        if answer.status in (400, 413, 422):
            raise SubmissionRefused(f"Ray refuses the job of {order.what}: {_last_line(answer)}")
        raise ExecutorUnavailable(_last_line(answer))

    async def observe(self) -> dict[str, Observed]:
        answer = await self._ask(Ask(method="GET", path=_JOBS))
        if not answer.is_good:
            raise ExecutorUnavailable(_last_line(answer))
        found: dict[str, Observed] = {}
        for job in answer.json():
            name = str(job.get("submission_id") or "")
            if not self._is_ours(name, job):
                continue
            if _is_ghost(job):
                await self._delete(name)
            else:
                found[name] = await self._judged(name, job)
        self._stopped &= found.keys()
        return found

    async def find(self, name: str) -> Observed | None:
        job = await self._job(name)
        if job is None or _is_ghost(job) or not self._is_ours(name, job):
            return None
        found = await self._judged(name, job)
        if found.phase is not Phase.ENDED:
            return found
        answer = await self._ask(Ask(method="GET", path=f"{_JOBS}{name}/logs"))
        logs = str(answer.json().get("logs") or "") if answer.is_good else ""
        return Observed(
            phase=Phase.ENDED, reason=found.reason, exit_code=found.exit_code, outcome=_outcome(logs), since=found.since
        )

    async def cancel(self, name: str, grace_seconds: float) -> None:
        """Ray sends SIGTERM, and SIGKILL three seconds later unless it is configured otherwise. Only an ended job can be
        deleted; one that waits for resources stays pending, and will stop when it starts."""
        job = await self._job(name)
        if job is None or not self._is_ours(name, job):
            return
        if _has_ended(job):
            await self._delete(name)
            return
        answer = await self._ask(Ask(method="POST", path=f"{_JOBS}{name}/stop"))
        if not answer.is_good and answer.status != 404:
            raise ExecutorUnavailable(_last_line(answer))
        if job.get("status") == "PENDING":
            self._stopped.add(name)

    async def hints(self) -> AsyncIterator[None]:
        """Ray sends none: the runner lists periodically."""
        await asyncio.Event().wait()
        yield

    def _body(self, order: Order, options: Options) -> dict[str, Any]:
        body: dict[str, Any] = {
            "submission_id": order.name,
            "entrypoint": _ENTRYPOINT.format(command=shlex.join(order.command(self._settings)), mark=_MARK),
            "metadata": {_OWNER: self._owner, **order.labels},
            "runtime_env": {"env_vars": {**options.get("env", {}), **order.variables()}},
            # Without any demand Ray runs a job on its head.
            "entrypoint_num_cpus": options.get("cpus", 1),
        }
        if "gpus" in options:
            body["entrypoint_num_gpus"] = options["gpus"]
        if "memory" in options:
            body["entrypoint_memory"] = memory_bytes(options["memory"])
        if "resources" in options:
            body["entrypoint_resources"] = options["resources"]
        return body

    async def _judged(self, name: str, job: Job) -> Observed:
        """The job's state; one that Ray has forgotten to start counts as ended, once it is stopped."""
        found = _observed(job)
        if found.phase is not Phase.WAITING or not found.since:
            return found
        if name in self._stopped:
            return Observed(phase=Phase.ENDED, reason="stopped before it started", since=found.since)
        if time.time() - found.since.timestamp() < _LONGEST_PENDING_SECONDS:
            return found
        await self._ask(Ask(method="POST", path=f"{_JOBS}{name}/stop"))
        return Observed(
            phase=Phase.ENDED,
            reason=f"Ray did not start it within {_LONGEST_PENDING_SECONDS:.0f} s: {found.reason}",
            since=found.since,
        )

    async def _job(self, name: str) -> Job | None:
        answer = await self._ask(Ask(method="GET", path=f"{_JOBS}{name}"))
        if answer.status == 404:
            return None
        if not answer.is_good:
            raise ExecutorUnavailable(_last_line(answer))
        found: Job = answer.json()
        return found

    async def _delete(self, name: str) -> None:
        answer = await self._ask(Ask(method="DELETE", path=f"{_JOBS}{name}"))
        if not answer.is_good and answer.status != 404:
            raise ExecutorUnavailable(_last_line(answer))

    def _is_ours(self, name: str, job: Job) -> bool:
        """Ray drops the metadata of a job that it could not start: then its name decides."""
        metadata = job.get("metadata")
        return parse_name(name) is not None and (not metadata or metadata.get(_OWNER) == self._owner)

    async def _ask(self, ask: Ask) -> Answer:
        return await self._ray.ask(ask, seconds=_SECONDS)


def _has_ended(job: Job) -> bool:
    return job.get("status") in ("SUCCEEDED", "FAILED", "STOPPED")


def _is_ghost(job: Job) -> bool:
    """Whether it was deleted before: if its end and its deletion meet, Ray writes a row of the end again, with nothing else."""
    return _has_ended(job) and job.get("start_time") is None


def _observed(job: Job) -> Observed:
    began = job.get("start_time")
    since = datetime.fromtimestamp(began / 1000, UTC) if isinstance(began, int | float) else None
    message, code = str(job.get("message") or ""), job.get("driver_exit_code")
    if _has_ended(job):
        reason: str | None = message.strip().split("\n", 1)[0][:_LONGEST_REASON]
        if job.get("status") == "SUCCEEDED":
            reason = None
        elif job.get("error_type") == "JOB_ENTRYPOINT_COMMAND_ERROR":
            reason = f"exit code {code}"
        return Observed(phase=Phase.ENDED, reason=reason, exit_code=code, since=since)
    if job.get("status") == "PENDING":
        return Observed(phase=Phase.WAITING, reason=f"pending in Ray: {message[:_LONGEST_REASON]}", since=since)
    return Observed(phase=Phase.RUNNING, since=since)


def _outcome(logs: str) -> bytes | None:
    """The last line that the entry point wrote."""
    _, mark, rest = logs.rpartition(f"\n{_MARK}")
    if not mark:
        return None
    try:
        found = base64.b64decode(rest.split("\n", 1)[0].strip(), validate=True)
    except (binascii.Error, ValueError):
        return None
    return found if 0 < len(found) <= MOST_BYTES else None


def _last_line(answer: Answer) -> str:
    """Ray answers with a traceback; its last line says what happened."""
    lines = [line for line in answer.body.decode("utf-8", "replace").split("\n") if len(line.strip()) > 1]
    return lines[-1].strip()[:_LONGEST_REASON] if lines else answer.message
