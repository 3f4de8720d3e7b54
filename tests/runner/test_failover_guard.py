"""After a failover a runner claims nothing until it knows what it lost, and that is gone."""

from __future__ import annotations

import pytest

from evertick.domain.attempt import TaskKey
from evertick.domain.failover import Server
from evertick.runner.state import FailoverGuard

OLD, NEW = Server(system_id=7, timeline=1), Server(system_id=7, timeline=2)
LOST = (TaskKey(1, 0, -1), 1)


class Rig:
    def __init__(self) -> None:
        self.held = {LOST}
        self.asked = 0
        self.changeover = FailoverGuard(lambda key, epoch: (key, epoch) in self.held, ask=self._ask)

    def _ask(self) -> None:
        self.asked += 1


def test_on_the_first_server_everything_that_is_free_may_be_claimed() -> None:
    rig = Rig()
    rig.changeover.hear(OLD, [])
    assert [rig.changeover.allow(3, OLD), rig.changeover.allow(2, OLD)] == [3, 2]
    rig.changeover.note_step(OLD)
    rig.changeover.hear(OLD, [LOST])
    assert rig.changeover.allow(4, OLD) == 4, "what is lost without a failover has a lower epoch than its successor"
    assert rig.asked == 0


@pytest.mark.requirement("N14", "K1")
def test_a_new_server_is_claimed_from_once_it_has_told_what_was_lost_and_that_is_gone() -> None:
    rig = Rig()
    assert rig.changeover.allow(3, OLD) == 3
    assert rig.changeover.allow(3, NEW) == 0
    assert rig.asked == 1, "a heartbeat is asked for"
    rig.changeover.hear(OLD, [])
    assert rig.changeover.allow(3, NEW) == 0, "the old server's word does not count"
    rig.changeover.hear(NEW, [LOST])
    assert rig.changeover.allow(3, NEW) == 0, "its body is still there"
    rig.held.clear()
    assert rig.changeover.allow(3, NEW) == 3


@pytest.mark.requirement("N14", "K1")
def test_a_claim_that_the_old_server_made_last_is_looked_for_on_the_new_one() -> None:
    rig = Rig()
    assert rig.changeover.allow(3, OLD) == 3
    rig.changeover.hear(NEW, [])  # while the step is on its way
    rig.changeover.note_step(OLD)
    assert rig.changeover.allow(3, NEW) == 0
    rig.changeover.hear(NEW, [LOST])
    assert rig.changeover.allow(3, NEW) == 0
    rig.held.clear()
    assert rig.changeover.allow(3, NEW) == 3


def test_servers_that_do_not_tell_who_they_are_hold_nobody_up() -> None:
    rig = Rig()
    assert rig.changeover.allow(3, None) == 3
    rig.changeover.note_step(None)
    rig.changeover.hear(None, [LOST])
    assert rig.changeover.allow(3, None) == 3
