"""Operators that wait for people."""

from __future__ import annotations

from datetime import datetime, timedelta

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.hitl import ApprovalOperator, HITLBranchOperator, HITLOperator
from airflow.sdk import DAG, Param, task

with DAG("people", start_date=datetime(2026, 1, 1), schedule=None, is_paused_upon_creation=False):
    ask = HITLOperator(
        task_id="ask",
        subject="Which of {{ dag.dag_id }}?",
        body="Choose **some**.",
        options=["a", "b", "c"],
        multiple=True,
        params={"rows": Param(3, type="integer")},
        assigned_users=[{"id": "ann", "name": "Ann"}],
    )

    @task
    def read(answer):
        return [answer["chosen_options"], answer["params_input"], answer["responded_by_user"]["name"]]

    read(ask.output)
    ApprovalOperator(task_id="approve", subject="Ship it?") >> EmptyOperator(task_id="ship")
    HITLOperator(
        task_id="late", subject="Late?", options=["x", "y"], defaults="y", response_timeout=timedelta(seconds=1)
    )
    HITLOperator(task_id="too_late", subject="Later?", options=["x"], response_timeout=timedelta(seconds=1))
    branch = HITLBranchOperator(task_id="branch", subject="Where?", options=["left", "right"])
    branch >> [EmptyOperator(task_id="left"), EmptyOperator(task_id="right")]
