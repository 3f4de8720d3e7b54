"""Trigger a run: a form with one field per parameter and errors next to the fields."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from fastapi import APIRouter, Request, Response

from evertick.api.auth import requires
from evertick.api.context import Who
from evertick.db.notify import Channel
from evertick.domain.access import Permission
from evertick.domain.dags.params import JsonValue, ParamSpec, ParamType, check_params, parse_param
from evertick.domain.errors import InvalidParams, UserError
from evertick.engine.runs import trigger
from evertick.operations.dags import DagName
from evertick.ui.layout import PageRoute, done, form_of, page
from evertick.ui.pages.dag import dag_view

router = APIRouter(route_class=PageRoute, include_in_schema=False)

# The prefix keeps parameter names apart from other fields of the form.
PREFIX = "p."


@dataclass(frozen=True, slots=True)
class Field:
    """A parameter as a form field: `text` is its content, `options` are its choices (JSON value and label)."""

    spec: ParamSpec
    text: str
    options: list[tuple[str, str]]
    error: str | None = None

    @property
    def kind(self) -> str:
        if self.options:
            return "choice"
        if self.spec.type is ParamType.BOOLEAN:
            return "check"
        if self.spec.type in (ParamType.INTEGER, ParamType.NUMBER):
            return "number"
        return "text" if self.spec.type is ParamType.STRING else "json"


@router.get("/dags/{dag}/trigger")
@requires(Permission.TRIGGER_RUNS)
async def show_form(dag: DagName, request: Request, caller: Who) -> Response:
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
    params = view.spec.params if view.spec else ()
    return page(request, "trigger.html", **view.values("trigger"), fields=empty_fields(params), error=None)


@router.post("/dags/{dag}/trigger")
@requires(Permission.TRIGGER_RUNS)
async def start_run(dag: DagName, request: Request, caller: Who) -> Response:
    form = await form_of(request)
    async with caller.read() as conn:
        view = await dag_view(caller, conn, dag)
    fields, params = read_fields(view.spec.params if view.spec else (), form)
    error = None
    if not any(field.error for field in fields):
        try:
            async with caller.write(Channel.TASKS) as conn:
                made = await trigger(conn, dag=dag, params=params, actor=caller.actor)
                if made.defers:
                    caller.also.add(Channel.SCHEDULE)
            return done(f"Run {made.run_id} of {dag} created.", go=f"/runs/{made.run_id}")
        except UserError as refused:
            error = str(refused)
    return page(request, "trigger.html", status=422, **view.values("trigger"), fields=fields, error=error)


def empty_fields(declared: Iterable[ParamSpec]) -> list[Field]:
    """The fields filled with the defaults."""
    return [Field(spec, _shown(spec, None if spec.required else spec.default), _options(spec)) for spec in declared]


def read_fields(declared: Iterable[ParamSpec], form: dict[str, str]) -> tuple[list[Field], dict[str, JsonValue]]:
    """Check each parameter separately, so that each error is next to its field. An empty field means the default."""
    fields, params = [], {}
    for spec in declared:
        text = form.get(PREFIX + spec.name, "")
        problem = None
        try:
            if (value := _read(spec, text)) is not _NOTHING:
                params[spec.name] = value
            check_params([spec], {spec.name: params[spec.name]} if spec.name in params else {})
        except InvalidParams as error:
            problem = str(error)
        fields.append(Field(spec, text, _options(spec), problem))
    return fields, params  # type: ignore[return-value]


_NOTHING = object()


def _read(spec: ParamSpec, text: str) -> object:
    """Parse a field. Browsers do not send an unchecked checkbox, so a missing one means false; other empty fields are unset."""
    if spec.choices is not None:
        return _NOTHING if not text else _chosen(spec, text)
    if spec.type is ParamType.BOOLEAN:
        return text in ("true", "on")
    if not text.strip():
        may_be_empty = spec.type is ParamType.STRING and not spec.required and spec.default not in (None, "")
        return "" if may_be_empty else _NOTHING
    return parse_param([spec], spec.name, text if spec.type is ParamType.STRING else text.strip())


def _chosen(spec: ParamSpec, text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        raise InvalidParams(f"param {spec.name!r} must be {spec.allowed}.") from None


def _options(spec: ParamSpec) -> list[tuple[str, str]]:
    return [(json.dumps(each), each if isinstance(each, str) else json.dumps(each)) for each in spec.choices or ()]


def _shown(spec: ParamSpec, value: JsonValue) -> str:
    if spec.choices is not None:
        return "" if value is None and spec.required else json.dumps(value)
    if spec.type is ParamType.BOOLEAN:
        return "true" if value else ""
    if value is None:
        return ""
    return value if isinstance(value, str) and spec.type is ParamType.STRING else json.dumps(value, ensure_ascii=False)
