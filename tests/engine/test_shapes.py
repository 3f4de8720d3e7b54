"""Generated DAGs, some hundreds: the engine does as `domain/shape.py` says. `make shapes` runs thousands."""

from __future__ import annotations

import pytest

from tests.engine.shapes import play_shapes


@pytest.mark.parametrize("seed", range(4))
async def test_the_engine_does_what_the_model_says(database: str, seed: int) -> None:
    assert await play_shapes(database, seed, 60) == 60
