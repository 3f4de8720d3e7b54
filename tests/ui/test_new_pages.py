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
from evertick.api.auth import PLAIN_COOKIE
from evertick.db.queries import accounts as accounts_queries
from evertick.db.queries import backfills, dags, logs, runners, runs, schedules
from evertick.db.queries.logs import NewChunk
from evertick.domain.access import Actor, Role
from evertick.domain.dags.mapping import MappedList, Mapping
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import GroupSpec, NamedSchedule
from evertick.domain.deployments import DeploymentChange, DeploymentKind
from evertick.domain.schedules.spec import parse_schedule
from evertick.engine import accounts
from evertick.engine.publish import PublishedDag, publish_all
from evertick.engine.runs import trigger
from evertick.engine.shards import set_shard_count
from evertick.engine.tasks import clear, select_tasks
from evertick.engine.waits import send_event
from evertick.ui.layout import code_lines, summary
from tests.engine.world import Runner, key_of, make_dag, put, run_state, set_clock, start, value
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
    assert (
        "version 1 instead of 2" in preview
        and "newer" in preview
        and "of deployment <strong>default</strong>" in preview
    )
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


def test_a_version_shows_its_deployment_commit_and_author(site: Site, people: dict[str, HttpVisitor]) -> None:
    async def deployed(conn: AsyncConnection) -> None:
        change = DeploymentChange(
            name="team", kind=DeploymentKind.GIT, is_whole=True, commit_hash="0123456789abcdef", author="Ann <a@x>"
        )
        await dags.put_bundle(conn, bundle_hash="b", file="f.py", archive=b"", uses_threads=None)
        given = PublishedDag(spec=make_dag("committed", {"a": []}), file="f.py", bundle_hash="b")
        await publish_all(conn, change, [given], actor=Actor("test"))

    site.do(deployed)
    page = people["viewer"].get("/dags/committed/versions").text
    assert 'version 1 of deployment <a href="/deployments/team">team</a>' in page
    assert "0123456789ab<" in page and "Ann &lt;a@x&gt;" in page
    assert "<dd>team</dd>" in people["viewer"].get("/dags/committed/details").text


def test_a_deployment_is_rolled_back_and_deleted(site: Site, people: dict[str, HttpVisitor]) -> None:
    async def deployed(conn: AsyncConnection) -> None:
        await dags.put_bundle(conn, bundle_hash="b", file="f.py", archive=b"", uses_threads=None)
        for number, names in enumerate((("kept", "gone"), ("kept", "new")), start=1):
            change = DeploymentChange(
                name="shop", kind=DeploymentKind.UPLOAD, is_whole=True, commit_hash=f"{number}abc", author="Ann <a@x>"
            )
            specs = [make_dag(f"shop_{name}", {name: [], f"v{number}": []}) for name in names]
            given = [PublishedDag(spec=spec, file="f.py", bundle_hash="b") for spec in specs]
            await publish_all(conn, change, given, retired=["shop_gone"], actor=Actor("test"))
        await dags.put_import_error(conn, deployment="shop", file="bad.py", line=7, message="NameError: <x>", detail="")

    site.do(deployed)
    viewer, editor, path = people["viewer"], people["editor"], "/deployments/shop"
    assert "shop" in rows_of(viewer.get("/deployments").text)
    shown = viewer.get(path).raise_for_status().text
    assert rows_of(shown) == ["bad.py", "f.py", "shop_gone", "shop_kept", "shop_new", "v2", "v1"]
    assert "line 7: NameError: &lt;x&gt;" in shown and "1abc</span> <bdi>Ann &lt;a@x&gt;" in shown
    assert 'href="/dags/shop_kept/versions?from=1&amp;to=2"' in shown and "/rollback" not in shown
    assert "Version 1 is the first" in viewer.get(f"{path}?to=1").text
    assert viewer.get(f"{path}?from=9").status_code == 404
    back = f"{path}/versions/1/rollback"
    assert back in editor.get(path).text and viewer.press(back).status_code == 403
    assert editor.press(back, etag='"1"').status_code == 412, "another version than the page showed"
    assert said(editor.press(back, etag='"2"')) == "shop is at version 3, which has the DAGs of version 1."
    assert viewer.press(f"{path}/delete").status_code == 403
    assert editor.press(f"{path}/delete", etag='"2"').status_code == 412
    assert said(editor.press(f"{path}/delete", etag='"3"')) == "Deployment shop deleted."
    assert "shop" not in rows_of(viewer.get("/deployments").text)
    assert "/delete" not in editor.get(path).text and editor.press(back, etag='"4"').status_code == 204


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
    assert "Rendered fields of attempt 1" in text and "echo &#39;&lt;b&gt;Ann&lt;/b&gt;&#39;" in text
    assert "EVERTICK_VALUE_0" not in text
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
        site.do(lambda conn: set_shard_count(conn, shards=3, actor=Actor("test"), if_never_chosen=False))
        home = viewer.get("/").text
        assert "no scheduler leads shard 1, 2 of 3" in home and "Attention needed" in home
        assert viewer.get("/schedulers").text.count("no leader, so its schedules do not fire") == 2
    finally:
        site.do(lambda conn: conn.execute("delete from shard where shard > 0"))


def test_the_next_hour_counts_every_fire_and_lists_each_schedule_once(
    site: Site, people: dict[str, HttpVisitor]
) -> None:
    admin = people["admin"]

    def fires(text: str) -> int:
        (count,) = re.findall(r"(\d+) fires?</span>", text)
        return int(count)

    before = fires(admin.get("/").text)
    often = (NamedSchedule(name="main", spec=parse_schedule("@every 5s")),)
    site.do(lambda conn: put(conn, make_dag("heartbeat", {"a": []}, schedules=often)))
    text = admin.get("/").text
    assert 0 <= fires(text) - before - 720 <= 1
    (listed,) = re.findall(r'<ul class="list fires">(.*?)</ul>', text, re.DOTALL)
    assert listed.count("/dags/heartbeat") == 1 and "and 719 more within the hour" in listed
    assert "/dags/orders" in listed and "/dags/web_logs" in listed
    minutes = [int(count) for count in re.findall(r"<title>(\d+) in minute", text)]
    assert len(minutes) == 60 and min(minutes) >= 11 and sum(minutes) == fires(text)


def test_a_user_sets_and_changes_the_own_password_on_the_account_page(site: Site) -> None:
    async def sign_in(conn: AsyncConnection) -> None:
        row = await accounts.find_user(conn, "nora")
        issued = await accounts.issue(conn, row, kind="session", name="test", actor=Actor("test"), seconds=600)
        site.sessions["nora"] = issued.secret

    site.do(lambda conn: accounts.add_user(conn, name="nora", role=Role.VIEWER, tags=None, actor=Actor("test")))

    def press(visitor: HttpVisitor, **fields: str) -> str:
        return said(visitor.press("/account/password", **fields))

    try:
        for current, password in (("", "first secret"), ("first secret", "second secret")):
            site.do(sign_in)
            with HttpVisitor(site, "nora") as nora:
                text = nora.get("/account").text
                assert ("Current password" in text) == bool(current) and 'href="/account"' in nora.get("/dags").text
                assert "differ" in press(nora, password=password, again="another")
                assert "8 to 1000" in press(nora, current=current, password="short", again="short")
                assert "8 to 1000" in press(nora, current=current, password="x" * 1001, again="x" * 1001)
                if current:
                    assert "current password is wrong" in press(nora, current="no", password=password, again=password)
                done = nora.press("/account/password", current=current, password=password, again=password)
                assert done.headers["HX-Redirect"] == "/login" and nora.get("/dags").status_code == 303
    finally:
        del site.sessions["nora"]


def test_a_mapped_task_is_one_row_and_one_bar_with_its_number_of_instances(
    site: Site, people: dict[str, HttpVisitor]
) -> None:
    async def two_hundred(conn: AsyncConnection) -> int:
        per_task = {"score": {"mapping": Mapping(lists=(MappedList(argument="x", length=200),))}}
        await put(conn, make_dag("scores", {"score": [], "after": ["score"]}, per_task=per_task, task_queue="scores"))
        run_id = await start(conn, "scores")
        runner = await Runner.join(conn, queues=("scores",))
        claims = await runner.claim(300, queues=("scores",))
        ends = [(each, "failed" if n == 7 else "success", {"no_retry": True}) for n, each in enumerate(claims[:150])]
        await runner.step(ends)
        await runners.leave(conn, runner.session)
        return run_id

    run_id = site.do(two_hundred)
    viewer = people["viewer"]
    text = viewer.get(f"/runs/{run_id}").text
    assert rows_of(text) == ["0", "1.-1"] and "200 instances" in text and "149 success" in text
    assert rows_of(viewer.get(f"/runs/{run_id}?state=failed").text) == ["0.7"]
    chart = viewer.get(f"/runs/{run_id}?tab=gantt").text
    assert chart.count('class="gantt-row"') == 1 and "200 instances: 1 failed" in chart
    unfolded = viewer.get(f"/runs/{run_id}?tab=gantt&task=score").text
    assert unfolded.count('class="gantt-row"') == 200
    assert ">200</span>" in viewer.get("/dags/scores").text


