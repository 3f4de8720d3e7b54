"""The work that bench/layout.py measures: the layouts, their history, and the ways to claim and finish tasks on them.

The SQL of each layout is in bench/layout/. Nothing here reads a clock or counts a cost.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
from psycopg.types.json import Jsonb

_SQL = Path(__file__).with_name("layout")
SESSION = 7_000_000_000_000_000_001
ONE_TASK, CHAIN, FAN = 1, 2, 3
CHAIN_LENGTH, FAN_WIDTH = 200, 2000
_PARKED_ROWS, _RETRY_EVERY = 20_000, 20
# Like the engine's connections: a plan made while a queue is empty must not scan all of it once it has grown.
_STEADY_PLANS = (
    "-c plan_cache_mode=force_generic_plan -c enable_seqscan=off -c enable_hashjoin=off -c enable_mergejoin=off"
)

Claim = tuple[int, int, int, int]
Connection = psycopg.Connection[Any]
Step = Callable[[Connection, Jsonb | None, int], list[Claim]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One layout with one way to claim and finish, in its own schema and on its own connection."""

    name: str
    title: str
    against: str
    file: str
    step: Step


def step_by_function(conn: Connection, reports: Jsonb | None, free: int) -> list[Claim]:
    """One stored function: one round trip, one transaction."""
    query = "select run_id, idx, map_index, epoch from step(%s, %s::jsonb, %s)"
    return conn.execute(query, [SESSION, reports, free], prepare=True).fetchall()


def step_by_pipeline(conn: Connection, reports: Jsonb | None, free: int) -> list[Claim]:
    """The same changes as prepared statements in one pipelined transaction: also one round trip."""
    values = {"session": SESSION, "reports": reports, "free": free}
    with conn.pipeline():
        conn.execute("begin")
        if reports is not None:
            conn.execute(_PIPELINED["lock"], values, prepare=True)
            conn.execute(_PIPELINED["finish"], values, prepare=True)
        claimed = conn.execute(_PIPELINED["claim"], values, prepare=True)
        conn.execute("commit")
    return claimed.fetchall()


def _named_statements(path: Path) -> dict[str, str]:
    parts = path.read_text(encoding="utf-8").split("-- name: ")[1:]
    return {name.strip(): text for name, _, text in (part.partition("\n") for part in parts)}


_PIPELINED = _named_statements(_SQL / "h_pipelined.sql")
LAYOUTS = (
    Variant(name="A", title="one table, state in the indexes", against="B", file="a.sql", step=step_by_function),
    Variant(name="B", title="a table per state", against="B", file="b.sql", step=step_by_function),
    Variant(name="H", title="task row + small companions", against="B", file="h.sql", step=step_by_function),
)
PIPELINE = Variant(name="H pipelined", title="H without functions", against="H", file="h.sql", step=step_by_pipeline)
VARIANTS = (*LAYOUTS, PIPELINE)


# The work -------------------------------------------------------------------------------------------------------------


def drain(conn: Connection, step: Step, batch: int) -> int:
    """Claim and finish until no task is left; every twentieth task fails once and is retried by timer."""
    finished, reports = 0, None
    while True:
        claimed = step(conn, reports, batch)
        if not claimed and reports is None and not scalar(conn, "select promote()"):
            return finished
        rows = [{"r": r, "i": i, "m": m, "e": e, "kind": _outcome(r + i, e)} for r, i, m, e in claimed]
        finished += sum(row["kind"] == "success" for row in rows)
        reports = Jsonb(rows) if rows else None


def _outcome(number: int, epoch: int) -> str:
    return "retry" if number % _RETRY_EVERY == 0 and epoch == 1 else "success"


def open_runs(conn: Connection, version: int, count: int) -> int:
    for opened in range(0, count, 1000):
        conn.execute("select open_runs(%s, %s)", [version, min(1000, count - opened)])
    return count


def unadmit_and_back(conn: Connection, count: int) -> int:
    """Release the admission of ready tasks and admit them again, a hundred at a time."""
    moved = 0
    for _ in range(0, count, 100):
        parked = scalar(conn, "select park(100)")
        conn.execute("select admit(%s)", [parked], prepare=True)
        moved += len(parked)
    return moved


def list_run(conn: Connection, times: int) -> int:
    """Read every task of the latest fan, like the page of a run."""
    run_id = scalar(conn, f"select max(run_id) from run_status where version_id = {FAN}")
    for _ in range(times):
        conn.execute("select * from listing where run_id = %s", [run_id], prepare=True)
    return times


def lock_runs(conn: Connection, count: int) -> int:
    """Lock runs, the first step of every verb except claim."""
    last = scalar(conn, "select max(run_id) from run_status")
    conn.execute("select lock_runs(%s)", [Jsonb([{"r": last - back} for back in range(count)])])
    return count


def scalar(conn: Connection, query: str, *values: object) -> Any:
    row = conn.execute(query, values or None).fetchone()
    return row[0] if row else None


def vacuum(conn: Connection) -> None:
    names = scalar(conn, "select string_agg(oid::regclass::text, ', ') from pg_class"
                   " where relnamespace = current_schema()::regnamespace and relkind = 'r'")  # fmt: skip
    conn.execute(f"vacuum (analyze, truncate off) {names}")


# Setting up -----------------------------------------------------------------------------------------------------------


_PLANS = f"""
insert into task_spec values ({ONE_TASK}, 0, 'default', 0, 0);
insert into task_spec select {CHAIN}, i, 'default', 0, least(i, 1) from generate_series(0, {CHAIN_LENGTH} - 1) i;
insert into edge select {CHAIN}, i, i + 1 from generate_series(0, {CHAIN_LENGTH} - 2) i;
insert into task_spec
select {FAN}, i, 'default', 0, case i when 0 then 0 when {FAN_WIDTH} + 1 then {FAN_WIDTH} else 1 end
from generate_series(0, {FAN_WIDTH} + 1) i;
insert into edge select {FAN}, 0, i from generate_series(1, {FAN_WIDTH}) i;
insert into edge select {FAN}, i, {FAN_WIDTH} + 1 from generate_series(1, {FAN_WIDTH}) i;
"""


def publish(url: str) -> None:
    """Create the three DAGs that every layout uses."""
    with psycopg.connect(url, autocommit=True, options="-c search_path=plan") as conn:
        conn.execute("create schema plan")
        conn.execute((_SQL / "shared.sql").read_text(encoding="utf-8"))
        conn.execute(_PLANS)
        conn.execute("vacuum (analyze) task_spec, edge")


def prepared(url: str, variant: Variant, history: int) -> Connection:
    """Create the variant's schema with history: finished and waiting tasks."""
    schema = variant.name.lower().replace(" ", "_")
    conn = psycopg.connect(url, autocommit=True, options=f"-c search_path={schema},plan {_STEADY_PLANS}")
    conn.execute(f"create schema {schema}")
    for file in ("runs.sql", variant.file):
        conn.execute((_SQL / file).read_text(encoding="utf-8"))
    open_runs(conn, ONE_TASK, _PARKED_ROWS)
    scalar(conn, "select park(%s)", _PARKED_ROWS)
    open_runs(conn, ONE_TASK, history)
    vacuum(conn)
    drain(conn, variant.step, 500)
    vacuum(conn)
    return conn
