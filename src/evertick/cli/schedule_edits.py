"""`evertick schedules pause|unpause|delete|reset`: one schedule changes, without a deploy. Its DAG goes on."""

from __future__ import annotations

from psycopg import AsyncConnection

from evertick.cli import far_plans, far_schedules
from evertick.cli.connection import actor, ask, change
from evertick.cli.documents import print_json
from evertick.cli.options import (
    CatchUpOption,
    DagName,
    DryRun,
    ExpectVersion,
    Json,
    ScheduleName,
    WindowOption,
    Yes,
    noun,
    seconds_of,
)
from evertick.cli.prompt import confirm
from evertick.cli.tables import hint, line, show, table
from evertick.cli.times import clock
from evertick.db.notify import Channel
from evertick.db.queries import dags
from evertick.domain.errors import UserError
from evertick.domain.schedules.misfire import MisfirePolicy
from evertick.engine import schedules as verbs
from evertick.engine.schedules import CatchUp, Missed, preview

_SHOWN = 10


def pause(dag: DagName, name: ScheduleName, expect_version: ExpectVersion = None, as_json: Json = False) -> None:
    """Pause one schedule. What is due already still runs; what comes due while it is paused is skipped, on record."""
    version = change(
        lambda conn: verbs.pause_schedule(conn, dag=dag, name=name, actor=actor(), expected_version=expect_version),
        Channel.PLAN,
        far=lambda server: far_plans.pause_schedule(server, dag, name, expect_version),
    )
    if as_json:
        print_json({"dag": dag, "name": name, "version": version, "is_paused_itself": True})
        return
    show(line(f"Schedule {name} of {dag} is paused (version {version})."))
    show(hint(f"Let it go on with: evertick schedules unpause {dag} {name}"))


def unpause(
    dag: DagName,
    name: ScheduleName,
    catch_up: CatchUpOption = MisfirePolicy.SKIP,
    window: WindowOption = None,
    expect_version: ExpectVersion = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Let one schedule go on: with its next fire, unless you ask for what it missed. --dry-run shows what would run."""
    asked = read_catch_up(catch_up, window)
    # A server tells what came of it, not what would.
    missed, _ = ask(
        lambda conn: preview(conn, dag=dag, name=name, catch_up=asked), far=None if dry_run else lambda _: []
    )
    if not dry_run:
        version = change(
            lambda conn: verbs.unpause_schedule(
                conn, dag=dag, name=name, actor=actor(), expected_version=expect_version, catch_up=asked
            ),
            Channel.PLAN,
            Channel.READY,
            far=lambda server: far_plans.unpause_schedule(server, dag, name, asked, expect_version),
        )
    else:
        version = None
    if as_json:
        print_json({"dag": dag, "name": name, "version": version, "missed": [document_of(each) for each in missed]})
        return
    if version is not None:
        show(line(f"Schedule {name} of {dag} goes on (version {version})."))
    show_missed(missed, is_done=not dry_run)
    row, _ = ask(lambda conn: dags.find(conn, dag), far=lambda server: far_plans.find_dag(server, dag))
    if row is not None and row.paused:
        show(hint(f"The DAG is paused as well; let it go on with: evertick dags unpause {dag}"))


def delete(dag: DagName, name: ScheduleName, expect_version: ExpectVersion = None, yes: Yes = False) -> None:
    """Delete one schedule. What is due already still runs; its runs, skips and history stay."""

    async def find(conn: AsyncConnection) -> int:
        return (await verbs.find_schedule(conn, dag, name)).version

    version, _ = ask(find, far=lambda server: far_plans.find_schedule(server, dag, name).version)
    confirm(f"Delete schedule {name} of {dag} (version {version})?", yes=yes)
    change(
        lambda conn: verbs.delete_schedule(conn, dag=dag, name=name, actor=actor(), expected_version=expect_version),
        Channel.PLAN,
        far=lambda server: far_plans.delete_schedule(server, dag, name, expect_version),
    )
    show(line(f"Deleted schedule {name} of {dag}. Publishing does not bring it back."))
    show(hint(f"If the DAG's file declares it, get it back with: evertick schedules reset {dag} {name}"))


def reset(dag: DagName, name: ScheduleName) -> None:
    """Give one schedule back to the code: as the DAG's file declares it, unpaused; or gone, if the file does not."""

    async def work(conn: AsyncConnection) -> bool:
        return await verbs.reset_schedule(conn, dag=dag, name=name, actor=actor())

    is_there = change(work, Channel.PLAN, far=lambda server: far_schedules.reset(server, dag, name))
    rest = "is as the DAG's file declares it." if is_there else "is deleted: the DAG's file does not declare it."
    show(line(f"Schedule {name} of {dag} {rest}"))


def read_catch_up(policy: MisfirePolicy, window: str | None) -> CatchUp:
    if window is not None and policy is MisfirePolicy.SKIP:
        raise UserError("--window limits what is caught up: add --catch-up latest, or --catch-up all.")
    return CatchUp(policy=policy, window_seconds=seconds_of(window, "--window"))


def document_of(missed: Missed) -> dict[str, object]:
    return {"name": missed.name, "runs": missed.runs, "skipped": missed.skipped, "reason": missed.reason}


def show_missed(missed: list[Missed], *, is_done: bool) -> None:
    """What came of the fires that a pause kept back, or would come of them."""
    verb = "ran now" if is_done else "would run now"
    for each in missed:
        if each.skipped:
            show(
                line(
                    f"{each.name}: {noun(each.skipped, 'missed fire')} {'skipped' if is_done else 'would be skipped'}."
                )
            )
        if each.runs:
            show(line(f"{each.name}: {noun(len(each.runs), 'missed fire')} {verb}:"))
            show(table(("FIRE",), [[clock(run)] for run in each.runs[:_SHOWN]]))
            if len(each.runs) > _SHOWN:
                show(hint(f"... and {len(each.runs) - _SHOWN} more, until {clock(each.runs[-1])}"))
    if not missed:
        show(hint("It missed nothing."))
