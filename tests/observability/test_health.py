"""What a service says about itself: the truth about its loops and its database, with since when and why."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psycopg
import pytest

from evertick.config import Settings
from evertick.domain.errors import PostgresUnavailable
from evertick.observability import metrics
from evertick.observability.health import LoopHealth, ServiceHealth, ServicePhase, all_loops, track
from evertick.observability.health_endpoint import DEFAULT_PORTS, HealthEndpoint, get, living_notes
from evertick.runtime.loop import keep_trying, run_loop
from tests.system.hosting import Said
from tests.waiting import eventually

AWAY = PostgresUnavailable("Cannot connect to PostgreSQL at db:5432: connection refused")


class Loops:
    """Loops that a test drives by hand."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def add(self, name: str, **options: Any) -> LoopHealth:
        return self._stack.enter_context(track(LoopHealth(name, **options)))

    def well(self, name: str, **options: Any) -> LoopHealth:
        pulse = self.add(name, **options)
        pulse.begin()
        pulse.succeed(1.0)
        return pulse


@pytest.fixture
def loops() -> Iterator[Loops]:
    with ExitStack() as stack:
        yield Loops(stack)


def running(service: str) -> ServiceHealth:
    health = ServiceHealth(service, owner="host-1")
    health.phase = ServicePhase.RUNNING
    return health


def reasons(health: ServiceHealth) -> list[str]:
    return [each.reason for each in health.complaints()]


def test_a_service_whose_loops_tick_is_healthy(loops: Loops) -> None:
    loops.well("scheduler")
    loops.well("watch")
    document = running("scheduler").document()
    assert reasons(running("scheduler")) == []
    assert (document["status"], document["service"], document["owner"]) == ("healthy", "scheduler", "host-1")
    assert document["scheduler"]["status"] == document["metadatabase"]["status"] == "healthy"
    assert document["scheduler"]["latest_heartbeat"].endswith("Z")
    assert document["metadatabase"]["latest_contact"].endswith("Z")
    assert document["loops"].keys() == {"scheduler", "watch"}
    json.dumps(document)


def test_it_is_starting_until_its_own_loop_has_ticked_and_stopping_at_the_end(loops: Loops) -> None:
    health = running("runner")
    assert reasons(health) == ["starting"]
    assert health.document()["metadatabase"] == {
        "status": "unhealthy",
        "latest_contact": None,
        "reason": "no contact yet",
    }
    loops.well("heartbeat")
    assert reasons(health) == ["starting"]
    loops.add("runner").begin()
    assert reasons(health) == ["starting"]
    loops.well("runner")
    assert reasons(health) == []
    health.phase = ServicePhase.STOPPING
    assert reasons(health) == ["stopping"]


@pytest.mark.requirement("B9")
@pytest.mark.parametrize(
    "error", [AWAY, psycopg.OperationalError("the connection is lost\nDETAIL: a row"), TimeoutError()]
)
def test_a_database_that_is_away_is_told_with_since_when_and_why(loops: Loops, error: Exception) -> None:
    health = running("scheduler")
    pulse = loops.well("scheduler")
    pulse.fail(error, is_unreachable=True, delay=0.1)
    first = health.document()["metadatabase"]
    pulse.fail(error, is_unreachable=True, delay=0.1)
    document = health.document()
    assert document["status"] == document["scheduler"]["status"] == "unhealthy"
    assert document["metadatabase"] == first
    assert first["status"] == "unhealthy" and first["since"].endswith("Z")
    assert first["latest_contact"] is not None
    # One line: what stands below it may quote a row.
    assert first["reason"] == (str(error).splitlines() or ["TimeoutError"])[0]
    assert reasons(health) == [f"database unreachable: {first['reason']}"]
    assert document["loops"]["scheduler"]["failures"] == 2
    pulse.succeed(1.0)
    assert reasons(health) == []
    assert health.document()["metadatabase"]["status"] == "healthy"


def test_a_bug_in_a_loop_is_no_fault_of_the_database(loops: Loops) -> None:
    health = running("scheduler")
    loops.well("scheduler").fail(ZeroDivisionError("by zero"), is_unreachable=False, delay=0.1)
    assert reasons(health) == ["loop scheduler is failing: by zero"]
    assert health.document()["metadatabase"]["status"] == "healthy"


def test_in_an_outage_all_loops_say_the_same_and_it_is_told_once(loops: Loops) -> None:
    health = running("runner")
    for name in ("runner", "heartbeat"):
        loops.well(name).fail(AWAY, is_unreachable=True, delay=0.1)
    assert reasons(health) == [f"database unreachable: {AWAY}"]


