"""Whatever somebody puts into a name, a text or an error is shown as text: by every page, and in a real browser."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest
from playwright.sync_api import expect
from psycopg import AsyncConnection

from evertick.db.queries import dags
from evertick.domain.dags.params import Param, declare_params
from tests.engine.world import make_dag, put, start
from tests.ui.conftest import Visitor
from tests.ui.hostile import CORPUS
from tests.ui.page_table import furnish
from tests.ui.site import HttpVisitor, Site

# Besides those that everybody has: pages of the DAG that is full of such texts.
OF_HOSTILE = ["/dags?q=hostile", "/dags/hostile", "/dags/hostile/details", "/dags/hostile/trigger", "/runs?dag=hostile"]
# What is written by people and shown as a whole: into these places of the database, and then on these pages.
PLACES = {
    "update note set content = %s": [r"/runs/\d+", r"/runs/\d+/tasks/load"],
    "update approval set title = %s": ["/", "/approvals", r"/runs/\d+/tasks/wait/approval"],
    "update stored_value set description = %s": ["/variables", "/connections", "/secrets", "/secrets/api_token"],
    "update backfill set reason = %s, created_by = 'b'": [r"/backfills/\d+"],
    "update credential set name = %s": ["/tokens"],
    "update account set created_by = %s": ["/users"],
    "update runner set host = %s": ["/runners"],
    "update run_status set reason = %s where state = 'failed'": [r"/runs/\d+\?tab=history"],
    "update task set reason = %s where state = 'failed'": [r"/runs/\d+/tasks/load\?tab=attempts"],
    "update result set value = to_jsonb(%s::text)": [],
    "update audit_log set detail = jsonb_build_object('why', %s::text), actor = 'user:x'": [],
}


class _Dangers(HTMLParser):
    """What a browser would run or load, and what it would show."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        known = {"script", "link", "meta", "base", "iframe", "object", "form", "math"}
        names = dict(attributes)
        if tag in known - {"script", "link", "meta", "form"} or any(name.startswith("on") for name in names):
            self.found.append(f"<{tag} {attributes}>")
        if tag == "script" and not (names.get("src") or "").startswith("/static/"):
            self.found.append(f"<script {attributes}>")
        for name in ("href", "src", "action", "hx-get", "hx-post"):
            address = names.get(name)
            is_other_cell = address is not None and address.startswith(CELL)
            if address is not None and not address.startswith(("/", "#", "?")) and not is_other_cell:
                self.found.append(f"<{tag} {name}={address[:80]}>")

    def handle_data(self, data: str) -> None:
        self.text.append(data)


# The installation that the operator has named next to this one.
CELL = "https://b.example/"
PLAIN = [each.replace("\x00", "") for each in CORPUS]


async def infest(conn: AsyncConnection) -> None:
    """Every text into every place where somebody else's stands on these pages."""
    params = declare_params(
        {f"p{place}": Param(text[:500], description=text) for place, text in enumerate(PLAIN[:190])}
    )
    tags = tuple(dict.fromkeys(text[:90] for text in PLAIN if text.strip() and text[:90].isprintable()))[:45]
    shape: dict[str, list[str]] = {f"task{place}": [] for place in range(len(PLAIN))}
    docs = {f"task{place}": {"doc": text, "summary": text} for place, text in enumerate(PLAIN)}
    everything = "\n".join(PLAIN)
    await put(conn, make_dag("hostile", shape, params=params, tags=tags, description=everything, per_task=docs))
    run_id = await start(conn, "hostile", key=PLAIN[0])
    ended = "state = 'failed', open_tasks = 0, started_at = clock(), finished_at = clock()"
    await conn.execute(f"update run_status set {ended}, reason = %s where run_id = %s", [everything, run_id])
    for place, text in enumerate(PLAIN):
        await dags.put_import_error(conn, file=f"{place} {text}", line=place, message=text, detail=text)
    first = "(select c.schedule_id from schedule c join dag d on d.dag_id = c.dag_id where d.name = 'orders')"
    await conn.execute(f"update schedule_state set error = %s where schedule_id = {first}", [everything])
    await conn.execute("update schedule set changed_by = %s, origin = 'user'", [PLAIN[1]])
    await conn.execute("update shard set leader = %s", [PLAIN[2]])
    await conn.execute("update runner set runner_id = %s", [PLAIN[3]])


async def infest_places(conn: AsyncConnection) -> None:
    for statement in PLACES:
        await conn.execute(statement, ["\n".join(PLAIN)])


@pytest.mark.long
def test_hostile_texts_are_shown_as_text_everywhere(site: Site, visit: Visitor) -> None:
    pages = [*furnish(site), *OF_HOSTILE]
    site.do(infest)
    site.do(infest_places)
    whole = [path for path in pages for one in PLACES.values() if any(re.fullmatch(each, path) for each in one)]
    assert len(whole) >= sum(map(len, PLACES.values()))
    shown = ""
    with HttpVisitor(site, "admin") as admin:
        for path in pages:
            text = _read(admin, path)
            shown += text
            if path in whole:
                seen = _seen(text)
                assert [text for text in PLAIN if text.strip() and _seen(text) not in seen] == [], path
        for text in PLAIN[::8]:
            _read(admin, "/dags", q=text[:200], tag=text[:100])
    seen = _seen(shown)
    assert [text for text in PLAIN if text.strip() and _seen(text) not in seen] == []

    page = visit("/", "admin")
    for path in dict.fromkeys(["/", *OF_HOSTILE, *whole]):
        page.goto(site.url + path)
        expect(page.locator("h1")).to_be_visible()
        assert page.evaluate("window.isHurt === undefined"), path
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), path
    # Also what an answer makes the page say.
    said = {"detail": {"text": "".join(PLAIN)}}
    page.evaluate("said => document.dispatchEvent(new CustomEvent('evertick:failed', said))", said)
    expect(page.locator(".toast")).to_contain_text("<script>")
    assert page.evaluate("window.isHurt === undefined")


def _read(admin: HttpVisitor, path: str, **query: str) -> str:
    """What a page shows, if nothing in it is more than text."""
    answer = admin.get(path, params=query or None)
    assert answer.status_code == 200, (path, query)
    parser = _Dangers()
    parser.feed(answer.text)
    assert parser.found == [], (path, query)
    return "".join(parser.text)


def _seen(text: str) -> str:
    """As a browser shows it: every run of white space is one space."""
    return re.sub(r"\s+", " ", text).strip()
