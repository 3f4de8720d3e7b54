"""What a running attempt asks and changes: only while its session holds it."""

from __future__ import annotations

import json

import pytest
from psycopg import AsyncConnection

from evertick.db.queries.secrets import AttemptHolder
from evertick.db.queries.tasks import ExchangeRow
from evertick.domain.attempt import OutcomeKind
from evertick.domain.encryption import Keyring, new_key
from evertick.domain.errors import LeaseLost, NotFound
from evertick.domain.stored_values import ValueKind
from evertick.engine import asks
from evertick.engine.runs import Particulars
from evertick.engine.secrets import read_value, read_values
from tests.engine.world import Runner, key_of, make_dag, put, start, value


def holder(runner: Runner, claim: ExchangeRow) -> AttemptHolder:
    return AttemptHolder(key=key_of(claim), epoch=claim.epoch, session=runner.session)


@pytest.fixture
async def runner(conn: AsyncConnection) -> Runner:
    await put(
        conn, make_dag("chain", {"a": [], "b": ["a"]}, task_asks=True, task_knows_run=True, accepts_unknown_params=True)
    )
    return await Runner.join(conn)


async def first_claim(conn: AsyncConnection, runner: Runner, key: str = "one") -> ExchangeRow:
    await start(conn, "chain", key=key)
    (claim,) = await runner.claim()
    return claim


async def test_an_attempt_reads_its_run_and_the_outputs_of_tasks(conn: AsyncConnection, runner: Runner) -> None:
    a = await first_claim(conn, runner)
    facts = await asks.ask(conn, holder(runner, a), "run", {})
    assert isinstance(facts, dict)
    assert (facts["dag"], facts["run"], facts["type"], facts["state"]) == ("chain", "one", "manual", "running")
    assert json.loads(a.inputs or "") == {"a": facts}, "it was given them with its claim"
    outputs = {"$evertick": "outputs", "value": [1, 2], "named": {"day": "monday"}}
    (b,), _ = await runner.step([(a, "success", {"result": outputs})], free=1)
    asker = holder(runner, b)
    wanted = {"dag": "chain", "run": "one", "task": "a"}
    assert await asks.ask(conn, asker, "xcoms", {**wanted, "key": None}) == [[-1, [1, 2]]]
    assert await asks.ask(conn, asker, "xcoms", {**wanted, "key": "day"}) == [[-1, "monday"]]
    assert await asks.ask(conn, asker, "xcoms", {**wanted, "key": "night"}) == []
    assert await asks.ask(conn, asker, "xcoms", {**wanted, "run": "none", "key": None}) == []
    latest = {"dag": "chain", "until": "2100-01-01T00:00:00+00:00", "task": "a", "key": "day"}
    assert await asks.ask(conn, asker, "latest_xcoms", latest) == [[-1, "monday"]]
    tasks = await asks.ask(conn, asker, "tasks", {"dag": "chain", "runs": ["one"], "dates": None})
    assert tasks == [["one", "a", -1, "success"], ["one", "b", -1, "running"]]
    (run,) = await asks.ask(conn, asker, "runs", {"dag": "chain", "runs": ["one"], "dates": None})  # type: ignore[misc]
    assert isinstance(run, dict) and run["number"] == b.run_id
    assert await asks.ask(conn, asker, "previous_run", {"dag": "chain", "before": "2100-01-01T00:00:00Z"}) is None
    dag = await asks.ask(conn, asker, "dag", {"dag": "chain"})
    assert dag == {"dag": "chain", "is_paused": False, "file": "chain.py"}


async def test_an_attempt_that_was_taken_away_reads_and_changes_nothing(conn: AsyncConnection, runner: Runner) -> None:
    ring = Keyring([new_key()])
    a = await first_claim(conn, runner)
    held = holder(runner, a)
    stale = AttemptHolder(key=held.key, epoch=held.epoch - 1, session=held.session)
    foreign = AttemptHolder(key=held.key, epoch=held.epoch, session=held.session + 1)
    await runner.step([(a, "success", {"result": "kept"})], free=0)
    runs_before = await value(conn, "select count(*) from run")
    for lost in (held, stale, foreign):
        with pytest.raises(LeaseLost):
            await asks.ask(conn, lost, "run", {})
        with pytest.raises(LeaseLost):
            await asks.trigger(conn, lost, dag="chain", params={}, about=Particulars(key="two"))
        with pytest.raises(LeaseLost):
            await asks.put_variable(conn, ring, lost, name="region", value="eu")
        for text in ("[1]", None):
            with pytest.raises(LeaseLost):
                await asks.put_outputs(conn, lost, text)
    assert await value(conn, "select count(*) from run") == runs_before
    assert await value(conn, "select count(*) from stored_value") == 0
    assert await value(conn, "select value from result where idx = 0") == "kept"


