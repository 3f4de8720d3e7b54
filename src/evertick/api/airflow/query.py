"""Query parameters of Airflow's list endpoints (limit, offset, order_by, ranges, patterns), translated to Evertick's columns."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from fnmatch import translate
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import Query
from psycopg.types.range import Range
from pydantic import BaseModel, ConfigDict, Field, create_model

from evertick.api.airflow.models import DagRunState, DagRunType, TaskInstanceState
from evertick.db.queries.listings import TaskFilter
from evertick.db.queries.run_lists import Order, PageRequest, RunFilter, between_instants, between_numbers
from evertick.domain.errors import NotFound, UserError
from evertick.operations.paging import LARGEST, encode_cursor, read_cursor

EVERY = "~"
# The time ranges of runs and task instances, and the columns of Evertick.
_TIMES = {"run_after": "due", "logical_date": "fire", "start_date": "started", "end_date": "finished"}
# Of LIKE, and of patterns of file names.
_WILDCARDS = {"%": "*", "_": "?"}
USUAL_ITEMS, MOST_ITEMS = 50, 100

Limit = Annotated[int, Query(ge=0, le=LARGEST)]
MOST_SKIPPED = 1_000_000_000
Offset = Annotated[int, Query(ge=0, le=MOST_SKIPPED)]
OrderBy = Annotated[list[str] | None, Query(max_length=10)]
Texts = Annotated[list[str] | None, Query(max_length=1000)]
Pattern = Annotated[str | None, Field(max_length=1000)]
Small = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Smalls = list[Small] | None

_SIDES = ("gte", "gt", "lte", "lt")

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
Wanted = TypeVar("Wanted", RunFilter, TaskFilter)


class Body(BaseModel):
    """A request body. Unknown keys are refused, as in Airflow."""

    model_config = ConfigDict(extra="forbid")


class Paged(BaseModel):
    """Parameters of every list."""

    limit: Annotated[int, Field(ge=0, le=LARGEST)] = USUAL_ITEMS
    offset: Annotated[int, Field(ge=0, le=MOST_SKIPPED)] = 0
    order_by: Annotated[list[str], Field(max_length=10)] | None = None


def with_ranges(*names: str, of: Any = datetime) -> Callable[[type[M]], type[M]]:
    """Add the four limits of each range, such as `end_date_gte`, after the model's own fields. `sides` reads them."""
    fields: dict[str, Any] = {f"{name}_{side}": (of | None, None) for name in names for side in _SIDES}
    return lambda model: create_model(model.__name__, __base__=model, **fields)


@with_ranges("duration", of=Annotated[float, Field(allow_inf_nan=False)])
@with_ranges("run_after", "logical_date", "start_date", "end_date")
class Times(BaseModel):
    """Time ranges of runs and task instances."""


@with_ranges("updated_at")
class Changes(BaseModel):
    """Time ranges of the last change."""


class Batch(Times, Body):
    """A batch list takes the same in its body."""

    order_by: str | None = None
    page_offset: Annotated[int, Field(ge=0, le=MOST_SKIPPED)] = 0
    page_limit: Annotated[int, Field(ge=0, le=2**63 - 1)] = MOST_ITEMS

    def page(self, known: Mapping[str, Sequence[str]]) -> PageRequest:
        order = columns([self.order_by] if self.order_by else None, known)
        return PageRequest(limit=page_size(self.page_limit), offset=self.page_offset, order=order)


class DagQuery(Paged):
    """Parameters of `GET /dags`."""

    tags: list[str] | None = None
    tags_match_mode: Literal["any", "all"] | None = None
    owners: list[str] | None = None
    dag_id_pattern: Pattern = None
    dag_id_prefix_pattern: Pattern = None
    dag_display_name_pattern: Pattern = None
    dag_display_name_prefix_pattern: Pattern = None
    exclude_stale: bool = True
    paused: bool | None = None
    has_import_errors: bool | None = None
    last_dag_run_state: DagRunState | None = None
    bundle_name: str | None = None
    bundle_version: str | None = None
    has_asset_schedule: bool | None = None
    asset_dependency: Pattern = None
    dag_run_start_date_gte: datetime | None = None
    dag_run_start_date_gt: datetime | None = None
    dag_run_start_date_lte: datetime | None = None
    dag_run_start_date_lt: datetime | None = None
    dag_run_end_date_gte: datetime | None = None
    dag_run_end_date_gt: datetime | None = None
    dag_run_end_date_lte: datetime | None = None
    dag_run_end_date_lt: datetime | None = None
    dag_run_state: list[DagRunState] | None = None
    is_favorite: bool | None = None
    timetable_type: list[str] | None = None


