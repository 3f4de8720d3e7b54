"""Turns an attempt's process into a shell that runs the task's command. Its exit status is the task's outcome.

It runs as on a build server, by `bash -eo pipefail`, or `sh -e` where there is no bash: a failing line fails the task.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import NoReturn

from evertick.authoring.resolve import BoundTask
from evertick.execution.body import inputs_of
from evertick.execution.protocol import Start

_BASH = "/bin/bash"
_SHELL = "/bin/sh"


def become_shell(start: Start, bound: BoundTask) -> NoReturn:
    """Replace this process. Its session, log and parent stay, so it is killed and reaped like any other attempt."""
    for name, value in {**_variables(start), **bound.environment(inputs_of(start))}.items():
        os.putenv(name, value)
    # Python ignores these two; a command must see them as usual.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    command = start.command or ""
    if os.access(_BASH, os.X_OK):
        os.execv(_BASH, ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command])
    os.execv(_SHELL, ["sh", "-e", "-c", command])


def _variables(start: Start) -> Mapping[str, str]:
    return {
        "EVERTICK_RUN_ID": str(start.run_id),
        "EVERTICK_DAG": start.dag,
        "EVERTICK_TASK": start.task,
        "EVERTICK_MAP_INDEX": str(start.map_index),
        "EVERTICK_ATTEMPT": str(start.attempt),
        "EVERTICK_EPOCH": str(start.epoch),
        "EVERTICK_IDEMPOTENCY_KEY": start.idempotency_key,
        "EVERTICK_FIRE_AT": start.fire_at or "",
        "EVERTICK_PARAMS": start.params_json,
        "EVERTICK_INPUTS": start.inputs_json,
    }
