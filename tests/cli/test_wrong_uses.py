"""A walk through the commands as somebody who gets them wrong: one line each that names the thing and the next step, a status of 2,
no traceback, and nothing changed."""

from __future__ import annotations

import io
import shlex
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.domain.dags.params import Param, declare_params
from evertick.domain.dags.spec import TaskKind
from evertick.domain.dags.waits import WaitKind, WaitSpec
from tests.cli.conftest import Cli
from tests.engine.world import Runner, make_dag, put, start, value

PARAMS = {
    "rows": Param(5, minimum=1, maximum=9),
    "way": Param("a", choices=["a", "b"]),
    "code": Param("a1", pattern="[a-z][0-9]", max_length=2),
    "items": Param([1], max_length=2),
    "flag": Param(True),
}
ASKS = WaitSpec(kind=WaitKind.APPROVAL, name="Go?", form=declare_params({"n": Param(type=int, required=True)}))

# What is typed, and the words that the answer has. RUN is a run of etl that has ended, ASK one that waits for a decision.
TYPED: dict[str, tuple[str, ...]] = {
    # params and conf
    "dags trigger elt": ("'elt'", "Did you mean 'etl'?"),
    "dags trigger etl --param rows=0": ("'rows' is 0", "at least 1"),
    "dags trigger etl --param rows=10": ("'rows' is 10", "at most 9"),
    "dags trigger etl --param rows=many": ("'rows' is 'many'", "an integer"),
    "dags trigger etl --param rows": ("'rows'", "--param name=value"),
    "dags trigger etl --param =5": ("'=5'", "--param name=value"),
    "dags trigger etl --param row=5": ("unknown param 'row'", "did you mean 'rows'?"),
    "dags trigger etl --param way=c": ("'way' is 'c'", "one of 'a', 'b'"),
    "dags trigger etl --param code=zz": ("'code' is 'zz'", "matches"),
    "dags trigger etl --param items=[1,2,3]": ("'items'", "at most 2 items"),
    "dags trigger etl --param flag=maybe": ("'flag' is 'maybe'", "a boolean"),
    "dags trigger etl --params {": ("--params is not JSON", '{"rows": 5}'),
    "dags trigger etl --params [1]": ("--params is a JSON list, not an object", '{"rows": 5}'),
    "dags trigger etl --params '{\"rows\": null}'": ("'rows'", "an integer"),
    "dags trigger etl --params '{\"rows\": NaN}'": ("'rows'", "not JSON"),
    "dags trigger etl --key ''": ("--key is empty",),
    "dags trigger etl --timeout 5s": ("add --wait",),
    "dags trigger etl --wait --timeout soon": ("soon",),
    # approvals and events
    "approvals approve ASK ask": ("'n' is required", "an integer"),
    "approvals approve ASK ask --field n=x": ("'n' is 'x'", "an integer"),
    "approvals approve ASK ask --field m=1": ("unknown param 'm'", "n"),
    "approvals approve ASK ask --field n": ("'n'", "--field name=value"),
    "approvals approve ASK aks": ("'aks'", "evertick approvals list"),
    "approvals approve RUN a": ("'a'", "has no approval", "evertick approvals list"),
    "approvals approve 999 ask": ("999",),
    "approvals approve x ask": ("x",),
    "approvals reject ASK aks": ("'aks'", "evertick approvals list"),
    "events send e --payload {": ("--payload", "JSON"),
    "events send e --payload NaN": ("'e'", "not JSON"),
    "events send ' e'": (" e", "is not a valid name for an event"),
    "events send": ("NAME",),
    "events send e --key ''": ("key of an event",),
    # versions
    "dags versions elt": ("'elt'", "Did you mean 'etl'?"),
    "dags diff etl 99": ("no version 99", "it has: 2, 1"),
    "dags diff etl x": ("VERSION", "integer", "--help"),
    "dags diff etl 0": ("VERSION", "1", "--help"),
    "dags rollback etl 2 --yes": ("already at version 2",),
    "dags rollback etl 99 --yes": ("no version 99",),
    "dags rollback single --yes": ("'single'", "no version before 1"),
    "dags rollback elt --yes": ("Did you mean 'etl'?",),
    "deploy nowhere": ("nowhere",),
    "deploy empty": ("empty",),
    "deploy broken": ("broken.py",),
    "deploy good --name ../x": ("../x", "letters, digits"),
    "dags validate broken": ("broken.py",),
    # clear
    "runs clear RUN --latest --yes": ("Version 2 of etl has other tasks", "b is new", "evertick dags trigger etl"),
    "runs clear RUN --task zz --yes": ("'zz'", "evertick tasks list"),
    "runs clear 999 --yes": ("999",),
    "runs clear x --yes": ("x",),
    # values
    "variables get region": ("region",),
    "connections get db": ("db",),
    "secrets get token": ("token",),
    "secrets delete token --yes": ("token",),
    "variables set a/b": ("'a/b'", "is not a valid name for a variable"),
    "variables set region": ("empty", "standard input"),
    "connections set db": ("empty", "standard input"),
    # sinks and pools
    "notifications test example.com": ("example.com",),
    "notifications test email:nobody": ("nobody",),
    "notifications test webhook:secret/": ("is not a valid name for a secret",),
    "notifications show 99": ("99",),
    "notifications retry": ("--all",),
    "pools set warehouse -1": ("SLOTS", "0", "--help"),
    "pools set a/b 3": ("a/b",),
    "pools delete warehouse --yes": ("warehouse",),
    # the words themselves
    "dag list": ("dag",),
    "dags lst": ("lst",),
    "dags trigger etl --parm x=1": ("--parm",),
    "tasks why RUN zz": ("'zz'",),
    "tasks mark RUN a finished": ("finished",),
    "schedules set etl nightly --cron": ("--cron",),
}


async def test_whatever_is_typed_wrong_is_answered_by_one_line(
    cli: Cli, conn: AsyncConnection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(conn, make_dag("etl", {"a": []}, params=declare_params(PARAMS)))
    run = await start(conn, "etl")
    await (await Runner.join(conn)).drain()
    await put(conn, make_dag("etl", {"a": [], "b": ["a"]}, params=declare_params(PARAMS)))
    await put(conn, make_dag("single", {"ask": []}, per_task={"ask": {"kind": TaskKind.WAIT, "wait": ASKS}}))
    ask = await start(conn, "single")
    monkeypatch.setenv("EVERTICK_HOME", str(tmp_path / "home"))
    await cli("secrets", "rotate")
    for name, text in {"broken": "from evertick import dag\ndef (:\n", "good": "x = 1\n"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text(text)
    (tmp_path / "empty").mkdir()
    before = await everything(conn)
    unclear: dict[str, str] = {}
    for typed, words in TYPED.items():
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"")))
        arguments = typed.replace("RUN", str(run)).replace("ASK", str(ask))
        ran = await cli(*shlex.split(arguments))
        said = f"{ran.status}: {ran.err or ran.out}"
        if (
            ran.status not in (1, 2)
            or [word for word in words if word not in ran.err + ran.out]
            or "Traceback" in said
            or len(ran.err) > 700
        ):
            unclear[typed] = said
    assert not unclear, "\n".join(f"{asked}: {said}" for asked, said in unclear.items())
    assert await everything(conn) == before


async def everything(conn: AsyncConnection) -> object:
    return await value(
        conn,
        "select array[(select count(*) from run), (select count(*) from dag_version), (select count(*) from event),"
        " (select count(*) from stored_value), (select count(*) from gate), (select count(*) from audit_log),"
        " (select count(*) from approval where decided_at is not null)]",
    )
