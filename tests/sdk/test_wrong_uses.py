"""A walk through all that a DAG file can get wrong: each is refused when the file is loaded, where it can be known by then, else by
the attempt, with a text that names the thing and says what to do. The commands and the API have walks of their own."""

from __future__ import annotations

import threading
from contextvars import copy_context
from pathlib import Path
from typing import NamedTuple

import pytest

from evertick.attempts.body import context_of, run_body
from evertick.attempts.protocol import AttemptIO, Report, Start
from evertick.bundles.loader_process import load
from evertick.domain.attempt import OutcomeKind
from evertick.domain.dags.spec import from_json
from evertick.domain.dags.validation import check_run_params
from evertick.domain.errors import InvalidParams
from evertick.sdk.runtime import BoundTask, Done
from evertick.storage.result_files import ResultFiles

LONGEST_TEXT = 700
HEAD = """from datetime import UTC, datetime, timedelta
from evertick import *
def plain(): ...
def tell(event): ...
@task
def one(): return 1
@task
def take(x=None, y=None): return x
@task.branch
def pick(): return "one"
"""


class Wrong(NamedTuple):
    """`text` is what stands in the file. The message must have all of `words` in it."""

    text: str
    words: tuple[str, ...]


def body(text: str, *words: str) -> Wrong:
    """Within the function of a DAG."""
    lines = "".join(f"    {line}\n" for line in text.split("\n"))
    return Wrong(f"@dag\ndef sample():\n{lines}", words)


def of_task(options: str, *words: str) -> Wrong:
    return Wrong(f"@task({options})\ndef load(): ...\n@dag\ndef sample(): load()\n", ("'load'", *words))


def of_dag(options: str, *words: str) -> Wrong:
    return Wrong(f"@dag({options})\ndef sample(): one()\n", ("'sample'", *words))


def of_param(declared: str, *words: str) -> Wrong:
    return of_dag(f'params={{"rows": {declared}}}', "'rows'", *words)


def of_result(use: str, *words: str) -> Wrong:
    """A use of a task's result in the function of a DAG, where it is not known yet."""
    return body(f"rows = one()\n{use}", "the result of task 'one' is known only after the task has run", *words)


