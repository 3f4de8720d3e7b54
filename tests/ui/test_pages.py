"""Every page in a real browser: it can be read by everybody, says what is true, and complains about nothing."""

from __future__ import annotations

import ast
import os
import re
from http import HTTPStatus

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page, expect

from evertick.domain.access import Permission, Principal, Role
from evertick.ui.layout import ENTRIES
from tests.source_tree import ROOT
from tests.ui.conftest import PHONE, WIDE, Visitor
from tests.ui.keyboard import dialog_problems, problems
from tests.ui.page_table import ACTIONS, NO_PAGES, STILL, controls_in, door_to, doors, furnish
from tests.ui.site import HttpVisitor, Site

# All of them together, because they share a site.
pytestmark = pytest.mark.long
PICTURES = ROOT / "docs" / "pictures"
# Of these there is a picture in the dark, too.
IN_THE_DARK = ("home", "run")
Table = dict[str, str | None]


@pytest.fixture(scope="module")
def pages(site: Site) -> Table:
    """Each page with the name of its picture: EVERTICK_PICTURES=1 draws them anew."""
    return furnish(site)


def findings(page: Page, *rules: str) -> list[str]:
    """What axe finds serious, by all of its rules or by these. The menu, the same everywhere, is looked at on the front page."""
    # Only what is wrong is worked out, and no stylesheet is fetched again: that halves the time.
    only = {"runOnly": list(rules)} if rules else {}
    options = {"resultTypes": ["violations"], "preload": False, **only}
    if page.evaluate("typeof axe") == "undefined":
        page.evaluate(AXE_SCRIPT)
    where = "document" if page.url.endswith("/") else "{ exclude: [['.rail']] }"
    report = page.evaluate(f"options => axe.run({where}, options)", options)
    return [
        f"{each['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for each in report["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"][:3]
    ]


def settled(page: Page) -> None:
    """Its scripts have done what they do at the beginning."""
    expect(page.locator("h1")).to_be_visible()
    for what in ("graph", "log"):
        if page.locator(f"[data-{what}]").count():
            expect(page.locator(f"[data-{what}]")).to_have_attribute("data-ready", "yes")
    if page.locator("#preview[hx-post]").count():
        expect(page.locator("#preview")).not_to_be_empty()


def test_every_route_that_is_a_page_is_looked_at_here(pages: Table) -> None:
    missing = {
        door.path
        for door in doors()
        if door.method == "GET"
        and door.path not in NO_PAGES
        and not any(door_to("GET", path) == door for path in pages)
    }
    assert missing == set(), "name it in tests/ui/page_table.py"


def test_every_change_that_pages_offer_has_a_test_from_end_to_end() -> None:
    offered = {door.path for door in doors() if door.method == "POST"}
    assert offered == set(ACTIONS), "name it in tests/ui/page_table.py"
    for test in set(ACTIONS.values()):
        file, _, name = test.partition(".")
        tree = ast.parse((ROOT / "tests" / "ui" / f"{file}.py").read_text(encoding="utf-8"))
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, test


@pytest.mark.parametrize("part", [0, 1])
def test_every_page_can_be_read_by_everybody_in_light_and_dark_on_a_phone_and_by_keyboard(
    visit: Visitor, site: Site, pages: Table, part: int
) -> None:
    """In two halves, so that two workers share them."""
    page = visit("/")
    wrong: dict[str, object] = {}
    dialogs: set[tuple[str, int]] = set()
    for path, picture in [*pages.items()][part::2]:
        page.emulate_media(color_scheme="light")
        page.goto(site.url + path)
        settled(page)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            # In the dark the same page has other colours, and nothing else.
            if found := findings(page, *(["color-contrast"] if scheme == "dark" else [])):
                wrong[f"{path} {scheme}"] = found
            if picture and (scheme == "light" or picture in IN_THE_DARK) and os.environ.get("EVERTICK_PICTURES"):
                page.screenshot(path=PICTURES / f"ui-{picture}-{scheme}.png")
        if unreached := [*problems(page), *dialog_problems(page, dialogs)]:
            wrong[f"{path} keyboard"] = unreached
        is_live = page.locator("[data-live][id], [data-hints]").count() > 0
        if not is_live and not STILL.search(path):
            wrong[f"{path} live"] = "nothing on it follows what happens"
        page.set_viewport_size(PHONE)
        if (width := page.evaluate("document.documentElement.scrollWidth")) > PHONE["width"]:
            wrong[f"{path} phone"] = width
        page.set_viewport_size(WIDE)
    assert wrong == {}


