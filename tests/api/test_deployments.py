"""Deploying over HTTP: an archive is uploaded in pieces and published as a whole, or refused with a verdict for each file."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import io
import json
import tarfile
from typing import Any

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags
from evertick.domain.access import Role
from tests.api.conftest import Client, Signed
from tests.engine.world import value

API = "/api/v1"
FILE = "from evertick import dag, task\n@task\ndef t(): ...\n@dag\ndef {name}():\n    t()\n"


def packed(files: dict[str, str]) -> bytes:
    made = io.BytesIO()
    with gzip.GzipFile(fileobj=made, mode="wb", mtime=0) as plain, tarfile.open(fileobj=plain, mode="w") as archive:
        for name, text in files.items():
            header = tarfile.TarInfo(name)
            header.size = len(text.encode())
            archive.addfile(header, io.BytesIO(text.encode()))
    return made.getvalue()


async def upload(caller: Client, archive: bytes) -> str:
    archive_hash = hashlib.sha256(archive).hexdigest()
    await caller.ok(
        "PUT", f"{API}/uploads/{archive_hash}", content=archive, headers={"Content-Type": "application/gzip"}
    )
    return archive_hash


async def put(caller: Client, name: str, files: dict[str, str], **query: Any) -> Any:
    archive_hash = await upload(caller, packed(files))
    path = f"{API}/deployments/{name}"
    return await caller.request("PUT", path, json={"archive_hash": archive_hash}, params=query)


async def test_a_deployment_is_compared_and_deleted(conn: AsyncConnection, admin: Client, signed: Signed) -> None:
    viewer = await signed(Role.VIEWER)
    path = f"{API}/deployments/shop"
    await put(admin, "shop", {"one.py": FILE.format(name="first"), "two.py": FILE.format(name="second")})
    await put(admin, "shop", {"one.py": FILE.format(name="first") + "# new\n", "two.py": FILE.format(name="third")})
    diff = await viewer.ok("GET", f"{path}/diff")
    assert (diff["old"], diff["new"]) == (1, 2)
    changes = [("first", 1, 2), ("second", 1, None), ("third", None, 1)]
    assert [(each["name"], each["before"], each["after"]) for each in diff["dags"]] == changes
    missing = await viewer.request("GET", f"{path}/diff", params={"old": 7})
    assert missing.status_code == 404 and "has no version 7" in missing.text
    assert (await viewer.request("DELETE", path)).status_code == 403
    stale = await admin.request("DELETE", path, headers={"If-Match": '"1"'})
    assert stale.status_code == 412 and await dags.names(conn) == ["first", "third"]
    assert (await admin.request("DELETE", path, headers={"If-Match": '"2"'})).status_code == 204
    again = await admin.request("DELETE", path)
    assert again.status_code == 404 and "is deleted already" in again.text
    assert (await admin.request("DELETE", f"{API}/deployments/none")).status_code == 404
    assert await dags.names(conn) == [] and (await admin.ok("GET", f"{API}/deployments"))["items"] == []
    assert (await admin.ok("GET", path))["deleted_at"] is not None
    back = await put(admin, "shop", {"one.py": FILE.format(name="first")})
    assert (back.status_code, back.json()["version"]) == (201, 4)


async def test_an_archive_becomes_a_version_and_the_same_one_again_changes_nothing(
    conn: AsyncConnection, admin: Client
) -> None:
    files = {"one.py": FILE.format(name="first"), "data.txt": "x"}
    preview = await put(admin, "shop", files, dry_run=True)
    assert (preview.status_code, preview.json()["is_new"], preview.json()["is_dry_run"]) == (200, True, True)
    assert await dags.names(conn) == []
    made = await put(admin, "shop", files)
    assert (made.status_code, made.headers["ETag"], made.json()["version"]) == (201, '"1"', 1)
    assert made.json()["files"] == [{"file": "one.py", "dags": ["first"], "error": None}]
    again = await put(admin, "shop", files)
    assert (again.status_code, again.json()["version"], again.json()["is_new"]) == (200, 1, False)
    assert await value(conn, "select count(*) from dag_version") == 1
    assert await value(conn, "select count(*) from upload_piece") == 0, "what was published need not be kept"
    shown = await admin.ok("GET", f"{API}/deployments/shop")
    assert (shown["dags"], shown["current"]["number"], shown["current"]["deployed_by"]) == (["first"], 1, "user:root")
    second = await put(admin, "shop", {"two.py": FILE.format(name="second")})
    assert second.json()["retired"] == ["first"]
    assert await dags.names(conn) == ["second"]
    restored = await admin.ok("POST", f"{API}/deployments/shop/rollback", json={})
    assert restored == {"version": 3, "restores": 1, "dags": ["first"], "retired": ["second"]}
    versions = await admin.ok("GET", f"{API}/deployments/shop/versions?limit=2")
    assert [(each["number"], each["restores"]) for each in versions["items"]] == [(3, 1), (2, None)]
    (listed,) = (await admin.ok("GET", f"{API}/deployments"))["items"]
    assert (listed["name"], listed["kind"], listed["version"]) == ("shop", "upload", 3)


async def test_a_broken_file_refuses_all_with_a_verdict_for_each(conn: AsyncConnection, admin: Client) -> None:
    await put(admin, "shop", {"one.py": FILE.format(name="first")})
    broken = {
        "one.py": FILE.format(name="changed"),
        "two.py": "from evertick import dag\nraise ValueError('no')\n",
        "three.py": FILE.format(name="changed"),
        "four.py": FILE.format(name="pooled").replace("@task", "@task(pool='none')"),
    }
    for dry_run in (True, False):
        answer = await put(admin, "shop", broken, dry_run=dry_run)
        document = answer.json()
        assert (answer.status_code, document["code"]) == (400, "broken_files")
        verdicts = {each["file"]: each for each in document["files"]}
        assert verdicts["two.py"]["error"]["line"] == 2 and "no" in verdicts["two.py"]["error"]["message"]
        assert "also defined in one.py" in verdicts["three.py"]["error"]["message"]
        assert (verdicts["one.py"]["dags"], verdicts["one.py"]["error"]) == (["changed"], None)
        assert "two.py:2" in document["detail"]
    del broken["two.py"], broken["three.py"]
    answer = await put(admin, "shop", broken)
    assert "needs pool 'none'" in answer.json()["files"][0]["error"]["message"]
    assert await dags.names(conn) == ["first"]


async def test_an_upload_continues_where_it_ended_and_belongs_to_its_caller(
    conn: AsyncConnection, admin: Client, signed: Signed
) -> None:
    archive = packed({"one.py": FILE.format(name="first")})
    path = f"{API}/uploads/{hashlib.sha256(archive).hexdigest()}"
    body = {"archive_hash": path.rpartition("/")[2]}
    parts = [archive[:100], archive[100:150], archive[150:]]
    assert (await admin.ok("PUT", path, content=parts[0]))["received"] == 100
    assert (await admin.ok("PUT", f"{path}?start=150", content=parts[2]))["received"] == 100, "a piece is missing"
    problem = await admin.refused("PUT", f"{API}/deployments/shop", 404, json=body)
    assert "is not uploaded" in problem["detail"]
    assert (await admin.ok("GET", path))["received"] == 0, "and what was there is of no use"
    start = 0
    for part in parts:
        for _ in range(2):
            found = await admin.ok("PUT", f"{path}?start={start}", content=part)
        start = found["received"]
    assert start == len(archive)
    other = await signed(Role.EDITOR)
    assert (await other.ok("GET", path))["received"] == 0
    await other.refused("PUT", f"{API}/deployments/shop", 404, json=body)
    await admin.ok("PUT", f"{API}/deployments/shop", status=201, json=body)
    await conn.execute("insert into upload_piece values ('h', 'o', 0, 'x', clock() - interval '25 hours')")
    await admin.ok("PUT", path, content=archive)
    assert await value(conn, "select count(*) from upload_piece where hash = 'h'") == 0


async def test_what_cannot_be_deployed_is_refused(admin: Client) -> None:
    archive_hash = await upload(admin, b"not an archive")
    problem = await admin.refused("PUT", f"{API}/deployments/shop", 400, json={"archive_hash": archive_hash})
    assert "neither a .tar.gz nor a .zip" in problem["detail"]
    empty = await put(admin, "shop", {"notes.txt": "no code"})
    assert (empty.status_code, "There is no DAG file" in empty.text) == (400, True)
    name = await put(admin, "a b", {"one.py": FILE.format(name="first")})
    assert "not a valid name for a deployment" in name.text
    large = await admin.request("PUT", f"{API}/uploads/{'a' * 64}", content=b"x" * (8 * 1024 * 1024 + 1))
    assert large.status_code == 413
    await admin.refused("PUT", f"{API}/uploads/{'a' * 64}?start=67108864", 413, content=b"x")
    await admin.refused("PUT", f"{API}/uploads/short", 422, content=b"x")


async def test_a_user_keeps_a_bounded_amount_of_archives(
    conn: AsyncConnection, admin: Client, signed: Signed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("evertick.operations.deployments.MOST_KEPT_BYTES", 250)
    for number in range(3):
        await admin.ok("PUT", f"{API}/uploads/{str(number) * 64}", content=b"x" * 100)
    problem = await admin.refused("PUT", f"{API}/uploads/{'a' * 64}", 413, content=b"x")
    assert "not published" in problem["detail"]
    await admin.ok("PUT", f"{API}/uploads/{'2' * 64}?start=100", content=b"x")
    other = await signed(Role.EDITOR)
    await other.ok("PUT", f"{API}/uploads/{'a' * 64}", content=b"x")


async def test_another_deployment_and_an_outdated_version_are_refused(conn: AsyncConnection, admin: Client) -> None:
    files = {"one.py": FILE.format(name="first")}
    await put(admin, "shop", files)
    other = await put(admin, "store", {**files, "two.py": FILE.format(name="second")})
    assert other.status_code == 400
    message = other.json()["files"][0]["error"]["message"]
    assert "belongs to deployment 'shop' (one.py), so deployment 'store' cannot publish it" in message
    assert await dags.names(conn) == ["first"]
    archive_hash = await upload(admin, packed({"one.py": FILE.format(name="third")}))
    for etag, status in (('"0"', 412), ('"1"', 201)):
        answer = await admin.request(
            "PUT", f"{API}/deployments/shop", json={"archive_hash": archive_hash}, headers={"If-Match": etag}
        )
        assert answer.status_code == status, answer.text


async def test_of_two_at_the_same_time_the_later_is_told_and_nothing_is_mixed(
    conn: AsyncConnection, admin: Client
) -> None:
    await put(admin, "shop", {"one.py": FILE.format(name="base")})
    names = [f"made{number}" for number in range(3)]
    two = FILE + "@dag\ndef {name}_b():\n    t()\n"
    answers = await asyncio.gather(*(put(admin, "shop", {"one.py": two.format(name=name)}) for name in names))
    won = [name for name, answer in zip(names, answers, strict=True) if answer.status_code == 201]
    lost = [answer for answer in answers if answer.status_code != 201]
    assert won and all(each.status_code == 409 for each in lost), [each.text for each in answers]
    assert all("another change finished first" in each.text for each in lost)
    current = await dags.names(conn)
    assert len(current) == 2 and current[1] == f"{current[0]}_b" and current[0] in won


async def test_the_same_archive_at_the_same_time_is_published_once(conn: AsyncConnection, admin: Client) -> None:
    files = {"one.py": FILE.format(name="base")}
    body = json.dumps({"archive_hash": await upload(admin, packed(files))})
    headers = {"Content-Type": "application/json"}
    answers = await asyncio.gather(
        *(admin.request("PUT", f"{API}/deployments/shop", content=body, headers=headers) for _ in range(3))
    )
    # One of them may find that the archive is gone: it is published.
    assert {each.status_code for each in answers} <= {200, 201, 404}
    assert [each.status_code for each in answers].count(201) == 1
    assert await value(conn, "select count(*) from deployment_version") == 1


@pytest.mark.parametrize("role", list(Role))
async def test_deploying_has_a_permission_of_its_own(signed: Signed, role: Role) -> None:
    caller = await signed(role)
    answer = await caller.request("PUT", f"{API}/uploads/{'a' * 64}", content=b"x")
    assert answer.status_code == (200 if role in (Role.EDITOR, Role.ADMIN) else 403)