def test_a_result_with_named_outputs_shows_each_and_not_its_envelope(
    site: Site, people: dict[str, HttpVisitor]
) -> None:
    async def push(conn: AsyncConnection) -> int:
        await put(conn, make_dag("pushes", {"a": [], "b": []}, task_queue="pushes"))
        run_id = await start(conn, "pushes")
        runner = await Runner.join(conn, queues=("pushes",))
        one, other = await runner.claim(queues=("pushes",))
        named = {"$evertick": "outputs", "value": {"rows": 3}, "named": {"best": 7, "parts": [1, 2]}}
        await runner.step([(one, "success", {"result": named}), (other, "success", {"result": {"rows": 4}})])
        await runners.leave(conn, runner.session)
        return run_id

    run_id = site.do(push)
    text = html.unescape(people["viewer"].get(f"/runs/{run_id}/tasks/a?tab=result").text)
    assert "Output best" in text and "Output parts" in text and '"rows": 3' in text
    assert "$evertick" not in text and '"named"' not in text
    assert '"rows": 4' in people["viewer"].get(f"/runs/{run_id}/tasks/b?tab=result").text.replace("&#34;", '"')


def test_a_cleared_run_waits_from_its_clear_and_its_task_tells_all_attempts(
    site: Site, people: dict[str, HttpVisitor]
) -> None:
    begin = datetime.now(UTC) - timedelta(minutes=20)

    async def cleared_later(conn: AsyncConnection) -> int:
        await set_clock(conn, begin)
        await put(conn, make_dag("again", {"a": []}, task_queue="again"))
        run_id = await start(conn, "again")
        runner = await Runner.join(conn, queues=("again",))
        for minutes in (0, 13):
            await set_clock(conn, begin + timedelta(minutes=minutes))
            if minutes:
                chosen = await select_tasks(conn, run_id=run_id, names=["a"])
                await clear(conn, run_id=run_id, chosen=chosen, actor=Actor("test"))
            (claim,) = await runner.claim(queues=("again",))
            await set_clock(conn, begin + timedelta(minutes=minutes, seconds=5))
            await runner.finish(claim)
        await runners.leave(conn, runner.session)
        await set_clock(conn, datetime.now(UTC))
        return run_id

    run_id = site.do(cleared_later)
    viewer = people["viewer"]
    chart = viewer.get("/dags/again/durations").text
    assert f"Run {run_id} for {begin:%Y-%m-%d %H:%M:%S} UTC: success, waited 0 s, ran 5 s" in chart.replace(
        "0 ms", "0 s"
    )
    assert f">{begin.day} {begin:%b}</text>" in chart
    text = viewer.get(f"/runs/{run_id}/tasks/a?tab=attempts").text
    assert "attempt 1 of 1 since it was cleared, 2 in total" in text
    assert re.findall(r'<tr><td class="num">(\d+)</td>', text) == ["2", "1"]
    grid = viewer.get("/dags/again").text
    assert "1 task<" in grid and f"run {run_id} for {begin:%Y-%m-%d %H:%M:%S} UTC: success" in grid


