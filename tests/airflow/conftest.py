"""The interpreter that has Airflow. Without one these tests are NOT RUN: `make test-airflow` makes it; in CI an error."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.source_tree import ROOT


@pytest.fixture(scope="session")
def airflow_python() -> Path:
    python = Path(os.environ.get("EVERTICK_TEST_AIRFLOW_PYTHON") or ROOT / ".airflow" / "bin" / "python")
    if not python.exists():
        pytest.skip("NOT RUN: no environment with Airflow here, make one with `make test-airflow`")
    return python
