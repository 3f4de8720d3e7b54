"""Pages of runs, tasks and what they need, over HTTP: everyone sees what their role may, and every button does what it says."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import httpx
import pytest
from psycopg import AsyncConnection

from evertick.api.auth import CSRF_HEADER, PLAIN_COOKIE, csrf_of
from evertick.db.queries import accounts, backfills, gates, logs, runners, tasks
from evertick.db.queries.logs import NewChunk
from evertick.domain.access import Actor
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.engine.gates import set_pool
from tests.engine.world import Runner, make_dag, put, run_state, start, states
from tests.ui.site import Site

Sign = Callable[[str], httpx.Client]


@pytest.fixture
def sign(site: Site) -> Iterator[Sign]:
    """Somebody's browser, without the browser."""
    made: list[httpx.Client] = []

    def client(who: str) -> httpx.Client:
        secret = site.sessions[who]
        headers = {"Accept": "text/html", CSRF_HEADER: csrf_of(secret), "Origin": site.url}
        made.append(httpx.Client(base_url=site.url, headers=headers, cookies={PLAIN_COOKIE: secret}, timeout=30))
        return made[-1]

    yield client
    for each in made:
        each.close()


def said(answer: httpx.Response) -> str:
    """What the page's message says."""
    events = json.loads(answer.headers["HX-Trigger"])
    (detail,) = events.values()
    return str(detail["text"])


def shown(answer: httpx.Response) -> str:
    assert answer.status_code == 200, (answer.url, answer.status_code, answer.text[:500])
    return answer.text


def run_of(site: Site, dag: str, shape: dict[str, list[str]], **options: object) -> int:
    async def make(conn: AsyncConnection) -> int:
        await put(conn, make_dag(dag, shape, **options))
        return await start(conn, dag)

    return site.do(make)


def drain(site: Site, outcomes: dict[str, str] | None = None, queue: str = "default") -> None:
    """Somebody runs what is ready in a queue of the test's own."""

    async def work(conn: AsyncConnection) -> None:
        runner = await Runner.join(conn, queues=(queue,))
        claims = await runner.claim(queues=(queue,))
        while claims:
            for claim in claims:
                (name,) = [
                    row.task for row in await tasks.list_of_run(conn, run_id=claim.run_id) if row.idx == claim.idx
                ]
                await runner.finish(claim, (outcomes or {}).get(name, "success"), no_retry=True)
            claims = await runner.claim(queues=(queue,))
        await runners.leave(conn, runner.session)

    site.do(work)


def states_of(site: Site, run_id: int) -> dict[str, str]:
    return site.do(lambda conn: states(conn, run_id))


def test_what_a_role_may_not_press_the_server_refuses(site: Site, sign: Sign) -> None:
    run_id = site.runs["orders"][3]
    viewer = sign("viewer")
    for path in (
        f"/runs/{run_id}/cancel",
        f"/runs/{run_id}/clear",
        f"/runs/{run_id}/tasks/load/mark",
        "/backfills",
        "/backfills/preview",
        "/pools",
        "/runners/x/drain",
        "/users",
    ):
        answer = viewer.post(path)
        assert answer.status_code == 403 and "lacks the permission" in said(answer), path
    assert sign("operator").post("/pools", data={"name": "p", "slots": "1"}).status_code == 403
    limited = sign("limited")
    other = site.runs["web_logs"][0]
    assert limited.get(f"/runs/{other}").status_code == 404
    assert limited.get(f"/runs/{other}/tasks/load/log").status_code == 404
    assert limited.post(f"/runs/{other}/clear", data={"which": "all"}).status_code == 404
    assert f'href="/runs/{other}"' not in shown(limited.get("/runs"))
    no_token = httpx.post(
        f"{site.url}/runs/{run_id}/clear",
        cookies={PLAIN_COOKIE: site.sessions["admin"]},
        data={"which": "all"},
        timeout=30,
    )
    assert no_token.status_code == 403 and "CSRF" in said(no_token)


def test_strangers_are_led_to_the_login(site: Site) -> None:
    answer = httpx.get(f"{site.url}/runs/1?tab=graph", headers={"Accept": "text/html"}, timeout=30)
    assert (answer.status_code, answer.headers["location"]) == (303, "/login?next=%2Fruns%2F1%3Ftab%3Dgraph")


def test_what_is_not_there_is_said(site: Site, sign: Sign) -> None:
    client = sign("admin")
    run_id = site.runs["orders"][0]
    for path, word in (
        (f"/runs/{2**60}", "There is no run"),
        (f"/runs/{run_id}/tasks/nothing", "has no task"),
        (f"/runs/{run_id}/tasks/load?map_index=7", "has no task"),
        ("/backfills/99", "There is no backfill"),
        ("/pools/none", "There is no pool"),
        ("/keys/none", "There is no key"),
        ("/backfills/new?dag=none", "There is no DAG"),
    ):
        answer = client.get(path)
        assert answer.status_code == 404 and word in answer.text, path
    assert client.get("/runs/x").status_code == 400
    assert client.get(f"/runs/{run_id}/tasks/load/log?at=x").status_code == 400
    assert client.get("/runs?cursor=x").status_code == 400


