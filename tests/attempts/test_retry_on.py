"""Which exceptions are worth another attempt."""

from __future__ import annotations

from pathlib import Path

import pytest

from evertick import dag, shell, task
from evertick.domain.errors import InvalidDag
from evertick.domain.retry import RetryPolicy
from tests.executors.local.executor_rig import rig

SOURCE = """
import sys
from evertick import *


class Own(LookupError): ...


def fails(error):
    def body():
        raise error
    return body


async def waits():
    raise TimeoutError("slow")


ON = {"retry_on": [ConnectionError, "d.Own", OSError], "never_on": "ConnectionRefusedError", "retries": 3}


@dag
def d():
    for name, error in {
        "reset": ConnectionResetError(), "refused": ConnectionRefusedError(), "other": ValueError(), "own": Own(),
        "group": ExceptionGroup("g", [ValueError(), ConnectionResetError()]), "exits": SystemExit(3),
        "asks": RetryAfter(5), "fail": Fail("x", no_retry=False), "memory": MemoryError(),
    }.items():
        task(name=name, **ON)(fails(error))()
    task(name="waits", **ON)(waits)()
    task(name="plain", never_on=[KeyError])(fails(ValueError()))()
"""


async def test_an_exception_decides_whether_it_is_tried_again(tmp_path: Path) -> None:
    async with rig(tmp_path, SOURCE) as made:
        final = {}
        for name in ("reset", "refused", "other", "own", "group", "exits", "asks", "fail", "memory", "waits", "plain"):
            outcome = await made.run(name)
            assert outcome.kind == "failed"
            final[name] = outcome.no_retry
    assert [name for name, is_final in final.items() if is_final] == ["refused", "other", "exits", "memory"]


def test_the_policy_is_part_of_the_version() -> None:
    @task(retries=2, retry_on=[ConnectionError], never_on=["a.B"])
    def work() -> None: ...

    @dag
    def d() -> None:
        work()

    policy = d().spec.tasks[0].retry
    assert (policy.retry_on, policy.never_on) == (("builtins.ConnectionError",), ("a.B",))
    assert RetryPolicy.from_json(policy.to_json()) == policy


@pytest.mark.parametrize("wrong", [5, [int], ["no name"], "Timeout", [None], ["a."]])
def test_what_is_no_exception_is_refused_where_it_is_written(wrong: object) -> None:
    with pytest.raises(InvalidDag, match="retry_on is"):
        task(retry_on=wrong)(lambda: None)


def test_a_command_raises_no_exceptions() -> None:
    @dag
    def d() -> None:
        shell("x", "true", retry_on=[ValueError])

    with pytest.raises(InvalidDag, match="retry_on is for Python tasks"):
        d()
