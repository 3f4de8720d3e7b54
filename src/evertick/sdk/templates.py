"""Jinja templates in the fields of shell and HTTP tasks: checked when the DAG file is loaded, rendered where the task runs.

Sandboxed, and an unknown name is an error. In a shell command a value never becomes part of the command's text: it is stored in a
variable of the command's environment, and the text contains a quoted reference to that variable.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from evertick.domain.errors import InvalidTemplate
from evertick.sdk.source_location import refused

if TYPE_CHECKING:
    from jinja2 import Environment

# The names that a template may use. `params.rows`, `inputs.orders`, `secrets.token`, …
NAMES = frozenset(
    {
        *("params", "inputs", "variables", "connections", "secrets"),
        *("run_id", "dag", "task", "map_index", "attempt", "idempotency_key"),
        *("fire_at", "data_interval_start", "data_interval_end"),
    }
)
_VARIABLE = "EVERTICK_VALUE_"
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

    environment = _environment(_as_text)
    try:
        tree = environment.parse(text)
        environment.from_string(text)
    except TemplateSyntaxError as error:
        hint = "Set template=False if these braces are not a template."
        raise refused(
            f"{owner}: {field} is not a valid template: {error.message} (line {error.lineno}). {hint}"
        ) from None
    if unknown := sorted(meta.find_undeclared_variables(tree) - NAMES):
        raise refused(f"{owner}: {field} uses {unknown[0]!r}; a template can use: {', '.join(sorted(NAMES))}.")
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


def render_text(text: str, names: Mapping[str, object]) -> str:
    """For a header or another plain field."""
    return _render(text, names, _as_text)


def render_url(text: str, names: Mapping[str, object]) -> str:
    """Values are escaped, so that none of them can change the structure of the URL."""
    return _render(text, names, lambda value: value if isinstance(value, Unquoted) else quote(_as_text(value), safe=""))


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


def render_shell(text: str, names: Mapping[str, object]) -> tuple[str, dict[str, str]]:
    """The command, and the variables that hold its values: `echo {{ params.who }}` is `echo "${EVERTICK_VALUE_0}"`.

    The quotes fit the position: within double quotes none are added, single ones are closed and reopened.
    """
    values: dict[str, str] = {}

    def hold(value: object) -> str:
        if isinstance(value, Unquoted):
            return value
        name = f"{_VARIABLE}{len(values)}"
        values[name] = _as_text(value)
        if "\x00" in values[name]:
            raise ValueError("a value has a NUL character, which a command cannot contain")
        return f"\x00{name}\x00"

    pieces = _render(text, names, hold).split("\x00")
    for place in range(1, len(pieces), 2):
        within = _quote_after("".join(pieces[:place]))
        variable = f"${{{pieces[place]}}}"
        pieces[place] = {"": f'"{variable}"', '"': variable, "'": f"'\"{variable}\"'"}[within]
    return "".join(pieces), values


def _quote_after(text: str) -> str:
    """The quote that is open at the end of this part of a command. A mistake can split a value into words, never run it."""
    open_quote, is_escaped = "", False
    for character in text:
        if is_escaped:
            is_escaped = False
        elif character == "\\" and open_quote != "'":
            is_escaped = True
        elif character == open_quote:
            open_quote = ""
        elif character in "\"'" and not open_quote:
            open_quote = character
    return open_quote


def _render(text: str, names: Mapping[str, object], write: Callable[[object], str]) -> str:
    if not is_template(text):
        return text
    from jinja2 import TemplateError as JinjaError

    try:
        done = _environment(write).from_string(text).render(names)
    except (JinjaError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InvalidTemplate(f"the template {text!r:.100} cannot be rendered: {error}") from None
    if len(done) > _LONGEST:
        raise InvalidTemplate(
            f"the template {text!r:.100} renders to {len(done):,} characters; at most {_LONGEST:,} are allowed."
        )
    return done


def _evaluate(expression: str, names: Mapping[str, object]) -> object:
    from jinja2 import TemplateError as JinjaError

    try:
        found: object = _environment(_as_text).compile_expression(expression, undefined_to_none=False)(**names)
        if type(found).__name__ == "StrictUndefined":
            str(found)
        return found
    except (JinjaError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        raise InvalidTemplate(f"the template {expression!r:.100} cannot be rendered: {error}") from None


def _environment(write: Callable[[object], str]) -> Environment:
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
    environment.filters["unquoted"] = lambda value: Unquoted(_as_text(value))
    environment.filters["json"] = lambda value: json.dumps(value, default=str)
    return environment


def _as_text(value: object) -> str:
    """Text is unchanged, other values become JSON, and types that JSON lacks their text: dates in ISO 8601."""
    if isinstance(value, str):
        return value
    if isoformat := getattr(value, "isoformat", None):
        return str(isoformat())
    if value is None or isinstance(value, bool | int | float | list | tuple | dict):
        return json.dumps(value, default=str)
    return str(value)
