"""Bulk creations, updates and deletions. Entities are processed independently; the response names each failed one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from evertick.api.airflow.query import Body
from evertick.api.problems import status_of
from evertick.domain.errors import Conflict, NotFound, UserError

MOST_ENTITIES = 1000

Entity = TypeVar("Entity", bound=Body)


class CreateAction(Body, Generic[Entity]):
    action: Literal["create"]
    action_on_existence: Literal["fail", "skip", "overwrite"] = "fail"
    entities: Annotated[list[Entity], Field(max_length=MOST_ENTITIES)]

    @property
    def update_mask(self) -> list[str] | None:
        return None


class UpdateAction(Body, Generic[Entity]):
    action: Literal["update"]
    action_on_non_existence: Literal["fail", "skip"] = "fail"
    update_mask: list[str] | None = None
    entities: Annotated[list[Entity], Field(max_length=MOST_ENTITIES)]


class DeleteAction(Body, Generic[Entity]):
    action: Literal["delete"]
    action_on_non_existence: Literal["fail", "skip"] = "fail"
    entities: Annotated[list[str | Entity], Field(max_length=MOST_ENTITIES)]

    @property
    def update_mask(self) -> list[str] | None:
        return None


class BulkBody(Body, Generic[Entity]):
    actions: Annotated[
        list[CreateAction[Entity] | UpdateAction[Entity] | DeleteAction[Entity]], Field(max_length=MOST_ENTITIES)
    ]


class Tally:
    """The result of each entity. A failed entity does not affect the others."""

    def __init__(self) -> None:
        self._done: dict[str, dict[str, list[Any]]] = {}

    @asynccontextmanager
    async def counting(
        self, action: CreateAction[Any] | UpdateAction[Any] | DeleteAction[Any], name: str
    ) -> AsyncIterator[None]:
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
class Means(Generic[Entity]):
    """Functions that name, create (True: it must be new), update (with a mask) and delete entities of one kind."""

    name_of: Callable[[Entity], str]
    create: Callable[[Entity, bool], Awaitable[None]]
    update: Callable[[Entity, list[str] | None], Awaitable[None]]
    delete: Callable[[str], Awaitable[None]]


async def carry_out(body: BulkBody[Entity], means: Means[Entity]) -> dict[str, Any]:
    tally = Tally()
    for action in body.actions:
        for entity in action.entities:
            name = entity if isinstance(entity, str) else means.name_of(entity)
            async with tally.counting(action, name):
                if isinstance(action, DeleteAction) or isinstance(entity, str):
                    await means.delete(name)
                elif isinstance(action, CreateAction):
                    await means.create(entity, action.action_on_existence != "overwrite")
                else:
                    await means.update(entity, action.update_mask)
    return tally.document()


def _is_skipped(action: CreateAction[Any] | UpdateAction[Any] | DeleteAction[Any], error: UserError) -> bool:
    if isinstance(action, CreateAction):
        return isinstance(error, Conflict) and action.action_on_existence == "skip"
    return isinstance(error, NotFound) and action.action_on_non_existence == "skip"
