"""`python -m evertick.attempts.fork_server_main`: a reaper and, below it, the fork server.

The reaper runs no user code. It adopts the orphans of the fork server's tree and exits only when no process of that
tree is left: after the fork server's death, after the runner's death, or on SIGTERM from the runner.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

_LOCK_KEEPERS = ("threading", "logging")


Hooks = dict[str, Callable[[], Any]]


class DeferredForkHooks:
    """Keeps the fork hooks of `threading` and `logging` out of the forks of a fork server.

    They reset locks that another thread may hold during a fork. A fork server has one thread, and in a fresh process they
    touch 90 pages: 0.2 ms for nothing. A child that forks gets them back before it does. The hooks of all other modules,
    such as the hook of `random` that sets a new seed, are never deferred.

    Must be created before these modules are imported; if one already is, its hooks stay in place.
    """

    def __init__(self) -> None:
        self._hooks: list[Hooks] = []
        self._warm_parent = 0
        self._register = os.register_at_fork
        os.register_at_fork = self._hold_or_register

    def let_through(self) -> None:
        """In the fork server, before it imports user code: hooks registered from now on run as usual."""
        self._warm_parent = os.getpid()
        os.register_at_fork = self._register
        self._register(before=self._give_back)

    def _hold_or_register(self, **hooks: Any) -> None:
        if sys._getframe(1).f_globals["__name__"] in _LOCK_KEEPERS:
            self._hooks.append(hooks)
        else:
            self._register(**hooks)

    def _give_back(self) -> None:
        """Called before any fork. Hooks registered here run only in later forks, so the first part is called directly."""
        if os.getpid() == self._warm_parent or not self._hooks:
            return
        given, self._hooks = self._hooks, []
        for hooks in given:
            self._register(**hooks)
        for hooks in reversed(given):
            if "before" in hooks:
                hooks["before"]()


# Before any import of `threading` or `logging`.
_HOOKS = DeferredForkHooks()

from evertick.attempts.fork_server import BLOCKED, ForkServer, ForkServerConfig  # noqa: E402
from evertick.domain.attempt import FORK_SERVER_MARK  # noqa: E402
from evertick.processes.system import (  # noqa: E402
    become_subreaper,
    block_signals,
    die_with_parent,
    expect_children,
    left_behind,
    message_socket,
)
from evertick.processes.tree import kill_tree  # noqa: E402

_LONGEST_CLEANUP_SECONDS = 5.0


def run(arguments: list[str]) -> None:
    control = message_socket(int(arguments[0]))
    plan = ForkServerConfig.from_json(arguments[1])
    block_signals(BLOCKED)
    die_with_parent(signal.SIGTERM, plan.runner_pid)
    become_subreaper()
    os.putenv(FORK_SERVER_MARK, plan.spool_prefix)
    reaper_pid = os.getpid()
    parent_pid = os.fork()
    if parent_pid == 0:
        _HOOKS.let_through()
        ForkServer(plan, control).run(reaper_pid)
    # Imported only here: otherwise every attempt's process would map its modules, too.
    from evertick.bundles.cache import hold

    hold(plan.folder)
    if plan.environment:
        hold(plan.environment)
    os._exit(_keep(parent_pid, Path(plan.spool_prefix).name))


def _keep(parent_pid: int, mark: str) -> int:
    """Wait for the end, clean up, and return the exit code that tells the runner how the fork server ended."""
    expect_children()
    while (status := _reap_until(parent_pid)) is None:
        if signal.sigwait({signal.SIGCHLD, signal.SIGTERM}) == signal.SIGTERM:
            kill_tree(parent_pid)
            _leave_nothing(mark)
            return 0
    code = os.waitstatus_to_exitcode(status)
    _leave_nothing(mark)
    return code if code >= 0 else 128 - code


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


def _leave_nothing(mark: str) -> None:
    give_up_at = time.monotonic() + _LONGEST_CLEANUP_SECONDS
    while time.monotonic() < give_up_at:
        left = left_behind(mark)
        if not left:
            return
        for pid in left:
            kill_tree(pid)
        _reap_until(-1)
        time.sleep(0.001)


if __name__ == "__main__":
    run(sys.argv[1:])
