"""Pages by plain HTTP: as every role, with bad input, and with everything that somebody could smuggle into a name."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator

import httpx
import pytest
from psycopg import AsyncConnection

from evertick.api.auth import csrf_of
from evertick.db.queries import dags
from tests.engine.world import make_dag, put
from tests.ui.site import HttpVisitor, Site

PAGES = [
    "/",
    "/dags",
    "/dags/orders",
    "/dags/orders/schedules",
    "/dags/orders/versions",
    "/dags/orders/code",
    "/dags/orders/details",
]


@pytest.fixture
def admin(site: Site) -> Iterator[HttpVisitor]:
    with HttpVisitor(site, "admin") as visitor:
        yield visitor


def test_who_is_limited_to_tags_sees_only_their_dags(site: Site) -> None:
    with HttpVisitor(site, "limited") as visitor:
        for path in ("/", "/dags"):
            seen = visitor.get(path).raise_for_status().text
            assert "orders" in seen and "web_logs" not in seen and "runner-1" not in seen and "scheduler-1" not in seen
        assert visitor.get("/dags/web_logs").status_code == 404
        assert visitor.get("/dags", params={"tag": "web"}).raise_for_status().text.count("data-row") == 0


def test_strangers_are_led_to_the_login_and_back_to_nowhere_else(site: Site) -> None:
    with HttpVisitor(site, None) as nobody:
        answer = nobody.get("/dags/orders", params={"task": "load"})
        assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fdags%2Forders%3Ftask%3Dload")
        assert 'value="/"' in nobody.get("/login", params={"next": "//evil.example"}).text
        pressed = nobody.press("/dags/orders/pause")
        assert pressed.status_code == 401 and "evertick:signed-out" in pressed.headers["hx-trigger"]
        foreign = nobody.post(
            "/login", data={"username": "a", "password": "b"}, headers={"Origin": "https://evil.example"}
        )
        assert foreign.status_code == 403
        assert nobody.post("/login", data={"username": "", "password": ""}).status_code == 401


def test_each_page_leads_to_the_same_page_of_another_installation(admin: HttpVisitor) -> None:
    """To its first page where the other one need not have this one."""
    assert 'href="https://b.example/runners"' in admin.get("/runners").text
    assert 'href="https://b.example/"' in admin.get("/dags/orders").text


def test_a_change_needs_the_sessions_token(site: Site, admin: HttpVisitor) -> None:
    assert admin.press("/dags/archive/unpause", csrf="").status_code == 403
    assert admin.press("/dags/archive/unpause", csrf=csrf_of("another")).status_code == 403
    row = site.do(lambda conn: dags.find(conn, "archive"))
    assert row is not None and row.paused


def test_every_answer_has_the_strict_policy_and_assets_are_kept_for_ever(admin: HttpVisitor) -> None:
    for path in (*PAGES, "/login", "/dags/nothing", "/nothing"):
        answer = admin.get(path)
        assert "default-src 'none'; script-src 'self'" in answer.headers["content-security-policy"], path
        assert answer.headers["cache-control"] == "no-store" and answer.headers["x-content-type-options"] == "nosniff"
    assets = re.findall(r'(?:href|src)="(/static/[^"]+)"', admin.get("/").text)
    assert len(assets) >= 4
    for path in assets:
        assert "immutable" in admin.get(path).raise_for_status().headers["cache-control"]
    assert admin.get("/static/old/evertick.css").headers["cache-control"] == "no-store"
    assert admin.get("/static/x/..%2Fframe.py").status_code == 404
    assert admin.get("/static/x/vendor/VENDORED.toml").status_code == 404


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/dags/nothing", 404),
        ("/nothing", 404),
        ("/dags/orders?before=x", 400),
        ("/dags/orders/versions?from=99", 404),
        ("/dags/orders/code?file=../../etc/passwd", 404),
        ("/dags/orders/schedules/edit?name=nothing", 404),
        ("/dags?after=" + "x" * 300, 400),
        ("/dags?q=%00%25_%5C", 200),
        ("/dags?state=nonsense&tag=none", 200),
        ("/login?next=" + "x" * 3000, 400),
    ],
)
def test_a_wrong_address_is_a_page_that_says_so(admin: HttpVisitor, path: str, status: int) -> None:
    answer = admin.get(path)
    assert answer.status_code == status
    assert answer.headers["content-type"].startswith("text/html")
    assert "Traceback" not in answer.text and "<h1" in answer.text


def test_programs_still_get_documents(site: Site) -> None:
    with httpx.Client(base_url=site.url, timeout=30) as program:
        assert program.get("/nothing").json()["code"] == "not_found"
        assert program.get("/api/v1/nothing", headers={"Accept": "text/html"}).json()["status"] in (401, 404)


def test_forms_are_read_as_they_are_sent(admin: HttpVisitor) -> None:
    wrong = admin.press("/dags/report_by_hand/trigger", **{"p.limit": "many", "p.region": "{", "p.day": "yesterday"})
    assert wrong.status_code == 422
    assert wrong.text.count('aria-invalid="true"') == 3
    assert 'value="many"' in wrong.text
    headers = {"X-CSRF-Token": admin.csrf, "Content-Type": "application/x-www-form-urlencoded"}
    assert admin.post("/dags/report_by_hand/trigger", content=b"\xff=\xfe&%", headers=headers).status_code == 400
    many = "&".join(f"p.x{number}=1" for number in range(2000))
    assert admin.post("/dags/report_by_hand/trigger", content=many, headers=headers).status_code == 400
    preview = admin.press("/dags/orders/schedules/preview", when="0 25 * * *", timezone="Mars/Olympus")
    assert preview.status_code == 200 and "problem" in preview.text
    for name, when in (("", "@daily"), ("a b", "@daily"), ("new", ""), ("new", "@every 1ns")):
        refused = admin.press("/dags/orders/schedules/save", name=name, when=when, timezone="UTC", version="0")
        assert refused.status_code == 422 and 'role="alert"' in refused.text, (name, when)


def test_lists_come_in_pages_by_name(site: Site, admin: HttpVisitor) -> None:
    async def many(conn: AsyncConnection) -> None:
        for number in range(60):
            await put(conn, make_dag(f"paged-{number:03}", {"a": []}, tags=("paged",)))

    site.do(many)
    first = admin.get("/dags", params={"tag": "paged"}).text
    assert first.count("<tr data-row") == 50
    (more,) = re.findall(r'href="([^"]+)" rel="next"', first)
    second = admin.get(html.unescape(more)).text
    assert re.findall(r'<tr data-row="([^"]+)"', second) == [f"paged-{number:03}" for number in range(50, 60)]
    assert admin.get("/dags", params={"q": "D-00"}).text.count("<tr data-row") == 10
    assert admin.get("/dags", params={"state": "paused"}).text.count("<tr data-row") >= 1
    failed = re.findall(r'<tr data-row="([^"]+)"', admin.get("/dags", params={"state": "failed"}).text)
    assert failed == ["billing"]
