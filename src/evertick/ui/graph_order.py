"""Placement within one level of a graph: layer, order and height of each unit. A unit is any hashable value with a size."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

NODE_GAP, LAYER_GAP = 14.0, 56.0
_SWEEPS = 4
# Long edges reserve a place in each layer that they cross, unless such places would fill most of the graph.
_MOST_BENDS = 2500
_BEND_HEIGHT = 6.0
_BEND_WEIGHT, _UNIT_WEIGHT = 3.0, 1.0

Point = tuple[float, float]
U = TypeVar("U", bound=Hashable)
# A unit, or the place of an edge in a layer that it crosses: (source, target, layer).
Seat = Hashable
Bend = tuple[float, float, float]


def place_levels(
    ranks: Mapping[U, int], sizes: Mapping[U, Point], edges: Collection[tuple[U, U]]
) -> tuple[dict[U, Point], dict[tuple[U, U], list[Bend]], Point]:
    """Return the upper left corner of each unit, the bends of long edges (from x, to x, y) and the total size.

    `ranks` orders the units; edges that go backward in it are ignored.
    """
    forward = [(src, dst) for src, dst in edges if ranks[src] < ranks[dst]]
    layer_of = _layers(ranks, forward)
    layers, links, passing = _seated(ranks, layer_of, forward)
    _reorder(layers, links)
    heights: dict[Seat, float] = {seat: _BEND_HEIGHT for layer in layers for seat in layer}
    heights.update({unit: size[1] for unit, size in sizes.items()})
    middles = _middles(layers, links, heights)
    lefts, rights = _columns(layers, sizes)
    top = min((middles[seat] - heights[seat] / 2 for seat in middles), default=0.0)
    at = {unit: (lefts[layer_of[unit]], middles[unit] - sizes[unit][1] / 2 - top) for unit in ranks}
    bends = {
        pair: [
            (lefts[layer_of[pair[0]] + n], rights[layer_of[pair[0]] + n], middles[seat] - top)
            for n, seat in enumerate(seats, 1)
        ]
        for pair, seats in passing.items()
    }
    bottom = max((middles[seat] + heights[seat] / 2 for seat in middles), default=0.0)
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


def _seated(
    ranks: Mapping[U, int], layer_of: Mapping[U, int], edges: Sequence[tuple[U, U]]
) -> tuple[list[list[Seat]], list[dict[Seat, list[Seat]]], dict[tuple[U, U], list[Seat]]]:
    """Return the layers of places, each layer's links to the layer before, and the places that each long edge crosses."""
    layers: list[list[Seat]] = [[] for _ in range(max(layer_of.values(), default=-1) + 1)]
    links: list[dict[Seat, list[Seat]]] = [defaultdict(list) for _ in layers]
    passing: dict[tuple[U, U], list[Seat]] = {}
    for unit in sorted(ranks, key=ranks.__getitem__):
        layers[layer_of[unit]].append(unit)
    has_bends = sum(layer_of[dst] - layer_of[src] - 1 for src, dst in edges) <= _MOST_BENDS
    for src, dst in edges:
        before: Seat = src
        for layer in range(layer_of[src] + 1, layer_of[dst]) if has_bends else ():
            seat = (src, dst, layer)
            layers[layer].append(seat)
            passing.setdefault((src, dst), []).append(seat)
            links[layer][seat].append(before)
            before = seat
        if has_bends or layer_of[dst] - layer_of[src] == 1:
            links[layer_of[dst]][dst].append(before)
    return layers, links, passing


def _reorder(layers: list[list[Seat]], links: Sequence[Mapping[Seat, list[Seat]]]) -> None:
    """Reduce edge crossings: sort each layer by the mean position of linked places, alternating forward and backward passes."""
    back = _reversed(links)
    for sweep in range(2 * _SWEEPS):
        is_forward = sweep % 2 == 0
        order = range(1, len(layers)) if is_forward else range(len(layers) - 2, -1, -1)
        for n in order:
            fixed = layers[n - 1] if is_forward else layers[n + 1]
            place = {seat: index for index, seat in enumerate(fixed)}
            near = links[n] if is_forward else back[n]
            wish = {}
            for index, seat in enumerate(layers[n]):
                others = near.get(seat)
                wish[seat] = sum(place[other] for other in others) / len(others) if others else float(index)
            layers[n].sort(key=wish.__getitem__)


def _reversed(links: Sequence[Mapping[Seat, list[Seat]]]) -> list[dict[Seat, list[Seat]]]:
    """For each layer, the links of its places to the layer after."""
    found: list[dict[Seat, list[Seat]]] = [defaultdict(list) for _ in links]
    for n in range(1, len(links)):
        for seat, others in links[n].items():
            for other in others:
                found[n - 1][other].append(seat)
    return found


def _middles(
    layers: Sequence[Sequence[Seat]], links: Sequence[Mapping[Seat, list[Seat]]], heights: Mapping[Seat, float]
) -> dict[Seat, float]:
    """The vertical middle of each place: near its linked places, in order, without overlap."""
    back = _reversed(links)
    found: dict[Seat, float] = {}
    for layer in layers:
        y = -sum(heights[seat] + NODE_GAP for seat in layer) / 2
        for seat in layer:
            found[seat] = y + heights[seat] / 2
            y += heights[seat] + NODE_GAP
    for sweep in range(2 * _SWEEPS):
        is_forward = sweep % 2 == 0
        for n in range(len(layers)) if is_forward else range(len(layers) - 1, -1, -1):
            near = links[n] if is_forward else back[n]
            wishes = []
            for seat in layers[n]:
                others = near.get(seat)
                wishes.append(sum(found[other] for other in others) / len(others) if others else found[seat])
            found.update(zip(layers[n], _spread(layers[n], wishes, heights), strict=True))
    return found


def _spread(layer: Sequence[Seat], wishes: Sequence[float], heights: Mapping[Seat, float]) -> list[float]:
    """The positions closest to the wishes (least squares) that keep order and gaps: adjacent overlapping places are pooled."""
    offsets: list[float] = []
    offset = 0.0
    for n, seat in enumerate(layer):
        if n:
            offset += (heights[layer[n - 1]] + heights[seat]) / 2 + NODE_GAP
        offsets.append(offset)
    pools: list[tuple[float, float, int]] = []  # mean, weight, how many
    for seat, wish, shift in zip(layer, wishes, offsets, strict=True):
        weight = _BEND_WEIGHT if isinstance(seat, tuple) else _UNIT_WEIGHT
        mean, count = wish - shift, 1
        while pools and pools[-1][0] > mean:
            other, other_weight, other_count = pools.pop()
            mean = (mean * weight + other * other_weight) / (weight + other_weight)
            weight, count = weight + other_weight, count + other_count
        pools.append((mean, weight, count))
    starts = [mean for mean, _, count in pools for _ in range(count)]
    return [start + shift for start, shift in zip(starts, offsets, strict=True)]


def _columns(layers: Sequence[Sequence[Seat]], sizes: Mapping[U, Point]) -> tuple[list[float], list[float]]:
    widths: Mapping[Seat, Point] = sizes  # type: ignore[assignment]
    lefts: list[float] = []
    rights: list[float] = []
    x = 0.0
    for layer in layers:
        width = max((widths[seat][0] for seat in layer if seat in widths), default=0.0)
        lefts.append(x)
        rights.append(x + width)
        x += width + LAYER_GAP
    return lefts, rights
