"""The process of `evertick tasks reproduce`: runs an attempt's code in this terminal, with its inputs and parameters.

Reports nothing and stores nothing. The order, with secrets that were asked for, arrives through a pipe: a command line can
be read by others.
"""

from __future__ import annotations

import os
import pdb
import pwd
import sys
import threading
from dataclasses import replace
from typing import Any

from evertick.attempts.body import context_of, load, run_body
from evertick.attempts.coroutines import run_alone
from evertick.attempts.injected_secrets import InjectedSecrets
from evertick.attempts.protocol import AskRefused, AttemptIO, Frames, Start
from evertick.attempts.shell import become_shell, prepare_shell
from evertick.domain.attempt import OutcomeKind
from evertick.sdk.durable import MemoryStore
from evertick.sdk.runtime import BoundTask, TaskContext, enter
from evertick.storage.result_files import ResultFiles


def main(folder: str, file: str, order_fd: int, results: str, mode: str) -> int:
    with os.fdopen(order_fd, "rb") as orders:
        (message,) = Frames().feed(orders.read())
    start = Start._make(message)
    loaded = load(folder, file)
    if loaded.failure is not None:
        sys.stderr.write(f"{loaded.traceback}{loaded.failure}\n")
        return 1
    bound = loaded.find(start.dag, start.task)
    if bound.report is not None:
        sys.stderr.write("A task of an Airflow file runs only on a runner: its operator talks to one.\n")
        return 2
    granted = InjectedSecrets(start.granted_json) if start.granted_json else None
    io = AttemptIO(_say, ResultFiles(folder=results), granted, _refuse)
    enter(_context(start, bound, io))
    if mode == "shell":
        prepare_shell(start._replace(command=start.command or ""), replace(bound, is_template=False), io)
        shell = pwd.getpwuid(os.getuid()).pw_shell or "/bin/sh"
        os.chdir(folder)
        os.execv(shell, [shell])
    if start.command is not None:
        os.chdir(folder)
        become_shell(start, bound, io)
    return _run(start, bound, io, is_debugged=mode == "debug")


def _run(start: Start, bound: BoundTask, io: AttemptIO, *, is_debugged: bool) -> int:
    context = _context(start, bound, io)
    if is_debugged and bound.function is not None:
        bound = replace(bound, function=_debugged(bound.function))
    report = run_alone(start, bound, context, io) if bound.is_async else run_body(start, bound, context, io)
    reason = f": {report.reason}" if report.reason else ""
    sys.stderr.write(f"{report.kind}{reason}\n")
    if report.result_json is not None:
        sys.stderr.write(f"result: {report.result_json}\n")
    return 0 if report.kind in (OutcomeKind.SUCCESS, OutcomeKind.SKIPPED) else 1


def _context(start: Start, bound: BoundTask, io: AttemptIO) -> TaskContext:
    durable = MemoryStore().durable(start.task, start.map_index)
    return context_of(start, bound, threading.Event(), durable, io.granted)


def _debugged(function: Any) -> Any:
    """Stops at the first line of the function. A debugger of the terminal, or that of PYTHONBREAKPOINT."""

    def run(*args: object, **kwargs: object) -> object:
        return pdb.Pdb().runcall(function, *args, **kwargs)

    return run


def _say(level: str, text: str) -> None:
    sys.stderr.write(f"{text}\n" if level in ("OUT", "ERR") else f"{level} {text}\n")


def _refuse(verb: str, _args: dict[str, Any]) -> Any:
    raise AskRefused("unsupported", f"asking for {verb!r} is not possible while an attempt is reproduced")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4], sys.argv[5]))
