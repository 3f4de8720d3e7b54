"""How an attempt ends, told apart by cause, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evertick.domain.attempt import Isolation, OutcomeKind, TaskKey
from tests.executors.local.executor_rig import dag_of, log_text, rig
from tests.waiting import eventually_sync

ENDINGS = dag_of(
    "def fine():\n    return {'rows': [1, 2]}",
    "def skips():\n    raise Skip('nothing new')",
    "def raises():\n    raise ValueError('no such file')",
    "def gives_up():\n    raise Fail('wrong password')",
    "def later():\n    raise RetryAfter(30, 'throttled')",
    "def leaves():\n    sys.exit(3)",
    "def leaves_well():\n    sys.exit(0)",
    "def leaves_with_words():\n    sys.exit('cannot go on')",
    "def vanishes():\n    os._exit(4)",
    "def crashes():\n    os.kill(os.getpid(), signal.SIGSEGV)",
    "def is_killed():\n    os.kill(os.getpid(), signal.SIGKILL)",
    "def hungry():\n    raise MemoryError()",
    "def unencodable():\n    return {'a': object()}",
    "def too_large():\n    return 'x' * 2_000_000",
    "def dirty():\n    return 'a\\x00b'",
    "def unprintable():\n    class E(Exception):\n        def __str__(self): raise RuntimeError\n    raise E",
)

EXPECTED = {
    "fine": (OutcomeKind.SUCCESS, None),
    "skips": (OutcomeKind.SKIPPED, "nothing new"),
    "raises": (OutcomeKind.FAILED, "ValueError: no such file"),
    "gives_up": (OutcomeKind.FAILED, "wrong password"),
    "later": (OutcomeKind.FAILED, "throttled"),
    "leaves": (OutcomeKind.FAILED, "exited with code 3"),
    "leaves_well": (OutcomeKind.SUCCESS, None),
    "leaves_with_words": (OutcomeKind.FAILED, "exited with code 1: cannot go on"),
    "vanishes": (OutcomeKind.FAILED, "exited with code 4 before the task returned"),
    "crashes": (OutcomeKind.FAILED, "killed by SIGSEGV"),
    "is_killed": (OutcomeKind.FAILED, "killed by SIGKILL (possibly out of memory)"),
    "hungry": (OutcomeKind.FAILED, "out of memory: MemoryError"),
    "dirty": (OutcomeKind.SUCCESS, None),
    "unprintable": (OutcomeKind.FAILED, "E: (its message cannot be shown)"),
}


@pytest.mark.requirement("B10")
@pytest.mark.parametrize("isolation", Isolation)
async def test_every_ending_is_told_apart(tmp_path: Path, isolation: Isolation) -> None:
    async with rig(tmp_path, ENDINGS, slots=len(EXPECTED)) as it:
        orders = {task: it.order(task, isolation=isolation) for task in EXPECTED}
        it.start(*orders.values())
        outcomes = {task: await it.outcome(order) for task, order in orders.items()}
        assert {task: (outcome.kind, outcome.reason) for task, outcome in outcomes.items()} == EXPECTED
        assert outcomes["fine"].result_json == '{"rows":[1,2]}'
        assert outcomes["gives_up"].no_retry and not outcomes["raises"].no_retry
        assert outcomes["later"].retry_after_seconds == 30
        assert [outcomes[task].exit_code for task in ("leaves", "vanishes", "crashes")] == [3, 4, -11]
        assert outcomes["dirty"].result_json == '"a�b"'
        assert "characters of the result (NUL or lone surrogates)" in log_text(outcomes["dirty"])[0]


async def test_a_result_that_cannot_be_stored_fails_the_task_with_the_reason(tmp_path: Path) -> None:
    async with rig(tmp_path, ENDINGS) as it:
        unencodable = await it.run("unencodable")
        assert unencodable.kind is OutcomeKind.FAILED
        assert "result['a'] is of type object" in (unencodable.reason or "")
        too_large = await it.run("too_large")
        assert too_large.kind is OutcomeKind.FAILED
        assert "result too large: str of 2,000,002 bytes" in (too_large.reason or "")


async def test_a_result_as_large_as_allowed_arrives_whole(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of("def big():\n    return 'x' * 1_000_000")) as it:
        assert len(await it.result("big")) == 1_000_000


async def test_large_inputs_arrive_whole(tmp_path: Path) -> None:
    source = "from evertick import *\n@task\ndef a(): ...\n@task\ndef b(x): return len(x)\n@dag\ndef d(): b(a())\n"
    async with rig(tmp_path, source) as it:
        assert await it.result("b", inputs_json=json.dumps({"a": "y" * 3_000_000})) == 3_000_000


async def test_the_traceback_in_the_log_shows_the_users_frames_only(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of("def raises():\n    {}['missing']")) as it:
        text = log_text(await it.run("raises"))
        assert text[0] == "ERROR Traceback (most recent call last):"
        assert "d.py" in text[1] and "in raises" in text[1]
        assert text[-1] == "ERROR KeyError: 'missing'"
        assert not any("body.py" in line for line in text)


async def test_an_unknown_task_fails_with_what_to_do(tmp_path: Path) -> None:
    async with rig(tmp_path, dag_of("def a():\n    return 1")) as it:
        outcome = await it.run("b")
        assert outcome.kind is OutcomeKind.FAILED
        assert "DAG 'd' has no task 'b'" in (outcome.reason or "")


async def test_a_task_sees_its_context(tmp_path: Path) -> None:
    source = dag_of(
        "def seen(context: TaskContext = None):\n    c = current_context()\n"
        "    return [c.run_id, c.dag, c.task, c.map_index, c.attempt, c.epoch, c.idempotency_key,"
        " c.fire_at.isoformat(), c.params['day'], c.is_cancelled(), context is c]"
    )
    async with rig(tmp_path, source) as it:
        key = TaskKey(41, 2, 6)
        fields = {"key": key, "epoch": 9, "attempt": 3, "fire_at": "2025-01-02T03:04:05+00:00"}
        for isolation in Isolation:
            seen = await it.result("seen", params_json='{"day":"mon"}', isolation=isolation, **fields)
            expected = [41, "d", "seen", 6, 3, 9, "evertick-41-2-6", "2025-01-02T03:04:05+00:00", "mon", False, True]
            assert seen == expected


SHELL = """
from evertick import *
@task
def up(): ...
@dag
def d():
    shell("sh", "unused", env={"FROM_UP": up()})
