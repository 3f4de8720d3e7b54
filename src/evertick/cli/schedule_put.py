"""`evertick schedules put`: a schedule is created or changed by hand, without a deploy."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from psycopg import AsyncConnection

from evertick.cli import far_plans, far_schedules
from evertick.cli.connection import actor, change
from evertick.cli.documents import print_json
from evertick.cli.options import DagName, ExpectVersion, Json, ScheduleName, seconds_of
from evertick.cli.tables import hint, line, show
from evertick.cli.times import clock
from evertick.cli.trigger import ParamOption, read_pairs
from evertick.db.notify import Channel
from evertick.db.queries import schedules, shards
from evertick.db.queries.schedules import DagSchedule, ListedSchedule
from evertick.domain.dags.spec import DagSpec, NamedSchedule
from evertick.domain.dags.validation import check_schedule
from evertick.domain.durations import relative
from evertick.domain.errors import UserError
from evertick.domain.schedules.misfire import MisfirePolicy, OverlapPolicy
from evertick.domain.schedules.spec import ScheduleSpec, describe, parse_schedule
from evertick.engine.runs import find_dag
from evertick.engine.schedules import put_schedule

if TYPE_CHECKING:
    from evertick.cli.server import Server

# Where a schedule stands, as the database or a server tells it.
Standing = DagSchedule | ListedSchedule
Cron = Annotated[
    str | None, typer.Option("--cron", metavar="EXPR", help="When: '30 6 * * MON-FRI', '@daily', '@every 90s'.")
]
At = Annotated[
    list[str] | None, typer.Option("--at", metavar="TIME", help="An instant instead; give it once for each.")
]
Zone = Annotated[str | None, typer.Option("--tz", metavar="ZONE", help="Its time zone, such as Europe/Berlin.")]
Start = Annotated[str | None, typer.Option("--start", metavar="TIME", help="No fire before this.")]
End = Annotated[str | None, typer.Option("--end", metavar="TIME", help="No fire after this.")]
Anchor = Annotated[str | None, typer.Option("--anchor", metavar="TIME", help="From when an interval counts.")]
Jitter = Annotated[
    str | None, typer.Option("--jitter", metavar="LENGTH", help="Be due up to so much later, always by the same: 5m.")
]
Misfire = Annotated[MisfirePolicy | None, typer.Option("--misfire", help="What to do about fires that were missed.")]
Window = Annotated[str | None, typer.Option("--catchup-window", metavar="LENGTH", help="How old a missed fire may be.")]
Most = Annotated[
    int | None, typer.Option("--catchup-limit", min=1, max=1000, help="How many missed fires run at most.")
]
Overlap = Annotated[OverlapPolicy | None, typer.Option("--overlap", help="What to do while a run of it is open.")]
StartWithin = Annotated[
    str | None, typer.Option("--start-within", metavar="LENGTH", help="Alert if a run has not started so soon: 10m.")
]
FinishWithin = Annotated[
    str | None, typer.Option("--finish-within", metavar="LENGTH", help="Alert if a run has not finished so soon: 2h.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Put:
    version: int
    is_new: bool
    spec: ScheduleSpec
    next_due: datetime | None
    now: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """What was said; the rest stays as it is."""

    dag: str
    name: str
    expect_version: int | None
    request: str
    cron: str | None
    at: list[str] | None
    when: Mapping[str, object]
    rules: Mapping[str, object]
    pairs: list[str]


def put(
    dag: DagName,
    name: ScheduleName,
    cron: Cron = None,
    at: At = None,
    tz: Zone = None,
    start: Start = None,
    end: End = None,
    anchor: Anchor = None,
    jitter: Jitter = None,
    param: ParamOption = None,
    misfire: Misfire = None,
    catchup_window: Window = None,
    catchup_limit: Most = None,
    overlap: Overlap = None,
    start_within: StartWithin = None,
    finish_within: FinishWithin = None,
    expect_version: ExpectVersion = None,
    as_json: Json = False,
) -> None:
    """Create or change a schedule of a DAG. What you do not say stays as it is; what is due already still runs.

    It is not the code's any more: publishing leaves it alone, until `evertick schedules reset` gives it back. If somebody
    else changes it at the same moment, one of you is refused.
    """
    if cron is not None and at:
        raise UserError("Give an expression with --cron, or instants with --at: one of the two.")
    when: dict[str, object] = {"timezone": tz, "start_at": start, "end_at": end, "anchor_at": anchor}
    when |= {"jitter_seconds": seconds_of(jitter, "--jitter")}
    rules: dict[str, object] = {"misfire": misfire, "overlap": overlap, "catchup_limit": catchup_limit}
    rules |= {"catchup_window_seconds": seconds_of(catchup_window, "--catchup-window")}
    rules |= {"start_within_seconds": seconds_of(start_within, "--start-within") or None}
    rules |= {"finish_within_seconds": seconds_of(finish_within, "--finish-within") or None}
    asked = _Asked(
        dag=dag,
        name=name,
        expect_version=expect_version,
        request=secrets.token_hex(8),
        cron=cron,
        at=at,
        when={key: value for key, value in when.items() if value is not None},
        rules=rules,
        pairs=param or [],
    )

    done = change(
        lambda conn: _put(conn, asked), Channel.PLAN, is_keyed=True, far=lambda server: _put_far(server, asked)
    )
    _tell(dag, name, done, as_json=as_json)


async def _put(conn: AsyncConnection, asked: _Asked) -> _Put:
    dag, name = asked.dag, asked.name
    _, spec = await find_dag(conn, dag)
    stands = await schedules.of_dag(conn, dag=dag, name=name)
    old = stands[0] if stands else None
    wanted, expected = _wish(asked, spec, old), _expected(asked, old)
    version = await put_schedule(
        conn, dag=dag, schedule=wanted, actor=actor(), expected_version=expected, request=asked.request
    )
    (row,) = await schedules.of_dag(conn, dag=dag, name=name)
    now = await shards.read_clock(conn)
    return _Put(version=version, is_new=old is None, spec=wanted.spec, next_due=row.next_due, now=now)


def _put_far(server: Server, asked: _Asked) -> _Put:
    _, spec = far_plans.find_spec(server, asked.dag)
    stands = [each for each in far_plans.schedules_of(server, asked.dag) if each.name == asked.name]
    old = stands[0] if stands else None
    wanted, expected = _wish(asked, spec, old), _expected(asked, old)
    row = far_schedules.put(server, asked.dag, wanted, expected=expected, request=asked.request)
    return _Put(version=row.version, is_new=old is None, spec=wanted.spec, next_due=row.next_due, now=server.now)


def _wish(asked: _Asked, spec: DagSpec, old: Standing | None) -> NamedSchedule:
    wanted = NamedSchedule(
        name=asked.name,
        spec=_spec(asked.cron, asked.at, asked.when, spec, old),
        params={**(old.params if old else {}), **read_pairs(spec, asked.pairs)},  # type: ignore[dict-item]
        **_rules(asked.rules, old),
    )
    check_schedule(spec, wanted)
    return wanted


def _expected(asked: _Asked, old: Standing | None) -> int:
    if asked.expect_version is not None:
        return asked.expect_version
    return old.version if old else 0


def _tell(dag: str, name: str, done: _Put, *, as_json: bool) -> None:
    if as_json:
        words = {"schedule": describe(done.spec), "version": done.version, "next_due": done.next_due}
        print_json({"dag": dag, "name": name, **words, "is_new": done.is_new})
        return
    show(line(f"Schedule {name} of {dag}: {describe(done.spec)} (version {done.version})."))
    if done.next_due is None:
        show(line("It never fires: all of its instants are over.", "yellow"))
    else:
        show(hint(f"Next: {clock(done.next_due)}, {relative(done.next_due, done.now)}."))
    show(hint("Publishing leaves it alone from now on. Who changed what: evertick schedules history"))


def _spec(
    cron: str | None, at: list[str] | None, when: Mapping[str, Any], dag: DagSpec, old: Standing | None
) -> ScheduleSpec:
    """As asked; where only some of it is said, the rest is as it was, or the DAG's time zone."""
    asked = cron if cron is not None else (at[0] if len(at) == 1 else at) if at else None
    if isinstance(asked, str) and cron is None:
        asked = f"@once {asked}"
    if old is None:
        if asked is None:
            raise UserError("This schedule is new: say when, with --cron EXPR or --at TIME.")
        return parse_schedule(asked, **{"timezone": dag.timezone, **when})
    stored = json.loads(old.spec) if isinstance(old.spec, str) else old.spec
    if asked is None:
        return parse_schedule({**stored, **when})
    kept = {key: stored[key] for key in ("timezone", "start_at", "end_at", "jitter_seconds") if key in stored}
    return parse_schedule(asked, **{**kept, **when})


def _rules(asked: Mapping[str, Any], old: Standing | None) -> dict[str, Any]:
    stands: dict[str, Any] = {}
    if old is not None:
        stands = {"misfire": MisfirePolicy(old.misfire), "overlap": OverlapPolicy(old.overlap)}
        stands |= {"catchup_window_seconds": old.window_seconds, "catchup_limit": old.catchup_limit}
        stands |= {"start_within_seconds": old.start_within, "finish_within_seconds": old.finish_within}
    return {**stands, **{key: value for key, value in asked.items() if value is not None}}
