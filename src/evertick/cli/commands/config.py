"""`evertick config`: every setting with its value and its source."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import Field, fields
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from evertick.cli.app import Group
from evertick.cli.options import Json, noun
from evertick.cli.output import hint, line, show, show_list
from evertick.config import Settings, given_settings, read_settings, unknown_variables, variables
from evertick.domain.errors import InvalidSettings, did_you_mean

app = Group()


class ShownSetting(NamedTuple):
    """`value` as it may be shown: secrets are masked. `source` is a file, a variable or `default`."""

    name: str
    variable: str
    value: str | int | float | bool | list[str] | None
    source: str


@app.command("show", epilog="Example: evertick config show --changed")
def show_command(
    changed: Annotated[bool, typer.Option("--changed", help="Only settings that are not the default.")] = False,
    as_json: Json = False,
) -> None:
    """Show the value of every setting, and where it comes from. Secrets are masked."""
    found = [each for each in _settings() if not changed or each.source != "default"]
    show_list(
        "settings",
        found,
        ("SETTING", "VALUE", "SOURCE"),
        lambda each: [each.name, _text(each.value), each.source],
        as_json=as_json,
        empty="Every setting has its default.",
        to_json=ShownSetting._asdict,
    )


@app.command("check", epilog="Example: evertick config check")
def check_command() -> None:
    """Check the configuration file and the environment. Exit status 2 for a wrong or unknown setting."""
    read_settings()
    unknown = {name: did_you_mean(name.upper(), variables(), "") for name in unknown_variables()}
    if wrong := [f"{name}: {meant}" for name, meant in unknown.items() if meant]:
        raise InvalidSettings(f"Unknown settings in the environment. {' '.join(wrong)}")
    given = given_settings()
    secret = {each.name for each in fields(Settings) if not each.repr}
    for path in sorted({each.source for name, each in given.items() if name in secret and Path(each.source).is_file()}):
        if Path(path).stat().st_mode & 0o077:
            show(line(f"{path} contains a secret, and other users can read it: chmod 600 {path}", "yellow"))
    places = sorted({each.source for each in given.values()})
    show(line(f"Valid: {noun(len(given), 'setting')}."), hint(f"From {', '.join(places) or 'no file or variable'}."))


def _settings() -> Iterator[ShownSetting]:
    settings, given = read_settings(), given_settings()
    for each in fields(Settings):
        source = given[each.name].source if each.name in given else "default"
        yield ShownSetting(
            each.name, f"EVERTICK_{each.name.upper()}", _shown(each, getattr(settings, each.name)), source
        )


def _shown(setting: Field[object], value: object) -> str | int | float | bool | list[str] | None:
    if isinstance(value, tuple):
        return [_masked(setting, str(each)) for each in value]
    return value if value is None or isinstance(value, int | float) else _masked(setting, str(value))


def _masked(setting: Field[object], text: str) -> str:
    if not setting.repr:
        return "***"
    if setting.name.startswith("notify_on"):
        # The path of a webhook's URL is its password.
        return re.sub(r"(https?://[^/]*/).+", r"\1***", text)
    return re.sub(r"(://[^/@]*:)[^/]*@", r"\1***@", text)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return ",".join(value) if isinstance(value, list) else "" if value is None else str(value)
