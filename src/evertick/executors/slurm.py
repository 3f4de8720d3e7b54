"""Runs each attempt as a Slurm job with the attempt's name, by Slurm's own commands. Token and outcome are files in a folder
that this machine and the nodes share.

Slurm accepts a name any number of times, so a submission looks first, and jobs of one name wait for each other: of two, the
second finds its attempt started. A job that Slurm has forgotten is known by nothing but what it left in its folder.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Self

from evertick.config import Settings
from evertick.domain.agent_protocol import MOST_BYTES, parse_name
from evertick.domain.engine_options import memory_bytes
from evertick.domain.errors import ExecutorBusy, ExecutorUnavailable, InvalidSettings, SubmissionRefused
from evertick.executors.base import Observed, Order, Phase
from evertick.executors.task_options import Options, TaskOptions

_SECONDS = 30.0
# Folders of attempts that nothing knows any more are removed after a week, once an hour.
_KEPT_SECONDS = 7 * 86_400.0
_SWEEP_SECONDS = 3600.0
_FIELDS = ("jobid", "name", "state", "reason", "exit_code", "nodelist", "starttime", "comment")
_FORMAT = ",".join(f"{field}:|" for field in _FIELDS)

_WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "RESV_DEL_HOLD", "SPECIAL_EXIT"}
)
# Certain ends. NODE_FAIL and BOOT_FAIL are none: the process of a node that does not answer may go on.
_ENDED = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"})

_BUSY = re.compile(r"(?i)submit limit|QOSMax|AssocMax|MaxJobCount|temporarily unable to accept|limit.{0,20}reached")
_REFUSED = re.compile(
    r"(?i)invalid|unrecognized option|not available|can ?not be satisfied|not permitted|requires an argument|ambiguous"
    r"|more processors|exceeds"
)
_UNREACHABLE = re.compile(r"(?i)unable to contact|timed out|connection|transmitted|munge|authentication")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    number: int
    name: str
    state: str
    reason: str
    status: int
    nodes: str
    started: str
    comment: str

    @property
    def has_ended(self) -> bool:
        return self.state in _ENDED


class SlurmExecutor:
    """The jobs of this user with the comment of this installation. Raises InvalidSettings without Slurm's commands."""

    def __init__(self, settings: Settings) -> None:
        self._settings, self._options = settings, TaskOptions("slurm", settings)
        self._comment = f"evertick:{settings.executor_owner}"
        self._folder = (settings.slurm_folder or settings.home / "slurm").absolute()
        self._swept_at = -_SWEEP_SECONDS
        if missing := [each for each in ("sbatch", "squeue", "scancel") if shutil.which(each) is None]:
            raise InvalidSettings(f"The Slurm executor needs {missing[0]}, which is not in the PATH of this runner.")

    async def __aenter__(self) -> Self:
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise InvalidSettings(
                f"EVERTICK_SLURM_FOLDER={self._folder} cannot be created: {error.strerror}."
            ) from None
        return self

    async def __aexit__(self, *_: object) -> None:
        """Jobs keep running."""

    async def submit(self, order: Order) -> None:
        options, folder = self._options.of(order), self._folder / order.name
        try:
            await asyncio.to_thread(_keep_token, folder, order.token)
        except OSError as error:
            raise ExecutorUnavailable(f"{folder} cannot be written: {error}") from None
        if await self._jobs("--name", order.name):
            return
        command = [
            "sbatch",
            "--parsable",
            # A job that Slurm starts again would run an attempt twice.
            "--no-requeue",
            # Of two jobs with this name, one runs at a time.
            "--dependency=singleton",
            f"--job-name={order.name}",
            f"--comment={self._comment}",
            "--export=NONE",
            f"--chdir={folder}",
            f"--output={folder / 'output'}",
            *_arguments(options),
        ]
        code, said = await _run(command, given=self._script(order, folder, options))
        if code != 0:
            meant = _meaning(said, order)
            if isinstance(meant, SubmissionRefused):
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            raise meant

    async def observe(self) -> dict[str, Observed]:
        jobs = await self._jobs()
        found = {name: self._observed(name, of) for name, of in jobs.items()}
        if time.monotonic() - self._swept_at >= _SWEEP_SECONDS:
            self._swept_at = time.monotonic()
            await asyncio.to_thread(_sweep, self._folder, set(jobs))
        return {name: each for name, each in found.items() if each is not None}

    async def find(self, name: str) -> Observed | None:
        """Slurm forgets ended jobs after `MinJobAge`; their outcome is still in the folder."""
        jobs = await self._jobs("--name", name)
        if name in jobs:
            return self._observed(name, jobs[name])
        outcome = await asyncio.to_thread(_outcome, self._folder / name)
        return None if outcome is None else Observed(phase=Phase.ENDED, outcome=outcome)

    async def cancel(self, name: str, grace_seconds: float) -> None:
        """Slurm sends SIGTERM, and SIGKILL after its `KillWait`. The folder of an ended job goes last: as long as it
        exists, the job counts."""
        jobs = (await self._jobs("--name", name)).get(name, [])
        if any(not job.has_ended for job in jobs):
            code, said = await _run(["scancel", "--me", f"--name={name}"])
            if code != 0:
                raise ExecutorUnavailable(said)
            jobs = (await self._jobs("--name", name)).get(name, [])
        if all(job.has_ended for job in jobs):
            await asyncio.to_thread(shutil.rmtree, self._folder / name, ignore_errors=True)

    async def hints(self) -> AsyncIterator[None]:
        """Slurm sends none: the runner lists periodically."""
        await asyncio.Event().wait()
        yield

    async def _jobs(self, *only: str) -> dict[str, list[_Job]]:
        """Of this installation, by name, the oldest first."""
        code, said = await _run(["squeue", "--me", "--noheader", "--states=all", f"--Format={_FORMAT}", *only])
        if code != 0:
            raise ExecutorUnavailable(said)
        found: dict[str, list[_Job]] = {}
        for line in said.splitlines():
            job = _read(line)
            if job is not None and job.comment == self._comment and parse_name(job.name) is not None:
                found.setdefault(job.name, []).append(job)
        return {name: sorted(jobs, key=lambda job: job.number) for name, jobs in found.items()}

    def _observed(self, name: str, jobs: Sequence[_Job]) -> Observed | None:
        """By the oldest job of that name: a second one can only find the attempt started. Slurm shows ended jobs for
        some time; one whose folder is gone was removed by us."""
        job, folder = jobs[0], self._folder / name
        if not job.has_ended:
            return _unended(job)
        if not folder.is_dir():
            return next((_unended(each) for each in jobs if not each.has_ended), None)
        return Observed(
            phase=Phase.ENDED,
            reason=None if job.state == "COMPLETED" else _described(job),
            exit_code=_exit_code(job.status),
            outcome=_outcome(folder),
            since=_time(job.started),
        )

    def _script(self, order: Order, folder: Path, options: Options) -> str:
        ours = order.variables(token_file=str(folder / "token"), outcome_file=str(folder / "outcome"))
        variables = {**options.get("env", {}), **ours, "EVERTICK_HOME": str(folder / "home")}
        exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
        command = shlex.join(order.command(self._settings))
        # It takes the place of the shell, so that signals reach it.
        return "\n".join(["#!/bin/sh", "umask 077", *exports, f"exec {command}", ""])


