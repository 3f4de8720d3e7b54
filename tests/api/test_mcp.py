"""The MCP server with the official SDK's own client, and thirty questions of operators."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from psycopg import AsyncConnection

from evertick.domain.access import Role
from evertick.operations.mcp.protocol import VERSIONS
from evertick.operations.mcp.tools import TOOLS
from tests.api.conftest import BASE, Client, Signed
from tests.engine.world import make_dag, put, value
from tests.ui.site import history

mcp = pytest.importorskip("mcp", reason="needs the group dev")

Step = tuple[str, dict[str, Any] | Callable[[list[Any]], dict[str, Any]]]
NOW = datetime.now(UTC)


def latest(dag: str, state: str | None = None) -> Step:
    return "list_runs", {"dag": dag, "limit": 5, **({"state": state} if state else {})}


def run(answers: list[Any], place: int = 0) -> int:
    found = answers[0]
    return (found.get("runs") or found.get("failed_runs"))[place]["run_id"]


# A question, the calls that answer it, and what the last answer must say.
QUESTIONS: Sequence[tuple[str, list[Step], Callable[[Any], object]]] = [
    ("Which DAGs are there?", [("list_dags", {})], lambda a: len(a["dags"]) >= 5),
    ("Is there a DAG about billing?", [("list_dags", {"search": "bill"})], lambda a: a["dags"][0]["name"] == "billing"),
    ("Which DAGs are paused?", [("list_dags", {"is_paused": True})], lambda a: "archive" in str(a)),
    ("What belongs to finance?", [("list_dags", {"tag": "finance"})], lambda a: len(a["dags"]) == 2),
    ("What does orders do, step by step?", [("show_dag", {"dag": "orders"})], lambda a: len(a["tasks"]) == 6),
    ("When does billing run next?", [("show_dag", {"dag": "billing"})], lambda a: a["schedules"][0]["next_due"]),
    (
        "Which parameters does report_by_hand take?",
        [("show_dag", {"dag": "report_by_hand"})],
        lambda a: {each["name"] for each in a["params"]} >= {"region", "day"},
    ),
    ("What failed today?", [("list_failures", {})], lambda a: a["failed_runs"][0]["failed_tasks"][0]["task"] == "load"),
    ("What failed in billing?", [("list_failures", {"dag": "billing"})], lambda a: "no rows" in str(a["failed_runs"])),
    (
        "Which attempts did the failed task have?",
        [("list_failures", {"dag": "billing"}), ("show_task", lambda a: {"run_id": run(a), "task": "load"})],
        lambda a: a["attempts"][0]["outcome"] == "failed",
    ),
    (
        "What did the failed task log?",
        [("list_failures", {"dag": "billing"}), ("read_log", lambda a: {"run_id": run(a), "task": "load"})],
        lambda a: "lines" in a,
    ),
    (
        "Are there errors in that log?",
        [latest("orders"), ("read_log", lambda a: {"run_id": run(a), "task": "load", "contains": "error"})],
        lambda a: "lines" in a,
    ),
    ("What runs now?", [("list_runs", {"state": "running"})], lambda a: a["runs"][0]["dag"] == "orders"),
    ("What is queued?", [("list_runs", {"state": "queued"})], lambda a: "runs" in a),
    ("How did the last run of web_logs end?", [latest("web_logs")], lambda a: a["runs"][0]["state"] == "success"),
    (
        "How far is the running run?",
        [latest("orders", "running"), ("show_run", lambda a: {"run_id": run(a)})],
        lambda a: sum(a["tasks_by_state"].values()) == 6,
    ),
    (
        "Why does the running run wait?",
        [latest("orders", "running"), ("why", lambda a: {"run_id": run(a)})],
        lambda a: a["waiting"][0]["reasons"],
    ),
    (
        "Why does its report not run?",
        [latest("orders", "running"), ("why", lambda a: {"run_id": run(a), "task": "report"})],
        lambda a: a["task"] == "report" and a["reasons"][0]["text"],
    ),
    (
        "Who started that run of billing?",
        [latest("billing"), ("show_run", lambda a: {"run_id": run(a)})],
        lambda a: a["triggered_by"],
    ),
    (
        "What is different from the run before?",
        [latest("billing"), ("compare_runs", lambda a: {"run_id": run(a), "other_run_id": run(a, 2)})],
        lambda a: a["same_version"] and "load" in [each["task"] for each in a["differing_tasks"]],
    ),
    (
        "Did the last run of orders take longer?",
        [latest("orders", "success"), ("compare_runs", lambda a: {"run_id": run(a), "other_run_id": run(a, 1)})],
        lambda a: a["runs"][0]["seconds"] > 0,
    ),
    ("Did yesterday's runs of orders succeed?", [("list_runs", {"dag": "orders", "hours": 48})], lambda a: a["runs"]),
    ("What will start in the next hours?", [("list_schedules", {})], lambda a: len(a["schedules"]) >= 4),
    ("Which schedules does orders have?", [("list_schedules", {"dag": "orders"})], lambda a: len(a["schedules"]) == 1),
    (
        "When would `30 6 * * 1-5` fire?",
        [("simulate_schedule", {"when": "30 6 * * 1-5", "timezone": "Europe/Berlin", "days": 7})],
        lambda a: a["count"] == 5,
    ),
    (
        "What does summer time do to 02:30?",
        [
            (
                "simulate_schedule",
                {"when": "30 2 * * *", "timezone": "Europe/Berlin", "first": "2027-03-01T00:00:00Z", "days": 60},
            )
        ],
        lambda a: len(a["clock_changes"]) == 1,
    ),
    (
        "How many runs would a backfill of a day make?",
        [
            (
                "preview_backfill",
                {"dag": "orders", "schedule": "main", "first": "2026-01-01T00:00:00Z", "last": "2026-01-02T00:00:00Z"},
            )
        ],
        lambda a: a["total"] == 97 and a["backfill_id"] is None,
    ),
    ("Is everything healthy?", [("check_health", {})], lambda a: a["health"]["database"] and a["runners"]),
    ("Which pools are full?", [("list_pools", {})], lambda a: "pools" in a),
    (
        "What would a run with these values do?",
        [("preview_trigger", {"dag": "report_by_hand", "params": {"day": "2026-11-30"}})],
        lambda a: a["preview_id"] and a["tasks"] == ["collect", "send"],
    ),
]


@asynccontextmanager
async def connected(app: FastAPI, token: str, query: str = "") -> AsyncIterator[Any]:
    """The official client, on the application."""
    import httpx2
    from mcp.client.streamable_http import streamable_http_client

    transport = httpx2.ASGITransport(app=app)
    headers = {"Authorization": f"Bearer {token}"}
    async with httpx2.AsyncClient(transport=transport, headers=headers) as http:
        async with mcp.Client(streamable_http_client(f"{BASE}/mcp{query}", http_client=http)) as client:
            yield client


async def test_thirty_questions_of_operators_take_three_calls_at_most(
    app: FastAPI, signed: Signed, conn: AsyncConnection
) -> None:
    await history(conn)
    operator = await signed(Role.OPERATOR)
    assert len(QUESTIONS) == 30
    async with connected(app, str(operator.token)) as client:
        offered = {each.name for each in (await client.list_tools()).tools}
        assert offered == {*TOOLS} - {"trigger_run", "validate_deploy"}
        for question, steps, is_answered in QUESTIONS:
            assert len(steps) <= 3
            answers: list[Any] = []
            for name, arguments in steps:
                given = arguments(answers) if callable(arguments) else arguments
                found = await client.call_tool(name, given)
                assert not found.is_error, (question, found.content)
                answers.append(found.structured_content)
                assert json.loads(found.content[0].text) == found.structured_content
            assert is_answered(answers[-1]), (question, answers[-1])
    assert await value(conn, "select count(*) from audit_log where actor like 'mcp:%%'") == 0


async def test_a_run_starts_once_per_preview_and_only_if_it_was_asked_for(
    app: FastAPI, signed: Signed, conn: AsyncConnection
) -> None:
    await history(conn)
    operator = str((await signed(Role.OPERATOR, name="op")).token)
    values = {"dag": "report_by_hand", "params": {"day": "2026-11-30"}}
    async with connected(app, operator) as client:
        preview = (await client.call_tool("preview_trigger", values)).structured_content["preview_id"]
        with pytest.raises(Exception, match="Unknown tool"):
            await client.call_tool("trigger_run", {**values, "preview_id": preview})
    async with connected(app, operator, "?allow_trigger=true") as client:
        for wrong in ({"preview_id": "x"}, {"preview_id": preview, "params": {"day": "2026-12-01"}}):
            assert (await client.call_tool("trigger_run", {**values, **wrong})).is_error
        made = [await client.call_tool("trigger_run", {**values, "preview_id": preview}) for _ in range(2)]
        first, second = (each.structured_content for each in made)
        assert first["is_new"] and not second["is_new"] and first["run_id"] == second["run_id"]
    actor = await value(
        conn, "select actor from audit_log where run_id = %s and action like 'trigger%%'", first["run_id"]
    )
    assert actor == "mcp:op"


async def test_a_tool_shows_only_dags_of_the_tokens_tags(app: FastAPI, signed: Signed, conn: AsyncConnection) -> None:
    await history(conn)
    limited = await signed(Role.OPERATOR, ["web"])
    async with connected(app, str(limited.token)) as client:
        names = [each["name"] for each in (await client.call_tool("list_dags", {})).structured_content["dags"]]
        assert names == ["web_logs"]
        assert (await client.call_tool("show_dag", {"dag": "orders"})).is_error
        assert "check_health" not in {each.name for each in (await client.list_tools()).tools}


async def test_a_deploy_is_checked_and_nothing_is_published(
    app: FastAPI, signed: Signed, conn: AsyncConnection
) -> None:
    editor = await signed(Role.EDITOR)
    good = "from evertick import dag, shell\n\n\n@dag\ndef fresh():\n    shell('hi', 'echo hi')\n"
    async with connected(app, str(editor.token)) as client:
        found = await client.call_tool("validate_deploy", {"deployment": "etl", "files": {"fresh.py": good}})
        assert not found.is_error and "fresh" in found.content[0].text
        broken = await client.call_tool("validate_deploy", {"deployment": "etl", "files": {"fresh.py": "1/0"}})
        assert broken.is_error
        outside = await client.call_tool("validate_deploy", {"deployment": "etl", "files": {"../x.py": good}})
        assert outside.is_error
    assert await value(conn, "select count(*) from dag where name = 'fresh'") == 0


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"{", -32700),
        (b"[]", -32600),
        (b'{"jsonrpc": "1.0", "id": 1, "method": "ping"}', -32600),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "resources/list"}', -32601),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "rm"}}', -32602),
    ],
)
async def test_a_wrong_message_is_told_by_its_code(admin: Client, body: bytes, code: int) -> None:
    assert (await admin.ok("POST", "/mcp", content=body))["error"]["code"] == code


async def test_the_endpoint_needs_a_token_and_agrees_on_a_version(
    nobody: Client, admin: Client, signed: Signed
) -> None:
    hello = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": "2024-11-05"}}
    await nobody.refused("POST", "/mcp", 401, json=hello)
    assert (await admin.ok("POST", "/mcp", json=hello))["result"]["protocolVersion"] == "2024-11-05"
    hello["params"] = {"protocolVersion": "1999-01-01"}
    assert (await admin.ok("POST", "/mcp", json=hello))["result"]["protocolVersion"] == VERSIONS[0]
    told = {"jsonrpc": "2.0", "method": "notifications/initialized"}
    await admin.ok("POST", "/mcp", status=202, json=told)
    wrong = {"jsonrpc": "2.0", "id": 2, "method": "tools/call", "params": {"name": "why", "arguments": {"run": 1}}}
    found = (await admin.ok("POST", "/mcp", json=wrong))["result"]
    assert found["isError"] and "run_id" in found["content"][0]["text"]


async def test_the_command_serves_the_same_tools_on_standard_input(
    database: str, conn: AsyncConnection, tmp_path: Path
) -> None:
    await put(conn, make_dag("etl", {"load": []}))
    env = {"EVERTICK_DATABASE_URL": database, "EVERTICK_HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    command = mcp.StdioServerParameters(command=sys.executable, args=["-m", "evertick", "mcp"], env=env)
    async with mcp.Client(command) as client:
        assert "trigger_run" not in {each.name for each in (await client.list_tools()).tools}
        found = await client.call_tool("list_dags", {})
        assert [each["name"] for each in found.structured_content["dags"]] == ["etl"]
        assert (await client.call_tool("show_run", {"run_id": 7})).is_error
