"""The light workloads as a DAG file of Airflow: PythonOperators in sequence, one to a hundred to one by mapping, and one task."""

import time

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG, chain, task

CHAIN, WIDTH = 40, 100
PREFIX = "af"


def fib(number):
    return number if number < 2 else fib(number - 1) + fib(number - 2)


def body(*_):
    started = time.time()
    print("fib(10) =", fib(10))
    return [started, time.time()]


def declare(isolation):
    """Three DAGs with this isolation, which is part of their names."""
    options = {
        "schedule": None,
        "is_paused_upon_creation": False,
        "default_args": {"executor_config": {"evertick": {"isolation": isolation}}},
    }
    with DAG(f"{PREFIX}_chain_{isolation}", **options) as chained:
        chain(*(PythonOperator(task_id=f"light_{number}", python_callable=body) for number in range(CHAIN)))
    with DAG(f"{PREFIX}_fan_{isolation}", **options) as fanned:
        first = PythonOperator(task_id="first", python_callable=body)
        wide = task(body).override(task_id="wide").expand_kwargs([{}] * WIDTH)
        first >> wide >> PythonOperator(task_id="last", python_callable=body)
    with DAG(f"{PREFIX}_single_{isolation}", **options) as single:
        PythonOperator(task_id="light", python_callable=body)
    return chained, fanned, single


dags = [dag for isolation in ("process", "warm") for dag in declare(isolation)]
for _dag in dags:
    globals()[_dag.dag_id] = _dag
