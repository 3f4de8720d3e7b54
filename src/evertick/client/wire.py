"""Calls of operations as HTTP requests, and answers as records or errors: encoded by the same table that the API is made from.

Sends nothing itself: one implementation for the clients that wait and those that await.
"""

from __future__ import annotations

import inspect
import json
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from importlib.metadata import version
from typing import Any, get_args, get_origin
from urllib.parse import quote

import httpx2
from pydantic import TypeAdapter, ValidationError

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
from evertick.operations.paging import Tagged
from evertick.operations.routes import HEADERS, Route, route_of

PREFIX = "/api/v1"
TIMEOUT_SECONDS, DEPLOY_TIMEOUT_SECONDS = 75.0, 600.0
Operation = Callable[..., Awaitable[Any]]
_MOST_PROBLEM_BYTES = 100_000
# The errors that a server reports by their code and that take nothing but a message.
_ERRORS = {
    kind.code: kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, EvertickError) and kind.__init__ is Exception.__init__
}


@dataclass(slots=True, kw_only=True)
class Server:
    """A server, the token for it, and its time as of the last answer."""

    address: str
    token: str | None = field(default=None, repr=False)
    now: datetime = field(default_factory=lambda: datetime.now(UTC))

    @property
    def options(self) -> dict[str, Any]:
        """Of an HTTP client. It uses no proxy: the token goes to the address that was given and nowhere else."""
        headers = {"Accept": "application/json", "User-Agent": f"evertick/{version('evertick')}"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        tls = ssl.create_default_context() if self.address.startswith("https:") else False
        return {"headers": headers, "timeout": TIMEOUT_SECONDS, "trust_env": False, "verify": tls}

    def request_of(self, operation: Operation, params: Mapping[str, Any], *, follows: bool = False) -> dict[str, Any]:
        """The request of a call, as an HTTP client takes it."""
        route = route_of(operation, params)
        path, query, headers, content = encoded(route, params)
        if follows:
            query["follow"] = True
        return self.request(route.method, PREFIX + path, params=query, headers=headers, content=content)

    def request(self, method: str, path: str, **parts: Any) -> dict[str, Any]:
        # A deployment is answered when all of its files are loaded.
        timeout = DEPLOY_TIMEOUT_SECONDS if path.startswith(f"{PREFIX}/deployments/") else TIMEOUT_SECONDS
        return {"method": method, "url": self.address + path, "timeout": timeout, **parts}

    def check(self, request: Mapping[str, Any], answer: httpx2.Response) -> None:
        """Raises the error that an answer reports. Its content was read."""
        if told := answer.headers.get("Date"):
            self.now = parsedate_to_datetime(told)
        if answer.status_code >= 300:
            raise self._problem(request["method"], request["url"].removeprefix(self.address), answer)

    def failure(self, method: str, error: httpx2.HTTPError) -> PostgresUnavailable:
        """The error of a request without an answer."""
        why = _why(error)
        if isinstance(error, httpx2.ConnectError | httpx2.ConnectTimeout):
            return PostgresUnavailable(f"The server at {self.address} cannot be reached: {why}.")
        if method == "GET":
            return PostgresUnavailable(f"The server at {self.address} gave up: {why}. Try again.")
        return OutcomeUnknown(
            f"The answer of the server at {self.address} was lost ({why}), so it is not known whether this was"
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
        if code == Unauthenticated.code and self.token:
            detail = f"{detail} Use: evertick login {self.address}"
        unknown = PostgresUnavailable if answer.status_code == 503 else EvertickError
        return _ERRORS.get(code, unknown)(detail)


def result_of(operation: Operation, answer: httpx2.Response) -> Any:
    kind = _returned(operation)
    if kind is None:
        return None
    is_tagged = get_origin(kind) is Tagged
    try:
        record = _adapter(get_args(kind)[0] if is_tagged else kind).validate_json(answer.content)
    except ValidationError as error:
        raise _other_version(_what_differs(error)) from None
    return Tagged(record=record, etag=answer.headers.get("ETag", "")) if is_tagged else record


@cache
def _returned(operation: Operation) -> Any:
    return inspect.signature(operation, eval_str=True).return_annotation


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


class EventReader:
    """The events of a stream, line by line. The data of an event is one line of JSON in ASCII."""

    def __init__(self, operation: Operation) -> None:
        # AsyncGenerator[First | Second, None]
        union = get_args(_returned(operation))[0]
        self._kinds = {kind.event: _adapter(kind) for kind in get_args(union)}
        self._fields: dict[str, str] = {}

    def feed(self, line: str) -> Any:
        """The event that this line ends; None if it ends none, or one of a newer server that is unknown here."""
        if line:
            name, _, text = line.partition(": ")
            self._fields[name] = text
            return None
        fields, self._fields = self._fields, {}
        if fields.get("event") not in self._kinds:
            return None
        try:
            return self._kinds[fields["event"]].validate_python({**json.loads(fields["data"]), "id": fields["id"]})
        except ValidationError as error:
            raise _other_version(_what_differs(error)) from None


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
