"""The list of DAGs: searched, filtered and paged on the server."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated
from urllib.parse import urlencode

from fastapi import Query, Request, Response

from evertick.api.context import Who
from evertick.db.queries import dags
from evertick.db.queries.dags import DagFilter, GridRun, ListedDag, NewestRun, NextFire
from evertick.domain.access import Permission
from evertick.operations import dags as operations
from evertick.operations.dags import DagName, tags_of
from evertick.operations.paging import like
from evertick.ui.layout import done, page, page_router, schedule_words

router = page_router()

ROWS = 50
BARS = 16
_TALLEST = 22
# The filter of each choice: whether the DAG is paused, and the state of its newest run.
STATES: dict[str, tuple[bool | None, str | None]] = {
    "active": (False, None),
    "paused": (True, None),
    "running": (None, "running"),
    "failed": (None, "failed"),
    "success": (None, "success"),
}


# Sort orders and their labels. Durations and past times start with the largest value.
SORTS = {"name": "DAG", "next": "Next fire", "newest": "Newest runs", "took": "Duration"}
_DOWN_FIRST = ("newest", "took")
_MOST_SKIPPED = 1_000_000


@dataclass(frozen=True, slots=True)
class ColumnHeader:
    """A column header. `order`: ascending, descending or none (another column sorts). `path` reverses the order."""

    name: str
    word: str
    order: str
    path: str


@dataclass(frozen=True, slots=True)
class RunBar:
    """One of the newest runs; its height is its duration relative to the others."""

    run: NewestRun | GridRun
    height: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Row:
    dag: ListedDag
    bars: Sequence[RunBar]
    next: NextFire | None
    words: str | None


@router.get("/dags", Permission.READ_DAGS)
async def list_dags(
    request: Request,
    caller: Who,
    q: Annotated[str, Query(max_length=200)] = "",
    tag: Annotated[str, Query(max_length=100)] = "",
    state: Annotated[str, Query(max_length=20)] = "",
    after: Annotated[str, Query(max_length=250)] = "",
    sort: Annotated[str, Query(max_length=20)] = "",
    skip: Annotated[int, Query(ge=0, le=_MOST_SKIPPED)] = 0,
    broken: bool = False,
) -> Response:
    by, is_down = sort.removeprefix("-"), sort.startswith("-")
    if by not in SORTS or sort == "name":
        sort, by, is_down = "", "", False
    paused, newest = STATES.get(state, (None, None))
    wanted = DagFilter(
        tags=tags_of(caller.principal.tags),
        tag=tag or None,
        like=like(q.strip().replace("\x00", "")) if q.strip() else None,
        paused=paused,
        newest=newest,
    )
    async with caller.read() as conn:
        if by:
            found = await dags.sorted_page(conn, wanted, by=by, is_down=is_down, offset=skip, limit=ROWS + 1)
        else:
            found = await dags.page_of_dags(conn, wanted, after=after.replace("\x00", ""), limit=ROWS + 1)
        shown = found[:ROWS]
        ids = [each.dag_id for each in shown]
        runs = await dags.newest_runs(conn, dag_ids=ids, each=BARS)
        fires = await dags.next_fires(conn, dag_ids=ids)
        errors = await dags.import_errors(conn) if caller.principal.may(Permission.READ_IMPORTS) else []
    filters = {name: value for name, value in (("q", q), ("tag", tag), ("state", state)) if value}
    chosen = filters | ({"sort": sort} if sort else {})
    place = {"skip": skip + ROWS} if by else {"after": shown[-1].name} if shown else {}
    more = "/dags?" + urlencode(chosen | place) if len(found) > ROWS else None
    return page(
        request,
        "dags.html",
        here="dags",
        rows=_rows(shown, runs, fires),
        q=q,
        tag=tag,
        state=state,
        states=list(STATES),
        is_filtered=bool(filters),
        sort=sort,
        columns=[_column(name, sort, filters) for name in SORTS],
        is_first=not (skip if by else after),
        more=more,
        first="/dags" + ("?" + urlencode(chosen) if chosen else ""),
        errors=errors,
        is_broken_open=broken,
        bulk=["Pause", "Unpause"] if caller.principal.may(Permission.PAUSE_DAGS) else [],
    )


@router.post("/dags/{dag}/pause", Permission.PAUSE_DAGS)
async def pause_dag(dag: DagName, caller: Who) -> Response:
    await operations.pause_dag(caller, dag=dag)
    return done(f"{dag} paused: its schedules do not fire and no new run starts. Running tasks continue.")


@router.post("/dags/{dag}/unpause", Permission.PAUSE_DAGS)
async def unpause_dag(dag: DagName, caller: Who) -> Response:
    await operations.unpause_dag(caller, dag=dag)
    return done(f"{dag} unpaused.")


def _column(name: str, sort: str, filters: dict[str, str]) -> ColumnHeader:
    up, down = ("" if name == "name" else name), f"-{name}"
    order = {up: "ascending", down: "descending"}.get(sort, "none")
    other = {"ascending": down, "descending": up, "none": down if name in _DOWN_FIRST else up}[order]
    chosen = filters | ({"sort": other} if other else {})
    return ColumnHeader(name, SORTS[name], order, "/dags" + ("?" + urlencode(chosen) if chosen else ""))


def bars_of(runs: Sequence[NewestRun | GridRun]) -> list[RunBar]:
    """Heights relative to the longest run; runs that have not ended get the full height."""
    lasted = [
        (run.finished_at - run.started_at).total_seconds() if run.finished_at and run.started_at else None
        for run in runs
    ]
    longest = max((each for each in lasted if each is not None), default=0.0)
    heights = [
        max(4, round(_TALLEST * seconds / longest)) if seconds is not None and longest > 0 else _TALLEST
        for seconds in lasted
    ]
    return [RunBar(run, height, seconds) for run, height, seconds in zip(runs, heights, lasted, strict=True)]


def _rows(shown: Sequence[ListedDag], runs: Sequence[NewestRun], fires: Sequence[NextFire]) -> list[Row]:
    by_dag: dict[int, list[NewestRun]] = defaultdict(list)
    for run in runs:
        by_dag[run.dag_id].append(run)
    next_of = {fire.dag_id: fire for fire in fires}
    return [
        Row(
            dag=dag,
            bars=bars_of(by_dag[dag.dag_id]),
            next=next_of.get(dag.dag_id),
            words=schedule_words(next_of[dag.dag_id].spec) if dag.dag_id in next_of else None,
        )
        for dag in shown
    ]