class RunQuery(Paged, Times, Changes):
    """Parameters of `GET /dags/{dag_id}/dagRuns`."""

    cursor: Annotated[str | None, Field(max_length=1000)] = None
    partition_date_gte: datetime | None = None
    partition_date_lte: datetime | None = None
    conf_contains: Pattern = None
    run_type: list[DagRunType] | None = None
    state: list[DagRunState] | None = None
    dag_version: Smalls = None
    bundle_version: str | None = None
    run_id_pattern: Pattern = None
    run_id_prefix_pattern: Pattern = None
    triggering_user_name_pattern: Pattern = None
    triggering_user_name_prefix_pattern: Pattern = None
    dag_id_pattern: Pattern = None
    dag_id_prefix_pattern: Pattern = None
    partition_key_pattern: Pattern = None
    partition_key_prefix_pattern: Pattern = None
    consuming_asset_pattern: Pattern = None


class MappedQuery(Paged, Times, Changes):
    """Parameters of the list of instances of one mapped task."""

    state: list[TaskInstanceState | Literal["none", "no_status"]] | None = None
    pool: list[str] | None = None
    pool_name_pattern: Pattern = None
    pool_name_prefix_pattern: Pattern = None
    queue: list[str] | None = None
    queue_name_pattern: Pattern = None
    queue_name_prefix_pattern: Pattern = None
    executor: list[str] | None = None
    version_number: Smalls = None
    try_number: Smalls = None
    operator: list[str] | None = None
    operator_name_pattern: Pattern = None
    operator_name_prefix_pattern: Pattern = None
    map_index: Smalls = None
    rendered_map_index_pattern: Pattern = None
    rendered_map_index_prefix_pattern: Pattern = None


class InstanceQuery(MappedQuery):
    """Parameters of the list of task instances of one run or of all runs."""

    cursor: Annotated[str | None, Field(max_length=1000)] = None
    task_id: str | None = None
    task_display_name_pattern: Pattern = None
    task_display_name_prefix_pattern: Pattern = None
    task_group_id: str | None = None
    dag_id_pattern: Pattern = None
    dag_id_prefix_pattern: Pattern = None
    run_id_pattern: Pattern = None
    run_id_prefix_pattern: Pattern = None


async def read_by_cursor(
    read: Callable[[Wanted, PageRequest], Awaitable[tuple[list[T], int]]],
    wanted: Wanted,
    asked: RunQuery | InstanceQuery,
    order: Order,
    place: Sequence[str],
) -> tuple[list[T], str | None]:
    """The page after the cursor, in the order of `place`, and the next cursor. New rows in the meantime cause neither
    duplicates nor gaps."""
    up, down = ([(column, is_down) for column in place] for is_down in (False, True))
    if order not in ([], up, down):
        raise UserError("A cursor supports only order_by id, and run_after for runs. Omit order_by, or use offset.")
    if asked.cursor:
        numbers = read_cursor(asked.cursor, *[0] * len(place))
        at: Any = list(numbers) if len(numbers) > 1 else numbers[0]
        wanted = replace(wanted, before=at) if order == down else replace(wanted, after=at)
    size = page_size(asked.limit)
    found, _ = await read(wanted, PageRequest(limit=size + 1, order=order, is_counted=False))
    page = found[:size]
    more = encode_cursor(*(getattr(page[-1], column) for column in place)) if len(found) > size else None
    return page, more


def time_ranges(asked: Times) -> dict[str, Any]:
    """Time ranges as arguments of store queries."""
    return {
        **{field: span(asked, name) for name, field in _TIMES.items()},
        "changed": span(asked, "updated_at") if isinstance(asked, Changes) else None,
        "seconds": between_numbers(*sides(asked, "duration")),
    }


def span(asked: BaseModel, name: str) -> Range[datetime] | None:
    return between_instants(*sides(asked, name))


def sides(asked: BaseModel, name: str) -> tuple[Any, Any, Any, Any]:
    gte, gt, lte, lt = (getattr(asked, f"{name}_{side}") for side in _SIDES)
    return gte, gt, lte, lt


