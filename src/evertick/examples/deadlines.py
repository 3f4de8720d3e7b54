"""Deadlines: somebody hears of it while a run or a task is late, not when it has failed at last.

It runs once a day and is in time. `evertick dags trigger deadlines --param seconds=10` shows a task that is not: `tell` is
called while it still runs. `evertick alerts list` has what is late of a schedule, `evertick notifications list` who was told.
"""

import time

from evertick import Param, TaskContext, dag, task


def tell(event: dict[str, object]) -> str:
    """Runs on a runner, as the only task of a DAG of its own."""
    message = f"{event['dag']}, run {event['run']}: {event.get('task', 'the run')} is late: {event['alert']}"
    print(message)
    return message


@task(finish_within="5s", on_deadline=tell)
def fetch(context: TaskContext) -> None:
    """It must have ended five seconds after its run was due; nobody stops it if it has not."""
    time.sleep(context.params["seconds"])


# Of the runs of its schedule: the first task within ten minutes, all of it within an hour.
@dag(
    schedule="@daily",
    start_within="10m",
    finish_within="1h",
    on_deadline=tell,
    params={"seconds": Param(0.0, minimum=0, maximum=60, description="How long it takes")},
    tags=["example"],
)
def deadlines() -> None:
    """A task with a deadline in a DAG with deadlines."""
    fetch()
