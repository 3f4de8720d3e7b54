"""The frame of every page: stylesheets and scripts, navigation, words for states and times, and the answer to a form.

Static files are read once and served from memory. Their URL contains one hash of all of them, so browsers can cache them
without expiry: a new release has a new URL.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, tzinfo
from http import HTTPStatus
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, quote, unquote, urlencode

import psycopg
from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, RedirectResponse
from jinja2 import Environment, FileSystemLoader, StrictUndefined, pass_context
from jinja2.runtime import Context
from markdown_it import MarkdownIt
from markupsafe import Markup, escape
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import get_lexer_by_name
from starlette.exceptions import HTTPException

from evertick.api.app import log_fault
from evertick.api.auth import SAFE_METHODS, GuardedRoute, GuardedRouter
from evertick.api.context import ApiCaller
from evertick.api.problems import headers_of, status_of
from evertick.domain.access import Permission, Principal
from evertick.domain.durations import length, size
from evertick.domain.errors import EvertickError, InvalidSchedule, Unauthenticated, UserError
from evertick.domain.routing import read_cell
from evertick.domain.schedules.cron_text import cron_in_words
from evertick.domain.schedules.spec import ScheduleKind, ScheduleSpec, describe
from evertick.domain.schedules.time_zones import find_zone, first_instant
from evertick.engine.fire_schedules import UNPLANNABLE, read_spec
from evertick.operations.caller import ANONYMOUS
from evertick.operations.task_logs import LEVEL_WORDS
from evertick.ui.charts.grid import short_count
from evertick.ui.charts.history import value_words

_FOLDER = Path(__file__).parent / "static"


_TYPES = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    content: bytes
    media_type: str


@dataclass(frozen=True, slots=True)
class StaticFiles:
    """`files` maps each name below the folder to its content."""

    hash: str
    files: dict[str, StaticFile]

    def url(self, name: str) -> str:
        if name not in self.files:
            raise KeyError(f"unknown static file {name}")
        return f"/static/{self.hash}/{name}"


def read_static_files(folder: Path = _FOLDER) -> StaticFiles:
    """Read the files whose type is in the table. Other types are never served."""
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _TYPES)
    files = {
        path.relative_to(folder).as_posix(): StaticFile(path.read_bytes(), f"{_TYPES[path.suffix]}; charset=utf-8")
        for path in paths
    }
    digest = hashlib.sha256()
    for name, asset in files.items():
        digest.update(name.encode() + b"\0" + asset.content + b"\0")
    return StaticFiles(hash=digest.hexdigest()[:16], files=files)


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
    Entry("schedules", "Schedules", "/schedules", Permission.READ_SCHEDULES, "clock", "f"),
    Entry("assets", "Assets", "/assets", Permission.READ_GATES, "assets", "e"),
    Entry("deployments", "Deployments", "/deployments", Permission.READ_DEPLOYMENTS, "deployments", "m"),
    Entry("alerts", "Alerts", "/alerts", Permission.READ_SCHEDULES, "upstream_failed", "i", "Monitoring"),
    Entry(
        "notifications", "Notifications", "/notifications", Permission.READ_NOTIFICATIONS, "external", "o", "Monitoring"
    ),
    Entry("guarantees", "Guarantees", "/guarantees", Permission.READ_METRICS, "ok", "j", "Monitoring"),
    Entry("forecast", "Forecast", "/forecast", Permission.READ_RUNS, "clock", "n", "Monitoring"),
    Entry("events", "Events", "/events", Permission.READ_EVENTS, "pending", "x", "Monitoring"),
    Entry("dead-letters", "Dead letters", "/dead-letters", Permission.READ_EVENTS, "failed", "z", "Monitoring"),
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
MISFIRE_WORDS = {"skip": "skip missed fires", "latest": "run the latest missed fire", "all": "run all missed fires"}


OVERLAP_WORDS = {
    "allow": "start another run",
    "skip": "skip the new run",
    "queue_one": "queue one run",
    "queue_all": "queue all runs",
    "cancel": "cancel the open run first",
}


_LONGEST_VALUE = 32


# The zone that the user selected, and the one that the browser reports (static/theme.js). Without both, times are in UTC.
ZONE_COOKIES = ("evertick_zone", "evertick_browser_zone")


def zone_of(request: Request) -> tzinfo:
    """The time zone of the page."""
    for cookie in ZONE_COOKIES:
        if name := request.cookies.get(cookie):
            with suppress(InvalidSchedule):
                return find_zone(unquote(name))
    return UTC


@pass_context
def instant(context: Context, at: datetime) -> str:
    """The exact timestamp in the time zone of the page, and in UTC."""
    exact, zone = f"{at.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC", context.get("page_zone", UTC)
    return exact if str(zone) == "UTC" else f"{at.astimezone(zone):%Y-%m-%d %H:%M:%S %Z} ({exact})"


def read_moment(text: str, label: str, zone: str) -> datetime:
    """A time of a form, on the clock of the zone: the first copy of a repeated one, the first instant after a gap."""
    instant = None
    with suppress(ValueError, OverflowError):
        found = datetime.fromisoformat(text)
        instant = first_instant(zone, found) if found.tzinfo is None else found
    if instant is None or not 1900 <= instant.year <= 9998:
        raise UserError(f"{label}: enter a date and time from 1900 to 9998, for example 2030-01-31T08:00.")
    return instant


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
            text = value_words(value)
            longest = 12 if key == "hash" else _LONGEST_VALUE
            told.append(f"{name} {text[:longest]}{'…' if len(text) > longest else ''}")
    return "; ".join(told)


# No raw HTML, no images, and links only to http(s), mailto and pages of this site.
_MARKDOWN = MarkdownIt("js-default", {"maxNesting": 10}).disable(["image", "table"])
# Some inputs take time that grows with the square of their length: 10,000 characters take at most half a second.
_LONGEST_MARKDOWN = 10_000
_LONGEST_SUMMARY = 1_000


def markdown(text: str) -> Markup:
    """A docstring as HTML. Its headings are below those of the page's panels."""
    tokens = _MARKDOWN.parse(inspect.cleandoc(text[:_LONGEST_MARKDOWN]))
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1]) + 2, 6)}"
    return Markup(_MARKDOWN.renderer.render(tokens, _MARKDOWN.options, {}))


