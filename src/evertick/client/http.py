"""Operations called on a server, for the command line and for programs that wait for each answer.

Follows no redirect and uses no proxy: the token goes to the address that was given and nowhere else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import httpx2

from evertick.client.connect import Client
from evertick.client.wire import EventReader, Operation, Server, result_of
from evertick.operations.paging import MOST_ITEMS


class HttpClient(Client):
    where = "server"
    items_per_page = MOST_ITEMS
    pause_seconds = 1.0

    def __init__(self, address: str, token: str | None) -> None:
        self._server = Server(address=address, token=token)
        self._http = httpx2.Client(**self._server.options)

    @property
    def address(self) -> str:
        return self._server.address

    @property
    def now(self) -> datetime:
        """As of the server's last answer."""
        return self._server.now

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, body: object = None) -> Any:
        """For a path that is no operation, as signing in."""
        content = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"}
        answer = self._send(self._server.request(method, path, content=content, headers=headers))
        return answer.json() if answer.content else None

    def _call(self, operation: Operation, params: Mapping[str, Any]) -> Any:
        return result_of(operation, self._send(self._server.request_of(operation, params)))

    def _stream(self, operation: Operation, params: Mapping[str, Any]) -> Iterator[Any]:
        reader = EventReader(operation)
        answer = self._send(self._server.request_of(operation, params, follows=True), is_streamed=True)
        try:
            for line in answer.iter_lines():
                if (event := reader.feed(line)) is not None:
                    yield event
        except httpx2.HTTPError as error:
            raise self._server.failure("GET", error) from None
        finally:
            answer.close()

    def _send(self, request: dict[str, Any], *, is_streamed: bool = False) -> httpx2.Response:
        try:
            answer = self._http.send(self._http.build_request(**request), stream=is_streamed)
            if answer.status_code >= 300:
                answer.read()
        except httpx2.HTTPError as error:
            raise self._server.failure(request["method"], error) from None
        self._server.check(request, answer)
        return answer
