"""One gate for people: who holds it, and who waits for it in which order."""

from __future__ import annotations

import difflib
from datetime import datetime
from typing import TYPE_CHECKING

from psycopg import AsyncConnection
from rich.table import Table

from evertick.cli import far_fleet
from evertick.cli.connection import ask
from evertick.cli.documents import document, print_json
from evertick.cli.tables import Cell, heading, hint, line, show, state, table
from evertick.db.queries import gates
from evertick.db.queries.gates import GateRow, GateTask
from evertick.domain.dags.gates import EXCLUSIVE
from evertick.domain.durations import length, relative
from evertick.domain.errors import NotFound

if TYPE_CHECKING:
    from evertick.cli.server import Server


def used_text(gate: GateRow) -> str:
    """How much of it is taken. A mutex key is held by one alone, or shared by some; an ordered one has its smallest version."""
    if gate.kind == "order":
        return "nobody" if gate.version is None else f"version {gate.version}"
    if gate.kind == "rate":
        return f"{gate.used}/{gate.capacity} in {span(gate.period or 0)}"
    if gate.kind == "past":
        return "run before"
    if gate.kind != "mutex":
        return f"{gate.used}/{gate.capacity}"
    if gate.used == 0:
        return "free"
    return "exclusive" if gate.used >= EXCLUSIVE else "shared"


def span(seconds: float) -> str:
    """A period in its own unit: `10 s`, `1 min`, `24 h`."""
    return length(seconds).removesuffix(" 0 s")


def gate_page(noun: str, kinds: list[str], name: str, *, limit: int, as_json: bool) -> None:
    async def read(conn: AsyncConnection) -> list[tuple[GateRow, list[GateTask], list[GateTask]]]:
        found = _named(noun, name, await gates.list_gates(conn, kinds=kinds))
        return [
            (
                gate,
                await gates.holders(conn, gate.gate_id, limit=limit),
                await gates.waiters(conn, gate.gate_id, limit=limit),
            )
            for gate in found
        ]

    def read_far(server: Server) -> list[tuple[GateRow, list[GateTask], list[GateTask]]]:
        known = far_fleet.list_pools(server) if noun == "pool" else far_fleet.list_keys(server)
        return far_fleet.gate_pages(server, noun, _named(noun, name, known), limit)

    found, now = ask(read, far=read_far)
    if as_json:
        shown = [
            {
                **document(gate),
                "held_by": [document(each) for each in held],
                "waiting": [document(each) for each in waiting],
            }
            for gate, held, waiting in found
        ]
        print_json({f"{noun}s": shown})
        return
    for gate, held, waiting in found:
        show(line(f"{gate.kind} {gate.name}: {used_text(gate)}", "bold"))
        show(heading("Held by"), _tasks(held, now, gate) if held else hint("nobody"))
        show(heading("Waiting"), _tasks(waiting, now, gate) if waiting else hint("nobody"))
        if gate.waiters > len(waiting):
            show(hint(f"{len(waiting):,} of {gate.waiters:,}; see more with --limit"))


def _named(noun: str, name: str, known: list[GateRow]) -> list[GateRow]:
    found = [gate for gate in known if gate.name == name]
    if not found:
        near = difflib.get_close_matches(name, [gate.name for gate in known], n=1)
        hint_text = f" Did you mean {near[0]!r}?" if near else f" `evertick {noun}s list` shows what there is."
        raise NotFound(f"There is no {noun} {name!r} now.{hint_text}")
    return found


def _tasks(found: list[GateTask], now: datetime, gate: GateRow) -> Table:
    rows: list[list[Cell]] = [
        [each.run_id, each.dag, each.task, state(each.state), each.weight, relative(each.since, now)] for each in found
    ]
    taken = "#VERSION" if gate.kind == "order" else "#SLOTS"
    return table(("#RUN", "DAG", "TASK", "STATE", taken, "SINCE"), rows)
