"""The module closure of a DAG file: the files of the DAGs folder that it imports, anywhere in the code, and their
imports.

Reads source text; never imports it. Names that lead outside the folder are third-party packages.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

MAX_MODULES = 5_000


def find_closure(folder: Path, file: str, loaded: Iterable[str] = ()) -> tuple[str, ...]:
    """The Python files, relative to the folder and sorted: `file`, its imports, and `loaded` with theirs."""
    waiting = [file, *loaded]
    found: dict[str, None] = {}
    while waiting and len(found) < MAX_MODULES:
        path = waiting.pop()
        if path in found or not (folder / path).is_file():
            continue
        found[path] = None
        for name in _imported_names(folder, path):
            waiting += _files_of(folder, name)
    return tuple(sorted(found))


def _imported_names(folder: Path, path: str) -> Iterator[tuple[str, ...]]:
    try:
        tree = ast.parse((folder / path).read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    package = PurePosixPath(path).parts[:-1]
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (tuple(alias.name.split(".")) for alias in node.names)
            case ast.ImportFrom():
                yield from _from_names(node, package)
            case ast.Call(
                func=ast.Name(id=called) | ast.Attribute(attr=called), args=[ast.Constant(value=str(name)), *_]
            ):
                if called in ("import_module", "__import__"):
                    yield tuple(name.split("."))


def _from_names(node: ast.ImportFrom, package: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """`from a.b import c` may name the module a.b.c, or something in a.b: both are searched."""
    if node.level > len(package) + 1:
        return
    start = package[: len(package) - node.level + 1] if node.level else ()
    module = (*start, *(node.module.split(".") if node.module else ()))
    for alias in node.names:
        yield (*module, alias.name)


def _files_of(folder: Path, name: tuple[str, ...]) -> Iterator[str]:
    """The files that importing a dotted name executes: the `__init__.py` of each package on the path, and the module."""
    for depth in range(1, len(name) + 1):
        stem = "/".join(name[:depth])
        for candidate in (f"{stem}/__init__.py", f"{stem}.py"):
            if (folder / candidate).is_file():
                yield candidate
                break
