"""Tasks that wait in every possible way, for longer than any measurement takes."""

from evertick import approval, dag, task, wait_for, wait_for_event

EACH = 250


@task.sensor(interval="7d", isolation="warm")
def never():
    return False


@dag
def waits():
    for _ in range(EACH):
        wait_for("9d")
        wait_for_event("bench-never")
        approval("Never?")
        never()
