"""What task bodies did, written by themselves: one line when a body begins and when it ends, in a file on tmpfs.

This file is copied beside the DAG files, so it imports nothing of the tests and, while a body runs, asks nothing of the
system but the context that every task has. A line is one write to a file opened for appending: bodies may be killed at any
instant, and the lines of others stay whole.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from evertick import TaskContext, current_context

FILE_VARIABLE = "CHAOS_EFFECTS"
SERVICE_VARIABLE = "CHAOS_SERVICE"


class Effect(NamedTuple):
    """One line. `what` is begin, end, fail (the body raised), or a word of the body's own."""

    run_id: int
    task: str
    map_index: int
    epoch: int
    attempt: int
    pid: int
    at_ns: int
    what: str
    fire_at: datetime | None
    dag: str
    schedule: str
    service: str


@contextmanager
def noted() -> Iterator[TaskContext]:
    """Around a body: its begin, and its end or failure. A killed body leaves its begin alone."""
    note("begin")
    try:
        yield current_context()
    except BaseException:
        note("fail")
        raise
    note("end")


def note(what: str) -> None:
    """Write one line about the task that is running here."""
    context = current_context()
    fields = (
        context.run_id,
        context.task,
        context.map_index,
        context.epoch,
        context.attempt,
        os.getpid(),
        time.clock_gettime_ns(time.CLOCK_BOOTTIME),
        what,
        context.fire_at.isoformat(),
        context.dag,
        context.params.get("schedule", ""),
        os.environ.get(SERVICE_VARIABLE, ""),
    )
    file = os.open(os.environ[FILE_VARIABLE], os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        os.write(file, ",".join(map(str, fields)).encode() + b"\n")
    finally:
        os.close(file)


def put_beside(folder: Path) -> None:
    """Copy what bodies need next to the DAG files, where it is packed with them."""
    for name in ("effects.py", "sink.py"):
        shutil.copy(Path(__file__).with_name(name), folder / name)


def read(path: Path) -> list[Effect]:
    """Every whole line, in the order of the clock. A torn last line is its writer's death, and no evidence."""
    if not path.exists():
        return []
    text = path.read_bytes()
    instants: dict[str, datetime] = {}
    found = [_effect(line, instants) for line in text[: text.rfind(b"\n") + 1].decode().splitlines()]
    return sorted(found, key=lambda effect: effect.at_ns)


def _effect(line: str, instants: dict[str, datetime]) -> Effect:
    run_id, task, map_index, epoch, attempt, pid, at_ns, what, fire_at, dag, schedule, service = line.split(",")
    if fire_at and fire_at not in instants:
        instants[fire_at] = datetime.fromisoformat(fire_at)
    return Effect(
        run_id=int(run_id),
        task=task,
        map_index=int(map_index),
        epoch=int(epoch),
        attempt=int(attempt),
        pid=int(pid),
        at_ns=int(at_ns),
        what=what,
        fire_at=instants[fire_at] if fire_at else None,
        dag=dag,
        schedule=schedule,
        service=service,
    )
