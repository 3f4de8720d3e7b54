"""A DAG that is there to be deleted."""

from evertick import dag, task


@task
def work() -> None:
    print("working")


@dag(tags=["probe"])
def probe_gone():
    work()
