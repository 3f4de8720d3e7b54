"""Deadlines: get a notification while a run or a task is late, before it fails.

It runs once a day and is in time. `evertick dags trigger deadlines --param seconds=10` shows a task that is late: `tell` is
called while it still runs. `evertick alerts list` lists late schedules, `evertick notifications list` the notifications.
"""

import time

from evertick import Param, TaskContext, dag, task


def tell(event: dict[str, object]) -> str:
    """Runs on a runner, as the only task of a separate DAG."""
    message = f"{event['dag']}, run {event['run']}: {event.get('task', 'the run')} is late: {event['alert']}"
    print(message)
    return message


@task(finish_within="5s", on_deadline=tell)
def fetch(context: TaskContext) -> None:
    """Must end within five seconds after its run was due; a late task is not stopped."""
    time.sleep(context.params["seconds"])


# For runs of its schedule: the first task must start within ten minutes, the run must end within an hour.
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
