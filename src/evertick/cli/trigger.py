"""`evertick dags trigger`: start a run now, and wait for it if asked."""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from psycopg import AsyncConnection

from evertick.cli import far_fleet, far_plans
from evertick.cli.connection import actor, change
from evertick.cli.documents import print_json
from evertick.cli.options import DagName, Json, Timeout, seconds_of
from evertick.cli.run_page import run_document
from evertick.cli.tables import hint, line, show
from evertick.cli.watch import wait_for_document, wait_for_end
from evertick.db.notify import Channel
from evertick.db.queries import runners
from evertick.db.queries.runs import RunRow
from evertick.domain.dags.params import parse_param
from evertick.domain.dags.spec import DagSpec
from evertick.domain.errors import InvalidParams, OutcomeUnknown, UserError
from evertick.engine.runs import find_dag, find_run, trigger

if TYPE_CHECKING:
    from evertick.cli.server import Server

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

    # Of this call alone, so that it can be made again when its answer was lost.
    own_key = key or f"cli-{secrets.token_hex(8)}"

    async def start(conn: AsyncConnection) -> tuple[RunRow, bool, bool, bool]:
        row, spec = await find_dag(conn, dag)
        given = {**read_object(params), **read_pairs(spec, param or [])}
        made = await trigger(conn, dag=dag, params=given, actor=actor(), key=own_key)
        has_runner = bool(await runners.list_busy(conn, limit=1))
        return await find_run(conn, made.run_id), made.is_new or key is None, row.paused, has_runner

    def start_far(server: Server) -> tuple[RunRow, bool, bool, bool]:
        page, spec = far_plans.find_spec(server, dag)
        given = {**read_object(params), **read_pairs(spec, param or [])}
        run, is_new = far_plans.trigger(server, dag, given, own_key)
        return run, is_new or key is None, page["is_paused"], far_fleet.has_runner(server)

    try:
        run, is_new, is_paused, has_runner = change(start, Channel.READY, Channel.PLAN, is_keyed=True, far=start_far)
    except OutcomeUnknown as error:
        raise OutcomeUnknown(f"{error} To repeat it is safe with: --key {own_key}") from None
    if as_json and wait:
        wait_for_document(run.run_id, within_seconds=within_seconds, is_new=is_new)
    if as_json:
        print_json({"is_new": is_new, "run": run_document(run)})
        return
    _announce(run, is_new=is_new, is_paused=is_paused)
    if not has_runner:
        show(
            hint("No runner is alive, so nothing runs yet. Start one with: evertick runner (or all with: evertick up)")
        )
    if wait:
        wait_for_end(run.run_id, within_seconds=within_seconds)
    show(hint(f"Follow it with: evertick runs watch {run.run_id}"))


def _announce(run: RunRow, *, is_new: bool, is_paused: bool) -> None:
    if not is_new:
        show(line(f"Run {run.run_id} of {run.dag} has this key already; it is {run.state}."))
        return
    show(line(f"Started run {run.run_id} of {run.dag}." if not is_paused else f"Run {run.run_id} of {run.dag} waits."))
    if is_paused:
        show(hint(f"The DAG is paused; let it go on with: evertick dags unpause {run.dag}"))


def read_object(text: str | None) -> dict[str, object]:
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


def read_pairs(spec: DagSpec, pairs: Sequence[str]) -> dict[str, object]:
    """`name=value` as people type it, each by its parameter's type."""
    found: dict[str, object] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise InvalidParams(f"--param {pair!r} has no name and value. Write --param name=value.")
        found[name] = parse_param(spec.params, name, text)
    return found
