"""Python environments of DAG files, built by uv from locks and named by their content.

An environment is built in a temporary folder and renamed when it is complete, so no process ever uses half of one.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import evertick
from evertick.bundles import cache
from evertick.bundles.cache import MAKING, REMOVING, keep
from evertick.bundles.dependencies import OWN_PYTHON, Declaration, Lock, bundle_lock, make_lock, read_lock
from evertick.config import Settings, user_environment
from evertick.domain.errors import EnvironmentFailed, InvalidDag
from evertick.observability.logging import Log
from evertick.processes.tree import kill_tree

# An environment that was used within this time counts as in use: each runner renews its own once an hour.
IN_USE_SECONDS = 2 * cache.LOOK_SECONDS
UNUSED_SECONDS = 30 * 86_400.0
_MARKER = "evertick.json"
_OLDEST_PYTHON = (3, 11)
_BUILDS_AT_ONCE = 2
_LOCK_POLL_SECONDS = 0.05
_TOLD_SECONDS = 0.5
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 5.0, 300.0
_LONGEST_MESSAGE = 2_000
_NAME = re.compile(r"[0-9a-f]{64}")
# The same problem must have the same message each time.
_RETRIES = re.compile(r"Request failed after \d+ retr(?:y|ies)(?: in [\d.]+m?s)? cause: ")
# Evertick's modules come before those of the environment; the packages that its templates, patterns and time zones
# need come after them.
_OWN_PACKAGES = ("jinja2", "markupsafe", "regex", "tzdata")
_BOOT = (
    "import runpy, sys; _, shim, module, *rest = sys.argv; sys.argv = [module, *rest];"
    " sys.path.insert(0, shim + '/first'); sys.path.append(shim + '/last');"
    " runpy.run_module(module, run_name='__main__', alter_sys=True)"
)


class Interpreter(NamedTuple):
    """The Python of a DAG file. `environment` is its folder; without one it is Evertick's own."""

    python: str = sys.executable
    environment: str = ""
    shim: str = ""

    @property
    def exists(self) -> bool:
        """False if a person has deleted the environment."""
        return not self.environment or os.access(self.python, os.X_OK)

    def command(self, module: str, *flags: str) -> list[str]:
        """Runs a module of Evertick. `-P` keeps the working directory's files from shadowing the library's."""
        if not self.shim:
            return [self.python, "-P", *flags, "-m", module]
        return [self.python, "-P", *flags, "-c", _BOOT, self.shim, module]


class Prepared(NamedTuple):
    """What a DAG file is loaded with. `lock` is None if it declares no dependencies."""

    interpreter: Interpreter = Interpreter()
    lock: Lock | None = None


NO_DEPENDENCIES = Prepared()


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentInfo:
    """An environment on this machine. `bytes` counts files that it shares with others, too."""

    name: str
    python: str
    packages: tuple[str, ...]
    bytes: int
    built_at: float
    used_at: float


@dataclass(slots=True)
class _Failures:
    count: int
    since: float
    retry_at: float
    message: str


