"""A daily load: fan out over the tables of a shop, in groups, and fan in to one report.

`evertick dags trigger etl --param rows=50 --wait` runs it now; omit the parameter for the default.
"""

import random
from collections.abc import Sequence
from typing import Any

from evertick import Param, Skip, TaskContext, dag, task, task_group

Batch = dict[str, Any]
TABLES = ["customers", "orders", "products", "returns"]


@task
def extract(table: str, context: TaskContext) -> Batch:
    """Constants such as the table's name stay in this file; only results travel between tasks."""
    rows = random.randint(0, context.params["rows"])
    print(f"{rows} new rows in {table}")
    return {"table": table, "rows": rows}


@task
def clean(batch: Batch) -> Batch:
    """A task may end itself as skipped. Its downstream tasks are then skipped too, unless their trigger rules say otherwise."""
    if not batch["rows"]:
        raise Skip(f"nothing new in {batch['table']}")
    return {**batch, "clean": True}


# `none_failed`: skipped tables are fine, failed ones are not. A skipped task's result is None.
@task(trigger_rule="none_failed", priority=8)
def summarise(batches: Sequence[Batch | None]) -> str:
    loaded = [batch for batch in batches if batch is not None]
    return f"{sum(batch['rows'] for batch in loaded)} rows from {len(loaded)} of {len(batches)} tables"


@task
def announce(summary: str) -> None:
    print("Good morning:", summary)


@dag(
    schedule="30 6 * * *",
    timezone="Europe/Berlin",
    params={"rows": Param(200, minimum=1, maximum=10_000, description="The most rows to pretend to find per table")},
    tags=["example", "daily"],
    # For every task without its own settings: four attempts, after 10, 20 and 40 seconds, with some jitter.
    task_defaults={"retries": 3, "retry_delay": "10s", "retry_backoff": "exponential", "retry_jitter": 0.2},
)
def etl() -> None:
    """Load every table of the shop, then print a summary."""
    batches = []
    for table in TABLES:
        with task_group(table):
            batches.append(clean(extract(table)))
    announce(summarise(batches))
