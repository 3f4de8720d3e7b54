"""Deferrable operators, and constructs that are refused."""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.providers.standard.sensors.time_delta import TimeDeltaSensor
from airflow.sdk import dag, task, task_group


@dag(start_date=datetime(2100, 1, 1), schedule="0 6 * * *", is_paused_upon_creation=False)
def deferred():
    TimeDeltaSensor(task_id="wait", delta=timedelta(seconds=0), deferrable=True) >> done()


@task
def done():
    return "done"


@dag(schedule=None)
def mapped_group():
    @task_group(prefix_group_id=False)
    def group(x):
        done.override(task_id="inner")()

    group.expand(x=[1, 2])


deferred()
mapped_group()
