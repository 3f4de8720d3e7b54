"""The interpreter for DAG files of Airflow: the Python of an environment that has Airflow. Evertick never imports it itself."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from evertick.bundles.environments import Interpreter, make_shim
from evertick.config import Settings
from evertick.domain.dags.dag_files import is_airflow_file
from evertick.domain.errors import InvalidDag


async def airflow_interpreter(settings: Settings, path: Path) -> Interpreter | None:
    """None for a file that is not Airflow's. Raises InvalidDag if there is no interpreter for it here."""
    if not await asyncio.to_thread(_is_airflows, path):
        return None
    python = settings.airflow_python
    if python is None:
        raise InvalidDag(
            f"{path.name} is a DAG file of Airflow, and no interpreter for such files is set here: set"
            " EVERTICK_AIRFLOW_PYTHON to the Python of an environment with Airflow, or make one with `evertick airflow setup`."
        )
    if not os.access(python, os.X_OK):
        raise InvalidDag(f"EVERTICK_AIRFLOW_PYTHON={python} is not a program that can be started here.")
    shim = await asyncio.to_thread(make_shim, settings.environments_folder.absolute() / ".evertick")
    return Interpreter(str(python), "", str(shim))


def _is_airflows(path: Path) -> bool:
    return path.is_file() and is_airflow_file(path.read_bytes())
