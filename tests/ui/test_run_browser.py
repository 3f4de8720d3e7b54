"""Runs, tasks and logs in a real browser: what changes is shown without a reload, and buttons say beforehand what they touch."""

from __future__ import annotations

import re
from collections.abc import Iterable

from playwright.sync_api import Page, expect
from psycopg import AsyncConnection

from evertick.db.queries import runners
from tests.engine.world import Runner, make_dag, put, start, states
from tests.ui.conftest import Visitor
from tests.ui.page_table import write_log
from tests.ui.site import Site

HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=document.title='owned'>",
    "\u202egnp.exe\u202c and \u2066hidden\u2069",
    "\x1b[31mred\x1b[0m \x1b[1;44mbold\x1b[0m plain",
    "&lt;b&gt; {{ 7 * 7 }} ${1}",
    "x" * 3000,
)


def info(texts: Iterable[str]) -> list[tuple[str, str]]:
    return [("INFO", text) for text in texts]


def ready(page: Page, what: str) -> None:
    expect(page.locator(f"[data-{what}]")).to_have_attribute("data-ready", "yes")


def test_clear_with_a_look_before_by_keyboard_alone(visit: Visitor, site: Site) -> None:
    async def prepare(conn: AsyncConnection) -> int:
        await put(conn, make_dag("to_clear", {"a": [], "b": ["a"], "c": ["b"]}, task_queue="to_clear"))
        run_id = await start(conn, "to_clear")
        runner = await Runner.join(conn, queues=("to_clear",))
        (first,) = await runner.claim(queues=("to_clear",))
        await runner.finish(first)
        (second,) = await runner.claim(queues=("to_clear",))
        await runner.finish(second, "failed", no_retry=True, reason="no rows")
        await runners.leave(conn, runner.session)
        return run_id

    run_id = site.do(prepare)
    page = visit(f"/runs/{run_id}", "operator")
    expect(page.locator("#run-head h1 .state")).to_contain_text("failed")
    page.keyboard.press("c")
    expect(page.locator("#clear-preview")).to_contain_text("2 tasks run again")
    page.keyboard.press("Tab")
    page.locator("#clear input[value=failed]").focus()
    page.keyboard.press("ArrowDown")
    expect(page.locator("#clear-preview")).to_contain_text("3 tasks run again")
    page.locator("#clear input[value=all]").focus()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("Enter")
    expect(page.locator(".toast")).to_contain_text(f"2 tasks of run {run_id} cleared")
    expect(page.locator("#run-head h1 .state")).to_contain_text("running")
    assert site.do(lambda conn: states(conn, run_id)) == {"a": "success", "b": "available", "c": "waiting"}


def test_a_run_is_watched_and_canceled_without_a_reload(visit: Visitor, site: Site) -> None:
    async def prepare(conn: AsyncConnection) -> int:
        await put(conn, make_dag("watched", {"a": [], "b": ["a"]}, task_queue="watched"))
        return await start(conn, "watched")

    async def work(conn: AsyncConnection) -> None:
        runner = await Runner.join(conn, queues=("watched",))
        (claim,) = await runner.claim(queues=("watched",))
        await runner.finish(claim)
        await runners.leave(conn, runner.session)

    run_id = site.do(prepare)
    page = visit(f"/runs/{run_id}?tab=graph", "operator")
    ready(page, "graph")
    page.evaluate("window.wasNotReloaded = true")
    expect(page.locator(".graph-node[data-idx='0']")).to_have_attribute("data-state", "available")
    site.do(work)
    expect(page.locator(".graph-node[data-idx='0']")).to_have_attribute("data-state", "success")
    expect(page.locator(".graph-node[data-idx='1']")).to_have_attribute("data-state", "available")
    page.locator(".graph-node[data-idx='0']").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".graph-node[data-idx='1']")).to_be_focused()
    before = page.locator(".graph-picture").get_attribute("style")
    page.keyboard.press("+")
    page.wait_for_function(
        "(old) => document.querySelector('.graph-picture').getAttribute('style') !== old", arg=before
    )
    page.get_by_role("button", name="Cancel…").click()
    expect(page.locator("#cancel")).to_contain_text("1 available: canceled now")
    page.get_by_label("Reason").fill("not needed")
    page.get_by_role("button", name="Cancel the run").click()
    expect(page.locator("#run-head h1 .state")).to_contain_text("canceled")
    expect(page.locator("#run-head")).to_contain_text("not needed")
    expect(page.locator(".graph-node[data-idx='1']")).to_have_attribute("data-state", "canceled")
    assert page.evaluate("window.wasNotReloaded") is True


