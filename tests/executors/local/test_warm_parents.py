"""Warm parents: loading, crashing, ageing, making room, and bundles that cannot be forked."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from evertick.bundles.loader import load_file
from evertick.domain.attempt import Isolation, OutcomeKind
from evertick.executors.local.child_process import Attempt, ExecutorLimits
from evertick.executors.local.fork_server_client import BundlePlace
from evertick.executors.local.process_pool import ProcessPool
from evertick.processes.system import become_subreaper, children_of
from tests.executors.local.executor_rig import Rig, dag_of, dead, is_alive, log_text, rig
from tests.waiting import eventually

WHO = "def who():\n    return [os.getpid(), os.getppid()]"
WAITS = "def waits():\n    print('ready')\n    while True: signal.pause()"


async def test_an_import_error_fails_every_order_with_its_reason_and_traceback(tmp_path: Path) -> None:
    async with rig(tmp_path, "import os\nimport no_such_module\n") as it:
        orders = [it.order("a"), it.order("b")]
        it.start(*orders)
        for order in orders:
            outcome = await it.outcome(order)
            assert outcome.kind is OutcomeKind.FAILED
            assert outcome.reason == "d.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
            assert any("d.py" in line and "line 2" in line for line in log_text(outcome))
        again = await it.run("a")
        assert again.reason == "d.py cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"
        (it.folder / "d.py").write_text(dag_of(WHO))
        await eventually(
            lambda: it.executor._executors["bundle-1", "d.py"].pool._paused_until < it.executor._loop.time()
        )
        assert (await it.run("who")).kind is OutcomeKind.SUCCESS


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import sys\nsys.exit(3)", "d.py cannot be imported: SystemExit: 3"),
        ("import os\nos._exit(3)", "the process that imports d.py ended: exited with code 3"),
        ("import os\nos.kill(os.getpid(), 11)", "the process that imports d.py ended: killed by SIGSEGV"),
    ],
)
async def test_an_import_that_ends_the_process_fails_the_order(tmp_path: Path, source: str, reason: str) -> None:
    for uses_threads in (False, True):
        async with rig(tmp_path, source) as it:
            it.uses_threads = uses_threads
            outcome = await it.run("a")
            assert (outcome.kind, outcome.reason) == (OutcomeKind.FAILED, reason)


async def test_a_start_that_takes_longer_than_a_moment_is_told(tmp_path: Path) -> None:
    async with rig(tmp_path, f"import time\ntime.sleep(0.15)\n{dag_of(WHO)}") as it:
        first = await it.run("who")
        assert first.kind is OutcomeKind.SUCCESS
        assert first.start_seconds is not None and first.start_seconds >= 0.1
        usual = Attempt(it.order("who"), 5.0)
        assert usual.told_start_seconds() is None, "it never began"
        usual.started_at = 5.01
        assert usual.told_start_seconds() is None, "not worth a word"


async def test_an_import_that_hangs_fails_the_order(tmp_path: Path) -> None:
    for uses_threads in (False, True):
        source = "import signal\nwhile True: signal.pause()"
        async with rig(tmp_path, source, limits=ExecutorLimits(load_seconds=0.3)) as it:
            it.uses_threads = uses_threads
            assert (await it.run("a")).reason == "d.py was not imported within 0.3 s"


async def test_a_bundle_that_cannot_be_fetched_is_no_fault_of_the_task(tmp_path: Path) -> None:
    async with rig(tmp_path, "") as it:

        async def fail(bundle: str, file: str) -> BundlePlace:
            raise ConnectionError("no route to the store")

        it.executor._resolve_bundle = fail
        outcome = await it.run("a")
        assert outcome.kind is OutcomeKind.GIVEN_BACK
        assert outcome.reason == "bundle bundle-1 could not be fetched: no route to the store"


async def test_a_crashed_warm_parent_is_reported_and_replaced(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of(WHO, WAITS)) as it:
        pid, parent = await it.result("who")
        waits = it.order("waits")
        it.start(waits)
        await it.chunk_with(waits, "ready")
        os.kill(parent, signal.SIGKILL)
        lost = await it.outcome(waits)
        assert (lost.kind, lost.reason) == (OutcomeKind.LOST, "its fork server ended: killed by SIGKILL")
        assert (await it.result("who"))[1] != parent
        assert not is_alive(pid)


async def test_orphans_of_a_killed_keeper_are_found_and_killed(tmp_path: Path) -> None:
    become_subreaper()
    source = dag_of(
        "def leaves():\n    kid = subprocess.Popen(['sleep', '1000'], start_new_session=True)\n"
        "    print('kid', kid.pid)\n    while True: signal.pause()"
    )
    others = children_of(os.getpid())
    async with rig(tmp_path, source) as it:
        order = it.order("leaves")
        it.start(order)
        kid = int((await it.chunk_with(order, "kid")).split()[-1])
        (keeper,) = set(children_of(os.getpid())) - set(others)
        os.kill(keeper, signal.SIGKILL)
        lost = await it.outcome(order)
        assert lost.reason == "its fork server ended: killed by SIGKILL"
        await dead(kid)
        await eventually(lambda: children_of(os.getpid()) == others)


THREADED = "import threading\nready = threading.Event()\nworker = threading.Thread(target=ready.wait, daemon=True)\n"
THREADED += "worker.start()\n"


@pytest.mark.parametrize("is_known", [True, False])
@pytest.mark.parametrize("isolation", Isolation)
async def test_a_bundle_whose_import_starts_threads_is_imported_in_each_process(
    tmp_path: Path, is_known: bool, isolation: Isolation
) -> None:
    uses = "def uses():\n    ready.set(); worker.join()\n    return [os.getpid(), worker.is_alive()]"
    async with rig(tmp_path, THREADED + dag_of(uses, "async def also():\n    return 1")) as it:
        it.uses_threads = is_known
        results = [await it.result("uses", isolation=isolation) for _ in range(3)]
        assert [alive for _, alive in results] == [False] * 3
        assert len({pid for pid, _ in results}) == (3 if isolation is Isolation.PROCESS else 1)
        assert await it.result("also", isolation=isolation) == 1


# As OpenBLAS does: a thread per further core, unless its variable says 1.
POOLED = """import os, threading
size = int(os.environ.get("OPENBLAS_NUM_THREADS", "2"))
for _ in range(size - 1): threading.Thread(target=threading.Event().wait, daemon=True).start()
"""


async def test_a_library_with_a_thread_pool_keeps_the_fork_server(tmp_path: Path) -> None:
    pools = "def pools():\n    return [size, os.environ.get('OPENBLAS_NUM_THREADS'), os.getppid()]"
    async with rig(tmp_path, POOLED + dag_of(pools)) as it:
        results = [await it.result("pools") for _ in range(2)]
        assert results[0] == results[1] and results[0][:2] == [1, None]
        assert not it.executor._executors["bundle-1", "d.py"].pool._imports_in_child
    loaded = await load_file(it.folder, "d.py")
    assert loaded.uses_threads == ()


async def test_the_users_size_of_a_thread_pool_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "3")
    async with rig(tmp_path, POOLED + dag_of("def pools():\n    return [size, threading.active_count()]")) as it:
        assert await it.result("pools") == [3, 3]
        assert it.executor._executors["bundle-1", "d.py"].pool._imports_in_child


@pytest.mark.skipif(find_spec("numpy") is None, reason="numpy is not installed")
async def test_a_dag_that_imports_numpy_is_forked_and_computes(tmp_path: Path) -> None:
    source = "import os\nimport numpy\nbefore = numpy.ones((300, 300)) @ numpy.ones((300, 300))\n"
    product = "def product():\n    return [float((numpy.ones((300, 300)) @ before).sum()), os.getppid()]"
    async with rig(tmp_path, source + dag_of(product)) as it:
        results = [await it.result("product") for _ in range(3)]
        assert results == [[300.0**4, results[0][1]]] * 3


async def test_a_bundle_whose_import_opens_a_socket_is_not_forked_with_it(tmp_path: Path) -> None:
    source = "import socket\nkept = socket.socketpair()\n" + dag_of("def who():\n    return kept[0].fileno() > 0")
    async with rig(tmp_path, source) as it:
        assert await it.result("who")
        assert it.executor._executors["bundle-1", "d.py"].pool._imports_in_child


async def test_an_import_error_in_each_process_fails_the_order(tmp_path: Path) -> None:
    async with rig(tmp_path, "raise RuntimeError('no licence')") as it:
        it.uses_threads = True
        outcome = await it.run("a")
        assert outcome.reason == "d.py cannot be imported: RuntimeError: no licence"


@pytest.mark.parametrize("imports_in_child", [False, True])
async def test_a_process_that_the_import_starts_is_no_orphan(tmp_path: Path, imports_in_child: bool) -> None:
    source = "import subprocess\nhelper = subprocess.Popen(['sleep', '1000'])\n"
    looks = "def looks():\n    subprocess.Popen(['sleep', '1000'])\n    return helper.pid"
    async with rig(tmp_path, source + dag_of(looks)) as it:
        it.uses_threads = imports_in_child
        pid = await it.result("looks", isolation=Isolation.WARM)
        assert await it.result("looks", isolation=Isolation.WARM) == pid
        assert (await it.run("looks")).kind is OutcomeKind.SUCCESS
        assert is_alive(pid)
    assert not is_alive(pid)


async def test_a_failing_import_of_one_process_leaves_the_others_alone(tmp_path: Path) -> None:
    breaks = f"import os\nif os.path.exists({str(tmp_path / 'broken')!r}): raise ValueError('now broken')\n"
    async with rig(tmp_path, breaks + dag_of(WAITS, WHO), limits=ExecutorLimits(min_idle=1)) as it:
        it.uses_threads = True
        waits = it.order("waits")
        it.start(waits)
        await it.chunk_with(waits, "ready")
        (tmp_path / "broken").touch()
        outcomes = [await it.run("who") for _ in range(3)]
        assert outcomes[-1].reason == "d.py cannot be imported: ValueError: now broken"
        assert it.executor.held() == [(waits.key, 1)]
        it.executor.kill(waits.key, 1, "enough")
        assert (await it.outcome(waits)).reason == "enough"


def make_old(it: Rig) -> ProcessPool:
    """Its warm parent has lived long enough."""
    pool = it.executor._executors["bundle-1", "d.py"].pool
    assert pool._parent is not None
    pool._parent.started_at -= ExecutorLimits().parent_age_seconds
    return pool


async def test_an_old_warm_parent_is_replaced_without_disturbing_what_runs(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of(WHO, WAITS)) as it:
        waits = it.order("waits")
        it.start(waits)
        await it.chunk_with(waits, "ready")
        _, old = await it.result("who")
        pool = make_old(it)
        await eventually(lambda: len(pool._parents) >= 2 and pool._successor is None)
        assert (await it.result("who"))[1] != old
        assert it.executor.held() == [(waits.key, 1)]
        it.executor.kill(waits.key, 1, "enough")
        await it.outcome(waits)
        await dead(old)


async def test_a_replacement_that_cannot_be_loaded_leaves_the_old_one_in_place(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of(WHO)) as it:
        _, old = await it.result("who")
        (it.folder / "d.py").write_text("broken(")
        pool = make_old(it)
        await eventually(lambda: pool._successor)
        await eventually(lambda: pool._successor is None)
        assert (await it.result("who"))[1] == old


async def test_the_warm_parent_used_longest_ago_makes_room(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of(WHO, WAITS), limits=ExecutorLimits(max_parents=2)) as it:
        waits = replace(it.order("waits"), bundle="busy")
        it.start(waits)
        await it.chunk_with(waits, "ready")
        _, first = await it.result("who", bundle="one")
        await it.result("who", bundle="two")
        await dead(first)
        assert set(it.executor._executors) == {("busy", "d.py"), ("two", "d.py")}
        await it.result("who", bundle="one")
        assert it.executor.held() == [(waits.key, 1)]


async def test_the_process_pool_grows_with_demand_and_shrinks_without(tmp_path: Path) -> None:
    limits = ExecutorLimits(min_idle=1, max_idle=3, idle_decay_seconds=0.01)
    async with rig(tmp_path, dag_of(WHO), slots=8, limits=limits) as it:
        await it.result("who")
        pool = it.executor._executors["bundle-1", "d.py"].pool
        orders = [it.order("who") for _ in range(8)]
        it.start(*orders)
        assert pool._level == 3
        for order in orders:
            await it.outcome(order)
        await eventually(lambda: pool._level == 1 and len(pool._idle) == 1)


async def test_the_runner_does_not_grow_over_hundreds_of_attempts(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of(WHO), slots=8) as it:
        weights = []
        for _ in range(3):
            for _ in range(12):
                orders = [it.order("who", isolation=isolation) for isolation in (*Isolation,) * 4]
                it.start(*orders)
                for order in orders:
                    await it.outcome(order)
            it.batches.clear()
            it._outcomes.clear()
            weights.append(resident_kib())
        assert weights[2] - weights[1] < 2048


def resident_kib() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])
