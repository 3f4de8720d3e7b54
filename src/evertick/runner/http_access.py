"""The access of a runner to the engine over HTTPS: it needs an address and a join token, and no database.

A long poll says that there is work; claims come with an exchange, as from the database. So a lost answer of the poll loses
nothing, and a lost answer of an exchange is what it is for every runner: the next heartbeat lists what was claimed.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from typing import Any

from evertick.config import Settings
from evertick.db.notify import Channel
from evertick.db.queries.dags import VersionRow
from evertick.db.queries.runners import ListedRunner, NewRunner
from evertick.db.queries.secrets import AttemptHolder
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.attempt import AttemptRef, HeartbeatReply, RunnerRequest, TaskKey
from evertick.domain.errors import Forbidden, LeaseLost, NotFound, Unauthenticated
from evertick.domain.failover import Server
from evertick.engine.finish_and_claim import Exchange
from evertick.engine.triggers import TriggerExchange, TriggerRow
from evertick.logs.shipper import stored
from evertick.logs.spool import LogChunk
from evertick.observability.logging import Log
from evertick.processes.identity import ProcessPlace, registered_place
from evertick.processes.system import boot_seconds
from evertick.runner.access import Load, MayClaim, PackedBundle, Registered, Report, Work
from evertick.runner.http_api import ANSWER_SECONDS, RunnerApi
from evertick.runner.http_results import HttpTransfers
from evertick.runtime.loop import run_loop
from evertick.secrets.backends import ReadStored, Wanted

# A poll that nothing answers ends after this time; and how often to look for tasks without a notification.
WAIT_SECONDS, POLL_SECONDS = 25.0, 30.0
# Runners of this machine that join later are listed when one dies, which a new runner finds when it joins.
LIST_SECONDS = 60.0
# The next poll begins when the exchange that this one caused is over, at the latest after this time.
LONGEST_PAUSE_SECONDS = 0.5
# The reports, and the log lines, of one request.
MOST_REPORT_BYTES, MOST_LOG_BYTES = 2 * 1024 * 1024, 1024 * 1024
USES_THREADS = "x-evertick-uses-threads"


class HttpHeartbeatLine:
    def __init__(self, api: RunnerApi) -> None:
        self._api, self._endpoint = api, api.endpoint()
        self.server: Server | None = None

    async def beat(self, held: Callable[[], list[AttemptRef]], limit_seconds: float) -> tuple[HeartbeatReply, float]:
        sent_at = boot_seconds()
        body = {"held": [[*key, epoch] for key, epoch in held()]}
        try:
            told = await self._api.ask(self._endpoint, "/heartbeat", body, seconds=limit_seconds)
        except (Unauthenticated, Forbidden):
            # Its token has expired, and it may not join again: it can never report, as one that was declared dead.
            return HeartbeatReply(is_gone=True, lost=[], stop=[], unknown=[]), sent_at
        self.server = _server(told["server"])
        self._api.renew(told["token"])
        named = {name: [_ref(each) for each in told[name]] for name in ("lost", "stop", "unknown")}
        request = told["request"] and RunnerRequest(told["request"])
        has_triggers = told["has_triggers"]
        reply = HeartbeatReply(is_gone=told["is_gone"], request=request, has_triggers=has_triggers, **named)
        return reply, sent_at

    def abort(self) -> None:
        self._endpoint.abort()

    async def close(self) -> None:
        self._endpoint.close()


class HttpLogStore:
    def __init__(self, api: RunnerApi) -> None:
        self._api, self._endpoint = api, api.endpoint()

    async def append(self, session: int, chunks: list[LogChunk]) -> None:
        told = [(each, stored(each).content) for each in chunks]
        for batch in _batches(told, MOST_LOG_BYTES, lambda each: len(each[1])):
            lines = [
                {"ref": [*each.key, each.epoch], "offset": each.offset, "end": each.end, "content": content}
                for each, content in batch
            ]
            await self._api.ask(self._endpoint, "/logs", {"session": session, "chunks": lines})

    async def shipped_until(self, session: int, key: TaskKey, epoch: int) -> int:
        told = await self._api.ask(self._endpoint, "/logs/position", {"session": session, "ref": [*key, epoch]})
        return int(told["until"])

    async def live_sessions(self, sessions: set[int]) -> set[int]:
        told = await self._api.ask(self._endpoint, "/sessions/live", {"sessions": sorted(sessions)})
        return set(told["sessions"])

    async def close(self) -> None:
        self._endpoint.close()


class HttpAccess:
    """`_hot` is for exchanges, `_side` for everything that they must not wait for."""

    list_seconds, is_over_https = LIST_SECONDS, True

    def __init__(self, settings: Settings, *, server: str, me: NewRunner, log: Log) -> None:
        self._api, self._log = RunnerApi(settings, server=server, me=me, log=log), log
        self._hot, self._side, self._poll = (self._api.endpoint() for _ in range(3))
        self.transfers = HttpTransfers(settings, api=self._api, log=log)
        self._server: Server | None = None
        self._match = me.match
        # An exchange ended; and it left slots free, which the poll does not know that is under way.
        self._has_exchanged, self._has_room = asyncio.Event(), asyncio.Event()

    @property
    def poll_seconds(self) -> float:
        return POLL_SECONDS

    async def register(self, me: NewRunner) -> Registered:
        self._api.warn_if_plain(self._hot)
        told = await self._api.join(self._hot)
        self._server = _server(told["server"])
        unmatched = [(pattern, reason) for pattern, reason in told["unmatched"]]
        return Registered(namesakes=[_listed(each) for each in told["namesakes"]], unmatched=unmatched)

    async def exchange(self, reports: list[Report], free: int, may_claim: MayClaim) -> tuple[Exchange, Server | None]:
        free = free if may_claim(self._server) else 0
        refused: list[tuple[TaskKey, int]] = []
        batches = list(_batches(reports, MOST_REPORT_BYTES, lambda each: len(each.text))) or [[]]
        try:
            for batch in batches:
                is_last = batch is batches[-1]
                told = await self._exchange(batch, free if is_last else 0)
                refused += [_ref(each) for each in told["refused"]]
        finally:
            self._has_exchanged.set()
        claims = [ExchangeRow(**{**each, "fire_at": _time(each["fire_at"])}) for each in told["claims"]]
        if free > len(claims):
            self._has_room.set()
        self._server = _server(told["server"])
        answer = Exchange(claims=claims, refused=refused, has_more=False, is_walking=told["is_walking"])
        return answer, self._server

    async def _exchange(self, reports: list[Report], free: int) -> dict[str, Any]:
        server = self._server and (self._server.system_id, self._server.timeline)
        # They are JSON already: results are not decoded here.
        texts = ", ".join(each.text for each in reports)
        rest = json.dumps({"free": free, "server": server})
        return await self._api.ask_text(self._hot, "/exchange", f'{{"reports": [{texts}], {rest[1:]}')

    async def exchange_triggers(self, reports: list[str], held: list[AttemptRef] | None, free: int) -> TriggerExchange:
        listed = None if held is None else [[*key, epoch] for key, epoch in held]
        rest = json.dumps({"free": free, "held": listed})
        body = f'{{"reports": [{", ".join(reports)}], {rest[1:]}'
        told = await self._api.ask_text(self._side, "/triggers", body)
        rows = [TriggerRow(**{**each, "fire_at": _time(each["fire_at"])}) for each in told["started"]]
        named = {name: [_ref(each) for each in told[name]] for name in ("lost", "stopped", "refused")}
        return TriggerExchange(started=rows, has_more=False, **named)

    def abort(self) -> None:
        self._hot.abort()

    def open_heartbeat(self) -> HttpHeartbeatLine:
        return HttpHeartbeatLine(self._api)

    def open_logs(self) -> HttpLogStore:
        return HttpLogStore(self._api)

    async def version(self, version_id: int) -> VersionRow | None:
        with suppress(NotFound):
            return VersionRow(**await self._api.read(self._side, f"/versions/{version_id}"))
        return None

    async def bundle(self, bundle_hash: str, *, is_kept: bool) -> PackedBundle | None:
        with suppress(NotFound):
            found = await self._api.fetch(self._side, f"/bundles/{bundle_hash}?is_kept={str(is_kept).lower()}")
            uses_threads = found.headers.get(USES_THREADS) == "1"
            return PackedBundle(archive=None if is_kept else found.body, uses_threads=uses_threads)
        return None

    def stored(self, holder: AttemptHolder) -> ReadStored:
        async def read(wanted: list[Wanted]) -> dict[Wanted, str]:
            body = {"ref": [*holder.key, holder.epoch], "wanted": [list(each) for each in wanted]}
            told = await self._api.ask(self._side, "/values", body)
            return {(kind, name): value for kind, name, value in told["values"]}

        return read

    async def answer(self, holder: AttemptHolder, verb: str, args: Mapping[str, Any]) -> object:
        body = {"ref": [*holder.key, holder.epoch], "verb": verb, "args": dict(args)}
        return (await self._api.ask(self._side, "/ask", body))["value"]

    async def existing_runs(self, run_ids: list[int]) -> set[int]:
        return set((await self._api.ask(self._side, "/runs/existing", {"runs": run_ids}))["runs"])

    async def peers(self, place: ProcessPlace) -> list[ListedRunner]:
        told = await self._api.ask(self._side, "/peers", {"place": registered_place()})
        return [_listed(each) for each in told["peers"]]

    async def declare_dead(self, runner: ListedRunner) -> int:
        return int((await self._api.ask(self._side, "/dead", {"session": runner.session}))["attempts"])

    def works(self, on_notification: Callable[[Channel], None], load: Load) -> list[Work]:
        async def poll() -> float:
            return await self._poll_once(on_notification, load)

        return [run_loop(poll, name="poll", log=self._log, is_essential=False)]

    async def _poll_once(self, on_notification: Callable[[Channel], None], load: Load) -> float:
        free, request = load()
        self._has_room.clear()
        body = {"free": free, "request": request or "", "seconds": WAIT_SECONDS}
        asking = asyncio.create_task(self._api.ask(self._poll, "/wait", body, seconds=WAIT_SECONDS + ANSWER_SECONDS))
        # While it waits without free slots it is not woken for tasks.
        room = asyncio.create_task(self._has_room.wait() if free <= 0 else asyncio.Event().wait())
        try:
            await asyncio.wait({asking, room}, return_when=asyncio.FIRST_COMPLETED)
            if not asking.done():
                return 0.0
            told = await asking
        finally:
            asking.cancel()
            room.cancel()
        self._has_exchanged.clear()
        for channel in told["channels"]:
            on_notification(Channel(channel))
        if Channel.TASKS in told["channels"]:
            with suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_PAUSE_SECONDS):
                    await self._has_exchanged.wait()
        return float(told["rest_seconds"])

    async def leave(self) -> None:
        with suppress(LeaseLost):
            await self._api.ask(self._side, "/leave", {})

    async def close(self) -> None:
        for endpoint in (self._hot, self._side, self._poll):
            endpoint.close()


def _batches(items: list[Any], most_bytes: int, size: Callable[[Any], int]) -> Iterator[list[Any]]:
    """In order, each batch up to that size; an item that is larger is alone."""
    batch: list[Any] = []
    total = 0
    for item in items:
        if batch and total + size(item) > most_bytes:
            yield batch
            batch, total = [], 0
        batch.append(item)
        total += size(item)
    if batch:
        yield batch


def _server(told: list[int] | None) -> Server | None:
    return None if told is None else Server(system_id=told[0], timeline=told[1])


def _ref(told: list[int]) -> AttemptRef:
    return AttemptRef(TaskKey(*told[:3]), told[3])


def _time(text: str | None) -> datetime | None:
    return None if text is None else datetime.fromisoformat(text)


def _listed(told: dict[str, Any]) -> ListedRunner:
    return ListedRunner(**{**told, "started_at": datetime.fromisoformat(told["started_at"])})
