"""Clearing tasks: first what would happen, then the question, then the deed. Shared by `runs clear` and `tasks clear`."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from evertick.cli import far
from evertick.cli.connection import actor, ask, change
from evertick.cli.options import noun
from evertick.cli.prompt import confirm
from evertick.cli.run_page import task_table
from evertick.cli.tables import hint, line, show
from evertick.db.notify import Channel
from evertick.domain.states import TERMINAL_TASK_STATES, TaskState
from evertick.engine.tasks import clear, newest_version, select_cleared

_AFFECTED = TERMINAL_TASK_STATES | {TaskState.QUEUED, TaskState.RUNNING}
_SHOWN = 50


def clear_tasks(
    run_id: int,
    names: Sequence[str],
    *,
    only_failed: bool,
    downstream: bool,
    yes: bool,
    dry_run: bool,
    latest: bool = False,
) -> None:
    wish: dict[str, object] = {"tasks": list(names), "only_failed": only_failed, "with_downstream": downstream}
    wish["run_on_latest_version"] = latest
    chosen, now = ask(
        lambda conn: select_cleared(
            conn, run_id=run_id, names=names, only_failed=only_failed, with_downstream=downstream
        ),
        far=lambda server: far.to_clear(server, run_id, wish),
    )
    affected = [row for row in chosen if row.state in _AFFECTED]
    if not affected:
        what = "no failed task" if only_failed else "nothing that has started"
        show(hint(f"There is nothing to clear: run {run_id} has {what} among these."))
        return
    # A server finds it by itself.
    newest = ask(lambda conn: newest_version(conn, run_id), far=lambda _: None)[0] if latest else None
    show(task_table(affected[:_SHOWN], now))
    if newest is not None and newest.version_id is not None:
        show(line(f"The run goes on with version {newest.number}; it began with version {newest.run_number}."))
    if len(affected) > _SHOWN:
        show(hint(f"and {noun(len(affected) - _SHOWN, 'more task')}"))
    if dry_run:
        show(hint(f"{noun(len(affected), 'task')} would run again; nothing was changed."))
        raise typer.Exit
    confirm(f"Run {noun(len(affected), 'task')} of run {run_id} again?", yes=yes)
    version_id = newest.version_id if newest else None
    done = change(
        lambda conn: clear(conn, run_id=run_id, chosen=chosen, actor=actor(), version_id=version_id),
        Channel.READY,
        Channel.STOP,
        Channel.PLAN,
        far=lambda server: far.clear(server, run_id, wish),
    )
    stopping = f"; {noun(done.asked, 'running task')} will be stopped first" if done.asked else ""
    show(line(f"Cleared {noun(done.reopened + done.asked, 'task')} of run {run_id}{stopping}."))
    show(hint(f"Follow it with: evertick runs watch {run_id}"))
