"""Every scenario of the table of faults, in its order; those that cannot be played yet with the reason."""

from __future__ import annotations

from tests.chaos.scenario import Scenario
from tests.chaos.scenarios import (
    boundaries,
    clocks,
    composite,
    crowds,
    databases,
    disks,
    edits,
    failover,
    gates,
    leaders,
    past,
    poison,
    runners,
)

_REMOTE = "not written yet for separate processes; tests/services/test_dispatcher.py makes these faults within one"

NOT_YET = (
    Scenario(name="N27", title="a slow and failing Kubernetes API", missing=_REMOTE),
    Scenario(name="N28", title="the executor's API is down with work in line", missing=_REMOTE),
    Scenario(name="N29", title="dispatches are lost with the leader", missing=_REMOTE),
    Scenario(name="N33", title="rolling upgrade", missing="there is no released version to upgrade from yet"),
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
    edits,
    past,
    composite,
)

SCENARIOS: tuple[Scenario, ...] = tuple(
    sorted((*NOT_YET, *(each for module in _MODULES for each in module.SCENARIOS)), key=lambda each: each.name)
)


def find(name: str) -> list[Scenario]:
    """The scenario of that name; a number alone is it with all its variants: N07 is N07 and N07b."""
    wanted = name.upper()
    exact = [each for each in SCENARIOS if each.name.upper() == wanted and not wanted[-1:].isdigit()]
    return exact or [each for each in SCENARIOS if each.name[:3] == wanted]
