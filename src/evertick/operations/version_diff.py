"""The changes between two versions of a DAG, in the plan and in the code, as lines of a unified diff."""

from __future__ import annotations

import difflib
import json
from typing import Any

from psycopg import AsyncConnection

from evertick.bundles.bundle import contents
from evertick.db.queries import dags
from evertick.db.queries.dags import ListedVersion


async def plan_changes(conn: AsyncConnection, old: ListedVersion, new: ListedVersion) -> list[str]:
    texts = []
    for each in (old, new):
        row = await dags.version(conn, each.version_id)
        texts.append(_plan_text(row.spec if row else {}))
    return _unified(texts[0], texts[1], "plan")


async def code_changes(conn: AsyncConnection, old: ListedVersion, new: ListedVersion) -> list[str]:
    if old.bundle_hash == new.bundle_hash:
        return []
    sides = []
    for each in (old, new):
        row = await dags.bundle(conn, each.bundle_hash)
        sides.append(contents(row.archive, each.bundle_hash) if row else {})
    changes: list[str] = []
    for path in sorted(sides[0].keys() | sides[1].keys()):
        before, after = (side.get(path) for side in sides)
        if before != after:
            changes += _file_changes(path, before, after)
    return changes


def _plan_text(spec: dict[str, Any]) -> str:
    """Tasks by name, with the names of their upstream tasks: indexes in the plan change when a task is added."""
    tasks = spec.get("tasks", [])
    names = [task["name"] for task in tasks]
    after: dict[str, list[str]] = {name: [] for name in names}
    for up, down in spec.get("edges", []):
        after[names[down]].append(names[up])
    plain = {key: value for key, value in spec.items() if key not in ("tasks", "edges")}
    plain["tasks"] = {task["name"]: {**task, "after": sorted(after[task["name"]])} for task in tasks}
    return json.dumps(plain, indent=1, sort_keys=True)


def _file_changes(path: str, before: bytes | None, after: bytes | None) -> list[str]:
    try:
        return _unified((before or b"").decode(), (after or b"").decode(), path)
    except UnicodeDecodeError:
        return [f"{path}: {len(before or b''):,} bytes became {len(after or b''):,}"]


def _unified(before: str, after: str, name: str) -> list[str]:
    made = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"{name} before", f"{name} after", lineterm="", n=2
    )
    return list(made)
