"""Query parameters of Airflow's list endpoints (limit, offset, order_by, ranges, patterns), translated to Evertick's columns."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Annotated, Any, Literal, TypedDict, TypeVar

from fastapi import Query
from psycopg.types.range import Range
from pydantic import BaseModel, ConfigDict, Field

from evertick.api.airflow.models import DagRunState, DagRunType, TaskInstanceState
from evertick.db.queries.run_lists import PageRequest, between_instants, between_numbers
from evertick.domain.errors import UserError
from evertick.operations.paging import LARGEST

EVERY = "~"
USUAL_ITEMS, MOST_ITEMS = 50, 100

Limit = Annotated[int, Query(ge=0, le=LARGEST)]
Offset = Annotated[int, Query(ge=0, le=1_000_000_000)]
OrderBy = Annotated[list[str] | None, Query(max_length=10)]
Texts = Annotated[list[str] | None, Query(max_length=1000)]
Seconds = Annotated[float | None, Field(allow_inf_nan=False)]
Pattern = Annotated[str | None, Field(max_length=1000)]
Small = Annotated[int, Field(ge=-(2**31), le=2**31 - 1)]
Smalls = list[Small] | None

T = TypeVar("T")


class Body(BaseModel):
    """A request body. Unknown keys are refused, as in Airflow."""

    model_config = ConfigDict(extra="forbid")


class Paged(BaseModel):
    """Parameters of every list."""

    limit: Annotated[int, Field(ge=0, le=LARGEST)] = USUAL_ITEMS
    offset: Annotated[int, Field(ge=0, le=1_000_000_000)] = 0
    order_by: Annotated[list[str], Field(max_length=10)] | None = None


class Times(BaseModel):
    """Time ranges of runs and task instances."""

    run_after_gte: datetime | None = None
    run_after_gt: datetime | None = None
    run_after_lte: datetime | None = None
    run_after_lt: datetime | None = None
    logical_date_gte: datetime | None = None
    logical_date_gt: datetime | None = None
    logical_date_lte: datetime | None = None
    logical_date_lt: datetime | None = None
    start_date_gte: datetime | None = None
    start_date_gt: datetime | None = None
    start_date_lte: datetime | None = None
    start_date_lt: datetime | None = None
    end_date_gte: datetime | None = None
    end_date_gt: datetime | None = None
    end_date_lte: datetime | None = None
    end_date_lt: datetime | None = None
    duration_gte: Seconds = None
    duration_gt: Seconds = None
    duration_lte: Seconds = None
    duration_lt: Seconds = None


class Changes(BaseModel):
    updated_at_gte: datetime | None = None
    updated_at_gt: datetime | None = None
    updated_at_lte: datetime | None = None
    updated_at_lt: datetime | None = None


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
    """Parameters of `GET /dags/{dag_id}/dagRuns`. Evertick has no partitions."""

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


class Spans(TypedDict):
    """Time ranges as arguments of store queries."""

    due: Range[datetime] | None
    fire: Range[datetime] | None
    started: Range[datetime] | None
    finished: Range[datetime] | None
    changed: Range[datetime] | None
    seconds: Range[Decimal] | None


def spans_of(asked: Times) -> Spans:
    return Spans(
        due=span(asked, "run_after"),
        fire=span(asked, "logical_date"),
        started=span(asked, "start_date"),
        finished=span(asked, "end_date"),
        changed=span(asked, "updated_at") if isinstance(asked, Changes) else None,
        seconds=between_numbers(asked.duration_gte, asked.duration_gt, asked.duration_lte, asked.duration_lt),
    )


def span(asked: BaseModel, name: str) -> Range[datetime] | None:
    return between_instants(*(getattr(asked, f"{name}_{side}") for side in ("gte", "gt", "lte", "lt")))


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
    """LIKE in O(len(text) × len(pattern))."""
    reached = {0}
    place = 0
    while place < len(pattern):
        sign = pattern[place]
        if not reached:
            return False
        if sign == "%":
            reached = set(range(min(reached), len(text) + 1))
        else:
            if sign == "\\" and place + 1 < len(pattern):
                place += 1
                sign, is_any = pattern[place], False
            else:
                is_any = sign == "_"
            reached = {at + 1 for at in reached if at < len(text) and (is_any or text[at] == sign)}
        place += 1
    return len(text) in reached


def columns(order_by: Sequence[str] | None, known: Mapping[str, Sequence[str]]) -> list[tuple[str, bool]]:
    """Translate `order_by` to Evertick's columns; `-` means descending."""
    found = []
    for each in order_by or ():
        name = each.removeprefix("-")
        if name not in known:
            raise _disallowed(name)
        found += [(column, each.startswith("-")) for column in known[name]]
    return found


def ordered(items: Sequence[T], order_by: list[str] | None, keys: Mapping[str, Callable[[T], Any]]) -> list[T]:
    """Sort items in memory by several keys; `-` means descending, missing values come last."""
    found = list(items)
    for each in reversed(order_by or []):
        name = each.removeprefix("-")
        if name not in keys:
            raise _disallowed(name)
        key, is_down = keys[name], each.startswith("-")
        known = sorted((item for item in found if key(item) is not None), key=key, reverse=is_down)
        found = known + [item for item in found if key(item) is None]
    return found


def _disallowed(name: str) -> UserError:
    return UserError(f"Ordering with '{name[:100]}' is disallowed or the attribute does not exist on the model")
