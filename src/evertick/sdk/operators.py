"""`http`, `program` and `trigger_dag`: tasks without a Python function.

They only declare: the attempt sends the request or starts the program, and the leader starts the other run.
"""

from __future__ import annotations

import json as json_text
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Unpack
from urllib.parse import urlsplit

from evertick.domain.dags.params import JsonValue, as_json
from evertick.domain.dags.spec import ChildSpec, TaskKind
from evertick.sdk.builder import FutureResult, TaskRef, current_builder
from evertick.sdk.notify import NOTICE_OPTIONS
from evertick.sdk.options import Seconds, TaskOptions, check_options, read_length, read_option, task_spec
from evertick.sdk.runtime import BoundTask, HttpCall, ParamRef, ProgramCall
from evertick.sdk.source_location import refused
from evertick.sdk.task import marked_values, template_names
from evertick.sdk.templates import check_template, is_template

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")


RESPONSES = ("auto", "json", "text", "full", "none")


_HEADER = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


_STATUS = range(100, 600)


def http(
    name: str,
    url: str,
    /,
    *,
    method: str = "GET",
    headers: Mapping[str, str] | None = None,
    json: object = None,
    body: str | None = None,
    expect: int | Iterable[int] = (),
    response: str = "auto",
    request_timeout: Seconds = 30.0,
    inputs: Mapping[str, object] | None = None,
    template: bool = True,
    **options: Unpack[TaskOptions],
) -> FutureResult:
    """A task that sends one HTTP request: `http("load", "https://shop/orders/{{ params.id }}", json={"n": "{{ inputs.n }}"})`.

    `expect` are the statuses that count as success (default: any 2xx). The result is the response's JSON or text, or with
    response="full" a dict with status, headers and body. 429 and 5xx are retried, other statuses are not.
    """
    owner = f"HTTP task {name!r}"
    check_options(owner, options, http, TaskOptions)
    call = HttpCall(
        method=str(method).upper(),
        url=url,
        headers=_checked_headers(owner, headers),
        json=_checked_json(owner, json, body),
        body=body,
        expect=_checked_expect(owner, expect),
        response=response,
        timeout_seconds=read_option(owner, "request_timeout", request_timeout, read_length),
    )
    if call.method not in METHODS:
        raise refused(f"{owner}: method {method!r} is not one of {', '.join(METHODS)}.")
    if response not in RESPONSES:
        raise refused(f"{owner}: response {response!r} is not one of {', '.join(RESPONSES)}.")
    _check_url(owner, url, is_template=template and is_template(url))
    if template:
        builder = current_builder(f"http task {name!r}")
        known = template_names(tuple(inputs or ()), {**builder.task_defaults, **options})
        for field, text in (("url", url), ("body", body or ""), *call.headers.items(), *_leaves(json)):
            builder.note_params(name, check_template(owner, field, text, known))
    return _add(name, TaskKind.HTTP, call, inputs=inputs, env=None, template=template, options=options)


def program(
    name: str, argv: Sequence[str], /, *, env: Mapping[str, object] | None = None, **options: Unpack[TaskOptions]
) -> FutureResult:
    """A task that runs a program in any language: `program("score", ["./score", "--fast"], env={"ROWS": rows})`.

    It gets information about the run in its environment, like a shell task, and reports with JSON lines on its standard output.
    """
    owner = f"program task {name!r}"
    check_options(owner, options, program, TaskOptions)
    if isinstance(argv, str) or not isinstance(argv, Sequence) or not argv:
        raise refused(
            f"{owner}: the program must be a list, as in ['./score', '--fast']; for a command line use shell()."
        )
    if wrong := [each for each in argv if not isinstance(each, str) or "\0" in each]:
        raise refused(f"{owner}: {wrong[0]!r} cannot be an argument of a program; pass a result with env=.")
    call = ProgramCall(argv=tuple(argv))
    return _add(name, TaskKind.PROGRAM, call, inputs=None, env=env, template=False, options=options)


def _add(
    name: str,
    kind: TaskKind,
    call: HttpCall | ProgramCall,
    *,
    inputs: Mapping[str, object] | None,
    env: Mapping[str, object] | None,
    template: bool,
    options: Mapping[str, Any],
) -> TaskRef:
    owner = f"{kind} task {name!r}"
    builder = current_builder(owner)
    full = builder.claim_name(name)
    refs: dict[str, TaskRef] = {}
    settings = {**builder.task_defaults, **options}
    bound = BoundTask(
        name=full,
        kind=kind,
        call=call,
        env=marked_values(owner, "env", env, refs),
        is_template=template,
        template_inputs=marked_values(owner, "inputs", inputs, refs),
        outputs=task_spec(full, settings).outputs,
    )
    return builder.add(bound, settings, refs, summary=_summary(call))


def _summary(call: HttpCall | ProgramCall) -> str:
    """For the pages of the DAG; headers and bodies stay in the code."""
    return f"{call.method} {call.url}" if isinstance(call, HttpCall) else json_text.dumps(call.argv)