def test_times_are_in_the_selected_zone_then_in_that_of_the_browser(site: Site, people: dict[str, HttpVisitor]) -> None:
    run_id = site.runs["orders"][1]
    path = f"{site.url}/runs/{run_id}"
    cookie = f"{PLAIN_COOKIE}={site.sessions['viewer']}"
    for more, zone, shown in (
        ("", "UTC", " UTC"),
        ("; evertick_browser_zone=Europe/Berlin", "Europe/Berlin", " CE"),
        ("; evertick_browser_zone=Europe/Berlin; evertick_zone=Asia/Tokyo", "Asia/Tokyo", " JST"),
        ("; evertick_zone=Not/AZone", "UTC", " UTC"),
    ):
        text = httpx.get(path, headers={"Cookie": cookie + more, "Accept": "text/html"}).text
        assert f"<span data-zone-name>{zone}</span>" in text
        assert re.search(rf'title="[-0-9]+ [:0-9]+{shown}', text), zone
    assert "Evertick 0.1" in text and 'href="/openapi.json"' in text


def test_a_trigger_form_has_fields_in_the_order_of_the_file_and_its_hints_are_sentences(
    people: dict[str, HttpVisitor],
) -> None:
    text = people["operator"].get("/dags/report_by_hand/trigger").text
    assert re.findall(r'name="p\.(\w+)"', text) == ["region", "limit", "dry_run", "day"]
    assert "How many rows at most.</bdi> An integer" in text
    assert '"attributesToSettle":["class"]' in text


def test_forms_take_times_on_the_clock_of_the_schedule(site: Site, people: dict[str, HttpVisitor]) -> None:
    """A run or backfill of a chosen day is for the day of the schedule, as on the command line."""

    async def abroad(conn: AsyncConnection) -> None:
        nightly = NamedSchedule(name="nightly", spec=parse_schedule("0 0 * * *", timezone="Asia/Tokyo"))
        await put(conn, make_dag("abroad", {"a": []}, schedules=(nightly,), task_queue="abroad"))

    site.do(abroad)
    operator = people["operator"]
    assert 'name="date" type="datetime-local"' in operator.get("/dags/abroad/trigger").text
    assert "Asia/Tokyo" in operator.get("/dags/abroad/trigger").text
    made = operator.press("/dags/abroad/trigger", date="2026-11-01T00:00").headers["HX-Redirect"]
    run = site.do(lambda conn: runs.find(conn, int(made.rpartition("/")[2])))
    assert run is not None and run.fire_at == datetime(2026, 10, 31, 15, tzinfo=UTC)
    again = operator.press("/dags/abroad/trigger", date="2026-11-01T00:00")
    assert again.status_code == 422 and "already has" in html.unescape(again.text)
    assert 'value="2026-11-01T00:00"' in again.text and "--for 2026-11-01T00:00" in again.text
    assert "Date of the run: enter" in operator.press("/dags/abroad/trigger", date="monday").text
    assert "nightly (Asia/Tokyo)" in operator.get("/backfills/new?dag=abroad").text
    form = {"dag": "abroad", "first": "2026-10-01T00:00", "last": "2026-10-02T00:00", "schedule": "nightly"}
    address = operator.press("/backfills", **form).headers["HX-Redirect"]
    row = site.do(lambda conn: backfills.find(conn, int(address.rpartition("/")[2])))
    assert row is not None and (row.first_at, row.total) == (datetime(2026, 9, 30, 15, tzinfo=UTC), 2)
    preview = operator.press("/backfills/preview", **{**form, "schedule": "", "when": "0 0 * * *"}).text
    assert "2 dates" in preview and "2026-09-30 15:00:00 UTC" in preview


def test_the_log_of_a_run_has_the_lines_of_all_tasks_by_time(site: Site, people: dict[str, HttpVisitor]) -> None:
    async def logged(conn: AsyncConnection) -> int:
        await put(conn, make_dag("talks", {"one": [], "two": []}, task_queue="talks"))
        run_id = await start(conn, "talks")
        runner = await Runner.join(conn, queues=("talks",))
        one, two = sorted(await runner.claim(2, queues=("talks",)), key=key_of)
        path = f"/srv/{'0' * 64}/etl.py"
        for claim, at, texts in ((one, 0, ["line 0", "line 2"]), (two, 1, ["line 1", f'File "{path}" <b>'])):
            lines = "".join(f"{1_900_000_000_000_000 + at + 2 * n} RAW {text}\n" for n, text in enumerate(texts))
            chunk = NewChunk(key=key_of(claim), epoch=claim.epoch, seq=0, until=1, content=lines)
            await logs.append(conn, session=runner.session, chunks=[chunk])
        await runner.finish(one, "failed", no_retry=True, reason="exited with code 1")
        await runner.finish(two)
        await runners.leave(conn, runner.session)
        return run_id

    run_id = site.do(logged)
    page = people["viewer"].get(f"/runs/{run_id}?tab=log").text
    lines = re.findall(
        r'tasks/(\w+)"><bdi>\w+</bdi></a><span class="log-level">(\w+)</span><span class="log-text">(.*?)<', page
    )
    assert lines[:3] == [("one", "output", "line 0"), ("two", "output", "line 1"), ("one", "output", "line 2")]
    assert html.unescape(lines[3][2]) == 'File "etl.py" <b>', "the folder of a bundle is left out"


