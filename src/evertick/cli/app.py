"""Typer with plain help: a flag has no type and a required argument no braces.

`Group` holds the commands of a noun, `Single` is a command of its own. Loaded by every command, so it imports only typer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import typer
from typer.core import TyperCommand, TyperGroup

F = TypeVar("F", bound=Callable[..., Any])

# What every parse error is. Typer has no public name for it before 0.27.3, and before 0.26 it is click's.
UsageProblem: Any = typer.BadParameter.__mro__[2]


class _WithoutFlagTypes:
    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in params:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return params


class PlainGroup(_WithoutFlagTypes, TyperGroup):
    pass


class _PlainCommand(_WithoutFlagTypes, TyperCommand):
    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        return [piece.replace("{", "").replace("}", "") for piece in super().collect_usage_pieces(ctx)]


class Single(typer.Typer):
    def __init__(self, **settings: Any) -> None:
        super().__init__(cls=PlainGroup, add_completion=False, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[F], F]:
        return super().command(name, cls=_PlainCommand, **settings)


class Group(Single):
    """`help` is for what the summary in `main.COMMANDS` leaves out."""

    def __init__(self, help: str | None = None) -> None:
        super().__init__(no_args_is_help=True, help=help)
        # Without a callback, a group with one command would be that command.
        self.callback()(_nothing)


def _nothing() -> None:
    pass
