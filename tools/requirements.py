"""`make requirements`: lists requirement ids with and without tests.

python tools/requirements.py [--check]     --check fails if a test names an unknown id
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parents[1]
DOCUMENT = ROOT / "docs" / "reference" / "requirements.md"
MOST_NAMES = 4

_ROW = re.compile(r"^\| *([A-Z]\d+) *\| *(.+?) *\|$", re.M)


def requirements(document: Path = DOCUMENT) -> dict[str, str]:
    """Every id and its statement, in the order of the document."""
    return dict(_ROW.findall(document.read_text(encoding="utf-8")))


def marked_tests(directory: Path = ROOT / "tests") -> dict[str, list[str]]:
    """The tests that name each id, as path::name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in sorted(directory.rglob("test_*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for_all = list(_ids_of_module(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                for each in dict.fromkeys([*for_all, *_ids_of(node.decorator_list)]):
                    found[each].append(f"{path.relative_to(directory)}::{node.name}")
    return dict(found)


def _ids_of(decorators: list[ast.expr]) -> Iterator[str]:
    """The ids of `pytest.mark.requirement("M5 F5", "I5")`: each word is one."""
    for decorator in decorators:
        if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.requirement":
            for argument in decorator.args:
                yield from str(ast.literal_eval(argument)).split()


def _ids_of_module(tree: ast.Module) -> Iterator[str]:
    """The ids of `pytestmark = …`, which every test of the file proves."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark":
            yield from _ids_of(node.value.elts if isinstance(node.value, ast.List) else [node.value])


def main(arguments: list[str]) -> int:
    console = Console(width=None if sys.stdout.isatty() else 160)
    known, tested = requirements(), marked_tests()
    table = Table("id", "statement", "tests", "named by")
    for each, statement in known.items():
        names = [name.split("::")[1].removeprefix("test_").replace("_", " ") for name in tested.get(each, [])]
        more = f"\nand {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        table.add_row(each, statement, str(len(names) or ""), "\n".join(names[:MOST_NAMES]) + more)
    console.print(table)
    without = [each for each in known if each not in tested]
    console.print(
        f"{len(known) - len(without)} of {len(known)} have a test. None yet: {' '.join(without) or 'nothing'}"
    )
    unknown = {each: names for each, names in tested.items() if each not in known}
    for each, names in unknown.items():
        console.print(f"Unknown requirement {each}, named by {', '.join(names)}", markup=False)
    return 1 if unknown and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
