"""Applies `map.toml`: moves and merges modules, renames symbols, and rewrites every reference. Deleted when the redesign is done.

python tools/rename/apply.py --check     lists names that collide where modules merge
python tools/rename/apply.py             rewrites src, tests, tools, bench, docs and deploy in place
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
import tomllib
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
ROOT = Path.cwd()
PACKAGES = {
    "evertick": ROOT / "src" / "evertick",
    "tests": ROOT / "tests",
    "bench": ROOT / "bench",
    "tools": ROOT / "tools",
}
BUILTIN_SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def load_map() -> tuple[dict[str, str], dict[str, list[str]], dict[tuple[str, str], str]]:
    """Module → new module (dotted); new module → its old ones; (module, symbol) → new symbol."""
    data = tomllib.loads((HERE / "map.toml").read_text(encoding="utf-8"))
    moves: dict[str, str] = {}
    merged: dict[str, list[str]] = defaultdict(list)
    for table, top in (("modules", "evertick"), ("tests", "tests")):
        for new, olds in data[table].items():
            new_dotted = f"{top}.{new.replace('/', '.')}"
            for old in olds:
                old_dotted = f"{top}.{old.replace('/', '.')}"
                path = PACKAGES[top] / f"{old}.py"
                if path.is_file():
                    moves[old_dotted] = new_dotted
                    merged[new_dotted].append(old_dotted)
    symbols = {}
    for old, new in data["symbols"].items():
        module, _, name = old.partition(":")
        symbols[f"evertick.{module.replace('/', '.')}", name] = new
    return moves, dict(merged), symbols


MOVES, MERGED, SYMBOLS = load_map()
STATEMENTS: dict[str, str] = tomllib.loads((HERE / "map.toml").read_text(encoding="utf-8"))["statements"]


def dotted(path: Path) -> str:
    for top, folder in PACKAGES.items():
        if path.is_relative_to(folder):
            parts = path.relative_to(folder).with_suffix("").parts
            parts = parts[:-1] if parts and parts[-1] == "__init__" else parts
            return ".".join((top, *parts))
    return path.stem


def new_module(name: str) -> str:
    return MOVES.get(name, name)


class Source:
    """One file, its tree, and the edits to make in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = dotted(path)
        self.text = path.read_text(encoding="utf-8")
        self.tree = ast.parse(self.text)
        self.lines = self.text.encode().splitlines(keepends=True)
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line))
        self.edits: list[tuple[int, int, str]] = []

    def at(self, line: int, column: int) -> int:
        return self.starts[line - 1] + column

    def span(self, node: ast.AST) -> tuple[int, int]:
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def edit(self, start: int, end: int, text: str) -> None:
        self.edits.append((start, end, text))

    def result(self) -> str:
        raw = self.text.encode()
        out, at = [], 0
        for start, end, text in sorted(set(self.edits)):
            if start < at:
                raise SystemExit(f"{self.path}: edits overlap at {raw[start - 40 : end + 40]!r}")
            out += [raw[at:start], text.encode()]
            at = end
        return b"".join([*out, raw[at:]]).decode()


MODULES: dict[str, Path] = {}
for _folder in PACKAGES.values():
    for _path in sorted(_folder.rglob("*.py")):
        MODULES[dotted(_path)] = _path


def origins() -> dict[str, dict[str, tuple[str, str]]]:
    """Module → name that it imports from another module of ours → where that name is defined."""
    found: dict[str, dict[str, tuple[str, str]]] = defaultdict(dict)
    for name, path in MODULES.items():
        if path.name != "__init__.py":
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if (
                    isinstance(node, ast.ImportFrom)
                    and node.module
                    and node.module.split(".")[0] in PACKAGES
                    and not node.level
                ):
                    for alias in node.names:
                        if alias.asname is None and f"{node.module}.{alias.name}" not in MODULES:
                            found[name][alias.name] = (node.module, alias.name)
    return found


ORIGINS = origins()


def target_of(module: str, name: str) -> tuple[str, str | None]:
    """The new (module, symbol) of what `from module import name` brings; symbol None means that it is a module."""
    full = f"{module}.{name}"
    while full not in MODULES and (origin := ORIGINS.get(module, {}).get(name)):
        module, name = origin
        full = f"{module}.{name}"
    if full in MODULES and (module not in MODULES or MODULES[module].name == "__init__.py"):
        return new_module(full), None
    return new_module(module), SYMBOLS.get((module, name), name)


