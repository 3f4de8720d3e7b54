"""One instance per number; how many comes from the run's conf."""

from airflow.sdk import dag, task


@task
def numbers(params: dict) -> list[int]:
    return list(range(params.get("n", 3)))


@task
def square(number: int) -> int:
    print(f"squaring {number}")
    return number * number


@task
def total(squares: list[int]) -> int:
    return sum(squares)


@dag(schedule=None, tags=["probe"], is_paused_upon_creation=False)
def probe_mapped():
    total(square.expand(number=numbers()))


probe_mapped()
