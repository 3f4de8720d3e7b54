"""Turns an attempt's process into a shell that runs the task's command. Its exit status is the task's outcome.

It runs as on a build server, by `bash -eo pipefail`, or `sh -e` where there is no bash: a failing line fails the task.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import NoReturn

from evertick.authoring.resolve import BoundTask
from evertick.domain.attempt import AttemptOrder
from evertick.execution.body import inputs_of

_BASH = "/bin/bash"
_SHELL = "/bin/sh"


def become_shell(order: AttemptOrder, bound: BoundTask) -> NoReturn:
    """Replace this process. Its session, log and parent stay, so it is killed and reaped like any other attempt."""
    for name, value in {**_variables(order), **bound.environment(inputs_of(order))}.items():
        os.putenv(name, value)
    # Python ignores these two; a command must see them as usual.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    command = order.command or ""
    if os.access(_BASH, os.X_OK):
        os.execv(_BASH, ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", command])
    os.execv(_SHELL, ["sh", "-e", "-c", command])


def _variables(order: AttemptOrder) -> Mapping[str, str]:
    return {
        "EVERTICK_RUN_ID": str(order.key.run_id),
        "EVERTICK_DAG": order.dag,
        "EVERTICK_TASK": order.task,
        "EVERTICK_MAP_INDEX": str(order.key.map_index),
        "EVERTICK_ATTEMPT": str(order.attempt),
        "EVERTICK_EPOCH": str(order.epoch),
        "EVERTICK_IDEMPOTENCY_KEY": order.idempotency_key,
        "EVERTICK_FIRE_AT": order.fire_at or "",
        "EVERTICK_PARAMS": order.params_json,
        "EVERTICK_INPUTS": order.inputs_json,
    }
