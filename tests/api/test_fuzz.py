"""Requests that nobody would think of, made from the document of the native API: never a 5xx, never an answer against it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, settings
from psycopg import AsyncConnection
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import response_schema_conformance

from evertick.api.app import parts_of
from evertick.domain.access import Role
from evertick.engine import accounts
from tests.api.test_airflow import address as served
from tests.engine.world import make_dag, put, start

address = served
FEW = settings(
    max_examples=8,
    deadline=None,
    database=None,
    derandomize=True,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("role", [Role.ADMIN, Role.VIEWER])
async def test_no_request_makes_it_fail(app: FastAPI, address: str, conn: AsyncConnection, role: Role) -> None:
    await put(conn, make_dag("etl", {"t": []}, every="@every 1h"))
    await start(conn, "etl")
    await accounts.add_user(conn, name="fuzz", role=role, actor="test")
    row = await accounts.find_user(conn, "fuzz")
    issued = await accounts.issue(conn, row, kind="token", name="t", actor="test", seconds=600)
    schema = schemathesis.openapi.from_dict(parts_of(app)["/api/v1"].openapi())
    headers = {"Authorization": f"Bearer {issued.secret}"}
    await asyncio.to_thread(fuzz, schema, f"{address}/api/v1", headers)


def fuzz(schema: Any, base_url: str, headers: dict[str, str]) -> None:
    schema.config.update(base_url=base_url)
    count = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @FEW
        @given(case=operation.as_strategy())
        def try_it(case: Any) -> None:
            case.call_and_validate(
                headers=headers, checks=[not_a_server_error, response_schema_conformance], timeout=20
            )

        # Waiting and following are long by their nature.
        if not operation.path.endswith(("/wait", "/logs.txt", "/logs", "/events")):
            try_it()
            count += 1
    assert count > 30
