"""`evertick variables`, `connections`, `secrets` and `state`: set, get, list, delete, and rotate the keys.

A value is never an argument, because other users can see arguments: it is read from standard input, or from a prompt.
"""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from evertick.cli.app import Group
from evertick.cli.options import Json, Limit, Yes, confirm, noun
from evertick.cli.output import hint, line, print_json, show, show_list
from evertick.client.connect import call, open_client, read_pages, refuse_server
from evertick.client.credentials import chosen_server
from evertick.config import read_settings
from evertick.db.queries import secrets as store
from evertick.domain.durations import relative
from evertick.domain.encryption import Keyring
from evertick.domain.errors import UserError
from evertick.domain.stored_values import ValueKind, check_name, read_connection
from evertick.engine import secrets as verbs
from evertick.operations import state
from evertick.operations.caller import Caller
from evertick.operations.state import StateRequest
from evertick.operations.state import StateValue as Kept
from evertick.operations.values import ValueRequest, delete_value, keyring_of, list_values, put_value, show_value
from evertick.secrets.keyring import add_key, keep_first_key, load_keyring, make_key
from evertick.secrets.masking import SHORTEST

variables = Group(
    'Variables: values that tasks get by declaring them, `@task(variables=["region"])`. A change needs no deploy.'
)
connections = Group(
    'Connections: addresses with passwords, stored encrypted. A task gets one with `@task(connections=["db"])`.'
)
secrets = Group(
    'Secrets: stored encrypted, hidden in logs, results and errors. Tasks get one by `@task(secrets=["token"])`.'
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="Its name, as tasks declare it.")]
Value = Annotated[str | None, typer.Argument(metavar="VALUE", help="Only for a variable: its value.")]
Description = Annotated[str | None, typer.Option("--description", help="Purpose; shown in lists.")]
Reveal = Annotated[bool, typer.Option("--reveal", help="Print its secret parts.")]
SameKey = Annotated[bool, typer.Option("--same-key", help="Make no key: re-encrypt everything with the first one.")]
Forget = Annotated[bool, typer.Option("--forget", help="Then remove the old keys; every runner must have the new one.")]


def _add_commands(app: typer.Typer, kind: ValueKind) -> None:
    """The four commands that all kinds have."""
    example = {ValueKind.VARIABLE: "region", ValueKind.CONNECTION: "warehouse", ValueKind.SECRET: "token"}[kind]
    form = "an address such as postgresql://anna:PASSWORD@host/shop" if kind is ValueKind.CONNECTION else "its value"
    get_help = {
        ValueKind.VARIABLE: "Show a variable.",
        ValueKind.CONNECTION: "Show a connection without its password; --reveal prints it, too.",
        ValueKind.SECRET: "Show a secret's metadata; --reveal prints the value.",
    }[kind]

    @app.command(
        "set",
        help=f"Set a {kind}: {form}, from standard input or a prompt.",
        epilog=f"Example: evertick {kind}s set {example} < value.txt",
    )
    def set_command(name: Name, value: Value = None, description: Description = None) -> None:
        _set(kind, name, description, value)

    @app.command("get", help=get_help, epilog=f"Example: evertick {kind}s get {example}")
    def get_command(name: Name, reveal: Reveal = False, as_json: Json = False) -> None:
        _get(kind, name, reveal=reveal, as_json=as_json)

    @app.command(
        "list", help=f"List the {kind}s by name, never their values.", epilog=f"Example: evertick {kind}s list"
    )
    def list_command(limit: Limit = 1000, as_json: Json = False) -> None:
        _list(kind, limit=limit, as_json=as_json)

    @app.command(
        "delete",
        help=f"Delete a {kind}. Tasks that declare it fail from then on.",
        epilog=f"Example: evertick {kind}s delete {example}",
    )
    def delete_command(name: Name, yes: Yes = False) -> None:
        confirm(f"Delete {kind} {name}?", yes=yes)
        call(delete_value, kind=kind, name=name)
        show(line(f"Deleted {kind} {name}."))


_add_commands(variables, ValueKind.VARIABLE)
_add_commands(connections, ValueKind.CONNECTION)
_add_commands(secrets, ValueKind.SECRET)


