"""A site with history, one per module, and a real browser. Where there is no browser the tests are NOT RUN: in CI an error."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Page, ViewportSize, expect, sync_playwright

from evertick.api.auth import PLAIN_COOKIE
from tests.databases import Cluster
from tests.ui.site import Site, history, people, served

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--no-first-run",
]
WIDE = ViewportSize(width=1280, height=860)
PHONE = ViewportSize(width=390, height=800)
Visitor = Callable[..., Page]
# A busy machine is no reason to fail.
expect.set_options(timeout=20_000)


@pytest.fixture(scope="session")
def lived_in(cluster: Cluster, template: str) -> Iterator[tuple[str, Site]]:
    """A database with people and history, and what is known of them: each module gets a copy."""
    name = cluster.create(template)
    known = Site(url="", database=cluster.database_url(name))
    known.sessions = known.do(people)
    known.runs = known.do(history)
    yield name, known
    cluster.drop(name)


@pytest.fixture(scope="module")
def site(cluster: Cluster, lived_in: tuple[str, Site]) -> Iterator[Site]:
    """Shared by the tests of a module: whoever changes something changes what no other test looks at."""
    source, known = lived_in
    name = cluster.create(source)
    with served(cluster.database_url(name)) as made:
        made.sessions, made.runs = dict(known.sessions), deepcopy(known.runs)
        yield made
    cluster.drop(name)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Of a module, not of the run: while it lives its event loop does, and then no asynchronous test can run in this process.
    So a module has tests with a browser or asynchronous ones, never both."""
    if CHROMIUM is None:
        message = "NOT RUN: no Chromium here, install Debian's package `chromium`"
        if os.environ.get("CI") == "true":
            pytest.fail(message)
        pytest.skip(message)
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield started
        started.close()


@pytest.fixture
def visit(site: Site, browser: Browser) -> Iterator[Visitor]:
    """Opens a path as somebody: `visit("/dags", "viewer", dark=True, phone=True)`. What a page complains about in its console fails
    the test."""
    complaints: list[str] = []

    with ExitStack() as stack:

        def open_page(
            path: str, who: str | None = "admin", *, dark: bool = False, phone: bool = False, **options: object
        ) -> Page:
            context: BrowserContext = browser.new_context(
                viewport=PHONE if phone else WIDE,
                color_scheme="dark" if dark else "light",
                reduced_motion="reduce",
                **options,  # type: ignore[arg-type]
            )
            stack.callback(context.close)
            context.set_default_timeout(20_000)
            if who is not None:
                context.add_cookies([{"name": PLAIN_COOKIE, "value": site.sessions[who], "url": site.url}])
            page = context.new_page()
            page.on("console", lambda said: _note(said, complaints))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.goto(site.url + path)
            return page

        yield open_page
    assert complaints == []


# What the browser itself notes when a test is refused on purpose, or cuts the connection; pages have no word in it.
_ASKED_FOR = re.compile(r"Failed to load resource: (the server responded with a status of (401|422)|net::ERR_FAILED)")


def _note(said: ConsoleMessage, complaints: list[str]) -> None:
    if said.type in ("error", "warning") and not _ASKED_FOR.match(said.text):
        complaints.append(f"{said.type}: {said.text} {said.location}")
