"""`evertick envs`: list, build and prune the Python environments of this machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from evertick.bundles.dependencies import Lock, find_declaration
from evertick.bundles.environments import EnvironmentInfo, Environments
from evertick.cli.app import Group
from evertick.cli.options import Json, duration, noun
from evertick.cli.output import Cell, console, hint, line, print_json, show, table
from evertick.client.local import database_url, opened
from evertick.config import read_settings, user_environment
from evertick.db.connect import Purpose
from evertick.db.queries import dags
from evertick.domain.deployments import DEFAULT
from evertick.domain.durations import length, relative
from evertick.domain.errors import EnvironmentFailed, InvalidDag, UserError
from evertick.publisher.publisher import find_dag_files, published_lock

app = Group()

_SHOWN_PACKAGES = 4

Source = Annotated[
    Path | None,
    typer.Argument(
        metavar="[PATH]", help="A DAG file, or a folder of them; by default the DAG versions that are published now."
    ),
]
Unused = Annotated[
    float | None, duration("--unused", "Also remove environments without use for this long; by default for 30 days.")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Built:
    """The result for one environment. `problem` is why it could not be built."""

    name: str
    files: tuple[str, ...]
    seconds: float
    is_new: bool
    problem: str | None = None


@app.command("list", epilog="Example: evertick envs list")
def list_command(as_json: Json = False) -> None:
    """List the environments of this machine: Python, packages, size and last use, the most recently used first."""
    environments = _environments()
    found, size = environments.all(), environments.size()
    limit = read_settings().environments_max_gb * 1e9
    if as_json:
        listed = [_document(info) for info in found]
        return print_json({"environments": listed, "total_bytes": size, "max_bytes": int(limit)})
    if found:
        show(table(("NAME", "PYTHON", "#SIZE", "LAST USE", "PACKAGES"), map(_cells, found)))
        show(hint(f"{_size(size)} on disk with the package cache, of {_size(limit)} (EVERTICK_ENVIRONMENTS_MAX_GB)"))
    else:
        show(
            hint(
                "No environments yet. A DAG file that declares dependencies has one: see `evertick envs build --help`."
            )
        )


@app.command("build", epilog="Example: evertick envs build dags/etl.py")
def build_command(path: Source = None, as_json: Json = False) -> None:
    """Build environments now, instead of before the first task that needs them. Exit status 1 if one cannot be built."""
    built = asyncio.run(_build(path, is_quiet=as_json))
    if as_json:
        print_json({"environments": built})
    elif not built:
        show(hint("No DAG file declares dependencies of its own."))
    for each in () if as_json else built:
        files = ", ".join(each.files)
        if each.problem is not None:
            show(line(f"failed {files}: {each.problem}", "red"))
        else:
            done = f"built in {length(each.seconds)}" if each.is_new else "exists"
            show(line(f"ok {files}: {each.name[:12]} {done}", "green"))
    if any(each.problem is not None for each in built):
        raise typer.Exit(1)


@app.command("prune", epilog="Example: evertick envs prune --unused 7d")
def prune_command(unused: Unused = None, as_json: Json = False) -> None:
    """Remove environments that are no longer used, and the least recently used ones above the disk limit.

    One that was used in the last two hours counts as in use, and is kept.
    """
    environments = _environments()
    before = environments.size()
    gone = environments.prune(unused_seconds=unused)
    after = environments.size()
    if as_json:
        return print_json({"removed": gone, "freed_bytes": before - after, "total_bytes": after})
    show(line(f"Removed {noun(len(gone), 'environment')}; {_size(before - after)} freed, {_size(after)} left."))


async def _build(path: Path | None, *, is_quiet: bool) -> list[Built]:
    environments = _environments()
    found = await (_published() if path is None else _declared(path, environments, is_quiet=is_quiet))
    by_name: dict[str, list[str]] = {}
    for file, lock in found.items():
        if isinstance(lock, Lock):
            by_name.setdefault(lock.key, []).append(file)
    locks = {lock.key: lock for lock in found.values() if isinstance(lock, Lock)}
    built = [
        Built(name="", files=(file,), seconds=0, is_new=False, problem=lock)
        for file, lock in found.items()
        if isinstance(lock, str)
    ]
    for name, files in by_name.items():
        built.append(await _build_one(environments, locks[name], tuple(files), is_quiet=is_quiet))
    return built


async def _build_one(environments: Environments, lock: Lock, files: tuple[str, ...], *, is_quiet: bool) -> Built:
    started_at, said = time.monotonic(), list[str]()
    problem = None
    with _progress(f"Building the environment of {', '.join(files)} ...", is_quiet=is_quiet):
        try:
            await environments.ensure(lock, say=said.append)
        except EnvironmentFailed as error:
            problem = str(error)
    seconds = round(time.monotonic() - started_at, 3)
    return Built(name=lock.key, files=files, seconds=seconds, is_new=bool(said), problem=problem)


async def _published() -> Mapping[str, Lock | str]:
    """The locks of the current DAG versions, by file."""
    found: dict[str, Lock | str] = {}
    async with opened(database_url(read_settings()), Purpose.READ) as conn:
        for name, file in sorted({(row.deployment, row.file) for row in await dags.files(conn, None)}):
            if (lock := await published_lock(conn, name, file)) is not None:
                found[file if name == DEFAULT else f"{name}/{file}"] = lock
    return found


async def _declared(path: Path, environments: Environments, *, is_quiet: bool) -> Mapping[str, Lock | str]:
    """The locks of DAG files, resolved now; or why one could not be resolved."""
    folder, files = _files(path)
    found: dict[str, Lock | str] = {}
    for file in files:
        with _progress(f"Resolving the dependencies of {file} ...", is_quiet=is_quiet):
            try:
                if (declaration := find_declaration(folder, file)) is not None:
                    found[file] = await environments.resolve(declaration)
            except (EnvironmentFailed, InvalidDag) as error:
                found[file] = str(error)
    return found


def _files(path: Path) -> tuple[Path, list[str]]:
    if path.is_dir():
        return path.resolve(), find_dag_files(path)
    if not path.is_file():
        raise UserError(f"There is no file or folder {path}.")
    root = read_settings().dags_folder.resolve()
    folder = root if path.resolve().is_relative_to(root) else path.resolve().parent
    return folder, [str(path.resolve().relative_to(folder))]


def _environments() -> Environments:
    return Environments(read_settings(), user_environment())


def _progress(text: str, *, is_quiet: bool) -> AbstractContextManager[object]:
    return nullcontext() if is_quiet else console().status(text)


def _cells(info: EnvironmentInfo) -> list[Cell]:
    packages = ", ".join(info.packages[:_SHOWN_PACKAGES]) + (", …" if len(info.packages) > _SHOWN_PACKAGES else "")
    used = relative(datetime.fromtimestamp(info.used_at, UTC), datetime.now(UTC))
    return [info.name[:12], info.python, _size(info.bytes), used, packages or None]


def _document(info: EnvironmentInfo) -> dict[str, object]:
    moments = {name: datetime.fromtimestamp(getattr(info, name), UTC) for name in ("built_at", "used_at")}
    return {"name": info.name, "python": info.python, "packages": info.packages, "bytes": info.bytes, **moments}


def _size(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"
