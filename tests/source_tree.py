"""Python source as trees, for the tests that check how the house is kept. Reads files; decides nothing."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "evertick"


@dataclass(frozen=True, kw_only=True)
class Module:
    """One source file. `name` is its path inside the package without the ending."""

    path: Path
    name: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        """Parsed when it is needed: the tests have twice as much text as the program."""
        return ast.parse(self.text)

    @property
    def layer(self) -> str:
        return self.name.split("/")[0]


class Place(NamedTuple):
    """A node and the function that it stands in, as `module.Class.function`; at the top it is the module alone. Half a million of
    them are made."""

    module: Module
    function: str
    node: ast.AST

    def __str__(self) -> str:
        return f"{self.module.path.relative_to(ROOT)}:{getattr(self.node, 'lineno', 1)} ({self.function})"


def read(path: Path, root: Path) -> Module:
    text = path.read_text(encoding="utf-8")
    name = str(path.relative_to(root).with_suffix(""))
    return Module(path=path, name=name, text=text)


@cache
def modules(directory: Path) -> list[Module]:
    return [read(path, directory) for path in sorted(directory.rglob("*.py"))]


def places(module: Module) -> list[Place]:
    """Every node of a module with the outermost function (or method) that holds it."""
    found: list[Place] = []
    _add_places(found, module, module.tree, module.name, in_function=False)
    return found


def _add_places(found: list[Place], module: Module, node: ast.AST, where: str, *, in_function: bool) -> None:
    for child in ast.iter_child_nodes(node):
        inside, is_function = where, in_function
        match child:
            case ast.expr_context() | ast.operator() | ast.cmpop():
                continue
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() if not in_function:
                inside, is_function = f"{where}.{child.name}", not isinstance(child, ast.ClassDef)
        found.append(Place(module, inside, child))
        _add_places(found, module, child, inside, in_function=is_function)
