"""Who is told, as a DAG file writes it; functions become DAGs of their own; what is wrong is refused where it stands."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from evertick import approval, dag, notify, shell, task, trigger_dag, wait_for
from evertick.domain.dags.spec import from_json, to_json
from evertick.domain.errors import InvalidDag
from evertick.domain.notifications import NotificationEvent, NotificationRuleSpec
from evertick.engine.publish import dag_row
from evertick.sdk.dag import load_dags
from evertick.sdk.runtime import CompiledDag


def built(body: Callable[[], object], **options: object) -> CompiledDag:
    return dag(name="sample", **options)(body)()  # type: ignore[arg-type, call-overload, no-any-return]


def tell_me(event: dict[str, object]) -> None: ...


def test_every_event_has_its_sinks_and_survives_publishing() -> None:
    @task(
        on_success=notify.webhook("https://example.com/ok", sign_with="key"),
        on_failure=[notify.email("ops@example.com", every_time=True), notify.slack(secret="slack_url")],
        on_retry=[notify.webhook(secret="hook")],
        on_skipped=[],
        finish_within="30m",
        on_deadline=notify.webhook("https://example.com/late"),
    )
    def work() -> None: ...

    compiled = built(work, on_deadline=notify.email("boss@example.com"), on_failure=notify.slack("https://x.example"))
    spec = compiled.spec
    assert spec.tasks[0].notices == (
        NotificationRuleSpec(event=NotificationEvent.SUCCESS, sink="webhook:https://example.com/ok;sign=key"),
        NotificationRuleSpec(event=NotificationEvent.FAILURE, sink="email:ops@example.com", every_time=True),
        NotificationRuleSpec(event=NotificationEvent.FAILURE, sink="slack:secret/slack_url"),
        NotificationRuleSpec(event=NotificationEvent.RETRY, sink="webhook:secret/hook"),
        NotificationRuleSpec(event=NotificationEvent.DEADLINE, sink="webhook:https://example.com/late"),
    )
    assert spec.notices == (
        NotificationRuleSpec(event=NotificationEvent.FAILURE, sink="slack:https://x.example"),
        NotificationRuleSpec(event=NotificationEvent.DEADLINE, sink="email:boss@example.com"),
    )
    assert from_json(to_json(spec)) == spec
    rows = dag_row(spec, file="f", bundle_hash="b")
    assert len(rows["notices"]) == 7  # type: ignore[arg-type]
    assert rows["deadlines"] == [{"idx": 0, "seconds": 1800.0}]
    assert rows["tasks"][0]["notifies"]  # type: ignore[index]
    assert "notices" not in to_json(built(lambda: shell("x", "true")).spec)


def test_defaults_reach_every_kind_of_task() -> None:
    def body() -> None:
        shell("x", "true")
        trigger_dag("other")
        approval("Go?")
        wait_for("1s", on_failure=[])

    late = {"finish_within": "1h", "on_deadline": tell_me}
    compiled = built(body, task_defaults={"on_failure": notify.email("ops@example.com"), **late})
    assert [len(each.notices) for each in compiled.spec.tasks] == [2, 2, 2, 1]
    assert {each.finish_within_seconds for each in compiled.spec.tasks} == {3600.0}
    assert [each.name for each in compiled.callbacks] == ["sample.callback.tell_me"]


def test_a_function_is_called_by_a_dag_of_its_own() -> None:
    @task(on_failure=[tell_me, notify.call(tell_me)])
    def work() -> None: ...

    compiled = built(work, on_success=tell_me)
    spec, (second,) = compiled.spec, compiled.callbacks
    assert (second.name, second.spec.tasks[0].name) == ("sample.callback.tell_me", "tell_me")
    assert (second.spec.tasks[0].timeout_seconds, second.spec.params[0].name) == (60.0, "event")
    rows = dag_row(spec, file="f", bundle_hash="b")["notices"]
    assert {each["sink"] for each in rows} == {"call:sample.callback.tell_me"}  # type: ignore[attr-defined]


@pytest.mark.parametrize("called", ["", "nightly()\n"])
def test_a_file_brings_the_dags_of_its_callbacks_along(tmp_path: Path, called: str) -> None:
    text = "from evertick import dag, shell\ndef tell(event): ...\n@dag(on_failure=tell)\ndef nightly(): shell('x', 'true')\n"
    file = f"file_{len(called)}.py"
    (tmp_path / file).write_text(text + called)
    assert list(load_dags(tmp_path, file)) == ["nightly", "nightly.callback.tell"]


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("ops@example.com", "it must be a list, as in"),
        ([3], "3 is neither a sink"),
        (lambda: None, "cannot be a callback"),
        ([notify.email("a@b.example")] * 21, "at most 20"),
    ],
)
def test_what_cannot_be_told_is_refused_with_task_and_option(value: object, why: str) -> None:
    with pytest.raises(InvalidDag, match=why):
        task(on_failure=value)(lambda: None)
    with pytest.raises(InvalidDag, match=why):
        built(lambda: shell("x", "true"), on_failure=value)


def no_argument() -> None: ...


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: notify.webhook("example.com"), "notify.webhook: 'example.com' is not a webhook URL"),
        (lambda: notify.webhook(), "a webhook sink needs one address"),
        (lambda: notify.webhook("https://a.example", secret="b"), "a webhook sink needs one address"),
        (lambda: notify.webhook(7), "7 is not a URL"),
        (lambda: notify.email("nobody"), "is not an email address"),
        (lambda: notify.email(), "1 to 20 recipients"),
        (lambda: notify.email("a@b.example", every_time=1), "every_time must be True or False"),
        (lambda: notify.call(no_argument), "must take one argument"),
        (lambda: notify.call(print, name="no good"), "cannot be a callback"),
    ],
)
def test_a_sink_that_cannot_be_is_refused_where_it_is_written(make: Callable[[], object], why: str) -> None:
    with pytest.raises(InvalidDag, match=why):
        make()


def test_two_functions_of_one_name_are_refused() -> None:
    @task(on_failure=[tell_me, notify.call(lambda event: None, name="tell_me")])
    def work() -> None: ...

    with pytest.raises(InvalidDag, match="two callbacks named 'tell_me'"):
        built(work)


def test_a_run_is_not_skipped() -> None:
    with pytest.raises(InvalidDag, match="has no option 'on_skipped'"):
        built(lambda: shell("x", "true"), on_skipped=tell_me)


def test_a_deadline_is_needed_before_anybody_is_told_of_it() -> None:
    late = task(on_deadline=tell_me)(no_argument)
    with pytest.raises(InvalidDag, match=r"task 'no_argument': on_deadline needs a deadline; .* finish_within='30m'"):
        built(lambda: late())
    spec = built(lambda: late(), task_defaults={"finish_within": 60}).spec
    assert spec.tasks[0].finish_within_seconds == 60
    with pytest.raises(InvalidDag, match=r"finish_within is 0\.0 s; it must be more than 0"):
        built(lambda: late.override(finish_within=0)())
    with pytest.raises(InvalidDag, match="finish_within is 'soon'"):
        late.override(finish_within="soon")
