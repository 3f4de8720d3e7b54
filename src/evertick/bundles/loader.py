"""Loads a DAG file in a separate process, with a timeout. User code never runs in the calling process.

Whatever the file does (crash, hang, print, exit, start processes) becomes a LoadedFile with a described problem.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import subprocess
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from evertick.bundles.dependencies import Declaration, Lock
from evertick.bundles.environments import NO_DEPENDENCIES, Interpreter, Prepared
from evertick.bundles.zygote import Fds, Fresh, Spawned, Zygote
from evertick.domain.attempt import storable_text
from evertick.domain.dags.findings import Finding, Severity, read_finding
from evertick.domain.dags.spec import DagSpec, from_json, structural_hash
from evertick.domain.dags.validation import validate
from evertick.domain.errors import EnvironmentFailed, InvalidDag, InvalidSchedule
from evertick.domain.schedules.spec import ScheduleSpec
from evertick.processes.system import exit_fd
from evertick.processes.tree import kill_tree

MAX_ANSWER_BYTES = 128 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024
_ERROR_TAIL_BYTES = 4_000
_REAP_SECONDS = 5.0
_STACK_SECONDS = 1.0
# As faulthandler writes a frame, the innermost one first.
_STACK_ENDS = (b" in _run_module_as_main\n", b'  File "<string>", line 1 in <module>\n', b"\n  ...\n")
_FRAME = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedDag:
    """One DAG of a file: its spec, with its canonical text and hash."""

    name: str
    spec: DagSpec
    spec_json: str
    hash: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportProblem:
    """Why a file has no DAGs. `traceback` has the user's frames, or the last output of a process that died."""

    file: str
    line: int | None
    message: str
    traceback: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.message}" if self.line else f"{self.file}: {self.message}"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedFile:
    """The content of a file. `closure` are the Python files it needs; `uses_threads` are threads that importing started;
    `lock` are its dependencies. `retry_after_seconds`: the error may disappear without a change of the file."""

    file: str
    dags: tuple[LoadedDag, ...] = ()
    error: ImportProblem | None = None
    closure: tuple[str, ...] = ()
    uses_threads: tuple[str, ...] = ()
    lock: Lock | None = None
    retry_after_seconds: float | None = None
    findings: tuple[Finding, ...] = ()

    @property
    def refused(self) -> dict[str, ImportProblem]:
        """The DAGs of the file that Evertick refuses, by name, each with its first reason."""
        found: dict[str, ImportProblem] = {}
        for each in self.findings:
            if each.severity is Severity.REFUSED:
                message = f"{each.code} {each.task or each.dag}: {each.text}"
                found.setdefault(each.dag, ImportProblem(file=each.file, line=each.line, message=message))
        return found


async def load_file(
    folder: Path,
    file: str,
    *,
    timeout_seconds: float = 30,
    environment: Mapping[str, str] | None = None,
    prepared: Prepared = NO_DEPENDENCIES,
    zygote: Zygote | None = None,
) -> LoadedFile:
    """Import `folder/file` in another process and return its content. Never raises because of the file.

    `environment` is the environment that the file sees; leave secrets out of it. A `zygote` forks the process.
    """
    deadline = time.monotonic() + timeout_seconds
    importing = await _Importing.begin(folder, file, environment, prepared.interpreter, zygote, deadline)
    try:
        was_in_time = await importing.receive(deadline)
    finally:
        await importing.end()
    if importing.body is not None:
        return replace(_read_answer(file, importing.body), lock=prepared.lock)
    if was_in_time:
        problem = ImportProblem(file=file, line=None, message=importing.why_no_answer(), traceback=importing.said_last)
    else:
        problem = _too_slow(folder, file, timeout_seconds, importing.said_last)
    return LoadedFile(file=file, closure=(file,), error=problem)


def not_prepared(file: str, declaration: Declaration | None, error: InvalidDag | EnvironmentFailed) -> LoadedFile:
    """A file whose dependencies cannot be read, resolved or installed."""
    if isinstance(error, InvalidDag) or declaration is None:
        problem = ImportProblem(
            file=file, line=getattr(error, "line", None), message=getattr(error, "message", str(error))
        )
        return LoadedFile(file=file, closure=(file,), error=problem)
    message = f"the dependencies in {declaration.source.name} cannot be installed: {error}"
    problem = ImportProblem(file=file, line=declaration.line, message=storable_text(message))
    return LoadedFile(file=file, closure=(file,), error=problem, retry_after_seconds=error.retry_after_seconds)


