"""A task that asks a person, and one that runs if the answer is yes."""

from airflow.providers.standard.operators.hitl import ApprovalOperator
from airflow.sdk import Param, dag, task


@task
def release() -> None:
    print("released")


@dag(schedule=None, tags=["probe"], is_paused_upon_creation=False)
def probe_approval():
    ask = ApprovalOperator(task_id="ask", subject="Release?", params={"copies": Param(1, type="integer", minimum=1)})
    ask >> release()


probe_approval()