def test_clear_shows_what_it_touches_and_touches_that(site: Site, sign: Sign) -> None:
    run_id = run_of(site, "clears", {"a": [], "b": ["a"], "c": ["b"], "d": ["a"]}, task_queue="clears")
    drain(site, {"b": "failed"}, "clears")
    assert states_of(site, run_id) == {"a": "success", "b": "failed", "c": "upstream_failed", "d": "success"}
    client = sign("operator")
    path = f"/runs/{run_id}/clear"
    failed = shown(client.get(path, params={"which": "failed"}))
    assert "2 tasks run" in failed and "<bdi>a</bdi>" not in failed and "<bdi>c</bdi>" in failed
    assert "4 tasks run" in shown(client.get(path, params={"which": "all"}))
    assert "1 task runs" in shown(client.get(path, params={"which": "named", "task": "d"}))
    assert client.post(path, data={"which": "named"}).status_code == 400
    assert client.post(path, data={"which": "named", "task": "zz"}).status_code == 404
    answer = client.post(path, data={"which": "failed"})
    assert (answer.status_code, said(answer)) == (204, f"2 tasks of run {run_id} cleared.")
    assert states_of(site, run_id) == {"a": "success", "b": "available", "c": "waiting", "d": "success"}
    assert "clear" in shown(client.get(f"/runs/{run_id}?tab=history"))


def test_mark_and_cancel_do_what_they_say(site: Site, sign: Sign) -> None:
    run_id = run_of(site, "marks", {"a": [], "b": ["a"]}, task_queue="marks")
    client = sign("operator")
    preview = shown(client.get(f"/runs/{run_id}/tasks/a/mark"))
    assert "1 downstream task" in preview and "<bdi>b</bdi>" in preview
    assert client.post(f"/runs/{run_id}/tasks/a/mark", data={"state": "running"}).status_code == 400
    answer = client.post(f"/runs/{run_id}/tasks/a/mark", data={"state": "success", "map_index": "-1"})
    assert said(answer) == f"a of run {run_id} marked success."
    assert states_of(site, run_id) == {"a": "success", "b": "available"}
    assert 'data-opens="cancel"' in shown(client.get(f"/runs/{run_id}"))
    answer = client.post(f"/runs/{run_id}/cancel", data={"reason": "wrong <b>rows</b>"})
    assert said(answer) == f"Run {run_id} canceled."
    text = shown(client.get(f"/runs/{run_id}"))
    assert "wrong &lt;b&gt;rows&lt;/b&gt;" in text and 'data-opens="cancel"' not in text
    assert client.post(f"/runs/{run_id}/cancel").status_code == 409


def test_why_a_task_does_not_run_is_on_its_page(site: Site, sign: Sign) -> None:
    run_id = run_of(site, "waits", {"a": [], "b": ["a"]}, task_queue="nobody_serves")
    text = shown(sign("viewer").get(f"/runs/{run_id}/tasks/b"))
    assert "Why it is not running" in text and "it waits for a, which is available" in text
    assert "no live runner serves queue nobody_serves" in text


def test_the_log_of_a_task_comes_in_windows(site: Site, sign: Sign) -> None:
    run_id = site.runs["orders"][2]

    async def write(conn: AsyncConnection) -> None:
        chunks = [
            NewChunk(
                TaskKey(run_id, 0, -1), 1, 100 * n, 100 * n + 100, f"1700000000{n:06d} INFO <script>{n}</script>\n"
            )
            for n in range(700)
        ]
        await logs.append(conn, session=1, chunks=chunks)

    site.do(write)
    client = sign("viewer")
    path = f"/runs/{run_id}/tasks/extract.orders"
    page = shown(client.get(path))
    assert "&lt;script&gt;699&lt;/script&gt;" in page and "<script>19" not in page
    first = client.get(f"{path}/log").json()
    assert [line["text"] for line in first["lines"]][:2] == ["<script>0</script>", "<script>1</script>"]
    assert (first["is_over"], first["is_end"], first["sizes"]) == (True, False, [[1, 70000, 69900]])
    rest = client.get(f"{path}/log", params={"at": first["next"]}).json()
    more = client.get(f"{path}/log", params={"at": rest["next"]}).json()
    assert len(first["lines"]) + len(rest["lines"]) + len(more["lines"]) == 700 and more["is_end"]
    tail = client.get(f"{path}/log", params={"back": "1"}).json()
    assert tail["lines"][-1]["text"] == "<script>699</script>" and tail["next"] == more["next"]
    assert [line["text"] for line in client.get(f"{path}/log", params={"find": ">7<"}).json()["lines"]] == [
        "<script>7</script>"
    ]