async def test_outputs_of_an_attempt_that_fails_stay_until_it_deletes_or_replaces_them(
    conn: AsyncConnection, runner: Runner
) -> None:
    a = await first_claim(conn, runner)
    held = holder(runner, a)
    for text in ("[1]", '{"$evertick": "outputs", "value": null, "named": {"day": "monday"}}'):
        assert await asks.put_outputs(conn, held, text)
    facts = await asks.ask(conn, held, "run", {})
    assert isinstance(facts, dict) and facts["outputs"] == json.loads(text)
    await runner.finish(a, OutcomeKind.FAILED)
    assert await value(conn, "select value->'named' from result where run_id = %s", a.run_id) == {"day": "monday"}
    b = await first_claim(conn, runner, "two")
    assert await asks.put_outputs(conn, holder(runner, b), "[1]") and await asks.put_outputs(
        conn, holder(runner, b), None
    )
    assert await value(conn, "select count(*) from result where run_id = %s", b.run_id) == 0


async def test_a_run_that_an_attempt_triggers_twice_is_one_run(conn: AsyncConnection, runner: Runner) -> None:
    a = await first_claim(conn, runner)
    about = Particulars(key="two")
    made = [await asks.trigger(conn, holder(runner, a), dag="chain", params={"any": 1}, about=about) for _ in range(2)]
    assert [each.is_new for each in made] == [True, False]
    assert made[0].run_id == made[1].run_id
    assert await value(conn, "select triggered_by from run where run_id = %s", made[0].run_id) == f"run {a.run_id}"
    assert await value(conn, "select params from run where run_id = %s", made[0].run_id) == {"any": 1}
    with pytest.raises(NotFound, match="chain2"):
        await asks.trigger(conn, holder(runner, a), dag="chain2", params={}, about=about)


async def test_an_attempt_sets_and_deletes_a_variable_with_an_entry_in_the_audit_log(
    conn: AsyncConnection, runner: Runner
) -> None:
    ring = Keyring([new_key()])
    asker = holder(runner, await first_claim(conn, runner))
    assert await asks.put_variable(conn, ring, asker, name="region", value="eu")
    assert (await read_value(conn, ring, kind=ValueKind.VARIABLE, name="region"))[1] == "eu"
    entries = "select count(*) from audit_log where action in ('put_value', 'delete_value') and actor = %s"
    assert await asks.put_variable(conn, ring, asker, name="region", value=None)
    assert not await asks.put_variable(conn, ring, asker, name="region", value=None)
    assert await value(conn, entries, f"run {asker.key.run_id}") == 2


async def test_only_a_task_that_asks_reads_values_that_it_does_not_declare(
    conn: AsyncConnection, runner: Runner
) -> None:
    ring = Keyring([new_key()])
    asker = holder(runner, await first_claim(conn, runner))
    await asks.put_variable(conn, ring, asker, name="region", value="eu")
    wanted = [("variable", "region"), ("secret", "region")]
    assert await read_values(conn, ring, wanted, asker) == {("variable", "region"): "eu"}
    await put(conn, make_dag("plain", {"a": []}))
    await start(conn, "plain")
    (claim,) = await runner.claim()
    assert await read_values(conn, ring, wanted, holder(runner, claim)) == {}


async def test_an_unknown_question_is_an_error(conn: AsyncConnection, runner: Runner) -> None:
    asker = holder(runner, await first_claim(conn, runner))
    with pytest.raises(Exception, match="ask nonsense is unknown"):
        await asks.ask(conn, asker, "nonsense", json.loads("{}"))