def aliased() -> set[tuple[str, str]]:
    """(new file, new module of queries) where another module with the same last name is imported, too."""
    seen: dict[tuple[str, str], set[str]] = defaultdict(set)
    for name, path in MODULES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for each in node.names:
                    to, symbol = target_of(node.module, each.name)
                    if symbol is None and (each.asname is None or each.asname == to.rpartition(".")[2]):
                        seen[new_module(name), to.rpartition(".")[2]].add(to)
    return {
        (name, to) for (name, _), targets in seen.items() if len(targets) > 1 for to in targets if ".queries." in to
    }


def bound_names(node: ast.AST) -> set[str]:
    """Names that a function binds in its own scope."""
    names: set[str] = set()
    unbound: set[str] = set()

    def visit(child: ast.AST) -> None:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(child.name)
            for each in child.decorator_list:
                visit(each)
            return
        if isinstance(child, ast.Lambda):
            return
        if isinstance(child, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            for inner in ast.walk(child):
                if isinstance(inner, ast.NamedExpr):
                    names.add(inner.target.id)
            return
        if isinstance(child, ast.Name) and isinstance(child.ctx, ast.Store | ast.Del):
            names.add(child.id)
        elif isinstance(child, ast.Import | ast.ImportFrom):
            for alias in child.names:
                names.add(alias.asname or alias.name.split(".")[0])
        elif (isinstance(child, ast.ExceptHandler) and child.name) or (
            isinstance(child, ast.MatchAs | ast.MatchStar) and child.name
        ):
            names.add(child.name)
        elif isinstance(child, ast.MatchMapping) and child.rest:
            names.add(child.rest)
        elif isinstance(child, ast.Global | ast.Nonlocal):
            unbound.update(child.names)
        for each in ast.iter_child_nodes(child):
            visit(each)

    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
        arguments = node.args
        for each in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg):
            if each is not None:
                names.add(each.arg)
        for each in node.body if isinstance(node.body, list) else [node.body]:
            visit(each)
    else:  # comprehension
        for generator in node.generators:
            for inner in ast.walk(generator.target):
                if isinstance(inner, ast.Name):
                    names.add(inner.id)
    return names - unbound


ALIASED = aliased()


