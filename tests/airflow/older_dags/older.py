"""A file as many are that were written for Airflow 2."""

from datetime import timedelta

from airflow.datasets import Dataset
from airflow.models import Variable
from airflow.operators.bash_operator import BashOperator
from airflow.operators.dummy import DummyOperator
from airflow.operators.python import PythonOperator
from airflow.utils.dates import days_ago

from airflow import DAG

region = Variable.get("region", default_var="eu")

with DAG(
    "older",
    schedule_interval="@daily",
    start_date=days_ago(2),
    catchup=False,
    concurrency=8,
    orientation="LR",
    default_args={"retries": 1, "retry_delay": timedelta(seconds=5)},
) as dag:
    start = DummyOperator(task_id="start")
    shell = BashOperator(task_id="shell", bash_command="echo {{ var.value.bucket }} {{ conn.lake.host }}", pool="lake")
    call = PythonOperator(
        task_id="call", python_callable=print, op_kwargs={"sql_conn_id": "unused"}, outlets=[Dataset("s3://older")]
    )
    start >> shell >> call