"""


async def test_a_shell_task_runs_its_command_with_its_context_in_the_environment(tmp_path: Path) -> None:
    command = 'echo "$EVERTICK_RUN_ID $EVERTICK_TASK $EVERTICK_ATTEMPT $EVERTICK_EPOCH $EVERTICK_IDEMPOTENCY_KEY"; '
    command += 'echo "$EVERTICK_FIRE_AT $EVERTICK_PARAMS $EVERTICK_INPUTS $FROM_UP"; cat; echo >&2 oops'
    async with rig(tmp_path, SHELL) as it:
        outcome = await it.run(
            "sh",
            key=TaskKey(5, 1, -1),
            command=command,
            fire_at="2025-01-02T03:04:05+00:00",
            params_json='{"a":1}',
            inputs_json='{"up":[2]}',
            isolation=Isolation.WARM,
        )
        assert (outcome.kind, outcome.result_json, outcome.exit_code) == (OutcomeKind.SUCCESS, None, 0)
        assert log_text(outcome) == [
            "RAW 5 sh 1 1 evertick-5-1--1",
            'RAW 2025-01-02T03:04:05+00:00 {"a":1} {"up":[2]} [2]',
            "RAW oops",
        ]


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("exit 3", "exited with code 3"),
        ("false; echo not reached", "exited with code 1"),
        ("false | cat", "exited with code 1"),
        ("kill -SEGV $$", "killed by SIGSEGV"),
        ("sh -c 'kill -9 $$'; echo x", "exited with code 137 (a command in it was killed by SIGKILL)"),
    ],
)
async def test_a_shell_task_fails_as_its_command_does(tmp_path: Path, command: str, reason: str) -> None:
    async with rig(tmp_path, SHELL) as it:
        outcome = await it.run("sh", command=command)
        assert (outcome.kind, outcome.reason) == (OutcomeKind.FAILED, reason)


async def test_a_shell_task_with_too_large_inputs_fails_and_says_so(tmp_path: Path) -> None:
    async with rig(tmp_path, SHELL) as it:
        outcome = await it.run("sh", command="true", inputs_json=json.dumps({"up": "x" * 4_000_000}))
        assert outcome.kind is OutcomeKind.FAILED
        assert "Argument list too long" in (outcome.reason or "")


@pytest.mark.parametrize("isolation", Isolation)
@pytest.mark.parametrize("prefix", ["", "async "])
async def test_a_copy_that_the_body_forks_reports_nothing(tmp_path: Path, isolation: Isolation, prefix: str) -> None:
    source = dag_of(f"{prefix}def forks():\n    pid = os.fork()\n    if pid: os.waitpid(pid, 0)\n    return pid > 0")
    async with rig(tmp_path, source) as it:
        assert [await it.result("forks", isolation=isolation) for _ in range(3)] == [True] * 3


async def test_garbage_on_the_socket_ends_the_attempt_and_nothing_else(tmp_path: Path) -> None:
    garbage = (
        "def garbage():\n    for fd in map(int, os.listdir('/proc/self/fd')):\n"
        "        if os.path.exists(f'/proc/self/fd/{fd}') and 'socket' in os.readlink(f'/proc/self/fd/{fd}'):\n"
        "            os.write(fd, b'\\0\\0\\0\\4oops')\n    while True: signal.pause()"
    )
    async with rig(tmp_path, dag_of(garbage, "def fine(): pass")) as it:
        outcome = await it.run("garbage")
        assert outcome.kind is OutcomeKind.FAILED
        assert (await it.run("fine")).kind is OutcomeKind.SUCCESS


MEMORY_CGROUPS = {Path("/sys/fs/cgroup/memory"): "memory.limit_in_bytes", Path("/sys/fs/cgroup"): "memory.max"}

HUNGRY = dag_of("def hungry():\n    kept = []\n    while True: kept.append(bytearray(10_000_000))", "def fine(): pass")

OOM_DRIVER = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tests.executors.local.executor_rig import rig
async def main(folder, source):
    async with rig(Path(folder), source) as it:
        print((await it.run("hungry")).reason)
        print((await it.run("fine")).kind)
asyncio.run(main(*sys.argv[2:]))
"""


@contextmanager
def little_memory() -> Iterator[Path]:
    """A cgroup of 200 MB; skips where tests may not make one."""
    for root, limit in MEMORY_CGROUPS.items():
        group = root / f"evertick-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text("200000000")
            yield group
            return
        except FileNotFoundError:
            continue
        finally:
            group.rmdir()
    pytest.skip("this machine does not let tests make a memory cgroup")


@pytest.mark.requirement("B10", "N10")
def test_a_task_over_the_memory_limit_fails_by_name_and_no_other_with_it(tmp_path: Path) -> None:
    here = Path(__file__).parents[2]
    with little_memory() as group:
        arguments = [sys.executable, "-c", OOM_DRIVER, str(here), str(tmp_path), HUNGRY]
        enter = ["sh", "-c", f'echo $$ > "{group}/cgroup.procs" && exec "$@"', "sh"]
        said = subprocess.run(enter + arguments, capture_output=True, text=True, timeout=120)
        eventually_sync(lambda: not (group / "cgroup.procs").read_text())
    assert said.stdout.splitlines() == [
        "out of memory: killed by SIGKILL (the kernel's out-of-memory killer ran)",
        "success",
    ], said.stderr
