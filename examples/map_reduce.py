"""Split work into parts at run time, process each part as its own task, and combine the results."""

from evertick import Param, dag, task


@task
def split(size: int, parts: int) -> list[list[int]]:
    numbers = list(range(size))
    return [numbers[part::parts] for part in range(parts)]


@task(retries=2, max_active=8)
def square(part: list[int]) -> int:
    return sum(number * number for number in part)


@task
def combine(sums: list[int]) -> int:
    return sum(sums)


@dag
def sum_of_squares(size: int = Param(100, minimum=1), parts: int = Param(4, minimum=1)) -> None:
    combine(square.expand(part=split(size, parts)))
