"""The page on backups, done: a working installation is dumped, restored into another server, and continues there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo

from evertick.supervisor.postgres import programs
from evertick.supervisor.postgres_home import holder_of
from tests.databases import Cluster
from tests.source_tree import ROOT
from tests.system.test_up import QUICK, Up
from tests.waiting import eventually_sync

PAGE = (ROOT / "docs/howto/backup.md").read_text(encoding="utf-8")
NAME = "evertick_restored"


def type_command(program: str, folder: Path, **environment: str) -> None:
    """The page's command that begins with `program`, as it is written."""
    (command,) = re.findall(rf"^ *\$ ({program} .*)$", PAGE, re.MULTILINE)
    path = f"{programs()}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-ec", command],
        cwd=folder,
        env={**os.environ, **environment, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stderr}"


def history(url: str) -> dict[int, str]:
    with psycopg.connect(url) as conn:
        rows = conn.execute("select run_id, state::text from evertick.run_status where state = 'success'").fetchall()
    return dict(rows)


@pytest.mark.long
def test_a_dump_of_a_working_installation_continues_on_another_server(tmp_path: Path, cluster: Cluster) -> None:
    before, after = tmp_path / "before", tmp_path / "after"
    for folder in (before, after):
        (folder / "dags").mkdir(parents=True)
        (folder / "dags" / "quick.py").write_text(QUICK)
    restored = conninfo.make_conninfo(cluster.url, dbname=NAME)
    first = Up(before, "--port", "0")
    try:
        first.wait_for("Evertick is up")
        first.wait_for_more_runs()
        holder = holder_of(before / ".evertick")
        assert holder is not None
        known = history(holder.url)
        type_command("pg_dump", before, EVERTICK_DATABASE_URL=holder.url)
    finally:
        first.end()
    type_command("createdb", before, ADMIN_URL=cluster.url)
    try:
        type_command("pg_restore", before, RESTORED_URL=restored)
        kept = history(restored)
        assert known.items() <= kept.items() and len(kept) >= 2
        second = Up(after, "--port", "0", "--database-url", restored)
        try:
            eventually_sync(lambda: len(history(restored)) >= len(kept) + 3, within_seconds=60)
            assert kept.items() <= history(restored).items()
        finally:
            second.process.terminate()
            second.process.wait(timeout=60)
            second.end()
        with psycopg.connect(restored) as conn:
            doubled = conn.execute(
                "select fire_at from evertick.run where kind = 'scheduled' group by 1 having count(*) > 1"
            ).fetchall()
        assert doubled == [] and "Traceback" not in second.output
    finally:
        cluster.drop(NAME)
