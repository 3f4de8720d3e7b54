"""Imports a DAG file of Airflow and finds its DAGs as Airflow's own loader does: the global ones, and those that register
themselves. Its tasks report through `attempt.py`."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

from airflow.configuration import conf
from airflow.exceptions import AirflowClusterPolicySkipDag
from airflow.sdk import DAG
from airflow.sdk.definitions._internal.contextmanager import DagContext

from airflow import settings
from evertick.airflow import older
from evertick.airflow.attempt import AirflowTask, rehearsal, values_at_import
from evertick.airflow.callbacks import callback_dags
from evertick.airflow.compiler import called_events, compile_dag
from evertick.airflow.findings import lines_of
from evertick.airflow.schedules import timed_part
from evertick.airflow.timetables import instants
from evertick.domain.dags.findings import Finding
from evertick.domain.dags.spec import DagSpec
from evertick.domain.errors import InvalidDag
from evertick.domain.schedules.computed import Instant
from evertick.domain.schedules.spec import ScheduleKind
from evertick.sdk.dag import DagFile
from evertick.sdk.runtime import BoundTask, CompiledDag


def load_dag_file(folder: Path, file: str) -> DagFile:
    """The DAGs that are not refused, and all findings. Raises what the file raises."""
    folder = folder.absolute()
    if not (folder / file).is_file():
        raise InvalidDag(f"there is no file {file} in {folder}.")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    older.install()
    older.complete_modules((folder / file).read_text(encoding="utf-8", errors="replace"))
    lines, usual = lines_of(folder / file), defaults()
    dags: dict[str, CompiledDag] = {}
    findings: dict[str, tuple[Finding, ...]] = {}
    with values_at_import():
        found = _import(folder / file)
    for dag in found:
        if dag.dag_id in findings:
            message = f"two DAGs are named {dag.dag_id!r}; give one a different dag_id."
            raise InvalidDag(message, file=str(folder / file), line=lines.get(dag.dag_id))
        if not _check(dag, folder / file, lines):
            continue
        compiled = compile_dag(dag, file, lines, usual)
        for text, line in older.uses_in(folder / file) if not findings else ():
            compiled.findings.add("AF601", text, line=line)
        for text in older.options_of(dag):
            compiled.findings.add("AF601", text)
        findings[dag.dag_id] = tuple(compiled.findings.found)
        if compiled.spec is not None:
            dags |= callback_dags(dag, compiled.spec, called_events(dag))
            dags[dag.dag_id] = CompiledDag(
                spec=compiled.spec, tasks=_tasks(dag, compiled.spec), timetables=_timetables(dag, compiled.spec)
            )
    found_all = tuple(each for some in findings.values() for each in some)
    return DagFile(dags=dags, findings=found_all, rehearsal=rehearsal())


def _tasks(dag: Any, spec: DagSpec) -> dict[str, BoundTask]:
    return {
        task.name: BoundTask(name=task.name, retry=task.retry, report=AirflowTask(dag.task_dict[task.name], spec))
        for task in spec.tasks
    }


def _timetables(dag: Any, spec: DagSpec) -> dict[str, Callable[[datetime], list[Instant]]]:
    computed = [each.name for each in spec.schedules if each.spec.kind is ScheduleKind.COMPUTED]
    return {name: partial(instants, dag, timed_part(dag.timetable)) for name in computed}


def defaults() -> Mapping[str, Any]:
    return {
        "is_paused": conf.getboolean("core", "dags_are_paused_at_creation", fallback=True),
        "max_active_tasks": conf.getint("core", "max_active_tasks_per_dag", fallback=16),
    }


def _import(path: Path) -> Iterable[Any]:
    name = f"unusual_prefix_evertick_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None, "a .py file always has a loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    DagContext.autoregistered_dags.clear()
    DagContext.current_autoregister_module_name = name
    try:
        spec.loader.exec_module(module)
    finally:
        DagContext.current_autoregister_module_name = None
    found = {id(each): each for each in vars(module).values() if isinstance(each, DAG)}
    found |= {id(dag): dag for dag, owner in DagContext.autoregistered_dags if owner.__name__ == name}
    return found.values()


def _check(dag: Any, path: Path, lines: Mapping[str, int]) -> bool:
    """The checks that Airflow makes when it collects a DAG, and the installation's own policies; Evertick's own checks find
    cycles. False if a policy leaves the DAG out."""
    try:
        dag.validate()
        dag.resolve_template_files()
        settings.dag_policy(dag)
        for task in dag.tasks:
            settings.task_policy(task)
    except AirflowClusterPolicySkipDag:
        return False
    except Exception as error:
        raise InvalidDag(f"DAG {dag.dag_id!r}: {error}", file=str(path), line=lines.get(dag.dag_id)) from error
    return True
