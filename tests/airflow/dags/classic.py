"""A DAG as people write it for Airflow, with no word of Evertick."""

from __future__ import annotations

import json
from datetime import datetime, timedelta
from pathlib import Path

from airflow.exceptions import AirflowSkipException
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.python import BranchPythonOperator, PythonOperator
from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.providers.standard.sensors.python import PythonSensor
from airflow.sdk import DAG, Asset, Connection, Variable, task

ORDERS = Asset("orders")


def told(context):
    Path(context["params"]["told"]).write_text(context["ti"].task_id)


def poked(path):
    """Finds what it waits for at the third look."""
    seen = Path(path)
    looks = len(seen.read_text()) if seen.exists() else 0
    seen.write_text("x" * (looks + 1))
    return looks >= 2


def read_values(ti):
    connection = Connection.get("shop")
    Variable.set("last_run", ti.run_id)
    return [connection.host, connection.password, connection.extra_dejson, Variable.get("region")]


def unsteady(ti):
    assert ti.xcom_pull(task_ids="retried", key="first") is None, "a retry begins without the XComs of the try before"
    ti.xcom_push(key="first" if ti.try_number == 1 else "lost", value=ti.try_number)
    if ti.try_number == 1:
        raise ValueError("not yet")
    return ti.try_number


def hopeless_but_told(ti):
    ti.xcom_push(key="found", value=[ti.try_number])
    ti.xcom_push(key="return_value", value="half")
    raise ZeroDivisionError


def skipped():
    raise AirflowSkipException("nothing to do")


with DAG(
    "classic",
    start_date=datetime(2026, 1, 1),
    schedule=None,
    default_args={"retries": 0, "owner": "shop"},
    params={"told": "", "poked": ""},
    is_paused_upon_creation=False,
    tags=["shop"],
) as dag:
    extract = BashOperator(task_id="extract", bash_command="echo {{ ds }} {{ params.told | length > 0 }}")
    pull = PythonOperator(
        task_id="pull",
        python_callable=lambda first, ti: [ti.xcom_pull(task_ids="extract"), first],
        op_args=[extract.output],
        outlets=[ORDERS],
    )
    late = PythonOperator(task_id="late", python_callable=lambda ti: ti.xcom_pull(task_ids="extract"))
    extract >> pull >> late
    values = PythonOperator(task_id="values", python_callable=read_values)
    retried = PythonOperator(task_id="retried", python_callable=unsteady, retries=1, retry_delay=timedelta(seconds=0.1))
    hopeless = PythonOperator(task_id="hopeless", python_callable=hopeless_but_told, on_failure_callback=told)
    after = PythonOperator(
        task_id="after",
        trigger_rule="all_done",
        python_callable=lambda ti: [ti.xcom_pull("hopeless"), ti.xcom_pull("hopeless", key="found")],
    )
    [hopeless, retried] >> after
    sensor = PythonSensor(
        task_id="sensor",
        mode="reschedule",
        poke_interval=1,
        timeout=60,
        python_callable=poked,
        op_args=["{{ params.poked }}"],
    )
    skip = PythonOperator(task_id="skip", python_callable=skipped)
    branch = BranchPythonOperator(task_id="branch", python_callable=lambda: "left")
    left, right = EmptyOperator(task_id="left"), EmptyOperator(task_id="right")
    join = EmptyOperator(task_id="join", trigger_rule="none_failed_min_one_success")
    branch >> [left, right] >> join
    skip >> EmptyOperator(task_id="below_skip")

    @task
    def numbers():
        return [1, 2, 3]

    @task
    def double(x):
        return 2 * x

    @task(multiple_outputs=True)
    def total(xs):
        return {"sum": sum(xs), "count": len(list(xs))}

    @task
    def told_total(value):
        return value

    told_total(total(double.expand(x=numbers()))["sum"])
    TriggerDagRunOperator(
        task_id="trigger", trigger_dag_id="target", trigger_run_id="from_classic", conf={"day": "{{ ds }}"}
    )

with DAG("target", start_date=datetime(2026, 1, 1), schedule=[ORDERS], is_paused_upon_creation=False) as target:
    PythonOperator(task_id="read", python_callable=lambda dag_run: json.dumps(dag_run.conf, sort_keys=True))
