"""Assets of Airflow: what is published about them, the messages about them, and the updates that a task describes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from airflow.sdk import Asset, exceptions
from airflow.sdk.api.datamodels._generated import AssetEventDagRunReference, AssetEventResponse
from airflow.sdk.execution_time import comms

from evertick.attempts.protocol import Ask
from evertick.domain.dags.spec import AssetSpec


def asset_name(asset: Any) -> str | None:
    """The name under which Evertick records an asset's updates; None for what is no single asset with a name."""
    if isinstance(asset, Asset) or type(asset).__name__ == "AssetNameRef":
        return str(asset.name)
    return None


def is_alias(asset: Any) -> bool:
    return type(asset).__name__ == "AssetAlias"


def asset_specs(dag: Any) -> tuple[AssetSpec, ...]:
    """All assets that a DAG names: what it updates, reads or waits for."""
    named = {each.name: each for each in _assets_of(dag)}
    return tuple(
        AssetSpec(
            name=name,
            uri="" if each.uri == name else str(each.uri),
            group=str(getattr(each, "group", "") or "asset"),
            extra=json.loads(json.dumps(each.extra or {}, default=str)),
        )
        for name, each in sorted(named.items())
    )


def _assets_of(dag: Any) -> Iterator[Any]:
    for task in dag.task_dict.values():
        yield from (each for each in (*(task.inlets or ()), *(task.outlets or ())) if isinstance(each, Asset))
    condition = getattr(dag.timetable, "asset_condition", None)
    yield from _single(() if condition is None else (condition,))


def _single(conditions: Iterable[Any]) -> Iterator[Any]:
    for each in conditions:
        if isinstance(each, Asset):
            yield each
        yield from _single(getattr(each, "objects", ()))


def described_updates(message: Any, outlets: Iterable[Any]) -> list[dict[str, Any]]:
    """What a successful task says about its updates: an `extra` and partitions of outlets, and assets that it names through
    aliases."""
    known = {asset_name(each) for each in outlets}
    found = []
    for event in getattr(message, "outlet_events", None) or ():
        key, extra = event["dest_asset_key"], event.get("extra") or {}
        if alias := event.get("source_alias_name"):
            about = {"alias": alias, "asset_extra": event.get("dest_asset_extra") or {}}
            found.append({"asset": key["name"], "uri": key["uri"], "extra": extra, **about})
        elif key["name"] in known and (extra or event.get("partition_key")):
            partition = event.get("partition_key")
            found.append({"asset": key["name"], "extra": extra, "alias": None, "partition_key": partition})
    return json.loads(json.dumps(found, default=str))  # type: ignore[no-any-return]


def asset_answer(name: str, ask: Ask) -> Callable[[Any], Any] | None:
    """How a message with this name is answered; None if it is not about assets."""
    match name:
        case "GetAssetByName" | "GetAssetByUri":
            return lambda msg: _asset(ask, msg)
        case "GetAssetsByAlias":
            return lambda msg: comms.AssetsByAliasResult(assets=ask("aliased", {"alias": msg.alias_name}))
        case "GetAssetEventByAsset" | "GetAssetEventByAssetAlias":
            return lambda msg: _events(ask, msg)
    return None


def _asset(ask: Ask, msg: Any) -> Any:
    wanted = {"name": getattr(msg, "name", None), "uri": getattr(msg, "uri", None)}
    found = ask("asset", wanted)
    if found is None:
        kind = exceptions.ErrorType["ASSET_NOT_FOUND"]
        return comms.ErrorResponse(error=kind, detail={key: value for key, value in wanted.items() if value})
    return comms.AssetResult(**found)


def _events(ask: Ask, msg: Any) -> Any:
    after, before = getattr(msg, "after", None), getattr(msg, "before", None)
    wanted = {
        "name": getattr(msg, "name", None),
        "uri": None if getattr(msg, "name", None) else getattr(msg, "uri", None),
        "alias": getattr(msg, "alias_name", None),
        "after": after and after.isoformat(),
        "before": before and before.isoformat(),
        "limit": getattr(msg, "limit", None),
        "ascending": getattr(msg, "ascending", True),
        "partition_key": getattr(msg, "partition_key", None),
    }
    found = [
        {
            "id": each["id"],
            "timestamp": each["timestamp"],
            "extra": each["extra"],
            "asset": each["asset"],
            "created_dagruns": [],
            **_partition(each, AssetEventResponse),
            **_source(each),
        }
        for each in ask("asset_events", wanted)
    ]
    return comms.AssetEventsResult(asset_events=found)


def consumed_events(found: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The updates that have started a run, for the `DagRun` of its tasks."""
    return [
        {
            "asset": {name: each["asset"][name] for name in ("name", "uri", "extra")},
            "extra": each["extra"],
            "timestamp": each["timestamp"],
            "source_aliases": [] if each["alias"] is None else [{"name": each["alias"]}],
            **_partition(each, AssetEventDagRunReference),
            **_source(each),
        }
        for each in found
    ]


def _partition(each: Mapping[str, Any], model: Any) -> dict[str, Any]:
    """Since Airflow 3.2."""
    return {"partition_key": each.get("partition_key")} if "partition_key" in model.model_fields else {}


def _source(each: Mapping[str, Any]) -> dict[str, Any]:
    return {f"source_{name}": each[key] for name, key in _SOURCES.items()}


_SOURCES = {"dag_id": "dag", "run_id": "run", "task_id": "task", "map_index": "map_index"}
