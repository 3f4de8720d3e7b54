"""Our answers have the fields, the enums and the nulls of the official client's own models."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

import airflow_client.client as airflow
import pytest
from pydantic import BaseModel

from evertick.api.airflow import dag_shapes, other_shapes, run_shapes
from evertick.api.airflow.dag_shapes import Shape

# Ours: theirs, where the name says nothing to us.
RENAMED = {"VersionResponse": "VersionInfo"}
LISTS = {
    "DagRunState": airflow.DagRunState,
    "DagRunType": airflow.DagRunType,
    "DagRunTriggeredByType": airflow.DagRunTriggeredByType,
    "DagWarningType": airflow.DagWarningType,
    "ReprocessBehavior": airflow.ReprocessBehavior,
    "TaskInstanceState": airflow.TaskInstanceState,
}


def shapes() -> Iterator[type[Shape]]:
    for module in (dag_shapes, run_shapes, other_shapes):
        for _, found in inspect.getmembers(module, inspect.isclass):
            if issubclass(found, Shape) and found is not Shape and found.__module__ == module.__name__:
                yield found


def theirs_of(shape: type[Shape]) -> type[BaseModel]:
    found: type[BaseModel] = getattr(airflow, RENAMED.get(shape.__name__, shape.__name__))
    return found


def fields_of(model: type[BaseModel]) -> dict[str, Any]:
    return {
        each.alias or name: each for name, each in model.model_fields.items() if name not in ("additional_properties",)
    }


def takes_none(annotation: Any) -> bool:
    return annotation is Any or type(None) in typing.get_args(annotation)


@pytest.mark.parametrize("shape", sorted(shapes(), key=lambda each: each.__name__), ids=lambda each: each.__name__)
def test_a_shape_has_the_clients_fields(shape: type[Shape]) -> None:
    ours, theirs = fields_of(shape), fields_of(theirs_of(shape))
    assert ours.keys() == theirs.keys()
    for name, field in theirs.items():
        if field.is_required() and not takes_none(field.annotation):
            assert ours[name].is_required() or not takes_none(ours[name].annotation), f"{name} must have a value"


@pytest.mark.parametrize("name", sorted(LISTS))
def test_an_enum_has_the_clients_words(name: str) -> None:
    kind: type[Enum] = LISTS[name]
    assert sorted(typing.get_args(getattr(dag_shapes, name))) == sorted(each.value for each in kind)


def test_a_missing_field_would_be_found() -> None:
    assert isinstance(airflow.models, types.ModuleType)
    assert fields_of(airflow.PoolResponse).keys() != fields_of(airflow.PoolBody).keys()
