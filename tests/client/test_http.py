"""Calls to a server are encoded by the table of operations."""

from __future__ import annotations

from evertick.client.wire import encoded
from evertick.operations.routes import Route, route_of
from evertick.operations.runs import ClearRequest, clear_run, list_runs, show_run


def call(operation: object, **params: object) -> tuple[object, ...]:
    route: Route = route_of(operation, params)  # type: ignore[arg-type]
    return (route.method, *encoded(route, params))


def test_parameters_go_to_the_path_and_the_query() -> None:
    assert call(show_run, run_id=7) == ("GET", "/runs/7", {}, {}, None)
    assert call(list_runs, dag="a/b", state=None, limit=5) == ("GET", "/runs", {"dag": "a/b", "limit": 5}, {}, None)


def test_a_body_is_json_and_names_are_quoted() -> None:
    method, path, query, headers, content = call(clear_run, run_id=7, body=ClearRequest(tasks=["a"], is_preview=True))
    assert (method, path, query) == ("POST", "/runs/7/clear", {})
    assert headers == {"Content-Type": "application/json"}
    assert content == (
        b'{"tasks":["a"],"only_failed":false,"with_downstream":false,"run_on_latest_version":false,"is_preview":true}'
    )
