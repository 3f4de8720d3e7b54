"""A walk through the API as a program that gets it wrong: a 4xx each, a problem that names the thing, and nothing changed."""

from __future__ import annotations

from typing import Any, NamedTuple

from psycopg import AsyncConnection

from evertick.domain.dags.params import declare_params
from evertick.domain.dags.spec import TaskKind
from evertick.operations.paging import encode_cursor
from tests.api.conftest import Client
from tests.cli.test_wrong_uses import ASKS, PARAMS, everything
from tests.engine.world import Runner, make_dag, put, start

V1, V2 = "/api/v1", "/api/v2"


class Asked(NamedTuple):
    method: str
    path: str
    status: int
    words: tuple[str, ...]
    json: Any = None
    content: bytes | None = None


def runs(params: object, *words: str, status: int = 400) -> Asked:
    return Asked("POST", f"{V1}/dags/etl/runs", status, words, {"params": params})


def decides(answer: object, *words: str, status: int = 400) -> Asked:
    return Asked("POST", f"{V1}/runs/ASK/tasks/ask/approval", status, words, answer)


WRONG = [
    # params and conf
    runs({"rows": 0}, "'rows' is 0", "at least 1"),
    runs({"rows": "5"}, "'rows' is '5'", "an integer"),
    runs({"rows": None}, "'rows'", "an integer"),
    runs({"row": 5}, "unknown param 'row'", "did you mean 'rows'?"),
    runs({"way": "c"}, "'way' is 'c'", "one of"),
    runs({"code": "x" * 5000}, "'code'", "matches"),
    runs({"items": [1, 2, 3]}, "'items'", "at most 2 items"),
    runs({"flag": 1}, "'flag' is 1", "a boolean"),
    runs([1], "params", status=422),
    runs("x", "params", status=422),
    Asked("POST", f"{V1}/dags/elt/runs", 404, ("'elt'", "no DAG"), {"params": {}}),
    Asked("POST", f"{V1}/dags/etl/runs", 422, ("parms",), {"parms": {}}),
    Asked("POST", f"{V1}/dags/etl/runs", 422, (), None, b"{"),
    Asked("POST", f"{V1}/dags/etl/runs", 400, ("parsing the body",), None, b"[" * 100_000),
    Asked("POST", f"{V2}/dags/etl/dagRuns", 400, ("'rows'",), {"conf": {"rows": 0}, "logical_date": None}),
    Asked("POST", f"{V2}/dags/etl/dagRuns", 400, ("'rows'",), {"conf": {"rows": "many"}, "logical_date": None}),
    Asked("POST", f"{V2}/dags/etl/dagRuns", 422, ("conf",), {"conf": [1], "logical_date": None}),
    Asked("POST", f"{V2}/dags/elt/dagRuns", 404, ("elt",), {"conf": {}, "logical_date": None}),
    # approvals and events
    decides({"is_approved": True}, "'n' is required"),
    decides({"is_approved": True, "fields": {"n": "x"}}, "'n' is 'x'", "an integer"),
    decides({"is_approved": True, "fields": {"m": 1, "n": 1}}, "unknown param 'm'"),
    decides({"approved": True}, "is_approved", status=422),
    decides({"is_approved": "maybe"}, "is_approved", status=422),
    decides({"is_approved": False, "note": "x" * 3000}, "note", "at most 2000", status=422),
    Asked("POST", f"{V1}/runs/ASK/tasks/aks/approval", 404, ("aks",), {"is_approved": True}),
    Asked("POST", f"{V1}/runs/999/tasks/ask/approval", 404, ("999",), {"is_approved": True}),
    Asked("POST", f"{V1}/events/%20x", 400, ("is not a valid name for an event", "printable"), {"payload": 1}),
    Asked("POST", f"{V1}/events/x", 400, ("'x'", "at most 65,536"), {"payload": "x" * 70_000}),
    Asked("POST", f"{V1}/events/x", 400, ("'x'", "NUL"), {"payload": "\0"}),
    Asked("POST", f"{V1}/events/x", 422, ("paylaod",), {"paylaod": 1}),
    # versions
    Asked("GET", f"{V1}/dags/etl/versions/99", 404, ("no version 99",)),
    Asked("GET", f"{V1}/dags/etl/versions/x", 422, ("number",)),
    Asked("GET", f"{V1}/dags/etl/diff?old=99", 404, ("no version 99", "it has: 2, 1")),
    Asked("GET", f"{V1}/dags/etl/diff?old=0", 422, ("old",)),
    Asked("POST", f"{V1}/dags/etl/rollback", 409, ("already at version 2",), {"number": 2}),
    Asked("POST", f"{V1}/dags/etl/rollback", 404, ("no version 99",), {"number": 99}),
    Asked("POST", f"{V1}/dags/single/rollback", 404, ("no version before 1",)),
    Asked("POST", f"{V1}/dags/etl/rollback", 422, ("version",), {"version": 1}),
    # clear
    Asked(
        "POST",
        f"{V1}/runs/RUN/clear",
        409,
        ("has other tasks", "b is new", "start a new run"),
        {"run_on_latest_version": True},
    ),
    Asked("POST", f"{V1}/runs/RUN/clear", 404, ("'zz'",), {"tasks": ["zz"]}),
    Asked("POST", f"{V1}/runs/999/clear", 404, ("999",), {}),
    Asked("POST", f"{V1}/runs/RUN/clear", 422, ("task",), {"task": ["a"]}),
    # cursors: what is no text of ours, too
    Asked("GET", f"{V1}/dags?cursor={encode_cursor(chr(0xD800))}", 400, ("cursor is invalid",)),
    Asked("GET", f"{V1}/dags?cursor={encode_cursor(chr(0))}", 400, ("cursor is invalid",)),
    Asked("GET", f"{V1}/dags?cursor={encode_cursor(1)}", 400, ("cursor is invalid",)),
    Asked("GET", f"{V1}/runs?cursor={encode_cursor(10**30)}", 400, ("cursor is invalid",)),
    Asked("GET", f"{V1}/runs?cursor={encode_cursor(True)}", 400, ("cursor is invalid",)),
    # values
    Asked("PUT", f"{V1}/secrets/a%20b", 400, ("'a b'", "is not a valid name for a secret"), {"value": "x"}),
    Asked("PUT", f"{V1}/secrets/token", 422, ("value",), {"text": "x"}),
    Asked("PUT", f"{V1}/secrets/token", 422, ("value",), {"value": 5}),
    Asked("GET", f"{V1}/secrets/token", 404, ("token",)),
    Asked("DELETE", f"{V1}/variables/region", 404, ("region",)),
    # pools, sinks, tasks
    Asked("PUT", f"{V1}/pools/warehouse", 422, ("slots",), {"slots": -1}),
    Asked("PUT", f"{V1}/pools/a%20b", 400, ("a b",), {"slots": 1}),
    Asked("DELETE", f"{V1}/pools/warehouse", 404, ("warehouse",)),
    Asked("GET", f"{V1}/notifications/99", 404, ("99",)),
    Asked("POST", f"{V1}/notifications/retry", 400, ("not valid text",), None, rb'{"sink": "\ud800"}'),
    Asked("POST", f"{V1}/runs/RUN/tasks/a/mark", 422, ("state",), {"state": "finished"}),
    Asked("GET", f"{V1}/runs/RUN/tasks/zz/why", 404, ("'zz'",)),
    Asked("GET", f"{V1}/runs/RUN/tasks/a[5]", 404, ("a[5]",)),
]


