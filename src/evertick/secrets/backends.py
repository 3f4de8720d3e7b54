"""Provides the variables, connections and secrets that tasks declare, each from the first backend that has it.

A backend is `store` (the database), `env` (EVERTICK_SECRET__NAME of the runner), `files:/folder` (one file per name), the
URL of a secret manager, the name of an extension, or `module:factory`. An object's `get(kind, name)` returns text or None.
Values are not cached between attempts, except for a minute those of a secret manager.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from psycopg import AsyncConnection

from evertick.config import Settings, value_from_environment
from evertick.db.queries.secrets import AttemptHolder
from evertick.domain.dags.spec import TaskSpec
from evertick.domain.errors import EvertickError, InvalidSettings, NotFound
from evertick.domain.stored_values import LONGEST_VALUE, ValueKind
from evertick.extensions import ExtensionKind, extension_names, find_extension
from evertick.secrets.managers import is_manager, open_manager

ASK_SECONDS = 10.0
MOST_THREADS = 4
Wanted = tuple[str, str]
Connect = Callable[[], Awaitable[AsyncConnection]]
# Reads the wanted values that are stored, as the backend `store`.
ReadStored = Callable[[list[Wanted]], Awaitable[dict[Wanted, str]]]


class Backend(Protocol):
    """The interface of a backend of your own: `get("secret", "db")` returns the value, or None if it has none."""

    def get(self, kind: str, name: str) -> str | None: ...


class _Files:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, kind: str, name: str) -> str | None:
        """`folder/secret/db`, or `folder/db` for a secret, which is how containers mount them."""
        places = [self._folder / kind / name, *([self._folder / name] if kind == ValueKind.SECRET else [])]
        for place in places:
            if place.is_file() and place.resolve().stat().st_size <= LONGEST_VALUE:
                return place.read_text(encoding="utf-8").rstrip("\r\n")
        return None


class _Environment:
    def get(self, kind: str, name: str) -> str | None:
        return value_from_environment(kind, name)


def open_backends(names: tuple[str, ...]) -> list[Backend | None]:
    """The backends in order; None is the database. Raises InvalidSettings if one cannot be opened."""
    return [_open(name) for name in names]


def _open(name: str) -> Backend | None:
    if name == "store":
        return None
    if name == "env":
        return _Environment()
    if name.startswith("files:"):
        return _Files(Path(name.removeprefix("files:")))
    module, _, factory = name.partition(":")
    try:
        if is_manager(name):
            return open_manager(name)
        made: Any = getattr(import_module(module), factory) if factory else _extension(name)
        backend: Backend = made()
        if not callable(getattr(backend, "get", None)):
            raise TypeError("the factory's object has no get(kind, name)")
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        raise InvalidSettings(
            f"EVERTICK_SECRETS_BACKENDS: {name!r} is neither store, env, files:FOLDER nor a module:factory that works ({error})."
        ) from None
    return backend


def _extension(name: str) -> object:
    found = find_extension(ExtensionKind.SECRETS_BACKEND, name)
    if found is None:
        installed = ", ".join(extension_names(ExtensionKind.SECRETS_BACKEND)) or "none"
        raise ValueError(f"no installed package has a secrets backend of this name; installed: {installed}")
    return found


def needs_grants(task: TaskSpec) -> bool:
    return bool(task.secrets or task.connections or task.variables)


class SecretProvider:
    """The secret provider of one runner."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._backends = open_backends(settings.secrets_backends)
        self._threads = ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="secrets")

    async def of_task(self, read: ReadStored, task: TaskSpec) -> str:
        """The values as the attempt's process reads them. Empty, at no cost, for a task that declares none."""
        if not needs_grants(task):
            return ""
        wanted: list[Wanted] = [(ValueKind.SECRET, name) for name in task.secrets]
        wanted += [(ValueKind.CONNECTION, name) for name in task.connections]
        wanted += [(ValueKind.VARIABLE, name) for name in task.variables]
        given: dict[str, dict[str, str]] = {kind: {} for kind in ValueKind}
        for (kind, name), value in (await self.values(read, wanted)).items():
            given[kind][name] = value
        return json.dumps(given)

    async def values(self, read: ReadStored, wanted: list[Wanted]) -> dict[Wanted, str]:
        """All wanted values; NotFound if no backend has one of them."""
        found = await self.found(read, wanted)
        if missing := [each for each in wanted if each not in found]:
            kind, name = missing[0]
            raise NotFound(f"{kind} {name!r} is not set: give it a value with `evertick {kind}s set {name}`.")
        return found

    async def found(self, read: ReadStored, wanted: list[Wanted]) -> dict[Wanted, str]:
        """Those of the wanted values that a backend has."""
        found: dict[Wanted, str] = {}
        for backend in self._backends:
            missing = [each for each in wanted if each not in found]
            if missing:
                found |= await (self._ask(backend, missing) if backend else read(missing))
        return found

    def stored(self, connect: Connect, holder: AttemptHolder | None = None) -> ReadStored:
        """Reads from the database. To the holder of an attempt it returns the values that its task declares."""
        return partial(self._read, connect, holder)

    async def _read(self, connect: Connect, holder: AttemptHolder | None, wanted: list[Wanted]) -> dict[Wanted, str]:
        from evertick.engine.secrets import read_values
        from evertick.secrets.keyring import load_keyring

        return await read_values(await connect(), load_keyring(self._settings), wanted, holder)

    async def _ask(self, backend: Backend, wanted: list[Wanted]) -> dict[Wanted, str]:
        """Ask in dedicated threads with a timeout: a backend that hangs must not block the other users of threads."""

        def ask() -> dict[Wanted, str]:
            answers = {(kind, name): backend.get(kind, name) for kind, name in wanted}
            return {each: value for each, value in answers.items() if value is not None}

        name = type(backend).__name__
        try:
            asked = asyncio.get_running_loop().run_in_executor(self._threads, ask)
            async with asyncio.timeout(ASK_SECONDS):
                return await asked
        except TimeoutError:
            raise EvertickError(f"the secrets backend {name} did not answer within {ASK_SECONDS:g} s") from None
        except Exception as error:
            # Its message may quote a secret; the error's type is enough to find the cause in the backend's own log.
            raise EvertickError(f"the secrets backend {name} failed: {type(error).__name__}") from None
