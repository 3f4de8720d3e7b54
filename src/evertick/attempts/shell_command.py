"""Renders the command of a shell task that is a template, and writes it to the log. Needs jinja2: no other task may import it."""

from __future__ import annotations

from collections.abc import Mapping

from evertick.attempts.protocol import AttemptIO
from evertick.attempts.rendered_templates import tell_rendered
from evertick.sdk.runtime import BoundTask
from evertick.sdk.shell_templates import render_shell


def render_command(
    raw: str, bound: BoundTask, inputs: Mapping[str, object], io: AttemptIO
) -> tuple[str, dict[str, str]]:
    """The command of a shell task, and the variables that hold its values. Its text is in the log without secrets."""
    names = bound.template_names(inputs)

    def fields(hidden: Mapping[str, object]) -> dict[str, str]:
        command, values = render_shell(raw, hidden, is_unsafe=bound.unsafe_template)
        return {"command": command, **values}

    tell_rendered(io, names, fields)
    return render_shell(raw, names, is_unsafe=bound.unsafe_template)
