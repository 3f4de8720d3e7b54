"""The table of operations is complete and consistent."""

from __future__ import annotations

import inspect
import re
from typing import get_args

import pytest

from evertick.domain.access import MATRIX
from evertick.operations.routes import ROUTES, Route

IDS = [f"{route.method} {route.path}" for route in ROUTES]


@pytest.mark.parametrize("route", ROUTES, ids=IDS)
def test_a_row_fits_its_function(route: Route) -> None:
    parameters = inspect.signature(route.function, eval_str=True).parameters
    first, *given = parameters.values()
    assert first.name == "caller"
    assert all(each.kind is inspect.Parameter.KEYWORD_ONLY for each in given), "operations are called by name"
    assert set(re.findall(r"{(\w+)}", route.path)) <= parameters.keys()
    assert route.fixed.keys() <= parameters.keys()
    assert route.permission in MATRIX
    assert route.function.__doc__, "the API's document shows it"


@pytest.mark.parametrize("route", [route for route in ROUTES if route.stream is not None], ids=lambda route: route.path)
def test_a_stream_takes_the_parameters_of_its_row(route: Route) -> None:
    assert route.stream is not None and inspect.iscoroutinefunction(route.stream), "it refuses before it begins"
    pages, stream = (inspect.signature(each).parameters.keys() for each in (route.function, route.stream))
    assert stream - pages == {"after"}, "where to continue"
    (events,) = {get_args(inspect.signature(route.stream, eval_str=True).return_annotation)[0]}
    names = [kind.event for kind in get_args(events)]
    assert len(set(names)) == len(names) and any(kind.is_last for kind in get_args(events))


def test_each_row_has_a_name_of_its_own() -> None:
    names = [route.name or route.function.__name__ for route in ROUTES]
    assert len(set(names)) == len(names), "clients call operations by these names"


def test_no_path_is_listed_twice() -> None:
    assert len(set(IDS)) == len(IDS)
