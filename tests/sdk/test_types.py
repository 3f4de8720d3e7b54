"""DAG files under a type checker: ordinary ones pass `mypy --strict`, and wrong calls of tasks are reported."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from evertick.domain.dags.params import Param
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.states import TriggerRule
from evertick.sdk.dag import DagOptions
from evertick.sdk.options import RuleName
from evertick.sdk.params import ParamOptions

HEAD = """
from typing import Any, Literal
from evertick import Param, TaskContext, approval, dag, http, setup, shell, task, task_group, teardown

@task
def fetch() -> list[int]:
    return [1]

@task(retries=2, retry_delay="5 minutes")
def report(rows: list[int], title: str = "all") -> int:
    return len(rows)

@task
def square(x: int) -> int:
    return x * x

@task
async def slow(context: TaskContext) -> None: ...

@task(trigger_rule="all_done")
def last(rows: list[int], title: str, *, context: TaskContext) -> None: ...

@task.sensor(interval="30s")
def there(path: str) -> bool:
    return True

@task.branch
def pick(rows: list[int]) -> str:
    return "report"

@teardown
def clean(made: str) -> None: ...

@setup
def make() -> str:
    return "x"
"""
GOOD = """
@dag(schedule="@daily", misfire="latest", overlap="queue_one", params={"day": Param("monday")})
def daily(rows: int = Param(100, minimum=1), region: Literal["eu", "us"] = Param("eu")) -> None:
    found = fetch()
    done = [report(found), report(rows=found, title="some"), report.override(name="again")(found)]
    square.expand(x=found) >> slow() >> pick(found) >> done
    last(found["rows"], "x")
    report([square(rows), square(x=2)], region)
    report(http("get", "https://x.example"), approval("Go?")["by"])
    made = make()
    there("x") >> [made, shell("ls")] >> clean(made).as_teardown(setups=made)
    with task_group("more", max_active=2) as more:
        report.partial(title="x").expand(rows=[[1], [2]])
    found >> more

number: int = report.function([1], "x")
daily.test(params={"rows": 5})
"""
WRONG = {
    "report()": "Missing positional argument",
    "report(fetch(), 3)": 'incompatible type "int"; expected "str"',
    "report(fetch(), nope=1)": 'Unexpected keyword argument "nope"',
    "report(3)": 'incompatible type "int"; expected "list[int]"',
    'square.function("x", 2)': "Too many arguments",
    'square.function("x")': 'incompatible type "str"; expected "int"',
    "there()": "Missing positional argument",
    "pick(fetch(), 1)": "Too many arguments",
    "fetch(1)": "Too many arguments",
    "report.override(retris=2)": 'Unexpected keyword argument "retris"',
    'task(trigger_rule="all_sucess")': "No overload variant",
    'dag(misfire="last")': "No overload variant",
    'dag(overlap="queue")': "No overload variant",
    "Param(1, min=2)": 'Unexpected keyword argument "min"',
}


@pytest.mark.long
def test_type_checkers_accept_ordinary_dag_files_and_report_wrong_calls(tmp_path: Path) -> None:
    """One run of mypy for all samples: loading Evertick's own types takes most of its time."""
    lines = (HEAD + GOOD).splitlines()
    wrong_from = len(lines) + 1
    (tmp_path / "sample.py").write_text("\n".join([*lines, *WRONG]) + "\n")
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path}", f"--python-executable={sys.executable}"]
    # In a process of its own: mypy raises the recursion limit of its process.
    command = [sys.executable, "-m", "mypy", *options, "--follow-imports=silent", str(tmp_path / "sample.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    said, failed = done.stdout, done.stderr
    found: dict[int, str] = {}
    for line, message in re.findall(r"sample\.py:(\d+): (?:error|note): (.*)", said):
        found[int(line)] = found.get(int(line), "") + message
    assert not failed, failed
    assert {line: text for line, text in found.items() if line < wrong_from} == {}
    got = {use: found.get(wrong_from + place, "") for place, use in enumerate(WRONG)}
    assert {use: text for use, text in got.items() if WRONG[use] not in text} == {}, textwrap.indent(said, "  ")


def test_the_texts_that_type_checkers_know_are_those_of_the_engine() -> None:
    hints = get_type_hints(DagOptions)
    assert sorted(get_args(RuleName)) == sorted(TriggerRule)
    for option, kind in (("misfire", MisfirePolicy), ("overlap", OverlapPolicy)):
        texts = [text for part in get_args(hints[option]) for text in get_args(part)]
        assert sorted(texts) == sorted(kind)
    assert ParamOptions.__annotations__.keys() == {field.name for field in fields(Param)} - {"default"}