def test_a_dag_shows_its_owner(site: Site, people: dict[str, HttpVisitor]) -> None:
    site.do(lambda conn: put(conn, make_dag("owned", {"a": []}, owner="<ann>")))
    for path in ("/dags?q=owned", "/dags/owned"):
        assert "<bdi>&lt;ann&gt;</bdi>" in people["viewer"].get(path).text
    assert people["viewer"].get("/api/v1/dags/owned").json()["owner"] == "<ann>"


def test_code_has_syntax_colours_and_a_list_the_first_line_of_a_docstring() -> None:
    lines = code_lines("a.py", '@task\ndef f():  # <b>\n    """a\n    b"""\n')
    assert len(lines) == 4 and "<b>" not in "".join(lines) and 'class="tok-k">def<' in lines[1]
    assert all(each.count("<span") == each.count("</span>") for each in lines), (
        "a text over lines has its colour in each"
    )
    assert code_lines("a.unknown", "<x>\n") == ["&lt;x&gt;"]
    assert summary("# Loads **rows** from `x`\n\n* [docs](https://a.example)") == "Loads rows from x"
    assert summary("Two\nlines") == "Two lines" and summary("") == ""


def test_the_audit_page_tells_details_in_words(site: Site, people: dict[str, HttpVisitor]) -> None:
    async def note(conn: AsyncConnection) -> None:
        detail = {"changed": {"parallel": 3, "tags": ["a", "b"]}, "runs": [{"run": 7}, {"run": 8}]}
        await accounts_queries.note(conn, verb="example", actor=Actor("test"), detail=detail)

    site.do(note)
    text = html.unescape(people["admin"].get("/audit?verb=example").text)
    summary = re.findall(r'<summary class="muted"><bdi>(.*?)</bdi>', text)
    assert summary == ["runs run 7, run 8; changed tags a, b, parallel 3"]


def test_runs_are_filtered_by_part_of_a_name_tag_kind_state_and_day(site: Site, people: dict[str, HttpVisitor]) -> None:
    viewer = people["viewer"]

    def numbers(**filters: str) -> set[int]:
        answer = viewer.get("/runs", params=filters)
        assert answer.status_code == 200
        return {int(each) for each in rows_of(answer.text)}

    orders, billing = set(site.runs["orders"]), set(site.runs["billing"])
    assert orders <= numbers(dag="orders") and not numbers(dag="orders") & billing
    assert billing <= numbers(dag="illin") and not numbers(dag="illin") & orders
    assert numbers(q="illin") == numbers(dag="illin") and numbers(dag="no such name") == set()
    assert billing | orders <= numbers(tag="finance") and not numbers(tag="web") & orders
    assert numbers(q="orders", kind="manual") & orders == {max(orders)}
    today, tomorrow = datetime.now(UTC), datetime.now(UTC) + timedelta(days=1)
    assert numbers(dag="orders", since=f"{today - timedelta(days=1):%Y-%m-%d}", until=f"{today:%Y-%m-%d}") >= orders
    assert numbers(since=f"{tomorrow:%Y-%m-%d}") == set() and numbers(until="2020-01-01") == set()
    assert "is not a date" in html.unescape(viewer.get("/runs?since=yesterday").text)
    assert numbers(state="canceled") == set()


