"""Renames methods and attributes by the types that mypy infers: `Class.old = new` in `map.toml`. Deleted when the redesign is done.

python tools/rename/members.py           rewrites src, tests and bench in place
"""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from pathlib import Path

from mypy import build
from mypy.find_sources import create_source_list
from mypy.nodes import MemberExpr, MypyFile, RefExpr, TypeInfo
from mypy.options import Options
from mypy.traverser import TraverserVisitor
from mypy.types import (
    CallableType,
    Instance,
    NoneType,
    TupleType,
    Type,
    TypeType,
    TypeVarType,
    UnionType,
    get_proper_type,
)

ROOT = Path.cwd()
MAP: dict[str, dict[str, str]] = {}
for _key, _new in tomllib.loads((Path(__file__).parent / "map.toml").read_text(encoding="utf-8"))["members"].items():
    _class, _, _old = _key.partition(".")
    MAP.setdefault(_class, {})[_old] = _new
FOUND: dict[Path, set[tuple[int, int, str, str]]] = {}


def infos(kind: Type | None) -> list[TypeInfo]:
    kind = get_proper_type(kind)
    if isinstance(kind, Instance):
        return [kind.type]
    if isinstance(kind, UnionType):
        return [each for item in kind.items for each in infos(item)]
    if isinstance(kind, TypeType):
        return infos(kind.item)
    if isinstance(kind, TupleType):
        return [kind.partial_fallback.type]
    if isinstance(kind, TypeVarType):
        return infos(kind.upper_bound)
    if isinstance(kind, CallableType) and kind.is_type_obj():
        return infos(kind.ret_type)
    if isinstance(kind, NoneType):
        return []
    return []


def renamed(kinds: list[TypeInfo], name: str) -> str | None:
    for kind in kinds:
        for base in kind.mro:
            if base.fullname.startswith(("evertick.", "tests.", "bench.")) and name in MAP.get(base.name, {}):
                return MAP[base.name][name]
    return None


class Finder(TraverserVisitor):
    def __init__(self, path: Path, types: dict) -> None:
        self.path, self.types = path, types

    def visit_member_expr(self, node: MemberExpr) -> None:
        super().visit_member_expr(node)
        kinds = infos(self.types.get(node.expr))
        if not kinds and isinstance(node.expr, RefExpr) and isinstance(node.expr.node, TypeInfo):
            kinds = [node.expr.node]
        new = renamed(kinds, node.name)
        if new is not None and node.end_line is not None and node.end_column is not None:
            FOUND.setdefault(self.path, set()).add((node.end_line, node.end_column - len(node.name), node.name, new))


def definitions(path: Path) -> None:
    """Fields, methods and keyword arguments of the classes in the map."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    lines = path.read_text(encoding="utf-8").splitlines()
    found = FOUND.setdefault(path, set())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [node.name, *(getattr(b, "id", getattr(b, "attr", "")) for b in node.bases)]
            table = {k: v for base in bases for k, v in MAP.get(base, {}).items()}
            for each in node.body if table else []:
                if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and each.name in table:
                    column = re.compile(r"(?:async\s+)?def\s+").match(lines[each.lineno - 1], each.col_offset).end()
                    found.add((each.lineno, column, each.name, table[each.name]))
                elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and each.target.id in table:
                    found.add((each.lineno, each.col_offset, each.target.id, table[each.target.id]))
                elif isinstance(each, ast.Assign):
                    for target in each.targets:
                        if isinstance(target, ast.Name) and target.id in table:
                            found.add((target.lineno, target.col_offset, target.id, table[target.id]))
        elif isinstance(node, ast.Call):
            table = MAP.get(getattr(node.func, "id", getattr(node.func, "attr", "")), {})
            for keyword in node.keywords:
                if keyword.arg in table:
                    found.add((keyword.lineno, keyword.col_offset, keyword.arg, table[keyword.arg]))


def apply() -> None:
    for path, edits in FOUND.items():
        if not edits:
            continue
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        for number, column, old, new in sorted(edits, reverse=True):
            raw = lines[number - 1].encode()
            if raw[column : column + len(old)] != old.encode():
                print("?", path, number, old, lines[number - 1].strip()[:100])
                continue
            lines[number - 1] = (raw[:column] + new.encode() + raw[column + len(old) :]).decode()
        path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    options = Options()
    options.python_version = (3, 11)
    options.export_types = True
    options.preserve_asts = True
    options.check_untyped_defs = True
    options.ignore_missing_imports = True
    options.incremental = False
    options.namespace_packages = True
    options.mypy_path = [str(ROOT / "src")]
    sources = create_source_list([str(ROOT / "src/evertick"), str(ROOT / "tests"), str(ROOT / "bench")], options)
    result = build.build(sources, options)
    print(len(result.errors), "errors")
    for state in result.graph.values():
        tree: MypyFile | None = state.tree
        if tree is None or not tree.path or not Path(tree.path).resolve().is_relative_to(ROOT):
            continue
        if tree.path.endswith(".py") and ".venv" not in tree.path:
            tree.accept(Finder(Path(tree.path).resolve(), result.types))
    for folder in ("src", "tests", "bench"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            definitions(path.resolve())
    apply()
    print(sum(len(each) for each in FOUND.values()), "places")


if __name__ == "__main__":
    sys.exit(main())
