"""The thirteen trigger rules, against a second model written from Airflow's sentences over a plain list of states."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from evertick.domain.dags.trigger_rules import RuleDecision, UpstreamCounts, decide
from evertick.domain.states import TriggerRule


@dataclass(frozen=True, slots=True, kw_only=True)
class Upstream:
    """The model's view: one state per upstream task (None = not ended) and which of them are setups."""

    states: tuple[str | None, ...]
    setups: tuple[bool, ...]

    def all_are(self, *wanted: str) -> bool:
        return all(state in wanted for state in self.states)

    def some_are(self, *wanted: str) -> bool:
        return any(state in wanted for state in self.states)

    @property
    def ended(self) -> bool:
        return None not in self.states

    @property
    def setup_states(self) -> list[str | None]:
        return [state for state, is_setup in zip(self.states, self.setups, strict=True) if is_setup]


OK, SKIPPED = "success", "skipped"
BROKEN = ("failed", "canceled", "upstream_failed")
ENDINGS = (OK, SKIPPED, *BROKEN)
Sentence = Callable[[Upstream], bool]


def never(_: Upstream) -> bool:
    return False


# For each rule: it runs when ..., it is upstream_failed when ..., it is skipped when ...
SENTENCES: dict[str, tuple[Sentence, Sentence, Sentence]] = {
    "all_success": (
        lambda u: u.all_are(OK),
        lambda u: u.some_are(*BROKEN),
        lambda u: u.some_are(SKIPPED) and not u.some_are(*BROKEN),
    ),
    "all_failed": (lambda u: u.all_are(*BROKEN), never, lambda u: u.some_are(OK, SKIPPED)),
    "all_done": (lambda u: u.ended, never, never),
    "all_done_min_one_success": (
        lambda u: u.ended and u.some_are(OK) and not u.some_are(SKIPPED),
        lambda u: u.all_are(*BROKEN),
        lambda u: u.some_are(SKIPPED),
    ),
    "all_done_setup_success": (
        lambda u: u.ended and (not u.setup_states or OK in u.setup_states),
        lambda u: (
            u.ended
            and bool(u.setup_states)
            and OK not in u.setup_states
            and any(state != SKIPPED for state in u.setup_states)
        ),
        lambda u: u.ended and bool(u.setup_states) and all(state == SKIPPED for state in u.setup_states),
    ),
    "one_success": (
        lambda u: u.some_are(OK),
        lambda u: u.ended and not u.some_are(OK) and u.some_are(*BROKEN),
        lambda u: u.all_are(SKIPPED),
    ),
    "one_failed": (lambda u: u.some_are(*BROKEN), never, lambda u: u.all_are(OK, SKIPPED)),
    "one_done": (
        lambda u: u.some_are(OK, "failed", "canceled"),
        never,
        lambda u: u.all_are(SKIPPED, "upstream_failed"),
    ),
    "none_failed": (lambda u: u.all_are(OK, SKIPPED), lambda u: u.some_are(*BROKEN), never),
    "none_failed_min_one_success": (
        lambda u: u.all_are(OK, SKIPPED) and u.some_are(OK),
        lambda u: u.some_are(*BROKEN),
        lambda u: u.all_are(SKIPPED),
    ),
    "none_skipped": (lambda u: u.all_are(OK, *BROKEN), never, lambda u: u.some_are(SKIPPED)),
    "all_skipped": (lambda u: u.all_are(SKIPPED), never, lambda u: u.some_are(OK, *BROKEN)),
    "always": (lambda u: True, never, never),
}


def by_sentences(rule: TriggerRule, upstream: Upstream) -> RuleDecision:
    if not upstream.states:
        return RuleDecision.RUN
    decisions = (RuleDecision.RUN, RuleDecision.UPSTREAM_FAILED, RuleDecision.SKIP)
    true = [name for name, sentence in zip(decisions, SENTENCES[rule], strict=True) if sentence(upstream)]
    assert len(true) <= 1, f"the model contradicts itself for {rule} on {upstream}"
    return true[0] if true else RuleDecision.WAIT


def counts_of(upstream: Upstream) -> UpstreamCounts:
    states, setups = Counter(upstream.states), Counter(upstream.setup_states)
    return UpstreamCounts(
        total=len(upstream.states),
        success=states[OK],
        failed=states["failed"] + states["canceled"],
        upstream_failed=states["upstream_failed"],
        skipped=states[SKIPPED],
        setup_total=setups.total(),
        setup_success=setups[OK],
        setup_skipped=setups[SKIPPED],
    )


def every_upstream(most: int, *, with_setups: bool) -> list[Upstream]:
    found = []
    for size in range(most + 1):
        for states in itertools.product((None, *ENDINGS), repeat=size):
            flags = itertools.product((False, True), repeat=size) if with_setups else [(False,) * size]
            found += [Upstream(states=states, setups=setups) for setups in flags]
    return found


@pytest.mark.parametrize("rule", TriggerRule)
def test_every_rule_agrees_with_its_sentences_for_up_to_four_upstream_tasks(rule: TriggerRule) -> None:
    with_setups = rule is TriggerRule.ALL_DONE_SETUP_SUCCESS
    for upstream in every_upstream(4, with_setups=with_setups):
        assert decide(rule, counts_of(upstream)) == by_sentences(rule, upstream), upstream


