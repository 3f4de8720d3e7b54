"""Schedules that begin in the past, limits, weights and delays."""

from __future__ import annotations

from datetime import datetime, timedelta
from pathlib import Path
from time import sleep

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, Variable, dag, task
from airflow.task.priority_strategy import PriorityWeightStrategy
from airflow.timetables.base import DagRunInfo, DataInterval, Timetable
from airflow.timetables.trigger import CronTriggerTimetable, DeltaTriggerTimetable, MultipleCronTriggerTimetable
from dateutil.relativedelta import relativedelta

from airflow import __version__

START = datetime(2026, 1, 1)


class ByName(PriorityWeightStrategy):
    def get_weight(self, ti):
        return len(ti.task_id)


def weighted(name):
    if __version__ < "3.2":  # there only plugins have strategies
        return EmptyOperator(task_id=name, weight_rule="absolute", priority_weight=len(name))
    return EmptyOperator(task_id=name, weight_rule=ByName())


def unsteady(ti):
    if ti.try_number < 3:
        raise ValueError("not yet")


with DAG(
    "caught_up",
    start_date=START,
    end_date=datetime(2026, 1, 2, 12),
    schedule=CronTriggerTimetable("0 6 * * *", timezone="UTC", interval=timedelta(hours=2)),
    catchup=True,
    max_active_runs=1,
    max_active_tasks=2,
    is_paused_upon_creation=False,
):

    @task(wait_for_downstream=True)
    def first(data_interval_start=None, data_interval_end=None, logical_date=None):
        return [str(data_interval_start), str(data_interval_end), str(logical_date)]

    @task(max_active_tis_per_dagrun=1)
    def second(value):
        return value

    second.expand(value=[first(), 1])

with DAG("once", start_date=START, schedule="@once", is_paused_upon_creation=False):
    EmptyOperator(task_id="only")

with DAG("newest", start_date=START, schedule="@yearly", catchup=False, is_paused_upon_creation=False):
    weighted("only")
    weighted("longer")

with DAG("endless", start_date=datetime(2100, 1, 1), schedule="@continuous", max_active_runs=1) as endless:
    PythonOperator(
        task_id="grows",
        python_callable=unsteady,
        retries=2,
        retry_delay=timedelta(seconds=0.1),
        retry_exponential_backoff=True,
    )


class EveryThirdHour(Timetable):
    """Runs for the last half of each third hour."""

    def infer_manual_data_interval(self, *, run_after):
        return DataInterval(start=run_after.subtract(days=1), end=run_after)

    def next_dagrun_info(self, *, last_automated_data_interval, restriction):
        if last_automated_data_interval is None:
            at = restriction.earliest.start_of("day")
        else:
            at = last_automated_data_interval.end.add(hours=3)
        if at > restriction.latest:
            return None
        info = DagRunInfo.interval(start=at.subtract(minutes=30), end=at)
        return info._replace(run_after=at.add(minutes=5))


@dag(
    start_date=START,
    end_date=datetime(2026, 1, 1, 4),
    schedule=EveryThirdHour(),
    catchup=True,
    is_paused_upon_creation=False,
)
def custom():
    @task
    def interval(data_interval_start=None, data_interval_end=None):
        return [str(data_interval_start), str(data_interval_end)]

    interval()


@dag(start_date=START, schedule=DeltaTriggerTimetable(relativedelta(months=1)), is_paused_upon_creation=True)
def monthly():
    EmptyOperator(task_id="only")


@dag(start_date=START, schedule=MultipleCronTriggerTimetable("0 6 * * *", "0 6,18 * * *", timezone="UTC"))
def twice():
    EmptyOperator(task_id="only")


custom()
monthly()
twice()


def told(context):
    path = Path(Variable.get("told"))
    with path.open("a") as file:
        file.write(f"{context['reason']} {context['dag'].dag_id} {context['ti'].task_id}\n")


def broken(context):
    raise ValueError("nobody is there")


with DAG(
    "fails",
    schedule=None,
    on_failure_callback=[broken, told],
    max_consecutive_failed_dag_runs=1,
    is_paused_upon_creation=False,
):
    EmptyOperator(task_id="fine") >> PythonOperator(task_id="bad", python_callable=lambda: 1 / 0)

with DAG("stops", schedule=None, fail_fast=True, is_paused_upon_creation=False):
    # The failure comes while the others run and wait.
    PythonOperator(task_id="bad", python_callable=lambda: 1 / 0)
    runs = PythonOperator(task_id="runs", python_callable=lambda: sleep(300))
    runs >> EmptyOperator(task_id="later")

with DAG("works", schedule=None, on_success_callback=told, is_paused_upon_creation=False):
    EmptyOperator(task_id="fine")
