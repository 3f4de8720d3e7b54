"""Mapped tasks and groups as the tables hold them: how they expand, over what, and how edges into a group count."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from evertick.domain.dags.graph import map_heads, mapping_at
from evertick.domain.dags.params import JsonValue
from evertick.domain.dags.spec import DagSpec

JsonObject = dict[str, object]


def mapping_rows(spec: DagSpec, position: Mapping[str, int]) -> JsonObject:
    """How mapped tasks expand, and over what."""
    heads = map_heads(spec)
    mapped = [
        (index, mapping)
        for index, head in enumerate(heads)
        if head in (None, index) and (mapping := mapping_at(spec, index)) is not None
    ]
    return {
        "mappings": [{"idx": index, "how": mapping.how, "most": mapping.most} for index, mapping in mapped],
        "lists": [
            {
                "idx": index,
                "place": place,
                "src": position[each.task] if each.task else None,
                "length": each.length,
                **({"size": _placed(each.size, position)} if each.size else {}),
            }
            for index, mapping in mapped
            for place, each in enumerate(mapping.lists)
        ],
    }


def _placed(size: Mapping[str, JsonValue], position: Mapping[str, int]) -> JsonObject:
    """How the length of a list is computed, with positions in place of the names of tasks."""
    if "task" in size:
        return {"src": position[str(size["task"])]}
    return {how: [_placed(each, position) for each in parts] for how, parts in size.items()}  # type: ignore[union-attr, arg-type]


def mapped_group_rows(spec: DagSpec, heads: Sequence[int | None]) -> list[JsonObject]:
    """What each task of a mapped group, and each task that one waits for, has in addition. Only the row of a group's first task
    waits for its lists; the number of another one is never reached."""
    scopes = {(up, down): edge_scope(spec, up, down, heads) for up, down in spec.edges}
    lists = Counter(down for (_, down), scope in scopes.items() if scope == "list")
    feeding = {up for (up, _), scope in scopes.items() if scope in ("each_index", "list")}
    rows: list[JsonObject] = [{"feeds_instances": True} if index in feeding else {} for index in range(len(heads))]
    for index, head in enumerate(heads):
        if head is not None:
            is_head = head == index
            rows[index] |= {
                "map_head": head,
                "lists_total": lists[index] if is_head else 1,
                "is_mapped": True,
                "starts_at_once": is_head and not lists[index],
            }
    return rows


def edge_scope(spec: DagSpec, up: int, down: int, heads: Sequence[int | None]) -> str | None:
    """How an edge into a mapped group counts; None for every other edge."""
    head = heads[down]
    if head is None:
        return None
    if heads[up] == head:
        return "same_index"
    mapping = mapping_at(spec, down)
    is_list = mapping is not None and any(spec.tasks[up].name in each.tasks for each in mapping.lists)
    return "list" if is_list and down == head else "each_index"