class Rewriter:
    """Collects the edits of one file."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.module = source.name
        self.new = new_module(self.module)
        # local name at module scope → (new module, new symbol or None, new local name)
        self.bindings: dict[str, tuple[str, str | None, str]] = {}
        self.problems: list[str] = []
        self.late: list[tuple[ast.AST, dict[str, tuple[str, str | None, str]]]] = []

    def run(self) -> None:
        tree = self.source.tree
        self.top_names = {n for node in tree.body for n in defined(node)}
        self.old_local = ""
        self.inner_names: set[str] = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                local = {n.name for n in ast.walk(node) if isinstance(n, ast.FunctionDef)}
                self.inner_names |= bound_names(node) - local
        self.imported_names = {
            alias.asname or alias.name
            for node in tree.body
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("evertick")
            for alias in node.names
            if target_of(node.module, alias.name)[1] is not None
        }
        self.own = {name: new for (module, name), new in SYMBOLS.items() if module == self.module}
        self.walk(tree, [])

    def import_text(self, node: ast.ImportFrom, bindings: dict) -> str | None:
        """The statement as it must be; None if nothing of it changes."""
        module = node.module or ""
        if node.level:
            base = self.module.split(".")
            is_package = self.source.path.name == "__init__.py"
            base = base[: len(base) - node.level + (1 if is_package else 0)]
            module = ".".join([*base, *([node.module] if node.module else [])])
        if module.split(".")[0] not in PACKAGES:
            return None
        groups: dict[str, list[str]] = defaultdict(list)
        changed = False
        for alias in node.names:
            to, symbol = target_of(module, alias.name)
            local = alias.asname or alias.name
            if symbol is None:
                parent, _, last = to.rpartition(".")
                if to == self.new:  # merged into this very file
                    bindings[local] = (to, None, "")
                    changed = True
                    continue
                self.old_local = local
                name, wanted = last, self.alias(to, last)
            else:
                parent, name, wanted = to, symbol, symbol
                if to == self.new and module != self.module and self.source.path.name != "__init__.py":
                    bindings[local] = (to, symbol, symbol)
                    changed = True
                    continue
            new_local = alias.asname or wanted
            if alias.asname == wanted:
                new_local = wanted
            bindings[local] = (to, symbol, new_local)
            text = name if new_local == name and not (alias.asname == alias.name) else f"{name} as {new_local}"
            if text not in groups[parent]:
                groups[parent].append(text)
            changed |= parent != module or text != (
                alias.name if alias.asname in (None, alias.name) else f"{alias.name} as {alias.asname}"
            )
        if not changed:
            return None
        indent = " " * node.col_offset
        lines = [f"from {parent} import {', '.join(names)}" for parent, names in groups.items() if names]
        return f"\n{indent}".join(lines) if lines else "pass"

    def alias(self, to: str, last: str) -> str:
        """Reads of accounts and the verbs of accounts are both called `accounts`: a file that has both tells them apart."""
        others = self.inner_names | self.imported_names | self.top_names
        if (self.new, to) in ALIASED or (last in others and last != self.old_local):
            return f"{last}_queries" if ".queries." in to else "_".join(to.split(".")[-2:])
        return last

    def walk(self, node: ast.AST, scopes: list[tuple[ast.AST, set[str]]]) -> None:
        if isinstance(node, ast.ImportFrom):
            is_top = not scopes
            bindings = self.bindings if is_top else self.function_bindings(scopes)
            text = self.import_text(node, bindings)
            if text is not None:
                start, end = self.source.span(node)
                self.source.edit(start, end, text)
            return
        if isinstance(node, ast.Import):
            names = [new_module(alias.name) + (f" as {alias.asname}" if alias.asname else "") for alias in node.names]
            if names != [alias.name + (f" as {alias.asname}" if alias.asname else "") for alias in node.names]:
                self.source.edit(*self.source.span(node), f"import {', '.join(names)}")
            return
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for each in node.decorator_list:
                self.walk(each, scopes)
            if not scopes and node.name in self.own and node in self.source.tree.body:
                self.rename_definition(node)
            if isinstance(node, ast.ClassDef):
                for each in (*node.bases, *node.keywords):
                    self.walk(each, scopes)
                for each in node.body:
                    if isinstance(each, ast.AnnAssign | ast.Assign):  # fields: their names are no references
                        for part in (getattr(each, "annotation", None), each.value):
                            if part is not None:
                                self.walk(part, scopes)
                    else:
                        self.walk(each, scopes)
                return
            arguments = node.args
            for each in (*arguments.defaults, *(d for d in arguments.kw_defaults if d is not None)):
                self.walk(each, scopes)
            for each in (
                *arguments.posonlyargs,
                *arguments.args,
                *arguments.kwonlyargs,
                arguments.vararg,
                arguments.kwarg,
            ):
                if each is not None and each.annotation is not None:
                    self.walk(each.annotation, scopes)
            if node.returns is not None:
                self.walk(node.returns, scopes)
            inner = [*scopes, (node, bound_names(node))]
            for each in node.body:
                self.walk(each, inner)
            return
        if isinstance(node, ast.Lambda):
            for each in (*node.args.defaults, *(d for d in node.args.kw_defaults if d is not None)):
                self.walk(each, scopes)
            self.walk(node.body, [*scopes, (node, bound_names(node))])
            return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            inner = [*scopes, (node, bound_names(node))]
            for each in ast.iter_child_nodes(node):
                self.walk(each, inner)
            return
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            self.rewrite_attribute(node, scopes)
            return
        if isinstance(node, ast.Name):
            self.rewrite_name(node, scopes)
            return
        if isinstance(node, ast.Global):
            return
        if (
            isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and getattr(node.value.func, "id", "") == "TypeVar"
        ):
            name, text = node.value.args[0], getattr(node.targets[0], "id", "")
            if text in self.own and not scopes:
                self.source.edit(*self.source.span(name), json.dumps(self.own[text]))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "cast" and node.args:
            first = node.args[0]
            if isinstance(first, ast.Constant) and isinstance(first.value, str):
                self.rewrite_string_type(first, scopes)
        for each in ast.iter_child_nodes(node):
            self.walk(each, scopes)

    def function_bindings(self, scopes: list) -> dict:
        node = scopes[-1][0]
        for each, bindings in self.late:
            if each is node:
                return bindings
        bindings: dict = {}
        self.late.append((node, bindings))
        return bindings

    def resolve(self, name: str, scopes: list) -> tuple[str, str | None, str] | None:
        for node, names in reversed(scopes):
            for each, bindings in self.late:
                if each is node and name in bindings:
                    return bindings[name]
            if name in names:
                return None
        if name in self.own and name in self.top_names:
            return (self.new, self.own[name], self.own[name])
        return self.bindings.get(name)

    def clashes(self, new: str, scopes: list) -> bool:
        return any(new in names for _, names in scopes)

    def rewrite_name(self, node: ast.Name, scopes: list) -> None:
        found = self.resolve(node.id, scopes)
        if found is None:
            return
        to, symbol, local = found
        if symbol is None and local == "":
            self.problems.append(
                f"{self.source.path}:{node.lineno}: module {node.id} is merged into this file and used as a value"
            )
            return
        if local != node.id:
            if self.clashes(local, scopes):
                self.problems.append(f"{self.source.path}:{node.lineno}: {node.id} → {local} is bound in the function")
            start, end = self.source.span(node)
            self.source.edit(start, end, local)

    def rewrite_attribute(self, node: ast.Attribute, scopes: list) -> None:
        found = self.resolve(node.value.id, scopes)
        if found is None or found[1] is not None:
            self.walk(node.value, scopes)
            return
        old_module = self.old_module(node.value.id, scopes)
        attr = node.attr
        new_attr = SYMBOLS.get((old_module, attr), attr) if old_module else attr
        start, end = self.source.span(node)
        local = found[2]
        if local and local != node.value.id and self.clashes(local, scopes):
            self.problems.append(
                f"{self.source.path}:{node.lineno}: module {node.value.id} → {local} is bound in the function"
            )
        text = f"{local}.{new_attr}" if local else new_attr
        if not local and self.clashes(new_attr, scopes):
            self.problems.append(
                f"{self.source.path}:{node.lineno}: {node.value.id}.{attr} → {new_attr} is bound in the function"
            )
        if text != f"{node.value.id}.{attr}":
            self.source.edit(start, end, text)

    def old_module(self, local: str, scopes: list) -> str | None:
        """The old dotted name of the module that `local` is bound to."""
        for node in ast.walk(self.source.tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    if (alias.asname or alias.name) == local and f"{node.module}.{alias.name}" in MODULES:
                        return f"{node.module}.{alias.name}"
        return None

    def rename_definition(self, node: ast.AST) -> None:
        start, _ = self.source.span(node)
        raw = self.source.text.encode()
        match = re.compile(rb"(?:async\s+)?(?:def|class)\s+(\w+)").match(raw, start)
        self.source.edit(match.start(1), match.end(1), self.own[node.name])

    def rewrite_string_type(self, node: ast.Constant, scopes: list) -> None:
        try:
            tree = ast.parse(node.value, mode="eval")
        except SyntaxError:
            return
        text = node.value
        for inner in ast.walk(tree):
            if isinstance(inner, ast.Name):
                found = self.resolve(inner.id, scopes)
                if found is not None and found[1] is not None and found[2] != inner.id:
                    text = re.sub(rf"\b{inner.id}\b", found[2], text)
        if text != node.value:
            start, end = self.source.span(node)
            self.source.edit(start, end, json.dumps(text))


def defined(node: ast.AST) -> list[str]:
    """Names that a statement at module level defines, imports excluded."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.Assign):
        return [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.If | ast.Try):
        return [n for each in ast.iter_child_nodes(node) if isinstance(each, ast.stmt) for n in defined(each)]
    return []


