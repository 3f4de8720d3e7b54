"""Whether a task may start, given how its upstream tasks have ended so far. Airflow's thirteen rules, decided purely.

A canceled upstream counts as failed. A task without upstream runs whatever its rule. Only `all_success` depends on the
order in which upstream tasks end, and only when one fails *and* one is skipped: the first of the two decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import assert_never

from evertick.domain.states import TriggerRule

# rule                        | runs when                               | else: upstream_failed | else: skip
# ----------------------------|-----------------------------------------|-----------------------|---------------------
# all_success                 | all succeeded                           | at the first failure  | at the first skip
# all_failed                  | all failed or are upstream_failed       |                       | first success, skip
# all_done                    | all ended, in any state                 |                       |
# all_done_min_one_success    | all ended, none skipped, some succeeded | ended, none succeeded | at the first skip
# all_done_setup_success      | all ended; of any setups some succeeded | ended, no setup did   | all setups skipped
# one_success                 | AT ONCE: one succeeded                  | ended, none succeeded | all were skipped
# one_failed                  | AT ONCE: one failed or upstream_failed  |                       | ended, none failed
# one_done                    | AT ONCE: one succeeded or failed        |                       | ended, none of these
# none_failed                 | all succeeded or were skipped           | at the first failure  |
# none_failed_min_one_success | as above, and some succeeded            | at the first failure  | all were skipped
# none_skipped                | all ended, none skipped                 |                       | at the first skip
# all_skipped                 | all were skipped                        |                       | first that was not
# always                      | AT ONCE                                 |                       |


class RuleDecision(StrEnum):
    WAIT = "wait"
    RUN = "run"
    SKIP = "skip"
    UPSTREAM_FAILED = "upstream_failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamCounts:
    """The number of direct upstream tasks and of their end states. The setup counts are included in the others."""

    total: int
    success: int = 0
    failed: int = 0
    upstream_failed: int = 0
    skipped: int = 0
    setup_total: int = 0
    setup_success: int = 0
    setup_skipped: int = 0

    @classmethod
    def of(cls, total: int, ended: Mapping[str, int], setups: Sequence[str | None]) -> UpstreamCounts:
        """From the count of each end state, and the states of the setups among them."""
        return cls(
            total=total,
            success=ended.get("success", 0),
            failed=ended.get("failed", 0) + ended.get("canceled", 0),
            upstream_failed=ended.get("upstream_failed", 0),
            skipped=ended.get("skipped", 0),
            setup_total=len(setups),
            setup_success=setups.count("success"),
            setup_skipped=setups.count("skipped"),
        )

    @property
    def broken(self) -> int:
        return self.failed + self.upstream_failed

    @property
    def is_done(self) -> bool:
        return self.success + self.broken + self.skipped >= self.total


def decide(rule: TriggerRule, counts: UpstreamCounts) -> RuleDecision:
    """The decision of the rule now. Any result but WAIT is final: the caller applies it and does not decide again."""
    run, skip, upstream_failed = RuleDecision.RUN, RuleDecision.SKIP, RuleDecision.UPSTREAM_FAILED
    c, done = counts, counts.is_done
    if c.total == 0:
        return run
    match rule:
        case TriggerRule.ALL_SUCCESS:
            return _first((c.broken, upstream_failed), (c.skipped, skip), (done, run))
        case TriggerRule.ALL_FAILED:
            return _first((c.success or c.skipped, skip), (done, run))
        case TriggerRule.ALL_DONE:
            return _first((done, run))
        case TriggerRule.ALL_DONE_MIN_ONE_SUCCESS:
            return _first((c.skipped, skip), (done and not c.success, upstream_failed), (done, run))
        case TriggerRule.ALL_DONE_SETUP_SUCCESS:
            return _decide_by_setups(c) if done else RuleDecision.WAIT
        case TriggerRule.ONE_SUCCESS:
            return _first((c.success, run), (c.skipped == c.total, skip), (done, upstream_failed))
        case TriggerRule.ONE_FAILED:
            return _first((c.broken, run), (done, skip))
        case TriggerRule.ONE_DONE:
            return _first((c.success or c.failed, run), (done, skip))
        case TriggerRule.NONE_FAILED:
            return _first((c.broken, upstream_failed), (done, run))
        case TriggerRule.NONE_FAILED_MIN_ONE_SUCCESS:
            return _first((c.broken, upstream_failed), (c.skipped == c.total, skip), (done, run))
        case TriggerRule.NONE_SKIPPED:
            return _first((c.skipped, skip), (done, run))
        case TriggerRule.ALL_SKIPPED:
            return _first((c.success or c.broken, skip), (done, run))
        case TriggerRule.ALWAYS:
            return run
        case _:
            assert_never(rule)


def _decide_by_setups(counts: UpstreamCounts) -> RuleDecision:
    if counts.setup_total == 0 or counts.setup_success > 0:
        return RuleDecision.RUN
    return RuleDecision.SKIP if counts.setup_skipped >= counts.setup_total else RuleDecision.UPSTREAM_FAILED


def _first(*cases: tuple[bool | int, RuleDecision]) -> RuleDecision:
    return next((decision for holds, decision in cases if holds), RuleDecision.WAIT)
