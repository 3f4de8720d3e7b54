"""The database's own counters before and after some work: WAL, transactions, rows, functions, statements. Only reads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import psycopg
from psycopg.rows import dict_row

HOT_TABLES = ("task", "run_status", "ready_task", "lease", "task_timer", "runner", "schedule_state")
Row = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Counters:
    """Totals since the server's last reset; only differences are meaningful."""

    wal_bytes: float
    wal: Row
    transactions: float
    tables: Mapping[str, Row]
    functions: Mapping[str, Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One row of pg_stat_statements, which includes statements inside functions."""

    text: str
    calls: float
    milliseconds: float
    rows: float
    wal_bytes: float
    blocks: float


def prepare(url: str) -> bool:
    """Enable timing of functions, and of statements if available, for new sessions. Returns whether statements are timed."""
    with psycopg.connect(url, autocommit=True) as conn:
        row = conn.execute("select quote_ident(current_database())").fetchone()
        assert row is not None
        conn.execute(f"alter database {row[0]} set track_functions = 'pl'")
        with suppress(psycopg.Error):
            conn.execute("create extension if not exists pg_stat_statements schema public")
            conn.execute("select public.pg_stat_statements_reset()")
            conn.execute(f"alter database {row[0]} set pg_stat_statements.track = 'all'")
            conn.execute(f"alter database {row[0]} set pg_stat_statements.track_utility = 'off'")
            return True
    return False


def read(url: str) -> Counters:
    with psycopg.connect(url, autocommit=True, row_factory=dict_row) as conn:
        (wal,) = conn.execute(
            "select wal_records::float8, wal_fpi::float8, wal_bytes::float8, wal_buffers_full::float8 from pg_stat_wal"
        ).fetchall()
        (lsn,) = conn.execute("select pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float8 as bytes").fetchall()
        (database,) = conn.execute(
            "select (xact_commit + xact_rollback)::float8 as n from pg_stat_database where datname = current_database()"
        ).fetchall()
        tables = conn.execute(
            """select relname, n_tup_ins::float8, n_tup_upd::float8, n_tup_hot_upd::float8, n_tup_del::float8,
                      n_dead_tup::float8, n_live_tup::float8, idx_scan::float8, seq_scan::float8,
                      (vacuum_count + autovacuum_count)::float8 as vacuums,
                      pg_total_relation_size(relid)::float8 as bytes
                 from pg_stat_user_tables where schemaname = 'evertick'"""
        ).fetchall()
        functions = conn.execute(
            "select funcname, calls::float8, total_time::float8, self_time::float8 from pg_stat_user_functions"
        ).fetchall()
    return Counters(
        wal_bytes=lsn["bytes"],
        wal=wal,
        transactions=database["n"],
        tables={row.pop("relname"): row for row in tables},
        functions={row.pop("funcname"): row for row in functions},
    )


def reset_statements(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        conn.execute("select public.pg_stat_statements_reset()")


def statements(url: str, limit: int) -> list[Statement]:
    """The statements, most expensive first."""
    with psycopg.connect(url, autocommit=True) as conn:
        rows = conn.execute(
            """select s.query, s.calls::float8, s.total_exec_time, s.rows::float8, s.wal_bytes::float8,
                      (s.shared_blks_hit + s.shared_blks_read)::float8
                 from public.pg_stat_statements s join pg_database d on d.oid = s.dbid
                where d.datname = current_database() and s.query not like '%%pg_stat%%'
                order by s.total_exec_time desc limit %s""",
            [limit],
        ).fetchall()
    return [
        Statement(text=text, calls=calls, milliseconds=ms, rows=found, wal_bytes=wal, blocks=blocks)
        for text, calls, ms, found, wal, blocks in rows
    ]


def dead_rows(conn: psycopg.Connection[tuple[object, ...]], tables: Sequence[str] = HOT_TABLES) -> dict[str, int]:
    rows = conn.execute(
        "select relname, n_dead_tup from pg_stat_user_tables where schemaname = 'evertick' and relname = any(%s)",
        [list(tables)],
    ).fetchall()
    return {str(name): int(str(count)) for name, count in rows}