@pytest.mark.parametrize("rule", TriggerRule)
def test_no_rule_waits_once_every_upstream_task_has_ended(rule: TriggerRule) -> None:
    for upstream in every_upstream(4, with_setups=rule is TriggerRule.ALL_DONE_SETUP_SUCCESS):
        if upstream.ended:
            assert decide(rule, counts_of(upstream)) != RuleDecision.WAIT, upstream


@pytest.mark.parametrize("rule", TriggerRule)
def test_a_decision_taken_early_is_the_one_that_would_be_taken_at_the_end(rule: TriggerRule) -> None:
    for upstream in every_upstream(3, with_setups=False):
        early = decide(rule, counts_of(upstream))
        if early == RuleDecision.WAIT:
            continue
        for ended in completions(upstream):
            mixed = ended.some_are(SKIPPED) and ended.some_are(*BROKEN)
            if rule is TriggerRule.ALL_SUCCESS and mixed:
                continue  # the one case where Airflow's answer depends on which upstream task ends first
            assert decide(rule, counts_of(ended)) == early, (upstream, ended)


def completions(upstream: Upstream) -> list[Upstream]:
    choices = [(state,) if state else ENDINGS for state in upstream.states]
    return [Upstream(states=states, setups=upstream.setups) for states in itertools.product(*choices)]


def test_one_success_starts_as_soon_as_one_parent_succeeds() -> None:
    assert decide(TriggerRule.ONE_SUCCESS, UpstreamCounts(total=1_000, success=1)) == RuleDecision.RUN
    assert decide(TriggerRule.ONE_SUCCESS, UpstreamCounts(total=1_000, failed=999)) == RuleDecision.WAIT


def test_all_success_gives_up_at_the_first_failure() -> None:
    assert decide(TriggerRule.ALL_SUCCESS, UpstreamCounts(total=3, failed=1)) == RuleDecision.UPSTREAM_FAILED
    assert decide(TriggerRule.ALL_SUCCESS, UpstreamCounts(total=3, skipped=1)) == RuleDecision.SKIP


# --- whole DAGs -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RandomDag:
    upstream: tuple[tuple[int, ...], ...]
    rules: tuple[TriggerRule, ...]
    outcomes: tuple[str, ...]
    setups: tuple[bool, ...]


def random_dag(seed: int) -> RandomDag:
    rng = random.Random(seed)
    size = rng.randint(2, 14)
    return RandomDag(
        upstream=tuple(tuple(sorted(rng.sample(range(i), rng.randint(0, min(i, 4))))) for i in range(size)),
        rules=tuple(rng.choice(list(TriggerRule)) for _ in range(size)),
        outcomes=tuple(rng.choice((OK, OK, "failed", SKIPPED, "canceled")) for _ in range(size)),
        setups=tuple(rng.random() < 0.3 for _ in range(size)),
    )


def execute(dag: RandomDag, order: random.Random) -> list[str]:
    """Run the DAG with one task ending at a time, in random order, asking `decide` after each, as the engine does."""
    final: list[str | None] = [None] * len(dag.rules)
    started: set[int] = set()
    while None in final:
        settled = settle(dag, final, started)
        if not settled:
            ending = order.choice([i for i in sorted(started) if final[i] is None])
            final[ending] = dag.outcomes[ending]
    return [state for state in final if state is not None]


def settle(dag: RandomDag, final: list[str | None], started: set[int]) -> bool:
    """Start, skip or fail each waiting task whose rule has decided. True if some task ended by that."""
    ended = False
    for i, rule in enumerate(dag.rules):
        if final[i] is not None or i in started:
            continue
        decision = decide(rule, counts_of(upstream_of(dag, i, final)))
        if decision == RuleDecision.RUN:
            started.add(i)
        elif decision != RuleDecision.WAIT:
            final[i] = SKIPPED if decision == RuleDecision.SKIP else "upstream_failed"
            ended = True
    return ended


def upstream_of(dag: RandomDag, i: int, final: Sequence[str | None]) -> Upstream:
    parents = dag.upstream[i]
    return Upstream(states=tuple(final[p] for p in parents), setups=tuple(dag.setups[p] for p in parents))


def test_generated_dags_always_end_and_end_as_the_sentences_say() -> None:
    for seed in range(400):
        dag = random_dag(seed)
        for ordering in range(3):
            final = execute(dag, random.Random(ordering))
            for i, rule in enumerate(dag.rules):
                assert final[i] in expected_ends(dag, i, rule, final), (seed, i)


def expected_ends(dag: RandomDag, i: int, rule: TriggerRule, final: Sequence[str]) -> set[str]:
    upstream = upstream_of(dag, i, final)
    if rule is TriggerRule.ALL_SUCCESS and upstream.some_are(SKIPPED) and upstream.some_are(*BROKEN):
        return {SKIPPED, "upstream_failed"}
    ends = {
        RuleDecision.RUN: dag.outcomes[i],
        RuleDecision.SKIP: SKIPPED,
        RuleDecision.UPSTREAM_FAILED: "upstream_failed",
    }
    return {ends[by_sentences(rule, upstream)]}


def test_the_order_of_endings_changes_nothing_where_it_changes_nothing_in_airflow() -> None:
    compared = 0
    for seed in range(400):
        dag = random_dag(seed)
        first, *others = [execute(dag, random.Random(ordering)) for ordering in range(4)]
        if any(len(expected_ends(dag, i, rule, first)) > 1 for i, rule in enumerate(dag.rules)):
            continue
        compared += 1
        assert all(other == first for other in others), seed
    assert compared > 200
