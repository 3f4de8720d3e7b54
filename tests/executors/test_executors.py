"""Which executor a runner drives, by its name."""

from __future__ import annotations

import pytest

from evertick.config import Settings
from evertick.domain.errors import InvalidSettings
from evertick.executors.agent_process import AgentProcesses
from evertick.executors.registry import api_url_for_agents, open_executor
from evertick.runner.remote.session import make_remote_runner
from tests.system.hosting import Said


def own(settings: Settings) -> object:
    return settings.executor


def broken(settings: Settings) -> object:
    raise RuntimeError("no such cluster")


def test_ours_and_somebodys_own_are_found_by_name() -> None:
    assert isinstance(open_executor(Settings(executor="process")), AgentProcesses)
    name = f"{__name__}:own"
    assert open_executor(Settings(executor=name)) == name  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "nowhere",
            "is unknown. Use one of local, process, kubernetes, docker, slurm, ray, or your own as module:factory",
        ),
        ("no_such_module:make", "cannot be used: ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:nothing", "cannot be used: AttributeError"),
        (f"{__name__}:broken", "cannot be used: RuntimeError: no such cluster"),
    ],
)
def test_one_that_cannot_be_used_is_a_setting_to_correct(name: str, message: str) -> None:
    with pytest.raises(InvalidSettings) as error:
        open_executor(Settings(executor=name))
    assert f"EVERTICK_EXECUTOR={name} {message}" in str(error.value)


@pytest.mark.parametrize(
    ("settings", "url"),
    [
        (Settings(executor="process"), "http://127.0.0.1:8080"),
        (Settings(executor="process", api_host="0.0.0.0", api_port=9000), "http://127.0.0.1:9000"),
        (Settings(executor="process", api_host="::", api_port=9000), "http://[::1]:9000"),
        (Settings(executor="kubernetes", agent_api_url="https://a.example/evertick"), "https://a.example/evertick"),
    ],
)
def test_agents_are_told_where_the_api_is(settings: Settings, url: str) -> None:
    assert api_url_for_agents(settings) == url


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (Settings(executor="kubernetes"), "pods need the API's address as they reach it: set EVERTICK_AGENT_API_URL"),
        (Settings(executor="process", agent_api_url="https://"), "EVERTICK_AGENT_API_URL cannot be used: 'https://'"),
        (Settings(executor="process", agent_api_url="http://me:pw@host"), "EVERTICK_AGENT_API_URL cannot be used"),
    ],
)
def test_an_address_that_no_agent_could_use_is_refused_when_the_runner_starts(settings: Settings, message: str) -> None:
    with pytest.raises(InvalidSettings) as error:
        make_remote_runner(settings, url="postgresql://", log=Said().log)
    assert message in str(error.value) and "pw" not in str(error.value)