@pytest.mark.parametrize("is_ticking", [True, False])
def test_a_loop_that_does_not_tick_any_more_is_seen(loops: Loops, is_ticking: bool) -> None:
    """In a tick that never ends, or blocked so that the next one never begins."""
    health = running("scheduler")
    pulse = loops.well("scheduler", longest_tick_seconds=-1.0)
    if is_ticking:
        pulse.begin()
    else:
        pulse.succeed(0.0)
        pulse._quiet_until -= 60
    (said,) = reasons(health)
    assert said.startswith("loop scheduler has not ticked for ")
    assert health.document()["loops"]["scheduler"]["status"] == "stalled"
    # A tick that hangs may well hang in the database; a loop that is blocked says nothing about it.
    assert health.document()["metadatabase"]["status"] == ("unhealthy" if is_ticking else "healthy")
    pulse.succeed(1.0)
    assert reasons(health) == []


def test_a_loop_that_is_not_essential_is_shown_and_has_no_say(loops: Loops) -> None:
    health = running("runner")
    loops.well("runner")
    loops.well("heartbeat")
    loops.well("logs", is_essential=False).fail(OSError("disk full"), is_unreachable=False, delay=0.1)
    assert reasons(health) == []
    document = health.document()
    assert document["status"] == "healthy"
    assert document["loops"]["logs"]["reason"] == "disk full"


def test_the_watch_over_the_database_has_a_say_although_no_work_is_in_it(loops: Loops) -> None:
    """A runner whose slots are all taken asks nothing between two heartbeats."""
    health = running("runner")
    loops.well("runner")
    loops.well("heartbeat")
    loops.well("watch", is_essential=False).fail(AWAY, is_unreachable=True, delay=0.1)
    assert reasons(health) == [f"database unreachable: {AWAY}"]


def test_what_keeps_a_loop_from_its_work_is_told(loops: Loops) -> None:
    loops.well("publisher").blocked = "dags is not a folder"
    assert reasons(running("publisher")) == ["dags is not a folder"]


def test_a_scheduler_tells_its_role_and_a_runner_its_slots(loops: Loops) -> None:
    before = metrics.LEADER.collect()[0].samples[0].value
    try:
        for value, role in ((1, "leader"), (0, "standby")):
            metrics.LEADER.set(value)
            assert running("scheduler").document()["scheduler"]["role"] == role
    finally:
        metrics.LEADER.set(before)
    assert {"running", "slots"} <= running("runner").document()["runner"].keys()


async def test_the_loops_write_it_down_and_leave_no_trace() -> None:
    said, stop, ticked = Said(), asyncio.Event(), asyncio.Event()
    script: list[Exception | None] = [None, AWAY, ValueError("a bug"), None]

    async def tick() -> float:
        step = script.pop(0) if script else None
        ticked.set()
        if step is not None:
            raise step
        return 0.0 if script else 60.0

    wake = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(run_loop(tick, wake=wake, stop=stop, name="written", log=said.log))
        await eventually(lambda: not script)
        await eventually(lambda: [each.failures for each in all_loops() if each.name == "written"] == [0])
        stop.set()
        wake.set()
    assert [each for each in all_loops() if each.name == "written"] == []
    value = metrics.REGISTRY.get_sample_value
    assert value("evertick_job_failures_total", {"job": "written"}) == 2
    assert value("evertick_tick_duration_seconds_count", {"service": "written"}) == 4


async def test_what_a_service_waits_for_at_its_start_is_told() -> None:
    health, stop, said = running("runner"), asyncio.Event(), Said()

    async def register() -> None:
        raise AWAY

    async with asyncio.TaskGroup() as group:
        waiting = group.create_task(keep_trying(register, stop=stop, name="register", log=said.log))
        await eventually(lambda: reasons(health) == [f"database unreachable: {AWAY}"])
        waiting.cancel()


async def ask(url: str | None, path: str) -> tuple[int, Any]:
    assert url is not None
    got = await get(f"{url}{path}", seconds=10)
    return got.status, got.document() if got.body.startswith(b"{") else got.body.decode()