def test_a_backfill_is_looked_at_made_paused_and_canceled(site: Site, sign: Sign) -> None:
    client = sign("operator")
    assert "main" in shown(client.get("/backfills/new", params={"dag": "billing"}))
    form = {"dag": "billing", "first": "2026-01-05T00:00", "last": "2026-01-06T00:00", "schedule": "main"}
    assert '<strong class="num">1 run</strong>' in shown(client.post("/backfills/preview", data=form))
    wrong = {**form, "first": "soon"}
    assert "From: enter a date and time" in shown(client.post("/backfills/preview", data=wrong))
    assert "no DAG" in shown(client.post("/backfills/preview", data={**form, "dag": "none"}))
    assert "JSON object" in shown(client.post("/backfills/preview", data={**form, "params": "[1]"}))
    assert client.post("/backfills", data=wrong).status_code == 400
    answer = client.post("/backfills", data={**form, "parallel": "2"})
    assert answer.status_code == 204
    address = answer.headers["HX-Redirect"]
    text = shown(client.get(address))
    assert "0 of 1 done" in text and "Pause" in text
    assert said(client.post(f"{address}/pause")).endswith("until it is resumed.")
    assert said(client.post(f"{address}/resume")).endswith("resumed.")
    assert "canceled" in said(client.post(f"{address}/cancel", data={"leaves_runs": "true"}))
    number = int(address.rpartition("/")[2])
    row = site.do(lambda conn: backfills.find(conn, number))
    assert row is not None and (row.state, row.parallel, row.created_by) == ("canceled", 2, "user:operator")
    assert address in shown(client.get("/backfills"))
    assert "New backfill" not in shown(sign("viewer").get("/backfills"))


def test_pools_are_set_and_show_who_holds_them(site: Site, sign: Sign) -> None:
    site.do(lambda conn: set_pool(conn, name="narrow", slots=1, actor=Actor("test")))
    gate = GateSpec(kind=GateKind.POOL, name="narrow")
    run_of(site, "pooled", {"one": [], "two": []}, task_queue="pooled", task_gates=(gate,))
    editor = sign("editor")
    text = shown(editor.get("/pools/narrow"))
    assert text.count("<bdi>pooled</bdi>") == 2 and "1 of 1 slots used" in text
    assert said(editor.post("/pools", data={"name": "narrow", "slots": "2"})) == "Pool narrow changed: 2 slots."
    found = site.do(lambda conn: gates.list_gates(conn, kinds=["pool"]))
    assert [(row.name, row.slots, row.used) for row in found] == [("narrow", 2, 2)]
    assert editor.post("/pools", data={"name": "narrow", "slots": "many"}).status_code == 400
    assert editor.post("/pools", data={"name": "", "slots": "1"}).status_code == 400
    assert editor.post("/pools/narrow/delete").status_code == 409
    assert said(editor.post("/pools", data={"name": "spare", "slots": "0"})) == "Pool spare created: 0 slots."
    assert editor.post("/pools/spare/delete").headers["HX-Redirect"] == "/pools"
    assert "New pool" not in shown(sign("operator").get("/pools"))


def test_a_runner_is_drained_and_takes_work_again(site: Site, sign: Sign) -> None:
    runner = site.do(lambda conn: Runner.join(conn, queues=("drained",)))
    name = f"r{runner.session}"
    client = sign("operator")
    assert name in shown(client.get("/runners")) and "drained" in shown(client.get("/queues"))
    assert "takes no new work" in said(client.post(f"/runners/{name}/drain"))
    assert "draining" in shown(client.get("/runners"))
    assert "takes new work again" in said(client.post(f"/runners/{name}/undrain"))
    assert "then shuts down" in said(client.post(f"/runners/{name}/drain", data={"then_leave": "true"}))
    assert client.post("/runners/nobody/drain").status_code == 404
    assert "Drain" not in shown(sign("viewer").get("/runners"))


