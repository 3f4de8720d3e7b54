"""Many DAGs write many tables, but each table has one writer at a time. Readers share it."""

from evertick import Param, chain, dag, task


@task(mutex="table:{params.table}", timeout="30m")
def rewrite(table: str) -> str:
    return f"rewrote {table}"


@task(mutex_shared="table:{params.table}")
def check(table: str) -> str:
    return f"checked {table}"


@dag
def maintain_table(table: str = Param(required=True)) -> None:
    chain(rewrite(table), check(table))
