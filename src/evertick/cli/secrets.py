"""`evertick secrets`: what only the tasks that declare it may see, and the keys that it is stored under."""

from __future__ import annotations

from typing import Annotated

import typer

from evertick.cli.connection import ask, change
from evertick.cli.options import noun
from evertick.cli.stored_values import add_commands, count_values
from evertick.cli.tables import hint, line, show
from evertick.config import read_settings
from evertick.domain.stored_values import ValueKind
from evertick.engine.secrets import reseal
from evertick.secrets.keyring import add_key, keep_first_key, load_keyring, make_key

app = typer.Typer(no_args_is_help=True, add_completion=False)

SameKey = Annotated[
    bool, typer.Option("--same-key", help="Make no key: bring everything under the first that there is.")
]
Forget = Annotated[
    bool,
    typer.Option("--forget", help="Then drop the other keys from the key file: once every runner has the new one."),
]


@app.callback()
def about() -> None:
    """Secrets: stored encrypted, hidden in logs, results and errors. A task gets one with `@task(secrets=["token"])`."""


add_commands(app, ValueKind.SECRET)


@app.command("rotate", epilog="Example: evertick secrets rotate")
def rotate(same_key: SameKey = False, forget: Forget = False) -> None:
    """Make a new key, and bring every secret, connection and variable under it. Makes the first key, too."""
    settings = read_settings()
    count, _ = ask(count_values)
    if not make_key(settings) and not same_key:
        add_key(settings)
    keyring = load_keyring(settings)
    moved = change(lambda conn: reseal(conn, keyring))
    show(line(f"{noun(moved, 'value')} of {count} brought under key {keyring.first_id}."))
    if forget:
        show(line(f"Forgot {noun(keep_first_key(settings), 'old key')}."))
    elif not settings.secret_keys:
        show(hint(f"The keys are in {settings.secret_key_place}: bring them to every runner that does not share it."))
