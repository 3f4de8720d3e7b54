"""The routes of a collection of named entities (variables, connections, pools), and bulk changes.

Entities of a bulk request are processed independently; the response names each failed one.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Annotated, Any, ClassVar, Generic, Literal, Protocol, TypeVar

from fastapi import Path, Query, params
from psycopg import AsyncConnection
from pydantic import BaseModel, Field

from evertick.api.airflow import query
from evertick.api.airflow.models import BulkResponse
from evertick.api.auth import GuardedRouter, requires
from evertick.api.context import ApiCaller, Who
from evertick.api.problems import status_of
from evertick.db.notify import Channel
from evertick.domain.access import Permission
from evertick.domain.errors import Conflict, NotFound, UserError

MOST_ENTITIES = 1000

Document = dict[str, Any]
Endpoint = Callable[..., Awaitable[Any]]


class Named(Protocol):
    @property
    def name(self) -> str: ...


Row = TypeVar("Row", bound=Named)
Entity = TypeVar("Entity", bound=query.Body)
Change = TypeVar("Change", bound=query.Body)


class CreateAction(query.Body, Generic[Entity]):
    action: Literal["create"]
    action_on_existence: Literal["fail", "skip", "overwrite"] = "fail"
    entities: Annotated[list[Entity], Field(max_length=MOST_ENTITIES)]
    update_mask: ClassVar[None] = None


class UpdateAction(query.Body, Generic[Entity]):
    action: Literal["update"]
    action_on_non_existence: Literal["fail", "skip"] = "fail"
    update_mask: list[str] | None = None
    entities: Annotated[list[Entity], Field(max_length=MOST_ENTITIES)]


class DeleteAction(query.Body, Generic[Entity]):
    action: Literal["delete"]
    action_on_non_existence: Literal["fail", "skip"] = "fail"
    entities: Annotated[list[str | Entity], Field(max_length=MOST_ENTITIES)]
    update_mask: ClassVar[None] = None


Action = CreateAction[Any] | UpdateAction[Any] | DeleteAction[Any]


class BulkBody(query.Body, Generic[Entity]):
    actions: Annotated[
        list[CreateAction[Entity] | UpdateAction[Entity] | DeleteAction[Entity]], Field(max_length=MOST_ENTITIES)
    ]


class Tally:
    """The result of each entity. A failed entity does not affect the others."""

    def __init__(self) -> None:
        self._done: dict[str, dict[str, list[Any]]] = {}

    @asynccontextmanager
    async def counting(self, action: Action, name: str) -> AsyncIterator[None]:
        told = self._done.setdefault(action.action, {"success": [], "errors": []})
        try:
            yield
        except UserError as error:
            if not _is_skipped(action, error):
                told["errors"].append({"error": str(error), "status_code": status_of(error)[0].value})
        else:
            told["success"].append(name)

    def document(self) -> dict[str, Any]:
        return dict(self._done)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resource(Generic[Row, Entity, Change]):
    """One kind of named entity: the models and names of its routes, and the functions behind them."""

    name: str
    parameter: str
    path: str
    entity: type[Entity]
    change: type[Change]
    response: type[BaseModel]
    collection: type[BaseModel]
    reading: Permission
    editing: Permission
    channels: tuple[Channel, ...] = ()
    rows: Callable[[AsyncConnection], Awaitable[Sequence[Row]]]
    # The documents of one page of the filtered rows, in the order of `order_by`.
    page: Callable[[ApiCaller, AsyncConnection, list[Row], list[str] | None, slice], Awaitable[list[Document]]]
    find: Callable[[ApiCaller, AsyncConnection, str], Awaitable[Document]]
    name_of: Callable[[Entity], str]
    # The flag says that the entity must be new.
    create: Callable[[ApiCaller, AsyncConnection, Entity, bool], Awaitable[None]]
    update: Callable[[ApiCaller, AsyncConnection, str, Entity | Change, list[str] | None], Awaitable[None]]
    delete: Callable[[ApiCaller, AsyncConnection, str], Awaitable[None]]


def routes_of(kind: Resource[Row, Entity, Change]) -> GuardedRouter:
    """List, create, change in bulk, read, patch and delete, with the names that Airflow gives them."""
    collection = f"{kind.name}s"

    async def get_many(
        caller: Who,
        limit: query.Limit = query.USUAL_ITEMS,
        offset: query.Offset = 0,
        order_by: query.OrderBy = None,
        pattern: str | None = None,
        prefix_pattern: str | None = None,
    ) -> Document:
        async with caller.read() as conn:
            found = [row for row in await kind.rows(conn) if query.fits(row.name, pattern, prefix_pattern)]
            part = slice(offset, offset + query.page_size(limit))
            return {collection: await kind.page(caller, conn, found, order_by, part), "total_entries": len(found)}

    async def post(body: Entity, caller: Who) -> Document:
        async with caller.write(*kind.channels) as conn:
            await kind.create(caller, conn, body, True)
            return await kind.find(caller, conn, kind.name_of(body))

    async def bulk(body: BulkBody[Entity], caller: Who) -> Document:
        async with caller.write(*kind.channels) as conn:
            return await _change_in_bulk(kind, caller, conn, body)

    async def get(name: str, caller: Who) -> Document:
        async with caller.read() as conn:
            return await kind.find(caller, conn, name)

    async def patch(name: str, body: Change, caller: Who, update_mask: query.Texts = None) -> Document:
        async with caller.write(*kind.channels) as conn:
            await kind.update(caller, conn, name, body, update_mask)
            return await kind.find(caller, conn, name)

    async def delete(name: str, caller: Who) -> None:
        async with caller.write(*kind.channels) as conn:
            await kind.delete(caller, conn, name)

    router = GuardedRouter(tags=[kind.name.capitalize()])

    def add(method: str, path: str, name: str, endpoint: Endpoint, response: type[BaseModel] | None) -> None:
        permission = kind.reading if method == "GET" else kind.editing
        status = {"POST": 201, "DELETE": 204}.get(method)
        route = requires(permission)(endpoint)
        router.add_api_route(path, route, methods=[method], name=name, response_model=response, status_code=status)

    named = Annotated[str, Path(alias=kind.parameter)]
    patterns = {each: _pattern(f"{kind.parameter}_{each}") for each in ("pattern", "prefix_pattern")}
    add("GET", f"/{collection}", f"get_{collection}", bind(get_many, **patterns), kind.collection)
    add("POST", f"/{collection}", f"post_{kind.name}", bind(post, body=kind.entity), kind.response)
    add("PATCH", f"/{collection}", f"bulk_{collection}", bind(bulk, body=BulkBody[kind.entity]), BulkResponse)  # type: ignore[name-defined]
    add("GET", kind.path, f"get_{kind.name}", bind(get, name=named), kind.response)
    add("PATCH", kind.path, f"patch_{kind.name}", bind(patch, name=named, body=kind.change), kind.response)
    add("DELETE", kind.path, f"delete_{kind.name}", bind(delete, name=named), None)
    return router


def bind(endpoint: Endpoint, **annotations: Any) -> Endpoint:
    """The endpoint with other types of these parameters, which FastAPI reads. A parameter of the path has no default."""

    @wraps(endpoint)
    async def bound(**values: Any) -> Any:
        return await endpoint(**values)

    signature = inspect.signature(endpoint, eval_str=True)
    parameters = [
        each.replace(
            kind=inspect.Parameter.KEYWORD_ONLY,
            annotation=annotations.get(each.name, each.annotation),
            default=inspect.Parameter.empty if _is_in_path(annotations.get(each.name)) else each.default,
        )
        for each in signature.parameters.values()
    ]
    bound.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return bound


def _is_in_path(annotation: Any) -> bool:
    return any(isinstance(each, params.Path) for each in getattr(annotation, "__metadata__", ()))


def _pattern(alias: str) -> Any:
    return Annotated[str | None, Query(alias=alias, max_length=1000)]


async def _change_in_bulk(
    kind: Resource[Row, Entity, Change], caller: ApiCaller, conn: AsyncConnection, body: BulkBody[Entity]
) -> Document:
    tally = Tally()
    for action in body.actions:
        for entity in action.entities:
            name = entity if isinstance(entity, str) else kind.name_of(entity)
            async with tally.counting(action, name):
                if isinstance(action, DeleteAction) or isinstance(entity, str):
                    await kind.delete(caller, conn, name)
                elif isinstance(action, CreateAction):
                    await kind.create(caller, conn, entity, action.action_on_existence != "overwrite")
                else:
                    await kind.update(caller, conn, name, entity, action.update_mask)
    return tally.document()


def _is_skipped(action: Action, error: UserError) -> bool:
    if isinstance(action, CreateAction):
        return isinstance(error, Conflict) and action.action_on_existence == "skip"
    return isinstance(error, NotFound) and action.action_on_non_existence == "skip"
