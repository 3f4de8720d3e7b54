"""Every scenario of the table of faults, in its order; those that cannot be played yet with the reason."""

from __future__ import annotations

from tests.chaos.scenario import Scenario
from tests.chaos.scenarios import (
    agents,
    airflow_files,
    boundaries,
    clocks,
    composite,
    crowds,
    databases,
    disks,
    dispatches,
    edits,
    failover,
    gates,
    https,
    launchers,
    leaders,
    past,
    poison,
    remote,
    runners,
    upgrades,
)

_MODULES = (
    leaders,
    boundaries,
    runners,
    databases,
    failover,
    disks,
    clocks,
    poison,
    crowds,
    gates,
    https,
    launchers,
    edits,
    past,
    remote,
    dispatches,
    agents,
    airflow_files,
    upgrades,
    composite,
)

SCENARIOS: tuple[Scenario, ...] = tuple(
    sorted((each for module in _MODULES for each in module.SCENARIOS), key=lambda each: each.name)
)


def find(name: str) -> list[Scenario]:
    """The scenario of that name; a number alone is it with all its variants: N07 is N07 and N07b."""
    wanted = name.upper()
    exact = [each for each in SCENARIOS if each.name.upper() == wanted and not wanted[-1:].isdigit()]
    return exact or [each for each in SCENARIOS if each.name[:3] == wanted]
