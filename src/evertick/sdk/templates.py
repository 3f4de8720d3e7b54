"""Jinja templates in the fields of shell and HTTP tasks: checked when the DAG file is loaded, rendered where the task runs.

Sandboxed, and an unknown name is an error. `sdk/shell_templates.py` has the templates of shell commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from evertick.domain.errors import InvalidTemplate
from evertick.sdk.runtime import CONTEXT_NAMES
from evertick.sdk.source_location import refused

if TYPE_CHECKING:
    from jinja2 import Environment

# The names that a template may use. `params.rows`, `inputs.orders`, `secrets.token`, …
NAMES = frozenset((*CONTEXT_NAMES, "inputs"))
_LONGEST = 100_000


class Unquoted(str):
    """Text that is inserted unchanged, because the template says `| unquoted`."""

    __slots__ = ()


def is_template(text: object) -> bool:
    return isinstance(text, str) and ("{{" in text or "{%" in text)


def check_template(owner: str, field: str, text: str, known: Mapping[str, Collection[str]]) -> set[str]:
    """Refuse a template that can never be rendered, at its line of the DAG file. Returns the params that it uses.

    `known` has the names of the task's `inputs`, `secrets` and so on.
    """
    if not is_template(text):
        return set()
    from jinja2 import TemplateSyntaxError, meta, nodes

    environment = jinja_environment(as_text)
    try:
        tree = environment.parse(text)
        environment.from_string(text)
    except TemplateSyntaxError as error:
        hint = "Set template=False if these braces are not a template."
        raise refused(
            f"{owner}: {field} is not a valid template: {error.message} (line {error.lineno}). {hint}"
        ) from None
    if unknown := sorted(meta.find_undeclared_variables(tree) - NAMES):
        raise refused(f"{owner}: {field} uses {_listed(unknown)}; a template can use: {', '.join(sorted(NAMES))}.")
    params = set()
    found: list[nodes.Getattr | nodes.Getitem] = [*tree.find_all(nodes.Getattr), *tree.find_all(nodes.Getitem)]
    for node in found:
        part = node.attr if isinstance(node, nodes.Getattr) else getattr(node.arg, "value", None)
        if not isinstance(node.node, nodes.Name) or not isinstance(part, str):
            continue
        what = node.node.name
        if what == "params":
            params.add(part)
        elif part not in known.get(what, (part,)):
            raise refused(
                f"{owner}: {field} uses {what}.{part}, which the task does not declare: add {what}=[{part!r}]."
            )
    return params


def _listed(unknown: list[str]) -> str:
    """The unknown names, each of Airflow's with what to write instead."""
    from evertick.sdk.airflow_names import TEMPLATES

    return ", ".join(f"{name!r} ({TEMPLATES[name]})" if name in TEMPLATES else repr(name) for name in unknown)


def render_text(text: str, names: Mapping[str, object]) -> str:
    """For a header or another plain field."""
    return render(text, names, as_text)


def render_url(text: str, names: Mapping[str, object]) -> str:
    """Values are escaped, so that none of them can change the structure of the URL."""
    return render(text, names, lambda value: value if isinstance(value, Unquoted) else quote(as_text(value), safe=""))


def render_json(value: Any, names: Mapping[str, object]) -> Any:
    """A JSON body, leaf by leaf. A leaf that is exactly one expression keeps the expression's type."""
    if isinstance(value, Mapping):
        return {str(render_json(key, names)): render_json(item, names) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [render_json(item, names) for item in value]
    if not is_template(value):
        return value
    inner = value.strip()
    if inner.startswith("{{") and inner.endswith("}}") and inner.count("{{") == 1 and "{%" not in inner:
        return _evaluate(inner[2:-2], names)
    return render_text(value, names)


def render(text: str, names: Mapping[str, object], write: Callable[[object], str]) -> str:
    if not is_template(text):
        return text
    with _rendering(text):
        done = jinja_environment(write).from_string(text).render(names)
    if len(done) > _LONGEST:
        raise InvalidTemplate(
            f"the template {text!r:.100} renders to {len(done):,} characters; at most {_LONGEST:,} are allowed."
        )
    return done


def _evaluate(expression: str, names: Mapping[str, object]) -> object:
    with _rendering(expression):
        found: object = jinja_environment(as_text).compile_expression(expression, undefined_to_none=False)(**names)
        if type(found).__name__ == "StrictUndefined":
            str(found)
        return found


@contextmanager
def _rendering(text: str) -> Generator[None]:
    """Any error of a template or of its values, in one line."""
    from jinja2 import TemplateError as JinjaError

    try:
        yield
    except (JinjaError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InvalidTemplate(f"the template {text!r:.100} cannot be rendered: {error}") from None


def jinja_environment(write: Callable[[object], str]) -> Environment:
    from jinja2 import StrictUndefined, Undefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def finalize(value: object) -> str:
        if isinstance(value, Undefined):
            str(value)  # a strict undefined raises here and names the missing value
        return write(value)

    environment = ImmutableSandboxedEnvironment(
        undefined=StrictUndefined,
        finalize=finalize,
        autoescape=False,
        keep_trailing_newline=True,
        # `${#list}` is shell syntax, not a Jinja comment.
        comment_start_string="{#--",
        comment_end_string="--#}",
    )
    environment.filters["unquoted"] = lambda value: Unquoted(as_text(value))
    environment.filters["json"] = lambda value: json.dumps(value, default=str)
    return environment


def as_text(value: object) -> str:
    """Text is unchanged, other values become JSON, and types that JSON lacks their text: dates in ISO 8601."""
    if isinstance(value, str):
        return value
    if isoformat := getattr(value, "isoformat", None):
        return str(isoformat())
    if value is None or isinstance(value, bool | int | float | list | tuple | dict):
        return json.dumps(value, default=str)
    return str(value)
