"""One instance per number; how many comes from the run's conf."""

from evertick import TaskContext, dag, task


@task
def numbers(context: TaskContext) -> list[int]:
    return list(range(context.params.get("n", 3)))


@task
def square(number: int) -> int:
    print(f"squaring {number}")
    return number * number


@task
def total(squares: list[int]) -> int:
    return sum(squares)


@dag(tags=["probe"])
def probe_mapped():
    total(square.expand(number=numbers()))
