"""Each test that asks for a way to the engine runs with both: a database connection, and HTTPS."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from psycopg import AsyncConnection

from tests.runner.reach import TRANSPORTS, Reach, reaching


@pytest.fixture(params=TRANSPORTS)
async def reach(
    request: pytest.FixtureRequest, database: str, conn: AsyncConnection, tmp_path: Path
) -> AsyncIterator[Reach]:
    async with reaching(request.param, database, conn, tmp_path) as made:
        yield made
