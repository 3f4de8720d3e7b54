"""Keeps the fork hooks of `threading` and `logging` out of the forks of a fork server.

They reset locks that another thread may hold during a fork. A fork server has one thread, and in a fresh process they
touch 90 pages: 0.2 ms for nothing. A child that forks gets them back before it does. The hooks of all other modules,
such as the one that reseeds `random`, are never deferred.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

_LOCK_KEEPERS = ("threading", "logging")

Hooks = dict[str, Callable[[], Any]]


class HeldBackHooks:
    """Must be created before these modules are imported; if one already is, its hooks stay in place."""

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
