"""The state of a runner's session: pure decisions, with times as arguments and without an event loop."""

from __future__ import annotations

import ast
from dataclasses import dataclass

import pytest

from evertick.domain.attempt import AttemptRef, HeartbeatReply, Outcome, OutcomeKind, RunnerRequest, TaskKey
from evertick.domain.dags.spec import BranchChoice, DagSpec, TaskSpec
from evertick.domain.failover import Server
from evertick.domain.retry import RetryPolicy
from evertick.runner.state import MOST_REPORTS, HeartbeatActions, NextExchange, RunnerState
from tests.source_tree import SOURCE

NOW = 1000.0
OLD, NEW = Server(system_id=7, timeline=1), Server(system_id=7, timeline=2)


@dataclass(frozen=True)
class Claim:
    idx: int
    epoch: int = 1
    attempt: int = 1
    run_id: int = 1
    map_index: int = -1

    @property
    def ref(self) -> AttemptRef:
        return AttemptRef(TaskKey(self.run_id, self.idx, self.map_index), self.epoch)

    def ended(self, kind: OutcomeKind = OutcomeKind.SUCCESS, result_json: str | None = None) -> Outcome:
        return Outcome(key=self.ref.key, epoch=self.epoch, kind=kind, result_json=result_json)


def new_state(slots: int = 4, **options: RunnerRequest | None) -> RunnerState:
    return RunnerState(slots=slots, lost_after_seconds=90.0, now=NOW, **options)


def holding(*claims: Claim, slots: int = 4) -> RunnerState:
    """A state whose first exchange was answered with these claims by the old server."""
    state = new_state(slots)
    assert state.next_exchange(NOW) is not None
    assert state.may_claim_from(OLD)
    state.note_server(OLD)
    state.add_claims(claims, NOW)
    return state


def heartbeat(
    state: RunnerState,
    *,
    sent_at: float = NOW + 1,
    server: Server | None = OLD,
    is_spare: bool = False,
    is_gone: bool = False,
    lost: list[AttemptRef] | None = None,
    stop: list[AttemptRef] | None = None,
    unknown: list[AttemptRef] | None = None,
    request: RunnerRequest | None = None,
) -> HeartbeatActions:
    reply = HeartbeatReply(is_gone=is_gone, lost=lost or [], stop=stop or [], unknown=unknown or [], request=request)
    return state.on_heartbeat(reply, sent_at=sent_at, is_spare=is_spare, server=server)


def free(state: RunnerState, now: float = NOW) -> int:
    """The number of tasks that it would claim now."""
    exchange = state.next_exchange(now)
    if exchange is None:
        return 0
    state.put_back(exchange.ended)
    state.add_claims([], now)
    return exchange.free


def test_the_state_imports_only_the_domain() -> None:
    tree = ast.parse((SOURCE / "runner" / "state.py").read_text(encoding="utf-8"))
    imported = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    ours = {name for name in imported if name.startswith("evertick")}
    assert ours and all(name.startswith("evertick.domain.") for name in ours)
    assert not {"asyncio", "time", "threading"} & {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }


@pytest.mark.requirement("K8")
def test_it_claims_as_many_tasks_as_there_are_free_slots() -> None:
    one, two = Claim(0), Claim(1)
    state = holding(one, two, slots=3)
    assert (free(state), state.active) == (1, 2)
    state.end_attempts([one.ended()], NOW + 2)
    assert state.active == 1
    exchange = state.next_exchange(NOW + 3)
    assert exchange is not None
    assert (exchange.free, [each.key.idx for each in exchange.ended], exchange.ended_at) == (2, [0], NOW + 2)
    state.add_claims([], NOW + 3)
    assert [(each.outcome.key.idx, each.seconds) for each in state.reported(exchange.ended, NOW + 3)] == [(0, 3.0)]
    assert state.held() == [two.ref]


def test_an_attempt_is_held_until_its_report_is_stored() -> None:
    one = Claim(0)
    state = holding(one)
    state.end_attempts([one.ended()], NOW)
    assert (state.active, state.has_ended, state.held()) == (0, True, [one.ref])
    exchange = state.next_exchange(NOW)
    assert exchange is not None and not state.has_ended and not state.is_idle
    state.exchange_failed(exchange, NOW)
    assert (state.unreported, state.held()) == (1, [one.ref])


