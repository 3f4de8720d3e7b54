"""What the tests with real processes share: an installation on a fresh database, whose invariants hold in the end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from evertick.db.connect import Purpose, connect
from tests.databases import Cluster, run
from tests.engine import invariants
from tests.system import two_servers
from tests.system.boundaries import Rehearsed, Stage, rehearse
from tests.system.processes import Installation
from tests.system.work import LONG, SMALL, Published, executed_twice, loaded, publish_work


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> Published:
    return loaded(LONG, tmp_path_factory.mktemp("dags"))


@pytest.fixture(scope="session")
def primary_data() -> Iterator[Path]:
    """Once for all pairs of servers: `initdb` and the migrations take seconds."""
    with two_servers.primary_data() as made:
        yield made


@pytest.fixture(scope="session")
def furnished(cluster: Cluster, template: str, long: Published) -> Iterator[str]:
    """The name of a database in which the work is published and watched: a test gets a copy of it."""
    name = cluster.create(template)
    run(_furnish(cluster.database_url(name), long))
    yield name
    cluster.drop(name)


async def _furnish(url: str, work: Published) -> None:
    async with await connect(url, purpose=Purpose.SCHEDULER) as conn:
        await invariants.install(conn)
        await publish_work(conn, work)


@pytest.fixture
async def there(cluster: Cluster, furnished: str, tmp_path: Path) -> AsyncIterator[Installation]:
    name = cluster.create(furnished)
    try:
        async with Installation(cluster.database_url(name), tmp_path / "there") as installation:
            yield installation
            assert await invariants.violations(installation.conn) == []
            assert executed_twice(installation.effects()) == []
    finally:
        cluster.drop(name)


@pytest.fixture
def stage(cluster: Cluster, template: str, tmp_path: Path) -> Stage:
    return Stage(cluster=cluster, template=template, work=loaded(SMALL, tmp_path / "dags"), folder=tmp_path)


@pytest.fixture(scope="session")
def rehearsed(cluster: Cluster, template: str, tmp_path_factory: pytest.TempPathFactory) -> Rehearsed:
    """How an uninterrupted play ends: the same for everybody who interrupts one."""
    folder = tmp_path_factory.mktemp("rehearsal")
    stage = Stage(cluster=cluster, template=template, work=loaded(SMALL, folder / "dags"), folder=folder)
    return run(rehearse(stage))  # type: ignore[no-any-return]