def test_a_log_is_followed_searched_and_shown_as_text(visit: Visitor, site: Site) -> None:
    async def prepare(conn: AsyncConnection) -> int:
        await put(conn, make_dag("talks", {"t": []}, task_queue="talks"))
        run_id = await start(conn, "talks")
        await (await Runner.join(conn, queues=("talks",))).claim(queues=("talks",))
        return run_id

    run_id = site.do(prepare)
    end = write_log(site, run_id, 0, info(HOSTILE))
    page = visit(f"/runs/{run_id}/tasks/t")
    ready(page, "log")
    lines = page.locator(".log-line")
    expect(lines).to_have_count(len(HOSTILE))
    expect(lines.nth(0).locator(".log-text")).to_have_text(HOSTILE[0])
    expect(lines.nth(2).locator(".log-text")).to_contain_text("⟨U+202E⟩gnp.exe")
    expect(lines.nth(3).locator("span.ansi-ink-1")).to_have_text("red")
    expect(lines.nth(3).locator(".log-text")).to_have_text("red bold plain")
    assert "owned" not in page.title() and page.locator(".log img, .log script").count() == 0
    expect(page.locator("[data-log]")).to_have_attribute("data-heard", "yes")
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url) if "/tasks/t/log?" in request.url else None)
    end = write_log(site, run_id, 0, info(["it goes on", "<b>and on</b>"]), offset=end)
    expect(lines.last.locator(".log-text")).to_have_text("<b>and on</b>")
    assert asked == [], "new lines come by the stream"
    write_log(site, run_id, 0, [("ERROR", "it broke")], offset=end)
    expect(lines.last).to_contain_text("it broke")
    page.keyboard.press("/")
    page.keyboard.type("goes")
    expect(lines).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("e")
    expect(page.locator(".log-found")).to_contain_text("it broke")
    expect(lines).to_have_count(len(HOSTILE) + 3)


def test_of_a_long_log_a_window_stands_in_the_page(visit: Visitor, site: Site) -> None:
    run_id = site.runs["orders"][1]
    end = 0
    for part in range(40):
        end = write_log(site, run_id, 1, info(f"line {1000 * part + n} " + "." * 50 for n in range(1000)), offset=end)
    page = visit(f"/runs/{run_id}/tasks/extract.customers")
    ready(page, "log")
    expect(page.locator(".log-line").last).to_contain_text("line 39999")
    assert page.locator("*").count() < 5000
    for _ in range(6):
        first = page.locator(".log-line").first.inner_text()
        page.locator(".log-lines").evaluate("(list) => { list.scrollTop = 0; }")
        page.wait_for_function("(old) => document.querySelector('.log-line').innerText !== old", arg=first)
    assert page.locator("*").count() < 5000
    page.locator("[data-log-slider]").evaluate("(it) => { it.value = 500; it.dispatchEvent(new Event('change')); }")
    expect(page.locator(".log-line").first).to_contain_text("line 20")
    page.locator("[data-log-find]").fill("line 31234 ")
    expect(page.locator(".log-line")).to_have_count(1)


def test_every_line_of_a_slow_log_is_reached_by_wheel_and_keys_and_a_search_counts_all_hits(
    visit: Visitor, site: Site
) -> None:
    """A task that prints slowly has one line per chunk; terminal colours make a line many nodes."""
    run_id = site.runs["orders"][2]
    line = """
        insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content)
        select %s, 1, -1, 1, 1000 * n, 1000 * (n + 1), 1700000000000000 + n || ' INFO line ' || n || case when n %% 10 = 7
               then ' slow page' else '' end || repeat(e'\\x1b[31mx\\x1b[32my', case when n > 600 then 60 else 0 end) || e'\\n'
          from generate_series(0, 699) n"""

    async def print_slowly(conn: AsyncConnection) -> None:
        await conn.execute(line.encode(), [run_id])

    site.do(print_slowly)
    page = visit(f"/runs/{run_id}/tasks/extract.customers")
    ready(page, "log")
    lines = page.locator(".log-line")
    expect(lines.last).to_contain_text("line 699")
    pane = page.locator(".log-lines")
    pane.hover()
    seen: set[str] = set()
    for _ in range(200):
        seen.update(re.findall(r"line \d+", " ".join(lines.all_inner_texts())))
        if "line 0" in seen:
            break
        page.mouse.wheel(0, -1500)
        page.wait_for_timeout(30)
    assert len(seen) == 700
    pane.focus()
    page.keyboard.press("End")
    expect(lines.last).to_contain_text("line 699")
    page.keyboard.press("Home")
    expect(lines.first).to_contain_text("line 0")
    for _ in range(100):
        if "line 699" in lines.last.inner_text():
            break
        page.keyboard.press("PageDown")
        page.wait_for_timeout(30)
    expect(lines.last).to_contain_text("line 699")
    page.locator("[data-log-find]").fill("slow page")
    expect(page.locator("[data-log-status]")).to_contain_text("70 matching lines")
    expect(lines).to_have_count(70)


