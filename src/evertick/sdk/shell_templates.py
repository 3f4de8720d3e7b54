"""The templates of shell commands: a value never becomes part of the command's text. It is stored in a variable of the command's
environment, and the text contains a quoted reference to that variable.

A command in which that variable could become code is refused twice: when the DAG is published, for each branch of its template,
and before it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jinja2 import nodes

from evertick.domain.errors import InvalidTemplate
from evertick.sdk.shell_safety import check_command
from evertick.sdk.shell_syntax import Unproven
from evertick.sdk.source_location import refused
from evertick.sdk.templates import Unquoted, as_text, is_template, jinja_environment, render

_VARIABLE = "EVERTICK_VALUE_"
_MOST_BRANCHES = 64
_UNSAFE = (
    "To run it as it is, with values that may become code, add unsafe_template=True: then every person and program that can set"
    " a parameter can run commands on the runner."
)


def check_shell_template(owner: str, command: str) -> None:
    """Refuse a command in which a value could become code, at its line of the DAG file."""
    if not is_template(command):
        return
    try:
        for text in _branches(command):
            check_command(text)
    except Unproven as error:
        raise refused(
            f"{owner}: its command is refused, because a value could run as code: {error}. {_UNSAFE}"
        ) from None


def render_shell(text: str, names: Mapping[str, object], *, is_unsafe: bool = False) -> tuple[str, dict[str, str]]:
    """The command, and the variables that hold its values: `echo {{ params.who }}` is `echo "${EVERTICK_VALUE_0}"`.

    The quotes fit the position: within double quotes none are added, single ones are closed and reopened.
    """
    values: dict[str, str] = {}

    def hold(value: object) -> str:
        if isinstance(value, Unquoted) and is_unsafe:
            return value
        name = f"{_VARIABLE}{len(values)}"
        values[name] = as_text(value)
        if "\x00" in values[name]:
            raise ValueError("a value has a NUL character, which a command cannot contain")
        return f"\x00{name}\x00"

    if not is_template(text):
        return text, values
    rendered = render(text, names, hold)
    pieces = rendered.split("\x00")
    try:
        quotes = _quotes_before(pieces) if is_unsafe else check_command(rendered)
    except Unproven as error:
        raise InvalidTemplate(
            f"the template {text!r:.100} is refused, because a value could run as code: {error}."
        ) from None
    for place, within in zip(range(1, len(pieces), 2), quotes, strict=True):
        variable = f"${{{pieces[place]}}}"
        pieces[place] = f"'\"{variable}\"'" if within == "'" else variable if within else f'"{variable}"'
    return "".join(pieces), values


def _branches(command: str) -> list[str]:
    """The texts that the template can render to, with places for its values: each branch, and each loop never, once and twice."""

    def texts_of(body: Sequence[nodes.Node]) -> list[str]:
        found = [""]
        for node in body:
            options = texts_of_node(node)
            found = [text + option for text in found for option in options][:_MOST_BRANCHES]
        return found

    def texts_of_node(node: nodes.Node) -> list[str]:
        if isinstance(node, nodes.TemplateData):
            return [node.data]
        if isinstance(node, nodes.Output):
            return texts_of(node.nodes)
        if isinstance(node, nodes.If):
            return [text for body in (node.body, node.elif_, node.else_) for text in texts_of(body)]
        if isinstance(node, nodes.For):
            return [*texts_of(node.else_), *texts_of(node.body), *texts_of([*node.body, *node.body])]
        if isinstance(node, nodes.Assign):
            return [""]
        if isinstance(node, nodes.Expr) and not any(each.name == "unquoted" for each in filters_of(node)):
            return ["\x00value\x00"]
        raise Unproven(
            "a command can use {{ }}, {% if %}, {% for %} and {% set x = … %}, without the filter `unquoted`"
        )

    def filters_of(node: nodes.Node) -> list[nodes.Filter]:
        return [*node.find_all(nodes.Filter), *([node] if isinstance(node, nodes.Filter) else [])]

    return texts_of(jinja_environment(as_text).parse(command).body)


def _quotes_before(pieces: Sequence[str]) -> list[str]:
    return [_quote_after("".join(pieces[:place])) for place in range(1, len(pieces), 2)]


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
