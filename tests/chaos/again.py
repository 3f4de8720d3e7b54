"""The evidence of a failed scenario, kept: `python -m tests.chaos.again FOLDER` judges it again without playing it."""

from __future__ import annotations

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.checker import check
from tests.chaos.evidence import Evidence
from tests.chaos.verdict import Limits

FILE = "evidence.pickle"


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What the checker was given."""

    evidence: Evidence
    limits: Limits
    only: tuple[str, ...]
    required: tuple[str, ...]


def save(judged: Judged, folder: Path) -> None:
    (folder / FILE).write_bytes(pickle.dumps(judged))


def main(arguments: list[str]) -> int:
    judged: Judged = pickle.loads((Path(arguments[0]) / FILE).read_bytes())
    report = check(judged.evidence, judged.limits, only=judged.only)
    print(report.text())
    return 0 if report.is_good(judged.required) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