def test_an_outcome_of_an_attempt_that_is_not_held_is_ignored() -> None:
    one = Claim(0, epoch=2)
    state = holding(one)
    state.end_attempts([Claim(0, epoch=1).ended()], NOW)
    state.end_early(TaskKey(1, 3, -1), 1, OutcomeKind.FAILED, "never claimed")
    assert (state.active, state.has_ended) == (1, False)
    assert state.reported([Claim(0, epoch=1).ended()], NOW) == [] and state.holds(*one.ref)


def test_one_exchange_carries_a_bounded_number_of_outcomes_in_their_order() -> None:
    claims = [Claim(number) for number in range(MOST_REPORTS + 2)]
    state = holding(*claims, slots=MOST_REPORTS + 2)
    state.end_attempts([claim.ended() for claim in claims], NOW)
    exchange = state.next_exchange(NOW)
    assert exchange is not None
    assert [each.key.idx for each in exchange.ended] == list(range(MOST_REPORTS))
    assert state.unreported == 2


def test_a_report_has_the_policy_and_the_number_of_its_attempt() -> None:
    one, policy = Claim(0, attempt=3), RetryPolicy(retries=5)
    state = holding(one)
    state.describe(one.ref.key, policy, "d.a")
    assert state.retry_terms(one.ended()) == (policy, 3)
    assert state.retry_terms(Claim(7).ended()) == (RetryPolicy(), 1)


def test_the_result_of_a_branch_decides_what_is_skipped() -> None:
    tasks = (TaskSpec(name="a", choice=BranchChoice.BRANCH), TaskSpec(name="b"), TaskSpec(name="c"))
    one = Claim(0)
    state = holding(one)
    spec = DagSpec(name="d", tasks=tasks, edges=((0, 1), (0, 2)))
    state.describe(one.ref.key, RetryPolicy(), "d.a", branches=spec)
    state.end_attempts([one.ended(result_json='"b"')], NOW)
    exchange = state.next_exchange(NOW)
    assert exchange is not None and exchange.ended[0].skips == (2,)


def test_nothing_is_sent_when_there_is_nothing_to_report_and_no_free_slot() -> None:
    state = holding(Claim(0), slots=1)
    assert state.next_exchange(NOW) is None
    state = new_state()
    state.is_stopping = True
    assert state.next_exchange(NOW) is None


# The answers of the database


@pytest.mark.requirement("K9", "N09")
def test_what_must_stop_stops_before_anybody_may_take_it_counted_from_the_sending() -> None:
    state = new_state()
    assert state.stop_at == 1075.0
    assert state.on_answer(1010.0)
    assert state.stop_at == 1085.0
    assert heartbeat(state, sent_at=1012.0).stop_at == state.stop_at == 1087.0


def test_an_answer_that_overtook_another_changes_nothing() -> None:
    state = new_state()
    state.on_answer(1020.0)
    assert not state.on_answer(1010.0)
    assert state.stop_at == 1095.0
    assert not heartbeat(state, sent_at=1010.0, request=RunnerRequest.DRAIN).is_new_request
    assert state.request is None


@pytest.mark.requirement("K11")
def test_nothing_is_claimed_by_one_that_may_soon_be_taken_for_lost() -> None:
    state = new_state()
    assert [state.may_claim(now) for now in (1000.0, 1045.0, 1045.1)] == [True, True, False]
    assert state.next_exchange(1045.1) is None
    assert heartbeat(state, sent_at=1050.0).is_exchange_due, "it may claim again"
    assert state.may_claim(1050.0)


@pytest.mark.requirement("K8")
def test_after_a_lost_reply_nothing_is_claimed_until_a_later_heartbeat_tells_what_is_held() -> None:
    state = new_state()
    exchange = state.next_exchange(1000.5)
    assert exchange is not None
    assert state.exchange_failed(exchange, 1001.0), "a heartbeat is sent to find out"
    assert (state.may_claim(1002.0), state.is_idle) == (False, False)
    heartbeat(state, sent_at=1000.5)
    assert not state.may_claim(1002.0), "it was sent before and knows nothing"
    assert heartbeat(state, sent_at=1001.5).is_exchange_due
    assert (state.may_claim(1002.0), state.is_idle) == (True, True)
    assert not heartbeat(state, sent_at=1002.0).is_exchange_due, "there is no doubt any more"


