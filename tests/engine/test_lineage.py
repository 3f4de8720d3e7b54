"""Events of OpenLineage: each once, with the inlets and outlets by their URIs, and valid by the official schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from psycopg import AsyncConnection
from referencing import Registry, Resource

from evertick.config import Settings
from evertick.domain.dags.spec import AssetSpec
from evertick.domain.errors import DeliveryFailed, NotLeader
from evertick.domain.monitoring.openlineage import RUN_EVENT, lineage_event
from evertick.domain.retry import RetryPolicy
from evertick.engine.monitoring.lineage import enqueue_lineage
from evertick.notifications.delivery import Sending
from tests.engine.world import T0, Runner, later, lead, make_dag, put, set_clock, start, value
from tests.notifications.sinks import web_sink

SINK = "openlineage:http://127.0.0.1:9/lineage"
SPEC = Path(__file__).with_name("openlineage")
SCHEMAS = [json.loads(path.read_text()) for path in sorted(SPEC.glob("*.json"))]


def validator() -> Any:
    registry: Any = Registry().with_resources((each["$id"], Resource.from_contents(each)) for each in SCHEMAS)
    return registry


def check(event: dict[str, Any]) -> None:
    """By the schema of the event, and each facet by its own."""
    registry = validator()
    Draft202012Validator({"$ref": RUN_EVENT}, registry=registry).validate(event)
    for facet in [*event["run"]["facets"].values(), *event["job"]["facets"].values()]:
        Draft202012Validator({"$ref": facet["_schemaURL"]}, registry=registry).validate(facet)


@pytest.fixture
async def conn(rollback_conn: AsyncConnection) -> AsyncConnection:
    await set_clock(rollback_conn, T0)
    return rollback_conn


async def told(conn: AsyncConnection) -> list[dict[str, Any]]:
    found = await value(conn, "select jsonb_agg(payload order by delivery_id) from outbox where event = 'lineage'")
    return list(found or [])  # type: ignore[call-overload]


async def test_each_run_and_attempt_is_told_once_with_its_data(conn: AsyncConnection) -> None:
    assets = (AssetSpec(name="orders", uri="postgres://db:5432/shop.public.orders"), AssetSpec(name="raw"))
    per_task: dict[str, dict[str, object]] = {
        "load": {"inlets": ("raw",), "outlets": ("orders",), "retry": RetryPolicy(retries=1)},
        "fails": {},
    }
    await put(conn, make_dag("etl", {"load": [], "fails": ["load"]}, per_task=per_task, assets=assets))
    epoch, runner = await lead(conn), await Runner.join(conn)

    async def enqueue() -> int:
        return (await enqueue_lineage(conn, shard=0, epoch=epoch, sink=SINK, limit=9, settle_seconds=60)).events

    assert await enqueue() == 0, "it begins with the runs that end from now on"
    await set_clock(conn, later(100))
    run = await start(conn, "etl")
    (claim,) = await runner.claim()
    await set_clock(conn, later(101))
    await runner.finish(claim, "failed", reason="ValueError: no", retry_in=0)
    (claim,) = await runner.claim()
    await set_clock(conn, later(105))
    (claim,) = (await runner.step([(claim, "success", {})], free=1))[0]
    await set_clock(conn, later(109))
    await runner.finish(claim, "failed", reason="KeyError: x", no_retry=True)
    assert await enqueue() == 0, "a commit may be late"
    await set_clock(conn, later(170))
    assert await enqueue() == 8 and await enqueue() == 0
    facts = await told(conn)
    events = [lineage_event(fact, namespace="here", producer="https://evertick.example") for fact in facts]
    for event in events:
        check(event)
    names = [(event["eventType"], event["job"]["name"]) for event in events]  # type: ignore[index]
    assert sorted(names) == [
        ("COMPLETE", "etl.load"),
        ("FAIL", "etl"),
        ("FAIL", "etl.fails"),
        ("FAIL", "etl.load"),
        ("START", "etl"),
        ("START", "etl.fails"),
        ("START", "etl.load"),
        ("START", "etl.load"),
    ]
    (whole,) = {event["run"]["runId"] for event in events if event["job"]["name"] == "etl"}  # type: ignore[index]
    done: Any = next(event for event in events if event["eventType"] == "COMPLETE")
    assert done["run"]["facets"]["parent"]["run"]["runId"] == whole
    assert done["inputs"] == [{"namespace": "here", "name": "raw"}]
    assert done["outputs"] == [{"namespace": "postgres://db:5432", "name": "shop.public.orders"}]
    pairs: dict[str, list[str]] = {}
    for event in events:
        pairs.setdefault(event["run"]["runId"], []).append(str(event["eventType"]))  # type: ignore[index]
    assert all(len(types) == 2 and types[0] == "START" for types in pairs.values()), "one START and one end each"
    failed: Any = next(event for event in events if event["eventType"] == "FAIL" and event["job"]["name"] == "etl.load")  # type: ignore[index]
    assert failed["run"]["facets"]["errorMessage"]["message"] == "ValueError: no" and failed["outputs"] == []
    assert await value(conn, "select count(*) from outbox where run_id = %s", run) == 8
    with pytest.raises(NotLeader):
        async with conn.transaction():
            await enqueue_lineage(conn, shard=0, epoch=epoch - 1, sink=SINK, limit=9, settle_seconds=60)
    client: Any = pytest.importorskip("openlineage.client.event_v2", reason="openlineage-python is not installed")
    for event in events:
        assert client.RunEvent(
            eventTime=event["eventTime"],
            run=client.Run(runId=event["run"]["runId"]),  # type: ignore[index]
            job=client.Job(namespace="here", name=event["job"]["name"]),  # type: ignore[index]
            eventType=client.RunState(event["eventType"]),
        )


async def test_an_event_is_posted_as_it_is_and_a_collector_that_refuses_is_tried_again(database: str) -> None:
    fact = {
        "event": "lineage", "type": "START", "at": "2030-01-01T00:00:00+00:00", "run": 1, "dag": "d", "epoch": 0,
        "run_started_at": "2030-01-01T00:00:00+00:00", "installation": "2030-01-01",
    }  # fmt: skip
    with web_sink() as collector:
        settings = Settings(webhook_allowed_networks=("127.0.0.0/8",), public_url="https://evertick.example.com")

        async def connect() -> AsyncConnection:
            raise AssertionError("no secret is read")

        sending = Sending(settings, connect=connect)
        await sending.send(f"openlineage:{collector.url}/lineage", fact, delivery="7")
        check(collector.told[0].json)
        assert collector.told[0].json["job"]["namespace"] == "https://evertick.example.com"
        collector.status["/lineage"] = 500
        with pytest.raises(DeliveryFailed) as refused:
            await sending.send(f"openlineage:{collector.url}/lineage", fact, delivery="7")
        assert not refused.value.is_final
