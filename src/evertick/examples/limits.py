"""Concurrency limits: a key that one task holds at a time, a limit of a group, an order. They need no pool.

`evertick dags trigger limits --param table=orders --wait` shows it; meanwhile `evertick tasks why RUN write` lists the holders.
"""

from evertick import Param, dag, task, task_group


@task(max_active=2)
def read(part: int) -> int:
    return part * 10


# Across all runs of all DAGs, one task at a time writes to a table.
@task(mutex="table:{params.table}")
def write(parts: list[int]) -> int:
    return sum(parts)


@task(parallel={"mail": 3})
def tell(total: int) -> str:
    return f"{total} rows"


@dag(params={"table": Param("orders")}, max_active_runs=4, tags=["example"])
def limits() -> None:
    """Reads two parts at a time, writes alone, and mails with at most two others."""
    total = write(read.expand(part=[1, 2, 3]))
    with task_group("mails", max_active=1):
        tell(total)


if __name__ == "__main__":
    print(limits.test().states)
