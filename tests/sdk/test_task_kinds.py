"""HTTP, program and template tasks: what can never work is refused where it is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from evertick import dag, http, program, shell, task
from evertick.domain.errors import InvalidDag, InvalidTemplate
from evertick.sdk.shell_templates import render_shell


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: http("x", "ftp://host/"), "must begin with http"),
        (lambda: http("x", ""), "is not a URL"),
        (lambda: http("x", "http://a:b@host/"), "must not contain a password"),
        (lambda: http("x", "http://h", method="FETCH"), "is not one of GET"),
        (lambda: http("x", "http://h", response="xml"), "is not one of auto"),
        (lambda: http("x", "http://h", expect=[999]), "999 is not an HTTP status"),
        (lambda: http("x", "http://h", expect="200"), "expect must be"),
        (lambda: http("x", "http://h", headers={"a b": "c"}), "is not a valid header"),
        (lambda: http("x", "http://h", headers={"a": "b\nc"}), "is not a valid header"),
        (lambda: http("x", "http://h", json={1, 2}), "must be JSON"),
        (lambda: http("x", "http://h", json=1, body="x"), "not both"),
        (lambda: http("x", "http://h", request_timeout=0), "request_timeout"),
        (lambda: http("x", "http://h/{{ params.a"), "is not a valid template"),
        (lambda: http("x", "http://h", json={"a": ["{{ rows }}"]}), "uses 'rows'; a template can use"),
        (lambda: http("x", "http://h", inputs=[1]), "inputs must be a dict"),
        (lambda: program("x", "ls -l"), "for a command line use shell"),
        (lambda: program("x", []), "must be a list"),
        (lambda: program("x", ["ls", 5]), "pass a result with env="),
        (lambda: shell("x", "echo {{ params.a"), "Set template=False"),
        (lambda: shell("x", "echo {{ ts }}"), "uses 'ts'"),
        (
            lambda: shell("x", "echo {{ params.nobody }}"),
            "uses params.nobody, which the DAG does not declare; it has: a",
        ),
        (lambda: shell("x", "echo {{ inputs.a }}"), "uses inputs.a, which the task does not declare"),
        (lambda: shell("x", "echo {{ secrets['a'] }}"), "uses secrets.a, which the task does not declare"),
        (lambda: http("x", "http://h", headers={"a": "{{ connections.db.host }}"}), "uses connections.db"),
        (lambda: shell("x", "echo", env={"a=b": 1}), "'a=b', which is not an allowed name"),
    ],
)
def test_what_can_never_work_is_refused(make: Callable[[], object], words: str) -> None:
    @dag(params={"a": 1})
    def d() -> None:
        make()

    with pytest.raises(InvalidDag, match=words):
        d()


def test_inputs_draw_arrows_and_the_plan_shows_what_is_called() -> None:
    @task
    def rows() -> list[int]:
        return []

    @dag
    def d() -> None:
        made = rows()
        http("post", "https://shop/{{ inputs.n }}", method="post", inputs={"n": made[0]})
        program("score", ["./score"], env={"ROWS": made})
        shell("say", "echo {{ inputs.all }}", inputs={"all": made})

    spec = d().spec
    assert [(each.kind, each.summary, each.inputs) for each in spec.tasks] == [
        ("python", None, ()),
        ("http", "POST https://shop/{{ inputs.n }}", ("rows",)),
        ("program", '["./score"]', ("rows",)),
        ("shell", None, ("rows",)),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__ }}",
        "{{ params.__init__ }}",
        "{{ [].append(1) }}",
        "{{ params.no }}",
        "{{ 1 / 0 }}",
        "{{ params.nul }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(text: str) -> None:
    with pytest.raises(InvalidTemplate):
        render_shell(text, {"params": {"nul": "\0"}})
