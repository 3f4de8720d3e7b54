"""`schema.sql`, which people read, is what the migrations make."""

from __future__ import annotations

from tools.schema import difference, dump


def test_the_written_schema_equals_the_migrations(shared_database: str) -> None:
    assert not difference(dump(shared_database)), "run `python tools/schema.py`"