def test_reports_whose_reply_was_lost_leave_no_doubt_about_claims() -> None:
    one = Claim(0)
    state = holding(one, slots=1)
    state.request = RunnerRequest.DRAIN
    state.end_attempts([one.ended()], NOW)
    exchange = state.next_exchange(NOW)
    assert exchange is not None and exchange.free == 0
    assert not state.exchange_failed(exchange, NOW)
    assert state.may_claim(NOW) and state.has_ended


def test_a_step_is_suspect_when_something_that_was_sent_long_after_it_is_answered_before() -> None:
    state = new_state()
    assert not heartbeat(state, sent_at=1001.0, is_spare=True).is_connection_suspect
    assert state.next_exchange(1002.0) is not None
    seen = [
        heartbeat(state, sent_at=at, is_spare=is_spare).is_connection_suspect
        for at, is_spare in ((1001.0, True), (1007.9, True), (1008.1, True), (1008.1, False))
    ]
    assert seen == [False, False, True, False]
    assert not state.is_idle


def test_only_attempts_that_it_holds_are_killed() -> None:
    lost, stopped, other = Claim(0), Claim(1), Claim(2, epoch=5)
    state = holding(lost, stopped)
    actions = heartbeat(state, lost=[lost.ref, other.ref], stop=[stopped.ref, Claim(1, epoch=9).ref])
    assert (actions.kill, actions.stop) == ([lost.ref], [stopped.ref])


def test_a_session_that_was_declared_dead_does_not_extend_its_deadline() -> None:
    one = Claim(0)
    state = holding(one)
    actions = heartbeat(state, is_gone=True, lost=[one.ref], request=RunnerRequest.DRAIN)
    assert actions.is_declared_dead and actions.kill == [one.ref]
    assert (actions.stop_at, state.request) == (1075.0, None)


def test_an_unknown_claim_is_given_back_once_however_often_the_heartbeat_names_it() -> None:
    """Two reports of one attempt in one batch would count it twice."""
    state, unknown = new_state(), [AttemptRef(TaskKey(1, 0, -1), 7)]
    assert [heartbeat(state, unknown=unknown).given_back for _ in range(3)] == [1, 0, 0]
    exchange = state.next_exchange(NOW)
    assert exchange is not None
    assert [(each.key, each.epoch, each.kind) for each in exchange.ended] == [(*unknown[0], OutcomeKind.GIVEN_BACK)]
    assert [each.reason for each in exchange.ended] == ["claim_reply_lost"]


@pytest.mark.requirement("K1", "K11")
def test_what_was_reported_while_a_heartbeat_was_under_way_is_not_taken_for_a_lost_claim() -> None:
    """Its answer comes late, over a long way: it lists an attempt that was claimed, run and reported meanwhile."""
    state, claim = new_state(), Claim(1)
    assert state.next_exchange(NOW) is not None
    state.add_claims([claim], NOW + 0.1)
    state.end_attempts([claim.ended()], NOW + 0.2)
    exchange = state.next_exchange(NOW + 0.3)
    assert exchange is not None
    state.add_claims([], NOW + 0.4)
    state.reported(exchange.ended, NOW + 0.4)
    assert heartbeat(state, sent_at=NOW + 0.05, unknown=[claim.ref]).given_back == 0
    # A heartbeat that was sent later knows better.
    assert heartbeat(state, sent_at=NOW + 1, unknown=[claim.ref]).given_back == 1


def test_claims_that_an_exchange_may_be_bringing_are_not_taken_for_lost() -> None:
    one = Claim(0)
    state = new_state()
    assert state.next_exchange(NOW) is not None
    actions = heartbeat(state, unknown=[one.ref])
    assert (actions.given_back, actions.ask_again) == (0, True)
    state.add_claims([one], NOW)
    actions = heartbeat(state, unknown=[one.ref])
    assert (actions.given_back, actions.ask_again) == (0, False)
    assert state.holds(*one.ref) and not state.has_ended


# Failover


def may_claim_after_exchange(state: RunnerState, server: Server | None) -> bool:
    allowed = state.may_claim_from(server)
    state.note_server(server)
    return allowed


