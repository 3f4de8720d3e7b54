"""`evertick dags trigger`: start a run now, and wait for it if asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Annotated

import typer
from psycopg import AsyncConnection
from rich.text import Text

from evertick.cli.connection import actor, change, database_url
from evertick.cli.documents import document, print_json
from evertick.cli.errors import RUN_EXIT_STATUS, TIMED_OUT
from evertick.cli.options import DagName, Json, Timeout, seconds_of
from evertick.cli.run_page import run_document
from evertick.cli.tables import console, hint, show
from evertick.cli.watch import conclude, follow, follow_on
from evertick.config import read_settings
from evertick.domain.dag import DagSpec
from evertick.domain.errors import InvalidParams, UserError
from evertick.domain.params import parse_param
from evertick.engine.cancel import find_run
from evertick.engine.trigger import find_dag, trigger
from evertick.store.runs import RunRow
from evertick.store.wake import Channel

ParamOption = Annotated[
    list[str] | None, typer.Option("--param", "-p", metavar="NAME=VALUE", help="One parameter; give it once for each.")
]
ParamsOption = Annotated[
    str | None, typer.Option("--params", metavar="JSON", help="Parameters as one JSON object; --param goes before it.")
]
KeyOption = Annotated[
    str | None, typer.Option("--key", help="The same key twice is the same run: safe to repeat after a lost answer.")
]
WaitOption = Annotated[bool, typer.Option("--wait", "-w", help="Show its progress, and end as the run ends.")]

_MOST_TASKS = 10_000


def trigger_dag(
    dag: DagName,
    param: ParamOption = None,
    params: ParamsOption = None,
    key: KeyOption = None,
    wait: WaitOption = False,
    timeout: Timeout = None,
    as_json: Json = False,
) -> None:
    """Start a run of a DAG now. With --wait, exit with 0 for success, 1 failed, 3 canceled, 124 for a timeout."""
    within_seconds = seconds_of(timeout)
    if within_seconds is not None and not wait:
        raise UserError("--timeout limits a wait: add --wait.")
    if key is not None and not key.strip():
        raise UserError("--key is empty: leave it out, or give a text that names this one run.")

    async def start(conn: AsyncConnection) -> tuple[RunRow, bool, bool]:
        row, spec = await find_dag(conn, dag)
        given = {**_read_object(params), **_read_pairs(spec, param or [])}
        made = await trigger(conn, dag=dag, params=given, actor=actor(), key=key)
        return await find_run(conn, made.run_id), made.is_new, row.paused

    run, is_new, is_paused = change(start, Channel.READY)
    if as_json:
        _answer_json(run, is_new, wait=wait, within_seconds=within_seconds)
        return
    _announce(run, is_new=is_new, is_paused=is_paused)
    if wait:
        url = database_url(read_settings())
        conclude(asyncio.run(follow_on(console(), url, run.run_id, within_seconds=within_seconds)))
    show(hint(f"Follow it with: evertick runs watch {run.run_id}"))


def _announce(run: RunRow, *, is_new: bool, is_paused: bool) -> None:
    if not is_new:
        show(Text(f"Run {run.run_id} of {run.dag} has this key already; it is {run.state}."))
        return
    show(Text(f"Started run {run.run_id} of {run.dag}." if not is_paused else f"Run {run.run_id} of {run.dag} waits."))
    if is_paused:
        show(hint(f"The DAG is paused; let it go on with: evertick dags unpause {run.dag}"))


def _answer_json(run: RunRow, is_new: bool, *, wait: bool, within_seconds: float | None) -> None:
    """One document, at the end."""
    if not wait:
        print_json({"is_new": is_new, "run": run_document(run)})
        return
    url = database_url(read_settings())
    following = follow(url, run.run_id, view=lambda _: None, most_tasks=_MOST_TASKS, within_seconds=within_seconds)
    watched = asyncio.run(following)
    tasks = [document(task) for task in sorted(watched.last.tasks, key=lambda row: (row.idx, row.map_index))]
    print_json({"is_new": is_new, "run": run_document(watched.last.run), "tasks": tasks})
    raise typer.Exit(RUN_EXIT_STATUS[watched.last.run.state] if watched.is_over else TIMED_OUT)


def _read_object(text: str | None) -> dict[str, object]:
    if text is None:
        return {}
    advice = """Write an object such as --params '{"rows": 5}'."""
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InvalidParams(f"--params is not JSON: {error}. {advice}") from None
    except RecursionError:
        raise InvalidParams(f"--params is nested too deeply. {advice}") from None
    if not isinstance(found, dict):
        raise InvalidParams(f"--params is a JSON {type(found).__name__}, not an object. {advice}")
    return found


def _read_pairs(spec: DagSpec, pairs: Sequence[str]) -> dict[str, object]:
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InvalidParams(f"--param {pair!r} has no name and value. Write --param name=value.")
        found[name] = parse_param(spec.params, name, text)
    return found
