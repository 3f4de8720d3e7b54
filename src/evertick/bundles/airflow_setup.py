"""Makes a Python environment with Airflow, for DAG files of Airflow. Complete only when its marker is written, last."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from evertick.config import user_environment
from evertick.domain.errors import UserError

MARKER = "evertick-airflow.json"
# Airflow publishes for each release the versions that it was tested with.
CONSTRAINTS = "https://raw.githubusercontent.com/apache/airflow/constraints-{version}/constraints-{python}.txt"
_FETCH_SECONDS = 20.0
_VERSION = re.compile(r"3\.\d+(\.\d+)?")
_PROVIDER = re.compile(r"[a-z][a-z0-9.-]*")
_LAST_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class AirflowEnvironment:
    folder: Path
    version: str

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"


def make_environment(
    folder: Path, *, version: str, providers: tuple[str, ...], constraints: str | None, say: Callable[[str], None]
) -> AirflowEnvironment:
    """Raises UserError with the installer's own words if it cannot be made. An incomplete one is made anew."""
    if not _VERSION.fullmatch(version):
        raise UserError(f"--airflow {version!r} is not a version of Airflow 3: write 3.3 or 3.3.2.")
    if bad := [name for name in providers if not _PROVIDER.fullmatch(name)]:
        raise UserError(f"--providers: {bad[0]!r} is not a provider's name: write http,postgres,amazon.")
    if (folder / MARKER).exists():
        raise UserError(f"{folder} has an environment already. Choose another --folder, or delete it first.")
    if folder.exists() and any(folder.iterdir()) and not (folder / "pyvenv.cfg").exists():
        raise UserError(f"{folder} is not empty, and no Python environment. Choose another --folder.")
    shutil.rmtree(folder, ignore_errors=True)
    installer = _Installer(folder, say)
    installer.create()
    wanted = f"{version}.*" if version.count(".") == 1 else version
    installer.install([f"apache-airflow-core=={wanted}"])
    exact = installer.version_of("apache-airflow-core")
    listed = _constraints(folder, constraints, exact, installer.python_version(), say)
    names = {"standard", *(name.replace(".", "-").replace("_", "-") for name in providers)}
    packages = [f"apache-airflow-core=={exact}", *(f"apache-airflow-providers-{name}" for name in sorted(names))]
    installer.install(packages, listed)
    (folder / MARKER).write_text(json.dumps({"airflow": exact, "providers": sorted(names)}), encoding="utf-8")
    return AirflowEnvironment(folder=folder, version=exact)


class _Installer:
    """uv where there is one: it takes seconds where pip takes minutes."""

    def __init__(self, folder: Path, say: Callable[[str], None]) -> None:
        own = Path(sys.executable).with_name("uv")
        self._uv = str(own) if os.access(own, os.X_OK) else shutil.which("uv")
        self._folder, self._say = folder, say
        self._python = str(folder / "bin" / "python")

    def create(self) -> None:
        self._say(f"Making {self._folder} with {'uv' if self._uv else 'pip'} ...")
        if self._uv:
            self._run([self._uv, "venv", "--quiet", "--python", sys.executable, str(self._folder)])
        else:
            venv.create(self._folder, with_pip=True, symlinks=True)

    def install(self, packages: list[str], constraints: Path | None = None) -> None:
        self._say(f"Installing {' '.join(packages)} ...")
        limits = ["--constraint", str(constraints)] if constraints else []
        if self._uv:
            command = [self._uv, "pip", "install", "--quiet", "--compile-bytecode", "--python", self._python]
        else:
            command = [self._python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        self._run([*command, *limits, *packages])

    def version_of(self, package: str) -> str:
        return self._run(
            [self._python, "-I", "-c", f"from importlib.metadata import version as v; print(v({package!r}))"]
        )

    def python_version(self) -> str:
        return self._run([self._python, "-I", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"])

    def _run(self, command: list[str]) -> str:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=user_environment())
        if done.returncode != 0:
            said = "\n".join((done.stderr or done.stdout).strip().splitlines()[-_LAST_LINES:])
            raise UserError(f"The environment in {self._folder} could not be made: {said}")
        return done.stdout.strip()


def _constraints(
    folder: Path, chosen: str | None, version: str, python: str, say: Callable[[str], None]
) -> Path | None:
    if chosen == "none":
        return None
    if chosen is not None and "://" not in chosen:
        if not (path := Path(chosen)).is_file():
            raise UserError(f"--constraints: there is no file {path}.")
        return path.absolute()
    address = chosen or CONSTRAINTS.format(version=version, python=python)
    try:
        with urllib.request.urlopen(address, timeout=_FETCH_SECONDS) as answer:
            text = answer.read()
    except (OSError, ValueError) as error:
        if chosen is not None:
            raise UserError(f"--constraints: {address} cannot be fetched: {error}") from None
        say(f"The versions that Airflow published cannot be fetched ({error}); the newest that fit are installed.")
        return None
    path = folder / "constraints.txt"
    path.write_bytes(text)
    return path
