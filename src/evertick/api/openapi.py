"""The OpenAPI document of the native API: declared errors, security, servers, and the names of its schemas.

FastAPI makes the rest of it from the routes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from http import HTTPStatus
from inspect import Parameter, signature
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import TypeAdapter

from evertick.api.problems import PROBLEM, Problem

PREFIX = "/api/v1"

_SCHEMAS = "#/components/schemas/"
_EVERYWHERE = (400, 401, 403, 422, 429, 500, 503)
_ABOUT = {
    400: "A value is invalid.",
    401: "The caller is not authenticated: the token or session is missing, wrong, expired or revoked.",
    403: "The caller lacks the permission.",
    404: "It does not exist, or the caller may not see it.",
    409: "The state of the object does not allow this.",
    412: "The ETag has changed.",
    413: "The request body is too large.",
    422: "The request does not match this document. `errors` names each place.",
    429: "Too many requests. `Retry-After` says how long to wait.",
    500: "An internal error. The server's log has its request id.",
    502: "The object storage is unavailable.",
    503: "The database or the server is unavailable. `Retry-After` says how long to wait.",
}
# Parameters that name an object that must exist, where they are not in the path.
_NAMES = {"dag", "run", "user", "runners"}
_SECURITY = {
    "token": {"type": "http", "scheme": "bearer", "description": "A token from `POST /auth/token` or `POST /tokens`."},
    "session": {
        "type": "apiKey",
        "in": "cookie",
        "name": "evertick_session",
        "description": "The cookie of a browser, named `__Host-evertick` over TLS. Changes also need the header X-CSRF-Token.",
    },
}


def errors_of(
    operation: Callable[..., Any], *, method: str, path: str, others: Iterable[int] = ()
) -> dict[int | str, Any]:
    """The errors that an operation can answer, as FastAPI declares them."""
    parameters = signature(operation, eval_str=True).parameters
    statuses = {*_EVERYWHERE, *others}
    if "{" in path or _NAMES & {*parameters, *_fields_of_body(parameters.get("body"))}:
        statuses.add(404)
    if method != "GET":
        statuses |= {409, 413}
    if "if_match" in parameters:
        statuses.add(412)
    return {status: _declared(status) for status in sorted(statuses)}


def describe(document: dict[str, Any]) -> dict[str, Any]:
    """The document as FastAPI made it, with what applies to every operation and with readable names."""
    components = document["components"]
    components["securitySchemes"] = _SECURITY
    problem = TypeAdapter(Problem).json_schema(ref_template=_SCHEMAS + "{model}")
    components["schemas"] |= {**problem.pop("$defs"), "Problem": problem}
    for operations in document["paths"].values():
        for operation in operations.values():
            operation["security"] = [{"token": []}, {"session": []}]
    return _renamed(document)


def _declared(status: int) -> dict[str, Any]:
    schema = {"$ref": f"{_SCHEMAS}Problem"}
    headers = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer"}}}
    return {
        "description": _ABOUT[status],
        "content": {PROBLEM: {"schema": schema}},
        **({"headers": headers} if status in (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE) else {}),
    }


def _fields_of_body(body: Parameter | None) -> set[str]:
    if body is None:
        return set()
    kinds = get_args(body.annotation) if get_origin(body.annotation) is UnionType else (body.annotation,)
    return {each.name for kind in kinds if is_dataclass(kind) for each in fields(kind)}


def _renamed(document: dict[str, Any]) -> dict[str, Any]:
    """`Page_Run_` is `RunPage`, and `TaskRow` is `Task`."""
    schemas = document["components"]["schemas"]
    names = {name: _name_of(name) for name in schemas}
    for name in names:
        schemas[name]["title"] = names[name]
    document["components"]["schemas"] = {names[name]: schemas[name] for name in schemas}
    text = re.sub(rf'"{_SCHEMAS}(\w+)"', lambda found: f'"{_SCHEMAS}{names[found[1]]}"', json.dumps(document))
    renamed: dict[str, Any] = json.loads(text)
    return renamed


def _name_of(schema: str) -> str:
    page = re.fullmatch(r"Page_(\w+)_", schema)
    return f"{_name_of(page[1])}Page" if page else schema.removesuffix("Row")