class Environments:
    """The environments below one folder, shared by all processes of this machine that use it."""

    def __init__(self, settings: Settings, environment: Mapping[str, str] | None = None) -> None:
        """`environment` is the environment that user code sees: uv takes its configuration from it."""
        self.folder = settings.environments_folder.absolute()
        self._seconds = settings.environment_build_seconds
        self._retry_seconds = settings.environment_retry_seconds
        self._max_bytes = int(settings.environments_max_gb * 1e9)
        self._variables = {
            "UV_CACHE_DIR": str(self.folder / ".cache"),
            "UV_PYTHON_PREFERENCE": "system",
            **(user_environment() if environment is None else environment),
            "NO_COLOR": "1",
            "UV_NO_PROGRESS": "1",
        }
        self._failures: dict[str, _Failures] = {}
        self._room = asyncio.Semaphore(_BUILDS_AT_ONCE)

    async def prepare(self, declaration: Declaration, known: Lock | None) -> Prepared:
        """Resolve the declared dependencies, unless `known` is their lock, and build the environment. Raises
        EnvironmentFailed."""
        if known is not None and known.declaration == declaration.digest:
            lock = known
        else:
            lock = await self.resolve(declaration)
        return Prepared(await self.ensure(lock), lock)

    async def ensure(self, lock: Lock, *, say: Callable[[str], None] = lambda _: None) -> Interpreter:
        """The interpreter of the lock's environment, built if it does not exist. Raises EnvironmentFailed, at once if
        a build has just failed. `say` is called with its name before a build."""
        place = self.folder / lock.key
        if await asyncio.to_thread(_is_usable, place):
            return await self._interpreter(place)
        self._check_failures(lock.key)
        try:
            async with self._room, asyncio.timeout(self._seconds), self._locked(lock.key):
                if not await asyncio.to_thread(_is_usable, place):
                    say(lock.key[:12])
                    await self._build(lock, place)
        except TimeoutError:
            message = f"it took longer than {self._seconds:g} s (EVERTICK_ENVIRONMENT_BUILD_SECONDS)"
            raise self._failed(lock.key, message) from None
        except OSError as error:
            raise self._failed(lock.key, str(error)) from None
        except EnvironmentFailed as error:
            raise self._failed(lock.key, str(error)) from None
        self._failures.pop(lock.key, None)
        return await self._interpreter(place)

    async def of_bundle(self, place: Path, *, log: Log) -> Interpreter:
        """The interpreter of an unpacked bundle, whose environment is built if it does not exist here."""
        lock = await asyncio.to_thread(bundle_lock, place)
        if lock is None:
            return Interpreter()
        started_at = time.monotonic()
        try:
            interpreter = await self.ensure(
                lock, say=lambda name: log.info("environment_build_started", environment=name)
            )
        except EnvironmentFailed as error:
            log.warning(
                "environment_failed", environment=lock.key[:12], error=error, retry_in=error.retry_after_seconds
            )
            raise
        if (seconds := time.monotonic() - started_at) > _TOLD_SECONDS:
            log.info("environment_completed", environment=lock.key[:12], seconds=round(seconds, 1))
        return interpreter

    # Resolve

    async def resolve(self, declaration: Declaration) -> Lock:
        """Choose a version of each package, once per declaration on this machine: what was validated is what is deployed.
        Raises EnvironmentFailed."""
        remembered = self.folder / ".locks" / declaration.digest
        if (lock := await asyncio.to_thread(_recall, remembered)) is not None:
            return lock
        self._check_failures(declaration.digest)
        await asyncio.to_thread(remembered.parent.mkdir, mode=0o700, parents=True, exist_ok=True)
        try:
            async with self._room, asyncio.timeout(self._seconds):
                python = await self._choose_python(declaration)
                resolved = await (
                    self._exported(declaration) if declaration.lock else self._compiled(declaration, python)
                )
                index = await self._default_index()
        except TimeoutError:
            message = f"resolving took longer than {self._seconds:g} s (EVERTICK_ENVIRONMENT_BUILD_SECONDS)"
            raise self._failed(declaration.digest, message) from None
        except EnvironmentFailed as error:
            raise self._failed(declaration.digest, str(error)) from None
        self._failures.pop(declaration.digest, None)
        lock = make_lock(declaration, python=python, resolved=resolved, default_index=index)
        await asyncio.to_thread(_write_whole, remembered, lock.text)
        return lock

    async def _choose_python(self, declaration: Declaration) -> str:
        """Evertick's own version if the declaration allows it, as `3.11`."""
        if not declaration.requires_python:
            return OWN_PYTHON
        with tempfile.TemporaryDirectory(prefix=MAKING, dir=self.folder) as folder:
            await self._uv("venv", "--no-project", "--python", declaration.requires_python, f"{folder}/env")
            version = _version_of(Path(folder, "env"))
        if version < _OLDEST_PYTHON:
            oldest = ".".join(map(str, _OLDEST_PYTHON))
            raise EnvironmentFailed(
                f"requires-python = {declaration.requires_python!r} selects Python {version[0]}.{version[1]}, and Evertick"
                f" needs {oldest} or later: allow a later version"
            )
        return f"{version[0]}.{version[1]}"

    async def _compiled(self, declaration: Declaration, python: str) -> str:
        """Evertick is excluded, because the environment sees the installed one."""
        excluded = self.folder / ".excluded"
        await asyncio.to_thread(_write_whole, excluded, "evertick\n")
        options = ["--universal", "--generate-hashes", "--no-header", "--no-annotate", "--emit-index-url"]
        options += ["--emit-find-links", "--excludes", str(excluded), "--python-version", python]
        source = declaration.source
        return await self._uv("pip", "compile", *options, source.name, folder=source.parent)

    async def _default_index(self) -> str:
        """The line that uv writes for the index that it uses when none is configured."""
        plain = {name: value for name, value in self._variables.items() if "INDEX" not in name}
        options = ["--quiet", "--no-config", "--no-header", "--emit-index-url", "-"]
        return (await self._run(_find_uv(plain), "pip", "compile", *options, variables=plain)).strip()

    async def _exported(self, declaration: Declaration) -> str:
        """The lock file that the user keeps next to the declaration decides."""
        source = declaration.source
        named = ["--script", source.name] if source.suffix == ".py" else ["--no-emit-project", "--no-dev"]
        options = ["--frozen", "--no-header", "--no-annotate", "--prune", "evertick", "--format", "requirements.txt"]
        options += ["--emit-index-url", "--emit-find-links"]
        return await self._uv("export", *options, *named, folder=source.parent)

    # Build

    async def _build(self, lock: Lock, place: Path) -> None:
        """Runs while this process holds the lock of the environment: other temporary folders of it are abandoned."""
        for old in self.folder.glob(f"{MAKING}{lock.key[:16]}-*"):
            await asyncio.to_thread(shutil.rmtree, old, ignore_errors=True)
        making = Path(tempfile.mkdtemp(prefix=f"{MAKING}{lock.key[:16]}-", dir=self.folder))
        try:
            built = making / "env"
            own = sys.executable if lock.python == OWN_PYTHON else lock.python
            await self._uv("venv", "--no-project", "--relocatable", "--python", own, str(built))
            listed = making / "requirements.txt"
            listed.write_text(lock.requirements, encoding="utf-8")
            await self._install(built, listed)
            python = await self._run(
                str(_python_of(built)), "-I", "-c", "import platform as p; print(p.python_version())"
            )
            await asyncio.to_thread(_complete, built, python.strip())
            await asyncio.to_thread(_put_in_place, built, place)
        finally:
            await asyncio.to_thread(shutil.rmtree, making, ignore_errors=True)

    async def _install(self, built: Path, listed: Path) -> None:
        """From the cache if it has everything: a package index that is down then does not matter."""
        options = ["--require-hashes", "--allow-empty-requirements", "--python", str(_python_of(built)), str(listed)]
        try:
            await self._uv("pip", "sync", "--offline", *options)
        except EnvironmentFailed:
            await self._uv("pip", "sync", *options)

    async def _uv(self, *arguments: str, folder: Path | None = None) -> str:
        return await self._run(_find_uv(self._variables), *arguments, "--quiet", folder=folder)

    async def _run(self, *command: str, folder: Path | None = None, variables: Mapping[str, str] | None = None) -> str:
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=folder or self.folder,
            env=self._variables if variables is None else variables,
            stdin=DEVNULL,
            stdout=PIPE,
            stderr=PIPE,
            start_new_session=True,
        )
        try:
            out, errors = await process.communicate()
        finally:
            if process.returncode is None:
                kill_tree(process.pid)
                await process.wait()
        if process.returncode != 0:
            raise EnvironmentFailed(_what_uv_said(errors.decode(errors="replace")) or f"{command[0]} failed")
        return out.decode()

    @asynccontextmanager
    async def _locked(self, key: str) -> AsyncIterator[None]:
        """One process of this machine at a time builds an environment. The lock ends with its process."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(self.folder / f".lock-{key[:2]}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while True:
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(fd)

    # Failures

    def _check_failures(self, key: str) -> None:
        failed = self._failures.get(key)
        if failed is not None and time.monotonic() < failed.retry_at:
            raise self._error(failed)

    def _failed(self, key: str, message: str) -> EnvironmentFailed:
        now = time.monotonic()
        failed = self._failures.setdefault(key, _Failures(0, now, now, message))
        pause = min(_LONGEST_PAUSE_SECONDS, _FIRST_PAUSE_SECONDS * 2**failed.count)
        failed.count, failed.retry_at, failed.message = min(failed.count + 1, 10), now + pause, message
        return self._error(failed)

    def _error(self, failed: _Failures) -> EnvironmentFailed:
        now = time.monotonic()
        pause, is_lasting = max(0.0, failed.retry_at - now), now - failed.since > self._retry_seconds
        return EnvironmentFailed(failed.message, retry_after_seconds=pause, is_lasting=is_lasting)

    # Use and removal

    async def _interpreter(self, place: Path) -> Interpreter:
        shim = await asyncio.to_thread(make_shim, self.folder / ".evertick")
        return Interpreter(str(_python_of(place)), str(place), str(shim))

    def all(self) -> list[EnvironmentInfo]:
        """The most recently used first."""
        found = [_info(place) for place in self._places()]
        return sorted((info for info in found if info is not None), key=lambda info: -info.used_at)

    def size(self) -> int:
        """The bytes of everything below the folder: environments share files with the cache and with each other."""
        seen: dict[tuple[int, int], int] = {}
        for root, _, names in os.walk(self.folder):
            for name in names:
                with suppress(OSError):
                    stat = os.lstat(os.path.join(root, name))  # noqa: PTH118  twice as fast, for 100,000 files
                    seen[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
        return sum(seen.values())

    def prune(self, in_use: Iterable[str] = (), *, unused_seconds: float | None = None) -> list[str]:
        """Remove environments that were not used for this long, or by default for a month; then the least recently used ones
        above the disk limit. Never removes one that is in use. Returns the names of the removed ones."""
        if not self.folder.is_dir():
            return []
        oldest = UNUSED_SECONDS if unused_seconds is None else max(unused_seconds, IN_USE_SECONDS)
        gone = cache.remove_unused(self.folder, in_use=in_use, unused_seconds=oldest)
        gone = [name for name in gone if _NAME.fullmatch(name)]
        for lock in (self.folder / ".locks").glob("*"):
            with suppress(FileNotFoundError):
                if time.time() - lock.stat().st_mtime > UNUSED_SECONDS:
                    lock.unlink()
        if self.is_full():
            self._clean_cache()
            for info in reversed(self.all()):
                if not self.is_full() or time.time() - info.used_at < IN_USE_SECONDS:
                    break
                removed = cache.remove(self.folder / info.name, IN_USE_SECONDS)
                gone += [info.name] if removed else []
        return gone

    def is_full(self) -> bool:
        return self.size() > self._max_bytes

    def _clean_cache(self) -> None:
        """Environments keep their files. uv uses a lock of its own against builds that run."""
        with suppress(EnvironmentFailed, OSError, subprocess.TimeoutExpired):
            command = [_find_uv(self._variables), "cache", "clean", "--quiet"]
            subprocess.run(command, env=self._variables, capture_output=True, check=False, timeout=self._seconds)

    def _places(self) -> list[Path]:
        return [each for each in self.folder.iterdir() if _NAME.fullmatch(each.name)] if self.folder.is_dir() else []


def make_shim(folder: Path) -> Path:
    """A folder with links to Evertick and its few packages, so that an environment sees these alone. Named by their
    places: another release of Evertick has its own."""
    links = {"first/evertick": str(Path(evertick.__file__).parent)}
    for name in _OWN_PACKAGES:
        spec = find_spec(name)
        if spec is not None and spec.submodule_search_locations:
            links[f"last/{name}"] = str(next(iter(spec.submodule_search_locations)))
    target = folder / hashlib.sha256(json.dumps(links, sort_keys=True).encode()).hexdigest()[:16]
    if target.is_dir():
        return target
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=MAKING, dir=folder))
    for link, to in links.items():
        (making / link).parent.mkdir(exist_ok=True)
        (making / link).symlink_to(to)
    try:
        making.rename(target)
    except OSError:  # another process was first, with the same links
        shutil.rmtree(making, ignore_errors=True)
    return target


def _python_of(place: Path) -> Path:
    return place / "bin" / "python"


def _write_whole(path: Path, text: str) -> None:
    """No process ever reads half of it."""
    fd, name = tempfile.mkstemp(prefix=MAKING, dir=path.parent)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(fd)
    Path(name).rename(path)


def _recall(path: Path) -> Lock | None:
    with suppress(OSError, InvalidDag):
        lock = read_lock(path.read_text(encoding="utf-8"))
        os.utime(path)
        return lock
    return None


def _version_of(place: Path) -> tuple[int, int]:
    found = re.search(r"(?m)^version_info = (\d+)\.(\d+)", (place / "pyvenv.cfg").read_text(encoding="utf-8"))
    return (int(found[1]), int(found[2])) if found else (0, 0)


def _put_in_place(built: Path, place: Path) -> None:
    if place.exists():  # its interpreter is gone
        gone = Path(tempfile.mkdtemp(prefix=REMOVING, dir=place.parent))
        place.rename(gone / "env")
        shutil.rmtree(gone, ignore_errors=True)
    built.rename(place)


def _is_usable(place: Path) -> bool:
    """Whether it is complete, and the interpreter that it was built with still exists. Then it counts as used."""
    return (place / _MARKER).is_file() and os.access(_python_of(place), os.X_OK) and keep(place)


def _complete(built: Path, python: str) -> None:
    """Write the marker last, after everything else is on disk: a power failure must not leave a folder that looks
    complete."""
    size = sum(path.lstat().st_size for path in built.rglob("*"))
    installed = (path.name.removesuffix(".dist-info") for path in built.glob("lib/*/site-packages/*.dist-info"))
    packages = sorted(" ".join(name.rsplit("-", 1)).replace("_", "-") for name in installed)
    os.sync()
    with (built / _MARKER).open("w", encoding="utf-8") as marker:
        found = {"python": python, "packages": packages, "bytes": size}
        json.dump({**found, "built_at": time.time()}, marker)
        marker.flush()
        os.fsync(marker.fileno())


def _info(place: Path) -> EnvironmentInfo | None:
    try:
        told = json.loads((place / _MARKER).read_text(encoding="utf-8"))
        return EnvironmentInfo(
            name=place.name,
            python=str(told["python"]),
            packages=tuple(map(str, told["packages"])),
            bytes=int(told["bytes"]),
            built_at=float(told["built_at"]),
            used_at=place.stat().st_mtime,
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _find_uv(variables: Mapping[str, str]) -> str:
    """The uv that is installed with Evertick, or the one on the PATH."""
    own = Path(sys.executable).with_name("uv")
    found = str(own) if os.access(own, os.X_OK) else shutil.which("uv", path=variables.get("PATH"))
    if found is None:
        raise EnvironmentFailed("uv is not installed here: install it with `pip install 'evertick[envs]'`")
    return found


def _what_uv_said(errors: str) -> str:
    """The error without warnings that came before it, on one line."""
    lines = errors.splitlines()
    first = next((at for at, line in enumerate(lines) if line.startswith(("error:", "×"))), 0)
    text = " ".join(" ".join(lines[first:]).split()).removeprefix("error: ")
    text = _RETRIES.sub("", text)
    return text if len(text) <= _LONGEST_MESSAGE else text[: _LONGEST_MESSAGE - 1] + "…"
