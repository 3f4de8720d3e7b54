"""What people do with the pages, from end to end in a real browser: signing in, triggering, pausing, editing, the keyboard."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from playwright.sync_api import Page, Route, expect
from psycopg import AsyncConnection

from evertick.db.queries import dags, runs, schedules
from evertick.domain.access import Actor
from evertick.domain.dags.spec import NamedSchedule
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine import accounts
from tests.engine.world import make_dag, put, start
from tests.ui.conftest import Visitor
from tests.ui.site import PASSWORD, Site


def test_signing_in_leads_to_where_one_wanted_to_go(visit: Visitor, site: Site) -> None:
    async def prepare(conn: AsyncConnection) -> str:
        await accounts.add_user(conn, name="ann", role=accounts.Role.VIEWER, tags=None, actor=Actor("test"))
        await accounts.set_password(conn, name="ann", password=PASSWORD, actor=Actor("test"))
        row = await accounts.find_user(conn, "ann")
        return (await accounts.issue(conn, row, kind="link", name="link", actor=Actor("test"), seconds=600)).secret

    link = site.do(prepare)
    page = visit("/dags/orders?task=load", None)
    expect(page).to_have_url(re.compile(r"/login\?next="))
    page.get_by_label("Name").fill("ann")
    page.get_by_label("Password").fill("wrong")
    page.get_by_role("button", name="Sign in").click()
    expect(page.get_by_role("alert")).to_contain_text("wrong")
    page.get_by_label("Password").fill(PASSWORD)
    page.get_by_role("button", name="Sign in").click()
    expect(page).to_have_url(f"{site.url}/dags/orders?task=load")
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    page.goto(f"{site.url}/auth/link/{link}")
    page.get_by_role("button", name="Sign in").click()
    expect(page.locator(".who")).to_contain_text("ann viewer")


def test_a_run_is_triggered_by_a_form_that_says_what_is_wrong_beside_the_field(visit: Visitor, site: Site) -> None:
    page = visit("/dags/report_by_hand/trigger", "operator")
    page.get_by_label("limit").fill("0")
    page.get_by_role("button", name="Trigger run").click()
    day = page.get_by_label("day")
    expect(day).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".field", has=day)).to_contain_text("is required")
    expect(page.locator(".field", has=page.get_by_label("limit"))).to_contain_text("at least 1")
    page.get_by_label("limit").fill("5")
    day.fill("2026-11-30")
    page.get_by_label("dry_run").check()
    page.get_by_label("region").select_option(label="us")
    with page.expect_response(lambda answer: answer.request.method == "POST"):
        page.get_by_role("button", name="Trigger run").click()
    expect(page).to_have_url(re.compile(r"/runs/\d+$"))
    newest = site.do(lambda conn: runs.list_newest(conn, limit=1))[0]
    assert newest.dag == "report_by_hand" and newest.triggered_by == "user:operator"
    assert newest.params == {"region": "us", "limit": 5, "dry_run": True, "day": "2026-11-30"}


def test_a_schedule_is_changed_with_a_look_at_its_fires_and_not_over_somebody_elses_change(
    visit: Visitor, site: Site
) -> None:
    page, other = (visit("/dags/billing/schedules/edit?name=main", "editor") for _ in range(2))
    when = page.get_by_label("When")
    when.fill("61 * * * *")
    expect(page.locator("#preview .problem")).to_be_visible()
    when.fill("0 7 * * *")
    expect(page.locator("#preview")).to_contain_text("At 07:00 every day")
    expect(page.locator("#preview li")).to_have_count(10)
    page.get_by_role("button", name="Save").click()
    expect(page.locator("#schedules")).to_contain_text("at 07:00 every day")
    expect(page.locator("#toasts")).to_contain_text("saved")
    other.get_by_label("When").fill("0 9 * * *")
    other.get_by_role("button", name="Save").click()
    expect(other.get_by_role("alert")).to_contain_text("was changed in the meantime")
    (saved,) = site.do(lambda conn: schedules.list_all(conn, dag="billing"))
    assert saved.spec["expression"] == "0 7 * * *" and saved.changed_by == "user:editor" and saved.misfire == "latest"


def test_pages_follow_what_happens_without_a_reload(visit: Visitor, site: Site) -> None:
    """Also what the reader holds stays: what is folded, what is typed, where they are."""
    site.do(lambda conn: put(conn, make_dag("live", {"one": [], "two": ["one"]})))
    page = visit("/dags/live", "viewer")
    home = visit("/", "viewer")
    home.evaluate("window.isTheSame = true")
    expect(page.locator("#grid")).to_contain_text("has not run yet")
    page.get_by_label("Search tasks").fill("o")
    run_id = site.do(lambda conn: start(conn, "live"))
    expect(page.locator(f"a[href='/runs/{run_id}']")).to_have_count(1)
    expect(page.get_by_label("Search tasks")).to_have_value("o")
    expect(home.locator(f"a[href='/runs/{run_id}']")).to_have_count(1)
    assert home.evaluate("window.isTheSame") is True


def test_a_lost_connection_is_shown_and_heals(visit: Visitor, site: Site) -> None:
    site.do(lambda conn: put(conn, make_dag("lost", {"one": []})))
    page = visit("/dags/lost", "viewer")
    banner = page.get_by_text("Connection lost, retrying")
    expect(banner).to_be_hidden()
    page.route("**/*", lambda route: route.abort())
    run_id = site.do(lambda conn: start(conn, "lost"))
    expect(banner).to_be_visible()
    page.unroute("**/*")
    expect(banner).to_be_hidden()
    expect(page.locator(f"a[href='/runs/{run_id}']")).to_have_count(1)


def test_everything_can_be_done_with_the_keyboard_alone(visit: Visitor, site: Site) -> None:
    page = visit("/", "operator")
    press = page.keyboard.press
    press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    press("g")
    press("d")
    expect(page).to_have_url(f"{site.url}/dags")
    page.wait_for_load_state()  # no key is heard before
    press("?")
    expect(page.get_by_role("dialog", name="Keyboard")).to_be_visible()
    press("Escape")
    press("/")
    expect(page.get_by_label("Search DAGs")).to_be_focused()
    page.keyboard.type("web")
    expect(page.locator("tr[data-row]")).to_have_count(1)
    expect(page).to_have_url(re.compile(r"\?q=web"))
    press("Escape")
    press("j")
    expect(page.get_by_role("link", name="web_logs", exact=True)).to_be_focused()
    press("p")
    expect(page.locator("#toasts")).to_contain_text("web_logs paused")
    switch = page.get_by_role("switch", name="web_logs is active")
    expect(switch).to_have_attribute("aria-checked", "false")
    row = site.do(lambda conn: dags.find(conn, "web_logs"))
    assert row is not None and row.paused
    press("p")
    expect(switch).to_have_attribute("aria-checked", "true")
    expect(page.get_by_role("link", name="web_logs", exact=True)).to_be_focused()
    press("Enter")
    expect(page).to_have_url(f"{site.url}/dags/web_logs")
    page.wait_for_load_state()
    press("t")
    expect(page).to_have_url(f"{site.url}/dags/web_logs/trigger")


def test_groups_of_the_grid_fold_and_stay_folded(visit: Visitor) -> None:
    page = visit("/dags/orders", "viewer")
    inside = page.locator("tr[data-line='extract.orders']")
    expect(inside).to_be_visible()
    page.get_by_role("button", name="extract").click()
    expect(inside).to_be_hidden()
    page.reload()
    expect(inside).to_be_hidden()
    page.get_by_role("button", name="extract").press("Enter")
    expect(inside).to_be_visible()


def test_the_reader_chooses_dark_or_light_and_sees_their_own_time(visit: Visitor, site: Site) -> None:
    # The day after tomorrow: a time that somebody could reach while the tests run would be in the past then.
    day = datetime.now(UTC).date() + timedelta(days=2)
    once = NamedSchedule(name="main", spec=parse_schedule(f"@once {day}T06:30:00Z"))
    site.do(lambda conn: put(conn, make_dag("dated", {"one": []}, schedules=(once,))))
    page: Page = visit("/dags", "viewer", timezone_id="Asia/Tokyo", locale="en-GB")
    colour = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(colour)
    page.get_by_role("button", name="Switch between dark and light").click()
    assert page.evaluate(colour) != light
    page.reload()
    assert page.evaluate(colour) != light
    moment = page.locator("tr[data-row='dated'] time").first
    # 06:30 UTC is in the afternoon there.
    expect(moment).to_have_text(re.compile(r"15:30:00 \(in [12] d\)"))
    assert "UTC" in (moment.get_attribute("title") or "")


def test_without_scripts_pages_can_be_read(visit: Visitor) -> None:
    page = visit("/dags", "viewer", java_script_enabled=False)
    expect(page.get_by_role("link", name="orders", exact=True)).to_be_visible()
    page.get_by_role("link", name="orders", exact=True).click()
    expect(page.locator("table.grid")).to_contain_text("transform")
    expect(page.locator("#dag-head time")).to_contain_text("UTC")


def test_what_was_read_before_a_search_is_not_put_over_what_it_found(visit: Visitor, site: Site) -> None:
    page = visit("/runs", "viewer")
    rows = page.locator("tr[data-row]")
    held: list[Route] = []
    # From before the page is there: it reads itself once by itself, and waits for that answer before it reads again.
    page.route("**/dags", lambda route: held.append(route) if route.request.headers.get("x-live") else route.fallback())
    with page.expect_request(lambda request: request.url.endswith("/dags") and "x-live" in request.headers):
        page.goto(f"{site.url}/dags")
    site.do(lambda conn: start(conn, "billing"))
    page.get_by_label("Search DAGs").fill("web")
    expect(rows).to_have_count(1)
    with page.expect_response(lambda answer: answer.url.endswith("?q=web&state=")):
        held[0].continue_()
    expect(rows).to_have_count(1)


def test_on_a_phone_the_calendar_opens_at_the_newest_days_and_the_menu_can_be_scrolled(visit: Visitor) -> None:
    page = visit("/dags/orders/calendar", "viewer", phone=True)
    newest = "e => e.scrollLeft >= e.scrollWidth - e.clientWidth - 1 && e.scrollLeft > 0"
    assert page.locator(".panel-body.scroll").first.evaluate(newest)
    assert page.locator(".menu").evaluate(
        "e => e.scrollWidth > e.clientWidth && getComputedStyle(e).overflowX == 'auto'"
    )
