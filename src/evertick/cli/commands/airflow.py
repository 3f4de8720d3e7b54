"""`evertick airflow`: check what becomes of a folder of Airflow's DAG files, import values, and make an environment.

Airflow is never imported here: the interpreter of that environment loads each file, in a process of its own.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated

import typer

from evertick.bundles import airflow_setup
from evertick.cli.airflow_check import probe, report_of, show_report
from evertick.cli.airflow_run import Wanted, run_dag
from evertick.cli.app import Group
from evertick.cli.errors import RUN_EXIT_STATUS
from evertick.cli.options import DagName, DryRun, Json, ParamsOption, moment, read_object
from evertick.cli.output import Cell, heading, hint, line, print_json, show, state, table
from evertick.client.local import LocalContext, local_caller
from evertick.config import Settings, read_settings, user_environment
from evertick.db.notify import Channel
from evertick.domain.errors import UserError
from evertick.operations.airflow_import import Imported, Item, import_item, read_export
from evertick.publisher.deployment import load_files
from evertick.publisher.publisher import find_dag_files
from evertick.secrets.keyring import load_keyring

app = Group()

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="A folder with DAG files of Airflow, or one such file.")]
Python = Annotated[
    Path | None,
    typer.Option(
        "--python",
        metavar="PATH",
        help="The Python of an environment with Airflow; by default EVERTICK_AIRFLOW_PYTHON.",
    ),
]


@app.command("check", epilog="Example: evertick airflow check /srv/airflow/dags")
def check_command(path: Folder, python: Python = None, as_json: Json = False) -> None:
    """Report which DAGs of a folder run as they are, which run otherwise in some respect, and which are refused. Exit with 1 if
    one is refused or broken. Nothing is published."""
    settings = _with_python(python)
    found = probe(settings)
    folder, files = (path, find_dag_files(path, with_airflow=True)) if path.is_dir() else (path.parent, [path.name])
    if not path.exists():
        raise UserError(f"There is no file or folder {path}.")
    if not files:
        raise UserError(f"{path} holds no DAG file: no .py file in it names both `airflow` and `dag`.")
    began = time.monotonic()
    loaded = asyncio.run(load_files(folder, files, settings, user_environment()))
    report = report_of(folder, loaded, settings) | {"environment": found, "seconds": round(time.monotonic() - began, 1)}
    if as_json:
        print_json(report)
    else:
        show_report(report, loaded)
    if report["refused"] or report["broken"]:
        raise typer.Exit(1)


@app.command("run", epilog="Example: evertick airflow run dags/etl.py etl --for 2026-01-01")
def run_command(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A DAG file of Airflow.")],
    dag: DagName,
    task: Annotated[
        str | None, typer.Argument(metavar="TASK", help="Run only this task, without its upstream tasks.")
    ] = None,
    params: ParamsOption = None,
    at: Annotated[datetime | None, moment("--for", "The logical date of the run.")] = None,
    values: Annotated[
        list[Path] | None,
        typer.Option(
            "--values", metavar="FILE", help="Exported connections, variables or pools that the run has; repeatable."
        ),
    ] = None,
    python: Python = None,
) -> None:
    """Run a DAG of a file once, or one of its tasks, on this machine, without a server: in a database that exists only for this
    run. Exit status 0 for success, 1 failed."""
    settings = _with_python(python)
    if not file.is_file():
        raise UserError(f"There is no file {file}.")
    wanted = Wanted(
        file=file,
        dag=dag,
        task=task,
        params=read_object(params),
        at=at,
        values=[item for each in values or [] for item in read_export(_read(each), str(each))],
    )
    ran = asyncio.run(run_dag(settings, wanted, lambda each: show(line(f"{each.task}  {each.level:7} {each.text}"))))
    rows: list[list[Cell]] = [
        [each.task if each.map_index < 0 else f"{each.task}[{each.map_index}]", state(each.state), each.reason]
        for each in ran.tasks
    ]
    show(heading("Tasks"), table(("TASK", "STATE", "REASON"), rows))
    show(line(f"{dag}: ").append(state(ran.state)))
    raise typer.Exit(RUN_EXIT_STATUS.get(ran.state, 1))


@app.command("import", epilog="Example: evertick airflow import connections.json variables.json pools.json")
def import_command(
    files: Annotated[
        list[Path],
        typer.Argument(metavar="FILE...", help="What `airflow connections|variables|pools export` wrote: JSON or env."),
    ],
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Store exported connections, variables and pools. Existing ones are replaced. Exit with 1 if one was refused."""
    items = [item for file in files for item in read_export(_read(file), str(file))]
    settings = read_settings()
    done = asyncio.run(_import(settings, items, dry_run=dry_run))
    if as_json:
        print_json({"items": done, "is_dry_run": dry_run})
    else:
        rows: list[list[Cell]] = [[each.kind, each.name, each.result, each.reason] for each in done]
        show(table(("KIND", "NAME", "RESULT", "REASON"), rows))
        counts = Counter(each.result for each in done)
        told = ", ".join(f"{count} {result}" for result, count in sorted(counts.items())) or "nothing to import"
        show(hint(f"{'Nothing was stored; it would be' if dry_run else 'Imported'}: {told}."))
    if any(each.result == "refused" for each in done):
        raise typer.Exit(1)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise UserError(f"{file} is not text in UTF-8.") from None


async def _import(settings: Settings, items: Sequence[Item], *, dry_run: bool) -> list[Imported]:
    keyring, context = load_keyring(settings), LocalContext(settings)
    try:
        caller = local_caller(context)
        async with caller.write(Channel.SCHEDULE) as conn:
            return [await import_item(conn, keyring, item, actor=caller.actor, dry_run=dry_run) for item in items]
    finally:
        await context.close()


@app.command("setup", epilog="Example: evertick airflow setup --airflow 3.3 --providers http,postgres")
def setup_command(
    airflow: Annotated[
        str, typer.Option("--airflow", metavar="VERSION", help="Airflow's version, as 3.3 or 3.3.2.")
    ] = "3.3",
    providers: Annotated[
        str, typer.Option("--providers", metavar="NAMES", help="Providers, as http,postgres; standard is always there.")
    ] = "",
    folder: Annotated[
        Path | None, typer.Option("--folder", metavar="DIR", help="Where to make it; by default below Evertick's home.")
    ] = None,
    constraints: Annotated[
        str | None,
        typer.Option(
            "--constraints",
            metavar="FILE|URL|none",
            help="Versions to install; by default those that Airflow published for its release, if they can be fetched.",
        ),
    ] = None,
) -> None:
    """Make a Python environment with Airflow and providers, for DAG files of Airflow. Uses uv if there is one, else pip."""
    names = tuple(name.strip() for name in providers.split(",") if name.strip())
    place = folder or read_settings().home / f"airflow-{airflow}"
    made = airflow_setup.make_environment(
        place.absolute(), version=airflow, providers=names, constraints=constraints, say=lambda text: show(hint(text))
    )
    show(line(f"Airflow {made.version} is in {made.folder}."))
    show(hint(f"Use it with: export EVERTICK_AIRFLOW_PYTHON={made.python}"))


def _with_python(python: Path | None) -> Settings:
    settings = read_settings()
    settings = settings if python is None else replace(settings, airflow_python=python)
    if settings.airflow_python is None:
        raise UserError(
            "No interpreter with Airflow is set: set EVERTICK_AIRFLOW_PYTHON or give --python PATH. Make an environment with"
            " `evertick airflow setup --airflow 3.3`."
        )
    return settings
