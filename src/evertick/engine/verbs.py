"""Shared by all verbs of the leader: the fence that rejects a former leader, and the errors that one row can cause.

A leader's verb never guesses: a rejected epoch raises `NotLeader`, and nothing was changed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import psycopg

from evertick.db.connect import retry_on_deadlock
from evertick.domain.errors import NotLeader

NOT_LEADER = "EV001"
# Invalid values, violated constraints, rows that are too large, damaged pages, and errors raised by a trigger.
_POISON_CLASSES = ("22", "23", "54", "XX")
_RAISED = "P0001"

T = TypeVar("T")


def is_poison(code: str | None) -> bool:
    """Whether one row can cause this error. Mirrors the SQL function of that name; a test compares both."""
    return code is not None and (code[:2] in _POISON_CLASSES or code == _RAISED)


async def as_leader(work: Callable[[], Awaitable[T]], *, shard: int, epoch: int) -> T:
    """Run one transaction of the leader, and again if it was a deadlock's victim."""
    try:
        return await retry_on_deadlock(work)
    except psycopg.Error as error:
        if error.sqlstate == NOT_LEADER:
            raise NotLeader(f"epoch {epoch} of shard {shard} is over; nothing was changed") from error
        raise
