"""How a session of a runner reaches the engine: in the database, or over HTTPS. The session's rules are the same for both.

An implementation carries requests and nothing more: it decides nothing about tasks. Every request may be repeated; one
whose answer was lost raises an error of `UNREACHABLE`, and may or may not have been carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from evertick.db.notify import Channel
from evertick.db.queries.dags import VersionRow
from evertick.db.queries.runners import ListedRunner, NewRunner
from evertick.db.queries.secrets import AttemptHolder
from evertick.domain.attempt import AttemptRef, HeartbeatReply, Outcome, RunnerRequest
from evertick.domain.failover import Server
from evertick.engine.finish_and_claim import Exchange
from evertick.engine.triggers import TriggerExchange
from evertick.logs.shipper import LogStore
from evertick.processes.identity import ProcessPlace
from evertick.secrets.backends import ReadStored
from evertick.storage.results import Transfers

Work = Coroutine[None, None, None]
# The free slots of the session, and the drain request that it follows.
Load = Callable[[], tuple[int, RunnerRequest | None]]
# Whether tasks may be claimed from this server.
MayClaim = Callable[[Server | None], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """`namesakes` have the same readable id; `unmatched` are patterns that match no task, with the reason."""

    namesakes: list[ListedRunner]
    unmatched: list[tuple[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An ended attempt, and its encoding by `encode_report`."""

    outcome: Outcome
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedBundle:
    """`archive` is None if it was not asked for."""

    archive: bytes | None
    uses_threads: bool


class HeartbeatLine(Protocol):
    """One connection for heartbeats. `server`: the database server that answered last."""

    @property
    def server(self) -> Server | None: ...

    async def beat(self, held: Callable[[], list[AttemptRef]], limit_seconds: float) -> tuple[HeartbeatReply, float]:
        """The reply, and when the request was sent, in seconds since boot."""

    def abort(self) -> None:
        """Cut the connection, so that a caller that waits for an answer stops waiting."""

    async def close(self) -> None: ...


class Peers(Protocol):
    """The other runners of this machine."""

    @property
    def list_seconds(self) -> float:
        """How often to list them although no notification arrived."""

    async def peers(self, place: ProcessPlace) -> list[ListedRunner]: ...

    async def declare_dead(self, runner: ListedRunner) -> int:
        """The runner is provably gone. Returns the number of attempts that were taken from it."""


class EngineAccess(Peers, Protocol):
    """The access of one session. Belongs to one event loop, except for the lines of `open_heartbeat`."""

    @property
    def transfers(self) -> Transfers:
        """Of large results."""

    @property
    def is_over_https(self) -> bool:
        """Whether a round trip may take long, compared with a task."""

    @property
    def poll_seconds(self) -> float:
        """How often to look for tasks although no notification arrived."""

    async def register(self, me: NewRunner) -> Registered: ...

    async def exchange(self, reports: list[Report], free: int, may_claim: MayClaim) -> tuple[Exchange, Server | None]:
        """Report ended attempts and claim up to `free` tasks, in one round trip."""

    async def exchange_triggers(self, reports: list[str], held: list[AttemptRef] | None, free: int) -> TriggerExchange:
        """Report how triggers ended, learn which are not held any more, and lease up to `free`. None: only report."""

    def abort(self) -> None:
        """Cut the connection of exchanges."""

    def open_heartbeat(self) -> HeartbeatLine: ...

    def open_logs(self) -> LogStore: ...

    async def version(self, version_id: int) -> VersionRow | None: ...

    async def bundle(self, bundle_hash: str, *, is_kept: bool) -> PackedBundle | None:
        """`is_kept`: its code is on this machine."""

    def stored(self, holder: AttemptHolder) -> ReadStored:
        """Reads stored values for an attempt."""

    async def answer(self, holder: AttemptHolder, verb: str, args: Mapping[str, Any]) -> object:
        """What a running attempt asks for."""

    async def existing_runs(self, run_ids: list[int]) -> set[int]:
        """Those of these runs that exist."""

    def works(self, on_notification: Callable[[Channel], None], load: Load) -> list[Work]:
        """Background work of the session. Notifications only shorten waits."""

    async def leave(self) -> None:
        """The session ends, and holds nothing."""

    async def close(self) -> None: ...
