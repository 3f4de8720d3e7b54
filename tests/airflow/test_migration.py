"""Files as users have them: of Airflow 2, with a cluster policy, next to files that they exclude."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from evertick.bundles.airflow_values import named_values
from evertick.cli.main import main
from evertick.config import Settings
from evertick.domain.attempt import Isolation
from evertick.publisher.deployment import load_files
from evertick.publisher.publisher import find_dag_files
from tests.airflow.test_files import environment, settings  # noqa: F401

DAGS = Path(__file__).parent / "older_dags"
OLDER = {
    "airflow.datasets.Dataset is gone in Airflow 3; read as airflow.sdk.Asset",
    "airflow.operators.dummy.DummyOperator is gone in Airflow 3; read as"
    " airflow.providers.standard.operators.empty.EmptyOperator",
    "airflow.operators.bash_operator.BashOperator is gone in Airflow 3; read as"
    " airflow.providers.standard.operators.bash.BashOperator",
    "airflow.utils.dates.days_ago is gone in Airflow 3; read as days_ago",
    "schedule_interval= is gone in Airflow 3; read as schedule=",
    "concurrency= is gone in Airflow 3; read as max_active_tasks=",
    "orientation= is gone in Airflow 3; ignored",
}


def test_names_of_airflow_2_are_read_as_their_successors_and_policies_apply(
    settings: Settings,  # noqa: F811
    environment: dict[str, str],  # noqa: F811
) -> None:
    assert find_dag_files(DAGS, with_airflow=True) == ["older.py"]
    given = {**environment, "PYTHONPATH": str(DAGS)}
    # Two, so that a zygote forks the processes.
    found = asyncio.run(load_files(DAGS, ["older.py", "older.py"], settings, given))
    for file in found:
        assert (file.error, file.uses_threads) == (None, ())
        (dag,) = file.dags
        assert {each.text for each in file.findings if each.code == "AF601"} == OLDER
        assert {each.line for each in file.findings if "datasets" in each.text} == {line_of("airflow.datasets")}
        (schedule,) = dag.spec.schedules
        assert schedule.spec.expression == "0 0 * * *"
        assert {task.name: task.isolation for task in dag.spec.tasks if task.name != "start"} == {
            "shell": Isolation.PROCESS,
            "call": Isolation.WARM,
        }


def test_check_names_what_the_installation_lacks(
    airflow_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERTICK_HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_VAR_BUCKET", "b")
    assert main(["airflow", "check", str(DAGS), "--python", str(airflow_python), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["connections"], report["variables"], report["pools"]) == (["lake"], [], {"lake": 1})
    assert main(["airflow", "check", str(DAGS), "--python", str(airflow_python)]) == 0
    text = capsys.readouterr().out
    assert f"older.py:{line_of('airflow.datasets')}  airflow.datasets.Dataset is gone" in text
    assert "missing  connections: lake" in text and "missing  pools: lake (1 task)" in text


def test_one_task_of_a_file_runs_without_a_server(
    airflow_python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("EVERTICK_HOME", str(tmp_path))
    monkeypatch.setenv("AIRFLOW_VAR_BUCKET", "b1")
    values = tmp_path / "connections.json"
    values.write_text(json.dumps({"lake": {"conn_type": "http", "host": "lake.example"}}))
    given = [str(DAGS / "older.py"), "older", "--python", str(airflow_python)]
    assert main(["airflow", "run", *given, "shell", "--values", str(values)]) == 0
    told = capsys.readouterr().out
    assert "b1 lake.example" in told and "older: success" in told and "call" not in told
    assert not list(tmp_path.glob("evertick-run-*"))
    assert main(["airflow", "run", *given, "shall"]) == 2
    assert "DAG 'older' has no task 'shall'" in capsys.readouterr().err


def line_of(text: str) -> int:
    lines = (DAGS / "older.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def test_named_values_are_those_of_calls_options_and_templates() -> None:
    text = b"""
hook = HttpHook(http_conn_id="shop"); BaseHook.get_connection("mail")
a, b = Variable.get("region"), Variable.get("color", default="red")
sql = "select {{ var.json.limits.most }} from {{ conn.lake.schema }} where 'var.value.no'"
"""
    assert named_values(text) == ({"shop", "mail", "lake"}, {"region", "limits"})
    assert named_values(b"def (") == (set(), set())
