"""Which files define DAGs, and whose they are."""

from __future__ import annotations

import pytest

from evertick.domain.dags.dag_files import is_airflow_file, is_dag_file


@pytest.mark.parametrize(
    ("text", "is_ours", "is_airflows"),
    [
        ("from evertick import dag", True, False),
        ("from airflow import DAG", False, True),
        ("from airflow.sdk import dag, task", False, True),
        ("import airflow\nfrom lib import make_dag", False, True),
        # Airflow itself looks for these two words alone.
        ("# a DAG of Airflow\nfrom lib import make", False, True),
        ("from evertick import dag  # was: from airflow import DAG", True, False),
        ("    from evertick import dag\nimport airflow", True, False),
        ("from airflow.sdk import dag  # not yet moved to evertick", False, True),
        ("# evertick dag, as we had it in airflow\nimport os", True, False),
        ("from airflow.models import Variable", False, False),
        ("import os", False, False),
    ],
)
def test_the_text_of_a_file_says_whose_it_is(text: str, is_ours: bool, is_airflows: bool) -> None:
    assert (is_dag_file(text.encode()), is_airflow_file(text.encode())) == (is_ours, is_airflows)