def test_a_run_is_marked_triggered_again_with_its_parameters_and_deleted(
    site: Site, people: dict[str, HttpVisitor]
) -> None:
    async def half_done(conn: AsyncConnection) -> int:
        shape = {"a": [], "b": ["a"], "c": ["b"]}
        params = declare_params({"day": Param(type=str, required=True), "size": Param(1, type=int)})
        await put(conn, make_dag("judged", shape, task_queue="judged", params=params))
        made = await trigger(conn, dag="judged", params={"day": "monday", "size": 7}, actor=Actor("test"))
        runner = await Runner.join(conn, queues=("judged",))
        (claim,) = await runner.claim(queues=("judged",))
        await runner.finish(claim, "failed", no_retry=True)
        await runners.leave(conn, runner.session)
        return made.run_id

    run_id = site.do(half_done)
    operator, editor = people["operator"], people["editor"]
    page = operator.get(f"/runs/{run_id}").text
    assert "mark-success" in page and "mark-failed" not in page and "delete-run" not in page
    assert "mark-success" not in people["viewer"].get(f"/runs/{run_id}").text
    assert said(operator.press(f"/runs/{run_id}/mark", state="success")) == f"3 tasks of run {run_id} marked success."
    assert site.do(lambda conn: run_state(conn, run_id)) == "success"
    assert "no task to mark" in said(operator.press(f"/runs/{run_id}/mark", state="failed"))
    assert "Choose a state" in said(operator.press(f"/runs/{run_id}/mark", state="skipped"))
    form = operator.get(f"/dags/judged/trigger?like={run_id}").text
    assert re.findall(r'name="p\.(\w+)" value="(\w+)"', form) == [("day", "monday"), ("size", "7")]
    assert operator.press(f"/runs/{run_id}/delete").status_code == 403
    assert "delete-run" in editor.get(f"/runs/{run_id}").text
    assert editor.press(f"/runs/{run_id}/delete").headers["HX-Redirect"] == "/runs?dag=judged"
    assert editor.get(f"/runs/{run_id}").status_code == 404


def test_several_runs_and_dags_are_changed_at_once(site: Site, people: dict[str, HttpVisitor]) -> None:
    async def three(conn: AsyncConnection) -> list[int]:
        for name in ("many_a", "many_b"):
            await put(conn, make_dag(name, {"a": []}, task_queue="many"))
        return [await start(conn, name) for name in ("many_a", "many_a", "many_b")]

    first, second, third = site.do(three)

    def bulk(who: str, path: str, action: str, *chosen: object) -> str:
        visitor = people[who]
        headers = {"HX-Request": "true", "X-CSRF-Token": visitor.csrf}
        fields = {"action": action, "chosen": [str(each) for each in chosen]}
        return said(visitor.post(path, data=fields, headers=headers))

    assert bulk("operator", "/runs/bulk", "Cancel", first, second).startswith("2 of 2 runs canceled.")
    told = bulk("operator", "/runs/bulk", "Cancel", first, third, 2**50)
    assert told.startswith("1 of 3 runs canceled.") and "already ended" in told and "There is no run" in told
    assert "1 of 2 runs cleared. Run" in bulk(
        "operator", "/runs/bulk", "Clear failed tasks", first, site.runs["orders"][1]
    )
    assert bulk("operator", "/runs/bulk", "Mark failed", first) == "1 of 1 runs marked failed."
    assert bulk("operator", "/runs/bulk", "Mark success", first, second).startswith("2 of 2 runs marked success.")
    assert "runs.cancel" in bulk("viewer", "/runs/bulk", "Cancel", third)
    assert "Select at least one" in bulk("operator", "/runs/bulk", "Cancel")
    assert "Choose an action" in bulk("operator", "/runs/bulk", "Explode", first)
    assert "not the number" in bulk("operator", "/runs/bulk", "Cancel", "x")
    assert bulk("operator", "/dags/bulk", "Pause", "many_a", "many_b") == "2 of 2 DAGs paused."
    assert people["viewer"].get("/dags?q=many_&state=paused").text.count("is-paused") == 2
    assert bulk("operator", "/dags/bulk", "Unpause", "many_a", "none").startswith("1 of 2 DAGs unpaused. There is no")
    assert 'name="chosen"' not in people["viewer"].get("/runs").text


