"""Fast path for GET requests with simple parameters: most requests, and nearly all polling.

The framework documents routes and reports invalid requests, but accounts for a third of the time of a valid one. This module
answers valid requests to simple routes and leaves all others to the framework. The responses are identical.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable
from dataclasses import dataclass
from typing import Any

from fastapi import Request, Response
from fastapi._compat import ModelField, field_annotation_is_scalar, field_annotation_is_scalar_sequence
from fastapi.datastructures import DefaultPlaceholder
from fastapi.routing import APIRoute

from evertick.api.context import caller_of

Answer = Callable[[Request], Awaitable[Response | None]]
Validate = Callable[[Any], tuple[Any, list[Any]]]


@dataclass(frozen=True, slots=True)
class _Param:
    name: str
    alias: str
    is_list: bool
    is_required: bool
    # Immutable, because all requests share it.
    default: Any
    validate: Validate


def plain_answer(route: APIRoute) -> Answer | None:
    """Return a function that answers authenticated requests for this route, or leaves one to the framework.
    None if the route does not qualify."""
    dependant, response_field = route.dependant, route.response_field
    call = dependant.call
    if call is None or response_field is None or not _is_plain(route):
        return None
    callers = [dependency.name for dependency in dependant.dependencies if dependency.name]
    asked = [_param(field) for field in dependant.query_params]
    named = [_param(field) for field in dependant.path_params]

    async def answer(request: Request) -> Response | None:
        values: dict[str, Any] = dict.fromkeys(callers, request.state.caller)
        query = request.query_params if asked else None
        for param in asked:
            assert query is not None
            given = (query.getlist(param.alias) or None) if param.is_list else query.get(param.alias)
            if not _read(param, given, values):
                return None
        for param in named:
            if not _read(param, request.path_params.get(param.alias), values):
                return None
        made = await call(**values)
        if isinstance(made, Response):
            return made
        value, errors = response_field.validate(made, {}, loc=("response",))
        if errors:
            raise TypeError(f"{route.path} returned a value that does not match its response model: {errors}")
        return Response(response_field.serialize_json(value), media_type="application/json")

    return answer


def _read(param: _Param, given: Any, values: dict[str, Any]) -> bool:
    """Parse a parameter into `values`. Returns whether it is valid."""
    if given is None:
        values[param.name] = param.default
        return not param.is_required
    values[param.name], errors = param.validate(given)
    return not errors


def _param(field: ModelField) -> _Param:
    return _Param(
        name=field.name,
        alias=field.validation_alias or field.alias,
        is_list=field_annotation_is_scalar_sequence(field.field_info.annotation),
        is_required=field.field_info.is_required(),
        default=field.get_default(),
        validate=field.validate,
    )


def _is_plain(route: APIRoute) -> bool:
    """Whether the route only reads, takes only its caller and single URL values, and uses the default response class."""
    needs = route.dependant
    others = (needs.header_params, needs.cookie_params, needs.body_params, needs.request_param_name)
    more = (needs.response_param_name, needs.http_connection_param_name, needs.background_tasks_param_name)
    left_out = (route.response_model_include, route.response_model_exclude, route.response_model_exclude_none)
    as_usual = (route.response_model_exclude_unset, route.response_model_exclude_defaults, route.status_code)
    return (
        route.methods == {"GET"}
        and not any((*others, *more, *left_out, *as_usual))
        and isinstance(route.response_class, DefaultPlaceholder)
        and all(dependency.call is caller_of for dependency in needs.dependencies)
        and all(_is_single(field) for field in (*needs.query_params, *needs.path_params))
    )


def _is_single(field: ModelField) -> bool:
    info = field.field_info
    kind = info.annotation
    is_known = field_annotation_is_scalar(kind) or field_annotation_is_scalar_sequence(kind)
    is_steady = info.is_required() or isinstance(field.get_default(), Hashable)
    return is_known and is_steady and not info.validate_default and isinstance(info.validation_alias, str | None)
