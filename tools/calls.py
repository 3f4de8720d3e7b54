"""Records which test calls which stored function and which named statement, from the database's own statistics.

Only a test that calls a function can detect a missing guard in it, so mutation testing runs only these tests.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any

import psycopg
import pytest
from psycopg import AsyncCursor
from tests.databases import Cluster, let_sessions_end

from evertick.db.statements import executed_name

_CALLED = "select funcname, calls from pg_stat_user_functions"


class Calls:
    """A pytest plugin for a process that ends with its tests: its patches are not undone."""

    def __init__(self, url: str) -> None:
        self.by_test: dict[str, set[str]] = defaultdict(set)
        self._url = url
        self._test = ""
        self._counts: dict[str, dict[str, int]] = {}

    def watch(self) -> None:
        """Read the statistics of each database before it is dropped, and record each statement that is executed."""
        create, drop, execute = Cluster.create, Cluster.drop, AsyncCursor.execute

        def create_and_note(cluster: Cluster, template: str | None = None) -> str:
            name = create(cluster, template)
            self._counts[name] = {}
            return name

        def look_and_drop(cluster: Cluster, name: str) -> None:
            self._look(name)
            self._counts.pop(name, None)
            drop(cluster, name)

        async def execute_and_note(
            cursor: AsyncCursor[Any], query: Any, *args: Any, **options: Any
        ) -> AsyncCursor[Any]:
            if (name := executed_name(query)) is not None:
                self.by_test[self._test].add(name)
            return await execute(cursor, query, *args, **options)

        Cluster.create, Cluster.drop = create_and_note, look_and_drop  # type: ignore[method-assign]
        AsyncCursor.execute = execute_and_note  # type: ignore[method-assign,assignment]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = nodeid

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logfinish(self) -> None:
        # Databases shared by several tests are read after each test.
        for name in list(self._counts):
            self._look(name)

    def _look(self, name: str) -> None:
        """Read the statistics, which a session publishes when it ends, at the latest. A test may have dropped its database."""
        if name not in self._counts:
            return
        before = self._counts[name]
        cluster = Cluster(url=self._url)
        with cluster.admin() as admin:
            let_sessions_end(admin, name)
        with suppress(psycopg.OperationalError), psycopg.connect(cluster.database_url(name), autocommit=True) as conn:
            self._counts[name] = dict(conn.execute(_CALLED).fetchall())
        called = {function for function, count in self._counts[name].items() if count != before.get(function)}
        self.by_test[self._test] |= called