def _arguments(options: Options) -> list[str]:
    direct = ("partition", "account", "qos", "constraint", "gres", "time")
    found = [f"--{name}={options[name]}" for name in direct if name in options]
    if "cpus" in options:
        found.append(f"--cpus-per-task={options['cpus']}")
    if "memory" in options:
        found.append(f"--mem={max(1, memory_bytes(options['memory']) // 1024)}K")
    return [*found, *options.get("arguments", [])]


def _keep_token(folder: Path, token: str) -> None:
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = folder / ".token"
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="ascii") as file:
        file.write(token)
    draft.replace(folder / "token")


def _outcome(folder: Path) -> bytes | None:
    try:
        # A file server's client remembers for a while that a file did not exist, unless the folder is listed.
        if folder / "outcome" not in folder.iterdir():
            return None
        with (folder / "outcome").open("rb") as file:
            return file.read(MOST_BYTES + 1)
    except OSError:
        return None


def _sweep(folder: Path, known: set[str]) -> None:
    for each in folder.iterdir():
        with suppress(OSError):
            is_old = time.time() - each.stat().st_mtime > _KEPT_SECONDS
            if is_old and each.name not in known and parse_name(each.name) is not None:
                shutil.rmtree(each, ignore_errors=True)


async def _run(command: Sequence[str], *, given: str | None = None) -> tuple[int, str]:
    """Its exit status, and its output or its errors."""
    pipe = asyncio.subprocess.PIPE
    try:
        process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, stderr=pipe)
    except OSError as error:
        raise ExecutorUnavailable(f"{command[0]} cannot be started: {error}") from None
    try:
        async with asyncio.timeout(_SECONDS):
            out, errors = await process.communicate((given or "").encode())
    except TimeoutError:
        raise ExecutorUnavailable(f"{command[0]} did not end within {_SECONDS:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    code = process.returncode or 0
    return code, (out if code == 0 else errors or out).decode("utf-8", "replace").strip()


def _meaning(said: str, order: Order) -> Exception:
    text = " ".join(said.replace("sbatch: error:", "").split())
    if _UNREACHABLE.search(text):
        return ExecutorUnavailable(text)
    if _BUSY.search(text):
        return ExecutorBusy(text)
    if _REFUSED.search(text):
        return SubmissionRefused(f"Slurm refuses the job of {order.what}: {text}")
    return ExecutorUnavailable(text)


def _read(line: str) -> _Job | None:
    parts = [part.strip() for part in line.split("|")]
    if len(parts) < len(_FIELDS) or not parts[0].isdigit():
        return None
    number, name, state, reason, status, nodes, started, comment = parts[: len(_FIELDS)]
    return _Job(
        number=int(number),
        name=name,
        # CANCELLED may be followed by the user who did it.
        state=state.split()[0].rstrip("+") if state else "",
        reason="" if reason in ("None", "(null)") else reason,
        status=int(status) if status.isdigit() else 0,
        nodes=nodes,
        started=started,
        comment=comment,
    )


def _unended(job: _Job) -> Observed:
    if job.state in _WAITING:
        return Observed(phase=Phase.WAITING, reason=f"pending in Slurm: {job.reason}" if job.reason else None)
    is_fine = job.state in ("RUNNING", "COMPLETING")
    return Observed(phase=Phase.RUNNING, reason=None if is_fine else _described(job), since=_time(job.started))


def _described(job: _Job) -> str:
    details = [job.reason] if job.reason else []
    if job.nodes:
        details.append(f"on {job.nodes}")
    return f"{job.state}: {' '.join(details)}" if details else job.state


def _exit_code(status: int) -> int | None:
    """From a wait status, as a shell reports it."""
    code = os.waitstatus_to_exitcode(status & 0xFFFF)
    return 128 - code if code < 0 else code


def _time(text: str) -> datetime | None:
    """Slurm writes the local time."""
    try:
        return datetime.fromisoformat(text).astimezone()
    except ValueError:
        return None