def _too_slow(folder: Path, file: str, seconds: float, stack: str) -> ImportProblem:
    """Names the line of the folder's code that was running, if the process could still tell."""
    # The main thread is the last one.
    frames = _FRAME.findall(stack.rpartition("(most recent call first):")[2])
    inside = [(path.removeprefix(f"{folder.absolute()}/"), int(line)) for path, line in frames]
    at_file, at_line = next(((path, line) for path, line in inside if not path.startswith("/")), (file, None))
    where = f" in {at_file}, line {at_line}" if at_line is not None else ""
    message = f"importing took longer than {seconds:g} s and was stopped{where}. Move slow work into tasks."
    return ImportProblem(file=at_file, line=at_line, message=message, traceback=stack)


def find_duplicates(files: Iterable[LoadedFile]) -> dict[str, tuple[str, ...]]:
    """DAG names that more than one file defines, with these files. The caller decides which file may publish it."""
    owners: defaultdict[str, list[str]] = defaultdict(list)
    for loaded in files:
        for dag in loaded.dags:
            owners[dag.name].append(loaded.file)
    return {name: tuple(sorted(files)) for name, files in owners.items() if len(files) > 1}


def _read_answer(file: str, body: bytes) -> LoadedFile:
    """The validated answer: the process that wrote it ran user code."""
    try:
        raw = json.loads(body)
        return LoadedFile(
            file=file,
            dags=tuple(_read_dag(each) for each in raw["dags"]),
            error=_read_problem(raw["problem"]) if raw["problem"] else None,
            closure=tuple(map(str, raw["closure"])),
            findings=tuple(read_finding(each) for each in raw["findings"]),
            uses_threads=tuple(storable_text(str(name)) for name in raw["uses_threads"]),
        )
    except (KeyError, TypeError, ValueError, RecursionError, InvalidDag, InvalidSchedule) as error:
        message = f"importing returned an invalid answer: {error!r}."
        return LoadedFile(file=file, closure=(file,), error=ImportProblem(file=file, line=None, message=message))


def _read_problem(raw: Mapping[str, Any]) -> ImportProblem:
    file, message, trace = (storable_text(str(raw[key])) for key in ("file", "message", "traceback"))
    return ImportProblem(file=file, line=raw["line"] and int(raw["line"]), message=message, traceback=trace)


def _read_dag(raw: Mapping[str, Any]) -> LoadedDag:
    spec = from_json(raw["spec"])
    validate(spec)
    if structural_hash(spec) != raw["hash"]:
        raise ValueError(f"the hash of DAG {spec.name!r} is not that of its content")
    computed = {str(name): ScheduleSpec.from_json(json.dumps(each)) for name, each in raw.get("instants", {}).items()}
    schedules = tuple(replace(each, spec=computed.get(each.name, each.spec)) for each in spec.schedules)
    return LoadedDag(name=spec.name, spec=replace(spec, schedules=schedules), spec_json=raw["spec"], hash=raw["hash"])


