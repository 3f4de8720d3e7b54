"""The dependencies that a DAG file declares, and their lock: each package with its version and hashes.

The lock is part of the bundle, so every machine runs a version with the same packages.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evertick.domain.errors import InvalidDag

# A member of the bundle. Hidden, so that no file of the DAGs folder can have this name.
LOCK_FILE = ".evertick-lock"
# Part of an environment's name: change it when environments are built in another way.
_FORMAT = 1
# As in PEP 723.
_SCRIPT = re.compile(r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$")
_INCLUDE = re.compile(r"(?m)^\s*(?:-r|-c|--requirements?|--constraints?)[ =]+(\S+)")
_PYTHON = re.compile(r"(?m)^# python: (\d+\.\d+)$")
_DECLARATION = re.compile(r"(?m)^# declaration: ([0-9a-f]{64})$")
_OPTION = re.compile(r"--(?:index-url|extra-index-url|find-links) .+")
_CREDENTIALS = re.compile(r"(?<=://)[^/@\s]+@")
_LOCAL_LINKS = re.compile(r"--find-links (?!\w+://)(.+)")
OWN_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """Where a DAG file's dependencies are declared. `lock` is uv's own lock file next to it; `digest` identifies the
    content of both."""

    source: Path
    line: int | None
    requires_python: str
    lock: Path | None
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Lock:
    """`text` is stored in the bundle. `requirements` are the locked packages in the format of pip."""

    text: str
    python: str
    declaration: str
    requirements: str

    @property
    def key(self) -> str:
        """The name of the environment on this machine. Two DAG files with the same packages share one."""
        here = f"{sys.implementation.name} {sysconfig.get_platform()} {platform.libc_ver()[0]}"
        return hashlib.sha256(f"{_FORMAT}\n{here}\n{self.python}\n{self.requirements}".encode()).hexdigest()


def find_declaration(folder: Path, file: str) -> Declaration | None:
    """The PEP 723 block of the file, or the nearest `pyproject.toml` or `requirements.txt`, up to the DAGs folder.
    Raises InvalidDag if it cannot be read."""
    path = folder / file
    try:
        if (found := _in_script(path)) is not None:
            return found
        for place in (path.parent, *path.parent.parents):
            if (found := _in_project(place / "pyproject.toml") or _in_file(place / "requirements.txt")) is not None:
                return found
            if place == folder:
                break
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidDag(f"the dependencies of {file} cannot be read: {error}") from None
    return None


def read_lock(text: str) -> Lock:
    """Raises InvalidDag for a text that is not a lock."""
    python, declaration = _PYTHON.search(text), _DECLARATION.search(text)
    if python is None or declaration is None:
        raise InvalidDag("the lock of its dependencies is damaged. Publish the DAG file again.")
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return Lock(text=text, python=python[1], declaration=declaration[1], requirements="\n".join(lines).strip() + "\n")


def bundle_lock(place: Path) -> Lock | None:
    """The lock in an unpacked bundle; None if its DAG file declares no dependencies."""
    try:
        return read_lock((place / LOCK_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def make_lock(declaration: Declaration, *, python: str, resolved: str, default_index: str = "") -> Lock:
    """`resolved` is uv's output, without the line of its default index: a machine may have a mirror of it. Credentials of an
    index are never stored."""
    lines = [_portable(line, declaration.source.parent) for line in resolved.splitlines() if not line.startswith("#")]
    body = "\n".join(line for line in lines if line and line != default_index)
    head = f"# Dependencies declared in {declaration.source.name}, locked by Evertick\n"
    return read_lock(f"{head}# declaration: {declaration.digest}\n# python: {python}\n{body}\n")


def _portable(line: str, folder: Path) -> str:
    if not _OPTION.fullmatch(line):
        return line
    if (local := _LOCAL_LINKS.fullmatch(line)) is not None:
        return f"--find-links {(folder / local[1]).resolve()}"
    return _CREDENTIALS.sub("", line)


def _in_script(path: Path) -> Declaration | None:
    text = path.read_text(encoding="utf-8", errors="replace")
    blocks = list(_SCRIPT.finditer(text))
    if not blocks:
        return None
    line = text.count("\n", 0, blocks[-1].start()) + 1
    if len(blocks) > 1:
        message = "it has two blocks `# /// script`. Keep one, with the dependencies of both."
        raise InvalidDag(message, file=str(path), line=line)
    content = "".join(each.removeprefix("#").removeprefix(" ") for each in blocks[0]["content"].splitlines(True))
    block = _toml(content, path, line)
    lock = path.with_name(f"{path.name}.lock")
    return _declared(path, line, block.get("requires-python"), lock, content)


def _in_project(path: Path) -> Declaration | None:
    """A `pyproject.toml` that only configures tools declares nothing."""
    if not path.is_file():
        return None
    content = path.read_text(encoding="utf-8")
    project = _toml(content, path, None).get("project")
    if not isinstance(project, dict) or "dependencies" not in project:
        return None
    return _declared(path, None, project.get("requires-python"), path.with_name("uv.lock"), content)


def _in_file(path: Path) -> Declaration | None:
    if not path.is_file():
        return None
    return _declared(path, None, None, None, "\0".join(_with_includes(path, set())))


def _with_includes(path: Path, seen: set[Path]) -> Iterator[str]:
    """A requirements file and the files that it includes: a change of any of them is a change of the declaration."""
    if path in seen or not path.is_file():
        return
    seen.add(path)
    yield (content := path.read_text(encoding="utf-8"))
    for name in _INCLUDE.findall(content):
        yield from _with_includes((path.parent / name).resolve(), seen)


def _toml(content: str, path: Path, line: int | None) -> dict[str, Any]:
    try:
        return tomllib.loads(content)
    except tomllib.TOMLDecodeError as error:
        message = f"the dependencies in {path.name} are not valid TOML: {error}"
        raise InvalidDag(message, file=str(path), line=line) from None


def _declared(source: Path, line: int | None, python: object, lock: Path | None, content: str) -> Declaration:
    lock = lock if lock is not None and lock.is_file() else None
    locked = lock.read_text(encoding="utf-8") if lock is not None else ""
    digest = hashlib.sha256(f"{_FORMAT}\0{OWN_PYTHON}\0{source.name}\0{content}\0{locked}".encode()).hexdigest()
    wanted = python if isinstance(python, str) else ""
    return Declaration(source=source, line=line, requires_python=wanted, lock=lock, digest=digest)
