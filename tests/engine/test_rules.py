"""The rules in SQL are the rules in Python, over every combination of up to four upstream tasks."""

from __future__ import annotations

from itertools import product

from psycopg import AsyncConnection

from evertick.domain.dags.trigger_rules import UpstreamCounts, decide
from evertick.domain.states import TriggerRule

MOST = 4


def _grid() -> list[tuple[TriggerRule, UpstreamCounts]]:
    cases = []
    for rule, total in product(TriggerRule, range(MOST + 1)):
        for ended in product(range(total + 1), repeat=4):
            if sum(ended) > total:
                continue
            success, failed, upstream_failed, skipped = ended
            for setups in range(total + 1):
                for setup_success, setup_skipped in product(
                    range(min(setups, success) + 1), range(min(setups, skipped) + 1)
                ):
                    if setup_success + setup_skipped <= setups:
                        cases.append(
                            (
                                rule,
                                UpstreamCounts(
                                    total=total,
                                    success=success,
                                    failed=failed,
                                    upstream_failed=upstream_failed,
                                    skipped=skipped,
                                    setup_total=setups,
                                    setup_success=setup_success,
                                    setup_skipped=setup_skipped,
                                ),
                            )
                        )
    return cases


async def test_sql_and_python_decide_alike(rollback_conn: AsyncConnection) -> None:
    cases = _grid()
    columns = [
        [rule.value for rule, _ in cases],
        *(
            [getattr(counts, name) for _, counts in cases]
            for name in (
                "total",
                "success",
                "failed",
                "upstream_failed",
                "skipped",
                "setup_total",
                "setup_success",
                "setup_skipped",
            )
        ),
    ]
    cursor = await rollback_conn.execute(
        "select evaluate_trigger_rule(r, t, s, f, u, k, st, ss, sk)"
        " from unnest(%s::trigger_rule[], %s::int[], %s::int[], %s::int[], %s::int[],"
        " %s::int[], %s::int[], %s::int[], %s::int[]) as x(r, t, s, f, u, k, st, ss, sk)",
        columns,
    )
    answers = [row[0] for row in await cursor.fetchall()]
    wrong = [
        (rule, counts, answer)
        for (rule, counts), answer in zip(cases, answers, strict=True)
        if decide(rule, counts).value != answer
    ]
    assert len(cases) > 5000
    assert wrong == []
