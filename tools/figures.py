"""Figures about the size and the plainness of the source, each with its goal; reads files, runs nothing.

    python tools/figures.py              every figure, its goal, and whether it is reached
    python tools/figures.py importers    one figure, and what it counts (names: see FIGURES)
    --json prints figures as JSON; --check exits with 1 if any is above its goal; --walk also runs tools/walk.py (15 seconds)

Rules that are not obvious:
- A code line holds a token that is neither comment nor docstring. The generated `api/airflow/models.py` does not count.
- The import graph counts imports inside functions, but neither those under TYPE_CHECKING nor `import_module`.
  Importing a package counts as importing its `__init__`.
- Equal function bodies: the same syntax tree without docstring, whatever the functions are called, with at least 12 nodes
  (less is a one-line delegation). Only the copies count: two equal functions are one.
- A class name used twice: the same name for classes of two modules.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import re
import subprocess
import sys
import tokenize
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tools import plain_words  # noqa: E402

PACKAGE = "evertick"
GENERATED = "api/airflow/models"
SQL_COLUMNS = 120
MIN_NODES = 12
Found = list[str]
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Tree:
    """The files of a checkout, parsed once. `modules` are named by their path inside the package, without ending."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root, self.source = root, root / "src" / PACKAGE

    @cached_property
    def texts(self) -> dict[str, str]:
        return {self.name(path): path.read_text(encoding="utf-8") for path in sorted(self.source.rglob("*.py"))}

    @cached_property
    def trees(self) -> dict[str, ast.Module]:
        return {name: ast.parse(text) for name, text in self.texts.items()}

    @cached_property
    def sql(self) -> dict[str, list[str]]:
        files = sorted(self.source.rglob("*.sql"))
        return {self.name(path): path.read_text(encoding="utf-8").splitlines() for path in files}

    @property
    def modules(self) -> list[str]:
        return [name for name in self.texts if not name.endswith("__init__") and not name.startswith("examples/")]

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module → modules of this package that it imports."""
        found = {name: set(self._imported(tree)) - {name} for name, tree in self.trees.items()}
        return {name: targets for name, targets in found.items() if not name.startswith("examples/")}

    def name(self, path: Path) -> str:
        return path.relative_to(self.source).with_suffix("").as_posix()

    def _imported(self, tree: ast.Module) -> Iterator[str]:
        for target, parts in imported(tree):
            path = target.removeprefix(PACKAGE).strip(".").replace(".", "/")
            for part in parts or [""]:
                name = "/".join(filter(None, (path, part)))
                for module in (name, f"{name}/__init__", path, f"{path}/__init__".lstrip("/")):
                    if module in self.texts:
                        yield module
                        break


def imported(tree: ast.AST) -> Iterator[tuple[str, list[str]]]:
    """Imports at any depth as (evertick.x, [names]), without imports for type checkers only."""
    todo = [tree]
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names if alias.name.split(".")[0] == PACKAGE)
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == PACKAGE:
            yield node.module, [alias.name for alias in node.names]
        elif isinstance(node, ast.If) and getattr(node.test, "id", getattr(node.test, "attr", "")) == "TYPE_CHECKING":
            todo += node.orelse
        elif isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):
            todo += ast.iter_child_nodes(node)


def code_lines(text: str, tree: ast.Module) -> int:
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node, clean=False) is not None:
            docstrings.add((node.body[0].lineno, node.body[0].col_offset))
    lines: set[int] = set()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in layout and token.start not in docstrings:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines)


def modules(tree: Tree) -> tuple[int, Found]:
    return len(tree.modules), tree.modules


def directories(tree: Tree) -> tuple[int, Found]:
    counts = Counter(name.rpartition("/")[0] for name in tree.modules).most_common()
    return counts[0][1] if counts else 0, [f"{count:4} {name or '.'}" for name, count in counts]


def code(tree: Tree) -> tuple[int, Found]:
    counts = Counter(
        {name: code_lines(text, tree.trees[name]) for name, text in tree.texts.items() if name != GENERATED}
    )
    return counts.total(), [f"{count:5} {name}" for name, count in counts.most_common()]


def sql(tree: Tree) -> tuple[int, Found]:
    counts = Counter({name: len(lines) for name, lines in tree.sql.items()})
    return counts.total(), [f"{count:5} {name}" for name, count in counts.most_common()]


def wide_sql(tree: Tree) -> tuple[int, Found]:
    wide = {name: sum(len(line) > SQL_COLUMNS for line in lines) for name, lines in tree.sql.items()}
    return sum(wide.values()), [f"{count:5} {name}" for name, count in Counter(wide).most_common() if count]


def migration_functions(tree: Tree) -> tuple[int, Found]:
    found = [
        f"{name}: {line.strip()[:80]}"
        for name, lines in tree.sql.items()
        if "migrations/" in name
        for line in lines
        if re.match(r"\s*create (or replace )?function\b", line, re.IGNORECASE)
    ]
    return len(found), found


def gucs(tree: Tree) -> tuple[int, Found]:
    """Session settings that pass values between functions. `evertick.now`, the clock of tests, does not count."""
    texts = {**tree.texts, **{name: "\n".join(lines) for name, lines in tree.sql.items()}}
    pattern = re.compile(rf"set_config\('({PACKAGE}\.\w+)'")
    names = Counter(
        (match, name) for name, text in texts.items() for match in pattern.findall(text) if match != f"{PACKAGE}.now"
    )
    return len({guc for guc, _ in names}), [
        f"{count:4} {guc} in {name}" for (guc, name), count in sorted(names.items())
    ]


def importers(tree: Tree) -> tuple[int, Found]:
    by: dict[str, set[str]] = defaultdict(set)
    for module, targets in tree.imports.items():
        for target in targets:
            by[target].add(module)
    found = [f"{name} ← {next(iter(by[name]))}" for name in tree.modules if len(by[name]) == 1]
    return len(found), found


def cycles(tree: Tree) -> tuple[int, Found]:
    """Strongly connected components (Tarjan) with more than one module."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(tree.imports.get(name, ())):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            at = stack.index(name)
            component, stack[at:] = stack[at:], []
            if len(component) > 1:
                found.append(component)

    for name in tree.imports:
        if name not in index:
            visit(name)
    return len(found), [" ↔ ".join(sorted(component)) for component in found]


