"""DAG files under type checkers: ordinary ones pass mypy and pyright, and wrong arguments, results and options are reported."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from evertick.domain.attempt import Isolation
from evertick.domain.dags.params import Param
from evertick.domain.dags.spec import DatabaseOutagePolicy
from evertick.domain.dags.waits import TimeoutAction
from evertick.domain.retry import Backoff
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.states import TriggerRule
from evertick.sdk import dag as sdk_dag
from evertick.sdk import options as sdk_options
from evertick.sdk.dag import DagOptions
from evertick.sdk.decorators import SensorOptions
from evertick.sdk.notify import NOTICE_OPTIONS
from evertick.sdk.options import RuleName, TaskOptions
from evertick.sdk.params import ParamOptions
from tests.source_tree import ROOT, SOURCE

HEAD = """
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal
from evertick import (Asset, Param, TaskContext, after, approval, chain, dag, http, notify, push, setup, shell, task,
    task_group, teardown, wait_for)

@dataclass
class Order:
    number: int

@task
def fetch() -> list[int]:
    return [1]

@task(retries=2, retry_delay="5 minutes", on_failure=notify.email("ops@example.com"))
def report(rows: list[int], title: str = "all") -> int:
    return len(rows)

@task
def square(x: int) -> int:
    return x * x

@task
async def ship(order: Order) -> dict[str, Any]:
    return {}

@task
def tell(number: int, options: dict[str, Any]) -> None: ...

@task
def untyped(found):  # type: ignore
    return found

@task
def anything(x: int) -> Any: ...

@task
async def slow(context: TaskContext) -> None: ...

@task(trigger_rule="all_done")
def last(rows: list[int], title: str, *, context: TaskContext) -> None: ...

@task(outputs=["first"])
def several() -> list[Order]:
    push("first", 1)
    return []

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
    [tell(square(found[0]), {}), square.expand(x=found)] >> slow() >> pick(found) >> done
    report(square.expand(x=[1, 2]))
    report.expand_kwargs([{"rows": [1]}]) >> tell(3, ship(Order(several()["first"])))
    report([square(rows), square(x=2)], region)
    report(http("get", "https://x.example"), approval("Go?")["by"])
    report(untyped(1), anything(2))
    last(rows=found, title="x")
    made = make()
    there("x") >> [made, shell("ls")] >> clean(made).as_teardown(setups=made)
    with task_group("more", max_active=2) as more:
        report.partial(title="x").expand(rows=[[1], [2]])
    found >> more >> wait_for("1h")
    chain(fetch(), [square(1), more], square(2))

@dag(schedules={"night": "@daily", "on_data": {"schedule": after(Asset("orders")), "params": {"rows": 5}}}, on_failure=[print])
def several_schedules() -> None:
    fetch()

number: int = report.function([1], "x")
daily.test(params={"rows": 5})
"""
# What mypy reports for a line, and what pyright does.
WRONG = {
    "report()": ("Missing positional argument", "Argument missing"),
    "report(fetch(), 3)": ('incompatible type "int"; expected "str"', '"Literal[3]" cannot be assigned'),
    "report(fetch(), nope=1)": ('Unexpected keyword argument "nope"', 'No parameter named "nope"'),
    "report(3)": ('incompatible type "int"; expected "list[int]"', '"Literal[3]" cannot be assigned'),
    "report(report(fetch()))": ('incompatible type "int"; expected "list[int]"', '"int" cannot be assigned'),
    "report(tell(1, {}))": ('incompatible type "TaskRef"; expected "list[int]"', '"TaskRef" cannot be assigned'),
    "square(fetch())": ('incompatible type "list[int]"; expected "int"', '"list[int]" cannot be assigned'),
    "square(ship(Order(1)))": ('incompatible type "dict[str, Any]"; expected "int"', '"dict[str, Any]" cannot be'),
    "tell(report.expand(rows=[]), {})": ('incompatible type "list[int]"; expected "int"', '"list[int]" cannot be'),
    'square(fetch()["x"])': ('No overload variant of "__getitem__"', 'No overloads for "__getitem__"'),
    'square.function("x", 2)': ("Too many arguments", "Expected 1 positional argument"),
    'square.function("x")': ('incompatible type "str"; expected "int"', "\"Literal['x']\" cannot be assigned"),
    "there()": ("Missing positional argument", "Argument missing"),
    "pick(fetch(), 1)": ("Too many arguments", "Expected 1 positional argument"),
    "fetch(1)": ("Too many arguments", "Expected 0 positional arguments"),
    "report.override(retris=2)": ('Unexpected keyword argument "retris"', 'No parameter named "retris"'),
    'task(trigger_rule="all_sucess")': ("No overload variant", "\"Literal['all_sucess']\" cannot be assigned"),
    "task(execution_timeout=5)": ('keyword argument "execution_timeout"', 'No overloads for "__call__"'),
    'task(retry_backoff="doubling")': ("No overload variant", "\"Literal['doubling']\" cannot be assigned"),
    'dag(misfire="last")': ("No overload variant", "\"Literal['last']\" cannot be assigned"),
    'dag(overlap="queue")': ("No overload variant", "\"Literal['queue']\" cannot be assigned"),
    "dag(schedule=5)": ("No overload variant", '"Literal[5]" cannot be assigned'),
    "dag(default_args={})": ('Unexpected keyword argument "default_args"', 'No overloads for "dag"'),
    'task(on_failure="ops@example.com")': (
        '"on_failure" to "__call__" of "TaskDecorator" has incompatible',
        "\"Literal['ops@example.com']\" cannot be",
    ),
    "daily(3, 4, 5)": ("Too many arguments", "Expected 2 positional arguments"),
    'shell("ls", retris=2)': ('Unexpected keyword argument "retris"', 'No parameter named "retris"'),
    'there.override(on_timeout="skip")': ('Unexpected keyword argument "on_timeout"', "No parameter named"),
    'wait_for("1h", retries=2)': ('Unexpected keyword argument "retries"', 'No parameter named "retries"'),
    "Param(1, min=2)": ('Unexpected keyword argument "min"', 'No parameter named "min"'),
}
MYPY = ["--strict", "--config-file=", "--ignore-missing-imports", "--follow-imports=silent"]
# The documentation shows functions without annotations, too.
RELAXED = '# mypy: disable-error-code="no-untyped-def,no-untyped-call,untyped-decorator,type-arg,no-any-return"'
PYRIGHT = {"typeCheckingMode": "standard", "reportMissingImports": False, "reportUnusedExpression": False}


def doc_snippets() -> Iterator[tuple[str, str]]:
    """The Python of the documentation, each with a name for its file. Its lines keep their numbers."""
    for page in sorted((ROOT / "docs").rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, block.start()) + 1
            yield f"doc_{page.stem.replace('-', '_')}_{line}.py", RELAXED + "\n" * line + block[1]


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all samples: loading Evertick's own types takes most of the time of a type checker."""
    folder = tmp_path_factory.mktemp("samples")
    (folder / "sample.py").write_text("\n".join([*(HEAD + GOOD).splitlines(), *WRONG]) + "\n")
    for name in ("daily_report.py", "test_daily_report.py"):
        (folder / name).write_text((SOURCE / "cli" / "project" / f"{name}.txt").read_text())
    for name, text in doc_snippets():
        (folder / name).write_text(text)
    (folder / "pyrightconfig.json").write_text(json.dumps(PYRIGHT))
    return folder


