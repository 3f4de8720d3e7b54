"""`evertick pools` and `evertick keys`: slots that tasks share, their holders, and the tasks that wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table

from evertick.cli.app import Group
from evertick.cli.options import Json, Limit, Yes, confirm, noun
from evertick.cli.output import Cell, document, heading, hint, line, print_json, show, show_list, state, table
from evertick.client.connect import call, open_client, read, read_pages
from evertick.db.queries.gates import Gate, GateTask
from evertick.domain.dags.gates import EXCLUSIVE
from evertick.domain.durations import length, relative
from evertick.operations import gates
from evertick.operations.gates import MOST_TASKS, GateDetails, PoolRequest

pools = Group('Pools: named slots that tasks share. A task takes its slots with `@task(pool="warehouse")`.')
keys = Group()

Pool = Annotated[str, typer.Argument(metavar="POOL", help="The pool's name.")]
Slots = Annotated[int, typer.Argument(metavar="SLOTS", min=0, help="Number of slots; 0 closes the pool.")]
Key = Annotated[str, typer.Argument(metavar="KEY", help="The key, as `evertick keys list` shows it.")]


@pools.command("list", epilog="Example: evertick pools list")
def list_pools_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the pools: their slots, how many are taken, and how many tasks wait."""
    found, _ = read_pages(gates.list_pools, limit)
    show_list(
        "pools",
        found,
        ("POOL", "#SLOTS", "#USED", "#FREE", "#TASKS", "#WAITING"),
        lambda it: [it.name, it.slots, it.used, max(it.slots - it.used, 0), it.holders, it.waiters],
        as_json=as_json,
        empty="There are no pools. Create one with: evertick pools set warehouse 4",
        to_json=_gate_document,
    )


@pools.command("show", epilog="Example: evertick pools show warehouse")
def show_pool_command(pool: Pool, limit: Limit = 20, as_json: Json = False) -> None:
    """Show the tasks that hold a pool's slots, and the tasks that wait for them in their order."""
    found, now = read(gates.show_pool, name=pool, limit=min(limit, MOST_TASKS))
    _show_gates("pools", [found.record], now, as_json=as_json)


# A negative number would otherwise be taken for an option, and the reason would be hidden.
@pools.command(
    "set", epilog="Example: evertick pools set warehouse 4", context_settings={"ignore_unknown_options": True}
)
def set_pool_command(pool: Pool, slots: Slots) -> None:
    """Create a pool, or change its slots at once. If more slots are taken, no other task starts until slots are free."""
    done = call(gates.put_pool, name=pool, body=PoolRequest(slots=slots)).record
    now_has = f"Created {pool} with" if done.is_new else f"Pool {pool} has"
    show(line(f"{now_has} {noun(slots, 'slot')}."))
    if done.used > slots:
        show(hint(f"{done.used} are taken: running tasks continue, and no other starts until fewer than {slots} are."))
    elif done.admitted:
        show(hint(f"{noun(done.admitted, 'waiting task')} can start now."))


@pools.command("delete", epilog="Example: evertick pools delete warehouse")
def delete_pool_command(pool: Pool, yes: Yes = False) -> None:
    """Delete a pool that no DAG needs and no task holds."""
    confirm(f"Delete pool {pool}?", yes=yes)
    call(gates.delete_pool, name=pool)
    show(line(f"Deleted pool {pool}."))


@keys.command("list", epilog="Example: evertick keys list")
def list_keys_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the keys (mutex and ordered), rates and limits that tasks hold or wait for now."""
    found, _ = read_pages(gates.list_keys, limit)
    show_list(
        "keys",
        found,
        ("KIND", "KEY", "USED", "#HOLDERS", "#WAITING"),
        lambda each: [each.kind, each.name, _used_text(each), each.holders, each.waiters],
        as_json=as_json,
        empty='No key is in use. A task takes one with @task(mutex="table:{params.table}").',
        to_json=_gate_document,
    )


@keys.command("show", epilog="Example: evertick keys show table:orders")
def show_key_command(key: Key, limit: Limit = 20, as_json: Json = False) -> None:
    """Show the tasks that hold a key, and the tasks that wait for it in their order."""
    most = min(limit, MOST_TASKS)
    with open_client() as client:
        kinds = [each.kind for each in client.pages(gates.list_keys, MOST_TASKS) if each.name == key]
        # The error for an unknown key suggests a similar one.
        found = [client.call(gates.show_key, name=key, kind=kind, limit=most) for kind in kinds]
        found = found or [client.call(gates.show_key, name=key, limit=most)]
        now = client.now
    _show_gates("keys", found, now, as_json=as_json)


def _show_gates(plural: str, found: Sequence[GateDetails], now: datetime, *, as_json: bool) -> None:
    if as_json:
        return print_json({plural: [_gate_document(each) for each in found]})
    for gate in found:
        show(line(f"{gate.kind} {gate.name}: {_used_text(gate)}", "bold"))
        show(heading("Held by"), _task_table(gate.held_by, now, gate) if gate.held_by else hint("no task"))
        show(heading("Waiting"), _task_table(gate.waiting, now, gate) if gate.waiting else hint("no task"))
        if gate.waiters > len(gate.waiting):
            show(hint(f"{len(gate.waiting):,} of {gate.waiters:,}; see more with --limit"))


def _gate_document(gate: Gate) -> dict[str, object]:
    """The gate's fields; `capacity` has the number of slots."""
    return {"capacity" if name == "slots" else name: value for name, value in document(gate).items()}


def _used_text(gate: Gate) -> str:
    """How much of a gate is taken. A mutex key has one exclusive holder or several that share it; of an ordered key the
    smallest open version is shown."""
    if gate.kind == "order":
        return "free" if gate.version is None else f"version {gate.version}"
    if gate.kind == "rate":
        # The period in its own unit: `10 s`, `1 min`, `24 h`.
        return f"{gate.used}/{gate.slots} in {length(gate.period or 0).removesuffix(' 0 s')}"
    if gate.kind == "past":
        return "run before"
    if gate.kind != "mutex":
        return f"{gate.used}/{gate.slots}"
    if gate.used == 0:
        return "free"
    return "exclusive" if gate.used >= EXCLUSIVE else "shared"


def _task_table(found: Sequence[GateTask], now: datetime, gate: Gate) -> Table:
    rows: list[list[Cell]] = [
        [each.run_id, each.dag, each.task, state(each.state), each.weight, relative(each.since, now)] for each in found
    ]
    taken = "#VERSION" if gate.kind == "order" else "#SLOTS"
    return table(("#RUN", "DAG", "TASK", "STATE", taken, "SINCE"), rows)
