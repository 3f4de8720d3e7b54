"""Traces from fire to finish: one per run, read back from the database, with ids that anybody can derive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Status
from psycopg import AsyncConnection

from evertick.config import read_settings
from evertick.db.migrate import status
from evertick.db.queries import tasks
from evertick.domain.access import Actor
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.tasks import clear
from evertick.observability import metrics
from evertick.scheduler import telemetry as tracing
from evertick.scheduler.otel import TraceIds, traces_endpoint
from evertick.scheduler.telemetry import Tracing, make_spans
from tests.engine.world import T0, Runner, later, lead, make_dag, put, set_clock, start
from tests.observability.collector import Collector, attributes
from tests.system.hosting import Said
from tests.waiting import eventually

CHAIN = {"a": [], "b": ["a"]}


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(autouse=True)
def leading() -> Iterator[None]:
    metrics.LEADER.set(1)
    yield
    metrics.LEADER.set(0)


@pytest.fixture
async def traced(database: str, collector: Collector) -> AsyncIterator[Tracing]:
    said = Said()
    make = make_spans(collector.url, said.log)
    assert make is not None
    made = Tracing(database, make=make, log=said.log)
    await made.tick()
    yield made
    await made._link.close()


def at(nanoseconds: int) -> float:
    """Seconds after T0."""
    return (nanoseconds / 1e9) - T0.timestamp()


async def installation(conn: AsyncConnection) -> str:
    return (await status(conn)).applied[0].applied_at.isoformat()


async def test_a_scheduled_run_is_one_trace_from_its_due_instant_to_its_end(
    conn: AsyncConnection, traced: Tracing, collector: Collector
) -> None:
    await set_clock(conn, T0)
    await put(conn, make_dag("etl", CHAIN, every="@every 60s"))
    epoch = await lead(conn)
    await set_clock(conn, later(60.25))
    await fire_schedules(conn, shard=0, epoch=epoch, batch=10)
    runner = await Runner.join(conn)
    await set_clock(conn, later(61))
    (a,) = await runner.claim()
    await set_clock(conn, later(63))
    await runner.finish(a)
    await set_clock(conn, later(64))
    (b,) = await runner.claim()
    await set_clock(conn, later(70))
    await runner.finish(b, "failed", reason="ValueError: wrong\nTraceback: secret", no_retry=True)
    await traced.tick()

    ids = TraceIds(installation=await installation(conn), run_id=a.run_id)
    assert {span.trace_id for span in collector.spans} == {ids.trace.to_bytes(16)}
    spans = {span.name: (at(span.start_time_unix_nano), at(span.end_time_unix_nano)) for span in collector.spans}
    due = spans["run etl"][0]
    assert due == spans["fire etl"][0] <= spans["fire etl"][1] == pytest.approx(60.25)
    assert spans["run etl"][1] == pytest.approx(70)
    assert spans["wait a"] == pytest.approx((60.25, 61))
    assert spans["attempt a"] == pytest.approx((61, 63))
    assert spans["wait b"] == pytest.approx((63, 64))
    assert spans["attempt b"] == pytest.approx((64, 70))
    (whole,) = collector.named("run etl")
    assert whole.parent_span_id == b""
    others = [span for span in collector.spans if span is not whole]
    assert {span.parent_span_id for span in others} == {whole.span_id} == {ids.span("run").to_bytes(8)}
    (attempt,) = collector.named("attempt b")
    assert attempt.span_id == ids.span("attempt", b.idx, b.map_index, b.epoch).to_bytes(8)
    assert (attempt.status.code, attempt.status.message) == (Status.STATUS_CODE_ERROR, "ValueError: wrong")
    assert collector.named("attempt a")[0].status.code == Status.STATUS_CODE_OK
    facts = attributes(attempt)
    assert facts["evertick.run"] == a.run_id
    assert (facts["evertick.dag"], facts["evertick.task"], facts["evertick.epoch"]) == ("etl", "b", 1)
    assert facts["evertick.runner"] == f"r{runner.session}"
    assert (facts["cicd.pipeline.task.name"], facts["cicd.pipeline.task.run.result"]) == ("b", "failure")
    assert facts["cicd.pipeline.task.run.id"] == f"{a.run_id}/{b.idx}/-1/1"
    assert facts["cicd.worker.id"] == f"r{runner.session}"
    told = attributes(whole)
    assert (told["cicd.pipeline.name"], told["cicd.pipeline.run.id"]) == ("etl", str(a.run_id))
    assert told["cicd.pipeline.result"] == "failure"
    assert collector.paths == {"/v1/traces"}
    assert {each["service.name"] for each in collector.resources} == {"evertick"}


async def test_a_triggered_run_with_a_retry_has_a_wait_and_an_attempt_for_each_try(
    conn: AsyncConnection, traced: Tracing, collector: Collector
) -> None:
    await set_clock(conn, T0)
    await put(conn, make_dag("once", {"a": []}))
    await start(conn, "once")
    # For a day long before: the trace begins with the trigger.
    await conn.execute("update run set fire_at = '2020-01-01T00:00Z'")
    runner = await Runner.join(conn)
    await set_clock(conn, later(1))
    (first,) = await runner.claim()
    await set_clock(conn, later(2))
    await runner.finish(first, "given_back")
    await set_clock(conn, later(5))
    (second,) = await runner.claim()
    await set_clock(conn, later(6))
    await runner.finish(second)
    await traced.tick()
    waits = sorted((at(s.start_time_unix_nano), at(s.end_time_unix_nano)) for s in collector.named("wait a"))
    assert waits == [pytest.approx((0, 1)), pytest.approx((2, 5))]
    assert len({span.span_id for span in collector.spans}) == len(collector.spans) == 6
    assert at(collector.named("run once")[0].start_time_unix_nano) == pytest.approx(0)
    assert collector.named("trigger once") and not collector.named("fire once")


async def test_each_run_is_sent_once_and_what_ended_before_not_at_all(
    conn: AsyncConnection, traced: Tracing, collector: Collector, database: str
) -> None:
    await put(conn, make_dag("dag", {"a": []}))
    runner = await Runner.join(conn)
    for _ in range(3):
        await start(conn, "dag")
    await runner.drain()
    await start(conn, "dag")
    await traced.tick()
    await traced.tick()
    assert len(collector.named("run dag")) == 3
    await runner.drain()
    await traced.tick()
    assert len(collector.named("run dag")) == 4
    # A new leader does not begin at the beginning.
    make = make_spans(collector.url, Said().log)
    assert make is not None
    successor = Tracing(database, make=make, log=Said().log)
    await successor.tick()
    await start(conn, "dag")
    await successor.tick()
    await runner.drain()
    await successor.tick()
    assert len(collector.named("run dag")) == 5
    await successor._link.close()


async def test_a_run_that_was_cleared_is_sent_again_with_its_new_attempt(
    conn: AsyncConnection, traced: Tracing, collector: Collector
) -> None:
    await put(conn, make_dag("dag", {"a": []}))
    runner = await Runner.join(conn)
    run = await start(conn, "dag")
    await runner.drain()
    await traced.tick()
    chosen = await tasks.list_of_run(conn, run_id=run, limit=10)
    await clear(conn, run_id=run, chosen=chosen, actor=Actor("test"))
    await traced.tick()
    await runner.drain()
    await traced.tick()
    assert len({span.span_id for span in collector.named("attempt a")}) == 2
    assert len({span.span_id for span in collector.named("run dag")}) == 1


async def test_a_collector_that_is_away_delays_traces_and_loses_none(
    conn: AsyncConnection, traced: Tracing, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(conn, make_dag("dag", {"a": []}))
    runner = await Runner.join(conn)
    collector.is_refusing = True
    for _ in range(3):
        await start(conn, "dag")
        await runner.drain()
        with pytest.raises(ConnectionError, match="did not accept"):
            await traced.tick()
    assert collector.refused == 3
    collector.is_refusing = False
    await traced.tick()
    assert len(collector.named("run dag")) == 3


async def test_no_more_traces_wait_than_may_and_that_is_told(
    conn: AsyncConnection, traced: Tracing, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracing, "MOST_WAITING", 2)
    said = Said()
    traced._log = said.log
    await put(conn, make_dag("dag", {"a": []}))
    runner = await Runner.join(conn)
    for _ in range(5):
        await start(conn, "dag")
    await runner.drain()
    await traced.tick()
    assert len(collector.named("run dag")) == 2
    assert said.events("traces_dropped", runs=3)


async def test_a_standby_sends_no_traces(conn: AsyncConnection, traced: Tracing, collector: Collector) -> None:
    metrics.LEADER.set(0)
    await put(conn, make_dag("dag", {"a": []}))
    runner = await Runner.join(conn)
    await start(conn, "dag")
    await runner.drain()
    await traced.tick()
    assert collector.spans == []


async def test_a_collector_that_hangs_does_not_keep_the_service_from_its_work_or_its_end(database: str) -> None:
    """It accepts and never answers. Ending the loop does not wait for it."""
    silent = await asyncio.start_server(lambda *_: asyncio.Event().wait(), "127.0.0.1", 0)
    said = Said()
    make = make_spans(f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}", said.log)
    assert make is not None
    ran = Tracing(database, make=make, log=said.log)
    task = asyncio.create_task(ran.run())
    await eventually(lambda: ran._newest is not None)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()
    silent.close()


def test_where_traces_go() -> None:
    assert read_settings({}).otlp_endpoint is None
    base, own = "http://collector:4318", "http://mine:1/v1/traces"
    assert read_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": base}).otlp_endpoint == base
    assert read_settings({"OTEL_EXPORTER_OTLP_ENDPOINT": base, "EVERTICK_OTLP_ENDPOINT": own}).otlp_endpoint == own
    assert traces_endpoint(base) == traces_endpoint(f"{base}/") == f"{base}/v1/traces"
    assert traces_endpoint(own) == own


def test_without_a_collector_nothing_of_it_is_loaded() -> None:
    preload = "from evertick.cli.commands.services import preload; preload('scheduler')"
    code = f"import sys; {preload}; sys.exit('opentelemetry' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_ids_are_derived_and_never_those_of_another_run_or_installation() -> None:
    one = TraceIds(installation="x", run_id=1)
    assert one.trace == TraceIds(installation="x", run_id=1).trace
    others = [TraceIds(installation="x", run_id=2), TraceIds(installation="y", run_id=1)]
    assert len({one.trace, *(each.trace for each in others)}) == 3
    assert one.span("attempt", 0, -1, 1) != one.span("attempt", 0, -1, 2)
    assert 0 < one.trace < 2**128 and 0 < one.span("run") < 2**64
