"""A client that a generator makes from the document of the native API: every answer is one that the document declares."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any

import pytest

from evertick.domain.access import Role
from tests.api.fuzz import api_on, document_of, furnish, token_of

PACKAGE = "generated_evertick_client"


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("generated")
    (folder / "document.json").write_text(json.dumps(document_of("/api/v1")))
    (folder / "config.json").write_text('{"post_hooks": []}')
    options = ["--path", "document.json", "--config", "config.json", "--output-path", PACKAGE, "--meta", "none"]
    made = subprocess.run(
        [sys.executable, "-m", "openapi_python_client", "generate", *options, "--fail-on-warning"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
async def address(database: str, tmp_path: Path) -> AsyncIterator[str]:
    await furnish(database)
    async with api_on(database, tmp_path) as found:
        yield found


class Caller:
    """Calls operations of the generated package by their ids."""

    def __init__(self, address: str, token: str) -> None:
        module = importlib.import_module(f"{PACKAGE}.client")
        self._client = module.AuthenticatedClient(base_url=f"{address}/api/v1", token=token)
        tags = importlib.import_module(f"{PACKAGE}.api")
        self._modules = {
            each.name.rpartition(".")[2]: each.name
            for each in pkgutil.walk_packages(tags.__path__, f"{tags.__name__}.")
        }
        self.count = 0

    async def __call__(self, operation: str, expected: str, *path: Any, **options: Any) -> Any:
        """The parsed answer, whose status and class are expected, such as "201 ChangedPool". `body` has a class and its
        fields."""
        if (body := options.get("body")) is not None:
            options["body"] = self.model(body[0]).from_dict(body[1])
        function = importlib.import_module(self._modules[operation]).asyncio_detailed
        answer = await function(*path, client=self._client, **options)
        kind = "" if answer.parsed is None else f" {type(answer.parsed).__name__}"
        assert f"{answer.status_code.value}{kind}" == expected, (operation, path, answer.content)
        if answer.status_code >= HTTPStatus.BAD_REQUEST:
            assert answer.parsed.type_ == f"urn:evertick:error:{answer.parsed.code}"
            assert answer.headers["content-type"] == "application/problem+json"
        self.count += 1
        self.etag = answer.headers.get("etag")
        return answer.parsed

    def model(self, name: str) -> Any:
        return getattr(importlib.import_module(f"{PACKAGE}.models"), name)


async def test_a_generated_client_reads_every_answer_errors_included(
    generated: Path, address: str, database: str
) -> None:
    call = Caller(address, await token_of(database, Role.ADMIN))
    await _pools_and_values(call)
    await _runs(call)
    await _schedules_and_backfills(call)
    await _users(call)
    await Caller(address, "evt_wrong")("list_dags", "401 Problem")
    await Caller(address, await token_of(database, Role.VIEWER))("pause_dag", "403 Problem", "etl")
    assert call.count >= 30


async def _pools_and_values(call: Caller) -> None:
    await call("put_pool", "201 ChangedPool", "p", body=("PoolRequest", {"slots": 3}))
    await call("show_pool", "200 GateDetails", "p")
    first = call.etag
    await call("show_pool", "304", "p", if_none_match=first)
    await call("put_pool", "200 ChangedPool", "p", body=("PoolRequest", {"slots": 5}), if_match=first)
    await call("put_pool", "412 Problem", "p", body=("PoolRequest", {"slots": 4}), if_match=first)
    await call("delete_pool", "412 Problem", "p", if_match=first)
    page = await call("list_pools", "200 GatePage", limit=1)
    assert page.next_cursor and len(page.items) == 1
    problem = await call("list_pools", "422 Problem", limit=0)
    assert [each.at for each in problem.errors] == ["query.limit"]
    await call("delete_pool", "204", "p")
    await call("show_pool", "404 Problem", "p")
    await call("put_variable", "201 PutResult", "region", body=("ValueRequest", {"value": "north"}))
    assert (await call("show_variable", "200 StoredValueDetails", "region")).value == "north"
    await call("delete_variable", "204", "region")


async def _runs(call: Caller) -> None:
    await call("list_dags", "200 DagPage")
    await call("show_dag", "200 DagDetails", "etl")
    await call("show_dag", "404 Problem", "elt")
    run = await call("trigger_run", "201 TriggeredRun", "etl", body=("TriggerRequest", {}), idempotency_key="k")
    again = await call("trigger_run", "200 TriggeredRun", "etl", body=("TriggerRequest", {}), idempotency_key="k")
    assert (again.run_id, again.is_new) == (run.run_id, False)
    await call("trigger_run", "400 Problem", "etl", body=("TriggerRequest", {"params": {"x": 1}}))
    assert (await call("show_run", "200 RunDetails", run.run_id)).state == "running"
    await call("list_runs", "200 RunPage", dag="etl", limit=1)
    await call("list_tasks", "200 TaskPage", run.run_id)
    await call("show_task", "200 TaskDetails", run.run_id, "t")
    await call("explain_task", "200 TaskExplanation", run.run_id, "t")
    marked = ("MarkRequest", {"state": "success"})
    await call("mark_task", "200 MarkResult", run.run_id, "t", body=marked)
    await call("mark_task", "409 Problem", run.run_id, "t", body=marked)


async def _schedules_and_backfills(call: Caller) -> None:
    daily = ("ScheduleRequest", {"when": "@daily"})
    await call("put_schedule", "201 Schedule", "etl", "extra", body=daily)
    await call("put_schedule", "200 Schedule", "etl", "extra", body=daily, if_match=call.etag)
    await call("put_schedule", "412 Problem", "etl", "extra", body=daily, if_match='"v9"')
    await call("pause_schedule", "200 Schedule", "etl", "extra")
    await call("unpause_schedule", "200 UnpausedSchedule", "etl", "extra", body=("CatchUpOptions", {}))
    wanted = {"when": "@daily", "first": "2025-01-01T00:00:00", "last": "2025-01-03T00:00:00Z"}
    await call("simulate_schedule", "400 Problem", body=("SimulationRequest", wanted))
    wanted = {"dag": "etl", "when": "@daily", "first": "2025-01-01T00:00:00Z", "last": "2025-01-03T00:00:00Z"}
    await call("create_backfill", "200 BackfillPreview", body=("NewBackfill", {**wanted, "is_preview": True}))
    made = await call("create_backfill", "201 BackfillPreview", body=("NewBackfill", wanted))
    await call("pause_backfill", "200 Backfill", made.backfill_id)
    await call("unpause_backfill", "200 Backfill", made.backfill_id)
    await call("unpause_backfill", "409 Problem", made.backfill_id)


async def _users(call: Caller) -> None:
    await call("create_user", "201 User", body=("NewUser", {"name": "ci", "role": "operator"}))
    await call("create_user", "409 Problem", body=("NewUser", {"name": "ci"}))
    token = await call("create_token", "201 CreatedToken", body=("NewToken", {"name": "deploys", "user": "ci"}))
    await call("delete_token", "204", token.token_id)