def run_mypy(folder: Path) -> list[tuple[str, int, str]]:
    """In a process of its own: mypy raises the recursion limit of its process."""
    options = [*MYPY, "--cache-dir=.cache", f"--python-executable={sys.executable}", "."]
    done = subprocess.run([sys.executable, "-m", "mypy", *options], cwd=folder, capture_output=True, text=True)
    assert not done.stderr
    found = re.findall(r"^(\w+\.py):(\d+): (?:error|note): (.*)", done.stdout, re.MULTILINE)
    return [(file, int(line), text) for file, line, text in found]


def run_pyright(folder: Path) -> list[tuple[str, int, str]]:
    options = ["--outputjson", "--level=error", f"--pythonpath={sys.executable}"]
    done = subprocess.run([sys.executable, "-m", "basedpyright", *options], cwd=folder, capture_output=True, text=True)
    found = json.loads(done.stdout)["generalDiagnostics"]
    return [(Path(each["file"]).name, each["range"]["start"]["line"] + 1, each["message"]) for each in found]


@pytest.mark.long
@pytest.mark.parametrize(("place", "check"), [(0, run_mypy), (1, run_pyright)], ids=["mypy", "pyright"])
def test_type_checkers_accept_ordinary_dag_files_and_report_wrong_ones(
    samples: Path, place: int, check: object
) -> None:
    assert callable(check)
    first = len((HEAD + GOOD).splitlines()) + 1
    said: dict[str, str] = dict.fromkeys(WRONG, "")
    unexpected = []
    for file, line, text in check(samples):
        if file == "sample.py" and line >= first:
            said[list(WRONG)[line - first]] += text
        else:
            unexpected.append(f"{file}:{line}: {text}")
    assert not unexpected, "\n".join(unexpected)
    assert {use: text for use, text in said.items() if WRONG[use][place] not in text} == {}
    assert len(list(doc_snippets())) > 20


def test_the_texts_that_type_checkers_know_are_those_of_the_engine() -> None:
    of_dag, of_task = get_type_hints(DagOptions), get_type_hints(TaskOptions)
    assert sorted(get_args(RuleName)) == sorted(TriggerRule)
    for hint, kind in (
        (of_dag["misfire"], MisfirePolicy),
        (of_dag["overlap"], OverlapPolicy),
        (of_task["retry_backoff"], Backoff),
        (of_task["isolation"], Isolation),
        (of_task["on_lost_contact"], DatabaseOutagePolicy),
        (get_type_hints(SensorOptions)["on_timeout"], TimeoutAction),
    ):
        assert sorted(text for part in get_args(hint) for text in get_args(part)) == sorted(kind)
    assert ParamOptions.__annotations__.keys() == {field.name for field in fields(Param)} - {"default"}


def test_every_option_that_is_read_has_a_type_and_every_typed_option_is_read() -> None:
    notices = set(NOTICE_OPTIONS)
    assert set(TaskOptions.__annotations__) == {"name", "max_instances", *sdk_options._READERS, *notices}
    read_elsewhere = {"name", "schedule", "schedules", *sdk_dag._WHEN, *(notices - {"on_skipped"})}
    assert set(DagOptions.__annotations__) == {*sdk_dag._READERS, *read_elsewhere}
