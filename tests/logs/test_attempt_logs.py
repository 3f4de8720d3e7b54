"""What attempts print and log: captured line by line, seen while they run, and never lost."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evertick.domain.attempt import Isolation, OutcomeKind, TaskKey
from evertick.executors.local.child_process import ExecutorLimits
from evertick.logs.shipper import orphaned_logs
from evertick.logs.spool import LogCap
from tests.executors.local.executor_rig import DEADLINE_SECONDS, dag_of, is_alive, log_text, rig
from tests.waiting import eventually

TALKING = dag_of(
    "def talks():\n    import logging\n    print('to stdout', end='')\n    print(' in parts')\n"
    "    print('to stderr', file=sys.stderr)\n    current_context().logger.warning('from the %s', 'context')\n"
    "    logging.getLogger('lib.part').error('from a library')\n    logging.getLogger('lib').debug('hidden')\n"
    "    os.write(1, b'from C\\n')\n    subprocess.run('echo from a subprocess', shell=True)\n"
    "    sys.stdout.buffer.write(b'bytes \\xff\\x00\\n')\n    print('NUL \\0 and lone \\udc80 and \\x1e')\n"
    "    print('two\\nlines')\n    print('unfinished', end='')"
)
TALK = [
    "OUT to stdout in parts",
    "ERR to stderr",
    "WARNING from the context",
    "ERROR lib.part: from a library",
    "RAW from C",
    "RAW from a subprocess",
    "RAW bytes ��",
    "OUT NUL � and lone � and �",
    "OUT two",
    "OUT lines",
    "OUT unfinished",
]


@pytest.mark.parametrize("isolation", Isolation)
async def test_print_logging_and_raw_output_become_lines_in_their_order(tmp_path: Path, isolation: Isolation) -> None:
    async with rig(tmp_path, TALKING) as it:
        for _ in range(2):
            outcome = await it.run("talks", isolation=isolation)
            assert outcome.kind is OutcomeKind.SUCCESS
            assert log_text(outcome) == TALK
            times = [int(line.split()[0]) for line in outcome.log.decode().splitlines()]
            assert all(len(str(time)) == 16 for time in times)


async def test_a_users_own_logging_setup_keeps_its_format_and_gains_levels(tmp_path: Path) -> None:
    setup = "import logging\nlogging.basicConfig(level=logging.DEBUG, format='<%(message)s>')\n"
    source = setup + dag_of("def talks():\n    logging.getLogger('x').debug('fine detail')")
    async with rig(tmp_path, source) as it:
        assert log_text(await it.run("talks")) == ["DEBUG x: <fine detail>"]


async def test_lines_are_seen_while_the_attempt_runs(tmp_path: Path) -> None:
    source = dag_of("def waits():\n    print('I am here')\n    while True: signal.pause()")
    async with rig(tmp_path, source) as it:
        order = it.order("waits")
        it.start(order)
        assert "OUT I am here" in await it.chunk_with(order, "here")
        it.executor.kill(order.key, 1, "enough")
        assert (await it.outcome(order)).log == b""


async def test_what_was_shipped_while_running_does_not_ride_in_the_outcome_again(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    source = dag_of("def talks():\n    print('early')\n    open(GATE).read()\n    print('late')")
    async with rig(tmp_path, f"GATE = {str(tmp_path / 'gate')!r}\n{source}") as it:
        order = it.order("talks")
        it.start(order)
        await it.chunk_with(order, "early")
        os.close(await asyncio.to_thread(os.open, tmp_path / "gate", os.O_WRONLY))
        outcome = await it.outcome(order)
        assert log_text(outcome) == ["OUT late"]
        (chunk,) = it.chunks
        assert (chunk.offset, chunk.end) == (0, outcome.log_offset)
        assert outcome.log_end > outcome.log_offset


async def test_a_long_log_is_shipped_in_chunks_that_follow_each_other(tmp_path: Path) -> None:
    source = dag_of("def talks():\n    for n in range(20_000): print('line', n)")
    async with rig(tmp_path, source) as it:
        order = it.order("talks")
        it.start(order)
        outcome = await it.outcome(order)
        await it.chunk_with(order, "line 19999\n")
        assert outcome.log == b""
        content = b"".join(chunk.content for chunk in it.chunks).decode().splitlines()
        assert [line.split(" OUT ")[1] for line in content] == [f"line {n}" for n in range(20_000)]
        assert [chunk.offset for chunk in it.chunks[1:]] == [chunk.end for chunk in it.chunks[:-1]]
        assert max(len(chunk.content) for chunk in it.chunks) <= 64 * 1024
        it.executor.poll_logs()
        await eventually(lambda: not it.executor._shipping._unstored)


async def test_the_middle_of_a_flood_is_dropped_with_a_mark_and_the_disk_stays_small(tmp_path: Path) -> None:
    flood = (
        "def floods():\n    block = b'x' * 99 + b'\\n'\n    for _ in range(300): os.write(1, block * 10_000)\n"
        "    print('the end', len(os.listdir('/')) > 0)"
    )
    cap = LogCap(head_bytes=1_000_000, tail_bytes=500_000)
    async with rig(tmp_path, dag_of(flood), limits=ExecutorLimits(log_cap=cap)) as it:
        order = it.order("floods")
        it.start(order)
        assert (await it.outcome(order)).kind is OutcomeKind.SUCCESS
        text = await it.chunk_with(order, "OUT the end True")
        assert text.count("bytes dropped (log cap) …") == 1
        head, tail = text.split("bytes dropped (log cap) …")
        assert head.count(" RAW ") > 9_000 and 3_000 < tail.count(" RAW ") < 5_100


async def test_a_full_spool_costs_the_log_but_not_the_task(tmp_path: Path) -> None:
    source = dag_of("def talks():\n    print('x')\n    return 1")
    async with rig(tmp_path, source, limits=ExecutorLimits(min_idle=1)) as it:
        await it.run("talks")
        (folder,) = it.spool_dir.iterdir()
        moved = folder.rename(it.spool_dir / "moved")
        outcomes = [await it.run("talks") for _ in range(4)]
        assert {outcome.kind for outcome in outcomes} == {OutcomeKind.SUCCESS}
        assert log_text(outcomes[-1]) == ["MARK … the log could not be kept (spool disk full or unwritable) …"]
        moved.rename(folder)


@contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this machine does not let tests mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


@pytest.mark.requirement("N19")
@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small file system needs root")
async def test_a_disk_that_fills_up_while_a_task_logs_marks_the_log(tmp_path: Path) -> None:
    with mounted(tmp_path / "spool", size="600k"):
        source = dag_of("def talks():\n    for n in range(25_000): print('line', n)\n    return n")
        async with rig(tmp_path, source, limits=ExecutorLimits(inline_log_bytes=4_000_000)) as it:
            outcome = await it.run("talks")
            assert outcome.kind is OutcomeKind.SUCCESS
            assert "bytes dropped (spool disk full) …" in outcome.log.decode().splitlines()[-1]
            assert (await it.run("talks")).kind is OutcomeKind.SUCCESS


DRIVER = """
import asyncio, json, sys
from pathlib import Path
from evertick.domain.attempt import AttemptOrder, Isolation, TaskKey
from evertick.executors.local.executor import LocalExecutor
from evertick.executors.local.fork_server_client import BundlePlace

