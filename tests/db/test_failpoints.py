"""Faults on demand: where they strike, that they strike once, and that nothing is there when none is armed."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psycopg
import pytest
from psycopg import AsyncConnection

from evertick.db import failpoints
from evertick.db.connect import Purpose, connect
from evertick.db.failpoints import Failpoint, Fault, parse
from evertick.db.queries import dags
from evertick.db.statements import nouns, statements
from evertick.domain.errors import InvalidSettings
from tests.engine.world import value

OpenArmed = Callable[[str], Awaitable[AsyncConnection]]


@pytest.fixture
async def armed_conn(database: str) -> AsyncIterator[OpenArmed]:
    """Opens connections on which a failpoint is armed."""

    async def open_armed(text: str) -> AsyncConnection:
        failpoints.arm(text)
        return await connect(database, purpose=Purpose.SCHEDULER)

    yield open_armed
    failpoints.disarm()


async def put(conn: AsyncConnection, name: str) -> None:
    await dags.put_bundle(conn, bundle_hash=name, file="f.py", archive=b"", uses_threads=None)


def test_a_failpoint_is_written_as_people_can_read_it(tmp_path: Path) -> None:
    marker = tmp_path / "a marker: 1"
    assert parse(f"finish_and_claim:after:2@{marker}") == Failpoint(
        statement="finish_and_claim", fault=Fault.AFTER, number=2, marker=marker
    )
    assert parse("finish_and_claim:error") == Failpoint(statement="finish_and_claim", fault=Fault.ERROR)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is invalid"),
        ("finish_and_claim", "is invalid"),
        ("finish_and_claim:sometimes", "with one of before, after, error, drop_reply"),
        ("finish_and_claim:after:x", "is invalid"),
        ("finish_and_clain:after", "Did you mean finish_and_claim"),
        ("x.y:after", "does not exist"),
    ],
)
def test_what_cannot_be_a_failpoint_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        failpoints.arm(text)
    assert failpoints.cursor_class() is None


def test_every_statement_can_be_told_from_every_other() -> None:
    texts = [text for noun in nouns() for text in statements(noun).values()]
    assert len(texts) == len(set(texts))


async def test_nothing_is_there_unless_it_is_armed(conn: AsyncConnection) -> None:
    failpoints.arm(None)
    assert failpoints.cursor_class() is None
    assert type(conn.cursor()) is psycopg.AsyncCursor


@pytest.mark.parametrize(("fault", "stored"), [("error", 1), ("drop_reply", 2)])
async def test_a_connection_is_lost_before_the_statement_or_after_its_commit(
    conn: AsyncConnection, armed_conn: OpenArmed, fault: str, stored: int
) -> None:
    faulty = await armed_conn(f"dags.put_bundle:{fault}:2")
    await put(faulty, "one")
    with pytest.raises(psycopg.OperationalError):
        await put(faulty, "two")
    assert faulty.closed
    assert await value(conn, "select count(*) from bundle") == stored


async def test_a_marker_makes_it_happen_once(conn: AsyncConnection, armed_conn: OpenArmed, tmp_path: Path) -> None:
    text = f"dags.put_bundle:error:1@{tmp_path / 'marker'}"
    first = await armed_conn(text)
    with pytest.raises(psycopg.OperationalError):
        await put(first, "one")
    async with await armed_conn(text) as second:
        await put(second, "one")
    assert await value(conn, "select count(*) from bundle") == 1
