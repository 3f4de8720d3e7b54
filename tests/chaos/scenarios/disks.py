"""N19 and N20: the disk of the logs, or of the database's own log, is full."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from tests.chaos.cluster import Shape
from tests.chaos.machine import lacks_mounts, lacks_own_mounts, private_mount
from tests.chaos.members import Member
from tests.chaos.nemesis import Nemesis
from tests.chaos.record import Fault
from tests.chaos.scenario import Scenario
from tests.chaos.scenarios.runners import effects_of
from tests.chaos.stage import Stage
from tests.waiting import elapse

BLOCK = bytes(65536)
SMALL = "runner-small"


def fill(folder: Path) -> Path:
    """Write until nothing fits any more; returns the file that takes the room."""
    ballast = folder / "ballast"
    file = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        for block in (BLOCK, BLOCK[:512]):
            try:
                while True:
                    os.write(file, block)
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
    finally:
        os.close(file)
    return ballast


def seen_by(pid: int, folder: Path) -> Path:
    """A folder as that process sees it, with its private mounts."""
    return Path(f"/proc/{pid}/root{folder}")


async def full_spool(nemesis: Nemesis, runner: Member, seconds: float) -> float | None:
    """The runner's log folder is full for a while."""
    if runner.pid is None or not nemesis.is_free(runner.name):
        return None
    async with nemesis.only(runner.name):
        async with nemesis.fault(Fault.DISK_FULL, runner.name, part="logs", seconds=seconds) as struck:
            ballast = fill(seen_by(runner.pid, nemesis.cluster.folder / runner.name / "spool"))
            try:
                await elapse(seconds)
            finally:
                ballast.unlink(missing_ok=True)
        return await nemesis.recovery(struck, nemesis.works_again())


async def add_small_runner(stage: Stage) -> None:
    """A runner whose log folder is a disk of one megabyte."""
    spool = stage.cluster.folder / SMALL / "spool"
    await stage.cluster.add("runner", SMALL, wrapper=private_mount(spool, "1m"))


async def full_log_folder(stage: Stage) -> None:
    """N19: tasks still end, their logs say that something is missing, and nobody crashes."""
    runner = stage.cluster.members[SMALL]
    await stage.cluster.members["runner-1"].stop()
    await stage.begin_load(seconds=stage.scaled(40, 10), quick=3)
    lives = len(runner.lives)
    await full_spool(stage.nemesis, runner, stage.scaled(10, 3))
    flood = await stage.trigger("flood", "flood")
    await stage.runs_over([flood], within_seconds=40)
    await full_spool(stage.nemesis, runner, stage.scaled(10, 2))
    stage.expect(len(runner.lives) == lives, "the runner did not survive a full log folder")
    state = await stage.cluster.watch.value("select state::text from run_status where run_id = %s", flood)
    stage.expect(state == "success", f"the task whose log did not fit ended as {state}")
    log = await stage.cluster.watch.must("select content from log_chunk where run_id = %s order by seq", flood)
    text = "".join(content for (content,) in log)
    marks = [line for line in text.splitlines() if "dropped" in line or "truncated" in line or "lost" in line]
    stage.note(f"{len(text)} characters of log, marks: {marks[:3]}")
    stage.expect(marks, "a log that did not fit does not say so")
    stage.expect(effects_of(stage, "end"), "nothing ended")


async def full_wal(stage: Stage) -> None:
    """N20: nothing acknowledged is lost, nobody is given up, and all goes on by itself when there is room again."""
    server = stage.cluster.server
    await stage.begin_load(seconds=stage.scaled(60, 14), quick=5, per_second=5)
    await elapse(1)
    seconds = stage.scaled(30, 5)
    async with stage.nemesis.fault(Fault.DISK_FULL, "postgres", part="wal", disturbs=("planning", "running")) as struck:
        ballast = fill(stage.cluster.folder / "wal")
        # Until a segment is full the server goes on; this makes it full.
        filler = "create table filler as select repeat(md5(x::text), 60) from generate_series(1, 30000) x"
        await stage.cluster.watch.rows(filler)
        await elapse(seconds)
        ballast.unlink(missing_ok=True)
        if server.pid is None:
            stage.note("the server gave up for lack of room, and was started again as an init system would")
            await server.start()
    await stage.nemesis.recovery(struck, stage.nemesis.works_again())
    reaped = await stage.cluster.watch.value("select count(*) from runner where ended_at is not null")
    stage.expect(reaped == 0, f"{reaped} runners were given up because the database had no room")


SCENARIOS = (
    Scenario(
        name="N19",
        title="the folder of the logs is full",
        play=full_log_folder,
        prepare=add_small_runner,
        shape=lambda is_full: Shape(schedulers=1, runners=1),
        required=("J8",),
        needs=lacks_mounts,
    ),
    Scenario(
        name="N20",
        title="the disk of the database's write-ahead log is full",
        play=full_wal,
        shape=lambda is_full: Shape(wal_disk="96m", server={"min_wal_size": "32MB", "max_wal_size": "64MB"}),
        required=("J10",),
        needs=lacks_own_mounts,
    ),
)
