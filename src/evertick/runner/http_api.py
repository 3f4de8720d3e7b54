"""The runner API as a client: one session's requests, with its tokens. Never repeats a request, except after a renewal.

The session's token lasts minutes, and each heartbeat renews it. Once it has expired, joining again with the same session
renews it, as long as the join token is valid.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evertick.config import Settings
from evertick.db.queries.runners import NewRunner
from evertick.domain.errors import ApiUnreachable, Unauthenticated
from evertick.observability.logging import Log
from evertick.processes.identity import registered_place
from evertick.runtime.http_client import HttpEndpoint, HttpRequest, HttpResponse, problem_of, read_token

PREFIX = "/api/runner/v1"
ANSWER_SECONDS = 30.0
FILE_SECONDS = 600.0
MOST_ANSWER_BYTES = 512 * 1024 * 1024
# Creates the content of a request, which may be sent again.
Content = Callable[[], AsyncIterator[bytes]]
_NO_API = "the server at this address is not an Evertick API of this release"


class RunnerApi:
    """Belongs to one session. The heartbeat's thread shares its token."""

    def __init__(self, settings: Settings, *, server: str, me: NewRunner, log: Log) -> None:
        self._settings, self._server, self._me, self._log = settings, server, me, log
        self._token = ""

    def endpoint(self) -> HttpEndpoint:
        return HttpEndpoint(self._server, ca_file=self._settings.runner_ca_file, reuses_connections=True)

    def warn_if_plain(self, endpoint: HttpEndpoint) -> None:
        if endpoint.is_plain:
            message = "Tokens and secrets are sent unencrypted: use https."
            self._log.warning("http_unencrypted", message=message, server=self._server)

    async def join(self, endpoint: HttpEndpoint) -> dict[str, Any]:
        """Begin the session, or renew its token. Raises Unauthenticated or Forbidden if the join token is refused."""
        me = asdict(self._me)
        names = ("session", "runner_id", "name", "version", "queues", "match", "slots", "request", "lost_after_seconds")
        # Read again each time: the file may have a new token by now.
        token = join_token(self._settings)
        body = {**{name: me[name] for name in names}, "place": registered_place()}
        request = HttpRequest(method="POST", path=f"{PREFIX}/join", token=token, content=json.dumps(body).encode())
        answer = read_document(await self._send(endpoint, request, ANSWER_SECONDS))
        self._token = str(answer["token"])
        return answer

    def renew(self, token: str) -> None:
        self._token = token

    async def ask(
        self, endpoint: HttpEndpoint, path: str, body: Mapping[str, object], *, seconds: float = ANSWER_SECONDS
    ) -> dict[str, Any]:
        """Raises ApiUnreachable without a complete answer: the request may have been carried out."""
        return await self.ask_text(endpoint, path, json.dumps(body), seconds=seconds)

    async def ask_text(
        self, endpoint: HttpEndpoint, path: str, body: str, *, seconds: float = ANSWER_SECONDS
    ) -> dict[str, Any]:
        """`body` is encoded already."""

        def request() -> HttpRequest:
            return HttpRequest(method="POST", path=f"{PREFIX}{path}", token=self._token, content=body.encode())

        return read_document(await self._renewed(endpoint, request, seconds))

    async def read(self, endpoint: HttpEndpoint, path: str) -> dict[str, Any]:
        return read_document(await self.fetch(endpoint, path))

    async def fetch(self, endpoint: HttpEndpoint, path: str) -> HttpResponse:
        def request() -> HttpRequest:
            return HttpRequest(method="GET", path=f"{PREFIX}{path}", token=self._token)

        return await self._renewed(endpoint, request, FILE_SECONDS)

    async def put(self, endpoint: HttpEndpoint, path: str, content: Content, size: int) -> HttpResponse:
        def request() -> HttpRequest:
            kind = "application/octet-stream"
            whole = {"method": "PUT", "path": f"{PREFIX}{path}", "token": self._token}
            return HttpRequest(**whole, content=content(), size=size, kind=kind)

        return await self._renewed(endpoint, request, FILE_SECONDS)

    async def _renewed(
        self, endpoint: HttpEndpoint, request: Callable[[], HttpRequest], seconds: float
    ) -> HttpResponse:
        try:
            return await self._send(endpoint, request(), seconds)
        except Unauthenticated:
            await self.join(endpoint)
        return await self._send(endpoint, request(), seconds)

    async def _send(self, endpoint: HttpEndpoint, request: HttpRequest, seconds: float) -> HttpResponse:
        try:
            answer = await endpoint.ask(request, seconds=seconds, most_bytes=MOST_ANSWER_BYTES)
        except OSError as error:
            raise ApiUnreachable(f"the API cannot be reached: {str(error) or type(error).__name__}") from None
        if answer.status < 300:
            return answer
        raise problem_of(answer)


def read_document(answer: HttpResponse) -> dict[str, Any]:
    try:
        told = json.loads(answer.body)
    except ValueError:
        raise ApiUnreachable(_NO_API) from None
    if not isinstance(told, dict):
        raise ApiUnreachable(_NO_API)
    return told


def join_token(settings: Settings) -> str:
    """Raises InvalidSettings, which never quotes the token."""
    file: Path | None = settings.runner_token_file
    return read_token(
        settings.runner_token,
        file,
        what="the join token",
        needs="a runner with --server needs a join token: name the file that contains it with --token-file. Make one with"
        " `evertick runners token create`.",
    )
