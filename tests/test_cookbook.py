"""Every recipe of `examples/` runs, in this process, against real files, databases, programs and HTTP servers."""

from __future__ import annotations

import json
import re
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from evertick.sdk.dag import load_dags
from evertick.sdk.local_run import LocalRun
from tests.source_tree import ROOT

RECIPES = ROOT / "examples"
SUNDAY, MONDAY = datetime(2030, 1, 6, 3, tzinfo=UTC), datetime(2030, 1, 7, 3, tzinfo=UTC)


class Server(ThreadingHTTPServer):
    """Answers from a list of (status, headers, body), one per request, and keeps the requests."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers: list[tuple[int, Mapping[str, str], str]] = []
        self.requests: list[tuple[str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.path, dict(self.headers)))
        status, headers, body = self.server.answers.pop(0)
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body.encode())

    do_POST = do_GET

    def log_message(self, format: str, *arguments: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join()


def recipe(file: str, dag: str | None = None) -> Callable[..., LocalRun]:
    dags = load_dags(RECIPES, f"{file}.py")
    return (dags[dag] if dag else next(iter(dags.values()))).test


def succeeded(ran: LocalRun) -> dict[str, Any]:
    assert ran.state == "success", ran.reasons
    return dict(ran.results)


def test_incremental_load(tmp_path: Path) -> None:
    run = recipe("incremental_load")
    source, target = str(tmp_path / "shop.db"), str(tmp_path / "warehouse.db")
    with closing(sqlite3.connect(source)) as conn, conn:
        conn.execute("create table orders (id integer primary key, amount integer)")
        conn.execute("insert into orders values (1, 10), (2, 20)")
    params = {"source": source, "target": target}
    assert succeeded(run(params=params))["load"] == 2
    assert run(params=params).states["load"] == "skipped"
    with closing(sqlite3.connect(source)) as conn, conn:
        conn.execute("insert into orders values (3, 30)")
    assert succeeded(run(params=params))["load"] == 1


def test_sla_alert() -> None:
    (dag,) = load_dags(RECIPES, "sla_alert.py").values()
    assert dag.spec.start_within_seconds == 300 and dag.spec.tasks[0].finish_within_seconds == 1800
    assert len(dag.spec.notices) == len(dag.spec.tasks[0].notices) == 2
    succeeded(dag.test())


def test_retry_only_on_5xx(server: Server) -> None:
    run, params = recipe("retry_only_on_5xx"), {"url": server.url}
    server.answers = [(503, {}, ""), (429, {"Retry-After": "1"}, ""), (200, {}, "1.1")]
    assert succeeded(run(params=params))["fetch"] == "1.1" and len(server.requests) == 3
    server.answers = [(404, {}, "")]
    failed = run(params=params)
    assert failed.state == "failed" and "404" in failed.reasons["fetch"] and len(server.requests) == 4


def test_fan_out_with_rate_limit() -> None:
    assert succeeded(recipe("fan_out_with_rate_limit")())["total"] == sum(len(f"customer-{n}") for n in range(20))


def test_one_writer_per_table() -> None:
    ran = recipe("one_writer_per_table")(params={"table": "orders"})
    assert succeeded(ran) == {"rewrite": "rewrote orders", "check": "checked orders"}


def test_wait_for_file(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("x\n1\n")
    assert succeeded(recipe("wait_for_file")(params={"folder": str(tmp_path)}))["load"] == 2


def test_wait_for_a_person() -> None:
    ran = recipe("wait_for_a_person")(answers={"approval": {"channel": "stable"}})
    assert succeeded(ran)["publish"] == "3 prices to stable, approved by dag.test"
    assert recipe("wait_for_a_person")(answers={"approval": False}).state == "failed"


def test_backfill_a_month(tmp_path: Path) -> None:
    run = recipe("backfill_a_month")
    for _ in range(2):
        for day in (SUNDAY, MONDAY):
            succeeded(run(params={"folder": str(tmp_path)}, fire_at=day))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2030-01-06.json", "2030-01-07.json"]


def test_run_on_gpu_machines() -> None:
    ran = recipe("run_on_gpu_machines")()
    assert succeeded(ran)["publish"] == "published" and ran.states["train_on_cpu"] == "skipped"


def test_dbt_project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """dbt itself is no dependency of the tests: a script in its place keeps its arguments."""
    program, calls = tmp_path / "dbt", tmp_path / "calls"
    program.write_text(f'#!/bin/sh\necho "$PWD $@" >> {calls}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    succeeded(recipe("dbt_project")(params={"project": str(tmp_path), "target": "dev"}, fire_at=MONDAY))
    assert calls.read_text().splitlines() == [
        f"{tmp_path} source freshness",
        f"{tmp_path} run --target dev --vars day:2030-01-07",
        f"{tmp_path} test --target dev",
    ]


def test_pandas_pipeline(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="NOT RUN: pandas is not installed")
    (tmp_path / "sales.csv").write_text("region,amount\nnorth,3\nnorth,4\nsouth,-1\nsouth,5\n,9\n")
    ran = recipe("pandas_pipeline")(params={"source": str(tmp_path / "sales.csv"), "folder": str(tmp_path)})
    assert succeeded(ran)["aggregate"] == {"north": 7, "south": 5}


def test_llm_with_budget(server: Server) -> None:
    run = recipe("llm_with_budget")
    stream = "".join(f"data: {json.dumps({'text': word})}\n\n" for word in ("short ", "text")) + "data: [DONE]\n"
    server.answers = [(500, {}, ""), (200, {}, stream), (200, {}, stream)]
    assert succeeded(run(params={"url": server.url, "budget": 4}))["bill"] == 4
    server.answers = [(200, {}, stream), (200, {}, stream)]
    over = run(params={"url": server.url, "budget": 3})
    assert over.state == "failed" and "the budget is 3" in over.reasons["bill"]


def test_blue_green() -> None:
    run = recipe("blue_green")
    assert succeeded(run(variables={"pricing": "blue"}))["publish"] == "blue: [1, 2, 3]"
    assert succeeded(run(variables={"pricing": "green"}))["publish"] == "green: [1, 2, 3]"


def test_test_a_dag_in_ci() -> None:
    """As a reader would: with pytest, in a process of its own."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "test_a_dag_in_ci.py"]
    done = subprocess.run(command, cwd=RECIPES, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert len(re.findall(r"^def test_", (RECIPES / "test_a_dag_in_ci.py").read_text(), re.MULTILINE)) == 3


def test_map_reduce() -> None:
    ran = recipe("map_reduce")(params={"size": 10, "parts": 3})
    assert succeeded(ran)["combine"] == sum(n * n for n in range(10)) and ran.states["square[2]"] == "success"


def test_branch_by_weekday() -> None:
    run = recipe("branch_by_weekday")
    assert succeeded(run(fire_at=SUNDAY))["publish"] == "published all rows"
    assert succeeded(run(fire_at=MONDAY))["publish"] == "published new rows"


def test_temporary_cluster() -> None:
    ran = recipe("temporary_cluster")()
    assert succeeded(ran)["work"] == 42 and not Path(ran.results["create"]).exists()


def test_quality_gate() -> None:
    run = recipe("quality_gate")
    assert succeeded(run())["publish"] == 5
    failed = run(params={"rows": 1})
    assert failed.state == "failed" and failed.states["publish"] == "upstream_failed"


def test_paginated_api(server: Server, tmp_path: Path) -> None:
    first, second = {"rows": [1, 2], "next": 2}, {"rows": [3], "next": None}
    server.answers = [(200, {}, json.dumps(first)), (502, {}, ""), (200, {}, json.dumps(second))]
    ran = recipe("paginated_api")(params={"url": server.url, "folder": str(tmp_path)})
    assert succeeded(ran)["read_all"] == 3
    assert [path for path, _ in server.requests] == ["/?page=1", "/?page=2", "/?page=2"]


def test_api_with_a_token(server: Server) -> None:
    server.answers = [(200, {"Content-Type": "application/json"}, "[1, 2]")]
    ran = recipe("api_with_a_token")(params={"url": server.url}, secrets={"shop_token": "s3cret"})
    assert succeeded(ran)["count"] == 2
    assert server.requests[0][1]["Authorization"] == "Bearer s3cret"


def test_dags_from_configuration() -> None:
    dags = load_dags(RECIPES, "dags_from_configuration.py")
    assert sorted(dags) == ["export_north", "export_south", "export_west"]
    assert {succeeded(each.test())["export"] for each in dags.values()} == {
        f"exported {name}" for name in ("north", "south", "west")
    }


def test_run_after_an_update() -> None:
    dags = load_dags(RECIPES, "run_after_an_update.py")
    assert dags["orders"].spec.tasks[0].outlets == ("orders",)
    assert dags["report_when_ready"].spec.schedules
    assert [succeeded(each.test()) for each in dags.values()]


def test_react_to_an_event() -> None:
    ran = recipe("react_to_an_event")(params={"shipment": 42}, answers={"wait_for_event": {"weight": 3}})
    assert succeeded(ran)["book"] == "shipment 42 weighs 3 kg"


def test_stop_and_continue(tmp_path: Path) -> None:
    (tmp_path / "run-0.done").write_text("7")
    assert succeeded(recipe("stop_and_continue")(params={"files": 10, "folder": str(tmp_path)}))["convert"] == 10
    assert list(tmp_path.iterdir()) == []


def test_charge_once(server: Server) -> None:
    server.answers = [(503, {}, ""), (200, {}, '{"charge": "c1"}')]
    params = {"account": "a", "cents": 5, "url": server.url}
    assert succeeded(recipe("charge_once")(params=params))["charge"] == "c1"
    keys = {headers["Idempotency-Key"] for _, headers in server.requests}
    assert len(server.requests) == 2 and len(keys) == 1


def test_every_recipe_has_a_test_and_is_in_the_cookbook() -> None:
    files = {path.stem for path in RECIPES.glob("*.py")}
    assert len(files) >= 25
    assert {name.removeprefix("test_") for name in globals() if name.startswith("test_")} >= files
    page = (ROOT / "docs/howto/cookbook.md").read_text(encoding="utf-8")
    assert re.findall(r"^<!-- example: (\w+).py -->$", page, re.MULTILINE) and all(
        f"<!-- example: {name}.py -->" in page for name in files
    )
