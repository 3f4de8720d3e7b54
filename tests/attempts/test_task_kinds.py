"""Shell commands with templates, HTTP requests, and programs that speak JSON lines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from evertick.domain.attempt import Outcome
from tests.executors.local.executor_rig import log_text, rig

SHOP = """
from evertick import *

@task
def rows():
    return None

@dag(params={"who": "x", "n": 1}, schedule="0 6 * * *")
def d():
    made = rows()
    shell("greet", CMD, inputs={"rows": made["count"]})
    shell("plain", "echo '{{ not a template }}'", template=False)
    http("get", URL + "/echo?q={{ params.who }}", headers={"X-Who": "{{ params.n }}"}, isolation="warm")
    http("post", URL + "/echo", method="POST", json={"n": "{{ params.n }}", "all": ["{{ inputs.rows.count }} of {{ dag }}"]},
         inputs={"rows": made}, response="full")
    http("text", URL + "/text", response="text")
    http("created", URL + "/status/404", expect=[404], response="none")
    for status in (404, 429, 500, 503):
        http(f"status_{status}", URL + f"/status/{status}", retries=2)
    http("slow", URL + "/slow", request_timeout=0.3)
    http("large", URL + "/large")
    http("moved", URL + "/moved", headers={"Authorization": "Bearer x"})
    http("nowhere", "http://127.0.0.1:9/")
    http("no_json", URL + "/text", response="json")
    program("score", ["./tool", "score"], env={"ROWS": made})
    for how in ("skip", "retry", "fail", "exit", "nonsense", "outputs", "killed"):
        program(how, ["./tool", how], retries=1)
    program("missing", ["./no-such-tool"])
"""

TOOL = """#!/usr/bin/env python3
import json, os, sys
def say(**words): print(json.dumps(words), flush=True)
match sys.argv[1]:
    case "score":
        print("hello", file=sys.stderr)
        print("a plain line")
        print('{"other": "json"}')
        say(evertick="log", level="WARNING", text="careful")
        say(evertick="result", value=1)
        say(evertick="result", value={"rows": json.loads(os.environ["ROWS"]), "task": os.environ["EVERTICK_TASK"]})
    case "skip": say(evertick="skip", reason="nothing new")
    case "retry": say(evertick="retry_after", seconds=7, reason="busy"); sys.exit(1)
    case "fail": say(evertick="fail", reason="bad input")
    case "exit": sys.exit(3)
    case "nonsense": say(evertick="dance")
    case "outputs": say(evertick="output", name="a", value={"$evertick": "decimal"}); say(evertick="result", value=None)
    case "killed": os.kill(os.getpid(), 9)