FILES: dict[str, list[Wrong]] = {
    "results used too early": [
        of_result("x = 1 if rows else 2", "pass it to a task", "@task.branch"),
        of_result("take(not rows)", "@task.short_circuit"),
        of_result("take(rows == 3)", "pass it to a task"),
        of_result("take(rows != 3)", "pass it to a task"),
        of_result("take(3 in [1, 2] or rows in [3])", "pass it to a task"),
        of_result("take(rows > 2)", "pass it to a task"),
        of_result("take(2 <= rows)", "pass it to a task"),
        of_result("shell('x', f'echo {rows}')", "a text", "inputs="),
        of_result("take(f'{rows:>5}')", "a text"),
        of_result("take('rows: %s' % rows)", "a text"),
        of_result("take(str(rows))", "a text"),
        of_result("take(len(rows))", "count it", ".expand(x=...)"),
        of_result("take(3 in rows)", "loop over it"),
        of_result("take(rows.count)", "no attribute 'count'", "pass it to a task"),
        of_result("take(rows.name)", "no attribute 'name'"),
        of_result("take(rows + 1)", "pass it to a task"),
        of_result("take(1 - rows)", "pass it to a task"),
        of_result("take('a' + rows)", "pass it to a task"),
        of_result("take(rows * 2)", "pass it to a task"),
        of_result("take(int(rows))", "pass it to a task"),
        of_result("take([1, 2][rows])", "pass it to a task"),
        body("take(one()['n'] == 3)", "the result['n'] of task 'one' is known only after the task has run"),
    ],
    "parameters in the signature": [
        Wrong(
            f"@dag\ndef sample(rows=Param(5)):\n    {use}\n", ("param 'rows' is known only when a run starts", *words)
        )
        for use, *words in (
            ("take(1 if rows else 2)", "@task.branch"),
            ("take(rows == 3)", "pass it to a task"),
            ("take(f'{rows}')", "a text"),
            ("take(rows['x'])", "pass it to a task"),
            ("take(rows.x)", "no attribute 'x'"),
            ("take(rows - 1)", "pass it to a task"),
        )
    ],
    "names": [
        body('take.override(name="x")(1)\ntake.override(name="x")(2)', "'x'", "give this one a different name"),
        body(
            'take = globals()["take"].override(name="x")\ntake(1), take.override(retries=1)(2)', "'x'", "different name"
        ),
        body('wait_until(lambda p: 1, name="x")\nwait_until(lambda p: 1, name="x")', "'x'", "different name"),
        body('take.override(name="größe")(1)', "'größe'", "ASCII letters"),
        body("task(lambda: 1)()", "a lambda has no name for its task", "task(name="),
        Wrong("dag(lambda: one())\n", ("a lambda has no name for its DAG", "dag(name=")),
    ],
    "groups": [
        body('with task_group("g") as g: pass\ng >> one()', "'g'", "has no tasks"),
        body('with task_group("g") as g:\n    one()\n    g >> one()', "'g'", "after its `with` block"),
        body('with task_group("a b"): one()', "'a b'", "letters, digits"),
        body('with task_group("g", retries=-1): one()', "'g'", "retries is -1", "from 0 to 100"),
        body('with task_group("g", max_active=0): one()', "'g'", "max_active is 0", "1 or more"),
        body('with task_group("g", retry=2): one()', "'g'", "'retry'", "did you mean 'retries'?"),
        body('g = task_group("g")\nwith g: one()\nwith g: one()', "'g'", "was already entered", "create a new one"),
        body('with task_group("g"): one()\nwith task_group("g"): one()', "'g'"),
        body(
            'with task_group("a", retries=1):\n    with task_group("b", retries=1): one()',
            "'a.b'",
            "'a'",
            "keep one of them",
        ),
        body(
            'with task_group("g", retries=1):\n    a, b = one(), take()\nc = one()\na >> c >> b',
            "'g'",
            "'one'",
            "move that task into the group",
        ),
        body("task_group(7).__enter__()", "7", "name"),
        body("one >> take()", "'one'", "must be called", "one() >> ..."),
        body('one() >> "take"', "'take'", "call the task first"),
    ],
    "mapping": [
        body("take.expand()", "'take'", "give it at least one list"),
        body('take.expand(x="abc")', "'take'", "x must be a list", "'abc'"),
        body("take.expand(x={1: 2})", "'take'", "x is a dict", "list(x.items())"),
        body("take.expand(z=[1])", "'take'", "'z'"),
        body('take.expand(x=one()["rows"])', "'take'", "a part of a result", "the list itself"),
        body("take.expand_kwargs([1])", "'take'", "a list of dicts", "1"),
        body("take.partial(x=1).expand(x=[1])", "'take'", "'x' twice"),
        body("take.expand(x=[one(), one()])", "'take'", "contains results of tasks", "let one task return"),
        body("take.expand_zip(x=[1], y=[1, 2])", "'take'", "of equal length", "1, 2"),
        body("take.override(max_instances=2).expand(x=[1, 2, 3])", "'take'", "3 instances", "raise max_instances"),
        body("take.override(max_instances='many').expand(x=[1])", "'take'", "max_instances is 'many'"),
        body("for each in one(): take(each)", "one", "known only after the task has run"),
        body("take.expand(x=one)", "'take'", "x must be a list", "<task one>"),
        body("one() >> take.partial(x=1)", "take", "call the task first"),
    ],
    "branches": [
        body("pick()", "'pick'", "no downstream tasks to choose from", "pick() >>"),
        body("pick.expand()", "'pick'", "give it at least one list"),
        Wrong('@task.short_circuit(ignore_downstream_trigger_rules="no")\ndef load(): ...\n', ("True or False",)),
        Wrong(
            "@task.branch\ndef go(x): ...\n@dag\ndef sample(): go.expand(x=[1]) >> one()\n",
            ("'go'", "cannot be mapped"),
        ),
        body(
            'with task_group("g", retries=1):\n    a = pick()\na >> one()', "'g'", "'g.pick'", "can skip tasks outside"
        ),
        of_task('trigger_rule="all_sucess"', "did you mean 'all_success'?"),
        Wrong("@task.brunch\ndef go(): ...\n", ("brunch",)),
    ],
    "setup and teardown": [
        body("one().as_teardown(setups=take)", "'one'", "setups must be called tasks", "setups=create()"),
        body("one().as_teardown(setups=['take'])", "'one'", "setups must be called tasks", "'take'"),
        body("one().as_teardown(on_failure_fail_dagrun='yes')", "'one'", "True or False"),
        body("a = one().as_setup()\na.as_teardown()\na >> take()", "'one'", "make two tasks of it"),
        Wrong("@teardown(on_failure_fail_dagrun=1)\ndef clean(): ...\n", ("on_failure_fail_dagrun", "True or False")),
        Wrong(
            "@setup\ndef make(x): ...\n@dag\ndef sample(): make.expand(x=[1]) >> one()\n",
            ("'make'", "cannot be mapped"),
        ),
        Wrong("@setup(retris=1)\ndef make(): ...\n", ("'make'", "did you mean 'retries'?")),
    ],
    "starting a DAG": [
        body("trigger_dag(5)", "the name of a DAG", "5"),
        body('trigger_dag("sample")', "trigger_sample", "each run would start the next"),
        body('trigger_dag("other", params=[1])', "'other'", "params must be a dict"),
        body('trigger_dag("other", wait="yes")', "'other'", "wait must be True or False"),
        body('trigger_dag("other", retries=2)', "trigger_other", "'other'", "retries"),
        body('trigger_dag("other", params={"x": object()})', "'other'", "'x'", "must be a constant"),
        body('trigger_dag("other", params={"x": float("nan")})', "'other'", "'x'", "must be a constant"),
        body('trigger_dag("other", pool="p")', "'other'", "pools"),
        body('trigger_dag("other", parms={})', "'parms'"),
        body('trigger_dag("other", timeout="soon")', "timeout is 'soon'"),
        Wrong('trigger_dag("other")\n', ("'other'", "outside a DAG", "@dag")),
    ],
    "waiting": [
        body("wait_until(datetime(2030, 1, 1))", "has no time zone", "tzinfo=UTC"),
        body('wait_until("25:00")', "'25:00'", '"08:00"'),
        body("wait_until(timedelta(hours=1))", "wait_until takes a datetime"),
        body("wait_until(one)", "wait_until takes a datetime", "<task one>"),
        body("wait_until(5)", "wait_until takes a datetime", "5"),
        body('wait_for("soon")', "'soon'"),
        body("wait_for(-1)", "-1", "0 or more"),
        body("wait_for(True)", "True", "seconds"),
        body("wait_for(10**12)", "wait_for", "at most ten years"),
        body('wait_for("1s", retries=2)', "'retries'", "trigger_rule"),
        body('wait_for_event("")', "1 to 200 printable"),
        body("wait_for_event(5)", "the name of an event", "5"),
        body('wait_for_event("file-{params.day}")', "'day'", "add it to params"),
        body('wait_for_event("file-{day}")', "file-{day}"),
        body('wait_for_event("e", timeout=0)', "timeout is 0 s", "more than 0"),
        body('wait_for_event("e", on_timeout="explode")', "'explode'", "one of fail, skip"),
        body('wait_for_event("e", lookback="-1d")', "lookback is '-1d'"),
        Wrong(
            "@task.sensor(interval=0.1)\ndef s(): ...\n@dag\ndef sample(): s()\n", ("'s'", "from 1 second to 7 days")
        ),
        Wrong("@task.sensor(backoff='x')\ndef s(): ...\n", ("backoff is 'x'", "from 1 to 10")),
        Wrong("@task.sensor(backoff=0.5)\ndef s(): ...\n@dag\ndef sample(): s()\n", ("'s'", "backoff is 0.5")),
        Wrong("@task.sensor(on_timeout='x')\ndef s(): ...\n", ("on_timeout is 'x'", "fail, skip")),
        Wrong("@task.sensor(intervall=5)\ndef s(): ...\n", ("'s'", "'intervall'")),
        Wrong(
            "@task.sensor(interval='1h', max_interval='1m')\ndef s(): ...\n@dag\ndef sample(): s()\n",
            ("'s'", "max_interval is 60 s", "from the interval"),
        ),
    ],
    "approvals": [
        body("approval(5)", "approval takes a title", "5"),
        body('approval("")', "title", "printable"),
        body('approval("Go?", form=["x"])', "Go?", "form must be a dict"),
        body('approval("Go?", form={"n": Param(1, minimum="x")})', "Go?", "'n'", "must be a number"),
        body('approval("Go?", approvers="boss")', "Go?", "approvers is 'boss'", "one of"),
        body('approval("Go?", on_reject="maybe")', "Go?", "on_reject is 'maybe'", "fail, skip"),
        body('approval("Go {params.x}?")', "'x'", "add it to params"),
        body('approval("Go?", forms={})', "'forms'"),
    ],
    "results": [
        of_task('outputs="rows"', "outputs is 'rows'", "a list of names"),
        of_task('outputs=[""]', "is not a valid name for an output"),
        of_task("outputs=[5]", "outputs is [5]"),
        Wrong(
            '@task(outputs=["rows"])\ndef load(): ...\n@dag\ndef sample(): take(load()["row"])\n',
            ("'load'", "no output 'row'", "rows"),
        ),
        body("take(one()[1.5])", "one", "1.5"),
        body("take(one)", "<task one>", "load(extract())"),
        body("take({one()})", "set", "plain list, tuple or dict"),
        body("take(1, 2, 3)", "'take'", "too many positional"),
        body("take(z=1)", "'take'", "'z'"),
    ],
    "params": [
        of_param('Param(1, minimum="x")', "must be a number"),
        of_param("Param(5, maximum=3)", "at most 3"),
        of_param("Param(5, choices=[1, 2])", "one of 1, 2"),
        of_param("Param(5, choices=7)", "choices must be a list"),
        of_param('Param("x", minimum=1)', "are for numbers", "string"),
        of_param("Param(5, min_length=1)", "are for texts and lists", "integer"),
        of_param('Param("x", max_length="y")', "a length must be a whole number"),
        of_param('Param("x", pattern="(")', "not a regular expression"),
        of_param("Param(5, pattern='x')", "pattern is for texts"),
        of_param('Param(5, type="whole")', "'whole'", "integer"),
        of_param("Param(object())", "not JSON"),
        of_param("Param(float('inf'))", "not JSON"),
        of_param("Param(1, description=5)", "description must be text"),
        of_dag('params={"a b": 1}', "a b", "letters, digits"),
        of_dag("params=[1]", "params is [1]", "a dict of"),
        of_dag("params=int")._replace(words=("params=int", "pydantic model", "pass a dict")),
        of_dag('params={f"p{n}": 1 for n in range(201)}', "201 params", "at most 200"),
        Wrong("@dag\ndef sample(day=Param('x')):\n    if day: one()\n", ("'day'", "known only when a run starts")),
        Wrong("@dag\ndef sample(day=Param('x')): one()\nsample('y')\n", ("'day'", "cannot be set here")),
        Wrong("@dag\ndef sample(day): one()\n", ("'sample'", "'day'", "give its arguments defaults")),
        of_param("Param(1, minimun=0)", "minimun")._replace(words=("minimun",)),
    ],
    "templates": [
        body('shell("say", "echo {{ params.x")', "'say'", "not a valid template", "template=False"),
        body('shell("say", "echo {{ row }}")', "'say'", "'row'", "params"),
        body(
            'shell("say", "echo {{ params.x }}")', "'say'", "params.x", "does not declare", "declare it as x=Param(...)"
        ),
        body('shell("say", "echo {{ secrets.token }}")', "'say'", "secrets.token", "secrets=['token']"),
        body('shell("say", "echo {{ inputs.rows }}", inputs={"row": one()})', "'say'", "inputs.rows"),
        body('http("ask", "https://x.example/{{ params.x }}")', "'ask'", "params.x"),
        body('http("ask", "https://x.example/", json={"a": ["{{ oops }}"]})', "'ask'", "'oops'"),
        body('shell("say", "echo {% if %}")', "'say'", "not a valid template"),
    ],
    "retries": [
        of_task("retries=-1", "retries is -1", "0 or more"),
        of_task("retries='3'", "retries is '3'", "a whole number"),
        of_task("retries=10**6", "1000000", "from 0 to 10000"),
        of_task("retry_delay=-5", "retry_delay is -5"),
        of_task("retry_on='NoSuchError'", "'NoSuchError'", "add its module"),
        of_task("retry_on=5", "retry_on is 5", "exception classes or their names"),
        of_task("never_on=[int]", "int", "exception class"),
        of_task("retry_jitter=2", "retry_jitter is 2", "from 0 to 1"),
        of_task("retry_backoff='exponentail'", "did you mean 'exponential'?"),
        of_dag("retries=101", "retries is 101", "0 to 100"),
        of_dag("retries='x'", "retries is 'x'", "a whole number"),
        of_task("timeout='soon'", "timeout is 'soon'"),
        of_task("timeout=0", "timeout is 0", "more than 0"),
        of_task("finish_within=-1", "finish_within is -1"),
    ],
    "callbacks and sinks": [
        of_task("on_failure='ops@example.com'", "on_failure is 'ops@example.com'", "notify.email"),
        of_task("on_failure=[3]", "3 is neither a sink", "nor a function"),
        of_task("on_failure=[notify.email('a@b.example')] * 21", "at most 20"),
        Wrong("task(on_failure=lambda event: 0)(plain)\n", ("cannot be a callback", "name=")),
        Wrong("task(on_failure=plain)(plain)\n", ("'plain'", "must take one argument")),
        Wrong("notify.webhook('example.com')\n", ("notify.webhook", "'example.com'")),
        Wrong("notify.webhook()\n", ("notify.webhook", "needs one address")),
        Wrong("notify.webhook('https://me:x@example.com/')\n", ("password", "secret")),
        Wrong("notify.slack()\n", ("notify.slack", "needs one address")),
        Wrong("notify.email('nobody')\n", ("notify.email", "nobody")),
        Wrong("notify.email()\n", ("notify.email", "1 to 20")),
        Wrong("notify.email('a@b.example', every_time='yes')\n", ("notify.email", "every_time")),
        Wrong(
            "@task(on_failure=notify.call(tell, timout=5))\ndef load(): ...\n@dag\ndef sample(): load()\n",
            ("'tell'", "did you mean 'timeout'?"),
        ),
        Wrong(
            "@task(on_failure=[tell, notify.call(lambda e: 0, name='tell')])\ndef load(): ...\n@dag\ndef sample(): load()\n",
            ("two callbacks named 'tell'", "name='other'"),
        ),
        of_task("on_deadline=tell", "on_deadline needs a deadline", "finish_within='30m'"),
        of_dag("on_skipped=tell", "no option 'on_skipped'"),
        of_dag("start_within=0", "start_within is 0", "more than 0"),
    ],
    "variables, connections, secrets": [
        of_task("secrets='token'", "secrets is 'token'", "a list of names"),
        of_task("secrets=['a b']", "'a b'", "is not a valid name for a secret"),
        of_task("variables=[5]", "variables is [5]"),
        of_task("connections={'db': 1}.values()", "connections"),
        of_task("secret=['x']", "did you mean 'secrets'?"),
        of_dag("secrets=['x']", "no option 'secrets'"),
    ],
    "kinds": [
        body('shell("")', "needs a command"),
        body("shell(5)", "needs a command"),
        body('shell("x", "true", env=[1])', "'x'", "env must be a dict"),
        body('shell("x", "true", env={"A=B": 1})', "'x'", "'A=B'"),
        body('shell("x", "true", retry_on=OSError)', "'x'", "retry_on is for Python tasks"),
        body('shell("x", "true", comand=1)', "'x'", "'comand'"),
        body('shell("x", "true\\0")', "'x'", "without NUL"),
        body('http("x", "ftp://x.example")', "'x'", "http:// or https://"),
        body('http("x", "https://me:pw@x.example")', "'x'", "password", "secret"),
        body('http("x", "https://x.example", method="FETCH")', "'x'", "'FETCH'", "GET"),
        body('http("x", "https://x.example", json=1, body="y")', "'x'", "not both"),
        body('http("x", "https://x.example", expect="ok")', "'x'", "expect"),
        body('http("x", "https://x.example", expect=999)', "'x'", "999 is not an HTTP status"),
        body('http("x", "https://x.example", request_timeout=0)', "'x'", "more than 0"),
        body('http("x", "https://x.example", headers={"a": "b\\nc"})', "'x'", "is not a valid header"),
        body('http("x", "https://x.example", response="xml")', "'x'", "'xml'", "json"),
        body('http("x", "https://x.example", json={"at": datetime(2030, 1, 1)})', "'x'", "must be JSON"),
        body('http("x", "https://x.example", metod="GET")', "'x'", "'metod'"),
        body('program("x", "./score --fast")', "'x'", "must be a list", "shell()"),
        body('program("x", [])', "'x'", "must be a list"),
        body('program("x", ["a", 5])', "'x'", "5", "env="),
        body("program('x', ['a'], env={'': 1})", "'x'", "env has the key ''"),
    ],
    "dags and schedules": [
        Wrong("@dag\ndef sample(): pass\n", ("'sample'", "call at least one task")),
        Wrong("@dag\nasync def sample(): one()\n", ("'sample'", "only its tasks can be async")),
        Wrong("@task\ndef gen(): yield 1\n", ("'gen'", "return a list")),
        Wrong("one()\n", ("'one'", "outside a DAG", "one.function(...)")),
        Wrong("task(5)\n", ("5", "@task takes a function")),
        Wrong("@dag('x')\ndef sample(): one()\n", ("'x'", "@dag takes a function")),
        of_dag("name='a b'", "letters, digits")._replace(words=("letters, digits",)),
        of_dag("schedule='61 * * * *'", "61"),
        of_dag("schedule='@dayly'", "@dayly"),
        of_dag("timezone='Mars/Olympus'", "Mars/Olympus"),
        of_dag("shedule='@daily'", "did you mean 'schedule'?"),
        of_dag("schedule='@daily', schedules={'a': '@daily'}", "not both"),
        of_dag("schedules={'a': {'schedule': '@daily', 'params': {'x': 1}}}", "'a'", "unknown param 'x'"),
        of_dag("max_active_runs=0", "max_active_runs is 0", "from 1"),
        of_dag("tags='x'", "tags is 'x'", "a list"),
        of_dag("task_defaults={'retris': 1}", "did you mean 'retries'?")._replace(words=("did you mean 'retries'?",)),
        of_dag("task_defaults={'name': 'x'}", "without a name"),
        body("a, b = one(), take()\na >> b >> a", "one >> take >> one", "Remove one"),
        body("one()\nraise SystemExit(3)", "sys.exit(3)", "__main__"),
        Wrong(
            "@dag\ndef sample(): one()\n@dag(name='sample')\ndef other(): one()\n", ("two DAGs", "'sample'", "name=")
        ),
        Wrong("def broken(:\n", ("SyntaxError: ", ": def broken(:")),
        Wrong("import no_such_module\n", ("no_such_module",)),
    ],
}
ROWS = [(feature, number, row) for feature, rows in FILES.items() for number, row in enumerate(rows)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wrong")


@pytest.mark.parametrize(("feature", "number", "wrong"), ROWS, ids=[f"{row[0]} {row[1]}" for row in ROWS])
def test_a_file_that_is_wrong_is_refused_with_what_to_do(folder: Path, feature: str, number: int, wrong: Wrong) -> None:
    file = f"wrong_{feature.replace(' ', '_').replace(',', '')}_{number}.py"
    (folder / file).write_text(HEAD + wrong.text)
    found = load(folder, file)
    problem = found["problem"]
    assert isinstance(problem, dict), f"it was taken: {found['dags']}"
    message, line = str(problem["message"]), problem["line"]
    assert [word for word in wrong.words if word not in message] == [], message
    assert problem["file"] == file
    assert (isinstance(line, int) and line > HEAD.count("\n")) or "two DAGs" in message, (line, message)
    assert len(message) <= LONGEST_TEXT and "Traceback" not in message and "evertick.sdk" not in message, message


def test_the_walk_is_long_and_every_feature_has_five() -> None:
    assert len(ROWS) >= 120
    assert {feature: len(rows) for feature, rows in FILES.items() if len(rows) < 5} == {}


# What only a run can show ------------------------------------------------------------------------------------------------

RUN_HEAD = """
import math
from dataclasses import dataclass
from evertick import Fail, RetryAfter, Skip, current_context, push
class Rude(Exception):
    def __str__(self): raise ValueError("no")
def deep(n):
    value = []
    for _ in range(n): value = [value]
    return value
def itself():
    value = {}
    value["again"] = value
    return value
def local():
    @dataclass
    class Inner: x: int
    return Inner(1)
def names():
    for n in range(1001): push(f"n{n}", 1)
"""

BODIES: dict[str, tuple[str, ...]] = {
    "return object()": ("result is of type object", "return only"),
    "return math.nan": ("result is nan", "finite float"),
    "return [1, {'a': math.inf}]": ("result[1]['a'] is inf",),
    "return itself()": ("contains itself", "flatter"),
    "return deep(100_000)": ("nested too deeply", "flatter"),
    "return 'x' * 2_000_000": ("result too large: str of 2,000,002 bytes", "return its location"),
    "return {(1, 2): 3}": ("a key of type tuple",),
    "return local()": ("Inner", "top level of a module"),
    "return (x for x in [1])": ("of type generator", "return only"),
    "return open": ("of type builtin_function_or_method",),
    "return 1j": ("of type complex",),
    "push(5, 1)": ("push() takes a name", "5"),
    "push('', 1)": ("push() takes a name", "1 to 200"),
    "push('x' * 201, 1)": ("push() takes a name", "1 to 200"),
    "push('x', object())": ("output 'x' is of type object",),
    "names()": ("at most 1,000 names", "a dict or a list under one"),
    "raise Rude()": ("Rude", "cannot be shown"),
    "raise ValueError('x' * 10_000)": ("ValueError: xxx", "…"),
    "raise SystemExit('no disk')": ("exited with code 1: no disk",),
    "raise SystemExit(7)": ("exited with code 7",),
    "raise KeyboardInterrupt": ("KeyboardInterrupt",),
    "raise ExceptionGroup('both', [OSError('a')])": ("both (1 sub-exception)",),
    "raise RetryAfter('soon')": ("RetryAfter takes seconds or a timedelta", "'soon'"),
    "raise RetryAfter(-1)": ("RetryAfter takes seconds or a timedelta", "-1"),
    "raise RetryAfter(math.nan)": ("RetryAfter takes seconds or a timedelta", "nan"),
    "raise RetryAfter(None)": ("RetryAfter takes seconds or a timedelta", "None"),
    "raise Fail": ("Fail",),
    "1 / 0": ("ZeroDivisionError: division by zero",),
    "raise None": ("TypeError",),
    "current_context().secrets['token']": ("does not declare 'token'", "@task(secrets=['token'])"),
    "current_context().variables['region']": ("does not declare 'region'", "@task(variables=['region'])"),
    "current_context().connections['db']": ("does not declare 'db'", "@task(connections=['db'])"),
    "current_context().params['row']": ("declares no param 'row'", "it has: rows"),
}


def attempted(bound: BoundTask, files: ResultFiles) -> tuple[Report, list[str]]:
    said: list[str] = []
    start = Start(
        "start",
        1,
        1,
        0,
        -1,
        1,
        1,
        1,
        "sample",
        bound.name,
        "key",
        "2030-01-01T00:00:00+00:00",
        '{"rows": 1}',
        "{}",
        True,
        None,
        "",
    )
    desk = AttemptIO(say=lambda stream, text: said.append(text), files=files)
    # In a context of its own, as an attempt has: nobody else shall take its task for a running one.
    context = context_of(start, bound, threading.Event())
    return copy_context().run(run_body, start, bound, context, desk), said


@pytest.mark.parametrize("text", BODIES)
def test_a_body_that_ends_badly_fails_with_a_reason_that_says_what_to_do(text: str) -> None:
    names: dict[str, object] = {"__name__": __name__}  # a module that is there
    exec(compile(f"{RUN_HEAD}\ndef run():\n    {text}\n", "bodies.py", "exec"), names)
    report, _ = attempted(BoundTask(name="run", function=names["run"]), ResultFiles())  # type: ignore[arg-type]
    assert report.kind is OutcomeKind.FAILED, report
    assert report.reason is not None
    assert [word for word in BODIES[text] if word not in report.reason] == [], report.reason
    assert len(report.reason) <= 1000


def test_a_sensor_and_a_task_with_outputs_say_what_they_had_to_give() -> None:
    for value in (None, 1, "yes", [True]):
        report, _ = attempted(BoundTask(name="s", function=lambda value=value: value, polls=True), ResultFiles())
        assert "a sensor returns True, False or Done(value)" in str(report.reason), report
    report, _ = attempted(BoundTask(name="s", function=lambda: Done(object()), polls=True), ResultFiles())
    assert "of type object" in str(report.reason)
    report, _ = attempted(BoundTask(name="s", function=lambda: {"row": 1}, outputs=("rows",)), ResultFiles())
    assert "without its outputs rows; push() each of them" in str(report.reason)


# What a run is given ---------------------------------------------------------------------------------------------------------

DECLARED = """
@dag(params={
    "rows": Param(5, minimum=1, maximum=9), "way": Param("a", choices=["a", "b"]), "name": Param("ab", min_length=2, max_length=3),
    "code": Param("a1", pattern="[a-z][0-9]"), "must": Param(type=str, required=True), "items": Param([1], max_length=2),
    "flag": Param(True), "part": Param({"a": 1}), "ratio": Param(0.5)})
def sample(): one()
"""
GIVEN: list[tuple[dict[str, object], tuple[str, ...]]] = [
    ({"rows": 0}, ("'rows' is 0", "at least 1 and at most 9")),
    ({"rows": 10}, ("'rows' is 10", "at most 9")),
    ({"rows": "5"}, ("'rows' is '5'", "an integer")),
    ({"rows": 5.5}, ("'rows' is 5.5", "an integer")),
    ({"rows": True}, ("'rows' is True", "an integer")),
    ({"rows": None}, ("'rows' is None", "an integer")),
    ({"way": "c"}, ("'way' is 'c'", "one of 'a', 'b'")),
    ({"name": "x"}, ("'name' is 'x'", "at least 2 characters and at most 3 characters")),
    ({"name": "xxxx"}, ("'name' is 'xxxx'", "at most 3")),
    ({"code": "11"}, ("'code' is '11'", "matches [a-z][0-9]")),
    ({}, ("'must' is required", "a string")),
    ({"items": [1, 2, 3]}, ("'items'", "at most 2 items")),
    ({"items": (n for n in [1])}, ("'items'", "not JSON")),
    ({"flag": "true"}, ("'flag' is 'true'", "a boolean")),
    ({"part": []}, ("'part' is []", "an object")),
    ({"part": {"a": float("nan")}}, ("'part'", "not JSON")),
    ({"part": {"a": "\0"}}, ("'part'", "NUL")),
    ({"ratio": "half"}, ("'ratio' is 'half'", "a number")),
    ({"row": 5}, ("unknown param 'row'", "did you mean 'rows'?")),
    ({"part": {"a": "x" * 300_000}}, ("bytes", "at most 262,144")),
    ({"rows": 0, "way": "c"}, ("'rows'", "'way'")),
]


@pytest.mark.parametrize("number", range(len(GIVEN)))
def test_a_run_is_refused_what_its_dag_does_not_take(folder: Path, number: int) -> None:
    given, words = GIVEN[number]
    file = "declared.py"
    (folder / file).write_text(HEAD + DECLARED)
    (described,) = load(folder, file)["dags"]  # type: ignore[misc]
    spec = from_json(described["spec"])
    with pytest.raises(InvalidParams) as caught:
        check_run_params(spec, given if "must" in words[0] else {"must": "x", **given})
    message = str(caught.value)
    assert [word for word in words if word not in message] == [], message
    assert len(message) <= LONGEST_TEXT
