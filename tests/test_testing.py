"""`evertick.testing.simulate`: what users' own tests ask about their schedules."""

from __future__ import annotations

import random
import re
from datetime import UTC, datetime, timedelta

import pytest
from psycopg import AsyncConnection

import evertick.testing
from evertick import dag, task
from evertick.domain.access import Actor
from evertick.domain.errors import InvalidSchedule, UserError
from evertick.engine.dags import pause, unpause
from evertick.engine.fire_schedules import fire_schedules
from evertick.engine.schedules import DEFAULT_WINDOW_SECONDS
from evertick.testing import simulate
from tests.engine.world import T0, lead, make_dag, put, set_clock
from tests.source_tree import ROOT

BERLIN = "Europe/Berlin"


@task
def load() -> None: ...


@dag(schedules={"night": "30 2 * * *", "hourly": "0 * * * *"}, timezone=BERLIN, misfire="all", catchup_window="3h")
def two_schedules() -> None:
    load()


def utc(text: str) -> datetime:
    return datetime.fromisoformat(text).replace(tzinfo=UTC)


@pytest.mark.requirement("I7")
def test_the_clock_changes_are_those_of_the_engine() -> None:
    spring = simulate("30 2 * * *", "2025-03-29", "2025-03-31T12:00", timezone=BERLIN)
    assert spring.local_times == ["2025-03-29 02:30", "2025-03-30 03:00", "2025-03-31 02:30"]
    autumn = simulate("30 2 * * *", "2025-10-26", "2025-10-27", timezone=BERLIN)
    assert autumn.instants == [utc("2025-10-26T00:30")]
    assert autumn.skips == ()


def test_both_ends_of_the_period_belong_to_it() -> None:
    assert len(simulate("@hourly", "2025-01-01T00:00", "2025-01-01T03:00").fires) == 4


@pytest.mark.parametrize(
    ("misfire", "window", "hours", "skipped"),
    [
        ("latest", "1d", [6], [("misfire_latest", 4)]),
        ("skip", "1d", [], [("misfire_skip", 5)]),
        ("all", "1d", [2, 3, 4, 5, 6], []),
        ("all", "2h", [5, 6], [("outside_window", 3)]),
        ("latest", "10m", [], [("outside_window", 5)]),
    ],
)
def test_what_was_missed_while_nothing_ran_follows_the_policy(
    misfire: str, window: str, hours: list[int], skipped: list[tuple[str, int]]
) -> None:
    story = {"down": [("2025-01-01T01:30", "2025-01-01T06:30")], "misfire": misfire, "catchup_window": window}
    journey = simulate("0 * * * *", "2025-01-01T01:00", "2025-01-01T07:00", **story)
    assert [fire.at.hour for fire in journey.fires] == [1, *hours, 7]
    assert {fire.made_at for fire in journey.fires if fire.at.hour in hours} <= {utc("2025-01-01T06:30")}
    assert [(skip.reason, skip.count) for skip in journey.skips] == skipped


def test_what_was_due_in_a_pause_is_skipped_on_record() -> None:
    journey = simulate("@hourly", "2025-01-01", "2025-01-01T06:00", paused=[("2025-01-01T02:00", "2025-01-01T04:30")])
    assert [fire.at.hour for fire in journey.fires] == [0, 1, 2, 5, 6]
    (skip,) = journey.skips
    assert (skip.first.hour, skip.last.hour, skip.count, skip.reason) == (3, 4, 2, "paused")


def test_a_dag_travels_with_its_own_schedules_and_policies() -> None:
    down = [("2025-03-30T00:30", "2025-03-30T06:30")]
    for subject in (two_schedules, two_schedules()):
        journey = simulate(subject, "2025-03-30", "2025-03-30T07:00", down=down)
        found = [(fire.schedule, f"{fire.local:%H:%M}") for fire in journey.fires]
        # three hours back from 06:30 is 03:30; the night's fire at 03:00 is older than its window
        assert found == [
            ("hourly", "00:00"),
            ("hourly", "04:00"),
            ("hourly", "05:00"),
            ("hourly", "06:00"),
            ("hourly", "07:00"),
        ]
        assert [(skip.schedule, skip.count) for skip in journey.skips] == [("hourly", 2), ("night", 1)]


def test_a_schedule_may_have_policies_of_its_own() -> None:
    @dag(
        schedules={
            "few": {"schedule": "0 * * * *", "misfire": "all", "catchup_limit": 2},
            "none": {"schedule": "30 * * * *", "misfire": "skip"},
        }
    )
    def own() -> None:
        load()

    down = [("2025-01-01T00:45", "2025-01-01T05:45")]
    journey = simulate(own, "2025-01-01T00:40", "2025-01-01T05:50", down=down)
    assert [(fire.schedule, fire.at.hour) for fire in journey.fires] == [("few", 4), ("few", 5)]
    assert sorted((skip.schedule, skip.count, skip.reason.value) for skip in journey.skips) == [
        ("few", 3, "over_limit"),
        ("none", 5, "misfire_skip"),
    ]


