"""Single-use processes: nothing passes from one attempt to the next, and slots are never exceeded."""

from __future__ import annotations

import asyncio
import json
import os
import select
from pathlib import Path

import pytest

from evertick.domain.attempt import Isolation, OutcomeKind
from evertick.domain.errors import Conflict
from evertick.executors.local.child_process import ExecutorLimits
from evertick.processes.system import children_of
from tests.executors.local.executor_rig import Rig, dag_of, dead, is_alive, rig, text_of
from tests.waiting import eventually, eventually_sync

COUNTING = "import os\nfrom evertick import *\nseen = []\n" + (
    "@task\ndef count():\n    seen.append(1)\n    return [len(seen), os.getpid()]\n@dag\ndef d(): count()\n"
)


async def test_what_an_attempt_changes_in_its_module_is_not_seen_by_the_next(tmp_path: Path) -> None:
    async with rig(tmp_path, COUNTING) as it:
        results = [await it.result("count") for _ in range(6)]
        assert [count for count, _ in results] == [1] * 6
        assert len({pid for _, pid in results}) == 6


async def test_an_attempt_leads_its_own_session_and_has_no_foreign_descriptors(tmp_path: Path) -> None:
    source = dag_of(
        "def look():\n    fds = {int(f): os.readlink(f'/proc/self/fd/{f}') for f in os.listdir('/proc/self/fd')"
        " if os.path.exists(f'/proc/self/fd/{f}')}\n"
        "    return [os.getpid() == os.getsid(0) == os.getpgid(0), fds]"
    )
    async with rig(tmp_path, source, slots=8) as it:
        orders = [it.order("look") for _ in range(8)]
        it.start(*orders)
        for order in orders:
            is_leader, fds = json.loads((await it.outcome(order)).result_json or "")
            assert is_leader
            assert fds["0"] == "/dev/null"
            assert fds["1"] == fds["2"] and fds["1"].endswith(".log")
            sockets = [target for target in fds.values() if target.startswith("socket:")]
            assert len(sockets) == 1
            assert len({target for target in fds.values() if target.endswith(".log")}) == 1


@pytest.mark.linux
async def test_a_plain_task_finds_nothing_loaded_that_it_does_not_need(tmp_path: Path) -> None:
    """Each process of an attempt is a fork: what its template has loaded, every one of them pays for."""
    heavy = {"asyncio", "ssl", "subprocess", "uuid", "jinja2", "cryptography", "http", "email", "psycopg", "pydantic"}
    source = (
        "import sys\nfrom evertick import dag, task\n@task\ndef look():\n"
        "    return sorted({name.partition('.')[0] for name in sys.modules})\n@dag\ndef d(): look()\n"
    )
    async with rig(tmp_path, source) as it:
        assert heavy & set(await it.result("look")) == set()


async def test_signals_are_as_a_program_expects_them(tmp_path: Path) -> None:
    source = dag_of(
        "def look():\n    return [signal.pthread_sigmask(signal.SIG_BLOCK, []) == set(),"
        " signal.getsignal(signal.SIGCHLD) == signal.SIG_DFL,"
        " signal.getsignal(signal.SIGINT) == signal.default_int_handler,"
        " signal.getsignal(signal.SIGHUP) == signal.SIG_DFL]"
    )
    async with rig(tmp_path, source) as it:
        assert await it.result("look") == [True] * 4


@pytest.mark.requirement("K8")
async def test_more_attempts_than_free_slots_are_refused_and_none_is_started(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of("def waits():\n    while True: signal.pause()", "def fine(): pass"), slots=2) as it:
        first = it.order("waits")
        it.start(first)
        with pytest.raises(Conflict, match="1 of 2 slots are free"):
            it.executor.start_many([it.order("fine"), it.order("fine")])
        assert it.executor.held() == [(first.key, 1)]
        assert it.executor.free_slots == 1
        with pytest.raises(Conflict, match="cannot be started again"):
            it.executor.start_many([first])
        await it.run("fine")
        assert it.executor.free_slots == 1


