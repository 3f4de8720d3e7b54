"""The light body behind gates: a pool on every task, a key that only one task may hold, and tasks that are never admitted."""

from light import body

from evertick import dag, task

HELD = 1000


@dag
def pooled_warm():
    task(name="light", isolation="warm", pool="bench")(body)()


# Warm, like the tasks that it is compared with: by default, a holder of a key has its own process.
@dag(params={"key": 0})
def keyed_warm():
    task(name="light", isolation="warm", mutex="bench:{params.key}", on_lost_contact="continue")(body)()


@dag
def held():
    nobody = task(name="nobody", isolation="warm", pool="closed")(body)
    for _ in range(HELD):
        nobody()
