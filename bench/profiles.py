"""The latest profile of each kind of work: stored in bench/profiles.json, shown in docs/explanation/performance.md."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from bench.profile_tables import Shown

KEPT = Path(__file__).with_name("profiles.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """`load` is the load average. On a busy machine counts are valid, times are not."""

    about: str
    measured_at: str
    load: float
    tables: Sequence[Shown]


def keep(name: str, about: str, tables: Sequence[Shown], path: Path = KEPT) -> None:
    """Store a profile, replacing the one of that name."""
    now, load = datetime.now(UTC).isoformat(timespec="seconds"), round(os.getloadavg()[0], 1)
    kept = {**read(path), name: Kept(about=about, measured_at=now, load=load, tables=tables)}
    text = json.dumps({each: asdict(kept[each]) for each in sorted(kept)}, indent=1, ensure_ascii=False)
    path.write_text(text + "\n", encoding="utf-8")


def read(path: Path = KEPT) -> Mapping[str, Kept]:
    if not path.exists():
        return {}
    found = json.loads(path.read_text(encoding="utf-8"))
    return {
        name: Kept(
            about=fields["about"],
            measured_at=fields["measured_at"],
            load=fields["load"],
            tables=[Shown(**table) for table in fields["tables"]],
        )
        for name, fields in found.items()
    }