@pytest.mark.requirement("K8")
async def test_no_more_bodies_run_at_once_than_there_are_slots(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    source = dag_of(
        "def note():\n    path = f'{HOME}/{os.getpid()}'\n    open(path, 'w').close()\n"
        "    running = len(os.listdir(HOME))\n    os.unlink(path)\n    return running"
    )
    source = f"HOME = {str(home)!r}\n{source}"
    async with rig(tmp_path, source, slots=3) as it:
        most = 0
        for isolation in (Isolation.PROCESS, Isolation.WARM) * 5:
            orders = [it.order("note", isolation=isolation) for _ in range(it.executor.free_slots)]
            it.start(*orders)
            for order in orders:
                most = max(most, int((await it.outcome(order)).result_json or 0))
        assert 1 <= most <= 3


async def test_outcomes_that_arrive_together_are_delivered_together(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    note = "def note():\n    open(f'{NOTES}{os.getpid()}', 'w').close()"
    async with rig(tmp_path, f"NOTES = {str(notes)!r}\n{dag_of(note)}", limits=ExecutorLimits(min_idle=4)) as it:
        await it.run("note")
        (bundle,) = it.executor._executors.values()
        await eventually(lambda: len(bundle.pool._idle) >= 4)
        it.batches.clear()
        orders = [it.order("note") for _ in range(4)]
        it.start(*orders)
        eventually_sync(lambda: reports_are_in(it))
        for order in orders:
            await it.outcome(order)
        assert [len(batch) for batch in it.batches] == [4]


def reports_are_in(it: Rig) -> bool:
    socks = [attempt.link.sock for attempt in it.executor._attempts.values() if attempt.link]
    return len(select.select(socks, [], [], 0)[0]) == len(socks)


@pytest.mark.requirement("K1")
async def test_one_order_runs_exactly_one_body(tmp_path: Path) -> None:
    notes = tmp_path / "notes"
    source = dag_of(
        "def note():\n    fd = os.open(PATH, os.O_WRONLY | os.O_CREAT | os.O_APPEND)\n"
        "    os.write(fd, f'{current_context().run_id}\\n'.encode())"
    ).replace("PATH", repr(str(notes)))
    async with rig(tmp_path, source, slots=8) as it:
        orders = [it.order("note", isolation=isolation) for isolation in (*Isolation, *Isolation) * 10]
        for at in range(0, len(orders), 8):
            it.start(*orders[at : at + 8])
            for order in orders[at : at + 8]:
                assert (await it.outcome(order)).kind is OutcomeKind.SUCCESS
        assert sorted(map(int, (await text_of(notes)).split())) == sorted(order.key.run_id for order in orders)


@pytest.mark.linux
async def test_a_background_process_neither_delays_the_outcome_nor_survives_it(tmp_path: Path) -> None:
    leaves = (
        "def leaves():\n    one = subprocess.Popen(['sleep', '1000'])\n"
        "    r, w = os.pipe()\n"
        "    if os.fork() == 0:\n        os.setsid()\n        pid = os.fork()\n"
        "        if pid == 0:\n            signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "            os.write(w, str(os.getpid()).encode())\n"
        "            while True: signal.pause()\n        os._exit(0)\n"
        "    return [one.pid, int(os.read(r, 20))]"
    )
    async with rig(tmp_path, dag_of(leaves)) as it:
        for isolation in Isolation:
            loop = asyncio.get_running_loop()
            await it.result("leaves", isolation=isolation)
            started_at = loop.time()
            pids = await it.result("leaves", isolation=isolation)
            assert loop.time() - started_at < 20
            for pid in pids:
                await dead(pid)


@pytest.mark.linux
async def test_a_crash_takes_the_background_processes_along(tmp_path: Path) -> None:
    crashes = (
        "def crashes():\n    child = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    print(child.pid, flush=True)\n    os.kill(os.getpid(), signal.SIGSEGV)"
    )
    async with rig(tmp_path, dag_of(crashes)) as it:
        outcome = await it.run("crashes")
        assert outcome.reason == "killed by SIGSEGV"
        pid = int(outcome.log.split()[-1])
        assert not is_alive(pid)


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_hundreds_of_attempts_leave_no_process_descriptor_or_file_behind(tmp_path: Path) -> None:
    others = children_of(os.getpid())
    # The shelf is as full at the second count as at the first, because its level cannot change: each child on it has descriptors.
    level = ExecutorLimits(min_idle=8, max_idle=8)

    def waiting() -> int:
        (keeper,) = set(children_of(os.getpid())) - set(others)
        (parent,) = children_of(keeper)
        return len(children_of(parent))

    async with rig(tmp_path, COUNTING, slots=8, limits=level) as it:
        fds: list[int] = []
        for _ in range(2):
            for _ in range(10):
                orders = [it.order("count") for _ in range(8)]
                it.start(*orders)
                for order in orders:
                    await it.outcome(order)
            await eventually(lambda: len(list(it.spool_dir.rglob("*.log"))) < 40)
            await eventually(lambda: 5 < waiting() < 10)
            fds.append(open_descriptors())
        assert fds[1] <= fds[0] + 16
    assert children_of(os.getpid()) == others
    assert list(it.spool_dir.rglob("*.*")) == []
