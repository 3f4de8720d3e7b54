"""Every page in a real browser: it can be read by everybody, says what is true, and complains about nothing."""

from __future__ import annotations

import os

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from tests.source_tree import ROOT
from tests.ui.conftest import Visitor
from tests.ui.site import Site

PICTURES = ROOT / "docs" / "pictures"
# Page, and the name of its picture: EVERTICK_PICTURES=1 draws them anew.
PAGES = {
    "/": "home",
    "/dags": "dags",
    "/dags/orders": "dag-grid",
    "/dags/orders/schedules": None,
    "/dags/orders/schedules/edit?name=main": "schedule",
    "/dags/orders/versions": None,
    "/dags/orders/code": None,
    "/dags/report_by_hand/details": None,
    "/dags/report_by_hand/trigger": "trigger-form",
}


def findings(page: Page, *rules: str) -> list[str]:
    """What axe finds serious, by all of its rules or by these."""
    only = {"runOnly": list(rules)} if rules else {}
    report = Axe().run(page, options={"resultTypes": ["violations"], **only}).response
    return [
        f"{each['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for each in report["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"][:3]
    ]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_page_can_be_read_by_everybody(visit: Visitor, site: Site, dark: bool) -> None:
    page = visit("/", dark=dark)
    wrong = {}
    for path, picture in PAGES.items():
        page.goto(site.url + path)
        expect(page.locator("h1")).to_be_visible()
        # In the dark the same page has other colours, and nothing else.
        if found := findings(page, *(["color-contrast"] if dark else [])):
            wrong[path] = found
        if picture and (picture == "home" or not dark) and os.environ.get("EVERTICK_PICTURES"):
            expect(page.locator("#preview li")).to_have_count(10 if picture == "schedule" else 0)
            page.screenshot(path=PICTURES / f"ui-{picture}-{'dark' if dark else 'light'}.png")
    assert wrong == {}


def test_nothing_is_wider_than_a_phone(visit: Visitor, site: Site) -> None:
    page = visit("/", phone=True)
    wide = {}
    for path in PAGES:
        page.goto(site.url + path)
        if (width := page.evaluate("document.documentElement.scrollWidth")) > 390:
            wide[path] = width
    assert wide == {}
