"""How a session stands with the database and with people: pure decisions, with times as arguments."""

from __future__ import annotations

import pytest

from evertick.engine.runners import RunnerRequest
from evertick.runner.state import DatabaseLiveness, DrainState
from tests.system.hosting import Said


@pytest.mark.requirement("K9", "N09")
def test_what_must_stop_stops_before_anybody_may_take_it_counted_from_the_sending() -> None:
    contact = DatabaseLiveness(90.0, now=1000.0)
    assert contact.stop_at == 1075.0
    assert contact.note_heard(1010.0)
    assert contact.stop_at == 1085.0


def test_an_answer_that_overtook_another_changes_nothing() -> None:
    contact = DatabaseLiveness(90.0, now=1000.0)
    contact.note_heard(1020.0)
    assert not contact.note_heard(1010.0)
    assert contact.stop_at == 1095.0


@pytest.mark.requirement("K11")
def test_nothing_is_claimed_by_one_that_may_soon_be_taken_for_lost() -> None:
    contact = DatabaseLiveness(90.0, now=1000.0)
    assert [contact.may_claim(now) for now in (1000.0, 1045.0, 1045.1)] == [True, True, False]
    contact.note_heard(1050.0)
    assert contact.may_claim(1050.0)


@pytest.mark.requirement("K8")
def test_after_a_lost_reply_nothing_is_claimed_until_a_later_heartbeat_tells_what_is_held() -> None:
    contact = DatabaseLiveness(90.0, now=1000.0)
    contact.doubt(1001.0)
    assert (contact.may_claim(1002.0), contact.is_certain) == (False, False)
    assert not contact.settle_doubt(1000.5), "it was sent before and knows nothing"
    assert contact.settle_doubt(1001.5)
    assert (contact.may_claim(1002.0), contact.is_certain) == (True, True)
    assert not contact.settle_doubt(1002.0), "there is no doubt any more"


def test_a_step_is_suspect_when_something_that_was_sent_long_after_it_is_answered_before() -> None:
    contact = DatabaseLiveness(90.0, now=1000.0)
    assert not contact.is_step_suspect(1001.0)
    contact.stepping_since = 1002.0
    assert [contact.is_step_suspect(sent_at) for sent_at in (1001.0, 1007.9, 1008.1)] == [False, False, True]
    assert not contact.is_certain


def test_a_request_is_told_once_and_ends_with_the_last_task() -> None:
    said = Said()
    duty = DrainState(None, log=said.log)
    assert (duty.is_free, duty.note_idle()) == (True, False)
    assert [duty.hear(RunnerRequest.DRAIN) for _ in range(2)] == [True, False]
    assert [duty.note_idle() for _ in range(2)] == [False, False]
    assert duty.hear(RunnerRequest.LEAVE)
    assert (duty.is_free, duty.note_idle()) == (False, True)
    assert duty.hear(None)
    assert (duty.is_free, duty.note_idle()) == (True, False)
    assert [event["event"] for event in said.all] == ["drain", "drained", "drain", "drained", "undrain"]