@secrets.command("rotate", epilog="Example: evertick secrets rotate")
def rotate_command(same_key: SameKey = False, forget: Forget = False) -> None:
    """Make a new key and re-encrypt all values with it; creates the first key if none exists."""
    refuse_server()
    settings = read_settings()
    with open_client() as client:
        # No key is made while the database cannot be reached.
        count = client.call(_count)
        if not make_key(settings) and not same_key:
            add_key(settings)
        keyring = load_keyring(settings)
        changed = client.call(_reencrypt, keyring=keyring)
    show(line(f"Re-encrypted {noun(changed, 'value')} of {count} with key {keyring.first_id}."))
    if forget:
        show(line(f"Removed {noun(keep_first_key(settings), 'old key')}."))
    elif not settings.secret_keys:
        place = settings.secret_key_place
        show(hint(f"The keys are in {place}. Copy the file to every runner that does not share it."))


# Not operations: a server must not offer them.
async def _count(caller: Caller) -> int:
    async with caller.read() as conn:
        return len(await store.list_all(conn, kind=None, limit=verbs.MOST_VALUES))


async def _reencrypt(caller: Caller, *, keyring: Keyring) -> int:
    async with caller.write() as conn:
        return await verbs.reseal(conn, keyring)


async def _reveal(caller: Caller, *, kind: ValueKind, name: str) -> str:
    async with caller.read() as conn:
        _, value = await verbs.read_value(conn, keyring_of(caller), kind=kind, name=name)
    return read_connection(value).uri if kind is ValueKind.CONNECTION else value


def _set(kind: ValueKind, name: str, description: str | None, given: str | None) -> None:
    # The name and the key are checked before the user types a value.
    check_name(kind, name)
    if given is not None and kind is not ValueKind.VARIABLE:
        raise UserError(
            f"A {kind} is never an argument, which others can see. Pipe it: evertick {kind}s set {name} < value.txt"
        )
    if chosen_server() is None:
        load_keyring(read_settings())
    value = _read_value(kind, name) if given is None else given
    body = ValueRequest(value=value, description=description)
    is_new = call(put_value, kind=kind, name=name, body=body).record.is_new
    show(line(f"{'Created' if is_new else 'Changed'} {kind} {name}."))
    if kind is ValueKind.SECRET and len(value) < SHORTEST:
        reason = "short texts occur everywhere"
        show(hint(f"It has fewer than {SHORTEST} characters, so it is not hidden in logs: {reason}."))
    show(hint(f'A task gets it by declaring it: @task({kind}s=["{name}"])'))


def _get(kind: ValueKind, name: str, *, reveal: bool, as_json: bool) -> None:
    is_secret = reveal and kind is not ValueKind.VARIABLE
    if is_secret and chosen_server() is not None:
        raise UserError(
            f"A server does not show the secret parts of a {kind}. Use --reveal where the database can be reached."
        )
    with open_client() as client:
        found = client.call(show_value, kind=kind, name=name).record
        shown = client.call(_reveal, kind=kind, name=name) if is_secret else found.value
        if as_json:
            facts = {each: getattr(found, each) for each in ("name", "description", "changed_by", "changed_at")}
            print_json({**facts, "value": shown})
        elif shown is not None:
            typer.echo(shown)
        else:
            show(line(f"{name} is set; changed {relative(found.changed_at, client.now)} by {found.changed_by}."))
            show(hint(f"Show it with: evertick secrets get {name} --reveal"))


def _list(kind: ValueKind, *, limit: int, as_json: bool) -> None:
    found, now = read_pages(list_values, limit, kind=kind)
    show_list(
        f"{kind}s",
        found,
        ("NAME", "DESCRIPTION", "CHANGED", "BY", "KEY"),
        lambda each: [each.name, each.description, relative(each.changed_at, now), each.changed_by, each.key_id],
        as_json=as_json,
        empty=f"There are no {kind}s. Create one with: evertick {kind}s set NAME",
    )


def _read_value(kind: ValueKind, name: str) -> str:
    if sys.stdin.isatty():
        return str(typer.prompt(f"Value of {kind} {name}", hide_input=kind is not ValueKind.VARIABLE))
    raw = sys.stdin.buffer.read(1024 * 1024)
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        raise UserError(f"The {kind} is not text in UTF-8. Encode it, for example as base64.") from None
    # A pipe adds a newline to a single line; a text of several lines is kept as it is.
    return text.removesuffix("\n").removesuffix("\r") if text.count("\n") == 1 else text


# State ----------------------------------------------------------------------------------------------------------------

