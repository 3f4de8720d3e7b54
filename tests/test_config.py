"""Settings: every threshold can be set, and what cannot work is refused at the start, with the two that disagree."""

from __future__ import annotations

from dataclasses import fields

import pytest

from evertick.config import Settings, environment_for, read_settings
from evertick.domain.errors import InvalidSettings

# Each threshold of planning, reaping and running, with a value that is neither its default nor at odds with the others.
THRESHOLDS = {
    "tick_seconds": 0.5,
    "leader_lease_seconds": 8.0,
    "maintenance_timeout_seconds": 2.0,
    "heartbeat_seconds": 3.0,
    "lost_after_seconds": 45.0,
    "reconcile_seconds": 10.0,
    "orphan_after_seconds": 120.0,
    "dispatch_lost_seconds": 60.0,
    "infra_retries": 7,
    "max_active_retries": 11,
    "runner_slots": 3,
    "stop_grace_seconds": 4.0,
}

# By the two that disagree: values that only just do not work, and the first that do.
AT_ODDS = {
    ("lost_after_seconds", "heartbeat_seconds"): ((29.9, 10.0), (30.0, 10.0)),
    ("agent_lost_after_seconds", "heartbeat_seconds"): ((89.9, 30.0), (90.0, 30.0)),
    ("agent_lost_after_seconds", "agent_report_seconds"): ((79.9, 40.0), (80.0, 40.0)),
    ("tick_seconds", "lost_after_seconds"): ((30.0, 30.0), (29.9, 30.0)),
    ("orphan_after_seconds", "reconcile_seconds"): ((59.9, 30.0), (60.0, 30.0)),
    ("leader_lease_seconds", "tick_seconds"): ((2.9, 1.0), (3.0, 1.0)),
    ("dispatch_lost_seconds", "tick_seconds"): ((9.9, 1.0), (10.0, 1.0)),
}
FLOATS = [each.name for each in fields(Settings) if each.type == "float"]


def variable(name: str) -> str:
    return f"EVERTICK_{name.upper()}"


@pytest.mark.requirement("B7", "A15", "K3")
@pytest.mark.parametrize("name", THRESHOLDS)
def test_a_threshold_is_what_the_environment_says(name: str) -> None:
    value = THRESHOLDS[name]
    assert getattr(Settings(), name) != value
    assert getattr(read_settings({variable(name): str(value)}), name) == value


@pytest.mark.requirement("B7", "A15", "A9")
def test_a_child_process_is_started_with_the_same_settings() -> None:
    environment = {variable(name): str(value) for name, value in THRESHOLDS.items()}
    environment |= {"EVERTICK_RUNNER_QUEUES": "small,large", "EVERTICK_LISTEN_NOTIFY": "off"}
    settings = read_settings(environment)
    assert read_settings(environment_for(settings, {})) == settings


@pytest.mark.requirement("A15", "K3")
@pytest.mark.parametrize("pair", AT_ODDS, ids=" and ".join)
def test_two_that_disagree_are_refused_by_name_and_at_the_border(pair: tuple[str, str]) -> None:
    refused, accepted = AT_ODDS[pair]
    # The others are far away, so that only these two can disagree.
    far = {
        "agent_lost_after_seconds": 1000.0,
        "agent_report_seconds": 1.0,
        "leader_lease_seconds": 1000.0,
        "lost_after_seconds": 1000.0,
        "orphan_after_seconds": 1000.0,
        "dispatch_lost_seconds": 100_000.0,
    }
    far = {name: value for name, value in far.items() if name not in pair}
    far |= {"executor": "process"} if "dispatch_lost_seconds" in pair else {}  # type: ignore[dict-item]
    with pytest.raises(InvalidSettings) as error:
        Settings(**far, **dict(zip(pair, refused, strict=True)))  # type: ignore[arg-type]
    for name, value in zip(pair, refused, strict=True):
        assert f"{variable(name)}={value}" in str(error.value)
    Settings(**far, **dict(zip(pair, accepted, strict=True)))  # type: ignore[arg-type]


@pytest.mark.requirement("A15")
@pytest.mark.parametrize("raw", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("name", FLOATS)
def test_a_number_that_is_none_is_refused(name: str, raw: str) -> None:
    with pytest.raises(InvalidSettings, match=variable(name)):
        read_settings({variable(name): raw})


@pytest.mark.requirement("A15")
@pytest.mark.parametrize("raw", ["soon", "1s", "1,5"])
def test_what_is_no_number_is_refused_by_name(raw: str) -> None:
    with pytest.raises(InvalidSettings) as error:
        read_settings({"EVERTICK_TICK_SECONDS": raw})
    assert str(error.value) == f"EVERTICK_TICK_SECONDS={raw!r} is not a number."


@pytest.mark.requirement("A15")
def test_the_command_line_goes_before_the_environment_and_is_checked_as_well() -> None:
    environment = {"EVERTICK_RUNNER_SLOTS": "5"}
    assert read_settings(environment, runner_slots=6).runner_slots == 6
    assert read_settings(environment, runner_slots=None).runner_slots == 5
    with pytest.raises(InvalidSettings, match="EVERTICK_RUNNER_SLOTS=0 is too small: the lowest is 1"):
        read_settings(environment, runner_slots=0)