def page_size(limit: int) -> int:
    """The page size; 0 means the maximum."""
    return min(limit or MOST_ITEMS, MOST_ITEMS)


def paged(asked: Paged, order: Sequence[tuple[str, bool]] = ()) -> PageRequest:
    return PageRequest(limit=page_size(asked.limit), offset=asked.offset, order=order)


def contains(text: str | None) -> list[str] | None:
    """ILIKE patterns for `a|b`: the value contains one of them. As in Airflow, % and _ are wildcards and `~` matches all."""
    if text is None or text == EVERY:
        return None
    return ["%" + part.replace("\\", "\\\\") + "%" for part in text.split("|") if part] or None


def patterns(asked: BaseModel, **names: str) -> dict[str, Any]:
    """The filters by text: for `dag="dag_id"` `dag_like` and `dag_heads`, from `dag_id_pattern` and `dag_id_prefix_pattern`.

    The name `_` stands for filters without a prefix, `like` and `heads`.
    """
    found: dict[str, Any] = {}
    for name, parameter in names.items():
        prefix = "" if name == "_" else f"{name}_"
        found[f"{prefix}like"] = contains(getattr(asked, f"{parameter}_pattern"))
        found[f"{prefix}heads"] = begins(getattr(asked, f"{parameter}_prefix_pattern"))
    return found


def plainly_contains(text: str | None) -> list[str] | None:
    """The same without wildcards."""
    if text is None:
        return None
    return ["%" + text.replace("\\", "\\\\").replace("%", r"\%").replace("_", r"\_") + "%"]


def begins(text: str | None) -> list[str] | None:
    """Prefixes to match, case-sensitive."""
    if text is None or text == EVERY:
        return None
    return [part for part in text.split("|") if part] or None


def fits(text: str | None, pattern: str | None, prefix: str | None) -> bool:
    """Apply the same filters to a value in memory."""
    plain = text or ""
    heads, parts = begins(prefix), contains(pattern)
    if heads is not None and not plain.startswith(tuple(heads)):
        return False
    return parts is None or any(_is_like(plain.lower(), part.lower()) for part in parts)


def _is_like(text: str, pattern: str) -> bool:
    """LIKE, as a pattern of file names: its wildcards do not try again what they have passed, so the time stays bounded."""

    def sign(found: re.Match[str]) -> str:
        literal = found[1] or found[0]
        if found[1] is None and literal in _WILDCARDS:
            return _WILDCARDS[literal]
        return f"[{literal}]" if literal in "*?[" else literal

    return re.match(translate(re.sub(r"\\(.)|.", sign, pattern, flags=re.DOTALL)), text) is not None


def columns(order_by: Sequence[str] | None, known: Mapping[str, Sequence[str]]) -> list[tuple[str, bool]]:
    """Translate `order_by` to Evertick's columns; `-` means descending."""
    found = []
    for each in order_by or ():
        name = each.removeprefix("-")
        if name not in known:
            raise _disallowed(name)
        found += [(column, each.startswith("-")) for column in known[name]]
    return found


def ordered(items: Iterable[T], order_by: Sequence[str] | None, known: Mapping[str, str | None]) -> list[T]:
    """Sort records or documents in memory by several fields; `-` means descending, missing values come last. `known` maps the
    names to fields; a name with None has no effect."""
    found = list(items)
    for each in reversed(order_by or []):
        name = each.removeprefix("-")
        if name not in known:
            raise _disallowed(name)
        key = partial(_value, field=known[name])
        present = sorted((item for item in found if key(item) is not None), key=key, reverse=each.startswith("-"))
        found = present + [item for item in found if key(item) is None]
    return found


def _value(item: object, *, field: str | None) -> Any:
    if field is None:
        return None
    return item[field] if isinstance(item, dict) else getattr(item, field)


def first_of(found: Iterable[T], missing: str) -> T:
    for each in found:
        return each
    raise NotFound(missing)


def given_fields(body: BaseModel, update_mask: Sequence[str] | None) -> set[str]:
    """The fields of a change: those in the body, and in the mask if there is one."""
    return body.model_fields_set.intersection(update_mask or body.model_fields_set)


def refuse_team(team: str | None) -> None:
    if team is not None:
        raise UserError("team_name must be null: Evertick has no teams.")


def _disallowed(name: str) -> UserError:
    return UserError(f"Ordering with '{name[:100]}' is disallowed or the attribute does not exist on the model")
