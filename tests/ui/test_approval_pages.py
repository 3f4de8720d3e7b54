"""What a task asks is answered on a page: with its form, by who may, once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest
from psycopg import AsyncConnection

from evertick.api.auth import CSRF_HEADER, PLAIN_COOKIE, csrf_of
from evertick.db.queries import waits
from evertick.domain.access import Role
from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from evertick.engine.waits import wake
from tests.engine.world import lead, make_dag, put, start
from tests.ui.site import Site


@pytest.fixture
def people(site: Site) -> Iterator[dict[str, httpx.Client]]:
    with ExitStack() as stack:
        yield {
            who: stack.enter_context(
                httpx.Client(
                    base_url=site.url,
                    headers={"Accept": "text/html", CSRF_HEADER: csrf_of(secret), "Origin": site.url},
                    cookies={PLAIN_COOKIE: secret},
                    timeout=30,
                )
            )
            for who, secret in site.sessions.items()
        }


def asked(site: Site, dag: str, approvers: Role | None = None) -> int:
    """A run that waits for a decision."""

    async def ask(conn: AsyncConnection) -> int:
        form = declare_params({"version": Param(type=str, required=True), "size": Param(1, type=int)})
        wait = WaitSpec(kind=WaitKind.APPROVAL, name="Release <b>it</b>?", form=form, approvers=approvers)
        await put(conn, make_dag(dag, {"wait": []}, per_task={"wait": {"kind": TaskKind.WAIT, "wait": wait}}))
        epoch = await lead(conn)
        run_id = await start(conn, dag)
        await wake(conn, shard=0, epoch=epoch, batch=100)
        return run_id

    return site.do(ask)


def test_a_question_is_listed_filled_in_and_decided_once(site: Site, people: dict[str, httpx.Client]) -> None:
    run_id = asked(site, "asks")
    path = f"/runs/{run_id}/tasks/wait/approval"
    assert "Release &lt;b&gt;it&lt;/b&gt;?" in people["viewer"].get("/approvals").text
    assert path in people["viewer"].get(f"/runs/{run_id}/tasks/wait").text
    assert "verdict" not in people["viewer"].get(path).text, "who may not decide has no button"
    assert people["viewer"].post(path, data={"verdict": "approve"}).status_code == 403
    operator = people["operator"]
    assert "verdict" in operator.get(path).text
    assert operator.post(path, data={"verdict": "perhaps"}).status_code == 400
    wrong = operator.post(path, data={"verdict": "approve", "p.size": "many", "note": "it is <i>fine</i>"})
    assert wrong.status_code == 422
    assert (
        "is required" in wrong.text and "it is &lt;i&gt;fine&lt;/i&gt;" in wrong.text and 'value="many"' in wrong.text
    )
    done = operator.post(path, data={"verdict": "approve", "p.version": "2", "p.size": "3", "note": "tested"})
    assert (done.status_code, done.headers["HX-Redirect"]) == (204, f"/runs/{run_id}/tasks/wait")
    (row,) = site.do(lambda conn: waits.of_task(conn, run_id=run_id, task="wait"))
    assert (row.is_approved, row.decided_by, row.note) == (True, "user:operator", "tested")
    assert row.fields == {"version": "2", "size": 3}
    assert people["admin"].post(path, data={"verdict": "reject"}).status_code == 409
    text = operator.get(path).text
    assert "user:operator" in text and "tested" in text and "verdict" not in text
    assert f"/runs/{run_id}/" not in operator.get("/approvals").text


def test_who_rejects_need_not_fill_in_the_form(site: Site, people: dict[str, httpx.Client]) -> None:
    run_id = asked(site, "asks_editors", Role.EDITOR)
    path = f"/runs/{run_id}/tasks/wait/approval"
    assert (
        "verdict" not in people["operator"].get(path).text and "editor and higher" in people["operator"].get(path).text
    )
    assert people["operator"].post(path, data={"verdict": "reject"}).status_code == 403
    assert people["editor"].post(path, data={"verdict": "reject", "note": "no"}).status_code == 204
    (row,) = site.do(lambda conn: waits.of_task(conn, run_id=run_id, task="wait"))
    assert (row.is_approved, row.note) == (False, "no")
    assert people["limited"].get(path).status_code == 404
    assert people["editor"].get(f"/runs/{site.runs['orders'][2]}/tasks/load/approval").status_code == 404
