"""A task that asks a person, and one that runs if the answer is yes."""

from evertick import Param, approval, dag, task


@task
def release() -> None:
    print("released")


@dag(tags=["probe"])
def probe_approval():
    approval("Release?", form={"copies": Param(1, minimum=1)}, name="ask") >> release()
