"""Runs, tasks and logs in a real browser: what changes is shown without a reload, and buttons say beforehand what they touch."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect
from psycopg import AsyncConnection

from evertick.store import runners
from tests.engine.world import Runner, make_dag, put, start, states
from tests.ui.conftest import Visitor
from tests.ui.site import Site
from tests.ui.test_pages import PICTURES

HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=document.title='owned'>",
    "\u202egnp.exe\u202c and \u2066hidden\u2069",
    "\x1b[31mred\x1b[0m \x1b[1;44mbold\x1b[0m plain",
    "&lt;b&gt; {{ 7 * 7 }} ${1}",
    "x" * 3000,
)


# What the log in the pictures says.
SAID = (
    ("INFO", "reading s3://orders/2026-11-15/*.parquet"),
    ("INFO", "\x1b[32m14 files\x1b[0m, 1,204,511 rows"),
    ("WARNING", "2 files are empty and left out"),
    ("OUT", "loaded   0 %"),
    ("OUT", "loaded  50 %"),
    ("ERROR", "ValueError: no rows for shop 17"),
    ("ERROR", '  File "orders.py", line 41, in load'),
    ("MARK", "the attempt ended with exit status 1"),
)


def failed_run(site: Site) -> int:
    """A run in which `load` failed."""
    for run_id in site.runs["billing"]:
        if site.do(lambda conn, run_id=run_id: states(conn, run_id))["load"] == "failed":
            return run_id
    raise AssertionError("the site has no failed run")


def pages_of(site: Site, failed: int) -> dict[str, str | None]:
    """Every page of ours with the name of its picture, if it has one."""
    return {
        f"/runs/{failed}": "run",
        f"/runs/{failed}?tab=graph": "run-graph",
        f"/runs/{failed}?tab=gantt": "run-gantt",
        f"/runs/{failed}?tab=history": None,
        f"/runs/{failed}/tasks/load": "task-log",
        f"/runs/{failed}/tasks/load?tab=attempts": None,
        f"/runs/{failed}/tasks/load?tab=details": None,
        "/runs": None,
        "/dags/orders/graph": None,
        "/dags/orders/calendar": None,
        "/dags/orders/durations": None,
        "/backfills/new?dag=billing": None,
        "/approvals": None,
        "/backfills": None,
        "/pools": None,
        "/keys": None,
        "/queues": None,
        "/runners": None,
        "/variables": None,
        "/users": None,
        "/tokens": None,
        "/audit": None,
    }


def write_log(site: Site, run_id: int, idx: int, lines: Iterable[tuple[str, str]], *, offset: int = 0) -> int:
    """One chunk, as if the attempt had written it; where the next begins."""
    now = int(time.time() * 1e6)
    content = "".join(f"{now + 1000 * n} {level} {text}\n" for n, (level, text) in enumerate(lines))
    end = offset + len(content.encode())

    async def put_chunk(conn: AsyncConnection) -> None:
        await conn.execute(
            "insert into log_chunk (run_id, idx, map_index, epoch, seq, until, content) values (%s, %s, -1, 1, %s, %s, %s)",
            [run_id, idx, offset, end, content],
        )

    site.do(put_chunk)
    return end


def info(texts: Iterable[str]) -> list[tuple[str, str]]:
    return [("INFO", text) for text in texts]


def findings(page: Page, rules: list[str] | None = None) -> list[str]:
    """What axe finds serious; of some rules only, if they are named."""
    # Only what is wrong is worked out: that halves the time.
    options: dict[str, object] = {"resultTypes": ["violations"]}
    if rules is not None:
        options["runOnly"] = {"type": "rule", "values": rules}
    report = Axe().run(page, options=options).response
    return [
        f"{each['id']}: {node['html'][:160]} {node.get('failureSummary', '')[:200]}"
        for each in report["violations"]
        if each["impact"] in ("serious", "critical")
        for node in each["nodes"][:3]
    ]


def ready(page: Page, what: str) -> None:
    expect(page.locator(f"[data-{what}]")).to_have_attribute("data-ready", "yes")


def test_every_page_can_be_read_by_everybody(visit: Visitor, site: Site) -> None:
    """In dark only what colours decide is looked at again."""
    failed = failed_run(site)
    write_log(site, failed, 4, SAID)
    page = visit("/runs")
    wrong = {}
    for path, picture in pages_of(site, failed).items():
        page.emulate_media(color_scheme="light")
        page.goto(site.url + path)
        expect(page.locator("h1")).to_be_visible()
        for what in ("graph", "log"):
            if page.locator(f"[data-{what}]").count():
                ready(page, what)
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
            if found := findings(page, rules=None if scheme == "light" else ["color-contrast"]):
                wrong[f"{path} {scheme}"] = found
            if picture and (scheme == "light" or picture == "run") and os.environ.get("EVERTICK_PICTURES"):
                page.screenshot(path=PICTURES / f"ui-{picture}-{scheme}.png")
    assert wrong == {}


def test_nothing_is_wider_than_a_phone(visit: Visitor, site: Site) -> None:
    page = visit("/runs", phone=True)
    wide = {}
    for path in pages_of(site, failed_run(site)):
        page.goto(site.url + path)
        if (width := page.evaluate("document.documentElement.scrollWidth")) > 390:
            wide[path] = width
    assert wide == {}


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
    page.get_by_label("Why").fill("not needed")
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
    end = write_log(site, run_id, 0, info(["it goes on"]), offset=end)
    expect(lines.last).to_contain_text("it goes on")
    write_log(site, run_id, 0, [("ERROR", "it broke")], offset=end)
    expect(lines.last).to_contain_text("it broke")
    page.keyboard.press("/")
    page.keyboard.type("goes")
    expect(lines).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("e")
    expect(page.locator(".log-found")).to_contain_text("it broke")
    expect(lines).to_have_count(len(HOSTILE) + 2)


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
        *(f"/runs/{run_id}{tab}" for tab in ("", "?tab=graph", "?tab=gantt", "?tab=history")),
    ):
        page.goto(site.url + path)
        expect(page.locator("h1")).to_be_visible()
        assert page.locator("main img").count() == 0 and page.title() != "owned", path
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280, path
    page.goto(f"{site.url}/runs/{run_id}")
    page.locator("#run-tasks a.name").click()
    expect(page.locator("h1")).to_contain_text("<img src=x onerror=")