def ordered(names: list[str], texts: dict[str, str]) -> list[str]:
    """Old modules of one target, each after those that it imports."""
    done: list[str] = []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in done or name in path:
            return
        for node in ast.parse(texts[name]).body:
            if isinstance(node, ast.ImportFrom) and node.module:
                for other in names:
                    last = other.rpartition(".")
                    if node.module == other or (node.module == last[0] and any(a.name == last[2] for a in node.names)):
                        visit(other, (*path, name))
        done.append(name)

    for name in names:
        visit(name, ())
    return done


def split(text: str) -> tuple[str, list[str], list[str], str]:
    """Docstring, import statements, statements under TYPE_CHECKING, the rest."""
    tree = ast.parse(text)
    lines = text.splitlines(keepends=True)
    doc = ast.get_docstring(tree, clean=False) or ""
    cut: list[tuple[int, int]] = []
    imports: list[str] = []
    typed: list[str] = []
    for index, node in enumerate(tree.body):
        if index == 0 and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            cut.append((node.lineno, node.end_lineno))
        elif isinstance(node, ast.Import | ast.ImportFrom):
            cut.append((node.lineno, node.end_lineno))
            imports.append("".join(lines[node.lineno - 1 : node.end_lineno]).rstrip("\n"))
        elif isinstance(node, ast.Pass):
            cut.append((node.lineno, node.end_lineno))
        elif isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            cut.append((node.lineno, node.end_lineno))
            for each in node.body:
                if not isinstance(each, ast.Pass):
                    typed.append("".join(lines[each.lineno - 1 : each.end_lineno]).rstrip("\n").strip())
    keep = [line for number, line in enumerate(lines, 1) if not any(a <= number <= b for a, b in cut)]
    return doc, imports, typed, "".join(keep).strip("\n")


