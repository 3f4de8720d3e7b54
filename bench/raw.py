"""The lower bound for a throughput: claim and complete rows of two tables on the same server, durably.

Two commits per cycle; no task, log, result or guard. An engine that does more cannot be faster.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from bench.house import Server

DATABASE = "bench_raw"
BATCHES = (1, 100)
# More rows than one connection processes in a second.
_ROWS_PER_SECOND = {1: 30_000, 100: 300_000}

_CLAIM = """
    with picked as materialized (
        select id from ready order by id limit %s for update skip locked
    ), taken as (
        delete from ready r using picked p where r.id = p.id
    )
    insert into running (id, claimed_at) select id, clock_timestamp() from picked returning id"""
_COMPLETE = "delete from running where id = any(%s)"


class RawLoop:
    """Measures cycles per second, repeatedly."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn

    def cycles_per_second(self, batch: int, seconds: float) -> float:
        """The rows per second that one connection claims and completes, `batch` at a time."""
        self._fill(int(_ROWS_PER_SECOND[batch] * seconds))
        done, started = 0, time.perf_counter()
        while (elapsed := time.perf_counter() - started) < seconds:
            ids = [row[0] for row in self._conn.execute(_CLAIM, [batch], prepare=True, binary=True)]
            if not ids:
                break
            self._conn.execute(_COMPLETE, [ids], prepare=True, binary=True)
            done += len(ids)
        return done / elapsed if elapsed else 0.0

    def _fill(self, rows: int) -> None:
        self._conn.execute("truncate ready, running")
        self._conn.execute("insert into ready select generate_series(1, %s)", [rows])
        self._conn.execute("vacuum analyze ready")


@contextmanager
def raw_loop(server: Server) -> Iterator[RawLoop]:
    """Uses its own database and one connection that stays open between rounds."""
    with psycopg.connect(server.url_of(DATABASE), autocommit=True, options="-c enable_seqscan=off -c jit=off") as conn:
        conn.execute("create table if not exists ready (id bigint primary key)")
        conn.execute("create table if not exists running (id bigint primary key, claimed_at timestamptz not null)")
        yield RawLoop(conn)
