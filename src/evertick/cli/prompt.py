"""Asking before something is changed that cannot simply be taken back."""

from __future__ import annotations

import sys

import typer

from evertick.domain.errors import UserError


def confirm(question: str, *, yes: bool) -> None:
    """Return if it may go on. A program that cannot answer must say so beforehand."""
    if yes:
        return
    if not sys.stdin.isatty():
        raise UserError(f"{question} Nobody can answer here: add --yes to go on.")
    if not typer.confirm(question):
        typer.echo("Nothing was changed.")
        raise typer.Exit(1)