def statements(body: str) -> list[tuple[list[str], str, str]]:
    """(names, text with its comments, kind) of each top statement of a body."""
    tree = ast.parse(body)
    lines = body.splitlines(keepends=True)
    found = []
    before = 0
    for node in tree.body:
        first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
        chunk = "".join(lines[before : node.end_lineno]).strip("\n")
        before = node.end_lineno
        found.append((defined(node), chunk, type(node).__name__))
        del first
    tail = "".join(lines[before:]).strip("\n")
    if tail:
        found.append(([], tail, "Comment"))
    return found


def merge(new: str, olds: list[str], texts: dict[str, str], originals: dict[str, str]) -> tuple[str, list[str]]:
    problems: list[str] = []
    olds = ordered(olds, originals)
    docs: list[str] = []
    imports: list[str] = []
    typed: list[str] = []
    bodies: list[str] = []
    seen: dict[str, tuple[str, str]] = {}
    last = new.rpartition(".")[2]
    for old in sorted(olds, key=lambda o: o.rpartition(".")[2] != last):
        docs.append(split(texts[old])[0].strip())
    for old in olds:
        _, its_imports, its_typed, body = split(texts[old])
        imports += its_imports
        typed += its_typed
        kept = []
        for names, chunk, _kind in statements(body):
            code = re.sub(r"(?m)^\s*#.*\n?", "", chunk).strip()
            clash = [n for n in names if n in seen and seen[n][1] != old]
            if clash and all(seen[n][0] == code for n in clash):
                continue
            for name in clash:
                problems.append(f"{new}: {name} in {seen[name][1]} and {old}")
            for name in names:
                seen[name] = (code, old)
            kept.append(chunk)
        bodies.append((kept and "\n\n\n".join(kept)) or "")
    bound: dict[str, str] = {}
    for text in [*imports, *typed]:
        for node in ast.parse(text).body:
            if isinstance(node, ast.ImportFrom | ast.Import):
                for alias in node.names:
                    local = alias.asname or alias.name.split(".")[0]
                    what = f"{getattr(node, 'module', '')}.{alias.name}" if isinstance(node, ast.ImportFrom) else local
                    if bound.setdefault(local, what) != what:
                        problems.append(f"{new}: import {local} is {bound[local]} and {what}")
                    if local in seen:
                        problems.append(f"{new}: import {local} ({what}) is defined in {seen[local][1]}")
    doc = "\n\n".join(d for d in docs[:1])
    unique = list(dict.fromkeys(imports))
    future = [i for i in unique if "__future__" in i]
    others = [i for i in unique if "__future__" not in i]
    top_imports = {line for text in others for line in [text]}
    checking = [t for t in dict.fromkeys(typed) if t not in top_imports]
    if checking and not any("TYPE_CHECKING" in i for i in others):
        others.append("from typing import TYPE_CHECKING")
    parts = [f'"""{doc}\n"""' if "\n" in doc else f'"""{doc}"""', "\n".join(future), "\n".join(others)]
    if checking:
        parts.append("if TYPE_CHECKING:\n" + "\n".join(f"    {t}" for t in "\n".join(checking).splitlines()))
    parts += bodies
    return "\n\n\n".join(p for p in parts if p) + "\n", problems


