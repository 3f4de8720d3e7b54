"""Writing tasks that wait: what they become, what is refused where it is written, and how `dag.test()` takes them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from evertick import Done, Param, approval, dag, task, wait_for, wait_for_event, wait_until
from evertick.domain.access import Role
from evertick.domain.dags.spec import TaskKind, from_json, to_json
from evertick.domain.dags.waits import TimeoutAction, WaitKind, WaitSpec
from evertick.domain.errors import InvalidDag, UserError
from evertick.engine.publish import dag_row
from evertick.sdk.runtime import CompiledDag


def built(body: Callable[[], object], **options: object) -> CompiledDag:
    return dag(name="d", **options)(lambda: body())()  # type: ignore[call-overload,no-any-return]


def waits(found: CompiledDag) -> list[WaitSpec | None]:
    assert from_json(to_json(found.spec)) == found.spec
    return [each.wait for each in found.spec.tasks]


def test_what_is_known_when_it_is_written_needs_no_runner() -> None:
    at = datetime(2030, 1, 1, 8, tzinfo=UTC)
    found = built(
        lambda: wait_until(at) >> wait_until("8:00") >> wait_until("2030-01-01T08:00+00:00") >> wait_for("1h")
    )
    assert waits(found) == [
        WaitSpec(kind=WaitKind.TIME, until=at.isoformat()),
        WaitSpec(kind=WaitKind.CLOCK, until="08:00:00"),
        WaitSpec(kind=WaitKind.TIME, until=at.isoformat()),
        WaitSpec(kind=WaitKind.TIME, seconds=3600),
    ]
    assert {each.kind for each in found.spec.tasks} == {TaskKind.WAIT}
    assert [each.name for each in found.spec.tasks] == ["wait_until", "wait_until__1", "wait_until__2", "wait_for"]


def test_what_only_the_run_knows_is_worked_out_by_an_attempt() -> None:
    found = built(lambda: wait_until(lambda params: params["at"], name="late"))
    (each,) = found.spec.tasks
    assert (each.kind, each.name, each.timeout_seconds) == (TaskKind.PYTHON, "late", 300.0)
    assert each.wait is not None and each.wait.kind is WaitKind.POLL
    assert found.tasks["late"].polls


@pytest.mark.parametrize(
    ("given", "message"),
    [(timedelta(hours=1), "wait_for"), (datetime(2030, 1, 1), "no time zone"), ("x", "neither"), (5, "not 5")],
)
def test_an_instant_that_was_worked_out_must_be_one(given: object, message: str) -> None:
    done = built(lambda: wait_until(lambda params: given)).test()
    assert message in done.reasons["wait_until"]


def test_a_sensor_carries_its_intervals() -> None:
    @task.sensor(interval="10s", timeout="1h", on_timeout="skip", backoff=2, retries=2, poll_timeout=30)
    def there() -> bool:
        return True

    (each,) = built(lambda: there()).spec.tasks
    assert (each.timeout_seconds, each.retry.retries) == (30.0, 2)
    assert each.wait == WaitSpec(
        kind=WaitKind.POLL,
        seconds=10,
        timeout_seconds=3600,
        on_timeout=TimeoutAction.SKIP,
        backoff=2,
        longest_seconds=3600,
    )


def test_an_approval_carries_its_form() -> None:
    found = built(lambda: approval("Go?", form={"n": Param(1, minimum=1)}, approvers="editor", on_reject="skip"))
    (wait,) = waits(found)
    assert wait is not None
    assert (wait.form[0].name, wait.approvers, wait.on_reject) == ("n", Role.EDITOR, TimeoutAction.SKIP)


def test_waits_in_a_limited_group_or_dag_take_no_place() -> None:
    from evertick import task_group

    def body() -> None:
        with task_group("g", max_active=1):
            wait_for(1)

    found = built(body, max_active_tasks=1)
    assert found.spec.tasks[0].gates == ()
    row = dag_row(found.spec, file="f.py", bundle_hash="b")
    assert row["gates"] == []
    assert row["tasks"][0]["defers"] is True  # type: ignore[index]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda: wait_until("noon"), "'noon' is neither an instant nor a time of day"),
        (lambda: wait_until(datetime(2030, 1, 1)), "has no time zone"),
        (lambda: wait_until(5), "not 5"),  # type: ignore[arg-type]
        (lambda: wait_for("soon"), "the duration is 'soon'"),
        (lambda: wait_for(-1), "it must be 0 or more"),
        (lambda: wait_for(1, retries=3), "has no option 'retries'"),  # type: ignore[call-arg]
        (lambda: wait_for_event(5), "takes the name of an event"),  # type: ignore[arg-type]
        (lambda: wait_for_event(""), "1 to 200 printable"),
        (lambda: wait_for_event("a-{params.x}"), "the DAG declares no parameter 'x'"),
        (lambda: wait_for_event("a-{day}"), "write {params.NAME}"),
        (lambda: wait_for_event("a", timeout=0), "timeout is 0 s"),
        (lambda: wait_for_event("a", on_timeout="explode"), "it must be one of fail, skip"),
        (lambda: approval("Go?", form=[1]), "form must be a dict"),  # type: ignore[arg-type]
        (lambda: approval("Go?", form={"n": Param(0, minimum=1)}), "param 'n' is 0"),
        (lambda: approval("Go?", approvers="king"), "approvers is 'king'"),
        (lambda: approval(5), "approval takes a title"),  # type: ignore[arg-type]
        (lambda: task.sensor(interval=0.5, name="s")(lambda: True)(), "from 1 second to 7 days"),
        (lambda: task.sensor(interval="8d", name="s")(lambda: True)(), "from 1 second to 7 days"),
        (lambda: task.sensor(backoff=11, name="s")(lambda: True)(), "backoff is 11"),
        (lambda: task.sensor(backoff="2", name="s")(lambda: True)(), "backoff is '2'"),  # type: ignore[call-overload]
        (lambda: task.sensor(interval=60, max_interval=30, name="s")(lambda: True)(), "max_interval is 30 s"),
    ],
)
def test_bad_waits_are_refused(body: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidDag) as caught:
        built(body)
    assert message in str(caught.value)


def sensor_after(polls: int, **options: object) -> CompiledDag:
    seen = iter([False] * polls + [Done({"rows": 3})])
    made = task.sensor(interval=1, **options)(lambda: next(seen))  # type: ignore[call-overload]
    return built(lambda: made.override(name="there")())


def test_dag_test_polls_and_waits_for_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("evertick.sdk.local_run.sleep", slept.append)
    done = sensor_after(3).test()
    assert (done.state, done.results, slept) == ("success", {"there": {"rows": 3}}, [1, 1, 1])
    far = built(lambda: wait_until(datetime.now(UTC) + timedelta(days=1)) >> wait_for("9d"))
    assert far.test().state == "success"


def test_dag_test_knows_a_sensors_time_out_and_what_it_must_return() -> None:
    assert sensor_after(3, timeout=0.5, on_timeout="skip").test().states == {"there": "skipped"}
    assert sensor_after(3, timeout=0.5).test().reasons["there"].endswith("not true within 0.5 s")
    wrong = task.sensor(interval=1)(lambda: None)
    assert "True, False or Done(value), not None" in str(built(lambda: wrong.override(name="w")()).test().reasons["w"])


def test_dag_test_is_given_the_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asks = built(lambda: wait_for_event("e") >> approval("Go?", form={"n": Param(type=int, required=True)}))
    done = asks.test(answers={"wait_for_event": {"x": 1}, "approval": {"n": 2}})
    assert done.results["wait_for_event"] == {"x": 1}
    assert done.results["approval"] == {"by": "dag.test", "at": None, "note": None, "fields": {"n": 2}}
    assert asks.test(answers={"approval": False}).states["approval"] == "failed"
    with pytest.raises(UserError, match="task 'other' does not wait for an answer"):
        asks.test(answers={"other": 1})
    assert "has a form: fill it in" in asks.test().reasons["approval"]
    typed = iter(["", "5"])
    monkeypatch.setattr("evertick.sdk.local_run.sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda text: next(typed))
    assert asks.test().results["approval"]["fields"] == {"n": 5}  # type: ignore[index]
