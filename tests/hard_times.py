"""What a test must not notice, as a plugin of pytest: `make hard` loads it.

A stranger on the same server, whose transactions are open now for a moment, now for long; and an order of tests that nobody
chose.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import psycopg
import pytest

from tests.databases import Cluster

SEED = "EVERTICK_TEST_ORDER"
# For how long a transaction of the stranger stays open.
_OPEN_SECONDS = (0.05, 1.0, 20.0, 150.0)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Modules in any order, and the tests of each: what a module's fixtures made is still used by its tests only."""
    dice = random.Random(os.environ.get(SEED, "0"))
    places: dict[str, float] = {}
    for item in items:
        places.setdefault(item.nodeid.partition("::")[0], dice.random())
    dice.shuffle(items)
    items.sort(key=lambda item: places[item.nodeid.partition("::")[0]])


@pytest.fixture(scope="session", autouse=True)
def stranger(cluster: Cluster) -> Iterator[None]:
    is_over = threading.Event()
    thread = threading.Thread(target=_write_now_and_then, args=(cluster.url, is_over), daemon=True)
    thread.start()
    yield
    is_over.set()
    thread.join()


def _write_now_and_then(url: str, is_over: threading.Event) -> None:
    dice = random.Random()
    while not is_over.is_set():
        try:
            with psycopg.connect(url) as conn:
                conn.execute("select pg_current_xact_id()")
                is_over.wait(dice.choice(_OPEN_SECONDS))
        except psycopg.OperationalError:
            is_over.wait(1.0)
