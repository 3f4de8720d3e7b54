"""The interpreter for DAG files of Airflow: the Python of an environment that has Airflow. Evertick never imports it itself."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from pathlib import Path

from evertick.bundles.environments import Interpreter, make_shim
from evertick.bundles.zygote import Zygote, ZygotePlan
from evertick.config import Settings
from evertick.domain.dags.dag_files import is_airflow_file
from evertick.domain.errors import InvalidDag

# Imported by a zygote, in this order.
LOADER_MODULES = ("evertick.bundles.loader_process", "evertick.airflow.warm:prepare")
FORK_SERVER_MODULES = ("evertick.attempts.fork_server_main", "evertick.airflow.warm:prepare")


class AirflowPython:
    """`environment` is what DAG files see. `modules` are what a zygote has imported; it ends after so long without use."""

    def __init__(
        self,
        settings: Settings,
        environment: Mapping[str, str] | None,
        modules: tuple[str, ...],
        *,
        mark: tuple[str, str] = ("", ""),
        idle_seconds: float | None = None,
    ) -> None:
        self._settings, self._environment, self._modules = settings, environment, modules
        self._mark, self._idle_seconds = mark, idle_seconds
        self._zygotes: dict[Interpreter, Zygote] = {}

    async def interpreter(self, path: Path) -> Interpreter | None:
        """None for a file that is not Airflow's. Raises InvalidDag if there is no interpreter for it here."""
        if not await asyncio.to_thread(_is_airflows, path):
            return None
        python = self._settings.airflow_python
        if python is None:
            raise InvalidDag(
                f"{path.name} is a DAG file of Airflow, and no interpreter for such files is set here: set"
                " EVERTICK_AIRFLOW_PYTHON to the Python of an environment with Airflow, or make one with `evertick airflow setup`."
            )
        if not os.access(python, os.X_OK):
            raise InvalidDag(f"EVERTICK_AIRFLOW_PYTHON={python} is not a program that can be started here.")
        return await self._of(python)

    async def start(self) -> None:
        """Have the zygote import Airflow before the first file needs it."""
        python = self._settings.airflow_python
        if python is not None and os.access(python, os.X_OK):
            self.zygote(await self._of(python)).start()

    def zygote(self, interpreter: Interpreter) -> Zygote:
        if interpreter not in self._zygotes:
            plan = ZygotePlan(
                interpreter=interpreter,
                environment=self._environment,
                modules=self._modules,
                mark=self._mark,
                idle_seconds=self._idle_seconds,
            )
            self._zygotes[interpreter] = Zygote(plan)
        return self._zygotes[interpreter]

    def close(self) -> None:
        for zygote in self._zygotes.values():
            zygote.close()

    async def _of(self, python: Path) -> Interpreter:
        shim = await asyncio.to_thread(make_shim, self._settings.environments_folder.absolute() / ".evertick")
        return Interpreter(str(python), "", str(shim))


def _is_airflows(path: Path) -> bool:
    return path.is_file() and is_airflow_file(path.read_bytes())
