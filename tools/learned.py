"""What `make mutants` knows of tests: how long each takes, what it calls, which are red. Kept in a file if asked to."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@dataclass(slots=True, kw_only=True)
class Learned:
    """What is known of tests: seconds, calls, and which are red. In a file it is worth something while nothing changes."""

    store: str
    files: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    calls: dict[str, list[str]] = field(default_factory=dict)
    red: list[str] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path | None, tests: list[str]) -> Learned:
        """What still holds of these tests: the store and what tests share is the same, and so is their own file."""
        around = [*(ROOT / "src/evertick").rglob("*.py"), *(ROOT / "src/evertick").rglob("*.sql")]
        around += [file for file in (ROOT / "tests").rglob("*.py") if not file.name.startswith("test_")]
        files = {file: _digest(ROOT / file) for file in sorted({test.partition("::")[0] for test in tests})}
        fresh = cls(store=_digest(*sorted(around)), files=files)
        if path is None or not path.exists():
            return fresh
        old = json.loads(path.read_text(encoding="utf-8"))
        if old["store"] != fresh.store:
            return fresh
        # Of tests that are not asked this time as well: the next time they may be.
        files |= {file: digest for file, digest in old["files"].items() if file not in files}
        for test in old["seconds"]:
            file = test.partition("::")[0]
            if old["files"].get(file) == files[file]:
                fresh.seconds[test], fresh.calls[test] = old["seconds"][test], old["calls"].get(test, [])
        fresh.red = [test for test in old["red"] if test in fresh.seconds]
        return fresh

    def add(self, verdict: dict[str, Any]) -> None:
        self.seconds |= verdict["seconds"]
        self.calls |= verdict["calls"]
        self.red += verdict["red"]

    def write(self, path: Path | None) -> None:
        if path is not None:
            path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def _digest(*files: Path) -> str:
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
