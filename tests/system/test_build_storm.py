"""The short form of `make build-storm`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.build_storm import play


@pytest.mark.long
async def test_no_process_uses_an_environment_whose_builder_was_killed(database: str, tmp_path: Path) -> None:
    kills = await play(tmp_path, database, times=2, seed="short", share=1.0)
    assert kills == {"publisher": 2, "runner": 2}
