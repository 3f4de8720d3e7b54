"""The image and the compose file: valid by their own rules, and in words that Evertick knows."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.names import strange_names, why_no_command
from tests.source_tree import ROOT

DEPLOY = ROOT / "deploy"
IMAGE = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text(encoding="utf-8"))
OURS = {name: each for name, each in COMPOSE["services"].items() if name != "postgres"}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def program(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    words = [str(each) for each in (Path(sys.executable).with_name(name), *arguments)]
    return subprocess.run(words, capture_output=True, text=True, check=False)


def test_the_image_has_nothing_that_a_linter_would_warn_of() -> None:
    linted = program("hadolint", DEPLOY / "Containerfile")
    assert linted.returncode == 0, linted.stdout


def test_the_image_is_locked_and_does_not_run_as_root() -> None:
    assert "--require-hashes -r /build/requirements.lock" in IMAGE
    assert re.findall(r"^USER (.*)$", IMAGE, re.MULTILINE) == ["10001:10001"]
    assert 'ENTRYPOINT ["evertick"]' in IMAGE
    assert strange_names(re.findall(r"\b(EVERTICK_\w+)=", IMAGE)) == []


def test_what_the_image_has_is_what_the_tests_had() -> None:
    """Each package of the image's lock in the same version as in ours, and no tool of development among them."""
    ours, theirs = (_pins(path) for path in (ROOT / "requirements.lock", DEPLOY / "requirements.lock"))
    assert theirs.items() <= ours.items()
    assert {"psycopg", "fastapi", "opentelemetry-sdk"} <= theirs.keys()
    assert not {"pytest", "mypy", "ruff", "playwright"} & theirs.keys()


def _pins(lock: Path) -> dict[str, str]:
    return dict(re.findall(r"^([a-z0-9._-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE))


def test_the_versions_are_those_of_the_program() -> None:
    chart = yaml.safe_load((DEPLOY / "chart" / "Chart.yaml").read_text(encoding="utf-8"))
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)
    assert set(re.findall(r"evertick:([0-9][\w.]*)", IMAGE + (DEPLOY / "compose.yaml").read_text())) == {VERSION}


def test_the_compose_file_fits_its_schema() -> None:
    checked = program("check-jsonschema", "--builtin-schema", "vendor.compose-spec", DEPLOY / "compose.yaml")
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("name", OURS)
def test_every_service_of_the_compose_file_says_what_evertick_understands(name: str) -> None:
    service = OURS[name]
    assert why_no_command(service["command"]) is None
    assert strange_names(service["environment"]) == []
    assert service["read_only"] and service["init"] and service["cap_drop"] == ["ALL"]
    assert service["user"] == "10001:10001"
    if "healthcheck" in service:
        command = service["healthcheck"]["test"]
        assert why_no_command(command[2:]) is None
        assert command[-1].endswith(":" + service["environment"]["EVERTICK_HEALTH_PORT"])


def test_the_services_wait_for_migrations_and_nothing_is_open_to_the_network() -> None:
    assert {name for name, each in OURS.items() if "migrate" in each["depends_on"]} == set(OURS) - {"migrate"}
    assert [port for each in COMPOSE["services"].values() for port in each.get("ports", [])] == ["127.0.0.1:8080:8080"]
    assert {name: OURS[name]["deploy"]["replicas"] for name in ("scheduler", "runner")} == {"scheduler": 2, "runner": 2}
    assert "build" in OURS["migrate"]


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def test_the_workflows_fit_their_schema_and_limit_their_time() -> None:
    for schema in ("vendor.github-workflows", "github-workflows-require-timeout"):
        checked = program("check-jsonschema", "--builtin-schema", schema, *WORKFLOWS)
        assert checked.returncode == 0, checked.stdout


def test_the_workflows_call_commands_that_exist_and_hold_no_permission_for_all_jobs() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    called = set()
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}
        for job in workflow["jobs"].values():
            called |= {step["run"] for step in job["steps"] if "run" in step}
    made = {run.removeprefix("make ") for run in called if run.startswith("make ")}
    assert made >= {"test", "lowest", "package-test", "sbom"} and made <= targets
    scripts = {word for run in called for word in run.split() if word.endswith(".py")}
    assert scripts and all((ROOT / script).exists() for script in scripts)
