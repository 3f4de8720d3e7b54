"""The document of the native API: what it declares is what clients get, and its words are one language."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest
from psycopg import AsyncConnection
from tools.typescript import PLACE, text_of

from evertick.api.problems import SERVER_STATUS, STATUS
from evertick.config import Settings
from tests.api.conftest import Client
from tests.api.fuzz import document_of
from tests.api.test_native import V1, everything
from tests.api.test_slow_clients import serving
from tests.engine.world import make_dag, put
from tests.source_tree import ROOT

PROBLEM = "application/problem+json"


@pytest.fixture(scope="module")
def document() -> Any:
    return document_of(V1)


def test_the_types_for_typescript_are_those_of_the_document(document: Any) -> None:
    assert PLACE.read_text(encoding="utf-8") == text_of(document), "run `python tools/typescript.py`"


def operations(document: Any) -> Iterator[tuple[str, str, Any]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield method, path, operation


def test_the_page_of_errors_is_the_table() -> None:
    page = (ROOT / "docs/reference/errors.md").read_text(encoding="utf-8")
    told = dict(re.findall(r"^\| `(\w+)` \| ([\d, ]+?) \|", page, re.MULTILINE))
    expected = {code: str(status.value) for code, status in {**STATUS, **SERVER_STATUS}.items()}
    assert told == {**expected, "invalid": "400, 422"}


def test_every_operation_declares_its_errors_and_its_security(document: Any) -> None:
    assert document["servers"] == [{"url": V1}]
    assert document["components"]["securitySchemes"].keys() == {"token", "session"}
    for method, path, operation in operations(document):
        declared = operation["responses"]
        assert {"400", "401", "403", "422", "429", "500", "503"} <= declared.keys(), (method, path)
        assert ("404" in declared) or "{" not in path, (method, path)
        assert ("409" in declared) or method == "get", (method, path)
        errors = [each for status, each in declared.items() if status >= "400"]
        kinds = {(kind, part["schema"]["$ref"]) for each in errors for kind, part in each["content"].items()}
        assert kinds == {(PROBLEM, "#/components/schemas/Problem")}, (method, path)
        assert operation["security"], (method, path)
        assert operation["summary"] and len(operation["summary"]) < 130, (method, path)


def test_names_in_the_document_are_words_and_alike(document: Any) -> None:
    ids = [operation["operationId"] for _, _, operation in operations(document)]
    assert len(ids) == len(set(ids)) and all(re.fullmatch(r"[a-z]+(_[a-z]+)+", each) for each in ids)
    for method, path, operation in operations(document):
        verb = operation["operationId"].split("_")[0]
        assert method != "delete" or verb == "delete", path
        assert verb not in ("remove", "add", "make", "resume"), path
    schemas = document["components"]["schemas"]
    assert all(re.fullmatch(r"[A-Z][A-Za-z]+", name) and not name.endswith("Row") for name in schemas), sorted(schemas)
    fields = {field for schema in schemas.values() for field in schema.get("properties", {})}
    assert not fields & {"idx", "which", "fact", "id", "answer", "heard_at", "is_heard"}


def test_every_list_has_a_limit_and_a_cursor(document: Any) -> None:
    lists = 0
    for method, path, operation in operations(document):
        content = operation["responses"].get("200", {}).get("content", {}).get("application/json", {})
        if method == "get" and content.get("schema", {}).get("$ref", "").endswith("Page"):
            lists += 1
            # Lines of a log are as many as fit into a page.
            expected = {"cursor"} if path.endswith("/logs") else {"limit", "cursor"}
            assert expected <= {each["name"] for each in operation["parameters"]}, path
    assert lists > 25


async def test_an_unknown_query_parameter_is_refused_by_name(admin: Client, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"t": []}))
    for path, at, hint in (
        ("/runs?dagg=etl", "query.dagg", "Did you mean 'dag'?"),
        ("/dags?limit=1&tags=x", "query.tags", "Did you mean 'tag'?"),
        ("/dags/etl?verbose=1", "query.verbose", "This operation has: none."),
        ("/runs/1/tasks/t/logs?folow=true", "query.folow", "Did you mean 'follow'?"),
        ("/events?runs=1", "query.runs", "Did you mean 'run'?"),
    ):
        problem = await admin.refused("GET", V1 + path, 422)
        assert (problem["type"], problem["code"]) == ("urn:evertick:error:invalid", "invalid")
        (error,) = problem["errors"]
        assert error["at"] == at and hint in error["message"], error
    problem = await admin.refused("POST", f"{V1}/dags/etl/pause?drun=1", 422)
    assert [each["at"] for each in problem["errors"]] == ["query.drun"]
    assert (await admin.get(f"{V1}/dags/etl")).status_code == 200


async def test_etags_are_versions_and_reads_with_one_are_not_repeated(admin: Client) -> None:
    pool = f"{V1}/pools/p"
    seen = []
    for slots, status in ((3, 201), (5, 200), (3, 200)):
        answer = await admin.put(pool, json={"slots": slots})
        assert answer.status_code == status
        seen.append(answer.headers["etag"])
        assert (await admin.get(pool)).headers["etag"] == seen[-1]
    assert len(set(seen)) == 3
    answers = await asyncio.gather(
        *(admin.put(pool, json={"slots": 10 + slots}, headers={"If-Match": seen[-1]}) for slots in range(5))
    )
    assert sorted(each.status_code for each in answers) == [200, 412, 412, 412, 412]
    await admin.refused("DELETE", pool, 412, headers={"If-Match": seen[-1]})
    tag = (await admin.get(pool)).headers["etag"]
    for given in (tag, f'"x", W/{tag}', "*"):
        answer = await admin.get(pool, headers={"If-None-Match": given})
        assert (answer.status_code, answer.content, answer.headers["etag"]) == (304, b"", tag)
    assert (await admin.get(pool, headers={"If-None-Match": seen[0]})).status_code == 200
    await admin.ok("DELETE", pool, status=204, headers={"If-Match": tag})
    await admin.refused("DELETE", pool, 404, headers={"If-Match": "*"})
    await admin.ok("PUT", pool, status=201, json={"slots": 3})
    assert (await admin.get(pool)).headers["etag"] not in seen, "another pool with the same name"


async def test_a_schedule_is_created_once_and_short_lists_have_pages(admin: Client, conn: AsyncConnection) -> None:
    await put(conn, make_dag("etl", {"t": []}))
    path = f"{V1}/dags/etl/schedules"
    for name, status in (("b", 201), ("a", 201), ("a", 200)):
        await admin.ok("PUT", f"{path}/{name}", status=status, json={"when": "@daily"})
    await admin.ok("DELETE", f"{path}/b", status=204)
    await admin.ok("PUT", f"{path}/b", status=201, json={"when": "@daily"})
    assert [each["name"] for each in await everything(admin, path, limit=1)] == ["a", "b"]
    versions = await everything(admin, f"{path}/b/history", limit=1)
    assert [each["version"] for each in versions] == sorted({each["version"] for each in versions}, reverse=True)
    assert len(versions) >= 3
    for name in ("z", "m", "c"):
        await admin.ok("PUT", f"{V1}/pools/{name}", status=201, json={"slots": 1})
    assert [each["name"] for each in await everything(admin, f"{V1}/pools", limit=1)] == ["c", "m", "z"]
    await admin.refused("GET", f"{V1}/pools?cursor=x", 400)


async def test_skipped_fires_have_pages(admin: Client, conn: AsyncConnection) -> None:
    for dag in ("one", "two"):
        await put(conn, make_dag(dag, {"t": []}, every="@every 1h"))
    await conn.execute(
        "insert into skip_record (schedule_id, first_at, last_at, count, reason, recorded_at)"
        " select schedule_id, at, at, 1, 'paused', '2026-01-01' from schedule,"
        " generate_series('2025-01-01'::timestamptz, '2025-01-03', '1 day') at"
    )
    whole = (await admin.ok("GET", f"{V1}/skips"))["items"]
    assert len(whole) == 6 and await everything(admin, f"{V1}/skips", limit=1) == whole
    assert len(await everything(admin, f"{V1}/dags/one/schedules/main/skips", limit=2)) == 3


async def test_the_server_itself_answers_with_problems(database: str) -> None:
    async with serving(database, Settings(api_rate_limit=0, api_connections=8)) as place:
        garbage = await _sent(place, b"NONSENSE\r\n\r\n")
        assert garbage.startswith(b"HTTP/1.1 400 ") and b'"type": "urn:evertick:error:invalid"' in garbage
        assert b"Content-Type: application/problem+json" in garbage
        held = [await asyncio.open_connection(*place) for _ in range(8)]
        for _, writer in held:
            # Requests that are under way cannot be closed for others.
            writer.write(b"POST /auth/token HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
            await writer.drain()
        refused = await _sent(place, b"GET /healthz HTTP/1.1\r\nHost: x\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 503 ") and b'"type": "urn:evertick:error:overloaded"' in refused
        assert b"application/problem+json" in refused and b"retry-after: 5" in refused
        for _, writer in held:
            writer.close()


async def _sent(place: tuple[str, int], request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection(*place)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer
