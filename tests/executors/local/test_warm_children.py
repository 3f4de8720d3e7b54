"""`isolation="warm"`: reused processes, when they are replaced, and coroutines side by side."""

from __future__ import annotations

import json
from pathlib import Path

from evertick.attempts.child_setup import ReuseLimits
from evertick.domain.attempt import Isolation, OutcomeKind
from evertick.executors.local.child_process import ExecutorLimits
from tests.executors.local.executor_rig import dag_of, dead, log_text, rig
from tests.waiting import eventually

WARM = Isolation.WARM
WHO = "def who():\n    return os.getpid()"


async def test_a_warm_process_is_reused_for_the_next_attempt(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of(WHO)) as it:
        assert len({await it.result("who", isolation=WARM) for _ in range(20)}) == 1


async def test_a_warm_process_is_replaced_after_its_number_of_attempts(tmp_path: Path) -> None:
    limits = ExecutorLimits(reuse=ReuseLimits(attempts=3))
    async with rig(tmp_path, dag_of(WHO), limits=limits) as it:
        pids = [await it.result("who", isolation=WARM) for _ in range(9)]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 3]
        await dead(pids[0])


async def test_the_usage_of_an_attempt_is_its_own(tmp_path: Path) -> None:
    """Not that of earlier attempts in a reused process; of a command and of a crash it is that of their process."""
    burns = "def burns():\n    kept = bytearray(60_000_000)\n    while time.process_time() < 0.2: pass"
    crashes = "def crashes():\n    kept = bytearray(60_000_000)\n    os.kill(os.getpid(), signal.SIGKILL)"
    child = "def child():\n    subprocess.run([sys.executable, '-c', 'x = bytearray(200_000_000)'], check=True)"
    async with rig(tmp_path, dag_of(burns, "def rests():\n    pass", crashes, child)) as it:
        used = {
            name: (await it.run(name, **fields)).usage
            for name, fields in {
                "burns": {"isolation": WARM},
                "rests": {"isolation": WARM},
                "crashes": {},
                "child": {},
            }.items()
        }
        shell = (await it.run("rests", command="head -c 3000000 /dev/zero | sha256sum")).usage
    assert used["burns"] is not None and used["rests"] is not None
    assert used["burns"].cpu_seconds >= 0.15 and used["rests"].cpu_seconds < 0.1
    assert used["burns"].peak_memory_bytes - used["rests"].peak_memory_bytes > 40_000_000
    assert used["crashes"] is not None and used["crashes"].peak_memory_bytes > 60_000_000
    assert used["child"] is not None and used["child"].peak_memory_bytes > 200_000_000
    assert shell is not None and 0 < shell.cpu_seconds < 5


async def test_a_warm_process_is_replaced_after_a_failure(tmp_path: Path) -> None:
    source = dag_of(WHO, "def fails():\n    print(os.getpid())\n    raise ValueError")
    async with rig(tmp_path, source) as it:
        first = await it.result("who", isolation=WARM)
        failed = await it.run("fails", isolation=WARM)
        assert log_text(failed)[0] == f"OUT {first}"
        assert await it.result("who", isolation=WARM) != first
        await dead(first)


async def test_a_warm_process_that_grows_is_replaced(tmp_path: Path) -> None:
    source = "kept = []\n" + dag_of("def grows():\n    kept.append(bytearray(2_000_000))\n    return os.getpid()")
    limits = ExecutorLimits(reuse=ReuseLimits(growth_bytes=20_000_000))
    async with rig(tmp_path, source, limits=limits) as it:
        pids = [await it.result("grows", isolation=WARM) for _ in range(45)]
        assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [21, 21, 3]


async def test_sync_attempts_share_no_process_at_the_same_time(tmp_path: Path) -> None:
    meets = "def meets():\n    open(f'{HERE}{os.getpid()}', 'w').close()\n"
    meets += "    while len(glob.glob(HERE + '*')) < 3: os.sched_yield()\n    return os.getpid()"
    async with rig(tmp_path, f"import glob\nHERE = {str(tmp_path / 'here')!r}\n{dag_of(meets)}", slots=3) as it:
        orders = [it.order("meets", isolation=WARM) for _ in range(3)]
        it.start(*orders)
        assert len({(await it.outcome(order)).result_json for order in orders}) == 3


