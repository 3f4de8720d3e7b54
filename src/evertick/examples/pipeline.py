"""One DAG that starts another and continues when that has ended. It uses no slot while it waits.

`evertick dags trigger pipeline --wait`, then `evertick runs list` shows both runs.
"""

from evertick import Param, TaskContext, dag, shell, task, trigger_dag


@task
def load(context: TaskContext) -> str:
    return f"loaded {context.params['table']}"


@dag(params={"table": Param("orders", choices=["orders", "customers"])}, tags=["example"])
def load_table() -> None:
    """Loads one table; started by `pipeline`, or by hand."""
    load()


@task
def other_table() -> str:
    return "customers"


@dag(tags=["example"])
def pipeline() -> None:
    """Both tables, one after the other, and then a note."""
    orders = trigger_dag("load_table", params={"table": "orders"}, name="orders", timeout="10m")
    # A param may be the result of another task.
    customers = trigger_dag("load_table", params={"table": other_table()}, name="customers", timeout="10m")
    # The result is the id of the run that was started.
    orders >> customers >> shell("note", 'echo "both are loaded"')
