"""The frame of every page: stylesheets and scripts, navigation, words for states and times, and the answer to a form.

Assets are read once and served from memory. Their URL contains one hash of all of them, so browsers can cache them
without expiry: a new release has a new URL.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from starlette.exceptions import HTTPException

from evertick.api.app import log_fault
from evertick.api.auth import SAFE_METHODS, GuardedRoute
from evertick.api.context import ApiCaller
from evertick.api.problems import headers_of, status_of
from evertick.domain.access import Permission, Principal
from evertick.domain.durations import length
from evertick.domain.errors import EvertickError, Unauthenticated, UserError
from evertick.domain.schedules.cron_text import cron_in_words
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, describe
from evertick.engine.fire_schedules import UNPLANNABLE, read_spec
from evertick.operations.caller import NOBODY

_FOLDER = Path(__file__).parent / "static"


_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    content: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class Assets:
    """`files` maps each name below the folder to its content."""

    hash: str
    files: dict[str, Asset]

    def url(self, name: str) -> str:
        if name not in self.files:
            raise KeyError(f"unknown static file {name}")
        return f"/static/{self.hash}/{name}"


def read_assets(folder: Path = _FOLDER) -> Assets:
    """Read the files whose type is in the table. Other types are never served."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _TYPES)
    files = {
        path.relative_to(folder).as_posix(): Asset(path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8")
        for path in paths
    }
    digest = hashlib.sha256()
    for name, asset in files.items():
        digest.update(name.encode() + b"\0" + asset.content + b"\0")
    return Assets(hash=digest.hexdigest()[:16], files=files)


@dataclass(frozen=True, slots=True)
class Entry:
    """`shortcut` is the letter typed after `g`. `icon` names an icon of templates/_icons.html."""

    key: str
    label: str
    path: str
    permission: Permission
    icon: str
    shortcut: str | None = None
    section: str = ""


ENTRIES = (
    Entry("home", "Home", "/", Permission.READ_DAGS, "home", "h"),
    Entry("dags", "DAGs", "/dags", Permission.READ_DAGS, "dags", "d"),
    Entry("runs", "Runs", "/runs", Permission.READ_RUNS, "runs", "r"),
    Entry("approvals", "Approvals", "/approvals", Permission.READ_RUNS, "ok", "y"),
    Entry("backfills", "Backfills", "/backfills", Permission.READ_BACKFILLS, "backfills", "b"),
    Entry("assets", "Assets", "/assets", Permission.READ_GATES, "assets", "e"),
    Entry("pools", "Pools", "/pools", Permission.READ_GATES, "pools", "p", "Capacity"),
    Entry("keys", "Keys", "/keys", Permission.READ_GATES, "keys", "k", "Capacity"),
    Entry("queues", "Queues", "/queues", Permission.READ_RUNNERS, "queues", "q", "Capacity"),
    Entry("runners", "Runners", "/runners", Permission.READ_RUNNERS, "runners", "w", "Capacity"),
    Entry("schedulers", "Schedulers", "/schedulers", Permission.READ_METRICS, "clock", "l", "Capacity"),
    Entry("variables", "Variables", "/variables", Permission.READ_VALUES, "variables", "v", "Values"),
    Entry("connections", "Connections", "/connections", Permission.READ_VALUES, "connections", "c", "Values"),
    Entry("secrets", "Secrets", "/secrets", Permission.READ_VALUES, "secrets", "s", "Values"),
    Entry("users", "Users", "/users", Permission.MANAGE_USERS, "users", "u", "Access"),
    Entry("tokens", "Tokens", "/tokens", Permission.OWN, "tokens", "t", "Access"),
    Entry("audit", "Audit", "/audit", Permission.READ_AUDIT, "audit", "a", "Access"),
)


def entries_for(principal: Principal) -> Iterator[Entry]:
    return (each for each in ENTRIES if principal.may(each.permission))


# A short explanation of each state.
STATE_WORDS = {
    "waiting": "waits for upstream tasks",
    "pending": "waits for a free slot or for its start time",
    "available": "ready, waits for a runner",
    "queued": "about to start",
    "running": "is running",
    "deferred": "waits for an external event, without using a slot",
    "success": "succeeded",
    "failed": "failed",
    "skipped": "was skipped",
    "canceled": "was canceled",
    "upstream_failed": "did not start because an upstream task failed",
    "paused": "starts no new runs until it is unpaused",
}


# What a schedule does about missed fires, and when a run is still open.
MISFIRE_WORDS = {
    "skip": "skip missed fires",
    "latest": "run the latest missed fire",
    "all": "run all missed fires",
}


OVERLAP_WORDS = {
    "allow": "start another run",
    "skip": "skip the new run",
    "queue_one": "queue one run",
    "queue_all": "queue all runs",
    "cancel": "cancel the open run first",
}


_LONGEST_VALUE = 32


def instant(at: datetime) -> str:
    """The exact timestamp in UTC."""
    return f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC"


def json_text(value: object) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False, default=str)


def detail_words(detail: Mapping[str, object]) -> str:
    """The details of an audit entry in one line, without empty and false values."""
    told = []
    for key, value in detail.items():
        name = key.replace("_", " ")
        if value is True:
            told.append(name)
        elif value not in (None, False, "", [], {}):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            longest = 12 if key == "hash" else _LONGEST_VALUE
            told.append(f"{name} {text[:longest]}{'…' if len(text) > longest else ''}")
    return "; ".join(told)


