"""Operations called on a server: encoded by the same table that its API is made from.

Follows no redirect and uses no proxy: the token goes to the address that was given and nowhere else.
"""

from __future__ import annotations

import inspect
import json
import ssl
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from typing import Any, get_args, get_origin
from urllib.parse import quote

import httpx2
from pydantic import TypeAdapter, ValidationError

from evertick.client.connect import Client
from evertick.domain import errors
from evertick.domain.errors import (
    BrokenFiles,
    EvertickError,
    OutcomeUnknown,
    PostgresUnavailable,
    RateLimited,
    Unauthenticated,
    UserError,
)
from evertick.operations.paging import MOST_ITEMS, Tagged
from evertick.operations.routes import HEADERS, Route, route_of

PREFIX = "/api/v1"
TIMEOUT_SECONDS, DEPLOY_TIMEOUT_SECONDS = 75.0, 600.0
_MOST_PROBLEM_BYTES = 100_000
# The errors that a server reports by their code and that take nothing but a message.
_ERRORS = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EvertickError) and kind.__init__ is Exception.__init__
}


class HttpClient(Client):
    where = "server"
    items_per_page = MOST_ITEMS
    pause_seconds = 1.0

    def __init__(self, address: str, token: str | None) -> None:
        self.address, self._token = address, token
        self._now = datetime.now(UTC)
        headers = {"Accept": "application/json", "User-Agent": f"evertick/{version('evertick')}"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self._http = httpx2.Client(
            headers=headers,
            timeout=TIMEOUT_SECONDS,
            trust_env=False,
            verify=ssl.create_default_context() if address.startswith("https:") else False,
        )

    @property
    def now(self) -> datetime:
        """As of the server's last answer."""
        return self._now

    def close(self) -> None:
        self._http.close()

    def request(self, method: str, path: str, body: object = None) -> Any:
        """For a path that is no operation, as signing in."""
        content = None if body is None else json.dumps(body).encode()
        answer = self._send(method, path, content=content, headers={"Content-Type": "application/json"})
        return answer.json() if answer.content else None

    def _call(self, operation: Callable[..., Awaitable[Any]], params: Mapping[str, Any]) -> Any:
        route = route_of(operation, params)
        path, query, headers, content = encoded(route, params)
        answer = self._send(route.method, PREFIX + path, params=query, headers=headers, content=content)
        kind = inspect.signature(operation, eval_str=True).return_annotation
        if kind is None:
            return None
        is_tagged = get_origin(kind) is Tagged
        try:
            record = TypeAdapter(get_args(kind)[0] if is_tagged else kind).validate_json(answer.content)
        except ValidationError as error:
            raise _other_version(_what_differs(error)) from None
        return Tagged(record=record, etag=answer.headers.get("ETag", "")) if is_tagged else record

    def _stream(self, operation: Callable[..., Awaitable[Any]], params: Mapping[str, Any]) -> Iterator[Any]:
        route = route_of(operation, params)
        path, query, headers, _ = encoded(route, params)
        # AsyncGenerator[First | Second, None]
        union = get_args(inspect.signature(operation, eval_str=True).return_annotation)[0]
        kinds = {kind.event: TypeAdapter(kind) for kind in get_args(union)}
        query["follow"] = True
        answer = self._send(route.method, PREFIX + path, params=query, headers=headers, is_streamed=True)
        try:
            for id, name, data in read_events(answer.iter_lines()):
                # A newer server may send other events, too.
                if name in kinds:
                    yield kinds[name].validate_python({**data, "id": id})
        except httpx2.HTTPError as error:
            raise self._lost("GET", error) from None
        except ValidationError as error:
            raise _other_version(_what_differs(error)) from None
        finally:
            answer.close()

    def _send(self, method: str, path: str, *, is_streamed: bool = False, **parts: Any) -> httpx2.Response:
        # A deployment is answered when all of its files are loaded.
        timeout = DEPLOY_TIMEOUT_SECONDS if path.startswith(f"{PREFIX}/deployments/") else TIMEOUT_SECONDS
        request = self._http.build_request(method, self.address + path, timeout=timeout, **parts)
        try:
            answer = self._http.send(request, stream=is_streamed)
            if answer.status_code >= 300:
                answer.read()
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise PostgresUnavailable(f"The server at {self.address} cannot be reached: {_why(error)}.") from None
        except httpx2.HTTPError as error:
            raise self._lost(method, error) from None
        if told := answer.headers.get("Date"):
            self._now = parsedate_to_datetime(told)
        if answer.status_code >= 300:
            raise self._problem(method, path, answer)
        return answer

    def _lost(self, method: str, error: Exception) -> PostgresUnavailable:
        if method == "GET":
            return PostgresUnavailable(f"The server at {self.address} gave up: {_why(error)}. Try again.")
        return OutcomeUnknown(
            f"The answer of the server at {self.address} was lost ({_why(error)}), so it is not known whether this was"
            " done. Check before you repeat it."
        )

    def _problem(self, method: str, path: str, answer: httpx2.Response) -> EvertickError:
        try:
            document = json.loads(answer.content[:_MOST_PROBLEM_BYTES])
            code, detail = str(document["code"]), str(document["detail"])
        except (ValueError, KeyError, TypeError):
            where = f" to {answer.headers.get('Location')}" if answer.status_code < 400 else ""
            return PostgresUnavailable(
                f"{self.address} answered {answer.status_code} {answer.reason_phrase}{where}: it is not an Evertick"
                " server."
            )
        # Our own "not found" is a sentence; this is the framework's text for an unknown path.
        if (answer.status_code, detail) in ((404, "Not Found"), (405, "Method Not Allowed")):
            return _other_version(f"The server at {self.address} does not know {method} {path}")
        if code == BrokenFiles.code:
            return BrokenFiles(detail, verdicts=document.get("files") or ())
        if code == RateLimited.code:
            return RateLimited(detail, retry_after_seconds=float(answer.headers.get("Retry-After") or 1))
        if code == Unauthenticated.code and self._token:
            detail = f"{detail} Use: evertick login {self.address}"
        unknown = PostgresUnavailable if answer.status_code == 503 else EvertickError
        return _ERRORS.get(code, unknown)(detail)


def encoded(route: Route, params: Mapping[str, Any]) -> tuple[str, dict[str, Any], dict[str, str], bytes | None]:
    """Path, query, headers and body of a call. None values are left out."""
    left = {name: value for name, value in params.items() if value is not None and name not in route.fixed}
    body, content = left.pop("body", None), left.pop("content", None)
    in_path = {name: quote(str(value), safe="") for name, value in left.items() if f"{{{name}}}" in route.path}
    headers = {name.replace("_", "-"): str(left[name]) for name in HEADERS & left.keys()}
    for name, text in headers.items():
        if not (text.isascii() and text.isprintable()):
            raise UserError(f"{name} {text!r} cannot be sent to a server: only printable ASCII characters are allowed.")
    query = {name: value for name, value in left.items() if name not in in_path and name not in HEADERS}
    if body is not None:
        content = TypeAdapter(type(body)).dump_json(body, exclude_none=True)
        headers["Content-Type"] = "application/json"
    elif content is not None:
        headers["Content-Type"] = "application/octet-stream"
    return route.path.format(**in_path), query, headers, content


def read_events(lines: Iterable[str]) -> Iterator[tuple[str, str, Any]]:
    """The id, the name and the data of each server-sent event. The data of an event is one line of JSON in ASCII."""
    fields: dict[str, str] = {}
    for line in lines:
        name, _, text = line.partition(": ")
        if line:
            fields[name] = text
            continue
        if "event" in fields:
            yield fields["id"], fields["event"], json.loads(fields["data"])
        fields = {}


def _what_differs(error: ValidationError) -> str:
    first = error.errors(include_input=False, include_context=False, include_url=False)[0]
    name = ".".join(map(str, first["loc"]))
    return (
        f"The server's answer has no {name!r}"
        if first["type"] == "missing"
        else f"The server's answer has another {name!r}"
    )


def _other_version(what: str) -> EvertickError:
    return PostgresUnavailable(
        f"{what}: it runs another version than this evertick {version('evertick')}. Upgrade the older one."
    )


def _why(error: Exception) -> str:
    """The reason of the operating system, if there is one."""
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, OSError) and each.strerror:
            return each.strerror
        each = each.__cause__ or each.__context__
    return str(error) or type(error).__name__