def test_schedules_alerts_notifications_and_events_have_pages(site: Site, people: dict[str, HttpVisitor]) -> None:
    async def prepare(conn: AsyncConnection) -> int:
        await conn.execute(
            "insert into alert (kind, schedule_id, due_at, last_due_at, raised_at)"
            " select 'not_started', min(schedule_id), clock(), clock(), clock() from schedule"
        )
        await send_event(conn, name="prices_ready", key="2026-11", payload={"rows": 3}, actor=Actor("test"))
        await conn.execute(
            "insert into dead_letter (dag, params, sent_at, sent_by, reason, failed_at)"
            " values ('<gone>', '{}', clock(), 'shop', 'there is no such DAG', clock())"
        )
        found = await conn.execute(
            "insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at, state, ended_at)"
            " values (0, 'https://chat.example/<hook>', 'failure', '{}', clock(), clock(), clock(), 'failed', clock())"
            " returning delivery_id"
        )
        return int((await found.fetchall())[0][0])

    number = site.do(prepare)
    viewer, operator = people["viewer"], people["operator"]
    schedules_page = html.unescape(viewer.get("/schedules").text)
    assert "/dags/billing/schedules" in schedules_page and "on Monday to Friday" in schedules_page
    assert "not started" in viewer.get("/alerts").text and "not started" in viewer.get("/alerts?ended=true").text
    assert "prices_ready" in viewer.get("/events").text and "prices_ready" not in viewer.get("/events?name=x").text
    assert viewer.get("/notifications").status_code == 403
    text = operator.get("/notifications?state=failed").text
    assert "chat.example/&lt;hook&gt;" in text and rows_of(text) == [str(number)]
    assert "sent again" in said(operator.press(f"/notifications/{number}/retry"))
    assert rows_of(operator.get("/notifications?state=failed").text) == []
    letters = operator.get("/dead-letters").text
    (letter,) = rows_of(letters)
    assert "&lt;gone&gt;" in letters and "is in the inbox again" in said(
        operator.press(f"/dead-letters/{letter}/replay")
    )
    assert rows_of(operator.get("/dead-letters").text) == []
    assert rows_of(operator.get("/dead-letters?replayed=true").text) == [letter]
    for path in ("/schedules", "/alerts", "/notifications", "/events", "/dead-letters"):
        assert f'href="{path}"' in operator.get("/").text


def test_docstrings_are_markdown_without_html(site: Site, people: dict[str, HttpVisitor]) -> None:
    doc = """# What it does
    * logs **all** rows
    * <img src=x onerror=alert(1)>

    See [the wiki](https://wiki.example/x), not [this](javascript:alert(1)) ![or](https://spy.example/x.png)."""
    spec = make_dag("told", {"a": []}, description=doc, per_task={"a": {"doc": "`code` & <b>bold</b>"}})
    site.do(lambda conn: put(conn, spec))
    text = people["viewer"].get("/dags/told/details").text
    assert "<h3>What it does</h3>" in text and "<li>logs <strong>all</strong> rows</li>" in text
    assert '<a href="https://wiki.example/x">the wiki</a>' in text and "<code>code</code> &amp;" in text
    shown = text[text.index("<main") :]
    assert "<img" not in shown and "<b>" not in shown and 'href="javascript' not in shown


def test_durations_of_one_task_are_drawn_without_the_rest_of_its_runs(people: dict[str, HttpVisitor]) -> None:
    text = html.unescape(people["viewer"].get("/dags/orders/durations?task=load").text)
    drawn = re.findall(r'href="/runs/\d+/tasks/load" aria-label="Run \d+: (\w+), ran (\d+) s"', text)
    assert ("failed" in {state for state, _ in drawn}) and {int(seconds) for _, seconds in drawn} <= {9, 13, 17, 21, 25}
    assert "This task has not run yet" in people["viewer"].get("/dags/orders/durations?task=none").text


def test_a_sensor_tells_since_when_it_polls_and_not_only_its_last_poll(
    site: Site, people: dict[str, HttpVisitor]
) -> None:
    run_id = site.runs["orders"][3]
    path = f"/runs/{run_id}/tasks/load"
    assert "polling since" not in people["viewer"].get(path).text
    poll = (
        "insert into sensor_poll (run_id, idx, map_index, since, polls) values (%s, 4, -1, '2026-01-05 06:07:08Z', 12)"
    )

    async def polled(conn: AsyncConnection) -> None:
        await conn.execute(poll, [run_id])

    site.do(polled)
    text = people["viewer"].get(path).text
    assert "polling since" in text and "2026-01-05 06:07:08 UTC" in text and "12 polls" in text and "last poll" in text
