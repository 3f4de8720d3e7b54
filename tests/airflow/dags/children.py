"""Tasks that start an interpreter of their own, which asks for values as the task itself does."""

from __future__ import annotations

import sys
from datetime import datetime

from airflow.sdk import dag, task


@dag(start_date=datetime(2026, 1, 1), schedule=None, is_paused_upon_creation=False)
def children():
    @task.external_python(python=sys.executable)
    def read():
        from airflow.sdk import Variable

        print("in the child")
        return Variable.get("color")

    @task
    def reread(color):
        return color

    reread(read())


children()
