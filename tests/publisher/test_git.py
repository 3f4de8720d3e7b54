"""A publisher follows a branch: each commit is published as a whole, a broken one changes nothing, and no secret is seen."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import shlex
import shutil
from pathlib import Path

import pytest
import structlog
from psycopg import AsyncConnection

from evertick.api.context import ApiContext
from evertick.config import Settings
from evertick.db.queries import dags, deployments
from evertick.domain.access import Actor
from evertick.domain.encryption import new_key
from evertick.domain.errors import UserError
from evertick.domain.stored_values import ValueKind
from evertick.engine.deployments import roll_back
from evertick.engine.publish import NO_RULES
from evertick.engine.secrets import put_value
from evertick.observability.logging import configure
from evertick.publisher.git import GitPublisher, GitRepository, GitSource
from evertick.runtime.loop import in_background
from evertick.secrets.keyring import load_keyring
from tests.api.applications import shared_app
from tests.api.conftest import Client
from tests.engine.world import value
from tests.publisher.repositories import Repository, served
from tests.waiting import eventually

FILE = "from evertick import dag, task\n@task\ndef t(): ...\n@dag\ndef {name}():\n    t()\n"
BROKEN = "from evertick import dag\nraise ValueError('half done')\n"
HERE = {"PATH": os.environ["PATH"]}


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    made = Repository(tmp_path)
    made.push("First", {"dags/one.py": FILE.format(name="first"), "README.md": "not a DAG\n"})
    return made


def publisher_of(database: str, tmp_path: Path, url: str, **options: object) -> GitPublisher:
    given = {"home": tmp_path / "home", "listen_notify": False, "deployment": "team", "git_url": url, **options}
    log = configure(service="publisher", as_json=True, stream=(tmp_path / "log").open("a"))
    return GitPublisher(Settings(**given), url=database, environment=HERE, log=log)  # type: ignore[arg-type]


async def test_a_commit_is_published_with_its_author_and_a_broken_one_changes_nothing(
    conn: AsyncConnection, database: str, repository: Repository, tmp_path: Path
) -> None:
    publisher = publisher_of(database, tmp_path, repository.url)
    for _ in range(2):
        await publisher.tick()
    (version,) = await deployments.versions(conn, "team")
    assert (version.author, version.message) == ("Ann Author <ann@example.com>", "First")
    first = version.commit_hash
    repository.push("Broken", {"dags/one.py": FILE.format(name="renamed"), "dags/two.py": BROKEN})
    await publisher.tick()
    assert await dags.names(conn) == ["first"], "not even the file that is fine"
    (error,) = await dags.import_errors(conn)
    assert (error.deployment, error.file, error.line) == ("team", "two.py", 2)
    row = await deployments.find(conn, "team")
    assert row is not None and row.problem is not None
    assert (row.version, row.published_commit, "half done" in row.problem) == (1, first, True)
    fixed = repository.push("Fixed", {"dags/two.py": FILE.format(name="second")})
    await publisher.tick()
    assert await dags.names(conn) == ["renamed", "second"]
    assert await dags.import_errors(conn) == []
    row = await deployments.find(conn, "team")
    assert row is not None
    assert (row.kind, row.version, row.published_commit, row.problem) == ("git", 2, fixed, None)
    await publisher._link.close()
    publisher._repository.close()


async def test_a_rollback_stays_until_the_next_commit(
    conn: AsyncConnection, database: str, repository: Repository, tmp_path: Path
) -> None:
    publisher = publisher_of(database, tmp_path, repository.url)
    await publisher.tick()
    repository.push("Second", {"dags/one.py": FILE.format(name="second")})
    await publisher.tick()
    await roll_back(conn, "team", number=1, actor=Actor("ann"), routing=NO_RULES)
    for each in (publisher, publisher_of(database, tmp_path, repository.url)):
        await each.tick()
        assert await dags.names(conn) == ["first"], "also after a restart"
    repository.push("Elsewhere", {"README.md": "changed\n"})
    await publisher.tick()
    assert await dags.names(conn) == ["second"]


async def test_a_tag_and_the_whole_repository_can_be_followed(repository: Repository, tmp_path: Path) -> None:
    repository.tag("v1")
    repository.push("Later", {"dags/one.py": FILE.format(name="later")})
    source = GitRepository(GitSource(url=repository.url, ref="v1", path="."), environment=HERE)
    commit = await source.fetch(None)
    assert (await source.newest(None), commit.message) == (commit.hash, "First")
    (tmp_path / "out").mkdir()
    await source.unpack(commit, tmp_path / "out")
    assert "def first" in (tmp_path / "out/dags/one.py").read_text()
    source.close()


async def test_problems_with_the_repository_name_it_and_the_next_step(
    conn: AsyncConnection, database: str, repository: Repository, tmp_path: Path
) -> None:
    async def problem_of(url: str, **options: object) -> str:
        publisher = publisher_of(database, tmp_path, url, **options)
        await publisher.tick()
        row = await deployments.find(conn, "team")
        assert row is not None and row.problem is not None
        return row.problem

    assert "has no branch or tag 'nowhere'" in await problem_of(repository.url, git_ref="nowhere")
    assert "has no folder 'flows'" in await problem_of(repository.url, git_path="flows")
    assert "git ls-remote failed for file:///nowhere" in await problem_of("file:///nowhere")
    assert "secret 'token' is not set" in await problem_of(repository.url, git_secret="token", secret_keys=(new_key(),))
    repository.link("dags/passwords.txt", "/etc/passwd")
    repository.push("A link", {})
    assert "'passwords.txt' is a link to '/etc/passwd'" in await problem_of(repository.url)
    assert await dags.names(conn) == []


@pytest.mark.parametrize(
    "source",
    [
        {"url": "https://ann:secret@git.example.com/x"},
        {"url": "https://token@git.example.com/x"},
        {"url": "ext::sh -c whoami"},
        {"url": "--upload-pack=whoami"},
        {"url": "/srv/x"},
        {"ref": "--all"},
        {"ref": "a..b"},
        {"path": "../up"},
        {"path": "a:b"},
    ],
)
def test_an_address_that_git_could_misread_is_refused(source: dict[str, str]) -> None:
    with pytest.raises(UserError):
        GitSource(**{"url": "https://git.example.com/x", "ref": "main", "path": "dags", **source})
    GitSource(url="git@git.example.com:team/x.git", ref="release/1.2", path="src/dags")


async def test_a_secret_is_in_no_command_log_or_table(
    conn: AsyncConnection, database: str, repository: Repository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, real = tmp_path / "commands", shutil.which("git")
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/git"
    wrapper.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >> {shlex.quote(str(told))}\nexec {real} "$@"\n')
    wrapper.chmod(0o700)
    key = new_key()
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    with served(repository, user="x-access-token", password="t0ken-of-ann") as url:
        options = {"git_secret": "token", "secret_keys": (key,)}
        publisher = publisher_of(database, tmp_path, url, **options)
        ring = load_keyring(Settings(secret_keys=(key,)))
        for word in ("wrong-t0ken", "t0ken-of-ann"):
            await put_value(conn, ring, kind=ValueKind.SECRET, name="token", value=word, actor=Actor("ann"))
            await publisher.tick()
            row = await deployments.find(conn, "team")
            assert row is not None
            assert (row.version, row.problem is None) == ((0, False) if word == "wrong-t0ken" else (1, True)), row
    seen = told.read_text() + (tmp_path / "log").read_text()
    seen += str(await value(conn, "select string_agg(d::text, ' ') from deployment d"))
    assert "ls-remote" in seen and "t0ken" not in seen
    assert "No user has Basic ***" in seen, "also encoded, as the server got it"
    await publisher._link.close()


async def test_a_signed_push_wakes_the_publisher(
    conn: AsyncConnection, database: str, repository: Repository, tmp_path: Path
) -> None:
    key, secret = new_key(), "s3cret-of-the-webhook"
    await put_value(
        conn,
        load_keyring(Settings(secret_keys=(key,))),
        kind=ValueKind.SECRET,
        name="hook",
        value=secret,
        actor=Actor("ann"),
    )
    publisher = publisher_of(
        database, tmp_path, repository.url, git_webhook_secret="hook", git_poll_seconds=3600, listen_notify=True
    )
    body = json.dumps({"ref": "refs/heads/main"}).encode()
    signature = hmac.new(secret.encode(), body, hashlib.sha256).hexdigest()
    context = ApiContext(Settings(api_rate_limit=0, secret_keys=(key,)), database, structlog.get_logger())
    github = Client(shared_app(context), None)
    push = "/api/v1/deployments/team/push"

    async def is_published(name: str) -> bool:
        return await dags.names(conn) == [name]

    async with in_background(publisher.run(), context.readers.tend(), context.writers.tend()):
        await eventually(lambda: is_published("first"))
        ways = {"X-Hub-Signature-256": f"sha256={signature}", "X-Gitea-Signature": signature, "X-Gitlab-Token": secret}
        for number, (name, text) in enumerate(ways.items()):
            repository.push("Next", {"dags/one.py": FILE.format(name=f"next{number}")})
            assert (await github.post(push, content=body, headers={name: text})).status_code == 202
            await eventually(lambda number=number: is_published(f"next{number}"))  # type: ignore[misc]
        count = await value(conn, "select count(*) from deployment_version")
        assert (await github.post(push, content=body, headers={"X-Gitlab-Token": secret})).status_code == 202
        for headers in (
            {},
            {"X-Hub-Signature-256": "sha256=" + "0" * 64},
            {"X-Hub-Signature-256": ""},
            {"X-Gitlab-Token": "wrong"},
            {"X-Gitlab-Token": ""},
        ):
            refused = await github.post(push, content=body, headers=headers)
            assert (refused.status_code, "signature or the token" in refused.text) == (401, True)
        unknown = await github.post("/api/v1/deployments/other/push", content=body, headers={"X-Gitlab-Token": secret})
        assert unknown.status_code == 401 and unknown.json()["detail"] == refused.json()["detail"]
        assert await value(conn, "select count(*) from deployment_version") == count
        publisher.stop.set()
        publisher.wake.set()
