"""Which executor a runner drives, by its name."""

from __future__ import annotations

import pytest

from evertick.config import Settings
from evertick.domain.errors import InvalidSettings
from evertick.execution.local_agents import LocalAgents
from evertick.services.executors import open_executor


def own(settings: Settings) -> object:
    return settings.executor


def broken(settings: Settings) -> object:
    raise RuntimeError("no such cluster")


def test_ours_and_somebodys_own_are_found_by_name() -> None:
    assert isinstance(open_executor(Settings(executor="process")), LocalAgents)
    name = f"{__name__}:own"
    assert open_executor(Settings(executor=name)) == name  # type: ignore[comparison-overlap]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "is unknown: there are local, process, kubernetes, or your own as module:factory"),
        ("no_such_module:make", "cannot be used: ModuleNotFoundError: No module named 'no_such_module'"),
        (f"{__name__}:nothing", "cannot be used: AttributeError"),
        (f"{__name__}:broken", "cannot be used: RuntimeError: no such cluster"),
    ],
)
def test_one_that_cannot_be_used_is_a_setting_to_correct(name: str, message: str) -> None:
    with pytest.raises(InvalidSettings) as error:
        open_executor(Settings(executor=name))
    assert f"EVERTICK_EXECUTOR={name} {message}" in str(error.value)
