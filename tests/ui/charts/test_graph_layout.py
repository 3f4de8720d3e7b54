"""The picture of a DAG: arrows go to the right, boxes hold their own and nothing else, and size costs little."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

import pytest

from evertick.ui.charts.graph import Layout, PlacedGroup, PlacedNode, layout, short


def chain_of(layers: int, width: int, seed: int = 7) -> tuple[list[str], list[str | None], list[tuple[int, int]]]:
    """Layers of tasks, each after two or three of the layer before, and some long arrows."""
    pick = random.Random(seed)
    names = [f"task_{layer}_{place}" for layer in range(layers) for place in range(width)]
    edges = {
        ((layer - 1) * width + pick.randrange(width), layer * width + place)
        for layer in range(1, layers)
        for place in range(width)
        for _ in range(3)
    }
    edges |= {(pick.randrange(width), (layers - 1) * width + pick.randrange(width)) for _ in range(width)}
    return names, [None] * len(names), sorted(edges)


def overlaps(one: PlacedNode | PlacedGroup, other: PlacedNode | PlacedGroup) -> bool:
    return (
        one.x < other.x + other.width
        and other.x < one.x + one.width
        and one.y < other.y + other.height
        and other.y < one.y + one.height
    )


def contains(box: PlacedGroup, node: PlacedNode | PlacedGroup) -> bool:
    return (
        box.x <= node.x
        and box.y <= node.y
        and node.x + node.width <= box.x + box.width
        and node.y + node.height <= box.y + box.height
    )


def assert_sound(drawn: Layout, groups: Sequence[str | None], edges: Sequence[tuple[int, int]]) -> None:
    for place, node in enumerate(drawn.nodes):
        assert node.x >= 0 and node.x + node.width <= drawn.width
        assert node.y >= 0 and node.y + node.height <= drawn.height
        for other in drawn.nodes[place + 1 :]:
            assert not overlaps(node, other), (node, other)
        for box in drawn.groups:
            own = groups[place]
            is_inside = own is not None and (own == box.name or own.startswith(f"{box.name}."))
            assert contains(box, node) if is_inside else not overlaps(box, node), (box, node)
    assert sorted((edge.src, edge.dst) for edge in drawn.edges) == sorted(edges)


def test_arrows_go_to_the_right_and_nothing_overlaps() -> None:
    names, groups, edges = chain_of(8, 6)
    drawn = layout(names, groups, edges)
    assert_sound(drawn, groups, edges)
    for src, dst in edges:
        assert drawn.nodes[src].x + drawn.nodes[src].width < drawn.nodes[dst].x
    assert [node.name for node in drawn.nodes] == names


def test_groups_are_boxes_in_boxes() -> None:
    names = ["start", "a.x", "a.y", "a.in.z", "b.one", "b.two", "end"]
    groups = [None, "a", "a", "a.in", "b", "b", None]
    edges = [(0, 1), (1, 2), (1, 3), (0, 4), (4, 5), (2, 6), (3, 6), (5, 6), (2, 5)]
    drawn = layout(names, groups, edges)
    assert_sound(drawn, groups, edges)
    assert [(box.name, box.label, box.depth) for box in drawn.groups] == [
        ("a", "a", 0),
        ("b", "b", 0),
        ("a.in", "in", 1),
    ]
    assert [node.label for node in drawn.nodes] == ["start", "x", "y", "z", "one", "two", "end"]


def test_groups_that_wait_for_each_other_can_still_be_drawn() -> None:
    """a.first → b.only → a.last: as boxes a circle."""
    names, groups, edges = ["a.first", "b.only", "a.last"], ["a", "b", "a"], [(0, 1), (1, 2)]
    assert_sound(layout(names, groups, edges), groups, edges)


@pytest.mark.parametrize("count", [0, 1])
def test_the_smallest_pictures(count: int) -> None:
    drawn = layout(["t"] * count, [None] * count, [])
    assert len(drawn.nodes) == count and drawn.width > 0


def test_a_diamond_crosses_nothing() -> None:
    drawn = layout(["a", "b", "c", "d"], [None] * 4, [(0, 1), (0, 2), (1, 3), (2, 3)])
    a, b, c, d = drawn.nodes
    middle = (b.y + c.y) / 2
    assert b.x == c.x and abs(a.y - middle) < 1 and abs(d.y - middle) < 1


def test_long_names_are_cut_on_the_picture_only() -> None:
    drawn = layout(["n" * 200], [None], [])
    assert drawn.nodes[0].name == "n" * 200 and drawn.nodes[0].label == short("n" * 200) and drawn.width < 400


def test_five_hundred_tasks_cost_little() -> None:
    """It takes some 60 ms; the bound is for a machine that is busy with other things."""
    names, groups, edges = chain_of(20, 25)
    groups = [f"g{place % 5}" if place % 3 else None for place in range(500)]
    began = time.process_time()
    drawn = layout(names, groups, edges)
    assert len(drawn.nodes) == 500
    assert time.process_time() - began < 1.0