def test_what_other_roles_see_can_be_read_in_light_and_dark_and_on_a_phone(
    visit: Visitor, site: Site, pages: Table
) -> None:
    """Nobody has anything on a page that an admin has not: they see what was looked at, or less of it. And each page that differs
    is opened by one of the others."""
    others = sorted(set(site.sessions) - {"admin"})
    wrong: dict[str, object] = {}
    known = _as_admin(site, pages)
    extra: dict[tuple[str, str], set[str]] = {}
    for place, who in enumerate(others):
        page = visit("/", who, phone=True, dark=place % 2 == 1)
        with HttpVisitor(site, who) as visitor:
            answers = {path: visitor.get(path) for path in pages}
        for turn, (path, answer) in enumerate(answers.items()):
            if answer.status_code != HTTPStatus.OK or _content(answer.text) == _content(known[path]):
                continue
            extra[path, who] = _looks(answer.text) - _looks(known[path])
            if turn % len(others) != place:
                continue
            page.goto(site.url + path)
            expect(page.locator("h1")).to_be_visible()
            if (width := page.evaluate("document.documentElement.scrollWidth")) > PHONE["width"]:
                wrong[f"{path} {who} phone"] = width
    # Time goes on meanwhile: a schedule that comes due shows on a page that was read before it as something new.
    later = _as_admin(site, pages)
    for (path, who), new in extra.items():
        if new := new - _looks(later[path]):
            wrong[f"{path} {who} has what was not looked at"] = new
    assert wrong == {}


def _as_admin(site: Site, pages: Table) -> dict[str, str]:
    with HttpVisitor(site, "admin") as admin:
        return {path: admin.get(path).text for path in pages}


def _content(text: str) -> str:
    """Without the menu and the session."""
    return text.partition("<main")[2].partition("</main>")[0]


def _looks(text: str) -> set[str]:
    """What a page is made of: colours and sizes come from classes. Somebody who may see less of what is wrong sees health."""
    return {re.sub(r"^hero (well|unwell)$", "hero", each) for each in re.findall(r'class="([^"]*)"', _content(text))}


@pytest.mark.parametrize("who", [*(role.value for role in Role), "limited"])
def test_every_page_as_every_role_offers_what_they_may_and_nothing_else(site: Site, pages: Table, who: str) -> None:
    tags = frozenset({"finance"}) if who == "limited" else None
    principal = Principal(name=who, role=Role.OPERATOR if tags else Role(who), tags=tags)
    wrong = []
    with HttpVisitor(site, who) as visitor:
        for path in pages:
            door = door_to("GET", path)
            assert door is not None
            answer = visitor.get(path)
            expected = 200 if principal.may(door.permission) else 403
            if tags and path.startswith("/dags/report_by_hand"):
                expected = 404  # has another tag, so for them it is not there
            if answer.status_code != expected:
                wrong.append((path, answer.status_code))
            for method, address in controls_in(answer.text):
                behind = door_to(method, address)
                if behind is not None and not principal.may(behind.permission):
                    wrong.append((path, f"{method} {address}"))
            menu = [each for each in ENTRIES if f'<a href="{each.path}"' in answer.text]
            if expected == 200 and {each.key for each in ENTRIES if principal.may(each.permission)} != {
                each.key for each in menu
            }:
                wrong.append((path, f"menu: {[each.key for each in menu]}"))
    assert wrong == []


def test_who_may_is_offered_it(site: Site, pages: Table) -> None:
    """The other way round: what an admin may do stands on some page."""
    offered = set()
    with HttpVisitor(site, "admin") as admin:
        for path in (*pages, f"/runs/{site.runs['orders'][0]}"):
            offered |= {door_to(*each) for each in controls_in(admin.get(path).text)}
    offered |= {door for door in doors() if door.permission is Permission.OPEN}
    # The form of an answer has the browser's own way to send it, and a paused thing has the other button.
    exempt = {"/dags/{dag}/trigger", "/runs/{run_id}/states", "/runs/{run_id}/tasks/{task}/log"}
    exempt |= {"/users/{name}/enable", "/runners/{runner}/undrain", "/backfills/{backfill_id}/resume"}
    missing = {f"{door.method} {door.path}" for door in doors() if door not in offered and door.path not in exempt}
    assert missing == set()
