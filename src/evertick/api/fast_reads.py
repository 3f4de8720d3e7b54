"""Reads with plain parameters, answered without the framework: most of what is requested, and nearly all of what is polled.

The framework validates a request and explains what is wrong with it. A valid request takes a third of the time here, with
the same answer; every other request is left to the framework (decision 0035).
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterator
from dataclasses import dataclass
from datetime import date, datetime, time, timedelta
from enum import Enum
from functools import cached_property
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin
from uuid import UUID

from fastapi import Request, Response, params
from fastapi.datastructures import DefaultPlaceholder
from fastapi.routing import APIRoute
from pydantic import TypeAdapter, ValidationError

from evertick.api.context import caller_of

Answer = Callable[[Request], Awaitable[Response | None]]

_SCALARS = (str, bytes, int, float, bool, datetime, date, time, timedelta, UUID, Enum)


@dataclass(frozen=True)
class _Param:
    """A parameter of the path or of the query. `default` is shared by all requests, so it is hashable."""

    name: str
    alias: str
    is_list: bool
    default: Any
    annotation: Any

    @cached_property
    def validate(self) -> Callable[[Any], Any]:
        # Made with the first request: an API that starts has hundreds of them.
        return TypeAdapter(self.annotation).validate_python


def plain_answer(route: APIRoute, *, known_query: frozenset[str] | None = None) -> Answer | None:
    """A function that answers a request for this route whose caller is known, or returns None if the framework must
    answer. None for a route that is not plain. With `known_query`, other query parameters are an error."""
    if route.response_model is None or not _answers_plainly(route):
        return None
    callers, in_path, in_query = [], [], []
    for parameter in inspect.signature(route.endpoint, eval_str=True).parameters.values():
        if _is_caller(parameter):
            callers.append(parameter.name)
        elif (param := _param(parameter, route.param_convertors)) is None:
            return None
        elif param.alias in route.param_convertors:
            in_path.append(param)
        else:
            in_query.append(param)
    return _Read(route, callers, in_path, in_query, known_query).answer


@dataclass(frozen=True)
class _Read:
    route: APIRoute
    callers: list[str]
    in_path: list[_Param]
    in_query: list[_Param]
    known_query: frozenset[str] | None

    @cached_property
    def _adapter(self) -> TypeAdapter[Any]:
        return TypeAdapter(self.route.response_model)

    async def answer(self, request: Request) -> Response | None:
        values: dict[str, Any] = dict.fromkeys(self.callers, request.state.caller)
        query = request.query_params
        if self.known_query is not None and not self.known_query >= query.keys():
            return None
        try:
            if self.in_query:
                for param in self.in_query:
                    given = (query.getlist(param.alias) or None) if param.is_list else query.get(param.alias)
                    values[param.name] = param.validate(given) if given is not None else _default(param)
            for param in self.in_path:
                values[param.name] = param.validate(request.path_params[param.alias])
        except (ValidationError, _Missing):
            return None
        made = await self.route.endpoint(**values)
        if isinstance(made, Response):
            return made
        document = self._adapter.validate_python(made, from_attributes=True)
        return Response(self._adapter.dump_json(document, by_alias=True), media_type="application/json")


class _Missing(Exception):
    """A required parameter was not given."""


def _default(param: _Param) -> Any:
    if param.default is inspect.Parameter.empty:
        raise _Missing
    return param.default


def _is_caller(parameter: inspect.Parameter) -> bool:
    metadata = get_args(parameter.annotation)[1:] if get_origin(parameter.annotation) is Annotated else ()
    return any(isinstance(each, params.Depends) and each.dependency is caller_of for each in metadata)


def _param(parameter: inspect.Parameter, in_path: Collection[str]) -> _Param | None:
    """None for anything but a single value, or a list of single values, in the path or the query."""
    kind, *metadata = (
        get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else [parameter.annotation]
    )
    if any(isinstance(each, params.Depends) for each in metadata):
        return None
    info = next((each for each in metadata if isinstance(each, params.Param)), None)
    is_list = _is_list(kind)
    # The framework takes a list without `Query` for a body.
    if not _is_scalar(kind) and (not is_list or info is None):
        return None
    alias = (info.validation_alias or info.alias if info is not None else None) or parameter.name
    if not isinstance(alias, str) or not isinstance(parameter.default, Hashable):
        return None
    if info is not None and (info.default_factory is not None or info.validate_default):
        return None
    if info is not None and not isinstance(info, params.Path if alias in in_path else params.Query):
        return None
    return _Param(parameter.name, alias, is_list, parameter.default, parameter.annotation)


def _is_scalar(kind: Any) -> bool:
    return all(
        get_origin(each) is Literal or (isinstance(each, type) and issubclass(each, (*_SCALARS, NoneType)))
        for each in _members(kind)
    )


def _is_list(kind: Any) -> bool:
    members = [each for each in _members(kind) if each is not NoneType]
    return len(members) == 1 and get_origin(members[0]) is list and all(map(_is_scalar, get_args(members[0])))


def _members(kind: Any) -> Iterator[Any]:
    """The types of a union, without their metadata."""
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _members(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for each in get_args(kind):
            yield from _members(each)
    else:
        yield kind


def _answers_plainly(route: APIRoute) -> bool:
    """Whether the route only reads, and its answer is the whole record as JSON with status 200."""
    parts = (route.response_model_include, route.response_model_exclude, route.response_model_exclude_none)
    others = (route.response_model_exclude_unset, route.response_model_exclude_defaults, route.status_code)
    return (
        route.methods == {"GET"}
        and not any((*parts, *others))
        and isinstance(route.response_class, DefaultPlaceholder)
        and not route.dependencies
    )
