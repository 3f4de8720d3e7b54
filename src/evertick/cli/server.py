"""A server's HTTP API as commands use it: JSON in and out, pages put together, problems as the errors that they are.

Follows no redirect: the token goes to the address that was named, and to nobody else.
"""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Any
from urllib.parse import urlencode, urlsplit

from evertick.domain import errors
from evertick.domain.errors import EvertickError, OutcomeUnknown, PostgresUnavailable, RateLimited

LONGEST_SECONDS = 75.0
ASK_AGAIN_SECONDS = (0.5, 1.0, 2.0, 4.0)
_MOST_PER_PAGE = 200
_KINDS = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EvertickError) and kind.__init__ is Exception.__init__
}


class Server:
    """One server with one caller. `now` is its time, as far as its last answer told."""

    def __init__(self, address: str, token: str | None) -> None:
        self.address, self._token = address, token
        self.now = datetime.now(UTC)

    def get(self, path: str, **query: object) -> Any:
        return self._ask("GET", path, query, None, {})

    def pages(self, path: str, *, limit: int, **query: object) -> list[Any]:
        """Up to so many items, from as many pages as that takes."""
        found: list[Any] = []
        cursor = None
        while len(found) < limit:
            page = self.get(path, limit=min(limit - len(found), _MOST_PER_PAGE), cursor=cursor, **query)
            found += page["items"]
            cursor = page["next_cursor"]
            if cursor is None:
                break
        return found[:limit]

    def post(self, path: str, body: object = None, **headers: str) -> Any:
        return self._ask("POST", path, {}, body, headers)

    def patch(self, path: str, body: object) -> Any:
        return self._ask("PATCH", path, {}, body, {})

    def put(self, path: str, body: object, **headers: str) -> Any:
        return self._ask("PUT", path, {}, body, headers)

    def delete(self, path: str, **headers: str) -> Any:
        return self._ask("DELETE", path, {}, None, headers)

    def events(self, path: str, **query: object) -> Iterator[tuple[str, Any]]:
        """Server-sent events, as (name, data), until `end` comes. A line that breaks is taken up after the last one."""
        after: str | None = None
        for pause_seconds in (*ASK_AGAIN_SECONDS, None):
            try:
                with _closing(self._send("GET", path, {**query, "after": after}, None, {})) as answer:
                    for id_now, name, found in _read_events(answer):
                        after = id_now
                        yield name, found
                        if name == "end":
                            return
            except (OSError, http.client.HTTPException) as error:
                if pause_seconds is None:
                    raise self._lost("GET", {}, error) from None
            if pause_seconds is not None:
                time.sleep(pause_seconds)

    def _ask(
        self, method: str, path: str, query: Mapping[str, object], body: object, headers: Mapping[str, str]
    ) -> Any:
        with _closing(self._send(method, path, query, body, headers)) as answer:
            try:
                text = answer.read()
            except (OSError, http.client.HTTPException) as error:
                raise self._lost(method, headers, error) from None
        return json.loads(text, object_hook=Document) if text else None

    def _send(
        self, method: str, path: str, query: Mapping[str, object], body: object, headers: Mapping[str, str]
    ) -> http.client.HTTPResponse:
        parts = urlsplit(self.address)
        given = urlencode([(name, _text(value)) for name, value in query.items() if value is not None])
        sent = {"Accept": "application/json", "User-Agent": f"evertick/{version('evertick')}", **headers}
        if self._token:
            sent["Authorization"] = f"Bearer {self._token}"
        content = None if body is None else json.dumps(body).encode()
        if content is not None:
            sent["Content-Type"] = "application/json"
        connection = _connect(parts.scheme, parts.netloc)
        try:
            connection.connect()
        except (OSError, http.client.HTTPException) as error:
            raise PostgresUnavailable(f"The server at {self.address} cannot be reached: {_why(error)}.") from None
        try:
            connection.request(method, f"{parts.path}{path}" + (f"?{given}" if given else ""), content, sent)
            answer = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise self._lost(method, headers, error) from None
        if told := answer.getheader("Date"):
            self.now = parsedate_to_datetime(told)
        if answer.status >= 300:
            with _closing(answer):
                raise self._problem(method, path, answer)
        return answer

    def _lost(self, method: str, headers: Mapping[str, str], error: Exception) -> PostgresUnavailable:
        if method == "GET":
            return PostgresUnavailable(f"The server at {self.address} gave up: {_why(error)}. Try again.")
        return OutcomeUnknown(
            f"The answer of the server at {self.address} was lost ({_why(error)}), so it is not known whether this was"
            " done. Look before you repeat it."
        )

    def _problem(self, method: str, path: str, answer: http.client.HTTPResponse) -> EvertickError:
        try:
            document = json.loads(answer.read(100_000))
            code, detail = str(document["code"]), str(document["detail"])
        except (ValueError, KeyError, TypeError, OSError, http.client.HTTPException):
            where = f" to {answer.getheader('Location')}" if answer.status < 400 else ""
            return PostgresUnavailable(
                f"{self.address} answered {answer.status} {answer.reason}{where}: that is no Evertick server."
            )
        # What we do not find is told in a sentence; this is the framework's word for a place that it does not know.
        if (answer.status, detail) in ((404, "Not Found"), (405, "Method Not Allowed")):
            return other_version(f"The server at {self.address} does not know {method} {path}")
        if code == RateLimited.code:
            return RateLimited(detail, retry_after_seconds=float(answer.getheader("Retry-After") or 1))
        if code == errors.Unauthenticated.code and self._token:
            detail = f"{detail} Use: evertick login {self.address}"
        return _KINDS.get(code, EvertickError)(detail)


class Document(dict[str, Any]):
    """What a server says. What this program expects and does not find there, it says in words."""

    def __missing__(self, key: str) -> Any:
        raise other_version(f"The server's answer has no {key!r}")


def other_version(what: str) -> EvertickError:
    """The server is older, or newer, than this program."""
    return PostgresUnavailable(
        f"{what}: it is of another version than this evertick {version('evertick')}. Bring the older one up to date."
    )


def _read_events(answer: http.client.HTTPResponse) -> Iterator[tuple[str, str, Any]]:
    fields: dict[str, str] = {}
    for raw in answer:
        line = raw.decode("utf-8", "replace").rstrip("\n")
        name, _, text = line.partition(": ")
        if line:
            fields[name] = text
            continue
        if "event" in fields:
            yield fields["id"], fields["event"], json.loads(fields["data"], object_hook=Document)
        fields = {}


def _connect(scheme: str, place: str) -> http.client.HTTPConnection:
    if scheme == "https":
        return http.client.HTTPSConnection(place, timeout=LONGEST_SECONDS, context=ssl.create_default_context())
    return http.client.HTTPConnection(place, timeout=LONGEST_SECONDS)


class _closing:
    """The answer, and its connection with it."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self._answer = answer

    def __enter__(self) -> http.client.HTTPResponse:
        return self._answer

    def __exit__(self, *_: object) -> None:
        self._answer.close()


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _why(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
