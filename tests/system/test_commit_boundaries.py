"""kill -9 of the scheduler and of a runner at every commit boundary, both in one play: the outcome equals an uninterrupted run.

Which statements there are to be killed at is found out by listening to an uninterrupted run, so a new one is covered.
`make boundaries` kills at every execution of each.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.system.boundaries import SERVICES, Rehearsed, Stage, chosen_sites, failures, in_pairs


@pytest.mark.requirement(
    "N06",
    "A3",
    "B5",
    "V1",
    "V2",
    "V4",
    "V7",
    "V9",
    "I3",
    "I4",
    "I5",
    "K1",
    "M2",
    "F2",
    "M3",
    "F3",
    "M4",
    "F4",
    "M5",
    "F5",
)
@pytest.mark.long
async def test_a_service_that_is_killed_at_a_commit_boundary_changes_nothing(
    stage: Stage, rehearsed: Rehearsed
) -> None:
    seed = int(os.environ.get("EVERTICK_TEST_SEED") or random.randrange(10**6))
    expected, counts = rehearsed
    sites = {kind: list(chosen_sites(counts, kind, random.Random(seed))) for kind in SERVICES}
    wrong, reached = await failures(stage, in_pairs(*sites.values()), expected)
    assert not wrong, f"EVERTICK_TEST_SEED={seed} chooses the same places:\n" + "\n\n".join(wrong)
    wanted = {(site.statement, site.when) for chosen in sites.values() for site in chosen}
    missed = wanted - {(site.statement, site.when) for site in reached}
    assert not missed, f"nobody was killed there: {missed}"
