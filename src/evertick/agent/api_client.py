"""The agent's client of the API: each request has its own connection, a deadline and a size limit, and can be canceled.

Follows no redirects: the token is sent only to the configured address.
"""

from __future__ import annotations

import asyncio
import json
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

from evertick.domain.agent_protocol import AgentOrder, read_order
from evertick.domain.attempt import Outcome
from evertick.domain.errors import ApiUnreachable, Unauthenticated
from evertick.logs.spool import LogChunk
from evertick.observability.logging import Log
from evertick.processes.identity import registered_place
from evertick.runtime.http_client import HttpEndpoint, HttpRequest, HttpResponse, parts_of, problem_of

PREFIX = "/api/agent/v1"


ANSWER_SECONDS = 30.0


FILE_SECONDS = 600.0


MOST_ANSWER_BYTES = 512 * 1024 * 1024


LONGEST_PAUSE_SECONDS = 15.0


FIRST_PAUSE_SECONDS = 0.2


# The fields of an outcome that a report has.
_REPORTED = ("kind", "reason", "result_json", "exit_code", "no_retry", "retry_after_seconds", "start_seconds", "usage")


_NO_API = "the server at this address is not an Evertick API of this release"


T = TypeVar("T")


class AgentClient:
    """The API client of one attempt. `token` and `renewal` are the values from the latest response."""

    def __init__(self, server: str, start_token: str, *, log: Log) -> None:
        self._address = HttpEndpoint(server)
        if self._address.is_plain:
            log.warning(
                "http_unencrypted", message="Tokens and secrets are sent unencrypted: use https.", server=server
            )
        self._renewal, self._token, self._log = start_token, "", log
        self._nonce = secrets.token_hex(16)
        # Timeout of one response; shorter when heartbeats are frequent.
        self.answer_seconds = ANSWER_SECONDS

    async def start(self) -> AgentOrder:
        """Acknowledge the start. Raises Conflict or LeaseLost if the attempt must not run, Refused if the token is
        invalid, or Unanswered."""
        body = {"nonce": self._nonce, "version": version("evertick"), "place": registered_place()}
        try:
            told = read_order(await self._say("/start", body, token=self._renewal))
        except (KeyError, TypeError, ValueError):
            raise ApiUnreachable(_NO_API) from None
        self._token, self._renewal = told.token, told.renewal
        return told

    async def heartbeat(self, wait_seconds: float) -> tuple[str, float]:
        """The API's answer (continue, stop, lost), and how long to wait before the next heartbeat."""
        seconds = wait_seconds + self.answer_seconds
        answer = await self._with_token("/heartbeat", {"wait_seconds": wait_seconds}, seconds=seconds)
        try:
            token, renewal = str(answer["token"]), str(answer["renewal"])
            word, rest_seconds = str(answer["word"]), float(answer["rest_seconds"])
        except (KeyError, TypeError, ValueError):
            # A proxy answered instead of the API. The attempt continues as if there were no answer.
            raise ApiUnreachable(_NO_API) from None
        if token:  # an attempt that has ended gets no new one
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
        await self._with_token("/finish", {**{name: told[name] for name in _REPORTED}, "log": log})

    async def fetch(self, path: str) -> bytes:
        """Download a file: the attempt's code, or a large result."""
        request = HttpRequest(method="GET", path=f"{PREFIX}{path}", token=self._token)
        return (await self._renewed(lambda: self._ask(request, FILE_SECONDS))).body

    async def put(self, path: str, file: Path, size: int) -> None:
        async def send() -> HttpResponse:
            made = parts_of(file)
            request = HttpRequest(
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
        """Repeat the request once with a new token if the old one is no longer valid: it may have expired while the API
        was unreachable."""
        try:
            return await ask()
        except Unauthenticated:
            await self.start()
        return await ask()

    async def _say(self, path: str, body: Mapping[str, object], *, token: str, seconds: float | None = None) -> Any:
        request = HttpRequest(method="POST", path=f"{PREFIX}{path}", token=token, content=json.dumps(body).encode())
        answer = await self._ask(request, seconds or self.answer_seconds)
        try:
            return json.loads(answer.body)
        except ValueError:
            raise ApiUnreachable(_NO_API) from None

    async def _ask(self, request: HttpRequest, seconds: float) -> HttpResponse:
        try:
            answer = await self._address.ask(request, seconds=seconds, most_bytes=MOST_ANSWER_BYTES)
        except OSError as error:
            raise ApiUnreachable(f"the API cannot be reached: {str(error) or type(error).__name__}") from None
        if answer.status < 300:
            return answer
        raise problem_of(answer)


async def keep_asking(
    ask: Callable[[], Awaitable[T]], *, until: asyncio.Event, seconds: float, what: str, log: Log
) -> T:
    """Repeat until answered, with growing, jittered pauses. Raises Unanswered after `seconds`, or when `until` is set."""
    failures, give_up_at = 0, time.monotonic() + seconds
    while True:
        try:
            answer = await ask()
        except ApiUnreachable as error:
            failures += 1
            if until.is_set() or time.monotonic() >= give_up_at:
                raise
            longest = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** min(failures, 10))
            pause = longest * random.uniform(0.5, 1.0)
            log.warning("api_unreachable", what=what, failures=failures, error=error, again_in=round(pause, 1))
            with suppress(TimeoutError):
                async with asyncio.timeout(min(pause, max(0.0, give_up_at - time.monotonic()))):
                    await until.wait()
        else:
            if failures:
                log.info("api_recovered", what=what, after_failures=failures)
            return answer
