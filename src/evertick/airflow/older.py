"""Names of Airflow 2 that Airflow 3 no longer has, for files that were not changed yet. Each use is a finding.

They come into effect only where the installed release has nothing of that name."""

from __future__ import annotations

import ast
import importlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from functools import wraps
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from airflow.sdk import DAG

_STANDARD = "airflow.providers.standard"
_PYTHON = f"{_STANDARD}.operators.python"
_ASSETS = {"Dataset": "Asset", "DatasetAlias": "AssetAlias", "DatasetAll": "AssetAll", "DatasetAny": "AssetAny"}
_PYTHON_NAMES = ("PythonOperator", "BranchPythonOperator", "ShortCircuitOperator", "PythonVirtualenvOperator")
# By module: what each of its names is now, as `module:name`.
_MODULES: dict[str, dict[str, str]] = {
    "airflow.datasets": {old: f"airflow.sdk:{new}" for old, new in _ASSETS.items()},
    "airflow.datasets.metadata": {"Metadata": "airflow.sdk:Metadata"},
    "airflow.timetables.datasets": {"DatasetOrTimeSchedule": "evertick.airflow.older:dataset_or_time_schedule"},
    "airflow.utils.weekday": {"WeekDay": f"{_STANDARD}.utils.weekday:WeekDay"},
    "airflow.utils.task_group": {"TaskGroup": "airflow.sdk:TaskGroup"},
    "airflow.utils.trigger_rule": {"TriggerRule": "airflow.sdk:TriggerRule"},
    "airflow.utils.edgemodifier": {"Label": "airflow.sdk:Label"},
    "airflow.utils.helpers": {name: f"airflow.sdk:{name}" for name in ("chain", "cross_downstream")},
    "airflow.utils.dates": {"days_ago": "evertick.airflow.older:days_ago"},
    "airflow.operators.python": {"is_venv_installed": "evertick.airflow.older:is_venv_installed"},
    "airflow.operators.dummy": {"DummyOperator": f"{_STANDARD}.operators.empty:EmptyOperator"},
    "airflow.operators.dummy_operator": {"DummyOperator": f"{_STANDARD}.operators.empty:EmptyOperator"},
    "airflow.operators.bash_operator": {"BashOperator": f"{_STANDARD}.operators.bash:BashOperator"},
    "airflow.operators.python_operator": {name: f"{_PYTHON}:{name}" for name in _PYTHON_NAMES},
    "airflow.operators.email": {"EmailOperator": "airflow.providers.smtp.operators.smtp:EmailOperator"},
    "airflow.operators.email_operator": {"EmailOperator": "airflow.providers.smtp.operators.smtp:EmailOperator"},
    "airflow.operators.dagrun_operator": {
        "TriggerDagRunOperator": f"{_STANDARD}.operators.trigger_dagrun:TriggerDagRunOperator"
    },
    "airflow.sensors.external_task_sensor": {
        "ExternalTaskSensor": f"{_STANDARD}.sensors.external_task:ExternalTaskSensor"
    },
    "airflow.sensors.base_sensor_operator": {"BaseSensorOperator": "airflow.sdk:BaseSensorOperator"},
    "airflow.hooks.base_hook": {"BaseHook": "airflow.sdk:BaseHook"},
}
_RENAMED = {"schedule_interval": "schedule", "timetable": "schedule", "concurrency": "max_active_tasks"}
_DROPPED = ("orientation", "default_view", "sla_miss_callback", "full_filepath")


def install() -> None:
    """In a process that loads files; once."""
    if not any(isinstance(each, _Finder) for each in sys.meta_path):
        sys.meta_path.append(_Finder())
        DAG.__init__ = _with_older_options(DAG.__init__)


def complete_modules(text: str) -> None:
    """Add the missing names that a file mentions to modules that still exist."""
    for module, names in _MODULES.items():
        mentioned = [name for name in names if name in text] if module in text else []
        for name in mentioned:
            found = importlib.import_module(module)
            if not isinstance(found.__loader__, _Loader) and not hasattr(found, name):
                setattr(found, name, _resolve(names[name]))


def uses_in(path: Path) -> list[tuple[str, int]]:
    """What a file imports of these names, each with its line."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    return [each for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for each in _uses_of(node)]


def _uses_of(node: ast.ImportFrom) -> Iterator[tuple[str, int]]:
    module = sys.modules.get(node.module or "")
    for name, target in _MODULES.get(node.module or "", {}).items():
        is_ours = isinstance(getattr(module, "__loader__", None), _Loader) or vars(module or object).get(name) in _OWN
        if is_ours and any(alias.name == name for alias in node.names):
            now = target.replace(":", ".").removeprefix("evertick.airflow.older.")
            yield f"{node.module}.{name} is gone in Airflow 3; read as {now}", node.lineno


def options_of(dag: Any) -> Sequence[str]:
    """The options of Airflow 2 that a DAG was made with."""
    found: Sequence[str] = vars(dag).get("_evertick_older_options", ())
    return found


def _with_older_options(init: Callable[..., None]) -> Callable[..., None]:
    @wraps(init)
    def made(self: Any, *args: Any, **given: Any) -> None:
        told = []
        for old, new in _RENAMED.items():
            if old in given:
                value = given.pop(old)
                given.setdefault(new, value)
                told.append(f"{old}= is gone in Airflow 3; read as {new}=")
        for old in _DROPPED:
            if given.pop(old, None) is not None:
                told.append(f"{old}= is gone in Airflow 3; ignored")
        init(self, *args, **given)
        # A DAG takes the file of its caller's caller, where templates are searched.
        self.fileloc = sys._getframe(1).f_code.co_filename
        if told:
            vars(self)["_evertick_older_options"] = tuple(told)

    return made


class _Finder(MetaPathFinder):
    """The last one: only for modules that nothing else has."""

    def find_spec(self, fullname: str, _path: object, _target: object = None) -> ModuleSpec | None:
        if fullname not in _MODULES:
            return None
        return ModuleSpec(fullname, _Loader(), is_package=any(each.startswith(f"{fullname}.") for each in _MODULES))


class _Loader(Loader):
    def create_module(self, _spec: ModuleSpec) -> None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        names = _MODULES[module.__name__]

        def find(name: str) -> Any:
            if name not in names:
                raise AttributeError(f"module {module.__name__!r} has no attribute {name!r}")
            return _resolve(names[name])

        vars(module)["__getattr__"] = find


def _resolve(target: str) -> Any:
    module, _, name = target.partition(":")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        provider = "-".join(module.split(".")[2:3])
        raise ImportError(f"{name} is in {module} now: install apache-airflow-providers-{provider}") from error


def days_ago(n: int, hour: int = 0, minute: int = 0, second: int = 0, microsecond: int = 0) -> datetime:
    today = datetime.now(UTC).replace(hour=hour, minute=minute, second=second, microsecond=microsecond)
    return today - timedelta(days=n)


def is_venv_installed() -> bool:
    return shutil.which("virtualenv") is not None or find_spec("virtualenv") is not None


def dataset_or_time_schedule(*, timetable: Any, datasets: Any) -> Any:
    return importlib.import_module("airflow.timetables.assets").AssetOrTimeSchedule(
        timetable=timetable, assets=datasets
    )


_OWN = (days_ago, is_venv_installed, dataset_or_time_schedule)