def test_on_the_first_server_everything_that_is_free_may_be_claimed() -> None:
    lost = Claim(0)
    state = new_state()
    heartbeat(state, server=OLD)
    assert state.may_claim_from(OLD)
    state.add_claims([lost], NOW)
    state.note_server(OLD)
    heartbeat(state, server=OLD, lost=[lost.ref])
    assert state.may_claim_from(OLD), "what is lost without a failover has a lower epoch than its successor"


@pytest.mark.requirement("N14", "K1")
def test_a_new_server_is_claimed_from_once_it_has_told_what_was_lost_and_that_is_gone() -> None:
    lost = Claim(0)
    state = holding(lost)
    assert not state.may_claim_from(NEW)
    heartbeat(state, server=OLD)
    assert not state.may_claim_from(NEW), "the answer of the old server does not count"
    assert heartbeat(state, server=NEW, lost=[lost.ref]).kill == [lost.ref]
    assert not state.may_claim_from(NEW), "its body is still there"
    state.end_attempts([lost.ended(OutcomeKind.KILLED)], NOW)
    assert not state.may_claim_from(NEW), "it is not reported yet"
    state.reported([lost.ended(OutcomeKind.KILLED)], NOW)
    assert state.may_claim_from(NEW)


@pytest.mark.requirement("N14", "K1")
def test_a_claim_that_the_old_server_made_last_is_looked_for_on_the_new_one() -> None:
    lost = Claim(0)
    state = new_state()
    assert state.next_exchange(NOW) is not None
    assert state.may_claim_from(OLD)
    heartbeat(state, server=NEW)  # while the exchange is on its way
    state.note_server(OLD)
    state.add_claims([lost], NOW)
    assert not state.may_claim_from(NEW)
    heartbeat(state, server=NEW, lost=[lost.ref])
    assert not state.may_claim_from(NEW)
    state.reported([lost.ended()], NOW)
    assert state.may_claim_from(NEW)


def test_servers_that_do_not_tell_who_they_are_hold_nobody_up() -> None:
    lost = Claim(0)
    state = new_state()
    assert may_claim_after_exchange(state, None)
    state.add_claims([lost], NOW)
    heartbeat(state, server=None, lost=[lost.ref])
    assert state.may_claim_from(None)


# Drain requests


def test_a_request_is_told_once_and_ends_with_the_last_task() -> None:
    state = new_state()
    assert (free(state), state.report_drained()) == (4, False)
    followed = [heartbeat(state, sent_at=NOW + n, request=RunnerRequest.DRAIN) for n in range(2)]
    assert [(each.is_new_request, each.is_exchange_due) for each in followed] == [(True, True), (False, False)]
    assert free(state) == 0
    assert [state.report_drained() for _ in range(2)] == [True, False]
    assert state.follow(RunnerRequest.LEAVE)
    assert (free(state), state.report_drained()) == (0, True)
    assert state.follow(None)
    assert (free(state), state.report_drained()) == (4, False)


def test_a_request_to_the_previous_session_still_applies() -> None:
    state = new_state(request=RunnerRequest.DRAIN)
    assert state.next_exchange(NOW) is None
    assert not state.follow(RunnerRequest.DRAIN)


def test_it_is_idle_when_nothing_runs_and_nothing_waits_to_be_reported() -> None:
    one = Claim(0)
    state = holding(one)
    assert not state.is_idle
    state.end_attempts([one.ended()], NOW)
    assert not state.is_idle
    exchange = state.next_exchange(NOW)
    assert isinstance(exchange, NextExchange) and not state.is_idle
    state.add_claims([], NOW)
    state.reported(exchange.ended, NOW)
    assert state.is_idle


def test_a_runner_that_leaves_by_itself_follows_no_other_request() -> None:
    state = new_state()
    state.leave()
    assert state.next_exchange(NOW) is None and state.asked is None
    assert not state.follow(RunnerRequest.DRAIN) and not state.follow(None)
    assert state.request is RunnerRequest.LEAVE


def test_it_is_idle_since_its_last_attempt_ended() -> None:
    one = Claim(0)
    state = holding(one)
    assert state.idle_seconds(NOW + 60) == 0.0
    state.end_attempts([one.ended()], NOW + 60)
    exchange = state.next_exchange(NOW + 60)
    assert exchange is not None
    state.add_claims([], NOW + 61)
    state.reported(exchange.ended, NOW + 61)
    assert state.idle_seconds(NOW + 100) == 40.0
