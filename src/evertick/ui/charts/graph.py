"""The graph of a DAG version, with or without the states of a run. The layout is computed once per version and cached."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from psycopg import AsyncConnection

from evertick.db.queries import dags, overview
from evertick.db.queries.overview import StateOfTask
from evertick.ui.charts.grid import PRECEDENCE, chain_of

NODE_GAP, LAYER_GAP = 14.0, 56.0


_SWEEPS = 4


# Long edges reserve a place in each layer that they cross, unless such places would fill most of the graph.
_MOST_BENDS = 2500


_BEND_HEIGHT = 6.0


_BEND_WEIGHT, _UNIT_WEIGHT = 3.0, 1.0


Point = tuple[float, float]


U = TypeVar("U", bound=Hashable)


# A unit, or the place of an edge in a layer that it crosses: (source, target, layer).
Vertex = Hashable


Bend = tuple[float, float, float]


def place_levels(
    ranks: Mapping[U, int], sizes: Mapping[U, Point], edges: Collection[tuple[U, U]]
) -> tuple[dict[U, Point], dict[tuple[U, U], list[Bend]], Point]:
    """Return the upper left corner of each unit, the bends of long edges (from x, to x, y) and the total size.

    `ranks` orders the units; edges that go backward in it are ignored.
    """
    forward = [(src, dst) for src, dst in edges if ranks[src] < ranks[dst]]
    layer_of = _layers(ranks, forward)
    layers, links, passing = _layered(ranks, layer_of, forward)
    _reorder(layers, links)
    heights: dict[Vertex, float] = {vertex: _BEND_HEIGHT for layer in layers for vertex in layer}
    heights.update({unit: size[1] for unit, size in sizes.items()})
    middles = _middles(layers, links, heights)
    lefts, rights = _columns(layers, sizes)
    top = min((middles[vertex] - heights[vertex] / 2 for vertex in middles), default=0.0)
    at = {unit: (lefts[layer_of[unit]], middles[unit] - sizes[unit][1] / 2 - top) for unit in ranks}
    bends = {
        pair: [
            (lefts[layer_of[pair[0]] + n], rights[layer_of[pair[0]] + n], middles[vertex] - top)
            for n, vertex in enumerate(vertices, 1)
        ]
        for pair, vertices in passing.items()
    }
    bottom = max((middles[vertex] + heights[vertex] / 2 for vertex in middles), default=0.0)
    return at, bends, (rights[-1] if rights else 0.0, bottom - top)


def _layers(ranks: Mapping[U, int], edges: Iterable[tuple[U, U]]) -> dict[U, int]:
    """Put each unit as far left as its predecessors allow; a unit without predecessors goes next to its first successor."""
    after: dict[U, list[U]] = defaultdict(list)
    has_before: set[U] = set()
    for src, dst in edges:
        after[src].append(dst)
        has_before.add(dst)
    found = dict.fromkeys(ranks, 0)
    for unit in sorted(ranks, key=ranks.__getitem__):
        for other in after[unit]:
            found[other] = max(found[other], found[unit] + 1)
    for unit in ranks:
        if unit not in has_before and after[unit]:
            found[unit] = min(found[other] for other in after[unit]) - 1
    return found


def _layered(
    ranks: Mapping[U, int], layer_of: Mapping[U, int], edges: Sequence[tuple[U, U]]
) -> tuple[list[list[Vertex]], list[dict[Vertex, list[Vertex]]], dict[tuple[U, U], list[Vertex]]]:
    """Return the layers of places, each layer's links to the layer before, and the places that each long edge crosses."""
    layers: list[list[Vertex]] = [[] for _ in range(max(layer_of.values(), default=-1) + 1)]
    links: list[dict[Vertex, list[Vertex]]] = [defaultdict(list) for _ in layers]
    passing: dict[tuple[U, U], list[Vertex]] = {}
    for unit in sorted(ranks, key=ranks.__getitem__):
        layers[layer_of[unit]].append(unit)
    has_bends = sum(layer_of[dst] - layer_of[src] - 1 for src, dst in edges) <= _MOST_BENDS
    for src, dst in edges:
        before: Vertex = src
        for layer in range(layer_of[src] + 1, layer_of[dst]) if has_bends else ():
            vertex = (src, dst, layer)
            layers[layer].append(vertex)
            passing.setdefault((src, dst), []).append(vertex)
            links[layer][vertex].append(before)
            before = vertex
        if has_bends or layer_of[dst] - layer_of[src] == 1:
            links[layer_of[dst]][dst].append(before)
    return layers, links, passing


