"""Turns an attempt's process into a shell that runs the task's command. Its exit status is the task's outcome.

It runs as on a build server, by `bash -eo pipefail`, or `sh -e` where there is no bash: a failing line fails the task.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

from evertick.attempts.body import attempt_variables, inputs_of, task_variables
from evertick.attempts.protocol import AttemptIO, Start
from evertick.sdk.runtime import BoundTask
from evertick.sdk.templates import is_template

_BASH = "/bin/bash"
_SHELL = "/bin/sh"


def become_shell(start: Start, bound: BoundTask, io: AttemptIO) -> NoReturn:
    """Replace this process, whose context is entered. Its session, log and parent stay, so it is killed and reaped like
    any other."""
    arguments = prepare_shell(start, bound, io)
    # Python ignores these two; a command must get the default behaviour.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    os.execv(arguments[0], [Path(arguments[0]).name, *arguments[1:]])


def prepare_shell(start: Start, bound: BoundTask, io: AttemptIO) -> list[str]:
    """The shell and its arguments; everything else that it needs is already in this process's environment."""
    inputs, command = inputs_of(start, io.files), start.command or ""
    values: dict[str, str] = {}
    if bound.is_template and is_template(command):
        from evertick.attempts.shell_command import render_command

        command, values = render_command(command, bound, inputs, io)
    variables = {**task_variables(start), **attempt_variables(io), **bound.environment(inputs), **values}
    for name, value in variables.items():
        os.putenv(name, value)
    if os.access(_BASH, os.X_OK):
        return [_BASH, "--noprofile", "--norc", "-eo", "pipefail", "-c", command]
    return [_SHELL, "-e", "-c", command]
