"""The probe that a real Airflow passes, against `evertick up` with the same DAGs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.api import airflow_probe
from tests.api.airflow_probe import CHECKS, DAGS, connected, outcome
from tests.api.airflow_world import operations
from tests.system.test_up import Up

FILES = Path(airflow_probe.__file__).parent / "airflow_probe_dags"
PASSWORD = "correct horse battery"
OUTSIDE_THE_CLIENT = {"create_token_cli", "openapi_document"}


def test_checks_are_named_after_operations_and_both_dialects_have_the_same_dags() -> None:
    assert set(CHECKS) - OUTSIDE_THE_CLIENT <= {each.name for each in operations()}
    for dialect in ("airflow", "evertick"):
        sources = {path.name: path.read_text(encoding="utf-8") for path in (FILES / dialect).glob("*.py")}
        assert set(sources) == {path.name for path in (FILES / "airflow").glob("*.py")}
        assert sorted(re.findall(r"^def (probe_\w+)", "\n".join(sources.values()), re.M)) == DAGS


@pytest.mark.long
def test_the_official_client_finds_no_difference_from_airflow(tmp_path: Path) -> None:
    settings = {"EVERTICK_ADMIN_PASSWORD": PASSWORD, "EVERTICK_API_RATE_LIMIT": "0"}
    up = Up(tmp_path, "--dags", str(FILES / "evertick"), "--port", "0", **settings)
    try:
        up.wait_for("api_listening")
        found = re.search(r"api_listening +url=(\S+)", up.output)
        assert found is not None
        probe = connected(found[1], "admin", PASSWORD)
        differences = {name: difference for name in CHECKS if (difference := outcome(probe, name))}
        assert not differences
    finally:
        up.end()