state_app = Group(
    "State: what tasks keep with `context.state`, by key. Name the owner with --dag and --task, or with --asset."
)

StateKey = Annotated[str, typer.Argument(metavar="KEY", help="The key.")]
StateJson = Annotated[
    str, typer.Argument(metavar="JSON", help="The value as JSON. A text needs its quotes: '\"ready\"'.")
]
OfDag = Annotated[str | None, typer.Option("--dag", help="The DAG of the task.")]
OfTask = Annotated[str | None, typer.Option("--task", help="The task.")]
OfRun = Annotated[int | None, typer.Option("--run", min=1, help="The state of the task in this run only.")]
OfIndex = Annotated[int, typer.Option("--map-index", min=-1, help="With --run: the instance of a mapped task.")]
OfAsset = Annotated[str | None, typer.Option("--asset", help="The asset, instead of a task.")]


@state_app.command("list", epilog="Example: evertick state list --dag etl --task load")
def list_state_command(
    dag: OfDag = None,
    task: OfTask = None,
    run: OfRun = None,
    map_index: OfIndex = -1,
    asset: OfAsset = None,
    limit: Limit = 1000,
    as_json: Json = False,
) -> None:
    """List the state of a task or an asset."""
    owner = _owner(dag, task, run, map_index, asset)
    found, now = read_pages(_chosen(asset, state.list_asset_state, state.list_task_state), limit, **owner)
    show_list(
        "state",
        found,
        ("KEY", "VALUE", "CHANGED", "BY"),
        lambda each: [each.key, json.dumps(each.value), relative(each.changed_at, now), each.changed_by],
        as_json=as_json,
        empty='No state. A task keeps some with context.state.set("KEY", VALUE).',
    )


@state_app.command("get", epilog="Example: evertick state get cursor --dag etl --task load")
def get_state_command(
    key: StateKey,
    dag: OfDag = None,
    task: OfTask = None,
    run: OfRun = None,
    map_index: OfIndex = -1,
    asset: OfAsset = None,
    as_json: Json = False,
) -> None:
    """Show the value of a key as JSON."""
    owner = _owner(dag, task, run, map_index, asset)
    found = call(_chosen(asset, state.show_asset_state, state.show_task_state), key=key, **owner)
    _show_state(found, as_json=as_json)


@state_app.command("set", epilog="Example: evertick state set cursor 2041 --dag etl --task load")
def set_state_command(
    key: StateKey,
    value: StateJson,
    dag: OfDag = None,
    task: OfTask = None,
    run: OfRun = None,
    map_index: OfIndex = -1,
    asset: OfAsset = None,
) -> None:
    """Set the value of a key. A running task that sets it afterwards replaces the value."""
    owner = _owner(dag, task, run, map_index, asset)
    try:
        body = StateRequest(value=json.loads(value))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{value[:100]!r} is not JSON: {error}. A text needs its quotes: '\"ready\"'.") from None
    call(_chosen(asset, state.put_asset_state, state.put_task_state), key=key, body=body, **owner)
    show(line(f"Set {key}."))


@state_app.command("delete", epilog="Example: evertick state delete cursor --dag etl --task load")
def delete_state_command(
    key: StateKey,
    dag: OfDag = None,
    task: OfTask = None,
    run: OfRun = None,
    map_index: OfIndex = -1,
    asset: OfAsset = None,
) -> None:
    """Delete a key."""
    owner = _owner(dag, task, run, map_index, asset)
    call(_chosen(asset, state.delete_asset_state, state.delete_task_state), key=key, **owner)
    show(line(f"Deleted {key}."))


def _chosen(asset: str | None, of_asset: Any, of_task: Any) -> Any:
    return of_task if asset is None else of_asset


def _owner(dag: str | None, task: str | None, run: int | None, map_index: int, asset: str | None) -> dict[str, Any]:
    if asset is not None and dag is None and task is None and run is None:
        return {"name": asset}
    if asset is not None or dag is None or task is None:
        raise UserError("Name the owner of the state: --dag DAG --task TASK, or --asset ASSET.")
    return {"dag": dag, "task": task, "run_id": run, "map_index": map_index}


def _show_state(found: Kept, *, as_json: bool) -> None:
    if as_json:
        print_json({"state": found})
    else:
        show(line(json.dumps(found.value, ensure_ascii=False)))