def summary(text: str) -> str:
    """The first paragraph or heading of a docstring, without its markup."""
    for token in _MARKDOWN.parse(inspect.cleandoc(text[:_LONGEST_SUMMARY])):
        if token.type == "inline":
            return "".join(each.content or " " * (each.type == "softbreak") for each in token.children or ())
    return ""


# Other files are shown without colours: some lexers take long for some texts.
_LEXERS = {
    ".py": "python",
    ".sql": "sql",
    ".json": "json",
    ".yaml": "yaml",
    ".yml": "yaml",
    ".toml": "toml",
    ".sh": "sh",
}
_MOST_COLOURED = 50_000


def code_lines(name: str, text: str) -> list[Markup]:
    """The lines of a file, with the classes of its syntax."""
    lexer = _LEXERS.get(Path(name).suffix)
    if lexer is None or len(text) > _MOST_COLOURED:
        return [escape(each) for each in text.splitlines()]
    formatter = HtmlFormatter(nowrap=True, classprefix="tok-")
    return [Markup(each) for each in highlight(text, get_lexer_by_name(lexer, stripnl=False), formatter).split("\n")][
        :-1
    ]


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


RELEASE = version("evertick")


FOREVER = "public, max-age=31536000, immutable"


Handler = Callable[[Request], Awaitable[Response]]


class Frame:
    """The templates and static files of one application."""

    def __init__(self) -> None:
        self.files: StaticFiles = read_static_files()
        self.environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "templates"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self.environment.filters |= {"lasting": length, "instant": instant, "json_text": json_text, "segment": segment}
        self.environment.filters |= {"detail_words": detail_words, "short_count": short_count, "markdown": markdown}
        self.environment.filters |= {
            "bytes_text": size,
            "summary": summary,
            "level_word": lambda level: LEVEL_WORDS.get(level, level),
        }
        words = {"STATE_WORDS": STATE_WORDS, "MISFIRE_WORDS": MISFIRE_WORDS, "OVERLAP_WORDS": OVERLAP_WORDS}
        self.environment.globals |= {"static": self.files.url, "P": Permission, **words}

    def render(self, request: Request, template: str, values: dict[str, Any]) -> str:
        """Render a template. Every template also receives `caller`, `may(permission)`, the menu and the current path."""
        caller: ApiCaller | None = getattr(request.state, "caller", None)
        principal = caller.principal if caller is not None else ANONYMOUS
        known = {
            "caller": caller,
            "is_signed_in": principal is not ANONYMOUS,
            "principal": principal,
            "may": principal.may,
            "menu": list(entries_for(principal)) if principal is not ANONYMOUS else [],
            "here": "",
            "path": request.url.path,
            "page_zone": zone_of(request),
            "zone_choice": unquote(request.cookies.get(ZONE_COOKIES[0], "")),
            "version": RELEASE,
            "cells": [read_cell(each) for each in caller.context.settings.cells] if caller is not None else [],
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


def page_router() -> GuardedRouter:
    """A router of pages. Its paths are not part of an API."""
    return GuardedRouter(PageRoute, include_in_schema=False)


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
        first = error.errors()[0]
        error = UserError(f"This URL or form is not valid: {first['loc'][-1]}: {first['msg']}.")
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


Form = Annotated[dict[str, str], Depends(form_of)]


def segment(name: object) -> str:
    """Encode a name as one path segment."""
    return quote(str(name), safe="")
