"""A DAG that is there to be deleted."""

from airflow.sdk import dag, task


@task
def work() -> None:
    print("working")


@dag(schedule=None, tags=["probe"], is_paused_upon_creation=False)
def probe_gone():
    work()


probe_gone()
