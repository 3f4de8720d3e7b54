"""`evertick figures`: what the runs and tasks of a DAG take, how long they wait, and how often they fail."""

from __future__ import annotations

from typing import Annotated

import typer

from evertick.cli.app import Single
from evertick.cli.options import Json, Limit
from evertick.cli.output import Cell, show_list
from evertick.client.connect import read_pages
from evertick.domain.durations import length, size
from evertick.operations.monitoring import figures
from evertick.operations.monitoring.figures import TaskFigures

app = Single()

Dag = Annotated[str | None, typer.Argument(metavar="DAG", help="Show each task of this DAG; by default each DAG.")]

_COLUMNS = (*("#SUCCEEDED", "#FAILED", "#RETRIES", "SUCCESS", "MEDIAN", "90 %", "WAIT", "LANDING", "CPU", "MEMORY"),)


@app.command(epilog="Example: evertick figures etl")
def figures_command(dag: Dag = None, limit: Limit = 1000, as_json: Json = False) -> None:
    """Show durations, waits, landing times, results, retries, CPU time and peak memory: of each DAG, or of its tasks."""
    found, _ = (
        read_pages(figures.list_figures, limit) if dag is None else read_pages(figures.show_figures, limit, dag=dag)
    )

    def cells(each: TaskFigures) -> list[Cell]:
        return [each.dag if dag is None else each.task or "(runs)", *_values(each)]

    empty = "No run has ended yet" if dag is None else f"No run of {dag} has ended yet"
    empty += ", or only within the last seconds: figures are counted a few seconds after a run ends."
    columns = ("DAG" if dag is None else "TASK", *_COLUMNS)
    show_list("figures", found, columns, cells, as_json=as_json, empty=empty)


def _values(each: TaskFigures) -> list[Cell]:
    def lasting(seconds: float | None) -> str | None:
        return None if seconds is None else length(max(seconds, 0.0))

    return [
        each.succeeded,
        each.failed,
        each.retries,
        None if each.success_rate is None else f"{each.success_rate:.1%}",
        lasting(each.median_seconds),
        lasting(each.p90_seconds),
        lasting(each.wait_seconds),
        lasting(each.landing_seconds),
        lasting(each.cpu_seconds),
        None if each.peak_memory_bytes is None else size(each.peak_memory_bytes),
    ]
