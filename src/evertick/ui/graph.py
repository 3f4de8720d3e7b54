"""The graph of a DAG version, with or without the states of a run. The layout is computed once per version and cached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from psycopg import AsyncConnection

from evertick.store import charts, dags
from evertick.store.charts import StateOfTask
from evertick.ui.graph_layout import Layout, PlacedNode, lay_out

MOST_TASKS = 5000
# The state shown for a mapped task: the first of these that one of its instances has.
WORST_FIRST = (
    "failed",
    "upstream_failed",
    "running",
    "queued",
    "available",
    "pending",
    "deferred",
    "canceled",
    "waiting",
    "skipped",
    "success",
)
# States have shapes as well as colours, for color-blind users.
GLYPHS = {
    "none": "·",
    "waiting": "◌",
    "pending": "◷",
    "available": "⧗",
    "queued": "⧗",
    "running": "▶",
    "deferred": "⏸",
    "success": "✓",
    "failed": "✗",
    "skipped": "»",
    "canceled": "■",
    "upstream_failed": "!",
}


@dataclass(frozen=True, slots=True)
class NodeState:
    """The displayed state of a node: the worst one, and for a mapped task the number of instances in it."""

    state: str
    mark: str
    count: str
    title: str


@dataclass(frozen=True, slots=True)
class Node:
    place: PlacedNode
    now: NodeState
    is_mapped: bool


@dataclass(frozen=True, slots=True)
class Graph:
    layout: Layout
    nodes: Sequence[Node]


async def graph_of(conn: AsyncConnection, *, version_id: int, run_id: int | None = None) -> Graph | None:
    """Build the graph, or None if the DAG has more tasks than a graph can show."""
    version = await dags.version(conn, version_id)
    if version is None:
        return None
    tasks = _tasks(version.spec)
    if len(tasks) > MOST_TASKS:
        return None
    names = tuple(str(task["name"]) for task in tasks)
    found = [] if run_id is None else await charts.states_of_run(conn, run_id=run_id, limit=20 * MOST_TASKS)
    states = node_states(names, found, is_run=run_id is not None)
    layout = _laid_out(names, tuple(task.get("group") for task in tasks), tuple(edges_of(version.spec)))
    nodes = [Node(place, states[place.idx], tasks[place.idx].get("mapping") is not None) for place in layout.nodes]
    return Graph(layout, nodes)


def node_states(names: Sequence[str], found: Sequence[StateOfTask], *, is_run: bool) -> Mapping[int, NodeState]:
    by_task: dict[int, list[StateOfTask]] = defaultdict(list)
    for each in found:
        by_task[each.idx].append(each)
    return {idx: _state(name, by_task[idx], is_run=is_run) for idx, name in enumerate(names)}


def _state(name: str, found: Sequence[StateOfTask], *, is_run: bool) -> NodeState:
    if not found:
        state = "waiting" if is_run else "none"
        return NodeState(state, GLYPHS[state], "", f"{name}: waiting" if is_run else name)
    worst = min(found, key=lambda each: WORST_FIRST.index(each.state))
    if not any(each.is_mapped for each in found):
        return NodeState(worst.state, GLYPHS[worst.state], "", f"{name}: {worst.state.replace('_', ' ')}")
    total = sum(each.instances for each in found)
    parts = ", ".join(f"{each.instances} {each.state.replace('_', ' ')}" for each in found)
    return NodeState(worst.state, GLYPHS[worst.state], f"{worst.instances}/{total}", f"{name}: {parts}")


def edges_of(spec: Mapping[str, object]) -> list[tuple[int, int]]:
    raw: Any = spec.get("edges", [])
    return [(int(src), int(dst)) for src, dst in raw]


def _tasks(spec: Mapping[str, object]) -> list[dict[str, Any]]:
    raw: Any = spec["tasks"]
    return list(raw)


@lru_cache(maxsize=64)
def _laid_out(names: tuple[str, ...], groups: tuple[str | None, ...], edges: tuple[tuple[int, int], ...]) -> Layout:
    return lay_out(names, groups, edges)
