"""Database fixtures for every test. `EVERTICK_TEST_URL` names a server to use; otherwise one is started per test run.

database       URL of a fresh, migrated database                     (commits are real; about 30 ms)
conn           a planning connection to such a database
rollback_conn  a connection in a transaction that is rolled back     (about 2 ms; explicit BEGIN/COMMIT not possible)
any_postgres   URL of a fresh, migrated database, once on the embedded server and once on an external one
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from argon2 import PasswordHasher
from hypothesis import HealthCheck, settings
from psycopg import AsyncConnection

from evertick.db import connect as db_connect
from evertick.db.connect import Purpose, connect
from evertick.engine import accounts
from evertick.processes.system import IS_PORTABLE
from tests.databases import Cluster, own_cluster, quick_folder
from tests.external_postgres import external_cluster

_CLUSTER: pytest.StashKey[Cluster] = pytest.StashKey()
_SHARED_URL = "evertick_test_url"

# How long an example takes says something about the machine: by default one that takes 200 ms is a failure.
settings.register_profile("evertick", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("evertick")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """All workers of a parallel run share the server of the process that started them."""
    node.workerinput[_SHARED_URL] = _cluster_of(node.config).url


def pytest_configure() -> None:
    """Nothing that collecting makes is garbage: looking for some takes a quarter of its time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """What was collected stays until the end: the garbage collections of the tests leave it out."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first: whoever had one of them last would be alone with it while the other workers have nothing to do."""
    for item in items:
        if IS_PORTABLE and item.get_closest_marker("linux"):
            item.add_marker(pytest.mark.skip(reason="a promise of Linux alone"))
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session", autouse=True)
def patient_sessions() -> None:
    """A busy machine must not end a transaction under its test: after five seconds of silence a server would."""
    for settings_of_session in db_connect._SESSION.values():
        settings_of_session["idle_in_transaction_session_timeout"] = "120s"


@pytest.fixture(scope="session", autouse=True)
def quick_passwords() -> PasswordHasher:
    """Passwords are hashed in a millisecond instead of a tenth of a second of processor time. Returns the hasher of the program."""
    of_program, quick = accounts._hasher(), PasswordHasher(time_cost=1, memory_cost=64, parallelism=1)
    accounts._hasher = lambda: quick  # type: ignore[assignment]
    return of_program


@pytest.fixture(scope="session")
def cluster(pytestconfig: pytest.Config) -> Cluster:
    """The embedded server of this test run."""
    return _cluster_of(pytestconfig)


@pytest.fixture(scope="session")
def template(cluster: Cluster) -> str:
    """The name of the migrated database that the others are copied from."""
    return cluster.template()


@pytest.fixture
def database(cluster: Cluster, template: str) -> Iterator[str]:
    """The URL of a fresh, migrated database."""
    name = cluster.create(template)
    yield cluster.database_url(name)
    cluster.drop(name)


@pytest.fixture
def empty_database(cluster: Cluster) -> Iterator[str]:
    """The URL of a fresh database without any schema."""
    name = cluster.create()
    yield cluster.database_url(name)
    cluster.drop(name)


@pytest.fixture
async def conn(database: str) -> AsyncIterator[AsyncConnection]:
    """An autocommit planning connection to a fresh, migrated database."""
    async with await connect(database, purpose=Purpose.SCHEDULER) as connection:
        yield connection


@pytest.fixture(scope="session")
def shared_database(cluster: Cluster, template: str) -> Iterator[str]:
    """One database for all tests of this worker that leave nothing behind."""
    name = cluster.create(template)
    yield cluster.database_url(name)
    cluster.drop(name)


@pytest.fixture
async def rollback_conn(shared_database: str) -> AsyncIterator[AsyncConnection]:
    """A planning connection inside a transaction that is rolled back after the test."""
    async with await connect(shared_database, purpose=Purpose.SCHEDULER) as connection:
        async with connection.transaction(force_rollback=True):
            yield connection


@pytest.fixture(scope="session")
def external(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A PostgreSQL 16 over TCP with a password."""
    with external_cluster(tmp_path_factory.mktemp("external") / "postgres") as cluster:
        yield cluster


@pytest.fixture(scope="session")
def postgres_url_external(external: Cluster) -> str:
    """The URL of that server's maintenance database."""
    return external.url


@pytest.fixture(params=["embedded", "external"])
def any_cluster(request: pytest.FixtureRequest) -> Cluster:
    """Each kind of server that Evertick may be given, in turn."""
    found: Cluster = request.getfixturevalue("cluster" if request.param == "embedded" else "external")
    return found


@pytest.fixture
def any_postgres(any_cluster: Cluster) -> Iterator[str]:
    """The URL of a fresh, migrated database on each kind of server in turn."""
    name = any_cluster.create(any_cluster.template())
    yield any_cluster.database_url(name)
    any_cluster.drop(name)


def _cluster_of(config: pytest.Config) -> Cluster:
    """The one server of this test run: given, inherited from the starting process, or started now."""
    if _CLUSTER not in config.stash:
        given = getattr(config, "workerinput", {}).get(_SHARED_URL) or os.environ.get("EVERTICK_TEST_URL")
        config.stash[_CLUSTER] = Cluster(url=given or _start(config), is_lasting=True)
    return config.stash[_CLUSTER]


def _start(config: pytest.Config) -> str:
    stack = ExitStack()
    config.add_cleanup(stack.close)
    home = stack.enter_context(tempfile.TemporaryDirectory(prefix="evertick-test-", dir=quick_folder()))
    return stack.enter_context(own_cluster(Path(home) / "home")).url
