"""Runs a shell task's command as a subprocess, while this process masks the secrets in its output."""

from __future__ import annotations

import subprocess

from evertick.attempts.protocol import AttemptIO, Report, Start
from evertick.attempts.shell import prepare_shell
from evertick.domain.attempt import OutcomeKind
from evertick.processes.tree import explain_exit
from evertick.sdk.runtime import BoundTask


def run_shell(start: Start, bound: BoundTask, io: AttemptIO) -> Report:
    """In the same process group: a request to stop reaches it as well."""
    code = subprocess.run(prepare_shell(start, bound, io), stdin=subprocess.DEVNULL, check=False).returncode
    if code == 0:
        return Report(start.number, OutcomeKind.SUCCESS, exit_code=0)
    status = code << 8 if code >= 0 else -code
    reason, number = explain_exit(status, has_oom_evidence=False, is_shell=True)
    return Report(start.number, OutcomeKind.FAILED, reason, exit_code=number)
