"""Graph layout: positions of the tasks in layers from left to right, groups as boxes. Pure; independent of states and colours.

Each level (the DAG and every group) is laid out separately with its groups as single boxes, so boxes never overlap.
Layers use the longest path, order in a layer the barycenter, heights least squares under that order. About linear in the edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from evertick.ui.graph_order import Point, place_levels

NODE_HEIGHT = 34.0
GROUP_PAD, GROUP_HEAD, MARGIN = 14.0, 24.0, 16.0
LONGEST_LABEL = 26
_LETTER, _NODE_PAD = 7.1, 44.0

# A task (its index) or a group (its full name).
Unit = int | str
ROOT = ""


@dataclass(frozen=True, slots=True)
class PlacedNode:
    idx: int
    name: str
    label: str
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class PlacedGroup:
    name: str
    label: str
    depth: int
    x: float
    y: float
    width: float
    height: float


@dataclass(frozen=True, slots=True)
class PlacedEdge:
    src: int
    dst: int
    path: str


@dataclass(frozen=True, slots=True)
class Layout:
    width: float
    height: float
    nodes: Sequence[PlacedNode]
    groups: Sequence[PlacedGroup]
    edges: Sequence[PlacedEdge]


@dataclass(slots=True)
class _Level:
    """One group or the whole DAG: its units and the edges between them."""

    units: list[Unit] = field(default_factory=list)
    edges: dict[tuple[Unit, Unit], list[tuple[int, int]]] = field(default_factory=lambda: defaultdict(list))
    at: dict[Unit, Point] = field(default_factory=dict)
    bends: dict[tuple[Unit, Unit], list[tuple[float, float, float]]] = field(default_factory=dict)
    size: Point = (0.0, 0.0)


def lay_out(names: Sequence[str], groups: Sequence[str | None], edges: Iterable[tuple[int, int]]) -> Layout:
    """Lay out tasks given in topological order, each with its group. Edges are pairs of task indexes."""
    chains = [_chain(group) for group in groups]
    levels = _levels(chains, edges)
    sizes: dict[Unit, Point] = {
        idx: (_width(name, group), NODE_HEIGHT) for idx, (name, group) in enumerate(zip(names, groups, strict=True))
    }
    first = _first_of(chains)
    # Innermost groups first: the size of a group must be known before the group that contains it.
    for path in sorted(levels, key=lambda path: -path.count(".") if path else 1):
        level = levels[path]
        ranks = {unit: unit if isinstance(unit, int) else first[unit] for unit in level.units}
        level.at, level.bends, level.size = place_levels(
            ranks, {unit: sizes[unit] for unit in level.units}, level.edges.keys()
        )
        if path:
            sizes[path] = (level.size[0] + 2 * GROUP_PAD, level.size[1] + GROUP_PAD + GROUP_HEAD)
    return _assembled(names, groups, levels, sizes)


def _chain(group: str | None) -> list[str]:
    """The levels that contain a task, outermost first: the DAG, its outermost group, …, its own group."""
    if not group:
        return [ROOT]
    parts = group.split(".")
    return [ROOT, *(".".join(parts[: n + 1]) for n in range(len(parts)))]


def _levels(chains: Sequence[list[str]], edges: Iterable[tuple[int, int]]) -> dict[str, _Level]:
    levels: dict[str, _Level] = defaultdict(_Level)
    levels[ROOT] = _Level()
    seen: set[str] = {ROOT}
    for idx, chain in enumerate(chains):
        for outer, inner in pairwise(chain):
            if inner not in seen:
                seen.add(inner)
                levels[outer].units.append(inner)
        levels[chain[-1]].units.append(idx)
    for src, dst in edges:
        path, one, other = _meeting(src, chains[src], dst, chains[dst])
        levels[path].edges[(one, other)].append((src, dst))
    return levels


def _meeting(src: int, above: list[str], dst: int, below: list[str]) -> tuple[str, Unit, Unit]:
    """The innermost level that contains both ends of an edge, and the unit of that level for each end."""
    one: list[Unit] = [*above, src]
    other: list[Unit] = [*below, dst]
    depth = next(n for n in range(min(len(one), len(other))) if one[n] != other[n])
    return above[depth - 1], one[depth], other[depth]


def _first_of(chains: Sequence[list[str]]) -> dict[str, int]:
    """The position of each group: that of its first task in topological order. An edge back to an earlier group is drawn
    but ignored by the layout, because otherwise such groups would form a cycle."""
    first: dict[str, int] = {}
    for idx, chain in enumerate(chains):
        for path in chain:
            first.setdefault(path, idx)
    return first


def _assembled(
    names: Sequence[str], groups: Sequence[str | None], levels: Mapping[str, _Level], sizes: Mapping[Unit, Point]
) -> Layout:
    corner: dict[str, Point] = {ROOT: (MARGIN, MARGIN)}
    nodes: dict[int, PlacedNode] = {}
    boxes: list[PlacedGroup] = []
    for path in sorted(levels, key=lambda path: path.count(".") + 1 if path else 0):
        left, top = corner[path]
        for unit in levels[path].units:
            x, y = left + levels[path].at[unit][0], top + levels[path].at[unit][1]
            width, height = sizes[unit]
            if isinstance(unit, int):
                nodes[unit] = PlacedNode(unit, names[unit], label_of(names[unit], groups[unit]), x, y, width, height)
            else:
                corner[unit] = (x + GROUP_PAD, y + GROUP_HEAD)
                label = short(unit.rpartition(".")[2])
                boxes.append(PlacedGroup(unit, label, unit.count("."), x, y, width, height))
    arrows = [
        PlacedEdge(src, dst, _path(nodes[src], nodes[dst], levels[path].bends.get(pair, []), corner[path]))
        for path in levels
        for pair, ends in levels[path].edges.items()
        for src, dst in ends
    ]
    width, height = levels[ROOT].size
    return Layout(width + 2 * MARGIN, height + 2 * MARGIN, [nodes[idx] for idx in range(len(names))], boxes, arrows)


def _path(src: PlacedNode, dst: PlacedNode, bends: Sequence[tuple[float, float, float]], corner: Point) -> str:
    """The SVG path from the right side of `src` to the left side of `dst`, through the bends in the layers between."""
    x, y = src.x + src.width, src.y + src.height / 2
    words = [f"M{x:.0f} {y:.0f}"]
    stops = [(left + corner[0], right + corner[0], at + corner[1]) for left, right, at in bends]
    for left, right, at in [*stops, (dst.x, dst.x, dst.y + dst.height / 2)]:
        middle = (x + left) / 2
        words.append(f"C{middle:.0f} {y:.0f} {middle:.0f} {at:.0f} {left:.0f} {at:.0f}")
        if right > left:
            words.append(f"H{right:.0f}")
        x, y = right, at
    return "".join(words)


def label_of(name: str, group: str | None) -> str:
    """The label of a task without its group's name, which the box shows."""
    return short(name.removeprefix(f"{group}.") if group else name)


def short(text: str) -> str:
    return text if len(text) <= LONGEST_LABEL else f"{text[: LONGEST_LABEL - 1]}…"


def _width(name: str, group: str | None) -> float:
    return _NODE_PAD + _LETTER * max(len(label_of(name, group)), 6)
