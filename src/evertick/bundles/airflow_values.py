"""The connections and variables that a DAG file of Airflow names in its text. A task names others only when it runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

_BRACES = re.compile(r"\{[{%](.*?)[}%]\}", re.DOTALL)
_TEMPLATE = re.compile(r"\b(?:var\.(?:value|json)|(conn))\.([A-Za-z_]\w*)")


class NamedValues(NamedTuple):
    connections: frozenset[str]
    variables: frozenset[str]


def named_values(text: bytes) -> NamedValues:
    """Nothing for a file that cannot be parsed."""
    connections, variables = set[str](), set[str]()
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        tree = ast.Module(body=[], type_ignores=[])
    for node in ast.walk(tree):
        match node:
            case ast.keyword(arg=str(name), value=ast.Constant(value=str(value))) if name.endswith("conn_id") and value:
                connections.add(value)
            case ast.Call(
                func=ast.Attribute(attr="get", value=ast.Name(id="Variable")), args=[ast.Constant(value=str(value)), *_]
            ):
                if not any(each.arg in ("default", "default_var") for each in node.keywords):
                    variables.add(value)
            case ast.Call(func=ast.Attribute(attr="get_connection"), args=[ast.Constant(value=str(value)), *_]):
                connections.add(value)
            case ast.Constant(value=str(value)) if "{{" in value or "{%" in value:
                for is_connection, name in _TEMPLATE.findall(" ".join(_BRACES.findall(value))):
                    (connections if is_connection else variables).add(name)
    return NamedValues(frozenset(connections), frozenset(variables))


def without_environment(named: NamedValues, environment: Mapping[str, str]) -> NamedValues:
    """Without the names in AIRFLOW_CONN_* and AIRFLOW_VAR_*."""
    return NamedValues(
        frozenset(_unset(named.connections, "AIRFLOW_CONN_", environment)),
        frozenset(_unset(named.variables, "AIRFLOW_VAR_", environment)),
    )


def _unset(names: frozenset[str], prefix: str, environment: Mapping[str, str]) -> Iterator[str]:
    return (name for name in names if prefix + name.upper() not in environment)
