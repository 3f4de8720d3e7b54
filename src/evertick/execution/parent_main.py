"""`python -m evertick.execution.parent_main`: a reaper and, below it, the fork server.

The reaper runs no user code. It adopts the orphans of the fork server's tree and exits only when no process of that
tree is left: after the fork server's death, after the runner's death, or on SIGTERM from the runner.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

from evertick.execution.fork_hooks import HeldBackHooks

# Before any import of `threading` or `logging`.
_HOOKS = HeldBackHooks()

from evertick.domain.attempt import FORK_SERVER_MARK  # noqa: E402
from evertick.execution.kill import children_of, kill_tree  # noqa: E402
from evertick.execution.linux import become_subreaper, block_signals, die_with_parent  # noqa: E402
from evertick.execution.parent import BLOCKED, ParentPlan, WarmParent  # noqa: E402

_LONGEST_CLEANUP_SECONDS = 5.0


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    plan = ParentPlan.from_json(sys.argv[2])
    block_signals(BLOCKED)
    die_with_parent(signal.SIGTERM, plan.runner_pid)
    become_subreaper()
    os.putenv(FORK_SERVER_MARK, plan.spool_prefix)
    keeper_pid = os.getpid()
    parent_pid = os.fork()
    if parent_pid == 0:
        _HOOKS.let_through()
        WarmParent(plan, control).run(keeper_pid)
    _hold(plan.folder)
    os._exit(_keep(parent_pid))


def _hold(folder: str) -> None:
    """Imported only here: otherwise every attempt's process would map its modules, too."""
    from evertick.execution.bundle_folders import hold

    hold(folder)


def _keep(parent_pid: int) -> int:
    """Wait for the end, clean up, and return the exit code that tells the runner how the fork server ended."""
    while signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGCHLD:
        status = _reap_until(parent_pid)
        if status is not None:
            code = os.waitstatus_to_exitcode(status)
            _leave_nothing()
            return code if code >= 0 else 128 - code
    kill_tree(parent_pid)
    _leave_nothing()
    return 0


def _reap_until(wanted: int) -> int | None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return None
        if pid == wanted:
            return status
        if pid == 0:
            return None


def _leave_nothing() -> None:
    give_up_at = time.monotonic() + _LONGEST_CLEANUP_SECONDS
    while time.monotonic() < give_up_at:
        left = children_of(os.getpid())
        if not left:
            return
        for pid in left:
            kill_tree(pid)
        _reap_until(-1)
        time.sleep(0.001)


if __name__ == "__main__":
    main()
