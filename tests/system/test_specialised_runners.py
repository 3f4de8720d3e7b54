"""Real runners of some names on one database: each executes only its own, and one that matches nothing says so."""

from __future__ import annotations

import pytest

from tests.system.processes import Installation
from tests.system.work import start_run
from tests.waiting import eventually

pytestmark = pytest.mark.requirement("K7")


async def who_ran(there: Installation, run_id: int) -> set[str]:
    query = "select distinct r.runner_id from task k join runner r on r.session = k.session where k.run_id = %s"
    return {row[0] for row in await there.rows(query, run_id)}


async def test_two_specialised_runners_share_one_database_and_never_take_what_they_do_not_match(
    there: Installation,
) -> None:
    left = await there.start("runner", runner_id="left", runner_task_patterns=("many::**",))
    await there.start("runner", runner_id="right", runner_task_patterns=("single::*", "again::*"))
    runs = [await start_run(there.conn, dag) for dag in ("single", "many", "single")]
    left_alone = await start_run(there.conn, "warm")
    assert [await there.ended(run_id, 60) for run_id in runs] == ["success"] * 3
    assert [await who_ran(there, run_id) for run_id in runs] == [{"right"}, {"left"}, {"right"}]
    assert await who_ran(there, left_alone) == set()
    assert left.events("pattern_unmatched") == []
    # A general runner beside them takes what nobody else does.
    await there.start("runner", runner_id="any")
    assert await there.ended(left_alone, 60) == "success"
    assert await who_ran(there, left_alone) == {"any"}


async def test_a_runner_whose_patterns_match_nothing_says_so_and_why(there: Installation) -> None:
    runner = await there.start(
        "runner", runner_id="r1", runner_queues=("gpu",), runner_task_patterns=("nobody::*", "single::*")
    )
    nothing = await runner.saw("pattern_unmatched", pattern="nobody::*")
    assert "No published task matches it" in nothing["message"]
    elsewhere = await runner.saw("pattern_unmatched", pattern="single::*")
    assert "wait in default, but this runner serves only gpu" in elsewhere["message"]
    await eventually(
        lambda: there.value("select task_patterns = '{nobody::*,single::*}' from runner where ended_at is null")
    )
