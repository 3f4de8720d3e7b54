"""A full load on Sundays and a delta on other days, with the same end for both."""

from evertick import TaskContext, dag, task


@task.branch
def choose(context: TaskContext) -> str:
    return "full" if context.fire_at.isoweekday() == 7 else "delta"


@task
def full() -> str:
    return "all rows"


@task
def delta() -> str:
    return "new rows"


@task(trigger_rule="none_failed_min_one_success")
def publish(full: str | None, delta: str | None) -> str:
    return f"published {full or delta}"


@dag(schedule="0 3 * * *")
def load_by_weekday() -> None:
    everything, part = full(), delta()
    choose() >> [everything, part]
    publish(everything, part)
