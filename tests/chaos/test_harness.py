"""The harness's own parts: a run that is too quiet fails, a seed repeats itself, and a scenario is found by its name."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psycopg
import pytest

from evertick.domain.errors import PostgresUnavailable
from tests.chaos.catalogue import find
from tests.chaos.cluster import Cluster
from tests.chaos.nemesis import Nemesis, Struck
from tests.chaos.reading import read_client
from tests.chaos.record import Answer, ClientLog, Fault
from tests.chaos.report import PROMISED_SECONDS, Totals, add_up, told_stale
from tests.chaos.scenario import Verdict
from tests.chaos.scenarios.composite import MENU, Lane
from tests.chaos.zombie import Zombie

KINDS = [Fault.KILL, Fault.FREEZE, Fault.CUT, Fault.RESET, Fault.DELAY, Fault.RESTART, Fault.LOCK, Fault.POISON]
KINDS += [Fault.OUTAGE, Fault.TERMINATE, Fault.DROP_REPLY, Fault.CLOCK]


def enough(**changes: object) -> Verdict:
    """A scenario that alone would be enough."""
    faults = Counter({f"{kind} something": 17 for kind in KINDS})
    given: dict[str, object] = {"faults": faults, "fires": 5_000, "attempts": 20_000, "stale_refused": 500, **changes}
    return Verdict(name="N35", title="all", **given)  # type: ignore[arg-type]


def test_a_run_that_is_large_enough_has_no_shortfall() -> None:
    assert add_up([enough()]).shortfalls() == []


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"fires": 4_999}, "fires"),
        ({"attempts": 19_999}, "attempts"),
        ({"stale_refused": 490, "stale_unanswered": 9}, "stale writes"),
        ({"faults": Counter({f"{kind} x": 5 for kind in KINDS})}, "faults"),
        ({"faults": Counter({f"{kind} x": 40 for kind in KINDS[1:]})}, "kinds"),
        ({"faults": Counter({f"{KINDS[0]} x": 4, **{f"{kind} x": 40 for kind in KINDS[1:]}})}, "kinds"),
    ],
)
def test_a_run_that_is_too_quiet_says_what_it_lacks(changes: dict[str, object], missing: str) -> None:
    (shortfall,) = add_up([enough(**changes)]).shortfalls()
    assert missing in shortfall


@pytest.mark.parametrize("name", PROMISED_SECONDS)
def test_a_recovery_that_takes_longer_than_promised_is_told(name: str) -> None:
    limit = float(PROMISED_SECONDS[name])
    kept = enough(alone={name: [limit] * 5}, recoveries={name: [limit + 9, *[limit] * 5]})
    assert add_up([kept]).late() == [], "what else was broken meanwhile makes no promise less true"
    (late,) = add_up([kept, enough(alone={name: [limit + 0.1]})]).late()
    assert late.startswith(name)


@pytest.mark.parametrize(
    ("other", "touches"),
    [
        ({"began_ns": 0, "ended_ns": 9}, False),
        ({"began_ns": 0, "ended_ns": 9, "well_ns": 11}, True),
        ({"began_ns": 0, "ended_ns": 9, "is_awaited": True}, True),
        ({"began_ns": 0, "ended_ns": 12, "well_ns": 3}, True),
        ({"began_ns": 0, "ended_ns": None}, True),
        ({"began_ns": 15, "ended_ns": 16}, True),
    ],
)
def test_a_fault_is_alone_if_no_other_was_going_on_or_being_recovered_from(
    other: dict[str, int], touches: bool
) -> None:
    struck = Struck(number=1, name="kill leader", target="a", began_ns=10, ended_ns=10, well_ns=20)
    assert Struck(number=2, name="reset", target="b", **other).touches(struck) is touches  # type: ignore[arg-type]
    assert not struck.touches(struck)


def test_what_was_not_played_counts_for_nothing() -> None:
    totals: Totals = add_up([enough(), enough(not_run="needs root")])
    assert (totals.fires, totals.stale_tried) == (5_000, 500)


@pytest.mark.parametrize(
    "instead",
    [
        psycopg.OperationalError("the connection is closed"),
        psycopg.errors.AdminShutdown("terminating connection"),
        PostgresUnavailable("nobody listens"),
        asyncio.CancelledError(),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_a_stale_write_that_nobody_answered_is_counted_as_that(instead: BaseException, tmp_path: Path) -> None:
    client = ClientLog(tmp_path / "client.jsonl")
    zombie = Zombie(cluster=cast(Cluster, SimpleNamespace(clients=client)), dice=random.Random(0))
    answers: list[bool | BaseException] = [False, instead, True]

    async def answer() -> bool:
        given = answers.pop(0)
        if isinstance(given, BaseException):
            raise given
        return given

    await zombie.try_it("stale_log", answer)
    with pytest.raises(type(instead)):
        await zombie.try_it("stale_log", answer)
    await zombie.try_it("stale_log", answer)
    client.close()
    counts = zombie.refused.total(), zombie.accepted.total(), zombie.unanswered
    assert counts == (1, 1, {type(instead).__name__: 1})
    noted = [request.answer for request in read_client(tmp_path / "client.jsonl")]
    assert noted == [Answer.ERROR, Answer.UNKNOWN, Answer.OK]
    totals = add_up([enough(stale_refused=1, stale_accepted=1, stale_unanswered=1), enough()])
    assert told_stale(totals) == "503 tried: 501 refused, 1 accepted, 1 never answered"


def test_the_same_seed_breaks_the_same_things_in_the_same_order() -> None:
    nemesis = Nemesis(cluster=cast("object", None), dice=random.Random(0))  # type: ignore[arg-type]
    first, again, other = (Lane(nemesis, MENU, seed) for seed in ("1", "1", "2"))
    drawn = [first.draw() for _ in range(2 * len(MENU))]
    assert drawn == [again.draw() for _ in range(2 * len(MENU))]
    assert drawn != [other.draw() for _ in range(2 * len(MENU))]
    assert set(drawn[: len(MENU)]) == set(drawn[len(MENU) :]) == set(MENU), "every deed once before any comes again"


@pytest.mark.parametrize(
    ("name", "found"), [("N07", ["N07", "N07b", "N07c"]), ("n07b", ["N07b"]), ("N35", ["N35"]), ("N99", [])]
)
def test_a_scenario_is_found_by_its_number(name: str, found: list[str]) -> None:
    assert [scenario.name for scenario in find(name)] == found