def equal_bodies(tree: Tree) -> tuple[int, Found]:
    """Functions that could be deleted, because another one has the same body."""
    by: dict[str, list[str]] = defaultdict(list)
    for name, module in tree.trees.items():
        for node in ast.walk(module):
            if not isinstance(node, Function) or name == GENERATED or name.startswith("examples/"):
                continue
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            if sum(1 for part in body for _ in ast.walk(part)) >= MIN_NODES:
                by["\n".join(ast.dump(part) for part in body)].append(f"{name}.{node.name}")
    found = [" = ".join(sorted(names)) for names in by.values() if len(names) > 1]
    return sum(len(names) - 1 for names in by.values()), sorted(found)


def class_names(tree: Tree) -> tuple[int, Found]:
    by: dict[str, set[str]] = defaultdict(set)
    for name, module in tree.trees.items():
        for node in ast.walk(module) if name != GENERATED and not name.startswith("examples/") else ():
            if isinstance(node, ast.ClassDef):
                by[node.name].add(name)
    found = {name: places for name, places in by.items() if len(places) > 1}
    return len(found), [f"{name}: {', '.join(sorted(places))}" for name, places in sorted(found.items())]


def docs_words(tree: Tree) -> tuple[float, Found]:
    """`whoever, somebody, nobody, beside` per 10,000 words of README, CONTRIBUTING and docs; fenced blocks are left out."""
    paths = [tree.root / "README.md", tree.root / "CONTRIBUTING.md", *sorted((tree.root / "docs").rglob("*.md"))]
    words, found = 0, Counter[str]()
    for path in (path for path in paths if path.exists()):
        text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        words += len(re.findall(r"[A-Za-z']+", text))
        found[str(path.relative_to(tree.root))] += len(plain_words.VAGUE.findall(text))
    rate = 10_000 * found.total() / max(words, 1)
    return round(rate, 1), [f"{count:5} {name}" for name, count in found.most_common() if count]


def source_words(tree: Tree) -> tuple[int, Found]:
    """Lines of Python and SQL with one of these four words."""
    texts = {**{f"{name}.py": text.splitlines() for name, text in tree.texts.items()}}
    texts |= {f"{name}.sql": lines for name, lines in tree.sql.items()}
    found = Counter(
        {name: sum(bool(plain_words.VAGUE.search(line)) for line in lines) for name, lines in texts.items()}
    )
    return found.total(), [f"{count:5} {name}" for name, count in found.most_common() if count]


def odd_words(tree: Tree) -> tuple[float, Found]:
    """Everything that plain_words.PATTERNS finds, per 10,000 words of comments, docstrings, messages and templates in src."""
    words, found = 0, []
    for path in sorted(
        path for path in tree.source.rglob("*") if path.suffix in (".py", ".sql", ".html", ".jinja", ".md")
    ):
        text = plain_words.prose(path)
        words += plain_words.word_count(text)
        found += [
            f"{path.relative_to(tree.source)}: {kind}: …{around}…" for kind, around in plain_words.odd_words(text)
        ]
    return round(10_000 * len(found) / max(words, 1), 1), found


def names(tree: Tree) -> tuple[int, Found]:
    """Modules, classes and functions that still have an old name of the rename table."""
    files = {tree.name(path) for path in tree.source.rglob("*") if path.suffix in (".sql", ".html", ".jinja")}
    found = [old for name in files - tree.trees.keys() for old in plain_words.old_names(name, None)]
    found += [old for name, module in tree.trees.items() for old in plain_words.old_names(name, module)]
    return len(found), sorted(found)


