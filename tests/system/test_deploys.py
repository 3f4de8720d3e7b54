"""Deployments over HTTP under kills: the short form of `make deploys`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.system.deploys import Stage


@pytest.mark.long
async def test_no_deployment_is_half_published_when_the_api_is_killed(database: str, tmp_path: Path) -> None:
    stage = Stage(database, tmp_path, seed=7)
    await stage.run(5, {2: "kill", 3: "cut"}.get)
    assert stage.wrong == []
    assert stage.counts["published"] >= 2 and stage.counts["looks"] > 20
    assert stage.counts["answer 400"] == 1, "the broken one"
