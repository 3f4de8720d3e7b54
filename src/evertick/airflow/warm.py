"""What a zygote does before it forks: import what nearly every file of Airflow imports, and run a small task."""

from __future__ import annotations

import importlib
import sysconfig
from contextlib import suppress
from pathlib import Path

from airflow import configuration, settings
from evertick.airflow.attempt import rehearsal

_USUAL = (
    "evertick.airflow.loader",
    "evertick.attempts.coroutines",
    "airflow.providers.standard.operators.bash",
    "airflow.providers.standard.operators.empty",
    "airflow.providers.standard.operators.python",
    "airflow.providers.standard.decorators.python",
    "airflow.sdk.bases.sensor",
)


def prepare() -> list[str]:
    """The files whose change makes this process outdated: packages, configuration and plugins."""
    for name in _USUAL:
        with suppress(ImportError):  # of a release, or a package that is not installed
            importlib.import_module(name)
    rehearsal().warm_up()
    plugins = Path(settings.PLUGINS_FOLDER or "")
    files = sorted(plugins.rglob("*.py")) if settings.PLUGINS_FOLDER and plugins.is_dir() else []
    config = Path(configuration.AIRFLOW_CONFIG)
    own = [config, config.parent / "config" / "airflow_local_settings.py", plugins, *files]
    return [sysconfig.get_path("purelib"), *map(str, own)]
