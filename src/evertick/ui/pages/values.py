"""Variables, connections and secrets, which tasks declare by name. Secret values can be replaced but are never shown."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from psycopg import AsyncConnection

from evertick.api.desk import Caller, Who
from evertick.api.guard import needs
from evertick.domain.access import Permission
from evertick.domain.errors import NotFound
from evertick.domain.stored_values import LONGEST_VALUE, ValueKind, read_connection
from evertick.engine import secrets as verbs
from evertick.services.keyring import load_keyring
from evertick.store import secrets
from evertick.store.secrets import ValueRow
from evertick.ui.frame import PageRoute, done, form_of, page, segment

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Name = Annotated[str, Path(max_length=200)]
_MOST = 1000
_LONGEST_ABOUT = 1000


def _add_routes(kind: ValueKind) -> None:
    """Add the four routes of one kind."""

    @router.get(f"/{kind}s", name=f"list_{kind}s")
    @needs(Permission.READ_VALUES)
    async def list_values(request: Request, caller: Who) -> Response:
        async with caller.reading() as conn:
            found = await secrets.list_all(conn, kind=kind, limit=_MOST)
        return page(request, "values.html", here=f"{kind}s", kind=kind.value, rows=found, longest=LONGEST_VALUE)

    @router.get(f"/{kind}s/{{name}}", name=f"show_{kind}")
    @needs(Permission.READ_VALUES)
    async def show_value(name: Name, request: Request, caller: Who) -> Response:
        async with caller.reading() as conn:
            row, value = await _shown(caller, conn, kind, name)
        return page(
            request, "value.html", here=f"{kind}s", kind=kind.value, row=row, value=value, longest=LONGEST_VALUE
        )

    @router.post(f"/{kind}s", name=f"put_{kind}")
    @needs(Permission.EDIT_VALUES)
    async def put_value(request: Request, caller: Who) -> Response:
        return await _put(request, caller, kind)

    @router.post(f"/{kind}s/{{name}}/delete", name=f"delete_{kind}")
    @needs(Permission.EDIT_VALUES)
    async def delete_value(name: Name, caller: Who) -> Response:
        async with caller.changing() as conn:
            await verbs.delete_value(conn, kind=kind, name=name, actor=caller.actor)
        return done(f"{kind.capitalize()} {name} deleted.", go=f"/{kind}s")


for each in ValueKind:
    _add_routes(each)


async def _shown(caller: Caller, conn: AsyncConnection, kind: ValueKind, name: str) -> tuple[ValueRow, str | None]:
    """The row and its visible value. A secret has none, so it is not decrypted."""
    if kind is ValueKind.SECRET:
        for row in await secrets.find(conn, [(kind, name)]):
            return row, None
        raise NotFound(f"There is no secret {name[:200]!r}.")
    row, value = await verbs.read_value(conn, load_keyring(caller.desk.settings), kind=kind, name=name)
    return row, read_connection(value).shown if kind is ValueKind.CONNECTION else value


async def _put(request: Request, caller: Caller, kind: ValueKind) -> Response:
    form = await form_of(request)
    name, keyring = form.get("name", "").strip(), load_keyring(caller.desk.settings)
    # Browsers send the lines of a text field with \r\n.
    value = form.get("value", "").replace("\r\n", "\n")
    async with caller.changing() as conn:
        is_new = await verbs.put_value(
            conn,
            keyring,
            kind=kind,
            name=name,
            value=value,
            actor=caller.actor,
            description=form.get("description", "").strip()[:_LONGEST_ABOUT] or None,
        )
    return done(f"{kind.capitalize()} {name} {'created' if is_new else 'changed'}.", go=f"/{kind}s/{segment(name)}")