def test_without_a_window_it_is_the_engines() -> None:
    assert evertick.testing.DEFAULT_WINDOW_SECONDS == DEFAULT_WINDOW_SECONDS


def test_stretches_that_touch_are_one() -> None:
    touching = [("2025-01-01T01:30", "2025-01-01T03:30"), ("2025-01-01T02:30", "2025-01-01T04:30")]
    journey = simulate("@hourly", "2025-01-01", "2025-01-01T05:00", down=touching)
    assert [fire.at.hour for fire in journey.fires] == [0, 1, 4, 5]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: simulate("61 * * * *", "2025-01-01", "2025-01-02"), "61 is not between"),
        (lambda: simulate("@daily", "soon", "2025-01-02"), "'soon' is not a date and time"),
        (lambda: simulate("@daily", 5, "2025-01-02"), "5 is not a date and time"),
        (lambda: simulate("@daily", "2025-01-02", "2025-01-01"), "swap them"),
        (lambda: simulate("@daily", "2025-01-01", "2025-01-02", misfire="some"), "use skip, latest, all"),
        (lambda: simulate("@daily", "2025-01-01", "2025-01-02", catchup_window="x"), "catchup_window 'x'"),
        (lambda: simulate("@daily", "2025-01-01", "2025-01-02", down=[("2025-01-02", "2025-01-01")]), "is empty"),
        (lambda: simulate("@every 50ms", "2025-01-01", "2026-01-01"), "shorter time"),
        (lambda: simulate(two_schedules, "2025-01-01", "2025-01-02", timezone="UTC"), "omit timezone"),
    ],
)
def test_bad_input_is_refused_clearly(call, words: str) -> None:
    with pytest.raises((UserError, InvalidSchedule)) as refusal:
        call()
    assert words in str(refusal.value)


@pytest.mark.requirement("I7")
@pytest.mark.parametrize("seed", range(4))
async def test_the_engine_does_what_was_foretold(conn: AsyncConnection, seed: int) -> None:
    """A random story is given to `simulate`, and then lived through by the engine itself on a set clock."""
    rng = random.Random(seed)
    every, misfire = rng.choice(["0 * * * *", "30 */2 * * *", "@every 50m"]), rng.choice(["skip", "latest", "all"])
    ends = sorted(rng.sample(range(1, 48 * 60), 6))
    down, paused = (T0 + timedelta(minutes=m) for m in ends[:2]), (T0 + timedelta(minutes=m) for m in ends[3:5])
    outage, break_ = tuple(down), tuple(paused)
    story = {"down": [outage], "paused": [break_], "misfire": misfire, "catchup_window": "5h"}
    told = simulate(every, T0 + timedelta(seconds=1), T0 + timedelta(hours=48), **story)

    await set_clock(conn, T0)
    await put(conn, make_dag("d", {"a": []}, every=every, misfire=misfire, catchup_window_seconds=5 * 3600.0))
    epoch = await lead(conn)
    moments = {T0 + timedelta(minutes=minute) for minute in range(10, 48 * 60 + 1, 10)} | {*outage, *break_}
    for now in sorted(moments):
        await set_clock(conn, now)
        if now == break_[0]:
            await pause(conn, dag="d", actor=Actor("test"))
        if now == break_[1]:
            await unpause(conn, dag="d", actor=Actor("test"))
        while (
            not outage[0] <= now < outage[1] and (await fire_schedules(conn, shard=0, epoch=epoch, batch=100)).settled
        ):
            pass
    cursor = await conn.execute("select fire_at from run order by run_id")
    assert [row[0] for row in await cursor.fetchall()] == told.instants
    cursor = await conn.execute("select first_at, last_at, count, reason from skip_record order by first_at")
    assert await cursor.fetchall() == [(each.first, each.last, each.count, each.reason) for each in told.skips]


async def test_the_snippets_of_the_page_hold() -> None:
    page = (ROOT / "docs" / "howto" / "time-travel.md").read_text(encoding="utf-8")
    snippets = [
        each for each in re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL) if "simulate(" in each
    ]
    assert snippets
    for snippet in snippets:
        names: dict[str, object] = {}
        exec(compile(snippet, "time-travel.md", "exec"), names)
        tests = [each for name, each in names.items() if name.startswith("test_")]
        assert tests
        for each in tests:
            each()  # type: ignore[operator]
