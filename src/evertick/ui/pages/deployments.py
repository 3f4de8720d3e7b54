"""Deployments: where DAGs come from, their files and versions, what changed between two versions, roll back and delete.

A change names the version that the page showed, and is refused if there is another one meanwhile.
"""

from __future__ import annotations

from typing import Annotated

from fastapi import Path, Query, Request, Response

from evertick.api.context import Who
from evertick.db.queries import dags
from evertick.domain.access import Permission
from evertick.operations import deployments as operations
from evertick.operations.deployments import DeploymentRollback
from evertick.ui.layout import Form, done, page, page_router, segment

router = page_router()

_SHOWN, _SHOWN_VERSIONS, _MOST_FILES = 200, 50, 1000
Name = Annotated[str, Path(max_length=operations.LONGEST_NAME)]
Number = Annotated[int, Path(ge=1, le=2**31 - 1)]
Asked = Annotated[int | None, Query(ge=1, le=2**31 - 1)]


@router.get("/deployments", Permission.READ_DEPLOYMENTS)
async def list_deployments(request: Request, caller: Who) -> Response:
    found = await operations.list_deployments(caller, limit=_SHOWN)
    return page(request, "deployments.html", here="deployments", rows=found.items)


@router.get("/deployments/{name}", Permission.READ_DEPLOYMENTS)
async def show_deployment(
    name: Name,
    request: Request,
    caller: Who,
    old: Annotated[Asked, Query(alias="from")] = None,
    new: Annotated[Asked, Query(alias="to")] = None,
) -> Response:
    """Show its files and versions, and the DAGs that differ between two versions: by default the last change."""
    found = (await operations.show_deployment(caller, name=name)).record
    versions = (await operations.list_deployment_versions(caller, name=name, limit=_SHOWN_VERSIONS)).items
    diff = await operations.diff_deployment_versions(caller, name=name, old=old, new=new) if found.version else None
    async with caller.read() as conn:
        listed = await dags.files(conn, name)
        errors = {row.file: row for row in await dags.import_errors(conn) if row.deployment == name}
    files: dict[str, list[str]] = {file: [] for file in errors}
    for row in listed:
        files.setdefault(row.file, []).append(row.name)
    return page(
        request,
        "deployment.html",
        here="deployments",
        row=found,
        deployment_path=f"/deployments/{segment(name)}",
        versions=versions,
        diff=diff,
        files=sorted(files.items())[:_MOST_FILES],
        hidden_files=max(len(files) - _MOST_FILES, 0),
        errors=errors,
    )


@router.post("/deployments/{name}/versions/{number}/rollback", Permission.DEPLOY)
async def roll_back_deployment(name: Name, number: Number, form: Form, caller: Who) -> Response:
    restored = await operations.roll_back_deployment(
        caller, name=name, body=DeploymentRollback(number=number), if_match=form.get("etag")
    )
    return done(
        f"{name} is at version {restored.version}, which has the DAGs of version {restored.restores}.",
        go=f"/deployments/{segment(name)}",
    )


@router.post("/deployments/{name}/delete", Permission.DEPLOY)
async def delete_deployment(name: Name, form: Form, caller: Who) -> Response:
    await operations.delete_deployment(caller, name=name, if_match=form.get("etag"))
    return done(f"Deployment {name} deleted.", go="/deployments")