MEETING = """
import asyncio, os
from evertick import *
present = 0
all_here = asyncio.Event()

@task
async def meets():
    global present
    present += 1
    print('attempt', current_context().run_id)
    if present == 5: all_here.set()
    await all_here.wait()
    print('met', current_context().run_id)
    return os.getpid()

@task
async def fails():
    raise ValueError('no')

@task
async def deaf():
    while True:
        try: await asyncio.Event().wait()
        except asyncio.CancelledError: pass

@task
async def waits():
    print('waiting')
    await asyncio.Event().wait()

@dag
def d(): meets(), fails(), deaf(), waits()
"""


async def test_async_functions_run_side_by_side_in_one_process_with_their_own_logs(tmp_path: Path) -> None:
    async with rig(tmp_path, MEETING, slots=5) as it:
        orders = [it.order("meets", isolation=WARM) for _ in range(5)]
        it.start(*orders)
        outcomes = [await it.outcome(order) for order in orders]
        assert len({outcome.result_json for outcome in outcomes}) == 1
        for order, outcome in zip(orders, outcomes, strict=True):
            run_id = order.key.run_id
            assert log_text(outcome) == [f"OUT attempt {run_id}", f"OUT met {run_id}"]
        await eventually(lambda: not it.executor._shipping._unstored)


async def test_one_coroutine_is_stopped_without_the_others(tmp_path: Path) -> None:
    async with rig(tmp_path, MEETING, slots=3) as it:
        stopped, timed, neighbour = (it.order("waits", isolation=WARM, timeout_seconds=t) for t in (None, 0.3, None))
        it.start(stopped, timed, neighbour)
        await it.chunk_with(stopped, "waiting")
        it.executor.kill(stopped.key, 1, "canceled")
        assert (await it.outcome(stopped)).kind is OutcomeKind.KILLED
        assert (await it.outcome(timed)).reason == "execution_timeout: exceeded 0.3 s"
        assert it.executor.held() == [(neighbour.key, 1)]


async def test_a_coroutine_that_does_not_stop_takes_its_process_along(tmp_path: Path) -> None:
    async with rig(tmp_path, MEETING, slots=3, limits=ExecutorLimits(coroutine_grace_seconds=0.05)) as it:
        deaf, neighbour = it.order("deaf", isolation=WARM), it.order("waits", isolation=WARM)
        it.start(deaf, neighbour)
        await it.chunk_with(neighbour, "waiting")
        it.executor.kill(deaf.key, 1, "canceled")
        assert (await it.outcome(deaf)).reason == "canceled"
        collateral = await it.outcome(neighbour)
        assert collateral.kind is OutcomeKind.KILLED
        assert "because deaf did not stop when asked" in (collateral.reason or "")


async def test_after_a_failed_coroutine_new_ones_get_a_new_process(tmp_path: Path) -> None:
    async with rig(tmp_path, MEETING, slots=8) as it:
        waits = it.order("waits", isolation=WARM)
        it.start(waits)
        await it.chunk_with(waits, "waiting")
        old = it.executor._attempts[waits.key, 1].link
        assert (await it.run("fails", isolation=WARM)).reason == "ValueError: no"
        orders = [it.order("meets", isolation=WARM) for _ in range(5)]
        it.start(*orders)
        pids = {json.loads((await it.outcome(order)).result_json or "") for order in orders}
        assert old is not None and old.pid not in pids
        assert it.executor.held() == [(waits.key, 1)]


async def test_output_of_subprocesses_among_coroutines_is_kept_by_one_of_them(tmp_path: Path) -> None:
    source = dag_of("async def runs():\n    subprocess.run(['echo', 'raw words'])\n    print('done')")
    async with rig(tmp_path, source) as it:
        assert log_text(await it.run("runs", isolation=WARM)) == ["OUT done", "RAW raw words"]


async def test_a_leftover_process_of_coroutines_dies_when_none_is_left(tmp_path: Path) -> None:
    source = dag_of("async def leaves():\n    return subprocess.Popen(['sleep', '1000']).pid")
    async with rig(tmp_path, source) as it:
        await dead(await it.result("leaves", isolation=WARM))


async def test_many_large_orders_for_coroutines_arrive_whole_however_they_are_cut(tmp_path: Path) -> None:
    """The first of them wakes the process up, and the last of what it reads then is a part of one."""
    source = "from evertick import *\n@task\ndef makes(): pass\n@task\nasync def takes(text): return len(text)\n"
    source += "@dag\ndef d(): takes(makes())\n"
    async with rig(tmp_path, source, slots=40) as it:
        inputs = json.dumps({"makes": "x" * 50_000})
        orders = [it.order("takes", isolation=WARM, inputs_json=inputs) for _ in range(40)]
        it.start(*orders)
        assert {(await it.outcome(order)).result_json for order in orders} == {"50000"}
