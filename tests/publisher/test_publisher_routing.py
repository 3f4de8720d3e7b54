"""The publisher routes what it publishes, and routes it anew when the rules change and the code does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.config import Settings
from evertick.observability.logging import configure
from evertick.publisher.publisher import Publisher
from tests.engine.world import Runner, names_of, start, value

pytestmark = pytest.mark.requirement("K6")

DAG = """
from evertick import dag, task, task_group

@task
def load(): ...

@task(queue="mine")
def chosen(): ...

@dag
def etl():
    with task_group("extract"):
        load()
    load() >> chosen()
"""


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    return tmp_path / "routing.toml"


@pytest.fixture
def publisher(database: str, tmp_path: Path, rules: Path) -> Publisher:
    folder = tmp_path / "dags"
    folder.mkdir()
    (folder / "etl.py").write_text(DAG)
    settings = Settings(dags_folder=folder, home=tmp_path / "home", listen_notify=False, routing_file=rules)
    log = configure(service="publisher", as_json=True, stream=(tmp_path / "log").open("w"))
    return Publisher(settings, url=database, environment={"PATH": "/usr/bin"}, log=log)


def write(rules: Path, match: str, queue: str) -> None:
    rules.write_text(f"[[rule]]\nmatch = '{match}'\nqueue = '{queue}'\n")


async def queues(conn: AsyncConnection) -> dict[str, str]:
    cursor = await conn.execute("select s.name, s.queue from task_spec s join dag d on d.version_id = s.version_id")
    return dict(await cursor.fetchall())


async def test_tasks_are_published_into_the_queue_that_the_rules_give(
    conn: AsyncConnection, publisher: Publisher, rules: Path
) -> None:
    write(rules, "etl::extract::*", "wide")
    await publisher.tick()
    assert await queues(conn) == {"extract.load": "wide", "load": "default", "chosen": "mine"}


async def test_other_rules_route_the_same_version_anew_and_what_is_in_line_stays(
    conn: AsyncConnection, publisher: Publisher, rules: Path, tmp_path: Path
) -> None:
    write(rules, "etl::*", "old")
    await publisher.tick()
    first = await start(conn, "etl")
    write(rules, "etl::**", "new")
    await publisher.tick()
    await publisher.tick()
    assert await queues(conn) == {"extract.load": "new", "load": "new", "chosen": "mine"}
    assert await value(conn, "select count(*) from dag_version") == 1
    assert await value(conn, "select count(*) from audit_log where action = 'route'") == 1
    moved = await value(conn, "select detail->'tasks'->'load' from audit_log where action = 'route'")
    assert moved == ["old", "new"]
    second = await start(conn, "etl")
    runner = await Runner.join(conn, queues=("old", "new"))
    old = await runner.claim(queues=("old",))
    assert [claim.run_id for claim in old] == [first]
    assert await names_of(conn, old) == ["load"]
    new = await runner.claim(queues=("new",))
    assert sorted(await names_of(conn, new)) == ["extract.load", "load"]
    assert {claim.run_id for claim in new} == {second}
    assert (tmp_path / "log").read_text().count('"event": "task_rerouted"') == 1


async def test_broken_rules_never_replace_good_ones_and_are_told_once(
    conn: AsyncConnection, publisher: Publisher, rules: Path, tmp_path: Path
) -> None:
    write(rules, "**", "good")
    await publisher.tick()
    rules.write_text("[[rule]]\nmatch = 'etl::?'\nqueue = 'bad'\n")
    for _ in range(3):
        await publisher.tick()
    assert set((await queues(conn)).values()) == {"good", "mine"}
    (told,) = [line for line in (tmp_path / "log").read_text().splitlines() if "routing_failed" in line]
    assert "rule 1: pattern 'etl::?'" in told and "The previous rules stay in effect." in told
    write(rules, "**", "better")
    await publisher.tick()
    assert set((await queues(conn)).values()) == {"better", "mine"}


async def test_nothing_is_published_before_the_rules_can_be_read(
    conn: AsyncConnection, publisher: Publisher, rules: Path, tmp_path: Path
) -> None:
    await publisher.tick()
    assert await queues(conn) == {}
    assert "cannot be read" in (tmp_path / "log").read_text()
    write(rules, "**", "good")
    await publisher.tick()
    assert set((await queues(conn)).values()) == {"good", "mine"}
