"""Everything by keyboard alone: each action from end to end, and afterwards the focus is where it was."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import Page, expect
from psycopg import AsyncConnection

from evertick.db.queries import dags, listings, runners, runs, schedules, waits
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from evertick.engine.waits import wake
from tests.engine.world import Runner, lead, make_dag, put, start, states
from tests.ui.conftest import Visitor
from tests.ui.keyboard import tab_to
from tests.ui.site import Site


def ended_run(site: Site, dag: str) -> int:
    """A run whose only task failed. Nobody serves its queue."""

    async def prepare(conn: AsyncConnection) -> int:
        await put(conn, make_dag(dag, {"t": []}, task_queue=dag))
        run_id = await start(conn, dag)
        runner = await Runner.join(conn, queues=(dag,))
        (claim,) = await runner.claim(queues=(dag,))
        await runner.finish(claim, "failed", no_retry=True, reason="no rows")
        await runners.leave(conn, runner.session)
        return run_id

    return site.do(prepare)


def focused(page: Page, text: str) -> None:
    page.wait_for_function("text => document.activeElement.textContent.trim().startsWith(text)", arg=text)


def test_a_run_is_triggered(visit: Visitor, site: Site) -> None:
    page = visit("/dags/report_by_hand/trigger", "operator")
    tab_to(page, "Trigger run")
    page.keyboard.press("Enter")
    expect(page.get_by_label("day")).to_be_focused()  # what is wrong has the focus
    page.keyboard.type("2026-11-30")
    tab_to(page, "Trigger run")
    page.keyboard.press("Space")
    expect(page).to_have_url(re.compile(r"/runs/\d+$"))
    assert site.do(lambda conn: runs.list_newest(conn, limit=1))[0].params["day"] == "2026-11-30"


def test_a_run_is_noted_cleared_and_canceled(visit: Visitor, site: Site) -> None:
    run_id = ended_run(site, "by_keys")
    page = visit(f"/runs/{run_id}", "operator")
    press = page.keyboard.press
    press("n")
    page.keyboard.type("asked them")
    tab_to(page, "Save")
    press("Enter")
    expect(page.locator(".note")).to_contain_text("asked them")
    focused(page, "Change note…")
    note = site.do(lambda conn: listings.note(conn, run_id=run_id, idx=-1, map_index=-1))
    assert note is not None and note.content == "asked them"
    press("c")
    expect(page.locator("#clear-preview")).to_contain_text("1 task runs again")
    tab_to(page, "Run again")
    press("Enter")
    expect(page.locator("#run-head h1 .state")).to_contain_text("running")
    focused(page, "Clear…")
    tab_to(page, "Cancel…")
    press("Space")
    page.keyboard.type("not needed")
    press("Enter")
    expect(page.locator("#run-head h1 .state")).to_contain_text("canceled")
    assert site.do(lambda conn: states(conn, run_id)) == {"t": "canceled"}


def test_a_task_is_marked(visit: Visitor, site: Site) -> None:
    run_id = ended_run(site, "marked")
    page = visit(f"/runs/{run_id}/tasks/t", "operator")
    page.keyboard.press("m")
    expect(page.locator("#mark .preview")).not_to_contain_text("Looking")
    tab_to(page, "success")
    page.keyboard.press("ArrowDown")
    tab_to(page, "Mark", "button")
    page.keyboard.press("Enter")
    expect(page.locator("#task-head h1 .state")).to_contain_text("skipped")
    assert site.do(lambda conn: states(conn, run_id)) == {"t": "skipped"}


def test_a_dag_is_paused_and_a_schedule_changed(visit: Visitor, site: Site) -> None:
    page = visit("/dags/archive/schedules", "editor")
    tab_to(page, "Unpause", "button")
    page.keyboard.press("Space")
    expect(page.locator("#pause")).to_have_text("Pause")
    expect(page.locator("#pause")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("#pause")).to_have_text("Unpause")
    row = site.do(lambda conn: dags.find(conn, "archive"))
    assert row is not None and row.paused
    tab_to(page, "Edit")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Change schedule main")).to_be_visible()
    page.wait_for_load_state()
    tab_to(page, "When")
    page.keyboard.press("Control+a")
    page.keyboard.type("0 4 * * *")
    expect(page.locator("#preview")).to_contain_text("At 04:00 every day")
    tab_to(page, "Save")
    page.keyboard.press("Enter")
    expect(page.locator("#schedules")).to_contain_text("at 04:00 every day")
    (saved,) = site.do(lambda conn: schedules.list_all(conn, dag="archive"))
    assert saved.spec["expression"] == "0 4 * * *"


def test_a_question_is_approved(visit: Visitor, site: Site) -> None:
    async def ask(conn: AsyncConnection) -> int:
        form = declare_params({"version": Param(type=str, required=True)})
        wait = WaitSpec(kind=WaitKind.APPROVAL, name="Release it?", form=form)
        await put(conn, make_dag("release", {"wait": []}, per_task={"wait": {"kind": TaskKind.WAIT, "wait": wait}}))
        run_id = await start(conn, "release")
        await wake(conn, shard=0, epoch=await lead(conn), batch=100)
        return run_id

    run_id = site.do(ask)
    page = visit(f"/runs/{run_id}/tasks/wait/approval", "operator")
    tab_to(page, "version")
    page.keyboard.type("1.4.2")
    tab_to(page, "Approve", "button")
    page.keyboard.press("Enter")
    expect(page.locator("#task-head h1 .state")).to_contain_text("success")
    (asked,) = site.do(lambda conn: waits.of_task(conn, run_id=run_id, task="wait"))
    assert asked.is_approved and asked.fields == {"version": "1.4.2"}


def test_a_runner_is_drained(visit: Visitor, site: Site) -> None:
    page = visit("/runners", "operator")
    tab_to(page, "Drain and stop")
    page.keyboard.press("Enter")
    expect(page.locator("dialog[open]")).to_contain_text("then shuts down")
    page.keyboard.press("Escape")
    expect(page.locator("dialog[open]")).to_have_count(0)
    focused(page, "Drain and stop")
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.locator("#runners")).to_contain_text("draining")
    focused(page, "Undrain")
    page.keyboard.press("Space")
    focused(page, "Drain")
    (runner,) = site.do(lambda conn: runners.list_busy(conn))
    assert runner.request is None


@pytest.mark.parametrize("key", ["?", "button"])
def test_the_overview_of_keys_opens_and_closes(visit: Visitor, key: str) -> None:
    page = visit("/dags", "viewer")
    if key == "button":
        page.get_by_role("button", name="Keyboard shortcuts").focus()
        page.keyboard.press("Enter")
    else:
        page.keyboard.press("?")
    overview = page.get_by_role("dialog", name="Keyboard")
    expect(overview).to_be_visible()
    expect(overview).to_contain_text("next and previous row")
    page.keyboard.press("Tab")
    page.keyboard.press("Escape")
    expect(overview).to_be_hidden()
    if key == "button":
        expect(page.get_by_role("button", name="Keyboard shortcuts")).to_be_focused()