def _reorder(layers: list[list[Vertex]], links: Sequence[Mapping[Vertex, list[Vertex]]]) -> None:
    """Reduce edge crossings: sort each layer by the mean position of linked places."""
    place: dict[Vertex, float] = {vertex: index for layer in layers for index, vertex in enumerate(layer)}
    for n, near in _passes(links):
        wish = {vertex: _mean(near.get(vertex), place, vertex) for vertex in layers[n]}
        layers[n].sort(key=wish.__getitem__)
        place.update({vertex: index for index, vertex in enumerate(layers[n])})


def _passes(links: Sequence[Mapping[Vertex, list[Vertex]]]) -> Iterator[tuple[int, Mapping[Vertex, list[Vertex]]]]:
    """Each layer with the links to the layer passed before, in alternating forward and backward passes."""
    back = _reversed(links)
    for _ in range(_SWEEPS):
        yield from enumerate(links)
        yield from reversed(list(enumerate(back)))


def _mean(linked: Sequence[Vertex] | None, at: Mapping[Vertex, float], vertex: Vertex) -> float:
    """The mean position of the linked places; without any, the place's own."""
    return sum(at[other] for other in linked) / len(linked) if linked else at[vertex]


def _reversed(links: Sequence[Mapping[Vertex, list[Vertex]]]) -> list[dict[Vertex, list[Vertex]]]:
    """For each layer, the links of its places to the layer after."""
    found: list[dict[Vertex, list[Vertex]]] = [defaultdict(list) for _ in links]
    for before, linked in zip(found, links[1:], strict=False):
        for vertex, others in linked.items():
            for other in others:
                before[other].append(vertex)
    return found


def _middles(
    layers: Sequence[Sequence[Vertex]], links: Sequence[Mapping[Vertex, list[Vertex]]], heights: Mapping[Vertex, float]
) -> dict[Vertex, float]:
    """The vertical middle of each place: near its linked places, in order, without overlap."""
    found: dict[Vertex, float] = {}
    for layer in layers:
        y = -sum(heights[vertex] + NODE_GAP for vertex in layer) / 2
        for vertex in layer:
            found[vertex] = y + heights[vertex] / 2
            y += heights[vertex] + NODE_GAP
    for n, near in _passes(links):
        wishes = [_mean(near.get(vertex), found, vertex) for vertex in layers[n]]
        found.update(zip(layers[n], _spread(layers[n], wishes, heights), strict=True))
    return found


def _spread(layer: Sequence[Vertex], wishes: Sequence[float], heights: Mapping[Vertex, float]) -> list[float]:
    """The positions closest to the wishes (least squares) that keep order and gaps: adjacent overlapping places are pooled."""
    gaps = ((heights[above] + heights[below]) / 2 + NODE_GAP for above, below in pairwise(layer))
    offsets = list(accumulate(gaps, initial=0.0))[: len(layer)]
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for vertex, wish, shift in zip(layer, wishes, offsets, strict=True):
        weight = _BEND_WEIGHT if isinstance(vertex, tuple) else _UNIT_WEIGHT
        mean, count = wish - shift, 1
        while pools and pools[-1][0] > mean:
            other, other_weight, other_count = pools.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((mean, weight, count))
    starts = [mean for mean, _, count in pools for _ in range(count)]
    return [start + shift for start, shift in zip(starts, offsets, strict=True)]


def _columns(layers: Sequence[Sequence[Vertex]], sizes: Mapping[U, Point]) -> tuple[list[float], list[float]]:
    widths: Mapping[Vertex, Point] = sizes  # type: ignore[assignment]
    lefts: list[float] = []
    rights: list[float] = []
    x = 0.0
    for layer in layers:
        width = max((widths[vertex][0] for vertex in layer if vertex in widths), default=0.0)
        lefts.append(x)
        rights.append(x + width)
        x += width + LAYER_GAP
    return lefts, rights


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


def layout(names: Sequence[str], groups: Sequence[str | None], edges: Iterable[tuple[int, int]]) -> Layout:
    """Lay out tasks given in topological order, each with its group. Edges are pairs of task indexes."""
    # The levels that contain each task, outermost first: the DAG, its outermost group, …, its own group.
    chains = [[ROOT, *chain_of(group)] for group in groups]
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


MOST_TASKS = 5000


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
    found = [] if run_id is None else await overview.states_of_run(conn, run_id=run_id, limit=20 * MOST_TASKS)
    states = node_states(names, found, is_run=run_id is not None)
    layout = _laid_out(names, tuple(task.get("group") for task in tasks), tuple(edges_of(version.spec)))
    raw: Any = version.spec
    groups = tuple(f"{group['name']}." for group in raw.get("mapped_groups", ()))
    mapped = [task.get("mapping") is not None or f"{task.get('group')}.".startswith(groups) for task in tasks]
    nodes = [Node(place, states[place.idx], mapped[place.idx]) for place in layout.nodes]
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
    worst = min(found, key=lambda each: PRECEDENCE.index(each.state))
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
    return layout(names, groups, edges)
