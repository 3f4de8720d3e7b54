"""Every page there is, with somebody's things on it, and every button. What is new and not named here fails a test."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from psycopg import AsyncConnection

from evertick.api.auth import GuardedRoute
from evertick.db.queries import dags, runners
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.access import Actor, Permission
from evertick.domain.attempt import TaskKey
from evertick.domain.dags.gates import GateKind, GateSpec
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from evertick.domain.deployments import DeploymentChange, DeploymentKind
from evertick.domain.retry import RetryPolicy
from evertick.engine.gates import set_pool
from evertick.engine.maintenance import promote_due_tasks
from evertick.engine.publish import PublishedDag, publish_all
from evertick.engine.runs import of_run, write_note
from evertick.engine.waits import wake
from evertick.ui.app import PAGES as MODULES
from tests.engine.world import Runner, lead, make_dag, put, set_clock, start, states
from tests.ui.site import HttpVisitor, Site, pipeline

# Answers of routes that are no page: a part of a dialog, a document for a script, a file, what comes before signing in.
NO_PAGES = {
    "/static/{version}/{name:path}",
    "/favicon.ico",
    "/docs",
    "/docs/{name:path}",
    "/login",
    "/login/{provider}",
    "/login/{provider}/callback",
    "/auth/link/{secret}",
    "/runs/{run_id}/states",
    "/runs/{run_id}/clear",
    "/runs/{run_id}/tasks/{task}/log",
    "/runs/{run_id}/tasks/{task}/mark",
    "/dags/{dag}/versions/{number}/rollback",
}
# Each change that a page offers, and the test that does it from end to end.
ACTIONS = {
    "/login": "test_actions.test_signing_in_leads_to_where_one_wanted_to_go",
    "/logout": "test_actions.test_signing_in_leads_to_where_one_wanted_to_go",
    "/account/password": "test_new_pages.test_a_user_sets_and_changes_the_own_password_on_the_account_page",
    "/dags/{dag}/pause": "test_actions.test_everything_can_be_done_with_the_keyboard_alone",
    "/dags/{dag}/unpause": "test_actions.test_everything_can_be_done_with_the_keyboard_alone",
    "/dags/{dag}/trigger": "test_actions.test_a_run_is_triggered_by_a_form_that_says_what_is_wrong_beside_the_field",
    "/dags/{dag}/schedules/preview": "test_new_pages.test_instants_are_edited_a_line_for_each",
    "/dags/{dag}/schedules/save": "test_new_pages.test_instants_are_edited_a_line_for_each",
    "/dags/{dag}/schedules/{name}/{change}": "test_new_pages.test_a_schedule_is_paused_on_its_page",
    "/dags/{dag}/versions/{number}/rollback": "test_new_pages.test_a_version_is_rolled_back_with_a_look_before",
    "/deployments/{name}/versions/{number}/rollback": "test_new_pages.test_a_deployment_is_rolled_back_and_deleted",
    "/deployments/{name}/delete": "test_new_pages.test_a_deployment_is_rolled_back_and_deleted",
    "/runs/{run_id}/cancel": "test_run_browser.test_a_run_is_watched_and_canceled_without_a_reload",
    "/runs/{run_id}/clear": "test_run_browser.test_clear_with_a_look_before_by_keyboard_alone",
    "/runs/{run_id}/mark": "test_new_pages.test_a_run_is_marked_triggered_again_with_its_parameters_and_deleted",
    "/runs/{run_id}/delete": "test_new_pages.test_a_run_is_marked_triggered_again_with_its_parameters_and_deleted",
    "/runs/bulk": "test_new_pages.test_several_runs_and_dags_are_changed_at_once",
    "/dags/bulk": "test_new_pages.test_several_runs_and_dags_are_changed_at_once",
    "/runs/{run_id}/note": "test_new_pages.test_notes_are_written_changed_and_taken_away",
    "/runs/{run_id}/tasks/{task}/note": "test_new_pages.test_notes_are_written_changed_and_taken_away",
    "/runs/{run_id}/tasks/{task}/mark": "test_run_pages.test_mark_and_cancel_do_what_they_say",
    "/runs/{run_id}/tasks/{task}/approval": "test_approval_pages.test_a_question_is_listed_filled_in_and_decided_once",
    "/backfills": "test_run_pages.test_a_backfill_is_looked_at_made_paused_and_canceled",
    "/backfills/preview": "test_run_pages.test_a_backfill_is_looked_at_made_paused_and_canceled",
    "/backfills/{backfill_id}/pause": "test_run_pages.test_a_backfill_is_looked_at_made_paused_and_canceled",
    "/backfills/{backfill_id}/resume": "test_run_pages.test_a_backfill_is_looked_at_made_paused_and_canceled",
    "/backfills/{backfill_id}/cancel": "test_run_pages.test_a_backfill_is_looked_at_made_paused_and_canceled",
    "/assets/{name:path}/update": "test_new_pages.test_an_asset_shows_who_updates_it_and_who_waits_and_is_told_of",
    "/pools": "test_run_pages.test_pools_are_set_and_show_who_holds_them",
    "/pools/{name}/delete": "test_run_pages.test_pools_are_set_and_show_who_holds_them",
    "/runners/{runner}/drain": "test_run_pages.test_a_runner_is_drained_and_takes_work_again",
    "/runners/{runner}/undrain": "test_run_pages.test_a_runner_is_drained_and_takes_work_again",
    "/variables": "test_run_pages.test_variables_and_connections_are_set_and_secrets_stay_hidden",
    "/variables/{name}/delete": "test_run_pages.test_variables_and_connections_are_set_and_secrets_stay_hidden",
    "/connections": "test_run_pages.test_variables_and_connections_are_set_and_secrets_stay_hidden",
    "/connections/{name}/delete": "test_new_pages.test_secrets_are_set_and_never_shown",
    "/secrets": "test_new_pages.test_secrets_are_set_and_never_shown",
    "/secrets/{name}/delete": "test_new_pages.test_secrets_are_set_and_never_shown",
    "/users": "test_run_pages.test_users_are_added_changed_linked_and_disabled",
    "/users/{name}": "test_run_pages.test_users_are_added_changed_linked_and_disabled",
    "/users/{name}/disable": "test_run_pages.test_users_are_added_changed_linked_and_disabled",
    "/users/{name}/enable": "test_run_pages.test_users_are_added_changed_linked_and_disabled",
    "/users/{name}/link": "test_run_pages.test_users_are_added_changed_linked_and_disabled",
    "/dead-letters/{number}/replay": "test_new_pages.test_schedules_alerts_notifications_and_events_have_pages",
    "/notifications/{number}/retry": "test_new_pages.test_schedules_alerts_notifications_and_events_have_pages",
    "/tokens": "test_run_pages.test_a_token_is_shown_once_and_never_may_more_than_its_maker",
    "/tokens/{token_id}/revoke": "test_run_pages.test_a_token_is_shown_once_and_never_may_more_than_its_maker",
}
# Pages of which nothing changes by itself while somebody looks: forms, what stays as it was published or set, and a
# forecast, which is computed on request.
STILL = re.compile(
    r"/(edit|code|details|trigger|new|approval|versions|calendar|durations)\b|tab=details"
    r"|^/(variables|connections|secrets)/.|^/audit|^/account|^/forecast"
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


@dataclass(frozen=True, slots=True)
class Door:
    """A route, as an address finds it."""

    method: str
    path: str
    permission: Permission

    def leads(self, address: str) -> bool:
        pattern = re.sub(r"\{\w+:path\}", ".+", self.path)
        return re.fullmatch(re.sub(r"\{\w+\}", "[^/]+", pattern), address.partition("?")[0]) is not None


def doors() -> list[Door]:
    return [
        Door(method, route.path, route.permission)
        for module in MODULES
        for route in module.router.routes
        if isinstance(route, GuardedRoute)
        for method in route.methods or ()
    ]


def door_to(method: str, address: str) -> Door | None:
    """The one that answers: the first of them, as the application tries them in their order."""
    return next((door for door in doors() if door.method == method and door.leads(address)), None)


def furnish(site: Site) -> dict[str, str | None]:
    """Something to see on every page. Each page with the name of its picture, if it has one."""
    failed, asking = site.do(_furnish)
    waited = site.do(_wait_for_everything)
    write_log(site, failed, 4, SAID)
    with HttpVisitor(site, "editor") as editor:
        editor.press("/variables", name="region", value="eu-west-1", description="Where the shops are.")
        editor.press("/connections", name="shop_db", value="postgresql://anna:hunter22@db.shop.example:5432/shop")
        editor.press("/secrets", name="api_token", value="s3cr3t-value", description="Of the payment service.")
        form = {"dag": "billing", "schedule": "main", "first": "2026-01-05T00:00", "last": "2026-01-20T00:00"}
        backfill = editor.press("/backfills", **form, parallel="2").headers["HX-Redirect"]
    dag, run, task = "/dags/orders", f"/runs/{failed}", f"/runs/{failed}/tasks/load"
    return {
        "/": "home",
        "/dags": "dags",
        "/dags?sort=-took": None,
        dag: "dag-grid",
        f"{dag}/graph": None,
        f"{dag}/calendar": None,
        f"{dag}/durations": None,
        f"{dag}/schedules": None,
        f"{dag}/schedules/edit?name=main": "schedule",
        f"{dag}/versions": "versions",
        f"{dag}/code": None,
        "/dags/report_by_hand/details": None,
        "/dags/report_by_hand/trigger": "trigger-form",
        "/runs": None,
        run: "run",
        f"{run}?tab=graph": "run-graph",
        f"/runs/{waited}?tab=gantt": "run-gantt",
        f"/runs/{waited}?tab=log": None,
        f"{run}?tab=history": None,
        task: "task-log",
        f"{task}?tab=attempts": None,
        f"{task}?tab=result": None,
        f"{task}?tab=details": None,
        f"/runs/{asking}/tasks/wait": None,
        "/approvals": None,
        f"/runs/{asking}/tasks/wait/approval": "approval",
        "/backfills": None,
        "/backfills/new?dag=billing": None,
        backfill: "backfill",
        "/assets": None,
        "/deployments": None,
        "/deployments/shop": None,
        "/deployments/shop?from=1": None,
        "/pools": "pools",
        "/pools/warehouse": None,
        "/keys": None,
        "/keys/invoices": None,
        "/queues": None,
        "/runners": None,
        "/schedulers": None,
        "/variables": None,
        "/variables/region": None,
        "/connections": None,
        "/connections/shop_db": None,
        "/secrets": None,
        "/secrets/api_token": None,
        "/users": None,
        "/tokens": None,
        "/audit": None,
        "/account": None,
        "/schedules": None,
        "/alerts": None,
        "/guarantees": None,
        "/forecast": None,
        "/notifications": None,
        "/events": None,
        "/dead-letters": None,
        f"{dag}/durations?task=load": None,
    }


async def _furnish(conn: AsyncConnection) -> tuple[int, int]:
    """A failed run with notes, one that asks somebody, one that waits at its gates."""
    for failed in [row[0] for row in await (await conn.execute(_FAILED)).fetchall()]:
        if (await states(conn, failed)).get("load") == "failed":
            break
    await write_note(
        conn, of_run(failed), content="The shop sent no rows.\nAsked them; clear it tomorrow.", actor=Actor("user:anna")
    )
    await write_note(conn, TaskKey(failed, 4, -1), content="Known: shop 17.", actor=Actor("user:anna"))
    await put(conn, pipeline("orders", "*/20 * * * *", description="Orders of the shops.", tags=("finance", "hourly")))
    await conn.execute(
        "insert into outbox (shard, sink, event, payload, created_at, waiting_since, due_at, state, ended_at)"
        " values (0, 'https://chat.example/hook', 'failure', '{}', clock(), clock(), clock(), 'failed', clock())"
    )
    await conn.execute(
        "insert into dead_letter (dag, params, sent_at, sent_by, reason, failed_at)"
        " values ('orderz', '{}', clock(), 'shop', 'there is no such DAG', clock())"
    )
    await _deploy(conn)
    await set_pool(conn, name="warehouse", slots=1, actor=Actor("test"))
    gates = (GateSpec(kind=GateKind.POOL, name="warehouse"), GateSpec(kind=GateKind.MUTEX, name="invoices"))
    per_task = {"book": {"outlets": ("invoices", "s3://books/2026")}}
    await put(
        conn, make_dag("invoices", {"book": [], "print": []}, task_gates=gates, per_task=per_task, tags=("finance",))
    )
    await start(conn, "invoices")
    form = declare_params(
        {"version": Param(type=str, required=True, description="As 1.4.2."), "size": Param(1, type=int)}
    )
    wait = WaitSpec(kind=WaitKind.APPROVAL, name="Release the new price list?", form=form)
    asks = {"wait": {"kind": TaskKind.WAIT, "wait": wait}}
    await put(conn, make_dag("release", {"wait": [], "publish": ["wait"]}, per_task=asks, tags=("finance",)))
    epoch = await lead(conn)
    await conn.execute("update shard set leader = 'scheduler-1'")
    asking = await start(conn, "release")
    await wake(conn, shard=0, epoch=epoch, batch=100)
    return failed, asking


async def _deploy(conn: AsyncConnection) -> None:
    """Two versions of a deployment with a broken file."""
    await dags.put_bundle(conn, bundle_hash="b", file="shop/prices.py", archive=b"", uses_threads=None)
    for number, names in enumerate((("stock", "prices"), ("prices", "returns")), start=1):
        change = DeploymentChange(
            name="shop",
            kind=DeploymentKind.GIT,
            source={"url": "https://git.example.com/shop.git", "ref": "main", "path": "dags"},
            is_whole=True,
            commit_hash=f"{number}f8a01c2" * 5,
            author="Anna <anna@example.com>",
            message="Read prices in one query",
        )
        specs = [make_dag(name, {"read": [], f"write_{number}": ["read"]}, tags=("finance",)) for name in names]
        given = [PublishedDag(spec=spec, file=f"{spec.name}.py", bundle_hash="b") for spec in specs]
        retired = ["stock"] if number > 1 else []
        await publish_all(conn, change, given, retired=retired, actor=Actor("publisher"))
    await dags.put_import_error(
        conn, deployment="shop", file="returns.py", line=4, message="NameError: name 'fetch' is not defined", detail=""
    )


async def _wait_for_everything(conn: AsyncConnection) -> int:
    """A run a while ago whose tasks waited for a pool, a runner, their code and another try."""
    begin = datetime.now(UTC) - timedelta(minutes=12)

    async def after(seconds: float) -> None:
        await set_clock(conn, begin + timedelta(seconds=seconds))

    await after(0)
    epoch = await lead(conn)
    await conn.execute("update shard set leader = 'scheduler-1'")
    await set_pool(conn, name="loader", slots=1, actor=Actor("test"))
    shape: dict[str, list[str]] = {
        "fetch": [],
        "load.eu": ["fetch"],
        "load.us": ["fetch"],
        "check": ["load.eu", "load.us"],
    }
    load = {
        "group": "load",
        "gates": (GateSpec(kind=GateKind.POOL, name="loader"),),
        "retry": RetryPolicy(retries=1, delay_seconds=15),
    }
    per_task = {"load.eu": load, "load.us": load}
    await put(conn, make_dag("nightly", shape, per_task=per_task, task_queue="nightly", tags=("finance",)))
    run_id = await start(conn, "nightly")
    runner = await Runner.join(conn, queues=("nightly",))

    async def take(seconds: float) -> ExchangeRow:
        await after(seconds)
        (claim,) = await runner.claim(queues=("nightly",))
        return claim

    async def end(seconds: float, claim: ExchangeRow, kind: str = "success", **fields: object) -> None:
        await after(seconds)
        await runner.finish(claim, kind, **fields)

    await end(24, await take(3), start_in=6.0)
    await end(52, await take(26), "failed", reason="TimeoutError: no answer", retry_in=15)
    other = await take(55)
    await after(67)
    await promote_due_tasks(conn, shard=0, epoch=epoch, limit=10)
    await end(92, other)
    await end(118, await take(96), start_in=3.0)
    await end(131, await take(120))
    await runners.leave(conn, runner.session)
    return run_id


_FAILED = """
    select s.run_id from run_status s join dag d on d.dag_id = s.dag_id
     where d.name = 'billing' and s.state = 'failed' order by s.run_id desc limit 20"""


def write_log(
    site: Site, run_id: int, idx: int, lines: Iterable[tuple[str, str]], *, offset: int = 0, epoch: int = 1
) -> int:
    """One chunk, as if the attempt had written it; where the next begins."""
    now = int(time.time() * 1e6)
    content = "".join(f"{now + 1000 * n} {level} {text}\n" for n, (level, text) in enumerate(lines))
    end = offset + len(content.encode())

    async def put_chunk(conn: AsyncConnection) -> None:
        await conn.execute(
            "insert into log_chunk (run_id, idx, map_index, epoch, seq, end_offset, content)"
            " values (%s, %s, -1, %s, %s, %s, %s)",
            [run_id, idx, epoch, offset, end, content],
        )

    site.do(put_chunk)
    return end


def controls_in(text: str) -> Iterator[tuple[str, str]]:
    """What a page lets somebody do or open: a method and an address."""
    for name, address in re.findall(r"""(hx-post|hx-get|href|action)="(/[^"#]*)\"""", text):
        yield ("POST" if name == "hx-post" else "GET"), address.replace("&amp;", "&")
