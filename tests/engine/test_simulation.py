"""The simulation in its short form: 5,000 random steps, invariants after each. `make simulate` runs a million."""

from __future__ import annotations

import pytest

from tests.databases import Cluster
from tests.engine.simulation import ACTIONS, STEPS_PER_EPISODE, run_episode

PARTS = 2
EPISODES = 5_000 // STEPS_PER_EPISODE


@pytest.mark.requirement("I3", "I4", "I5", "I6", "I8", "K1", "K4")
@pytest.mark.parametrize("part", range(PARTS))
async def test_no_random_sequence_of_verbs_breaks_an_invariant(cluster: Cluster, template: str, part: int) -> None:
    seen: set[str] = set()
    for episode in range(EPISODES // PARTS):
        name = cluster.create(template)
        seen |= set(await run_episode(cluster.database_url(name), seed=part * 1000 + episode))
        cluster.drop(name)
    assert seen == set(ACTIONS)
