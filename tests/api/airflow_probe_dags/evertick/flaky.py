"""A task that needs two tries, one that fails, and one that never runs."""

from evertick import TaskContext, dag, task


@task(retries=2, retry_delay="1s")
def unsteady(context: TaskContext) -> int:
    print(f"try {context.attempt}")
    if context.attempt == 1:
        raise ConnectionResetError("the line was cut")
    return context.params.get("n", 3)


@task(retries=0)
def hopeless() -> None:
    raise ValueError("there is no such customer")


@task
def never() -> None:
    print("not printed")


@dag(tags=["probe"])
def probe_flaky():
    unsteady()
    hopeless() >> never()
