"""Which server may be written to after a failover, and what is known of the writes before it."""

from __future__ import annotations

import pytest

from evertick.domain.failover import FailoverResult, Server, WalMark, judge, lsn_text, refusal

BEFORE = Server(system_id=7, timeline=3)
AFTER = Server(system_id=7, timeline=4)
STRANGER = Server(system_id=8, timeline=9)


@pytest.mark.parametrize(("seen", "found"), [(None, BEFORE), (BEFORE, BEFORE), (BEFORE, AFTER)])
def test_the_same_server_and_one_that_was_promoted_later_may_be_written_to(seen: Server | None, found: Server) -> None:
    assert refusal(seen, found) is None


@pytest.mark.requirement("N14")
def test_an_old_primary_is_refused_with_what_to_do() -> None:
    why = refusal(AFTER, BEFORE)
    assert why is not None
    for part in ("timeline 3", "timeline 4", "Shut it down or make it a standby", "restart this process"):
        assert part in why


@pytest.mark.parametrize("seen", [BEFORE, AFTER])
def test_another_cluster_is_refused_whatever_its_timeline(seen: Server) -> None:
    why = refusal(seen, STRANGER)
    assert why is not None
    for part in ("system identifier 8", "(7)", "restored or moved on purpose, restart this process"):
        assert part in why


@pytest.mark.requirement("N14")
@pytest.mark.parametrize(
    ("stored", "found", "is_synchronous", "verdict"),
    [
        (100, BEFORE, False, FailoverResult.SAME),
        (101, BEFORE, False, FailoverResult.SAME),
        (100, AFTER, True, FailoverResult.SAFE),
        (100, AFTER, False, FailoverResult.UNPROVEN),
        (99, AFTER, True, FailoverResult.LOST),
        (99, AFTER, False, FailoverResult.LOST),
        (99, BEFORE, True, FailoverResult.LOST),
        (None, AFTER, True, FailoverResult.LOST),
    ],
)
def test_a_mark_that_is_gone_is_a_loss_and_one_that_is_there_a_proof_only_if_commits_waited(
    stored: int | None, found: Server, is_synchronous: bool, verdict: FailoverResult
) -> None:
    mark = WalMark(server=BEFORE, lsn=100, is_synchronous=is_synchronous)
    assert judge(mark, stored, found) is verdict


def test_a_place_in_the_log_is_written_as_postgres_does() -> None:
    assert lsn_text(0x16_0000_0ABC) == "16/ABC"
