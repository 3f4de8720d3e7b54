"""What `make mutants` has found out: which test fails without each guard. A verdict holds until its grounds change.

The grounds of a verdict: the function, statement or table of the guard, the functions that it names, and the test that
failed. A change elsewhere is not noticed; `--all` judges every guard again.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
from functools import cache
from pathlib import Path

from tools.guards import STORE, Guard, definitions

ROOT = Path(__file__).parents[1]


class Verdicts:
    """The verdicts in a file, one line per guard: a hash of its grounds, and the test that failed, null for none."""

    def __init__(self, path: Path, store: Path = STORE) -> None:
        self._path, self._definitions = path, definitions(store)
        self._rows: dict[str, tuple[str, str | None]] = {}
        if path.exists():
            rows = json.loads(path.read_text(encoding="utf-8"))
            self._rows = {name: (grounds, test) for name, (grounds, test) in rows.items()}

    def killer(self, guard: Guard) -> str | None:
        """The test that failed last time, also if that verdict no longer holds."""
        return self._rows.get(guard.name, ("", None))[1]

    def holds(self, guard: Guard) -> bool:
        grounds, test = self._rows.get(guard.name, ("", None))
        return grounds == self._grounds(guard, test)

    def killed(self, guard: Guard) -> bool:
        return self.killer(guard) is not None and self.holds(guard)

    def add(self, guard: Guard, killer: str | None) -> None:
        self._rows[guard.name] = (self._grounds(guard, killer), killer)

    def write(self, guards: list[Guard]) -> None:
        """Write the verdicts of these guards, in their order, and drop all others."""
        known = [(guard.name, self._rows[guard.name]) for guard in guards if guard.name in self._rows]
        lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in known]
        draft = self._path.with_suffix(".draft")
        draft.parent.mkdir(exist_ok=True)
        draft.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")
        draft.replace(self._path)

    def _grounds(self, guard: Guard, killer: str | None) -> str:
        text = self._definitions.get(guard.owner, "")
        named = sorted(set(re.findall(r"\w+", text)) & self._definitions.keys() - {guard.owner})
        parts = [guard.name, text, *(self._definitions[name] for name in named), test_text(killer) if killer else ""]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


def test_text(test: str) -> str:
    """The source of a test, empty if it is gone."""
    file, _, name = test.partition("::")
    return _tests_of(file).get(name.partition("[")[0], "")


@cache
def _tests_of(file: str) -> dict[str, str]:
    path = ROOT / file
    if not path.exists():
        return {}
    text = path.read_text(encoding="utf-8")
    found = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name: ast.unparse(node) for node in found}
