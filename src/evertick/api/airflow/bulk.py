"""Several creations, updates and deletions in one request: each stands alone, and each failure is told by its name."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import Field

from evertick.api.airflow.asking import Body
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
    """What became of each entity. One that fails keeps no other from being done."""

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


def _is_skipped(action: CreateAction[Any] | UpdateAction[Any] | DeleteAction[Any], error: UserError) -> bool:
    if isinstance(action, CreateAction):
        return isinstance(error, Conflict) and action.action_on_existence == "skip"
    return isinstance(error, NotFound) and action.action_on_non_existence == "skip"
