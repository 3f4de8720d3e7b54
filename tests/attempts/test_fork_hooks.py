"""Fork hooks of modules: which run when a warm parent forks a child, and which when the child forks."""

from __future__ import annotations

from pathlib import Path

from tests.executors.local.executor_rig import dag_of, log_text, rig

SEEDED = "import random\nrandom.seed(1)\n" + dag_of("def draws():\n    return random.random()")


async def test_what_draws_random_numbers_draws_others_in_each_attempt(tmp_path: Path) -> None:
    async with rig(tmp_path, SEEDED) as it:
        assert len({await it.result("draws") for _ in range(5)}) == 5


async def test_hooks_of_user_code_run_in_each_attempts_process_and_see_no_change(tmp_path: Path) -> None:
    source = "import os\ncalls = []\nos.register_at_fork(after_in_child=lambda: calls.append(os.getpid()))\n"
    look = "def look():\n    return [calls == [os.getpid()], type(os.register_at_fork).__name__]"
    async with rig(tmp_path, source + dag_of(look)) as it:
        for _ in range(3):
            assert await it.result("look") == [True, "builtin_function_or_method"]


async def test_locks_of_threads_that_a_warm_parent_does_not_have_are_not_freed(tmp_path: Path) -> None:
    """`threading` would have made a new lock: 0.1 ms in every attempt."""
    source = "import threading\nLOCK = threading._active_limbo_lock\n"
    look = "def look():\n    return [threading._active_limbo_lock is LOCK, threading.active_count()]"
    async with rig(tmp_path, source + dag_of(look)) as it:
        assert await it.result("look") == [True, 1]


FORKING = """
import logging, os, threading, time
from evertick import *

HANDLER = logging.NullHandler()
logging.getLogger("held").addHandler(HANDLER)

def hold(held):
    HANDLER.acquire()
    held.set()
    time.sleep(1000)

@task
def forks():
    "Another thread holds a lock of logging's while this one forks, twice."
    held = threading.Event()
    threading.Thread(target=hold, args=[held], daemon=True).start()
    held.wait()
    found = []
    for _ in range(2):
        reader, writer = os.pipe()
        if os.fork() == 0:
            logging.getLogger("held").error("said")
            os.write(writer, b"%d" % threading.active_count())
            os._exit(0)
        os.close(writer)
        found.append(os.read(reader, 10).decode())
        os.wait()
    logging.getLogger().info("still there")
    return found

@dag
def d(): forks()
"""


async def test_a_child_that_forks_has_every_hook(tmp_path: Path) -> None:
    """Without those of `logging` the copy waits for ever, without those of `threading` it counts threads it lacks."""
    async with rig(tmp_path, FORKING) as it:
        outcome = await it.run("forks", timeout_seconds=40)
        assert (outcome.kind, outcome.result_json) == ("success", '["1","1"]')
        assert log_text(outcome) == ["ERROR held: said"] * 2 + ["INFO still there"]