def test_names_from_outside_are_text_everywhere(visit: Visitor, site: Site) -> None:
    """Names that a DAG file cannot have, but a row could."""
    bad = "<img src=x onerror=document.title='owned'>\u202e" + "n" * 150

    async def prepare(conn: AsyncConnection) -> int:
        spec = make_dag("plain", {"a": []}, task_queue=bad)
        version = await put(conn, spec)
        run_id = await start(conn, "plain")
        await conn.execute("update task_spec set name = %s where version_id = %s", [bad, version])
        await conn.execute(
            "update dag_version set spec = jsonb_set(spec, '{tasks,0,name}', to_jsonb(%s::text)) where version_id = %s",
            [bad, version],
        )
        await conn.execute("update dag set name = %s where name = 'plain'", [bad])
        return run_id

    run_id = site.do(prepare)
    page = visit("/runs")
    for path in (
        *("/runs", "/queues", "/audit", "/dags", "/"),
        *(f"/runs/{run_id}{tab}" for tab in ("", "?tab=graph", "?tab=gantt", "?tab=log", "?tab=history")),
    ):
        page.goto(site.url + path)
        expect(page.locator("h1")).to_be_visible()
        assert page.locator("main img").count() == 0 and page.title() != "owned", path
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280, path
    page.goto(f"{site.url}/runs/{run_id}")
    page.locator("#run-tasks a.name").click()
    expect(page.locator("h1")).to_contain_text("<img src=x onerror=")


def test_rows_are_selected_by_keyboard_and_changed_together(visit: Visitor, site: Site) -> None:
    async def prepare(conn: AsyncConnection) -> list[int]:
        await put(conn, make_dag("together", {"a": []}, task_queue="together"))
        return [await start(conn, "together") for _ in range(3)]

    run_ids = site.do(prepare)
    page = visit("/runs?dag=together", "operator")
    bar = page.locator("[data-bulk]")
    expect(bar).to_be_hidden()
    page.get_by_label("Select all runs on this page").focus()
    page.keyboard.press("Space")
    expect(bar).to_contain_text("3 selected")
    page.get_by_label(f"Select run {run_ids[0]}").uncheck()
    expect(bar).to_contain_text("2 selected")
    site.do(lambda conn: start(conn, "together"))
    expect(page.locator("[data-row]")).to_have_count(4)
    expect(page.locator("[name=chosen]:checked")).to_have_count(2)
    bar.get_by_role("button", name="Cancel").click()
    page.locator("dialog[open]").get_by_role("button", name="Cancel").click()
    expect(page.locator(".toast")).to_contain_text("2 of 2 runs canceled.")
    expect(page.locator("[data-row] .s-canceled")).to_have_count(2)
    expect(bar).to_be_hidden()


def test_the_time_zone_of_all_times_is_selected_in_the_menu(visit: Visitor, site: Site) -> None:
    page = visit(f"/runs/{site.runs['orders'][3]}", "viewer", timezone_id="Europe/Berlin", locale="en-GB")
    started = page.locator("#run-tasks time").first
    expect(page.locator("[data-zone-name]")).to_have_text("Europe/Berlin")
    here = int(started.inner_text().split(":")[0][-2:])
    zones = page.get_by_label("Time zone")
    zones.focus()
    zones.select_option("Asia/Tokyo")
    expect(page.locator("[data-zone-name]")).to_have_text("Asia/Tokyo")
    there = int(page.locator("#run-tasks time").first.inner_text().split(":")[0][-2:])
    assert (there - here) % 24 in (7, 8)
    zones.select_option("")
    expect(page.locator("[data-zone-name]")).to_have_text("Europe/Berlin")
