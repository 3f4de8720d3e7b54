"""`evertick config`: every setting with its source, and no secret."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from evertick.config import Settings
from tests.cli.conftest import Cli

FILE = """
runner_slots = 3
database_url = "postgresql://me:hunter2@db.example/evertick"
admin_password = "hunter2-too"
notify_on_failure = ["webhook:https://hooks.example/T0/secret-path"]
"""


@pytest.fixture
def configured(nowhere: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (nowhere / "evertick.toml").write_text(FILE)
    (nowhere / "evertick.toml").chmod(0o644)
    monkeypatch.setenv("EVERTICK_TOKEN", "hunter3")
    return nowhere


async def test_every_setting_is_shown_with_its_source_and_secrets_are_masked(
    cli_without_database: Cli, configured: Path
) -> None:
    ran = await cli_without_database("config", "show", "--json")
    found = {each["name"]: each for each in ran.json["settings"]}
    assert list(found) == [each.name for each in fields(Settings)]
    assert found["runner_slots"] == {
        **{"name": "runner_slots", "variable": "EVERTICK_RUNNER_SLOTS", "value": 3, "source": "evertick.toml"}
    }
    assert (found["token"]["value"], found["token"]["source"]) == ("***", "EVERTICK_TOKEN")
    assert found["database_url"]["value"] == "postgresql://me:***@db.example/evertick"
    assert found["notify_on_failure"]["value"] == ["webhook:https://hooks.example/***"]
    assert (found["tick_seconds"]["value"], found["tick_seconds"]["source"]) == (1.0, "default")
    table = (await cli_without_database("config", "show", "--changed")).out
    assert "runner_slots" in table and "tick_seconds" not in table
    assert "hunter" not in ran.out + table and "secret-path" not in ran.out + table


async def test_a_check_reports_what_is_unknown_and_who_can_read_a_secret(
    cli_without_database: Cli, configured: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = await cli_without_database("config", "check")
    assert ran.status == 0, ran
    assert "chmod 600 evertick.toml" in ran.out
    assert "Valid: 5 settings." in ran.out
    (configured / "evertick.toml").chmod(0o600)
    assert "chmod" not in (await cli_without_database("config", "check")).out
    monkeypatch.setenv("EVERTICK_RUNER_SLOTS", "3")
    ran = await cli_without_database("config", "check")
    assert (ran.status, "did you mean 'EVERTICK_RUNNER_SLOTS'?" in ran.err) == (2, True), ran
    (configured / "evertick.toml").write_text("runer_slots = 3\n")
    ran = await cli_without_database("dags", "test", "x")
    assert ran.status == 2 and "Did you mean 'runner_slots'?" in ran.err, ran
