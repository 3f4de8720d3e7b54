"""The short form of `make test-airflow`: a few of Airflow's example files through a real `evertick up`, compared with what
Airflow made of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.airflow.examples.compare import compare
from tests.airflow.examples.files import known_truth

FILES = (
    "example_bash_operator.py",
    "example_branch_labels.py",
    "example_setup_teardown.py",
    "example_xcomargs.py",
    "example_skip_dag.py",
    "tutorial_taskflow_api.py",
)


@pytest.mark.long
def test_examples_end_as_under_airflow(airflow_python: Path) -> None:
    truth = known_truth(airflow_python)
    assert set(FILES) <= set(truth)
    found = compare(airflow_python, FILES)
    assert (found.files, found.loaded) == (len(FILES), len(FILES)), found.table()
    assert not found.new(), found.table()
    assert found.compared >= len(FILES) and found.same_instances >= 30, found.table()
