"""Shared parts of all pages: route class, template rendering, the caller and its permissions, and responses to buttons.

A page is a template with values. Every value is escaped. Errors are rendered as pages, too.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
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
from evertick.api.desk import NOBODY, Caller
from evertick.api.guard import SAFE_METHODS, GuardedRoute
from evertick.api.problems import headers_of, status_of
from evertick.domain.access import Permission
from evertick.domain.errors import EvertickError, Refused, UserError
from evertick.domain.time_words import length
from evertick.ui.assets import Assets, read_assets
from evertick.ui.nav import entries_for
from evertick.ui.words import MISFIRE_WORDS, OVERLAP_WORDS, STATE_WORDS, detail_words, instant, json_text

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
        caller: Caller | None = getattr(request.state, "caller", None)
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
    if isinstance(error, Refused) and request.url.path != "/login":
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