def _check_url(owner: str, url: object, *, is_template: bool) -> None:
    if not isinstance(url, str) or not url or any(character.isspace() for character in url.split("{{")[0]):
        raise refused(f"{owner}: {url!r} is not a URL.")
    if is_template and url.startswith(("{{", "{%")):
        return
    parts = urlsplit(url.split("{{")[0])
    if parts.scheme not in ("http", "https"):
        raise refused(f"{owner}: {url!r} must begin with http:// or https://.")
    if "@" in parts.netloc:
        raise refused(f"{owner}: a URL must not contain a password; pass it in a header from a secret.")


def _checked_headers(owner: str, headers: object) -> dict[str, str]:
    if headers is None:
        return {}
    if not isinstance(headers, Mapping):
        raise refused(f"{owner}: headers must be a dict, not {headers!r}.")
    for key, value in headers.items():
        if not isinstance(key, str) or not _HEADER.fullmatch(key) or not isinstance(value, str) or "\n" in value:
            raise refused(f"{owner}: {key!r}: {value!r} is not a valid header.")
    return dict(headers)


def _checked_json(owner: str, value: object, body: object) -> object:
    if value is not None and body is not None:
        raise refused(f"{owner}: use json= or body=, not both.")
    if body is not None and not isinstance(body, str):
        raise refused(f"{owner}: body must be text; for other values use json=.")
    try:
        return json_text.loads(json_text.dumps(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise refused(f"{owner}: json= must be JSON ({error}); pass results with inputs= and a template.") from None


def _checked_expect(owner: str, expect: object) -> tuple[int, ...]:
    listed = [expect] if isinstance(expect, int) else expect
    if not isinstance(listed, Iterable) or isinstance(listed, str):
        raise refused(f"{owner}: expect must be a status or a list of them, not {expect!r}.")
    found = tuple(listed)
    if wrong := [each for each in found if isinstance(each, bool) or each not in _STATUS]:
        raise refused(f"{owner}: {wrong[0]!r} is not an HTTP status.")
    return found


def _leaves(value: object) -> list[tuple[str, str]]:
    if isinstance(value, str):
        return [("json", value)]
    if isinstance(value, Mapping):
        return [leaf for key, item in value.items() for leaf in (*_leaves(key), *_leaves(item))]
    return [leaf for item in value for leaf in _leaves(item)] if isinstance(value, list | tuple) else []


# The DAG's defaults that apply to a task without a runner.
_KEPT = ("trigger_rule", "timeout", "finish_within", *NOTICE_OPTIONS)


def trigger_dag(
    dag: str, /, *, params: Mapping[str, object] | None = None, wait: bool = True, **options: Unpack[TaskOptions]
) -> FutureResult:
    """Start a run of another DAG. With `wait` the task ends as that run does, or fails after its `timeout`. Its result is
    the id of the run. A param is a constant, the result of another task, or a parameter of this DAG."""
    builder = current_builder(f"trigger_dag({dag!r})")
    if not isinstance(dag, str) or not dag:
        raise refused(f"trigger_dag takes the name of a DAG, not {dag!r}.")
    check_options(f"trigger_dag({dag!r})", options, trigger_dag, TaskOptions)
    if not isinstance(wait, bool):
        raise refused(f"trigger_dag({dag!r}): wait must be True or False, not {wait!r}.")
    if params is not None and not isinstance(params, Mapping):
        raise refused(f"trigger_dag({dag!r}): params must be a dict, not {params!r}.")
    refs: dict[str, TaskRef] = {}
    constants, given = _split(dag, params or {}, refs)
    local = options.get("name") or f"trigger_{dag}".replace(".", "_")
    name = builder.claim_name(local, numbered="name" not in options)
    kept = {key: value for key, value in builder.task_defaults.items() if key in _KEPT}
    child = ChildSpec(dag=dag, params=constants, given=given, waits=wait)
    return builder.add(BoundTask(name=name, kind=TaskKind.TRIGGER), {**kept, **options}, refs, child=child)


def _split(
    dag: str, params: Mapping[str, object], refs: dict[str, TaskRef]
) -> tuple[dict[str, JsonValue], dict[str, JsonValue]]:
    """The params known now, and those known when the run starts. `refs` collects the tasks whose results are needed."""
    constants: dict[str, JsonValue] = {}
    given: dict[str, JsonValue] = {}
    for name, value in params.items():
        if isinstance(value, TaskRef):
            refs[value.task_name] = value
            given[str(name)] = {"task": value.task_name, "path": list(value.result_path)}
        elif isinstance(value, ParamRef):
            given[str(name)] = {"param": value.param_name}
        else:
            try:
                constants[str(name)] = as_json(value)
            except ValueError as error:
                raise refused(
                    f"trigger_dag({dag!r}): param {name!r} must be a constant, the result of a task, or a parameter of"
                    f" this DAG, not a value that contains one: {error}."
                ) from None
    return constants, given