async def test_whatever_is_asked_wrong_is_answered_by_a_problem(admin: Client, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"a": []}, params=declare_params(PARAMS)))
    run = await start(conn, "etl")
    await (await Runner.join(conn)).drain()
    await put(conn, make_dag("etl", {"a": [], "b": ["a"]}, params=declare_params(PARAMS)))
    await put(conn, make_dag("single", {"ask": []}, per_task={"ask": {"kind": TaskKind.WAIT, "wait": ASKS}}))
    ask = await start(conn, "single")
    before = await everything(conn)
    unclear: dict[str, object] = {}
    for number, asked in enumerate(WRONG):
        path = asked.path.replace("RUN", str(run)).replace("ASK", str(ask))
        given = {"content": asked.content} if asked.content is not None else {"json": asked.json}
        headers = {"Content-Type": "application/json"}
        answer = await admin.request(asked.method, path, headers=headers, **given)  # type: ignore[arg-type]
        text = answer.text
        kind = answer.headers.get("Content-Type", "")
        if (
            answer.status_code != asked.status
            or [word for word in asked.words if word not in text.replace('\\"', '"')]
            or "Traceback" in text
            or len(text) > 2000
            or "json" not in kind
        ):
            unclear[f"{number} {asked.method} {path}"] = (answer.status_code, text[:500])
    assert not unclear, "\n".join(f"{asked}: {said}" for asked, said in unclear.items())
    assert await everything(conn) == before