FOLDERS = {
    "src/evertick/store/migrations": "src/evertick/db/migrations",
    "src/evertick/store/functions": "src/evertick/db/functions",
}
TEXTS = {
    "store/migrations": "db/migrations",
    "store/functions": "db/functions",
    "store/sql": "db/queries",
    "store/schema.sql": "db/schema.sql",
}
OLD_PACKAGES = ("services", "execution", "store", "authoring", "domain", "engine", "api", "ui")


def _patterns() -> tuple[re.Pattern[str], re.Pattern[str], re.Pattern[str]]:
    def names(top: str, sign: str) -> str:
        known = {*MOVES, *(module for module, _ in SYMBOLS)}
        found = [o.removeprefix(f"{top}.").replace(".", sign) for o in known if o.startswith(f"{top}.")]
        return "|".join(re.escape(n) for n in sorted(found, key=len, reverse=True))

    tail = r"(?![\w/-])(?:(?P<link>\.py::|\.py|::|:|\.)(?P<symbol>[A-Za-z_]\w*)?)?"
    slash = re.compile(
        rf"(?<![\w/-])(?P<lead>(?:src/)?evertick/|(?:\.\./)+src/evertick/)?(?P<name>{names('evertick', '/')}){tail}"
    )
    dots = re.compile(
        rf"(?<![\w.])evertick\.(?P<name>{names('evertick', '.')})(?![\w])(?:(?P<link>:|\.)(?P<symbol>[A-Za-z_]\w*))?"
    )
    tests = re.compile(rf"(?<![\w])tests(?P<sign>[./])(?P<name>{names('tests', '/').replace('/', '[./]')})(?![\w-])")
    return slash, dots, tests


SLASH, DOTS, TESTS = _patterns()
SYMBOLS_OF: dict[str, dict[str, str]] = defaultdict(dict)
for (_module, _old), _new in SYMBOLS.items():
    SYMBOLS_OF[_module][_old] = _new


def retext(text: str) -> str:
    """Paths, dotted names and test paths of the old tree in a text."""

    def symbol(match: re.Match[str], old: str) -> str:
        name = match["symbol"] or ""
        return (match["link"] or "") + SYMBOLS_OF[old].get(name, name)

    def slashed(match: re.Match[str]) -> str:
        old = "evertick." + match["name"].replace("/", ".")
        lead = match["lead"] or ""
        if not lead and not (match["link"] or "").startswith((".py", ".", "::")):
            quoted = (
                match.string[match.start() - 1 : match.start()] in "\"'`"
                and match.string[match.end() : match.end() + 1] in "\"'`"
            )
            if not quoted:
                return match[0]
        new = new_module(old).removeprefix("evertick.").replace(".", "/")
        return f"{lead}{new}{symbol(match, old)}"

    def dotted_name(match: re.Match[str]) -> str:
        old = f"evertick.{match['name']}"
        return new_module(old) + symbol(match, old)

    def test(match: re.Match[str]) -> str:
        new = MOVES["tests." + match["name"].replace("/", ".")]
        return new.replace(".", match["sign"])

    text = TESTS.sub(test, DOTS.sub(dotted_name, SLASH.sub(slashed, text)))
    for old, new in TEXTS.items():
        text = re.sub(rf"(?<![\w-]){re.escape(old)}(?![\w])", new, text)
    return text


def retext_python(text: str) -> str:
    """As `retext`, in strings and comments only: code was rewritten by its meaning."""
    lines = text.splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    out, at = [], 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT):
            start = starts[token.start[0] - 1] + token.start[1]
            end = starts[token.end[0] - 1] + token.end[1]
            out += [text[at:start], retext(text[start:end])]
            at = end
    return "".join([*out, text[at:]])


