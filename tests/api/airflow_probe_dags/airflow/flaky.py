"""A task that needs two tries, one that fails, and one that never runs."""

from datetime import timedelta

from airflow.sdk import dag, task


@task(retries=2, retry_delay=timedelta(seconds=1))
def unsteady(ti, params: dict) -> int:
    print(f"try {ti.try_number}")
    if ti.try_number == 1:
        raise ConnectionResetError("the line was cut")
    return params.get("n", 3)


@task(retries=0)
def hopeless() -> None:
    raise ValueError("there is no such customer")


@task
def never() -> None:
    print("not printed")


@dag(schedule=None, tags=["probe"], is_paused_upon_creation=False)
def probe_flaky():
    unsteady()
    hopeless() >> never()


probe_flaky()
