"""What a zygote does before it forks: import what nearly every file of Airflow imports, and run a small task."""

from __future__ import annotations

import sysconfig
from contextlib import suppress
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path

from airflow.sdk import DAG, chain, task

from airflow import configuration, settings
from evertick.airflow.attempt import PYTHON_OPERATORS, rehearsal
from evertick.airflow.compiler import compile_dag
from evertick.airflow.loader import defaults

# Until Python has specialized the code.
_ROUNDS = 10
_USUAL = (
    "evertick.attempts.coroutines",
    "airflow.providers.standard.operators.bash",
    "airflow.providers.standard.operators.empty",
    PYTHON_OPERATORS,
    "airflow.providers.standard.decorators.python",
    "airflow.sdk.bases.sensor",
)


def prepare() -> list[str]:
    """The files whose change makes this process outdated: packages, configuration and plugins."""
    for name in _USUAL:
        with suppress(ImportError):  # of a release, or a package that is not installed
            import_module(name)
    rehearsal().warm_up()
    with suppress(ImportError):
        for _ in range(_ROUNDS):
            _declare_and_compile()
    plugins = Path(settings.PLUGINS_FOLDER or "")
    files = sorted(plugins.rglob("*.py")) if settings.PLUGINS_FOLDER and plugins.is_dir() else []
    config = Path(configuration.AIRFLOW_CONFIG)
    own = [config, config.parent / "config" / "airflow_local_settings.py", plugins, *files]
    return [sysconfig.get_path("purelib"), *map(str, own)]


def _usual_body(**_: object) -> None:
    pass


def _declare_and_compile() -> None:
    """As most files do and have done to them."""
    operators = import_module(PYTHON_OPERATORS)
    with DAG(
        "evertick_usual", schedule="@daily", start_date=datetime(2030, 1, 1, tzinfo=UTC), auto_register=False
    ) as dag:
        first = operators.PythonOperator(task_id="first", python_callable=list, op_args=["{{ ds }}"])
        chain(first, task(_usual_body).override(task_id="wide").expand_kwargs([{}]))
    dag.validate()
    compile_dag(dag, "", {}, defaults())