def nouns() -> dict[str, str]:
    """Old file of statements → new one."""
    found = {}
    for path in (ROOT / "src/evertick/store/sql").glob("*.sql"):
        to = MOVES.get(f"evertick.store.{path.stem}", "")
        found[path.stem] = to.rpartition(".")[2] if to.startswith("evertick.db.queries.") else path.stem
    found["listing"] = "listings"
    found["cluster"] = "failover"
    return found


def renounce(text: str) -> str:
    known = nouns()
    return re.sub(
        r'\bsql\("(\w+)", "(\w+)"',
        lambda match: f'sql("{known.get(match[1], match[1])}", "{STATEMENTS.get(f"{match[1]}:{match[2]}", match[2])}"',
        text,
    )


def renounce_whole(text: str) -> str:
    known = nouns()
    return re.sub(
        r'\b(sql|statements)\("(\w+)"(?=[,)])', lambda match: f'{match[1]}("{known.get(match[2], match[2])}"', text
    )


def repair(text: str) -> str:
    """Statements that are named by noun and name in tables: `("runs", "find")` and `"runs.find"`."""
    known = nouns()

    def pair(match: re.Match[str]) -> str:
        noun, name = match[2], match[4]
        if noun not in known:
            return match[0]
        return f"{match[1]}{known[noun]}{match[3]}{STATEMENTS.get(f'{noun}:{name}', name)}{match[5]}"

    text = re.sub(r'(\(")(\w+)(", ")(\w+)(")', pair, text)
    return re.sub(r'(")(\w+)(\.)([\w*]+)(")', pair, text)


def move_statements() -> list[str]:
    """Files of statements follow their modules; returns names that two of one new file have."""
    problems: list[str] = []
    merged: dict[str, list[Path]] = defaultdict(list)
    for old, new in nouns().items():
        merged[new].append(ROOT / f"src/evertick/store/sql/{old}.sql")
    for new, paths in merged.items():
        texts = []
        for path in sorted(paths, key=lambda p: p.stem != new):
            text = path.read_text(encoding="utf-8").strip("\n")
            for key, name in STATEMENTS.items():
                noun, _, old_name = key.partition(":")
                if noun == path.stem:
                    text = re.sub(rf"(?m)^-- name: {old_name}$", f"-- name: {name}", text)
            texts.append(text)
        names = re.findall(r"(?m)^-- name: (\w+)", "\n".join(texts))
        problems += [f"{new}.sql: {name} twice" for name in set(names) if names.count(name) > 1]
        if not CHECK:
            target = ROOT / f"src/evertick/db/queries/{new}.sql"
            target.parent.mkdir(parents=True, exist_ok=True)
            for path in paths:
                path.unlink()
            target.write_text("\n\n".join(texts) + "\n", encoding="utf-8")
    return problems


CHECK = False


def main() -> None:
    global CHECK
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    problems: list[str] = []
    texts: dict[str, str] = {}
    originals: dict[str, str] = {}
    for name, path in sorted(MODULES.items()):
        if path.is_relative_to(HERE):
            continue
        source = Source(path)
        rewriter = Rewriter(source)
        rewriter.run()
        problems += rewriter.problems
        originals[name] = source.text
        text = source.result()
        if name.startswith(("evertick.store", "tests.store", "tests.test_sql", "tools.")):
            text = renounce_whole(renounce(text))
        if name in ("tests.store.test_plans", "tests.store.test_roles", "evertick.store.roles"):
            text = repair(text)
        texts[name] = retext_python(text)
    results: dict[str, str] = {}
    for new, olds in MERGED.items():
        if len(olds) == 1:
            results[new] = texts[olds[0]]
        else:
            results[new], more = merge(new, olds, texts, originals)
            problems += more
    CHECK = options.check
    problems += move_statements()
    for problem in problems:
        print(problem)
    print(len(problems), "problems")
    if options.check:
        return
    write(texts, results, originals)
    for old, new in FOLDERS.items():
        if (ROOT / old).is_dir():
            (ROOT / new).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / old).rename(ROOT / new)
    schema = ROOT / "src/evertick/store/schema.sql"
    if schema.is_file():
        schema.rename(ROOT / "src/evertick/db/schema.sql")
    packages()
    others()


