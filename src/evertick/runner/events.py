"""The events of a runner, and the queue in which its parts report them.

Every part puts its events into the queue of its session; only the session takes them out. No part calls another back.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from evertick.db.notify import Channel
from evertick.domain.attempt import HeartbeatReply, Outcome
from evertick.domain.failover import Server


@dataclass(frozen=True, slots=True)
class Outcomes:
    """Attempts ended, and none of their processes is left."""

    outcomes: list[Outcome]


@dataclass(frozen=True, slots=True)
class ResultStored:
    """An attempt ended whose large result is stored where every runner can read it."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class LaunchFailed:
    """A claimed task could not be started; its outcome waits to be reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatAnswered:
    """`sent_at` is in seconds since boot; `is_spare`: the usual connection did not answer in time."""

    reply: HeartbeatReply
    sent_at: float
    is_spare: bool
    server: Server | None


@dataclass(frozen=True, slots=True)
class PeerDied:
    """A runner of this machine was declared dead: its tasks can be claimed again."""


@dataclass(frozen=True, slots=True)
class NotificationArrived:
    """A notification arrived."""

    channel: Channel


E = TypeVar("E")


class EventQueue(Generic[E]):
    """The events of one session, for one event loop. `wake` is what its loop waits for; `has_arrived` is the same for
    the task that applies events while the loop waits for the database."""

    def __init__(self) -> None:
        self._events: deque[E] = deque()
        self.wake, self.has_arrived = asyncio.Event(), asyncio.Event()

    def put(self, event: E) -> None:
        self._events.append(event)
        self.wake.set()
        self.has_arrived.set()

    def take(self) -> Iterator[E]:
        """The events, oldest first. If one cannot be applied, the others stay in the queue."""
        while self._events:
            yield self._events.popleft()
