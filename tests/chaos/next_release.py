"""The release that follows this one, made from this one: a copy of the program with a higher version, migrations of the kinds
that real upgrades have, functions that need them, and statements that call these. Nothing of it is ever released.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import evertick
from evertick.db.function_sets import FunctionSet, own_set
from evertick.db.migrate import migrations

PROGRAM = Path(evertick.__file__).parent

# Columns with a default on the tables that every task passes through, each in a migration of its own: whoever has one of them and
# waits for the other would be in the way of those who take them in the other order.
_TASKS = "alter table task add column note text not null default 'none';"
_RUNS = "alter table run_status add column cost int not null default 0;"
# A column and an index on a small hot table, and a new table.
_RUNNERS = """
alter table runner add column zone text;
create index runner_by_zone on runner (zone);
create table claimed_by (session bigint primary key, release text not null, claims bigint not null default 0);
"""

# What may take long, on a table that everybody uses: beside the work.
_INDEX = "create index concurrently task_by_note on task (note) where note <> 'none';"

# A verb with one more argument.
_STEP = """
create function finish_and_claim(p_session bigint, p_reports jsonb, p_infra_retries int, p_queues text[], p_free int,
                                 p_low bigint[], p_aging double precision, p_release text)
returns setof exchange_row language plpgsql as $$
begin
    insert into claimed_by (session, release) values (p_session, p_release) on conflict do nothing;
    return query select * from finish_and_claim(p_session, p_reports, p_infra_retries, p_queues, p_free, p_low, p_aging);
end $$;
"""
# What `claim` does more: it counts.
_COUNTED = """
    insert into claimed_by as c (session, release, claims) select p_session, 'new', p_free - wanted where wanted < p_free
    on conflict (session) do update set claims = c.claims + excluded.claims;
end $$;"""


@dataclass(frozen=True, slots=True, kw_only=True)
class NextRelease:
    """`folder` comes first on the path of whoever shall be of that release."""

    folder: Path
    version: str
    migrations: tuple[str, ...]
    functions: FunctionSet

    def environment(self, given: Mapping[str, str]) -> dict[str, str]:
        before = given.get("PYTHONPATH")
        return {**given, "PYTHONPATH": f"{self.folder}{os.pathsep}{before}" if before else str(self.folder)}

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "evertick.cli.main", *words]


def make_next_release(folder: Path) -> NextRelease:
    """Write it into the folder."""
    shutil.copytree(PROGRAM, folder / "evertick")
    scripts = {"next_tasks": _TASKS, "next_runs": _RUNS, "next_runners": _RUNNERS, "next_index": _INDEX}
    last = len(migrations())
    for number, (name, script) in enumerate(scripts.items(), last + 1):
        file = folder / "evertick" / "db" / "migrations" / f"{number:04}_{name}.sql"
        file.write_text(f"-- oldest program: {last:04}\n{script}")
    functions = folder / "evertick" / "db" / "functions"
    (runner,) = functions.glob("*_runner.sql")
    runner.write_text(_claim_that_counts(runner.read_text()) + _STEP)
    (retries,) = functions.glob("*_retries.sql")
    retries.write_text(_promote_in_bigint(retries.read_text()))
    exchange = folder / "evertick" / "engine" / "finish_and_claim.py"
    _change(exchange, "    look: ClaimPosition = FROM_THE_HEAD,\n", "    release: str = 'new',\n")
    number = _next(version("evertick"))
    metadata = folder / f"evertick-{number}.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text(f"Metadata-Version: 2.1\nName: evertick\nVersion: {number}\n")
    return NextRelease(folder=folder, version=number, migrations=tuple(scripts), functions=own_set(functions))


def _claim_that_counts(text: str) -> str:
    """The function as it is, with one more statement at its end."""
    found = re.findall(r"^create function claim_tasks\(.*?^end \$\$;", text, re.MULTILINE | re.DOTALL)
    assert len(found) == 1, f"there are {len(found)} functions claim"
    return text.replace(found[0], found[0].removesuffix("end $$;") + _COUNTED)


def _promote_in_bigint(text: str) -> str:
    """The same function with a wider type in its answer."""
    assert text.count("out promoted int,") == 1, "promote must answer as it did"
    return text.replace("out promoted int,", "out promoted bigint,")


def _change(file: Path, behind: str, added: str) -> None:
    """Add something behind the first place that has it."""
    text = file.read_text()
    assert behind in text, f"{file.name} has no {behind} any more"
    file.write_text(text.replace(behind, behind + added, 1))


def _next(number: str) -> str:
    major, minor, _ = number.split(".", 2)
    return f"{major}.{int(minor) + 1}.0"
