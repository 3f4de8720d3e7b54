"""What the tests with real processes share: an installation on a fresh database, whose invariants hold in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.databases import Cluster
from tests.engine import invariants
from tests.system.boundaries import Stage
from tests.system.processes import Installation
from tests.system.work import LONG, SMALL, Published, executed_twice, loaded, publish_work


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return loaded(LONG, tmp_path_factory.mktemp("dags"))


@pytest.fixture
async def there(database: str, tmp_path: Path, long: Published) -> AsyncIterator[Installation]:
    async with Installation(database, tmp_path / "there") as installation:
        await invariants.install(installation.conn)
        await publish_work(installation.conn, long)
        yield installation
        assert await invariants.violations(installation.conn) == []
        assert executed_twice(installation.effects()) == []


@pytest.fixture
def stage(cluster: Cluster, template: str, tmp_path: Path) -> Stage:
    return Stage(cluster=cluster, template=template, work=loaded(SMALL, tmp_path / "dags"), folder=tmp_path)