def twice(tree: Tree) -> tuple[int, Found]:
    """Commands with a second implementation for a remote server."""
    found = [
        f"{name}:{number}"
        for name, text in tree.texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if name.startswith("cli/") and "far=" in line
    ]
    return len(found), found


def undeclared(tree: Tree) -> tuple[int, Found]:
    """Imports of distributions that pyproject.toml does not name, and of FastAPI's private module."""
    project = tomllib.loads((tree.root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = [one for extra in project.get("optional-dependencies", {}).values() for one in extra]
    declared = {_normal(re.split(r"[\[<>=!~;\s]", one)[0]) for one in [*project.get("dependencies", []), *extras]}
    provides, found = packages_distributions(), defaultdict(set)
    for name, module in tree.trees.items():
        for node in ast.walk(module):
            targets = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                targets = [node.module]
            own = {PACKAGE}
            if name == "pytest_plugin":  # only pytest loads it
                own |= {"pytest"}
            elif name.startswith("airflow/"):  # runs in an interpreter that has Airflow
                own |= {"airflow", "msgspec"}
            for top in {target.split(".")[0] for target in targets} - sys.stdlib_module_names - own:
                if not {_normal(one) for one in provides.get(top, [top])} & declared:
                    found[top].add(name)
            if any(target.startswith("fastapi._compat") for target in targets):
                found["fastapi._compat"].add(name)
    return len(found), [f"{top}: {', '.join(sorted(places))}" for top, places in sorted(found.items())]


def _normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


# subcommand: (title, goal, function)
FIGURES: dict[str, tuple[str, float, Callable[[Tree], tuple[float, Found]]]] = {
    "modules": ("modules (without __init__ and examples)", 300, modules),
    "directories": ("modules in the largest directory", 25, directories),
    "code": ("code lines", 41_500, code),
    "sql": ("lines of SQL", 10_000, sql),
    "wide-sql": ("SQL lines over 120 columns", 0, wide_sql),
    "migrations": ("functions in migrations", 2, migration_functions),
    "gucs": ("GUC channels", 0, gucs),
    "importers": ("modules with one importer", 70, importers),
    "cycles": ("import cycles", 1, cycles),
    "duplicates": ("equal function bodies", 0, equal_bodies),
    "classes": ("class names in two modules", 10, class_names),
    "words": ("vague words per 10,000 of docs", 1, docs_words),
    "source-words": ("lines of src with a vague word", 0, source_words),
    "odd": ("odd wording per 10,000 words of src", 5, odd_words),
    "names": ("names of the rename table", 0, names),
    "twice": ("commands written twice (far=)", 0, twice),
    "imports": ("undeclared or private imports", 0, undeclared),
}
WALK_GOALS = {"functions": ("walk: functions", 50), "files": ("walk: files", 24), "sql": ("walk: SQL functions", 13)}


def measure(tree: Tree, *, with_walk: bool = False) -> list[tuple[str, float | None, float]]:
    rows: list[tuple[str, float | None, float]] = [
        (title, function(tree)[0], goal) for title, goal, function in FIGURES.values()
    ]
    walked: dict[str, int] = {}
    if with_walk:
        walk = [sys.executable, str(ROOT / "tools" / "walk.py"), "--json"]
        walked = json.loads(subprocess.run(walk, check=True, capture_output=True, text=True, cwd=ROOT).stdout)
    return rows + [(title, walked.get(key), goal) for key, (title, goal) in WALK_GOALS.items()]


def shown(rows: list[tuple[str, float | None, float]]) -> str:
    lines = [f"{'figure':40} {'now':>9} {'goal':>9}"]
    for title, value, goal in rows:
        state = "not run (--walk)" if value is None else "ok" if value <= goal else "above"
        lines.append(f"{title:40} {'-' if value is None else f'{value:,}':>9} {goal:>9,} {state}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("figure", nargs="?", choices=[*FIGURES])
    parser.add_argument("--root", type=Path, default=ROOT, help="another checkout")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--walk", action="store_true")
    options = parser.parse_args(arguments)
    tree = Tree(options.root)
    if options.figure:
        title, goal, function = FIGURES[options.figure]
        value, found = function(tree)
        rows: list[tuple[str, float | None, float]] = [(title, value, goal)]
        print(json.dumps({"value": value, "goal": goal, "found": found}) if options.json else "\n".join(found))
    else:
        rows = measure(tree, with_walk=options.walk)
    if options.json and not options.figure:
        print(json.dumps({title: {"value": value, "goal": goal} for title, value, goal in rows}))
    elif not options.json:
        print(shown(rows))
    return int(options.check and any(value is not None and value > goal for _, value, goal in rows))


if __name__ == "__main__":
    sys.exit(main())
