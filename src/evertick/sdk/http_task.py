"""Sends the one request of an HTTP task and turns the response into the task's result. Uses only the standard library.

The URL may be any that the runner can reach, private addresses included: tasks are trusted with their runner's network.
"""

from __future__ import annotations

import email.utils
import http.client
import json
import ssl
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import HTTPRedirectHandler, HTTPSHandler, Request, build_opener

from evertick.sdk.runtime import Fail, HttpCall, RetryAfter
from evertick.sdk.templates import render_json, render_text, render_url

_SHOWN_BYTES = 500
_LONGEST_WAIT_SECONDS = 86_400.0
_TRANSIENT = frozenset({408, 425, 429, *range(500, 600)})


class _SameScheme(HTTPRedirectHandler):
    """Follows redirects only to http and https, and passes no password to another host."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        made = super().redirect_request(req, fp, code, msg, headers, newurl)
        if made is not None and made.host != req.host:
            for name in ("Authorization", "Cookie"):
                made.remove_header(name)
        return made


def send(call: HttpCall, names: Mapping[str, object] | None) -> object:
    """`names` are the values for templates; None if there are none. Raises RetryAfter, Fail, or the network's error."""
    request = _request(call, names)
    opener = build_opener(_SameScheme, HTTPSHandler(context=ssl.create_default_context()))
    deadline = time.monotonic() + call.timeout_seconds
    try:
        with opener.open(request, timeout=call.timeout_seconds) as answer:
            return _result(call, answer.status, answer.headers, _read(call, answer, deadline))
    except HTTPError as error:
        with error:
            return _result(call, error.code, error.headers, _read(call, error, deadline))
    except URLError as error:
        reason = error.reason
        raise ConnectionError(f"{call.method} {request.host}: {reason}") from None
    except http.client.HTTPException as error:
        raise ConnectionError(f"{call.method} {request.host}: {type(error).__name__}: {error}") from None


def raw_fields(call: HttpCall) -> dict[str, Any]:
    return {"url": call.url, "headers": dict(call.headers), "json": call.json, "body": call.body}


def rendered_fields(call: HttpCall, names: Mapping[str, object]) -> dict[str, Any]:
    return {
        "url": render_url(call.url, names),
        "headers": {key: render_text(value, names) for key, value in call.headers.items()},
        "json": render_json(call.json, names),
        "body": None if call.body is None else render_text(call.body, names),
    }


def _request(call: HttpCall, names: Mapping[str, object] | None) -> Request:
    fields = raw_fields(call) if names is None else rendered_fields(call, names)
    url, headers, payload, body = fields["url"], fields["headers"], fields["json"], fields["body"]
    if wrong := [key for key, value in headers.items() if "\n" in value or "\r" in value]:
        raise Fail(f"the header {wrong[0]} has a line break in its value")
    if not url.startswith(("http://", "https://")):
        raise Fail("the URL does not begin with http:// or https://")
    sent = {key.lower() for key in headers}
    if payload is not None:
        body = json.dumps(payload, default=str)
        if "content-type" not in sent:
            headers["Content-Type"] = "application/json"
    if "user-agent" not in sent:
        headers["User-Agent"] = "evertick"
    try:
        return Request(url, data=None if body is None else body.encode(), headers=headers, method=call.method)
    except ValueError as error:
        raise Fail(f"the URL cannot be used: {error}") from None


def _read(call: HttpCall, answer: Any, deadline: float) -> bytes:
    """The timeout applies to the whole response, not to each read."""
    parts: list[bytes] = []
    size = 0
    while part := answer.read1(64 * 1024) if hasattr(answer, "read1") else answer.read(64 * 1024):
        parts.append(part)
        size += len(part)
        if size > call.max_bytes:
            raise Fail(f"the response has more than {call.max_bytes:,} bytes; fetch it in a Python task and store it")
        if time.monotonic() > deadline:
            raise TimeoutError(f"the response did not arrive within {call.timeout_seconds:g} s")
    return b"".join(parts)


def _result(call: HttpCall, status: int, headers: Any, body: bytes) -> object:
    is_expected = status in call.expect if call.expect else 200 <= status < 300
    text = body.decode(headers.get_content_charset() or "utf-8", "replace")
    if not is_expected:
        message = f"HTTP {status}: {text[:_SHOWN_BYTES].strip()}".rstrip(": ")
        if status not in _TRANSIENT:
            raise Fail(message)
        wait = _retry_after(headers.get("Retry-After"))
        raise RetryAfter(wait, message) if wait is not None else ConnectionError(message)
    parsed = _body(call, headers, text)
    if call.response == "full":
        return {"status": status, "headers": {key.lower(): value for key, value in headers.items()}, "body": parsed}
    return parsed


def _body(call: HttpCall, headers: Any, text: str) -> object:
    kind = headers.get_content_type() if headers.get("Content-Type") else ""
    is_json = kind == "application/json" or kind.endswith("+json")
    if call.response == "none" or not text:
        return None
    if call.response == "json" or (is_json and call.response != "text"):
        try:
            return json.loads(text)
        except ValueError as error:
            raise Fail(f"the response is not JSON: {error}") from None
    return text


def _retry_after(value: str | None) -> float | None:
    """The delay from seconds or a date; None if it is neither."""
    if value is None:
        return None
    if value.strip().isdigit():
        return min(float(value), _LONGEST_WAIT_SECONDS)
    try:
        at = email.utils.parsedate_to_datetime(value)
    except (TypeError, ValueError):
        return None
    if at.tzinfo is None:
        at = at.replace(tzinfo=UTC)
    return min(max(0.0, (at - datetime.now(UTC)).total_seconds()), _LONGEST_WAIT_SECONDS)
