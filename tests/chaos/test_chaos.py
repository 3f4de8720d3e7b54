"""The fault suite's short form: three scenarios at a size that every test run can afford. `make chaos` plays all of them;
other tests have small forms of the others, as tests/system of N06, N15 and N17.

What is promised in seconds is measured by `make chaos` on a machine of its own; here it matters that it happens at all.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.chaos.catalogue import SCENARIOS, find
from tests.chaos.run import Prepared, folder_on_memory, ground, prepare
from tests.chaos.scenario import perform
from tests.chaos.stage import Size
from tests.databases import run

SEED = "short"


@pytest.fixture(scope="module")
def prepared() -> Iterator[Prepared]:
    """Once for all of them: `initdb` and the migrations take seconds."""
    with folder_on_memory() as folder:
        yield run(prepare(folder))


@pytest.mark.long
@pytest.mark.parametrize("name", ["N05", "N08", "N33"])
@pytest.mark.requirement("N05", "N08", "N33")
async def test_it_survives(name: str, prepared: Prepared) -> None:
    scenario = next(each for each in find(name) if each.name == name)
    async with ground(prepared) as (base, folder):
        verdict = await perform(scenario, base, folder / name, seed=SEED, size=Size.SHORT)
        assert not verdict.not_run
        assert not verdict.violations, _told(verdict.violations, folder / name)


def _told(violations: list[str], folder: Path) -> str:
    """What is wrong, and what a person would look at first, because the folder goes with the test."""
    diagnosis = folder / "diagnosis.txt"
    trace = folder / "traceback.txt"
    parts = [*violations, *(path.read_text() for path in (trace, diagnosis) if path.exists())]
    return "\n".join(parts)


def test_every_fault_of_the_table_has_a_scenario_or_a_reason() -> None:
    numbers = {scenario.name[:3] for scenario in SCENARIOS}
    assert numbers >= {f"N{number:02}" for number in range(1, 38)}
    assert all((scenario.play is None) == bool(scenario.missing) for scenario in SCENARIOS)
