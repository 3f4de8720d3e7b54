"""The answers of the Airflow API have the fields, enums and nulls of the official client's models."""

from __future__ import annotations

import inspect
import subprocess
import sys
import typing
from collections.abc import Iterator
from enum import Enum
from typing import Any

import airflow_client.client as airflow
import pytest
from pydantic import BaseModel

from evertick.api.airflow import models
from tests.source_tree import ROOT

ENUMS = [
    airflow.DagRunState,
    airflow.DagRunTriggeredByType,
    airflow.DagRunType,
    airflow.DagWarningType,
    airflow.ReprocessBehavior,
    airflow.TaskInstanceState,
]


def our_models() -> Iterator[type[BaseModel]]:
    for _, found in inspect.getmembers(models, inspect.isclass):
        if issubclass(found, BaseModel) and found.__module__ == models.__name__:
            yield found


def fields_of(model: type[BaseModel]) -> dict[str, Any]:
    return {
        each.alias or name: each for name, each in model.model_fields.items() if name not in ("additional_properties",)
    }


def takes_none(annotation: Any) -> bool:
    return annotation is Any or type(None) in typing.get_args(annotation)


def test_the_module_is_generated_from_the_installed_client() -> None:
    command = [sys.executable, str(ROOT / "tools" / "airflow_models.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("model", sorted(our_models(), key=lambda each: each.__name__), ids=lambda each: each.__name__)
def test_a_model_has_the_fields_of_the_client(model: type[BaseModel]) -> None:
    ours, theirs = fields_of(model), fields_of(getattr(airflow, model.__name__))
    assert ours.keys() == theirs.keys()
    for name, field in theirs.items():
        assert ours[name].is_required() == field.is_required(), name
        if field.is_required() and not takes_none(field.annotation):
            assert not takes_none(ours[name].annotation), f"{name} must have a value"


@pytest.mark.parametrize("theirs", ENUMS, ids=lambda each: each.__name__)
def test_an_enum_has_the_values_of_the_client(theirs: type[Enum]) -> None:
    assert typing.get_args(getattr(models, theirs.__name__)) == tuple(each.value for each in theirs)


def test_a_missing_field_would_be_found() -> None:
    assert fields_of(airflow.PoolResponse).keys() != fields_of(airflow.PoolBody).keys()