"""


def source(url: str, command: str = "true") -> str:
    return f"URL = {url!r}\nCMD = {command!r}\n{SHOP}"


PARAMS = json.dumps({"who": "a b&c=d\"; touch hacked; '$(touch hacked)", "n": 5})


async def test_a_request_is_rendered_sent_and_its_answer_is_the_result(tmp_path: Path, url: str) -> None:
    async with rig(tmp_path, source(url)) as made:
        sent = await made.run("get", params_json=PARAMS, isolation="warm")
        (url_line, header_line) = log_text(sent)
        assert url_line.startswith(f'RENDER url = "{url}/echo?q=a%20b%26c%3Dd%22%3B%20touch')
        assert header_line == 'RENDER headers = {"X-Who": "5"}'
        got = json.loads(sent.result_json or "")
        assert got["path"].startswith("/echo?q=a%20b%26c%3Dd%22%3B%20touch")
        assert got["who"] == "5"
        full = await made.result("post", params_json=PARAMS, inputs_json='{"rows": {"count": 3}}')
        assert full["status"] == 200
        assert full["headers"]["content-type"] == "application/json"
        assert full["body"]["sent"] == {"n": 5, "all": ["3 of d"]}
        assert await made.result("text") == "grüß dich"
        assert await made.result("created") is None


async def test_statuses_decide_about_retries(tmp_path: Path, url: str) -> None:
    async with rig(tmp_path, source(url)) as made:
        found: dict[str, Outcome] = {name: await made.run(f"status_{name}") for name in ("404", "429", "500", "503")}
    assert {name: outcome.no_retry for name, outcome in found.items()} == {
        "404": True,
        "429": False,
        "500": False,
        "503": False,
    }
    assert found["429"].retry_after_seconds == 12
    assert 0 < (found["503"].retry_after_seconds or 0) <= 60
    assert found["500"].retry_after_seconds is None
    assert found["404"].reason == 'HTTP 404: {"no": "404"}'


async def test_what_goes_wrong_on_the_way_is_said(tmp_path: Path, url: str) -> None:
    async with rig(tmp_path, source(url)) as made:
        assert "timed out" in ((await made.run("slow")).reason or "")
        assert "more than 10,485,760 bytes" in ((await made.run("large")).reason or "")
        assert "refused" in ((await made.run("nowhere")).reason or "")
        assert "the response is not JSON" in ((await made.run("no_json")).reason or "")
        # Another host is told no password.
        assert await made.result("moved") == {"authorization": None}


@pytest.mark.parametrize(
    "command", ["printf %s {{ params.who }}", 'printf %s "{{ params.who }}"', "printf %s '{{ params.who }}'"]
)
async def test_a_value_in_a_command_is_never_code(tmp_path: Path, command: str) -> None:
    async with rig(tmp_path, source("http://x", command)) as made:
        outcome = await made.run("greet", params_json=PARAMS, command=command, inputs_json='{"rows": null}')
        who = json.loads(PARAMS)["who"]
        (told, value, said) = log_text(outcome)
        assert told.startswith("RENDER command = ") and value == f"RENDER EVERTICK_VALUE_0 = {json.dumps(who)}"
        assert said == f"RAW {who}"
        assert not Path("hacked").exists()


async def test_a_command_knows_its_run(tmp_path: Path) -> None:
    command = "echo {{ inputs.rows }} {{ params.n + 1 }} {{ fire_at }} {{ data_interval_start }} {{ ds }} ${#HOME}"
    async with rig(tmp_path, source("http://x", command)) as made:
        fields = {
            "params_json": PARAMS,
            "inputs_json": '{"rows": {"count": [1]}}',
            "fire_at": "2030-01-02T06:00:00+00:00",
        }
        outcome = await made.run("greet", command=command, **fields)
        (*told, line) = log_text(outcome)
        assert told[1:3] == ['RENDER EVERTICK_VALUE_0 = "[1]"', 'RENDER EVERTICK_VALUE_1 = "6"'] and len(told) == 6
        assert line.startswith("RAW [1] 6 2030-01-02T06:00:00+00:00 2030-01-01T06:00:00+00:00 2030-01-02 ")
        plain = await made.run("plain", command="echo '{{ not a template }}'")
        assert log_text(plain) == ["RAW {{ not a template }}"]


async def test_a_template_that_cannot_be_rendered_fails_the_task(tmp_path: Path) -> None:
    command = "echo {{ params.n.nobody }}"
    async with rig(tmp_path, source("http://x", command)) as made:
        outcome = await made.run("greet", params_json=PARAMS, command=command, inputs_json='{"rows": null}')
        assert "has no attribute 'nobody'" in (outcome.reason or "")


async def test_a_program_answers_by_json_lines(tmp_path: Path) -> None:
    async with rig(tmp_path, tool(tmp_path)) as made:
        outcome = await made.run("score", inputs_json='{"rows": [1, 2]}')
        assert json.loads(outcome.result_json or "") == {"rows": [1, 2], "task": "score"}
        assert sorted(log_text(outcome)) == [
            "OUT a plain line",
            'OUT {"other": "json"}',
            "RAW hello",
            "WARNING careful",
        ]
        skipped, later, failed = await made.run("skip"), await made.run("retry"), await made.run("fail")
        assert (skipped.kind, skipped.reason) == ("skipped", "nothing new")
        assert (later.kind, later.retry_after_seconds, later.no_retry) == ("failed", 7, False)
        assert (failed.reason, failed.no_retry) == ("bad input", True)
        exited, killed = await made.run("exit"), await made.run("killed")
        assert (exited.reason, exited.no_retry) == ("exited with code 3", False)
        assert "killed by SIGKILL" in (killed.reason or "")
        assert "is not a valid report" in ((await made.run("nonsense")).reason or "")
        assert "cannot be started" in ((await made.run("missing")).reason or "")
        given = json.loads((await made.run("outputs")).result_json or "")
        assert given["named"]["a"] == {"$evertick": "dict", "value": [["$evertick", "decimal"]]}


def tool(tmp_path: Path) -> str:
    path = tmp_path / "tool"
    path.write_text(TOOL)
    path.chmod(0o755)
    return source("http://x").replace("./tool", str(path))
