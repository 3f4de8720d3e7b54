"""A pool: a resource shared by several DAGs, with a limited number of slots. Create it first:
evertick pools set warehouse 2
"""

from evertick import dag, task


@task(pool="warehouse")
def read(table: str) -> int:
    """Two of these at once, over all runs of all DAGs."""
    return len(table)


@task(pool={"warehouse": 2})
def merge(sizes: list[int]) -> int:
    """Takes both slots, so that nothing else uses the warehouse meanwhile."""
    return sum(sizes)


@dag(tags=["example"])
def pools() -> None:
    """`evertick tasks why RUN merge` lists the holders of the slots."""
    merge(read.expand(table=["orders", "customers", "items"]))


if __name__ == "__main__":
    print(pools.test().states)
