"""The data of `make mutants` about tests: duration, calls and failures. Saved to a file."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(slots=True, kw_only=True)
class Learned:
    """Durations, calls and failures of tests. A saved file is valid as long as the files it covers do not change."""

    store: str
    files: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)
    red: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path | None, tests: list[str]) -> Learned:
        """The data that is still valid: the store, the shared test code and the test's own file are unchanged."""
        around = [*(ROOT / "src/evertick").rglob("*.py"), *(ROOT / "src/evertick").rglob("*.sql")]
        around += [file for file in (ROOT / "tests").rglob("*.py") if not file.name.startswith("test_")]
        files = {file: _digest(ROOT / file) for file in sorted({test.partition("::")[0] for test in tests})}
        fresh = cls(store=_digest(*sorted(around)), files=files)
        if path is None or not path.exists():
            return fresh
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["store"] != fresh.store:
            return fresh
        # Keep the data of tests that are not selected now: a later run may select them.
        files |= {file: digest for file, digest in old["files"].items() if file not in files}
        for test in old["seconds"]:
            file = test.partition("::")[0]
            if old["files"].get(file) == files[file]:
                fresh.seconds[test], fresh.cpu[test] = old["seconds"][test], old["cpu"][test]
                fresh.calls[test] = old["calls"].get(test, [])
        fresh.red = [test for test in old["red"] if test in fresh.seconds]
        return fresh

    def add(self, verdict: dict[str, Any]) -> None:
        self.seconds |= verdict["seconds"]
        self.cpu |= verdict["cpu"]
        self.calls |= verdict["calls"]
        self.red += verdict["red"]

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
