"""The native API: its routes are made from the table of operations."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_args, get_origin

from annotated_doc import Doc
from fastapi import APIRouter, Header, Path, Query, Response

from evertick.api.auth import GuardedRoute, requires
from evertick.api.context import Who
from evertick.api.native import (
    live,
    task_logs,
)
from evertick.operations.paging import Pattern, Tagged
from evertick.operations.routes import ROUTES, Route


def native_routers() -> list[APIRouter]:
    # Polled routes come first: a request is compared with one route after the other.
    before, after = (
        (task_logs,),
        (live,),
    )
    return [
        router_of(ROUTES),
        *(module.router for module in (*before, *after)),
    ]


def router_of(routes: tuple[Route, ...]) -> APIRouter:
    router = APIRouter(route_class=GuardedRoute)
    for route in routes:
        if route.stream is not None:
            continue
        router.add_api_route(
            route.path,
            requires(route.permission)(endpoint_of(route)),
            methods=[route.method],
            tags=[route.tag],
            # Without a status of its own a route can be answered without the framework.
            status_code=None if route.status == 200 else route.status,
            responses={412: {"description": "The ETag has changed."}} if "if_match" in route.headers else None,
        )
    return router


def endpoint_of(route: Route) -> Callable[..., Any]:
    """The operation as a function that FastAPI can call: with its constraints, and with the record of its result."""
    operation = inspect.signature(route.function, eval_str=True)
    caller, *given = (each for each in operation.parameters.values() if each.name not in route.fixed)
    parameters = [caller.replace(annotation=Who, kind=inspect.Parameter.KEYWORD_ONLY)]
    parameters += [each.replace(annotation=_annotation_of(route, each)) for each in given]
    is_tagged = get_origin(operation.return_annotation) is Tagged
    returned = get_args(operation.return_annotation)[0] if is_tagged else operation.return_annotation
    is_direct = not is_tagged and route.repeated_status is None
    if not is_direct:
        parameters.append(inspect.Parameter("response", inspect.Parameter.KEYWORD_ONLY, annotation=Response))
    endpoint = _direct(route) if is_direct else _endpoint_of(route, is_tagged=is_tagged)
    endpoint.__name__, endpoint.__doc__ = route.name or route.function.__name__, route.function.__doc__
    endpoint.__signature__ = operation.replace(parameters=parameters, return_annotation=returned)  # type: ignore[attr-defined]
    return endpoint


def _direct(route: Route) -> Callable[..., Any]:
    async def endpoint(**values: Any) -> Any:
        return await route.function(**values, **route.fixed)

    return endpoint


def _endpoint_of(route: Route, *, is_tagged: bool) -> Callable[..., Any]:
    """For a record that also decides the headers or the status of the response."""

    async def endpoint(*, response: Response, **values: Any) -> Any:
        found = await route.function(**values, **route.fixed)
        record = found.record if is_tagged else found
        if is_tagged:
            response.headers["ETag"] = found.etag
        if route.repeated_status is not None:
            response.status_code = route.status if record.is_new else route.repeated_status
        return record

    return endpoint


def _annotation_of(route: Route, parameter: inspect.Parameter) -> Any:
    """The parameter's type with its place in the request."""
    if parameter.name == "body":
        return parameter.annotation
    kind, *metadata = (
        get_args(parameter.annotation) if get_origin(parameter.annotation) is Annotated else [parameter.annotation]
    )
    options: dict[str, Any] = {}
    for each in metadata:
        if isinstance(each, Doc):
            options["description"] = each.documentation
        elif isinstance(each, Pattern):
            options["pattern"] = each.regex
    if f"{{{parameter.name}}}" in route.path:
        place: Any = Path(**options)
    elif parameter.name in route.headers:
        place = Header(**options)
    else:
        place = Query(**options)
    constraints = [each for each in metadata if not isinstance(each, Doc | Pattern)]
    return Annotated[(kind, *constraints, place)]