def packages() -> None:
    """Every package has an `__init__`; folders without modules go."""
    data = tomllib.loads((HERE / "map.toml").read_text(encoding="utf-8"))["packages"]
    observability = ROOT / "src/evertick/services/__init__.py"
    if observability.is_file():
        text = observability.read_text(encoding="utf-8")
        text = re.sub(r'"""(?s:.*?)"""', f'"""{data["observability"]}"""', text, count=1)
        (ROOT / "src/evertick/observability/__init__.py").write_text(text, encoding="utf-8")
    for name, doc in data.items():
        path = ROOT / "src/evertick" / name / "__init__.py"
        if path.parent.is_dir() and not path.exists():
            path.write_text(f'"""{doc}"""\n', encoding="utf-8")
    for folder in sorted((ROOT / "src/evertick").rglob("*"), reverse=True):
        if (
            folder.is_dir()
            and folder.name != "__pycache__"
            and folder.name in ("store", "services", "execution", "authoring", "sql")
        ):
            left = [
                p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.name != "__init__.py"
            ]
            if not left:
                shutil.rmtree(folder)
    kubernetes = ROOT / "src/evertick/execution"
    del kubernetes
    for folder in {path.parent for path in (ROOT / "tests").rglob("*.py")}:
        if not (folder / "__init__.py").exists():
            (folder / "__init__.py").write_text("", encoding="utf-8")
    for name in ("store", "authoring", "execution", "services", "kube"):
        folder = ROOT / "tests" / name
        left = [
            p for p in folder.rglob("*") if p.is_file() and "__pycache__" not in p.parts and p.name != "__init__.py"
        ]
        if folder.is_dir() and not left:
            shutil.rmtree(folder)


def others() -> None:
    """Paths in documents, settings of tools, the Makefile."""
    listed = subprocess.run(["git", "ls-files"], capture_output=True, text=True, check=True, cwd=ROOT).stdout.split()
    for name in listed:
        path = ROOT / name
        if (
            path.suffix in (".md", ".toml", ".yaml", ".yml", ".sql", ".html", ".js", "")
            and path.is_file()
            and "rename" not in name
        ):
            if name.startswith("src/") and path.suffix != ".sql":
                continue
            text = path.read_text(encoding="utf-8")
            new = retext(text)
            if new != text:
                path.write_text(new, encoding="utf-8")
    for path in [*(ROOT / "src/evertick/db").rglob("*.sql")]:
        text = path.read_text(encoding="utf-8")
        if (new := retext(text)) != text:
            path.write_text(new, encoding="utf-8")
    statements = ROOT / "src/evertick/db/statements.py"
    text = statements.read_text(encoding="utf-8")
    statements.write_text(
        text.replace('with_name("sql")', 'with_name("queries")')
        .replace("sql/{noun}", "queries/{noun}")
        .replace("sql/<noun>", "queries/<noun>"),
        encoding="utf-8",
    )


def path_of(module: str) -> Path:
    top, *rest = module.split(".")
    return PACKAGES[top].joinpath(*rest).with_suffix(".py")


def git(*arguments: str) -> None:
    subprocess.run(["git", *arguments], check=True, cwd=ROOT)


def write(texts: dict[str, str], results: dict[str, str], originals: dict[str, str]) -> None:
    for name, text in texts.items():
        if name not in MOVES and text != originals[name]:
            MODULES[name].write_text(text, encoding="utf-8")
    taken: set[Path] = set()
    temporary: list[tuple[Path, Path, str]] = []
    for new, olds in MERGED.items():
        target = path_of(new)
        olds = sorted(olds, key=lambda o: o.rpartition(".")[2] != new.rpartition(".")[2])
        biggest = max(olds, key=lambda o: len(originals[o]))
        for old in olds:
            source = MODULES[old]
            if old == biggest:
                holding = source.with_name(source.name + ".moving")
                source.rename(holding)
                temporary.append((holding, target, results[new]))
            else:
                source.unlink()
    for holding, target, text in temporary:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists() or target in taken:
            print("EXISTS", target)
        taken.add(target)
        holding.unlink()
        target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
