"""The loader of named SQL statements."""

from __future__ import annotations

from pathlib import Path

import pytest
from psycopg import AsyncConnection

from evertick.db.statements import nouns, sql, statements
from evertick.domain.access import Actor

EXAMPLE = """\
-- What the file is about.

-- name: first_of
-- 100 % of the reason why.
select a
  from t
 where id = %(id)s;

-- name: second
select 'a -- b'
"""


def write(directory: Path, text: str) -> Path:
    (directory / "things.sql").write_text(text)
    return directory


def test_statements_are_found_by_name_without_their_comments(tmp_path: Path) -> None:
    found = statements("things", write(tmp_path, EXAMPLE))
    assert found == {"first_of": "select a\n  from t\n where id = %(id)s", "second": "select 'a -- b'"}


def test_the_program_has_its_statements_with_it() -> None:
    assert "migrate" in nouns()
    assert "pg_try_advisory_xact_lock" in sql("migrate", "lock")


def test_an_unknown_statement_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        LookupError, match=r"migrate\.sql has no statement 'nothing'; it has: applied_migrations, has_record"
    ):
        sql("migrate", "nothing")


def test_an_unknown_noun_is_answered_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(LookupError, match=r"no nothing\.sql .* there is: things"):
        statements("nothing", write(tmp_path, EXAMPLE))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("select 1", "things.sql:1 comes before any"),
        ("-- name: a\nselect 1\n-- name: a\nselect 2", "things.sql:3 names 'a' a second time"),
        ("-- name: a\n-- why\n-- name: b\nselect 2", "nothing under a"),
    ],
)
def test_a_file_that_breaks_the_form_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LookupError, match=message):
        statements("things", write(tmp_path, text))


@pytest.mark.parametrize(
    "actor",
    [
        Actor("cli:ann", "host", "42"),
        Actor("publisher"),
        Actor('user:"(a, b)\\', "::1", "'x'"),
        Actor("user:Zoë\n", None, "%s"),
    ],
)
async def test_an_actor_arrives_as_it_is(rollback_conn: AsyncConnection, actor: Actor) -> None:
    cursor = await rollback_conn.execute("select (%s::actor).*", [actor])
    assert await cursor.fetchone() == (actor.name, actor.origin, actor.request_id)
