"""Variables and connections: what tasks are given by name. What is secret in a connection is never shown, only replaced."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from evertick.api.desk import Caller, Who
from evertick.api.guard import needs
from evertick.domain.access import Permission
from evertick.domain.stored_values import LONGEST_VALUE, ValueKind, read_connection
from evertick.engine import secrets as verbs
from evertick.services.keyring import load_keyring
from evertick.store import secrets
from evertick.ui.frame import PageRoute, done, form_of, page, segment

router = APIRouter(route_class=PageRoute, include_in_schema=False)

Name = Annotated[str, Path(max_length=200)]
_MOST = 1000
_LONGEST_ABOUT = 1000


@router.get("/variables")
@needs(Permission.READ_VALUES)
async def list_variables(request: Request, caller: Who) -> Response:
    return await _list(request, caller, ValueKind.VARIABLE)


@router.get("/connections")
@needs(Permission.READ_VALUES)
async def list_connections(request: Request, caller: Who) -> Response:
    return await _list(request, caller, ValueKind.CONNECTION)


@router.get("/variables/{name}")
@needs(Permission.READ_VALUES)
async def show_variable(name: Name, request: Request, caller: Who) -> Response:
    return await _show(request, caller, ValueKind.VARIABLE, name)


@router.get("/connections/{name}")
@needs(Permission.READ_VALUES)
async def show_connection(name: Name, request: Request, caller: Who) -> Response:
    return await _show(request, caller, ValueKind.CONNECTION, name)


@router.post("/variables")
@needs(Permission.EDIT_VALUES)
async def put_variable(request: Request, caller: Who) -> Response:
    return await _put(request, caller, ValueKind.VARIABLE)


@router.post("/connections")
@needs(Permission.EDIT_VALUES)
async def put_connection(request: Request, caller: Who) -> Response:
    return await _put(request, caller, ValueKind.CONNECTION)


@router.post("/variables/{name}/delete")
@needs(Permission.EDIT_VALUES)
async def delete_variable(name: Name, caller: Who) -> Response:
    return await _delete(caller, ValueKind.VARIABLE, name)


@router.post("/connections/{name}/delete")
@needs(Permission.EDIT_VALUES)
async def delete_connection(name: Name, caller: Who) -> Response:
    return await _delete(caller, ValueKind.CONNECTION, name)


async def _list(request: Request, caller: Caller, kind: ValueKind) -> Response:
    async with caller.reading() as conn:
        found = await secrets.list_all(conn, kind=kind, limit=_MOST)
    return page(request, "values.html", here=f"{kind}s", kind=kind.value, rows=found, longest=LONGEST_VALUE)


async def _show(request: Request, caller: Caller, kind: ValueKind, name: str) -> Response:
    keyring = load_keyring(caller.desk.settings)
    async with caller.reading() as conn:
        row, value = await verbs.read_value(conn, keyring, kind=kind, name=name)
    shown = read_connection(value).shown if kind is ValueKind.CONNECTION else value
    return page(request, "value.html", here=f"{kind}s", kind=kind.value, row=row, value=shown, longest=LONGEST_VALUE)


async def _put(request: Request, caller: Caller, kind: ValueKind) -> Response:
    form = await form_of(request)
    name, keyring = form.get("name", "").strip(), load_keyring(caller.desk.settings)
    # A browser sends lines of a text field with \r\n.
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
    return done(f"{kind.capitalize()} {name} {'made' if is_new else 'changed'}.", go=f"/{kind}s/{segment(name)}")


async def _delete(caller: Caller, kind: ValueKind, name: str) -> Response:
    async with caller.changing() as conn:
        await verbs.delete_value(conn, kind=kind, name=name, actor=caller.actor)
    return done(f"{kind.capitalize()} {name} deleted.", go=f"/{kind}s")
