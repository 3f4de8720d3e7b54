"""Settings: every threshold can be set, and what cannot work is refused at the start, with the two that disagree."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from evertick.config import Settings, environment_for, given_settings, read_settings
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
    assert read_settings(environment_for(settings, {})) == replace(settings, config="none")


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


def in_file(folder: Path, text: str, name: str = "evertick.toml") -> dict[str, str]:
    (folder / name).write_text(text)
    return {"EVERTICK_CONFIG": str(folder / name)}


def test_a_file_has_every_kind_of_setting(tmp_path: Path) -> None:
    environment = in_file(
        tmp_path,
        'home = "data"\nlog = "json"\nrunner_slots = 3\ntick_seconds = 1\nhealth = false\nrunner_queues = ["a", "b"]\n'
        'results_folder = "/results"\n',
    )
    found = read_settings(environment)
    assert (found.home, found.results_folder) == (tmp_path / "data", Path("/results"))
    assert (found.log, found.runner_slots, found.tick_seconds, found.health) == ("json", 3, 1.0, False)
    assert found.runner_queues == ("a", "b")
    # A child process reads no file: one that is damaged meanwhile must not stop it.
    (tmp_path / "evertick.toml").write_text("damaged")
    assert read_settings(environment_for(found, environment)) == replace(found, config="none")


def test_an_option_precedes_a_variable_which_precedes_the_file(tmp_path: Path) -> None:
    environment = in_file(tmp_path, "runner_slots = 3\ninfra_retries = 9\napi_port = 1\n")
    environment |= {"EVERTICK_RUNNER_SLOTS": "4", "EVERTICK_API_PORT": "2"}
    found = read_settings(environment, api_port=5)
    assert (found.infra_retries, found.runner_slots, found.api_port) == (9, 4, 5)
    sources = {name: each.source for name, each in given_settings(environment).items()}
    assert sources["runner_slots"] == "EVERTICK_RUNNER_SLOTS"
    assert sources["infra_retries"] == str(tmp_path / "evertick.toml")


def test_the_file_of_the_current_directory_is_read_and_its_own_file_precedes_the_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    in_file(tmp_path, '[project]\nname = "evertick"\n', "pyproject.toml")
    assert read_settings({}) == Settings()
    in_file(tmp_path, '[tool.evertick]\nhome = "here"\nrunner_slots = 3\n', "pyproject.toml")
    assert read_settings({}) == Settings(home=Path("here"), runner_slots=3)
    assert read_settings({"EVERTICK_CONFIG": "none"}).runner_slots == Settings().runner_slots
    in_file(tmp_path, "runner_slots = 4\n")
    assert read_settings({}) == Settings(runner_slots=4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("runer_slots = 3", "evertick.toml: unknown setting 'runer_slots'. Did you mean 'runner_slots'?"),
        ("EVERTICK_RUNNER_SLOTS = 3", "unknown setting 'EVERTICK_RUNNER_SLOTS'. Did you mean 'runner_slots'?"),
        ("zzz = 3", "unknown setting 'zzz'. List all with `evertick config show`."),
        ("config = 'other.toml'", "unknown setting 'config'"),
        ("[runner]\nslots = 3", "unknown setting 'runner'."),
        ("runner_slots = '3'", "runner_slots is '3', but it must be a whole number."),
        ("runner_slots = true", "runner_slots is True, but it must be a whole number."),
        ("health = 'on'", "health is 'on', but it must be true or false."),
        ("runner_queues = 'a,b'", "runner_queues is 'a,b', but it must be a list of texts."),
        ("home = 3", "home is 3, but it must be a text."),
        (
            "home = 1 2",
            "evertick.toml is not valid TOML: Expected newline or end of document after a statement (at line 1",
        ),
        (
            "runner_slots = 0",
            "EVERTICK_RUNNER_SLOTS=0 is too small: the lowest is 1. EVERTICK_RUNNER_SLOTS is runner_slots in ",
        ),
        ("tick_seconds = 50", "EVERTICK_TICK_SECONDS is tick_seconds in "),
    ],
)
def test_a_wrong_file_is_refused_with_its_name(tmp_path: Path, text: str, expected: str) -> None:
    with pytest.raises(InvalidSettings) as refused:
        read_settings(in_file(tmp_path, text))
    assert expected in str(refused.value)
    assert str(tmp_path) in str(refused.value)


def test_a_file_that_does_not_exist_and_a_project_without_a_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="there is no such file"):
        read_settings({"EVERTICK_CONFIG": str(tmp_path / "no.toml")})
    with pytest.raises(InvalidSettings, match=r"write \[tool\.evertick\]"):
        read_settings(in_file(tmp_path, "[tool]\nevertick = 3\n", "pyproject.toml"))
    with pytest.raises(InvalidSettings, match="cannot be read"):
        read_settings({"EVERTICK_CONFIG": str(tmp_path)})
