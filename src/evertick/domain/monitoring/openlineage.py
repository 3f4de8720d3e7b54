"""Events of OpenLineage from the facts of a run or an attempt. Pure; the ids follow from the facts, so that an event that is
sent again is the same event."""

from __future__ import annotations

import json
from collections.abc import Mapping
from urllib.parse import urlsplit
from uuid import NAMESPACE_URL, uuid5

from evertick.domain.dags.params import JsonValue

_SPEC = "https://openlineage.io/spec"
RUN_EVENT = f"{_SPEC}/2-0-2/OpenLineage.json#/$defs/RunEvent"
_PARENT = f"{_SPEC}/facets/1-2-0/ParentRunFacet.json#/$defs/ParentRunFacet"
_JOB_TYPE = f"{_SPEC}/facets/2-0-4/JobTypeJobFacet.json#/$defs/JobTypeJobFacet"
_ERROR = f"{_SPEC}/facets/1-0-1/ErrorMessageRunFacet.json#/$defs/ErrorMessageRunFacet"
_NOMINAL = f"{_SPEC}/facets/1-0-1/NominalTimeRunFacet.json#/$defs/NominalTimeRunFacet"
DEFAULT_NAMESPACE = "evertick"

Fact = Mapping[str, JsonValue]
Json = dict[str, object]


def lineage_body(fact: Fact, *, namespace: str, producer: str) -> bytes:
    return json.dumps(lineage_event(fact, namespace=namespace, producer=producer)).encode()


def lineage_event(fact: Fact, *, namespace: str, producer: str) -> Json:
    """`namespace` names the installation; `producer` is a URI of this program."""
    task = fact.get("task")
    run_id = _id(fact, "run", fact["run_started_at"])
    facets: Json = {}

    def facet(schema: str, **fields: object) -> Json:
        return {"_producer": producer, "_schemaURL": schema, **fields}

    if task is not None:
        parent = {"run": {"runId": run_id}, "job": {"namespace": namespace, "name": fact["dag"]}}
        facets["parent"] = facet(_PARENT, **parent)
        run_id = _id(fact, "task", fact["idx"], fact.get("map_index", -1), fact["epoch"])
    elif fact.get("due_at"):
        facets["nominalTime"] = facet(_NOMINAL, nominalStartTime=fact["due_at"])
    if fact["type"] == "FAIL":
        message = str(fact.get("reason") or "failed")
        facets["errorMessage"] = facet(_ERROR, message=message, programmingLanguage="PYTHON")
    kind = facet(_JOB_TYPE, processingType="BATCH", integration="EVERTICK", jobType="DAG" if task is None else "TASK")
    name = str(fact["dag"]) if task is None else f"{fact['dag']}.{task}"
    return {
        "eventType": fact["type"],
        "eventTime": fact["at"],
        "producer": producer,
        "schemaURL": RUN_EVENT,
        "run": {"runId": run_id, "facets": facets},
        "job": {"namespace": namespace, "name": name, "facets": {"jobType": kind}},
        "inputs": _datasets(fact.get("inputs"), namespace),
        "outputs": _datasets(fact.get("outputs"), namespace),
    }


def _id(fact: Fact, *parts: object) -> str:
    return str(uuid5(NAMESPACE_URL, "/".join(map(str, ("evertick:", fact["installation"], fact["run"], *parts)))))


def _datasets(found: JsonValue, namespace: str) -> list[Json]:
    """By their URIs: the namespace is where the data is, the name what it is called there."""
    sets: list[Json] = []
    for each in found if isinstance(found, list) else []:
        assert isinstance(each, Mapping)
        uri = str(each["uri"])
        parts = urlsplit(uri)
        if parts.scheme and (parts.netloc or parts.path):
            place = f"{parts.scheme}://{parts.netloc}" if parts.netloc else parts.scheme
            sets.append({"namespace": place, "name": parts.path.lstrip("/") or "/"})
        else:
            sets.append({"namespace": namespace, "name": uri})
    return sets
