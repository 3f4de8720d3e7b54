"""`dag.test()`: retries of tasks, groups and the run, every kind of task, named results, and what tasks are given by name."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from evertick import TaskContext, dag, http, program, push, shell, task, task_group
from evertick.domain.errors import UserError
from evertick.examples import kinds, secrets
from evertick.sdk.runtime import CompiledDag


def built(body: Callable[[], object], **options: object) -> CompiledDag:
    return dag(name="sample", **options)(body)()  # type: ignore[arg-type, call-overload, no-any-return]


class Flaky:
    """A task that fails its first times."""

    def __init__(self, failures: int) -> None:
        self.failures, self.epochs = failures, list[int]()

    def __call__(self, context: TaskContext) -> int:
        self.epochs.append(context.epoch)
        if len(self.epochs) <= self.failures:
            raise OSError(f"time {len(self.epochs)}")
        return len(self.epochs)


def placed(flaky: Flaky, **options: object) -> Callable[[], object]:
    def body(context: TaskContext) -> int:
        return flaky(context)

    return task(name="flaky", **options)(body)  # type: ignore[no-any-return, call-overload]


@task
def one() -> int:
    return 1


def test_a_group_begins_again_and_nobody_outside_hears_of_it_before() -> None:
    flaky = Flaky(2)

    def body() -> None:
        with task_group("g", retries=2) as group:
            one() >> placed(flaky)()
        group >> one.override(name="after")()

    ran = built(body).test()
    assert (ran.state, ran.states, ran.reasons) == (
        "success",
        {"g.one": "success", "g.flaky": "success", "after": "success"},
        {},
    )
    assert flaky.epochs == [1, 2, 3]


def test_a_run_begins_again_as_a_whole() -> None:
    flaky, seen = Flaky(3), list[str]()

    @task
    def other(context: TaskContext) -> None:
        seen.append(context.task)

    def body() -> None:
        other() >> placed(flaky, retries=1)()

    ran = built(body, retries=1).test()
    assert (ran.state, ran.states["flaky"], ran.reasons) == ("success", "success", {})
    assert seen == ["other", "other"]
    ran = built(lambda: placed(Flaky(9))(), retries=2).test()
    assert (ran.state, ran.reasons) == ("failed", {"flaky": "OSError: time 3"})


@pytest.mark.parametrize("retried", ["run", "group", "task"])
def test_only_what_fails_for_good_is_raised(retried: str) -> None:
    def body(failures: int) -> Callable[[], None]:
        def inner() -> None:
            with task_group("g", retries=1 if retried == "group" else 0):
                placed(Flaky(failures), retries=1 if retried == "task" else 0)()

        return inner

    options = {"retries": 1} if retried == "run" else {}
    assert built(body(1), **options).test(raise_errors=True).state == "success"
    with pytest.raises(OSError, match="time 2"):
        built(body(2), **options).test(raise_errors=True)


def test_what_a_policy_never_retries_is_not_tried_again() -> None:
    never, other = Flaky(1), Flaky(1)
    ran = built(lambda: placed(never, retries=3, never_on=OSError)()).test()
    assert (ran.state, len(never.epochs)) == ("failed", 1)
    ran = built(lambda: placed(other, retries=3, retry_on=[OSError])()).test()
    assert (ran.state, len(other.epochs)) == ("success", 2)


def test_named_results_reach_those_who_take_them() -> None:
    @task(outputs=["rows", "day"])
    def extract() -> str:
        push("rows", [1, 2])
        push("day", datetime(2030, 1, 1, tzinfo=UTC))
        return "whole"

    @task
    def load(rows: list[int], whole: str) -> str:
        return f"{whole} {rows}"

    @task(outputs=["rows"])
    def forgets() -> None: ...

    def body() -> None:
        found = extract()
        load(found["rows"], found)
        forgets()

    ran = built(body).test()
    assert ran.results == {"extract": "whole", "load": "whole [1, 2]"}
    assert ran.outputs["extract"]["day"] == datetime(2030, 1, 1, tzinfo=UTC)
    assert "without its outputs rows" in ran.reasons["forgets"]


def test_leaving_by_exit_ends_a_task_well_or_badly() -> None:
    def leaves(code: object) -> Callable[[], None]:
        def body() -> None:
            raise SystemExit(code)

        return body

    ran = built(lambda: [task(name=f"t{n}")(leaves(code))() for n, code in enumerate((None, 0, 3))]).test()
    assert ran.states == {"t0": "success", "t1": "success", "t2": "failed"}


class _Page(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"three short words")

    def log_message(self, *_: object) -> None: ...


def test_requests_programs_and_templates_really_run() -> None:
    server = HTTPServer(("127.0.0.1", 0), _Page)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        ran = kinds.kinds.test(params={"url": f"http://127.0.0.1:{server.server_port}/"})
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    assert (ran.state, ran.reasons) == ("success", {})
    assert (ran.results["count"], ran.results["judge"]) == (3, "a short page")


def test_what_cannot_be_reached_or_started_fails_its_task_with_the_reason() -> None:
    def body() -> None:
        http("ask", "http://127.0.0.1:9/", request_timeout=5)
        program("gone", ["/no/such/program"])
        shell("bad", "exit {{ params.code }}")

    ran = built(body, params={"code": 4}).test()
    assert set(ran.states.values()) == {"failed"}
    assert "ConnectionError: GET 127.0.0.1:9" in ran.reasons["ask"]
    assert "exited with code" in ran.reasons["gone"]
    assert "exited with code 4" in ran.reasons["bad"]


def test_what_tasks_declare_is_given_by_name() -> None:
    given = {"secrets": {"shop_token": "hush"}, "variables": {"region": "north"}}
    ran = secrets.secrets.test(**given, connections={"warehouse": "postgresql://anna:x@db/shop"})
    assert (ran.state, ran.results["store"]) == ("success", "orders of north stored on db")
    ran = secrets.secrets.test(**given)
    assert ran.states["store"] == "failed"
    assert ".test(connections={'warehouse': ...})" in ran.reasons["store"]


def test_every_run_has_a_date_an_interval_and_a_day_in_the_zone_of_its_schedule() -> None:
    @task
    def dates(context: TaskContext) -> list[str]:
        return [context.ds, context.data_interval_start.isoformat(), context.data_interval_end.isoformat()]

    def body() -> None:
        dates()
        shell("words", "test '{{ ds }} {{ data_interval_start }}' != 'null null'")

    midnight = datetime(2026, 10, 31, 23, tzinfo=UTC)
    ran = built(body, schedule="@daily", timezone="Europe/Berlin").test(fire_at=midnight)
    assert ran.state == "success"
    assert ran.results["dates"] == ["2026-11-01", "2026-10-30T23:00:00+00:00", "2026-10-31T23:00:00+00:00"]
    # Without one schedule, or before its first due time, the interval is empty.
    assert built(body).test(fire_at=midnight).results["dates"] == ["2026-10-31", *[midnight.isoformat()] * 2]
    begun = built(body, schedule="@daily", start_at="2026-10-31T23:00Z").test(fire_at=midnight)
    assert begun.results["dates"] == ["2026-10-31", *[midnight.isoformat()] * 2]
    today = built(body).test()
    assert today.state == "success" and today.results["dates"][0] >= "2026"  # type: ignore[index]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"param": {}}, "did you mean 'params'"),
        ({"params": [1]}, "params must be a dict"),
        ({"params": {"x": 1}}, "x"),
        ({"fire_at": "2030-01-01"}, "a datetime with a time zone"),
        ({"fire_at": datetime(2030, 1, 1)}, "a datetime with a time zone"),
        ({"secrets": {"token": 5}}, "secrets\\['token'\\] must be text"),
        ({"connections": {"db": "host"}}, "connections\\['db'\\]: a connection must be a URI"),
        ({"variables": "region"}, "variables must be a dict"),
        ({"answers": {"one": True}}, "task 'one' does not wait for an answer"),
    ],
)
def test_what_no_run_could_be_given_is_refused(options: dict[str, object], why: str) -> None:
    with pytest.raises(UserError, match=why):
        built(one).test(**options)  # type: ignore[arg-type]


def test_a_test_run_keeps_state_and_steps_in_memory() -> None:
    ran: list[str] = []

    def once(name: str) -> tuple[str, int]:
        ran.append(name)
        return name, len(ran)

    async def later(x: int) -> int:
        return x + 1

    @task(retries=2)
    async def counts(context: TaskContext) -> list[object]:
        first = context.step("first", once, "first")
        if context.attempt < 3:
            raise OSError("not yet")
        second = context.step("second", once, "second")
        with pytest.raises(UserError, match="used before"):
            context.step("second", once, "second")
        context.state.set("runs", context.state.get("runs", 0) + 1)
        context.asset_state("orders").set("seen", context.state.items())
        assert context.state.delete("old") and not context.state.delete("old")
        return [first, second, await context.step("third", later, 1)]

    def body() -> None:
        counts()

    run = built(body).test(task_state={"counts": {"runs": 4, "old": 1}})
    assert run.results["counts"] == [["first", 1], ["second", 2], 2]
    assert ran == ["first", "second"]
    assert run.task_state == {"counts": {"runs": 5}}
    assert run.asset_state == {"orders": {"seen": {"runs": 5, "old": 1}}}
