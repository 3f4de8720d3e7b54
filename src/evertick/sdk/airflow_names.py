"""Hints for users of Airflow: what Evertick has for an option, an import, a template name or an argument of Airflow.

Loaded only for an error. Hints name an option by its meaning; similar spelling would mislead: `execution_timeout` is
`timeout`, and not `queue_timeout`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from evertick.domain.errors import did_you_mean

GUIDE = "See docs/howto/from-airflow.md"

_NOTIFY = "notify.email('ops@example.com')"
_OF_DAG = "it is an option of @dag"
_DOCSTRING = "write a docstring in the function"
_XCOM = "pass the result of a task as an argument, as in load(extract())"

OPTIONS = {
    "access_control": "give users roles and tag limits",
    "bash_command": "write shell('name', 'command')",
    "concurrency": "use `max_active_tasks` of @dag",
    "dag_id": "use `name`; the default is the function's name",
    "dagrun_timeout": "use `run_timeout` of @dag",
    "default_args": "use `task_defaults` of @dag",
    "doc": _DOCSTRING,
    "doc_md": _DOCSTRING,
    "do_xcom_push": "return None: then nothing is stored",
    "email": f"use on_failure=[{_NOTIFY}]",
    "email_on_failure": f"use on_failure=[{_NOTIFY}]",
    "email_on_retry": f"use on_retry=[{_NOTIFY}]",
    "end_date": "use `end_at` of @dag",
    "execution_timeout": "use `timeout` of @task",
    "executor": "use `queue`, or routing rules",
    "executor_config": "use `executor_options`",
    "exponential_backoff": "use `backoff`, a factor such as 2.0, of @task.sensor",
    "is_paused_upon_creation": "use `paused` of @dag",
    "map_index_template": "instances are named by their index, as in load[2]",
    "max_active_runs": _OF_DAG,
    "max_active_tasks": _OF_DAG,
    "max_active_tis_per_dag": "use `max_active` of @task",
    "max_active_tis_per_dagrun": "use `max_active` of a task group",
    "max_retry_delay": "use `retry_max_delay`",
    "mode": "not needed: a sensor that waits takes no slot",
    "multiple_outputs": "not needed: write result['key'], or push(name, value) in the task",
    "on_execute_callback": "write it into the task's function",
    "on_failure_callback": "use `on_failure`",
    "on_retry_callback": "use `on_retry` of @task",
    "on_skipped_callback": "use `on_skipped` of @task",
    "on_success_callback": "use `on_success`",
    "op_args": "pass the arguments when you call the task",
    "op_kwargs": "pass the arguments when you call the task",
    "owner": _OF_DAG,
    "params": "it is an option of @dag; a task reads context.params['name']",
    "poke_interval": "use `interval` of @task.sensor",
    "pool_slots": "use pool={'name': 2} for two slots",
    "priority_weight": "use `priority`",
    "provide_context": "declare the argument `context: TaskContext`",
    "python_callable": "decorate the function with @task, and call it",
    "resources": "use `executor_options`",
    "retry_exponential_backoff": "use retry_backoff='exponential'",
    "run_as_user": "start a runner as that user, and route the task to it with `queue`",
    "schedule": _OF_DAG,
    "schedule_interval": "use `schedule` of @dag",
    "sla": "use finish_within='1h' with on_deadline=...",
    "sla_miss_callback": "use `on_deadline`",
    "soft_fail": "use on_timeout='skip' of @task.sensor",
    "start_date": "use `start_at` of @dag",
    "tags": _OF_DAG,
    "task_display_name": "use `name`",
    "task_id": "use `name`; the default is the function's name",
    "timetable": "use `schedule` of @dag",
    "wait_for_downstream": "use depends_on_past=True",
    "weight_rule": "not available: `priority` is the priority of the task itself",
}

IMPORTS = {
    "AirflowException": "raise any exception, or Fail(reason)",
    "AirflowFailException": "raise Fail(reason)",
    "AirflowSkipException": "raise Skip(reason)",
    "BaseHook": "declare @task(connections=['db']) and read context.connections['db']",
    "BaseOperator": "write a function with @task",
    "BaseSensorOperator": "write a function with @task.sensor",
    "BashOperator": "use shell('name', 'command')",
    "BranchPythonOperator": "use @task.branch",
    "Connection": "declare @task(connections=['db']) and read context.connections['db']",
    "DAG": "use the decorator @dag on a function",
    "Dataset": "use Asset('name')",
    "DateTimeSensor": "use wait_until(...)",
    "DummyOperator": "leave it out: lists and groups of tasks take `>>`",
    "EmailOperator": f"use on_success=[{_NOTIFY}]",
    "EmptyOperator": "leave it out: lists and groups of tasks take `>>`",
    "ExternalTaskSensor": "use @dag(schedule=after('other_dag'))",
    "FileSensor": "use @task.sensor on a function that checks for the file",
    "HttpOperator": "use http('name', 'https://...')",
    "HttpSensor": "use @task.sensor on a function that sends the request",
    "KubernetesPodOperator": "run runners with --executor kubernetes",
    "Param": "use Param of evertick",
    "PythonOperator": "use @task on the function, and call it",
    "PythonSensor": "use @task.sensor",
    "PythonVirtualenvOperator": "declare the dependencies of the DAG file in a block `# /// script`",
    "ShortCircuitOperator": "use @task.short_circuit",
    "SimpleHttpOperator": "use http('name', 'https://...')",
    "TaskGroup": "use `with task_group('name'):`",
    "TimeDeltaSensor": "use wait_for('1h')",
    "TriggerDagRunOperator": "use trigger_dag('other_dag')",
    "TriggerRule": "use the name of the rule, as in trigger_rule='all_done'",
    "Variable": "declare @task(variables=['region']) and read context.variables['region']",
    "XCom": _XCOM,
    "days_ago": "use @dag(start_at=datetime(...)) with a fixed date",
    "get_current_context": "use current_context()",
}

DECORATORS = {
    "bash": "use shell('name', 'command')",
    "docker": "use shell('name', 'docker run ...')",
    "external_python": "use program('name', ['/path/to/python', 'script.py'])",
    "kubernetes": "run runners with --executor kubernetes; @task(executor_options=...) sets the pod's options",
    "run_if": "use @task.short_circuit",
    "skip_if": "use @task.short_circuit",
    "virtualenv": "declare the dependencies of the DAG file in a block `# /// script`",
}

_FIRE_AT = "write {{ fire_at }}"
TEMPLATES = {
    "conn": "declare connections=['db'] and write {{ connections.db.host }}",
    "dag_run": "write {{ run_id }} or {{ params.name }}",
    "ds": "write {{ fire_at.strftime('%Y-%m-%d') }}",
    "ds_nodash": "write {{ fire_at.strftime('%Y%m%d') }}",
    "execution_date": _FIRE_AT,
    "logical_date": _FIRE_AT,
    "macros": "use methods of the values, as in {{ fire_at.strftime('%Y') }}",
    "next_ds": "write {{ fire_at.strftime('%Y-%m-%d') }}",
    "prev_ds": "write {{ data_interval_start.strftime('%Y-%m-%d') }}",
    "task_instance": "declare inputs={'rows': extract()} and write {{ inputs.rows }}",
    "ti": "declare inputs={'rows': extract()} and write {{ inputs.rows }}",
    "ts": _FIRE_AT,
    "var": "declare variables=['region'] and write {{ variables.region }}",
}

_INSTEAD = {"ti": _XCOM, "task_instance": _XCOM}
_ATTRIBUTES = {
    **dict.fromkeys(("ds", "ts", "ds_nodash", "logical_date", "execution_date", "data_interval_end"), "fire_at"),
    "data_interval_start": "data_interval_start",
    "dag_run": "run_id",
    "run_id": "run_id",
    "params": "params",
    "var": "variables['name']",
    "conn": "connections['name']",
}


def option_hint(name: str, known: Iterable[str]) -> str | None:
    """What to write instead of an unknown option."""
    if name in OPTIONS:
        return OPTIONS[name] + "."
    return did_you_mean(name, known, "") or None


def import_hint(names: str) -> str:
    """For a text with names that Airflow exports, such as the line of an import."""
    hints = [f"for {name}, {IMPORTS[name]}" for name in re.findall(r"\w+", names) if name in IMPORTS]
    return f"{'; '.join(dict.fromkeys(hints)) or 'use dag and task of evertick'}. {GUIDE}."


def context_hint(name: str) -> str | None:
    """For an argument or key that Airflow fills from its context."""
    if name in _ATTRIBUTES:
        return f"declare the argument `context: TaskContext`, and use context.{_ATTRIBUTES[name]}"
    return _INSTEAD.get(name)