def test_users_are_added_changed_linked_and_disabled(site: Site, sign: Sign) -> None:
    client = sign("admin")
    assert (
        said(client.post("/users", data={"name": "eve <i>", "role": "viewer", "tags": "a, b"})) == "User eve <i> added."
    )
    assert client.post("/users", data={"name": "eve <i>", "role": "viewer"}).status_code == 409
    assert client.post("/users", data={"name": "bob", "role": "king"}).status_code == 400
    text = shown(client.get("/users"))
    assert "eve &lt;i&gt;" in text and "<i>" not in text
    assert said(client.post("/users/eve %3Ci%3E", data={"role": "operator", "tags": ""})).endswith("changed.")
    row = site.do(lambda conn: accounts.find_account(conn, "eve <i>"))
    assert row is not None and (row.role, row.tags) == ("operator", None)
    link = shown(client.post("/users/eve %3Ci%3E/link"))
    found = re.search(r"http://[^<]+/auth/link/evl_[\w-]+", link)
    assert found and httpx.get(found[0], headers={"Accept": "text/html"}, timeout=30).status_code == 200
    assert "disabled" in said(client.post("/users/eve %3Ci%3E/disable"))
    assert said(client.post("/users/eve %3Ci%3E/enable")) == "User eve <i> enabled."
    assert client.post("/users/admin/disable").status_code == 409, "the last admin stays"


def test_a_token_is_shown_once_and_never_may_more_than_its_maker(site: Site, sign: Sign) -> None:
    client = sign("operator")
    text = shown(client.post("/tokens", data={"name": "script", "role": "viewer", "days": "1"}))
    found = re.search(r"evt_[\w-]+", text)
    assert found
    headers = {"Authorization": f"Bearer {found[0]}"}
    assert httpx.get(f"{site.url}/api/v1/dags", headers=headers, timeout=30).status_code == 200
    assert httpx.post(f"{site.url}/api/v1/dags/archive/unpause", headers=headers, timeout=30).status_code == 403
    listed = shown(client.get("/tokens"))
    assert (
        found[0] not in listed and "script" in listed and "admin" not in re.sub(r"(?s)<header.*?</header>", "", listed)
    )
    number = re.search(r'hx-post="/tokens/(\d+)/revoke"[^>]*hx-confirm="Revoke script', listed)
    assert number
    assert sign("viewer").post(f"/tokens/{number[1]}/revoke").status_code == 404
    assert "Revoked" in said(client.post(f"/tokens/{number[1]}/revoke"))
    assert httpx.get(f"{site.url}/api/v1/dags", headers=headers, timeout=30).status_code == 401
    assert client.post("/tokens", data={"name": "x", "days": "soon"}).status_code == 400


def test_variables_and_connections_are_set_and_secrets_stay_hidden(site: Site, sign: Sign) -> None:
    client = sign("editor")
    answer = client.post("/variables", data={"name": "region", "value": "eu\r\n<b>", "description": "Where."})
    assert (said(answer), answer.headers["HX-Redirect"]) == ("Variable region created.", "/variables/region")
    assert "eu\n&lt;b&gt;" in shown(client.get("/variables/region")) and "Where." in shown(client.get("/variables"))
    address = "postgresql://anna:hunter22@db:5432/shop"
    assert said(client.post("/connections", data={"name": "shop", "value": address})) == "Connection shop created."
    text = shown(sign("operator").get("/connections/shop"))
    assert "postgresql://anna:***@db:5432/shop" in text and "hunter22" not in text and "New URL" not in text
    assert client.post("/connections", data={"name": "shop", "value": "nowhere"}).status_code == 400
    assert client.post("/variables", data={"name": "a b", "value": "x"}).status_code == 400
    assert client.post("/variables", data={"name": "empty", "value": ""}).status_code == 400
    assert client.get("/variables/none").status_code == 404
    assert sign("operator").post("/variables", data={"name": "x", "value": "y"}).status_code == 403
    assert client.post("/variables/region/delete").headers["HX-Redirect"] == "/variables"
    assert client.post("/variables/region/delete").status_code == 404


def test_the_audit_log_is_searched(site: Site, sign: Sign) -> None:
    client = sign("admin")
    site.do(
        lambda conn: accounts.note(
            conn,
            verb="refuse",
            actor=Actor("user:<b>mallory</b>"),
            detail={"why": "<script>1</script>", "is_new": True, "tags": ["a", "b"], "role": None},
        )
    )
    text = shown(client.get("/audit", params={"verb": "refuse"}))
    assert "&lt;b&gt;mallory" in text and "<script>1" not in text
    assert "why &lt;script&gt;1&lt;/script&gt;; tags a, b; is new</bdi>" in text
    assert "No entries match" in shown(client.get("/audit", params={"actor": "user:nobody-at-all"}))


def test_runs_are_listed_by_dag_and_state(site: Site, sign: Sign) -> None:
    client = sign("viewer")
    failed = shown(client.get("/runs", params={"dag": "billing", "state": "failed"}))
    states_now = {
        run_id: site.do(lambda conn, run_id=run_id: run_state(conn, run_id)) for run_id in site.runs["billing"]
    }
    expected = {str(run_id) for run_id, state in states_now.items() if state == "failed"}
    assert expected and set(re.findall(r'data-row="(\d+)"', failed)) == expected