async def main(folder, spool):
    async def resolve(bundle, file): return BundlePlace(Path(folder), False)
    async with LocalExecutor(slots=4, spool_dir=Path(spool), session=11, resolve_bundle=resolve,
                             put=lambda outcomes: None) as executor:
        executor.start_many([
            AttemptOrder(key=TaskKey(n, 0, -1), epoch=3, session=11, attempt=1, dag="d", task=task, version_id=1,
                         bundle="b", file="d.py", fire_at="2030-01-02T06:00:00+00:00", params_json="{}", inputs_json="{}",
                         timeout_seconds=None, isolation=isolation)
            for n, (task, isolation) in enumerate([("family", Isolation.PROCESS), ("family", Isolation.WARM),
                                                   ("linger", Isolation.WARM)])])
        await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""

LINGERING = dag_of(
    "def family():\n    kids = [subprocess.Popen(['sleep', '1000'], start_new_session=new) for new in (0, 1)]\n"
    "    if os.fork() == 0:\n        os.setsid()\n        print('kid', os.getpid())\n        while True: signal.pause()\n"
    "    print('kids', os.getpid(), *(kid.pid for kid in kids))\n    while True: signal.pause()",
    "async def linger():\n    import asyncio\n    print('kids', os.getpid())\n    await asyncio.Event().wait()",
)


@pytest.mark.requirement("F8")
@pytest.mark.parametrize("killed", ["runner", "keeper", "warm parent"])
async def test_nothing_survives_a_killed_runner_but_its_logs(tmp_path: Path, killed: str) -> None:
    """The runner's death takes all; so does its warm parent's or keeper's, whose attempts it then reports."""
    spool = tmp_path / "spool"
    driver = drive(tmp_path / "dags", spool)
    try:
        pids = await eventually(lambda: pids_in(spool), within_seconds=DEADLINE_SECONDS)
        keeper = parent_of(parent_of(pids[0]))
        victim = {"runner": driver.pid, "keeper": keeper, "warm parent": parent_of(pids[0])}[killed]
        os.kill(victim, signal.SIGKILL)
        await eventually(lambda: not any(is_alive(pid) for pid in pids))
        await eventually(lambda: not is_alive(keeper))
    finally:
        driver.kill()
        driver.communicate()
    found = {leftover.key: leftover for leftover in orphaned_logs(spool, live_sessions=set())}
    assert set(found) == {TaskKey(0, 0, -1), TaskKey(1, 0, -1), TaskKey(2, 0, -1)} or killed != "runner"
    for leftover in found.values():
        assert (leftover.epoch, leftover.session) == (3, 11)
        assert b" OUT kids " in b"".join(chunk.content for chunk in leftover.chunks())


def drive(folder: Path, spool: Path) -> subprocess.Popen[bytes]:
    folder.mkdir()
    (folder / "d.py").write_text(LINGERING)
    return subprocess.Popen([sys.executable, "-c", DRIVER, folder, spool], stderr=subprocess.PIPE)


def pids_in(spool: Path) -> list[int]:
    """Every process that the three attempts told of, once all have; the attempts' own first."""
    lines = [line for path in spool.rglob("*.log") for line in path.read_text().splitlines() if " OUT kid" in line]
    told = sorted((line.partition(" OUT ")[2].split() for line in lines), reverse=True)
    pids = [int(pid) for words in told for pid in words[1:]]
    return pids if len(pids) == 9 else []


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[1])


async def test_a_json_line_in_the_log_stays_as_it_is(tmp_path: Path) -> None:
    line = json.dumps({"level": "info", "text": "ünï"})
    async with rig(tmp_path, dag_of(f"def talks():\n    print({line!r})")) as it:
        assert log_text(await it.run("talks")) == [f"OUT {line}"]
