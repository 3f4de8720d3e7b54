"""Notes, secrets, versions and schedules on their pages: each is changed from end to end, and bad input is told."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from urllib.parse import quote

import httpx
import pytest
from psycopg import AsyncConnection

from evertick import Asset, after
from evertick.db.queries import dags, runners, schedules, shards
from evertick.domain.dags.spec import GroupSpec, NamedSchedule
from evertick.domain.schedules.spec import parse_schedule
from tests.engine.world import Runner, make_dag, put, run_state, start, value
from tests.ui.page_table import write_log
from tests.ui.site import HttpVisitor, Site


@pytest.fixture(scope="module")
def people(site: Site) -> Iterator[dict[str, HttpVisitor]]:
    with ExitStack() as stack:
        yield {who: stack.enter_context(HttpVisitor(site, who)) for who in site.sessions}


def said(answer: httpx.Response) -> str:
    (detail,) = json.loads(answer.headers["HX-Trigger"]).values()
    return str(detail["text"])


def rows_of(text: str) -> list[str]:
    return [html.unescape(each) for each in re.findall(r'<tr data-row="([^"]+)"', text)]


def test_notes_are_written_changed_and_taken_away(site: Site, people: dict[str, HttpVisitor]) -> None:
    run_id = site.runs["orders"][4]
    operator, viewer = people["operator"], people["viewer"]
    for path in (f"/runs/{run_id}", f"/runs/{run_id}/tasks/load"):
        assert said(operator.press(f"{path}/note", content=" <b>late</b>\r\nagain ")) == "Note saved."
        text = viewer.get(path).text
        assert "<bdi>&lt;b&gt;late&lt;/b&gt;\nagain</bdi>" in text and "user:operator" in text
        assert 'data-opens="note"' not in text and 'data-opens="note"' in operator.get(path).text
        assert operator.press(f"{path}/note", content="x" * 1001).status_code == 400
        assert said(operator.press(f"{path}/note", content="  ")) == "Note removed."
        assert "late" not in viewer.get(path).text
        assert viewer.press(f"{path}/note", content="mine").status_code == 403
    assert operator.press(f"/runs/{2**50}/note", content="x").status_code == 404
    assert operator.press(f"/runs/{run_id}/tasks/none/note", content="x").status_code == 404
    history = viewer.get(f"/runs/{run_id}?tab=history").text
    # The newest first, also of what one transaction did: that the run was created stands last of all.
    order = ["note removed", "run ended", "attempt 1 ended", "attempt 1 started", "run began", "run created"]
    assert sorted(order, key=history.index) == order
    of_load = viewer.get(f"/runs/{run_id}/tasks/load?tab=attempts").text
    assert of_load.count("note written") == 1, "that of the run is told on the run's page"


def test_an_asset_shows_who_updates_it_and_who_waits_and_is_told_of(site: Site, people: dict[str, HttpVisitor]) -> None:
    name, run_id = "s3://data/1 & more", site.runs["web_logs"][5]

    async def prepare(conn: AsyncConnection) -> None:
        await put(conn, make_dag("makes", {"t": []}, per_task={"t": {"outlets": (name,)}}))
        waits = NamedSchedule(name="main", spec=parse_schedule(after(Asset(name), Asset("never"))))
        await put(conn, make_dag("takes", {"t": []}, schedules=(waits,)))

    site.do(prepare)
    viewer, operator = people["viewer"], people["operator"]
    shown = viewer.get("/assets", params={"q": "DATA/1 &"}).raise_for_status().text
    assert rows_of(shown) == [name] and "Report update" not in shown
    assert 'href="/dags/makes"' in shown and 'href="/dags/takes"' in shown
    assert "Report update" in operator.get("/assets").text
    assert rows_of(viewer.get("/assets", params={"after": name}).text) == [], "by name, and this is the last one"
    assert "No asset name contains this" in viewer.get("/assets", params={"q": "nothing like it"}).text
    path = f"/assets/{quote(name, safe='')}/update"
    assert said(operator.press(path)) == f"Asset {name} updated. DAGs that depend on it are notified."
    assert viewer.press(path).status_code == 403 and operator.press("/assets/none/update").status_code == 404
    told = "select count(*) from asset_update where asset = %s and updated_by = 'user:operator'"
    assert site.do(lambda conn: value(conn, told, name)) == 1

    async def start_after_it(conn: AsyncConnection) -> None:
        await conn.execute(
            "insert into run_trigger (schedule_id, fire_at, kind, name, run_id, occurred_at)"
            " select schedule_id, fire_at, 'asset', %s, 1, fire_at from run where run_id = %s",
            [name, run_id],
        )

    site.do(start_after_it)
    page = html.unescape(viewer.get(f"/runs/{run_id}").raise_for_status().text)
    assert f'{name}</bdi>: <a href="/runs/1">run 1</a>' in page


def test_secrets_are_set_and_never_shown(people: dict[str, HttpVisitor]) -> None:
    editor, operator = people["editor"], people["operator"]
    made = editor.press("/secrets", name="token", value="hunter22 & more", description="Of the bank.")
    assert (said(made), made.headers["HX-Redirect"]) == ("Secret token created.", "/secrets/token")
    for path in ("/secrets", "/secrets/token"):
        text = operator.get(path).raise_for_status().text
        assert "token" in text and "Of the bank." in text and "hunter22" not in text
        assert "hunter22" not in editor.get(path).text and 'name="value"' not in text
    assert editor.press("/secrets", name="token", value="").status_code == 400
    assert editor.get("/secrets/none").status_code == 404
    assert operator.press("/secrets/token/delete").status_code == 403
    assert editor.press("/secrets/token/delete").headers["HX-Redirect"] == "/secrets"
    assert editor.get("/secrets/token").status_code == 404
    assert said(editor.press("/connections", name="old", value="ftp://host/x")) == "Connection old created."
    assert editor.press("/connections/old/delete").headers["HX-Redirect"] == "/connections"


def test_a_version_is_rolled_back_with_a_look_before(site: Site, people: dict[str, HttpVisitor]) -> None:
    async def twice(conn: AsyncConnection) -> None:
        await put(conn, make_dag("turned", {"a": []}))
        await put(conn, make_dag("turned", {"a": [], "newer": ["a"]}))

    site.do(twice)
    editor, path = people["editor"], "/dags/turned/versions/1/rollback"
    assert f'hx-get="{path}"' in editor.get("/dags/turned/versions").text
    assert "rollback" not in people["operator"].get("/dags/turned/versions").text
    preview = editor.get(path).raise_for_status().text
    assert "version 1 instead of 2" in preview and "newer" in preview and "watched folder" in preview
    assert people["operator"].press(path).status_code == 403
    answer = editor.press(path)
    assert (said(answer), answer.headers["HX-Redirect"]) == (
        "turned rolled back from version 2 to version 1.",
        "/dags/turned/versions",
    )
    row = site.do(lambda conn: dags.find(conn, "turned"))
    assert row is not None and row.number == 1
    assert editor.press(path).status_code == 409
    assert editor.press("/dags/turned/versions/9/rollback").status_code == 404
    assert people["limited"].get(path).status_code == 403


def test_dags_are_sorted_by_what_one_looks_for(site: Site, people: dict[str, HttpVisitor]) -> None:
    async def three(conn: AsyncConnection) -> None:
        now = datetime.now(UTC)
        for name, minutes, due_in in (("s_b", 3, 40), ("s_c", 9, None), ("s_a", 1, 20)):
            times: tuple[NamedSchedule, ...] = ()
            if due_in is not None:
                spec = parse_schedule("@every 1h", anchor_at=now + timedelta(minutes=due_in))
                times = (NamedSchedule(name="main", spec=spec),)
            await put(conn, make_dag(name, {"a": []}, schedules=times, tags=("sorted",)))
            run_id = await start(conn, name)
            ended = "state = 'success', open_tasks = 0, started_at = clock() - make_interval(mins => %s), finished_at = clock()"
            await conn.execute(f"update run_status set {ended} where run_id = %s", [minutes, run_id])
        await put(conn, make_dag("s_never", {"a": []}, tags=("sorted",)))

    site.do(three)
    viewer = people["viewer"]
    for sort, expected in {
        "": ["s_a", "s_b", "s_c", "s_never"],
        "-name": ["s_never", "s_c", "s_b", "s_a"],
        "-took": ["s_c", "s_b", "s_a", "s_never"],
        "took": ["s_a", "s_b", "s_c", "s_never"],
        "-newest": ["s_a", "s_c", "s_b", "s_never"],
        "next": ["s_a", "s_b", "s_c", "s_never"],
        "nonsense": ["s_a", "s_b", "s_c", "s_never"],
    }.items():
        text = viewer.get("/dags", params={"tag": "sorted", "sort": sort}).raise_for_status().text
        assert rows_of(text) == expected, sort
    assert 'aria-sort="descending"' in viewer.get("/dags?sort=-took").text
    assert rows_of(viewer.get("/dags?tag=sorted&sort=-took&skip=2").text) == ["s_a", "s_never"]
    assert viewer.get("/dags?sort=took&skip=-1").status_code == 400


def test_instants_are_edited_a_line_for_each(site: Site, people: dict[str, HttpVisitor]) -> None:
    listed = NamedSchedule(name="days", spec=parse_schedule(["2031-01-01T06:00:00Z", "2031-02-01T06:00:00Z"]))
    once = NamedSchedule(name="once", spec=parse_schedule("@once 2031-03-01T06:00:00Z"))
    site.do(lambda conn: put(conn, make_dag("listed", {"a": []}, schedules=(listed, once))))
    editor, path = people["editor"], "/dags/listed/schedules"
    form = editor.get(f"{path}/edit", params={"name": "days"}).raise_for_status().text
    (text,) = re.findall(r"<textarea[^>]*>([^<]*)</textarea>", form)
    assert text.splitlines() == ["2031-01-01T06:00:00Z", "2031-02-01T06:00:00Z"]
    assert "@once 2031-03-01T06:00:00Z" in editor.get(f"{path}/edit", params={"name": "once"}).text
    when = text + "\r\n2031-04-01 09:30\r\n"
    preview = editor.press(f"{path}/preview", when=when, timezone="Europe/Berlin").text
    assert preview.count("<li>") == 3 and "2031-04-01 07:30:00 UTC" in preview
    assert "problem" in editor.press(f"{path}/preview", when="2031-01-01\nnever", timezone="UTC").text
    saved = editor.press(f"{path}/save", name="days", when=when, timezone="UTC", version="1")
    assert said(saved) == "Schedule days saved.", saved.text
    (row, _) = site.do(lambda conn: schedules.list_all(conn, dag="listed"))
    assert row.spec["times"][2] == "2031-04-01T09:30:00Z"
    assert editor.press(f"{path}/save", name="days", when="a\nb", timezone="UTC", version="2").status_code == 422


def test_a_schedule_is_paused_on_its_page(site: Site, people: dict[str, HttpVisitor]) -> None:
    path = "/dags/web_logs/schedules/main"
    assert said(people["operator"].press(f"{path}/pause")) == "Schedule main paused."
    (row,) = site.do(lambda conn: schedules.list_all(conn, dag="web_logs"))
    assert row.is_held
    assert said(people["operator"].press(f"{path}/unpause")) == "Schedule main unpaused."
    assert people["viewer"].press(f"{path}/pause").status_code == 403
    assert people["operator"].press("/dags/web_logs/schedules/none/pause").status_code == 404


def test_what_templates_became_is_told_of_each_attempt(site: Site, people: dict[str, HttpVisitor]) -> None:
    run_id = site.runs["orders"][5]
    told = [("RENDER", 'command = "echo \\"${EVERTICK_VALUE_0}\\""'), ("RENDER", 'EVERTICK_VALUE_0 = "<b>Ann</b>"')]
    write_log(
        site, run_id, 2, [*told, ("OUT", "RENDER no = 1"), ("RENDER", 'json = {"a": [1]}'), ("RENDER", "cut = {")]
    )
    text = people["viewer"].get(f"/runs/{run_id}/tasks/transform?tab=details").raise_for_status().text
    assert "Rendered fields of attempt 1" in text and "echo &#34;${EVERTICK_VALUE_0}&#34;" in text
    assert "&lt;b&gt;Ann&lt;/b&gt;" in text and "no = 1" not in text and ">{</pre>" in text


def test_what_executors_elsewhere_have_is_told_with_the_trouble(site: Site, people: dict[str, HttpVisitor]) -> None:
    viewer = people["viewer"]
    assert "Other executors" not in viewer.get("/runners").text

    async def queue(conn: AsyncConnection) -> int:
        await put(conn, make_dag("far", {"pod": []}))
        run_id = await start(conn, "far")
        await conn.execute("delete from ready_task where run_id = %s", [run_id])
        await conn.execute("update task set state = 'queued', epoch = 1, session = 77 where run_id = %s", [run_id])
        await conn.execute(
            "insert into dispatch (run_id, idx, map_index, epoch, session, executor, owner, queue, queued_at, tries, last_error)"
            " values (%s, 0, -1, 1, 77, 'kubernetes', 5, 'default', clock(), 3, 'quota <b>exceeded</b>')",
            [run_id],
        )
        return run_id

    run_id = site.do(queue)
    text = viewer.get("/runners").raise_for_status().text
    assert "Other executors" in text and f"/runs/{run_id}/tasks/pod" in text and "tried 3 times" in text
    assert "quota &lt;b&gt;exceeded&lt;/b&gt;" in text
    why = viewer.get(f"/runs/{run_id}/tasks/pod").raise_for_status().text
    assert "Why it is not running" in why and "kubernetes" in why


def test_thousands_of_agents_are_counted_and_not_listed(site: Site, people: dict[str, HttpVisitor]) -> None:
    async def crowd(conn: AsyncConnection) -> None:
        await conn.execute(
            """insert into runner (session, runner_id, version, host, boot_id, pid_namespace, uid, pid, pid_started, queues, slots,
                                   executor, lost_after_seconds, heartbeat_at, started_at, silent_seconds)
               select 900000 + n, 'agent-' || n, '', 'pod', '', '', 0, 0, 0, '{}', 1,
                      'far', 90, clock(), clock(), case n when 1 then 80 else 0 end
               from generate_series(1, 2000) n"""
        )

    site.do(crowd)
    try:
        text = people["viewer"].get("/runners").raise_for_status().text
        assert re.search(r"<bdi>far</bdi></span> <span class=\"num\">2000</span> attempts run", text)
        assert "agent is silent" in text and "agent-7" not in text and "runner-1" in text
        assert "1 alive" in people["viewer"].get("/").text
    finally:
        site.do(lambda conn: conn.execute("delete from runner where executor = 'far'"))


def test_a_group_that_began_again_is_seen_in_the_grid_and_in_the_history(
    site: Site, people: dict[str, HttpVisitor]
) -> None:
    async def live(conn: AsyncConnection) -> int:
        tasks = {"load.a": [], "load.b": ["load.a"], "other": []}
        inside = {name: {"group": "load"} for name in ("load.a", "load.b")}
        groups = (GroupSpec(name="load", retries=1),)
        await put(conn, make_dag("again", tasks, per_task=inside, groups=groups, task_queue="again"))
        run_id = await start(conn, "again")
        runner = await Runner.join(conn, queues=("again",))
        for _ in range(4):
            for claim in await runner.claim(queues=("again",)):
                is_bad = claim.idx == 1 and claim.epoch == 1
                await runner.finish(
                    claim, "failed" if is_bad else "success", no_retry=True, reason="no rows" if is_bad else None
                )
        await runners.leave(conn, runner.session)
        assert await run_state(conn, run_id) == "success"
        return run_id

    run_id = site.do(live)
    viewer = people["viewer"]
    grid = viewer.get("/dags/again").raise_for_status().text
    assert f"load, run {run_id}: 2 success; retried once" in grid and "retried twice" in grid
    assert "; retried" not in viewer.get("/dags/orders").text
    history = viewer.get(f"/runs/{run_id}/tasks/load.a?tab=attempts").raise_for_status().text
    assert "group load restarted, retry 1" in history and "failed: load.b" in history
    assert "restarted" not in viewer.get(f"/runs/{run_id}/tasks/other?tab=attempts").text
    assert "group load restarted, retry 1" in viewer.get(f"/runs/{run_id}?tab=history").text


def test_a_shard_that_nobody_leads_is_told_at_once(site: Site, people: dict[str, HttpVisitor]) -> None:
    viewer = people["viewer"]
    assert "scheduler-1 leads" in viewer.get("/").text and "scheduler-1" in viewer.get("/schedulers").text
    assert people["limited"].get("/schedulers").status_code == 403
    try:
        site.do(lambda conn: shards.set_shards(conn, shards=3, actor="test", if_never_chosen=False))
        home = viewer.get("/").text
        assert "no scheduler leads shard 1, 2 of 3" in home and "Attention needed" in home
        assert viewer.get("/schedulers").text.count("no leader, so its schedules do not fire") == 2
    finally:
        site.do(lambda conn: conn.execute("delete from shard where shard > 0"))
