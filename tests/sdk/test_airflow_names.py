"""Habits from Airflow: each is refused with what Evertick has for it, and never with an option that is only spelled alike."""

from __future__ import annotations

from pathlib import Path

import pytest

import evertick
from evertick import TaskContext
from evertick.bundles.loader_process import load
from evertick.domain.errors import UserError
from evertick.sdk.airflow_names import OPTIONS
from evertick.sdk.dag import DagOptions
from evertick.sdk.options import TaskOptions
from tests.sdk.test_wrong_uses import HEAD, Wrong, body, of_dag, of_task

SENSOR = "@task.sensor({})\ndef s(): return True\n"
HABITS = [
    of_dag("dag_id='x'", "use `name`"),
    of_dag("schedule_interval='@daily'", "use `schedule`"),
    of_dag("default_args={}", "use `task_defaults`"),
    of_dag("start_date=1", "use `start_at`"),
    of_dag("concurrency=5", "use `max_active_tasks`"),
    of_dag("is_paused_upon_creation=True", "use `paused`"),
    of_dag("dagrun_timeout=5", "use `run_timeout`"),
    of_task("owner='me'", "it is an option of @dag"),
    of_dag("on_failure_callback=tell", "use `on_failure`"),
    of_dag("doc_md='x'", "docstring"),
    of_dag("depends_on_past=True", "option of @task", "task_defaults={'depends_on_past': ...}"),
    of_dag("end_date='2030-01-01'", "use `end_at`"),
    of_task("task_id='x'", "use `name`"),
    of_task("execution_timeout=5", "use `timeout`"),
    of_task("max_retry_delay=5", "use `retry_max_delay`"),
    of_task("retry_exponential_backoff=True", "retry_backoff='exponential'"),
    of_task("on_retry_callback=tell", "use `on_retry`"),
    of_task("sla=5", "finish_within=", "on_deadline="),
    of_task("pool_slots=2", "pool={'name': 2}"),
    of_task("max_active_tis_per_dag=2", "use `max_active`"),
    of_task("priority_weight=2", "use `priority`"),
    of_task("resources=1", "use `executor_options`"),
    of_task("email_on_failure=True", "notify.email"),
    of_task("schedule='@daily'", "it is an option of @dag"),
    of_task("poke_interval=5", "use `interval` of @task.sensor"),
    Wrong(SENSOR.format("poke_interval=30"), ("'s'", "use `interval`")),
    Wrong(SENSOR.format("mode='reschedule'"), ("'s'", "takes no slot")),
    Wrong(SENSOR.format("soft_fail=True"), ("'s'", "on_timeout='skip'")),
    of_task(
        "execution_timeout=5, sla=3, retris=1, zzz=0, owner='me'",
        *("no options 'execution_timeout', 'sla', 'retris', 'zzz', 'owner'", "execution_timeout: use `timeout`"),
        *("sla: use finish_within", "retris: did you mean 'retries'?", "known options: name,"),
    ),
    Wrong("from evertick import DAG\n", ("use the decorator @dag", "docs/howto/from-airflow.md")),
    Wrong("from evertick import PythonOperator\n", ("use @task",)),
    Wrong("from evertick import BashOperator\n", ("use shell(",)),
    Wrong("from evertick import Variable\n", ("@task(variables=['region'])",)),
    Wrong("from evertick import get_current_context\n", ("use current_context()",)),
    Wrong("import evertick\nevertick.DAG('x')\n", ("use the decorator @dag",)),
    Wrong(
        "from airflow import DAG\n", ("Airflow is not installed", "for DAG, use the decorator @dag", "from-airflow.md")
    ),
    Wrong("from airflow.operators.python import PythonOperator\n", ("for PythonOperator, use @task",)),
    Wrong("@task.bash\ndef b(): ...\n", ("use shell('name', 'command')",)),
    Wrong("@task.virtualenv(requirements=['x'])\ndef b(): ...\n", ("declare the dependencies", "# /// script")),
    Wrong("with dag('x') as d: ...\n", ("@dag takes a function",)),
    body('shell("x", "echo {{ ti.xcom_pull() }}")', "'ti'", "{{ inputs.rows }}"),
    body('shell("x", "echo {{ var.value.x }}")', "'var'", "variables=['region']"),
    body('shell("x", "echo {{ conn.db.host }}")', "'conn'", "{{ connections.db.host }}"),
    body('shell("x", "echo {{ logical_date }} {{ execution_date }}")', "'logical_date'", "{{ fire_at }}"),
    Wrong(
        "@task\ndef a(ds, **kwargs): ...\n@dag\ndef sample(): a()\n",
        ("'ds'", "`context: TaskContext`", "context.fire_at"),
    ),
    Wrong("@task\ndef a(ti): ...\n@dag\ndef sample(): a()\n", ("'ti'", "load(extract())")),
    Wrong("@task\ndef a(**context): ...\n", ("'a'", "**context", "`context: TaskContext`")),
]


@pytest.mark.parametrize("number", range(len(HABITS)))
def test_a_habit_from_airflow_is_refused_with_the_name_in_evertick(tmp_path: Path, number: int) -> None:
    wrong = HABITS[number]
    (tmp_path / "habit.py").write_text(HEAD + wrong.text)
    problem = load(tmp_path, "habit.py")["problem"]
    assert isinstance(problem, dict)
    message = str(problem["message"])
    assert [word for word in wrong.words if word not in message] == [], message
    assert problem["line"] > HEAD.count("\n"), problem
    assert len(message) <= 1_000, message


def test_a_hint_never_hides_an_option_that_exists() -> None:
    of_both = TaskOptions.__annotations__.keys() & DagOptions.__annotations__.keys()
    assert not OPTIONS.keys() & TaskOptions.__annotations__.keys()
    assert not OPTIONS.keys() & of_both


def test_unknown_options_list_also_those_of_the_call_itself(tmp_path: Path) -> None:
    texts = {
        SENSOR.format("zzz=1"): ("interval", "on_timeout", "backoff", "retries"),
        "@dag\ndef d(): shell('x', 'true', zzz=1)\n": ("env", "inputs", "retries"),
        "@dag\ndef d(): http('x', 'https://x.example', zzz=1)\n": ("method", "headers", "retries"),
        "@dag\ndef d(): approval('x', zzz=1)\n": ("approvers", "on_reject", "trigger_rule"),
        "@dag\ndef d(): trigger_dag('x', zzz=1)\n": ("params", "wait", "trigger_rule"),
    }
    for text, options in texts.items():
        (tmp_path / "known.py").write_text(HEAD + text)
        message = str(load(tmp_path, "known.py")["problem"]["message"])  # type: ignore[index]
        listed = message.partition("known options: ")[2].rstrip(".").split(", ")
        assert not set(options) - set(listed), message


def test_a_context_has_no_keys_and_says_what_to_write() -> None:
    context = TaskContext(run_id=1, dag="d", task="t")
    with pytest.raises(UserError, match=r"pass the result of a task"):
        context["ti"]
    with pytest.raises(UserError, match=r"context\.fire_at"):
        context["ds"]
    with pytest.raises(UserError, match=r"write context\.attempt"):
        context["attempt"]


def test_public_names_can_be_listed_and_a_name_of_airflow_is_no_attribute() -> None:
    assert not set(evertick.__all__) - set(dir(evertick))
    with pytest.raises(ImportError, match="use the decorator @dag"):
        _ = evertick.DAG  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="it has Asset, Done"):
        _ = evertick.dags  # type: ignore[attr-defined]
