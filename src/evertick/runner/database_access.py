"""The access of a runner to the engine through its own connections to the database. Decides nothing about tasks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from evertick.config import Settings
from evertick.db.connect import Purpose
from evertick.db.connection import Opened
from evertick.db.notify import Channel, notify
from evertick.db.queries import dags, runners, runs
from evertick.db.queries.dags import VersionRow
from evertick.db.queries.runners import ListedRunner, NewRunner
from evertick.db.queries.secrets import AttemptHolder
from evertick.domain.attempt import AttemptRef, HeartbeatReply, OutcomeKind
from evertick.domain.failover import Server
from evertick.engine.finish_and_claim import Exchange
from evertick.engine.runners import extend, mark_runner_dead
from evertick.engine.triggers import TriggerExchange, exchange_triggers
from evertick.logs.shipper import DatabaseLogStore
from evertick.observability.logging import Log
from evertick.processes.identity import ProcessPlace
from evertick.processes.system import boot_seconds
from evertick.runner.access import Load, MayClaim, PackedBundle, Registered, Report, Work
from evertick.runner.asks import Asks
from evertick.runner.exchange import MAY_WAIT, Claims
from evertick.runtime.connections import Notifier, ReconnectingConnection, listen_forever
from evertick.runtime.server_watch import SELDOM_SECONDS
from evertick.secrets.backends import ReadStored, SecretProvider
from evertick.storage.results import ResultTransfers

# The list of peers is read when one registers, and periodically in case that notification was lost; without
# notifications, in every tick.
LIST_TICKS = 10


def channels_after(answer: Exchange, ended: Iterable[OutcomeKind]) -> set[Channel]:
    """The channels of the processes that can act on what an exchange changed."""
    channels = {Channel.TASKS} if answer.has_more else set()
    if answer.has_arrivals or any(kind in MAY_WAIT for kind in ended):
        channels.add(Channel.SCHEDULE)
    return channels


def declared_dead_reason(runner_id: str) -> str:
    return f"agent_lost: runner {runner_id} died"


class DatabasePeers:
    """On a connection that other work shares, which can wait."""

    def __init__(self, link: Opened, *, settings: Settings) -> None:
        self._link, self._infra_retries = link, settings.infra_retries
        self.list_seconds = settings.tick_seconds * (LIST_TICKS if settings.listen_notify else 1)

    async def peers(self, place: ProcessPlace) -> list[ListedRunner]:
        conn = await self._link.get()
        return await runners.peers(conn, host=place.host, boot_id=place.boot_id, pid_namespace=place.pid_namespace)

    async def declare_dead(self, runner: ListedRunner) -> int:
        reason, retries = declared_dead_reason(runner.runner_id), self._infra_retries
        return await mark_runner_dead(
            await self._link.get(), session=runner.session, reason=reason, infra_retries=retries
        )


class DatabaseHeartbeatLine:
    def __init__(self, url: str, session: int) -> None:
        self._link, self._session = ReconnectingConnection(url, Purpose.SCHEDULER), session
        self.server: Server | None = None

    async def beat(self, held: Callable[[], list[AttemptRef]], limit_seconds: float) -> tuple[HeartbeatReply, float]:
        async with self._link.with_deadline(limit_seconds) as conn:
            # Taken before sending: the database counts from a later moment.
            sent_at, server = boot_seconds(), self._link.server
            reply = await extend(conn, session=self._session, held=held())
        self.server = server
        return reply, sent_at

    def abort(self) -> None:
        self._link.abort()

    async def close(self) -> None:
        await self._link.close()


class DatabaseAccess(DatabasePeers):
    """`hot` is for exchanges, `side` for everything that they must not wait for."""

    is_over_https = False

    def __init__(self, settings: Settings, *, url: str, me: NewRunner, log: Log) -> None:
        self._settings, self._url, self._me = settings, url, me
        self.hot = ReconnectingConnection(url, Purpose.RUNNER)
        self.side = ReconnectingConnection(url, Purpose.SCHEDULER)
        self.notifier = Notifier(url, is_enabled=settings.listen_notify, log=log, look_seconds=SELDOM_SECONDS)
        super().__init__(self.side, settings=settings)
        self.claims = Claims.of(settings, session=me.session, queues=me.queues, match=me.match)
        self.grants = SecretProvider(settings)
        self.transfers = ResultTransfers(settings, log=log)
        self._asks = Asks(settings, link=self.side, grants=self.grants, notifier=self.notifier)
        self._log = log

    @property
    def poll_seconds(self) -> float:
        return self._settings.tick_seconds

    async def register(self, me: NewRunner) -> Registered:
        conn = await self.side.get()
        await runners.register(conn, me)
        if self._settings.listen_notify:
            # Before the first claim, so that the other runners of the machine know the holder of every attempt.
            await notify(conn, Channel.RUNNER)
        namesakes = await runners.namesakes(conn, runner_id=me.runner_id, session=me.session)
        return Registered(namesakes=namesakes, unmatched=await self.claims.unmatched(conn))

    async def exchange(self, reports: list[Report], free: int, may_claim: MayClaim) -> tuple[Exchange, Server | None]:
        conn, server = await self.hot.get(), self.hot.server
        free = free if may_claim(server) else 0
        answer = await self.claims.exchange(conn, reports=[each.text for each in reports], free=free)
        for channel in channels_after(answer, (each.outcome.kind for each in reports)):
            self.notifier.wake(channel)
        return answer, server

    async def exchange_triggers(self, reports: list[str], held: list[AttemptRef] | None, free: int) -> TriggerExchange:
        me, conn = self._me, await self.side.get()
        answer = await exchange_triggers(
            conn, session=me.session, reports=reports, held=held, queues=me.queues, match=me.match, free=free
        )
        if answer.has_more:
            self.notifier.wake(Channel.TASKS)
        return answer

    def abort(self) -> None:
        self.hot.abort()

    def open_heartbeat(self) -> DatabaseHeartbeatLine:
        return DatabaseHeartbeatLine(self._url, self._me.session)

    def open_logs(self) -> DatabaseLogStore:
        return DatabaseLogStore(self._url)

    async def version(self, version_id: int) -> VersionRow | None:
        return await dags.version(await self.side.get(), version_id)

    async def bundle(self, bundle_hash: str, *, is_kept: bool) -> PackedBundle | None:
        row = await dags.bundle(await self.side.get(), bundle_hash)
        return None if row is None else PackedBundle(archive=row.archive, uses_threads=row.uses_threads is not None)

    def stored(self, holder: AttemptHolder) -> ReadStored:
        return self.grants.stored(self.side.get, holder)

    async def answer(self, holder: AttemptHolder, verb: str, args: Mapping[str, Any]) -> object:
        return await self._asks.answer(holder, verb, args)

    async def existing_runs(self, run_ids: list[int]) -> set[int]:
        return await runs.existing(await self.side.get(), run_ids)

    async def declare_dead(self, runner: ListedRunner) -> int:
        count = await super().declare_dead(runner)
        self.notifier.wake(Channel.TASKS)
        return count

    def works(self, on_notification: Callable[[Channel], None], load: Load) -> list[Work]:
        works: list[Work] = [self.notifier.run()]
        if self._settings.listen_notify:
            channels = [Channel.TASKS, Channel.STOP, Channel.RUNNER]
            works.append(listen_forever(self._url, channels, on_notification, log=self._log))
        return works

    async def leave(self) -> None:
        await runners.leave(await self.side.get(), self._me.session)

    async def close(self) -> None:
        for link in (self.hot, self.side):
            await link.close()
        await self.notifier.close()
