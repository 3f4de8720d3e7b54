"""Log lines: what stands on each, what people see of it, and that writing one never fails or holds up a service."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from evertick.observability import metrics
from evertick.observability.logging import configure, render_line


@pytest.fixture(autouse=True)
def unconfigured() -> Iterator[None]:
    yield
    structlog.reset_defaults()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def dropped() -> float:
    return metrics.REGISTRY.get_sample_value("evertick_log_lines_dropped_total") or 0.0


def test_every_line_carries_its_service_and_its_process_whoever_writes_it() -> None:
    stream = io.StringIO()
    log = configure(service="runner", owner="host-1", as_json=True, stream=stream)
    log.bind(runner="gpu-1", session="abc").info("task_finished", run=12, task="etl.load", epoch=3)
    structlog.get_logger("evertick.postgres").warning("postgres_died", exit_code=1)
    first, second = lines(stream)
    assert (
        first.items()
        >= {
            "service": "runner",
            "owner": "host-1",
            "runner": "gpu-1",
            "session": "abc",
            "level": "info",
            "event": "task_finished",
            "run": 12,
            "task": "etl.load",
            "epoch": 3,
        }.items()
    )
    assert first["timestamp"].endswith("Z")
    assert (second["service"], second["owner"], second["level"]) == ("runner", "host-1", "warning")


def test_what_a_caller_says_itself_goes_before_what_stands_on_every_line() -> None:
    stream = io.StringIO()
    configure(service="evertick", owner="host-1", as_json=True, stream=stream).info("service_ready", service="postgres")
    assert lines(stream)[0]["service"] == "postgres"


def test_an_error_is_its_type_and_message() -> None:
    stream = io.StringIO()
    configure(service="runner", as_json=True, stream=stream).error("loop_failed", error=ZeroDivisionError("by zero"))
    assert lines(stream)[0]["error"] == "ZeroDivisionError: by zero"


def test_people_see_the_end_of_what_a_cluster_says() -> None:
    said = f"Forbidden: {'x' * 200} cannot get pods"
    assert "cannot get pods" in render_line({"event": "executor_unavailable", "error": said}, is_colored=False)
    assert "cannot get pods" not in render_line({"event": "task_finished", "task": said}, is_colored=False)
    assert len(render_line({"event": "e", "error": "x" * 9000}, is_colored=False)) < 600


def test_people_see_what_repeats_once() -> None:
    event = {"service": "runner", "owner": "h-1", "runner": "gpu-1", "session": "abc", "level": "info", "timestamp": ""}
    assert "gpu-1" in render_line({**event, "event": "runner_started"}, is_colored=False)
    finished = render_line({**event, "event": "task_finished", "run": 12}, is_colored=False)
    assert finished.split() == ["runner", "task_finished", "run=12"]
    # For anybody else a session is news.
    assert "session=abc" in render_line({**event, "service": "scheduler", "event": "runner_lost"}, is_colored=False)


def test_a_full_disk_drops_lines_and_counts_them() -> None:
    before = dropped()
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        log = configure(service="scheduler", as_json=True, stream=full)
        log.info("schedules_fired")
        log.info("schedules_fired")
        assert dropped() == before + 2
        # What the stream still holds goes nowhere else when it is closed.
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())


def test_a_closed_stream_drops_lines() -> None:
    before = dropped()
    stream = io.StringIO()
    log = configure(service="scheduler", as_json=True, stream=stream)
    stream.close()
    log.info("schedules_fired")
    assert dropped() == before + 1


def test_an_unread_pipe_blocks_no_process_and_its_lines_stay_whole() -> None:
    reading, writing = os.pipe()
    before = dropped()
    with os.fdopen(writing, "w", encoding="utf-8") as stream, os.fdopen(reading, "rb") as reader:
        log = configure(service="runner", as_json=True, stream=stream)
        for number in range(3000):
            log.info("task_finished", number=number, text="x" * 100)
        lost = dropped() - before
        assert lost > 0
        os.set_blocking(reading, False)
        kept = read_all(reader)
        # Somebody reads again: the line that was cut is finished first.
        log.info("task_finished", number=3000)
        kept += read_all(reader)
    numbers = [json.loads(line)["number"] for line in kept.splitlines()]
    assert len(numbers) == 3001 - lost
    assert numbers[-1] == 3000 and numbers == sorted(numbers)


def read_all(reader: Any) -> bytes:
    found = b""
    while part := reader.read(65536):
        found += part
    return found


def test_the_services_do_not_load_what_only_tables_need() -> None:
    """rich takes 40 ms and 3 MB, and structlog would load it for nothing."""
    preload = "from evertick.cli.commands.services import preload; preload('runner')"
    code = f"import sys; {preload}; sys.exit('rich.console' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
