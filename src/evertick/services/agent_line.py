"""What an agent says to the API, and how it goes on when nobody answers. Never sends a token to anybody else, never shows one.

Everything that is sent may be sent again: what the API has done already it answers alike.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from evertick.domain.agent_order import AgentOrder, read_order
from evertick.domain.attempt import Outcome
from evertick.domain.errors import Conflict, EvertickError, LeaseLost, Refused, ResultLost, Unanswered
from evertick.execution.spool import LogChunk
from evertick.services.agent_http import Address, Answer, Request
from evertick.services.events import Log
from evertick.services.place import agent_place

PREFIX = "/api/agent/v1"
ANSWER_SECONDS = 30.0
FILE_SECONDS = 600.0
MOST_ANSWER_BYTES = 512 * 1024 * 1024
LONGEST_PAUSE_SECONDS = 15.0
FIRST_PAUSE_SECONDS = 0.2
_PART_BYTES = 256 * 1024
_NO_API = "what answers there is no API of this release"

T = TypeVar("T")


class AgentLine:
    """One attempt's. `token` and `renewal` are those that the last answer brought."""

    def __init__(self, server: str, start_token: str, *, log: Log) -> None:
        self._address = Address(server)
        if self._address.is_plain:
            log.warning("plain_http", message="Tokens and secrets travel unencrypted: use https.", server=server)
        self._renewal, self._token, self._log = start_token, "", log
        self._nonce = secrets.token_hex(16)
        # How long one answer may take; less where heartbeats are quick.
        self.answer_seconds = ANSWER_SECONDS

    async def start(self) -> AgentOrder:
        """Raises Conflict or LeaseLost where the attempt must not be run, Refused where the token is no good, Unanswered."""
        body = {"nonce": self._nonce, "version": version("evertick"), "place": agent_place()}
        try:
            told = read_order(await self._say("/start", body, token=self._renewal))
        except (KeyError, TypeError, ValueError):
            raise Unanswered(_NO_API) from None
        self._token, self._renewal = told.token, told.renewal
        return told

    async def heartbeat(self, wait_seconds: float) -> tuple[str, float]:
        """The API's word (continue, stop, lost), and how long to rest."""
        seconds = wait_seconds + self.answer_seconds
        answer = await self._with_token("/heartbeat", {"wait_seconds": wait_seconds}, seconds=seconds)
        try:
            token, renewal = str(answer["token"]), str(answer["renewal"])
            word, rest_seconds = str(answer["word"]), float(answer["rest_seconds"])
        except (KeyError, TypeError, ValueError):
            # Whoever stands between says so, and the attempt goes on as if nobody had answered.
            raise Unanswered(_NO_API) from None
        self._token, self._renewal = token, renewal
        return word, rest_seconds

    async def ship(self, chunks: list[LogChunk]) -> None:
        told = [
            {"offset": chunk.offset, "end": chunk.end, "content": chunk.content.decode("utf-8", "replace")}
            for chunk in chunks
        ]
        await self._with_token("/logs", {"chunks": told})

    async def finish(self, outcome: Outcome) -> None:
        log = None
        if outcome.log:
            text = outcome.log.decode("utf-8", "replace")
            log = {"offset": outcome.log_offset, "end": outcome.log_end, "content": text}
        told = asdict(outcome)
        names = ("kind", "reason", "result_json", "exit_code", "no_retry", "retry_after_seconds", "start_seconds")
        await self._with_token("/finish", {**{name: told[name] for name in names}, "log": log})

    async def fetch(self, path: str) -> bytes:
        """A file: the attempt's code, or a large result."""
        request = Request(method="GET", path=f"{PREFIX}{path}", token=self._token)
        return (await self._renewed(lambda: self._ask(request, FILE_SECONDS))).body

    async def put(self, path: str, file: Path, size: int) -> None:
        async def send() -> Answer:
            made = _parts_of(file)
            request = Request(
                method="PUT",
                path=f"{PREFIX}{path}",
                token=self._token,
                content=made,
                size=size,
                kind="application/octet-stream",
            )
            return await self._ask(request, FILE_SECONDS)

        await self._renewed(send)

    async def _with_token(self, path: str, body: Mapping[str, object], *, seconds: float | None = None) -> Any:
        return await self._renewed(lambda: self._say(path, body, token=self._token, seconds=seconds))

    async def _renewed(self, ask: Callable[[], Awaitable[T]]) -> T:
        """Once more with a new token where the old one is no longer good: it may have expired while nobody answered."""
        try:
            return await ask()
        except Refused:
            await self.start()
        return await ask()

    async def _say(self, path: str, body: Mapping[str, object], *, token: str, seconds: float | None = None) -> Any:
        request = Request(method="POST", path=f"{PREFIX}{path}", token=token, content=json.dumps(body).encode())
        answer = await self._ask(request, seconds or self.answer_seconds)
        try:
            return json.loads(answer.body)
        except ValueError:
            raise Unanswered(_NO_API) from None

    async def _ask(self, request: Request, seconds: float) -> Answer:
        try:
            answer = await self._address.ask(request, seconds=seconds, most_bytes=MOST_ANSWER_BYTES)
        except OSError as error:
            raise Unanswered(f"the API cannot be reached: {str(error) or type(error).__name__}") from None
        if answer.status < 300:
            return answer
        raise _problem(answer)


def _problem(answer: Answer) -> EvertickError:
    """What an answer other than yes means. Only a document of ours is taken at its word: proxies have their own 4xx."""
    code, detail = "", f"the API answered {answer.status}"
    if 300 <= answer.status < 400:
        # Not followed: the token goes to the address that was named, and to nobody else.
        detail = f"{detail}, it is at {answer.headers.get('location', 'another address')}: give that to agents"
    with suppress(ValueError, KeyError, TypeError):
        told = json.loads(answer.body)
        code, detail = str(told["code"]), str(told["detail"])
    kinds: dict[str, type[EvertickError]] = {
        "conflict": Conflict,
        "lease_lost": LeaseLost,
        "refused": Refused,
        "result_lost": ResultLost,
    }
    if answer.status in (400, 404, 413, 422) and code:
        return EvertickError(detail)
    return kinds.get(code, Unanswered)(detail)


async def _parts_of(file: Path) -> AsyncIterator[bytes]:
    with await asyncio.to_thread(file.open, "rb") as opened:
        while part := await asyncio.to_thread(opened.read, _PART_BYTES):
            yield part


async def keep_asking(
    ask: Callable[[], Awaitable[T]], *, until: asyncio.Event, seconds: float, what: str, log: Log
) -> T:
    """Ask until it is answered, with growing, jittered pauses; Unanswered after so many seconds, or when `until` is set."""
    failures, give_up_at = 0, time.monotonic() + seconds
    while True:
        try:
            answer = await ask()
        except Unanswered as error:
            failures += 1
            if until.is_set() or time.monotonic() >= give_up_at:
                raise
            pause = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(failures, 10)) * (
                0.5 + random.random() / 2
            )
            log.warning("unanswered", what=what, failures=failures, error=error, again_in=round(pause, 1))
            with suppress(TimeoutError):
                await asyncio.wait_for(until.wait(), min(pause, max(0.0, give_up_at - time.monotonic())))
        else:
            if failures:
                log.info("answered", what=what, after_failures=failures)
            return answer