def schedule_words(raw: dict[str, object]) -> str:
    """Describe a stored schedule, also one that cannot be read."""
    try:
        return spec_words(read_spec(raw))
    except UNPLANNABLE:
        return "cannot be read"


def spec_words(spec: ScheduleSpec) -> str:
    """Describe a schedule: cron expressions in words, other kinds as the domain formats them."""
    return cron_in_words(spec.cron) if spec.kind is ScheduleKind.CRON else describe(spec)


# No inline script or style and no other origin: markup injected through a name or a log line cannot run.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
        " form-action 'self'; frame-ancestors 'none'; base-uri 'none'"
    ),
    # With `no-referrer`, browsers would send `Origin: null` with Evertick's own forms.
    "Referrer-Policy": "same-origin",
}


MOST_FIELDS = 1000


FOREVER = "public, max-age=31536000, immutable"


Handler = Callable[[Request], Awaitable[Response]]


class Frame:
    """The templates and static assets of one application."""

    def __init__(self) -> None:
        self.assets: Assets = read_assets()
        self.environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self.environment.filters |= {"lasting": length, "instant": instant, "json_text": json_text, "segment": segment}
        self.environment.filters["detail_words"] = detail_words
        words = {"STATE_WORDS": STATE_WORDS, "MISFIRE_WORDS": MISFIRE_WORDS, "OVERLAP_WORDS": OVERLAP_WORDS}
        self.environment.globals |= {"static": self.assets.url, "P": Permission, **words}

    def render(self, request: Request, template: str, values: dict[str, Any]) -> str:
        """Render a template. Every template also receives `caller`, `may(permission)`, the menu and the current path."""
        caller: ApiCaller | None = getattr(request.state, "caller", None)
        principal = caller.principal if caller is not None else NOBODY
        known = {
            "caller": caller,
            "is_signed_in": principal is not NOBODY,
            "principal": principal,
            "may": principal.may,
            "menu": list(entries_for(principal)) if principal is not NOBODY else [],
            "here": "",
            "path": request.url.path,
        }
        return self.environment.get_template(template).render(known | values)


class PageRoute(GuardedRoute):
    """A route of the web UI: redirects to the sign-in page if the user is not signed in, and renders errors as pages."""

    def get_route_handler(self) -> Any:
        answer = super().get_route_handler()

        async def shown(request: Request) -> Response:
            try:
                response = await answer(request)
            except (EvertickError, HTTPException, RequestValidationError, psycopg.Error, OSError) as error:
                response = refusal(request, error)
            for name, value in HEADERS.items():
                response.headers.setdefault(name, value)
            return response

        return shown


def page(request: Request, template: str, *, status: int = 200, **values: Any) -> HTMLResponse:
    """A complete page, or a fragment if the template is a fragment."""
    frame: Frame = request.app.state.frame
    return HTMLResponse(frame.render(request, template, values), status)


def done(text: str, *, go: str | None = None) -> Response:
    """The response to a successful action: shows `text` and refreshes the page, or opens the page `go`."""
    event = {"evertick:done": {"text": text, "stays": go is not None}}
    headers = {"HX-Trigger": json.dumps(event)}
    if go is not None:
        headers["HX-Redirect"] = go
    return Response(status_code=HTTPStatus.NO_CONTENT, headers=headers)


def refusal(request: Request, error: Exception) -> Response:
    """Render an error: the sign-in page, an error page, or (for a button) a message on the current page."""
    if isinstance(error, RequestValidationError):
        error = UserError("This URL or form is not valid: " + _first_problem(error))
    status, _, detail = status_of(error)
    if detail == HTTPStatus.NOT_FOUND.phrase:
        detail = "There is no page at this URL."
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log_fault(request, error)
    is_button = request.headers.get("hx-request") == "true" or request.method not in SAFE_METHODS
    if isinstance(error, Unauthenticated) and request.url.path != "/login":
        if not is_button:
            return RedirectResponse(login_url(request), status_code=HTTPStatus.SEE_OTHER)
        event: dict[str, object] = {"evertick:signed-out": {}}
    else:
        event = {"evertick:failed": {"text": detail}}
    headers = headers_of(error, status)
    if is_button:
        return Response(detail, status.value, headers=headers | {"HX-Trigger": json.dumps(event)})
    response = page(request, "error.html", status=status.value, detail=detail, title=status.phrase)
    response.headers.update(headers)
    return response


def login_url(request: Request) -> str:
    query = f"?{request.url.query}" if request.url.query else ""
    wanted = request.url.path + query
    return "/login" if wanted == "/" else "/login?" + urlencode({"next": wanted})


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a submitted form. If a field occurs several times, the last value is used."""
    body = await request.body()
    try:
        return dict(parse_qsl(body.decode(), keep_blank_values=True, max_num_fields=MOST_FIELDS, errors="strict"))
    except ValueError:
        raise UserError("The request body is not a form of this web UI.") from None


def segment(name: object) -> str:
    """Encode a name as one path segment."""
    return quote(str(name), safe="")


def _first_problem(error: RequestValidationError) -> str:
    first = error.errors()[0]
    return f"{first['loc'][-1]}: {first['msg']}."