class _Importing:
    """One import in progress: its process, and its answer so far."""

    def __init__(self, process: subprocess.Popen[bytes] | Spawned, answer_fd: int, errors_fd: int) -> None:
        """`process` has started."""
        self.body: bytes | None = None
        self._answer = bytearray()
        self._errors = bytearray()
        self._is_over = asyncio.Event()
        self._has_exited = asyncio.Event()
        self._has_stack = asyncio.Event()
        self._process, self._answer_fd, self._errors_fd = process, answer_fd, errors_fd
        self._exit_fd = exit_fd(self._process.pid)
        os.set_blocking(self._answer_fd, False)
        os.set_blocking(self._errors_fd, False)

    @classmethod
    async def begin(
        cls,
        folder: Path,
        file: str,
        environment: Mapping[str, str] | None,
        interpreter: Interpreter,
        zygote: Zygote | None,
        deadline: float,
    ) -> _Importing:
        """In a fresh interpreter, or in a fork of a zygote."""
        (answer_fd, writer_fd), (errors_fd, errors_writer_fd) = os.pipe(), os.pipe()
        nowhere = os.open(os.devnull, os.O_WRONLY)
        arguments = _arguments(folder, file, deadline)
        fresh = partial(_start, interpreter, arguments, environment)
        try:
            fds = nowhere, errors_writer_fd, writer_fd
            process = fresh(fds) if zygote is None else await _forked(zygote, fresh, arguments, fds)
            return cls(process, answer_fd, errors_fd)
        except BaseException:
            os.close(answer_fd)
            os.close(errors_fd)
            raise
        finally:
            for fd in (writer_fd, errors_writer_fd, nowhere):
                os.close(fd)

    async def receive(self, deadline: float) -> bool:
        """Wait until the answer is there or the process has ended. False on timeout."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._answer_fd, self._read_answer)
        loop.add_reader(self._errors_fd, self._read_errors)
        loop.add_reader(self._exit_fd, self._on_exit)
        try:
            async with asyncio.timeout(deadline - time.monotonic()):
                await self._is_over.wait()
        except TimeoutError:
            # At this moment the process writes where it is.
            with suppress(TimeoutError):
                async with asyncio.timeout(_STACK_SECONDS):
                    await self._has_stack.wait()
            return False
        return True

    async def end(self) -> None:
        """Kill the process group. The process is not reaped before, so its pid and its group are certainly its own."""
        kill_tree(self._process.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        try:
            with suppress(TimeoutError):  # a process that hangs in the kernel must not block the caller
                async with asyncio.timeout(_REAP_SECONDS):
                    await self._has_exited.wait()
        finally:
            self._process.poll()
            loop = asyncio.get_running_loop()
            for fd in (self._answer_fd, self._errors_fd, self._exit_fd):
                loop.remove_reader(fd)
            os.close(self._answer_fd)
            os.close(self._exit_fd)
            os.close(self._errors_fd)

    def why_no_answer(self) -> str:
        """For a process that ended without an answer or wrote too much."""
        if len(self._answer) > MAX_ANSWER_BYTES:
            return f"its DAGs take more than {MAX_ANSWER_BYTES:,} bytes. Split the file."
        code = self._process.returncode
        how = f"was killed by {signal.Signals(-code).name}" if code and code < 0 else f"exited with code {code}"
        return f"the process that imported it {how}. Check for native code, os._exit() or a lack of memory."

    @property
    def said_last(self) -> str:
        """The end of the process's standard error."""
        return storable_text(self._errors.decode(errors="replace").strip())

    def _read_answer(self) -> None:
        self._answer += self._read(self._answer_fd)
        if self._answer.endswith(b"\n"):
            self.body = bytes(self._answer)
            self._is_over.set()
        elif len(self._answer) > MAX_ANSWER_BYTES:
            self._is_over.set()

    def _read_errors(self) -> None:
        self._errors += self._read(self._errors_fd)
        del self._errors[:-_ERROR_TAIL_BYTES]
        if self._errors.endswith(_STACK_ENDS):
            self._has_stack.set()

    def _read(self, fd: int) -> bytes:
        """One chunk per turn of the event loop, however fast the process writes. No more turns after the last."""
        with suppress(BlockingIOError):
            if chunk := os.read(fd, _CHUNK_BYTES):
                return chunk
            asyncio.get_running_loop().remove_reader(fd)
        return b""

    def _on_exit(self) -> None:
        """The process has ended. Its last output is still in the pipes, and fits into one chunk."""
        asyncio.get_running_loop().remove_reader(self._exit_fd)
        self._read_answer()
        self._read_errors()
        self._has_exited.set()
        self._has_stack.set()
        self._is_over.set()


def _arguments(folder: Path, file: str, deadline: float) -> list[str]:
    return [str(folder.absolute()), file, "{fd}", str(os.getpid()), str(deadline)]


async def _forked(zygote: Zygote, fresh: Fresh, arguments: list[str], fds: Fds) -> Spawned:
    process = zygote.spawn(fresh, "evertick.bundles.loader_process", arguments, fds)
    try:
        await asyncio.shield(process.started)
    except asyncio.CancelledError:
        process.abandon()
        raise
    if not process.pid:
        raise OSError("no process can be started")
    return process


def _start(
    interpreter: Interpreter, arguments: list[str], environment: Mapping[str, str] | None, fds: Fds
) -> subprocess.Popen[bytes]:
    """`-B` writes no byte code next to the folder's files.

    One hash seed for all processes: a file that calls tasks in a loop over a set names them the same wherever it is
    loaded.
    """
    command = ["/usr/bin/env", "PYTHONHASHSEED=0", *interpreter.command("evertick.bundles.loader_process", "-B")]
    stdout, stderr, answer_fd = fds
    return subprocess.Popen(
        [*command, *(str(answer_fd) if each == "{fd}" else each for each in arguments)],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=stderr,
        pass_fds=(answer_fd,),
        start_new_session=True,
        env=environment,
    )
