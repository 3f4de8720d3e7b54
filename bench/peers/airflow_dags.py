"""The workloads as Airflow DAGs; copied into a DAG folder together with stamps.py."""

from datetime import datetime, timedelta

import stamps
from airflow.sdk import dag, get_current_context, task


@task
def light(label):
    stamps.body(label)


@dag(schedule=None)
def chain():
    last = light("chain")
    for _ in range(stamps.CHAIN - 1):
        following = light("chain")
        last >> following
        last = following


@dag(schedule=None)
def fan():
    light("fan") >> [light("fan") for _ in range(stamps.WIDTH)] >> light("fan")


@dag(schedule=None)
def single():
    light("single")


@dag(schedule=None)
def warm_up():
    light("warm-up")


@dag(schedule=timedelta(seconds=5), start_date=datetime(2026, 1, 1), catchup=False, is_paused_upon_creation=True)
def tick():
    @task
    def late():
        stamps.tick(get_current_context()["dag_run"].run_after.timestamp())

    late()


for declare in (chain, fan, single, warm_up, tick):
    declare()
