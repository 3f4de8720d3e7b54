"""Other rules and the same code: the version stays, its tasks are routed anew, and the journal says which."""

from __future__ import annotations

import pytest
from psycopg import AsyncConnection

from evertick.db.queries import dags
from evertick.domain.access import Actor
from evertick.domain.dags.spec import DagSpec
from evertick.domain.routing import Routing, read_routing
from evertick.engine.publish import NO_RULES, Published, publish
from tests.engine.world import make_dag, value

pytestmark = pytest.mark.requirement("K6")


async def put(conn: AsyncConnection, spec: DagSpec, routing: Routing) -> Published:
    await dags.put_bundle(conn, bundle_hash="b", file="f.py", archive=b"", uses_threads=None)
    return await publish(conn, spec=spec, file="f.py", bundle_hash="b", actor=Actor("test"), routing=routing)


async def test_only_what_other_rules_change_is_routed_anew_and_noted(conn: AsyncConnection) -> None:
    spec = make_dag("etl", {"a": [], "b": [], "mine": []}, per_task={"mine": {"queue": "own"}})
    rules = read_routing("[[rule]]\nmatch = 'a'\nqueue = 'fast'\n")
    first = await put(conn, spec, NO_RULES)
    other = await put(conn, make_dag("other", {"a": []}), NO_RULES)
    second = await put(conn, spec, rules)
    again = await put(conn, spec, rules)
    assert (first.is_new, second.is_new, first.version_id) == (True, False, second.version_id)
    assert (first.rerouted, second.rerouted, again.rerouted) == (0, 1, 0)
    assert await dags.queues(conn, first.version_id) == ["fast", "default", "own"]
    assert await dags.queues(conn, other.version_id) == ["default"]
    noted = "select jsonb_agg(detail->'tasks') from audit_log where action = 'route'"
    assert await value(conn, noted) == [{"a": ["default", "fast"]}]
