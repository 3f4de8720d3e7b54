"""A DAG to watch: every five seconds three small tasks run, each passing its result to the next.

Start Evertick, open `evertick runs watch heartbeat`, and see runs come and go on time.
"""

import random

from evertick import TaskContext, dag, task


@task
def extract() -> list[float]:
    """Read five numbers from an imaginary sensor."""
    readings = [round(random.gauss(20, 2), 2) for _ in range(5)]
    print("read", readings)
    return readings


@task(retries=2, retry_delay="1s")
def transform(readings: list[float]) -> dict[str, float]:
    """The next task is called with the return value (any JSON)."""
    summary = {"low": min(readings), "high": max(readings), "mean": round(sum(readings) / len(readings), 2)}
    print("mean", summary["mean"], "of", len(readings), "readings")
    return summary


@task
def load(summary: dict[str, float], context: TaskContext) -> None:
    """A parameter named `context` receives the run, the attempt and the logical date."""
    context.logger.info("run %s: stored %s for %s", context.run_id, summary, context.fire_at)


@dag(schedule="@every 5s", tags=["example"], max_active_runs=1)
def heartbeat() -> None:
    """Extract, transform, load, twelve times a minute."""
    load(transform(extract()))
