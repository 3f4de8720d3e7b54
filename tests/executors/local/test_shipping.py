"""How a log is cut into what rides with the outcome and what follows it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from evertick.domain.attempt import AttemptOrder, TaskKey
from evertick.executors.local.attempt_logs import AttemptLogs
from evertick.executors.local.child_process import Attempt, ExecutorLimits
from evertick.logs import format
from evertick.logs.spool import AttemptLog, LogChunk, SpoolFolder
from tests.executors.local.executor_rig import Rig

LIMITS = ExecutorLimits(inline_log_bytes=1000)


def attempt_with(folder: SpoolFolder, order: AttemptOrder, count: int) -> Attempt:
    path = folder.path / "p-1"
    content = b"".join(format.framed(1, "OUT", f"line {n}") for n in range(count))
    path.write_bytes(content)
    made = Attempt(order, 0.0)
    made.spool = folder.file(str(path), os.open(path, os.O_RDWR), is_finished=True)
    made.spool.acquire()
    made.log = AttemptLog(made.spool.fd, 0, LIMITS.log_cap)
    return made


@pytest.mark.parametrize("count", [3, 5000])
def test_no_two_parts_of_a_log_begin_at_the_same_byte_and_trouble_is_told_last(tmp_path: Path, count: int) -> None:
    """The database keeps one chunk for each first byte: of two the later one, which is lines of the log, would be lost."""
    folder, order = SpoolFolder(tmp_path), Rig(tmp_path, tmp_path).order("talks")
    shipping, attempt = AttemptLogs(folder, LIMITS), attempt_with(folder, order, count)
    last = shipping.ended(attempt, None, "the disk was full for a while")
    parts = [LogChunk(key=order.key, epoch=1, offset=last.offset, end=last.end, content=last.content)]
    while chunks := shipping.poll([], 0.0):
        parts += chunks
    kept = [part for part in parts if part.content]
    assert len({part.offset for part in kept}) == len(kept)
    text = b"".join(part.content for part in sorted(kept, key=lambda part: part.offset)).decode().splitlines()
    assert [line.split(" OUT ")[1] for line in text[:-1]] == [f"line {n}" for n in range(count)]
    assert "the disk was full for a while" in text[-1]
    shipping.settle([(TaskKey(*order.key), 1)])
    assert not shipping._unstored