async def test_a_loop_that_is_blocked_shows_as_not_ready_while_the_port_answers(tmp_path: Path) -> None:
    """The service's own loop hangs in a call that never returns; the port is on a thread of its own."""
    health, said = running("scheduler"), Said()
    port = HealthEndpoint("scheduler", health.routes(), settings=Settings(home=tmp_path, health_port=0), log=said.log)
    port.start()
    hangs, go_on = threading.Event(), threading.Event()

    async def serve() -> None:
        stop = asyncio.Event()

        async def tick() -> float:
            if hangs.is_set():
                go_on.wait(timeout=60)
                stop.set()
            return 0.01

        pulse = LoopHealth("scheduler", longest_tick_seconds=0.05)
        await run_loop(tick, wake=asyncio.Event(), stop=stop, name="scheduler", log=said.log, pulse=pulse)

    service = asyncio.create_task(asyncio.to_thread(asyncio.run, serve()))
    try:

        async def is_ready() -> bool:
            return (await ask(port.url, "/readyz"))[0] == 200

        await eventually(is_ready)
        hangs.set()

        async def is_seen() -> Any:
            status, document = await ask(port.url, "/readyz")
            return status == 503 and document

        assert "loop scheduler has not ticked for" in (await eventually(is_seen))["reasons"][0]
        assert await ask(port.url, "/healthz") == (200, "alive\n")
        status, document = await ask(port.url, "/monitor/health")
        # The page itself is there: what it says is for people and for programs that read it.
        assert (status, document["status"]) == (200, "unhealthy")
    finally:
        go_on.set()
        await service
        port.stop()


async def test_metrics_are_prometheus_text_with_our_names_and_those_of_every_process(tmp_path: Path) -> None:
    metrics.FIRES.inc(0)
    port = HealthEndpoint(
        "runner", ServiceHealth("runner", owner="h").routes(), settings=quiet(tmp_path), log=Said().log
    )
    port.start()
    status, text = await ask(port.url, "/metrics")
    port.stop()
    assert status == 200
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert f'evertick_build_info{{version="{version("evertick")}"}} 1.0' in text
    assert "evertick_fires_total" in names and "process_resident_memory_bytes" in names
    assert [name for name in names if not name.startswith(("evertick_", "process_")) or name.endswith("_created")] == []


def quiet(home: Path, **changes: Any) -> Settings:
    return Settings(home=home, **{"health_port": 0, **changes})


async def test_a_port_can_be_switched_off(tmp_path: Path) -> None:
    port = HealthEndpoint("runner", {}, settings=quiet(tmp_path, health=False), log=Said().log)
    port.start()
    port.leave_note()
    assert port.url is None
    assert living_notes(tmp_path) == []
    port.stop()


async def test_each_service_has_a_port_of_its_own_and_yields_where_it_is_taken(tmp_path: Path) -> None:
    assert len(set(DEFAULT_PORTS.values())) == len(DEFAULT_PORTS) == 5
    first, second = (
        HealthEndpoint("runner", {}, settings=Settings(home=tmp_path, health_port=None), log=said.log)
        for said in (Said(), Said())
    )
    first.start()
    second.start()
    assert first.url and second.url and first.url != second.url
    first.stop()
    second.stop()


async def test_a_note_says_where_a_living_process_answers_and_that_of_a_dead_one_goes(tmp_path: Path) -> None:
    port = HealthEndpoint("runner", {}, settings=quiet(tmp_path), log=Said().log)
    port.start()
    port.leave_note()
    (note,) = living_notes(tmp_path)
    assert (note.service, note.url) == ("runner", port.url)
    path = next((tmp_path / "health").glob("*.json"))
    text = json.loads(path.read_text())
    dead, elsewhere, torn = (path.with_name(f"{name}.json") for name in ("dead", "elsewhere", "torn"))
    dead.write_text(json.dumps({**text, "pid_started": 1.0}))
    elsewhere.write_text(json.dumps({**text, "machine": "another", "pid_started": 1.0}))
    torn.write_text("{")
    assert living_notes(tmp_path) == [note]
    # Whoever shares the home from another machine knows better what lives there.
    assert {each.name for each in (tmp_path / "health").glob("*.json")} == {path.name, elsewhere.name}
    dead.write_text(json.dumps({**text, "pid_started": 1.0}))
    port.leave_note()
    assert not dead.exists(), "a service that starts removes it"
    port.stop()
    assert living_notes(tmp_path) == []


async def test_a_home_that_a_note_makes_is_its_owners_alone(tmp_path: Path) -> None:
    port = HealthEndpoint("scheduler", {}, settings=quiet(tmp_path / "new" / "home"), log=Said().log)
    port.start()
    port.leave_note()
    assert len(living_notes(tmp_path / "new" / "home")) == 1
    assert (tmp_path / "new" / "home").stat().st_mode & 0o777 == 0o700
    port.stop()


async def test_a_home_that_cannot_be_written_costs_the_note_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    port = HealthEndpoint("runner", {}, settings=quiet(tmp_path / "file"), log=Said().log)
    port.start()
    port.leave_note()
    assert port.url is not None
    port.stop()


def test_a_service_that_queries_only_on_request_is_healthy_without_contact(loops: Loops) -> None:
    loops.well("api")
    assert running("api").document()["status"] == "healthy"
