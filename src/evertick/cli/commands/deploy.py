"""`evertick deploy` publishes a folder as a version of a deployment; `evertick deployments` shows, compares, restores, deletes.

The files are packed here; the database's side or a server loads each of them in a process of its own.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from evertick.bundles.archive import pack_folder
from evertick.cli.app import Group, Single
from evertick.cli.options import DryRun, Json, Limit, Yes, confirm, noun
from evertick.cli.output import Cell, document, hint, line, print_json, show, table
from evertick.client.connect import Client, call, open_client, read_pages
from evertick.domain.deployments import DeploymentKind, check_name
from evertick.domain.durations import relative
from evertick.domain.errors import BrokenFiles, UserError
from evertick.operations import deployments
from evertick.operations.deployments import (
    PIECE_BYTES,
    Deployment,
    DeploymentRollback,
    DeploymentVersion,
    DeployRequest,
)
from evertick.publisher.deployment import DeployResult
from evertick.publisher.publisher import find_dag_files

app = Single()
deployments_app = Group()

Folder = Annotated[
    Path, typer.Argument(metavar="DIR", help="The folder with the DAG files and everything they import.")
]
NameOption = Annotated[str | None, typer.Option("--name", help="Name of the deployment; by default the folder's name.")]
Commit = Annotated[str | None, typer.Option("--commit", metavar="HASH", help="The commit, shown with the version.")]
Author = Annotated[str | None, typer.Option("--author", metavar="TEXT", help="The commit's author.")]
Message = Annotated[str | None, typer.Option("--message", metavar="TEXT", help="The commit's message.")]
ExpectVersion = Annotated[
    int | None,
    typer.Option("--expect-version", min=0, help="Refuse if the deployment is not at this version; 0: it is new."),
]
Name = Annotated[str, typer.Argument(metavar="NAME", help="The deployment's name.")]
Old = Annotated[int | None, typer.Argument(metavar="VERSION", min=1, help="A version.")]
New = Annotated[int | None, typer.Argument(metavar="OTHER", min=1, help="Another version; by default the current.")]
Number = Annotated[
    int | None, typer.Argument(metavar="VERSION", min=1, help="A version; by default the one before the current.")
]


@app.command(name="deploy", epilog="Example: evertick deploy ./dags --name shop")
def deploy_folder(
    folder: Folder,
    name: NameOption = None,
    commit: Commit = None,
    author: Author = None,
    message: Message = None,
    expect_version: ExpectVersion = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Publish a folder: all of its DAGs, or nothing if one file is broken. DAGs that it had before are retired.

    Open runs keep their version. Publishing the same code again changes nothing, so it is safe to repeat.
    """
    called = check_name(name or folder.resolve().name)
    archive = pack_folder(folder)
    if not find_dag_files(folder):
        raise UserError(f"{folder} contains no DAG file: no .py file in it mentions both `evertick` and `dag`.")
    archive_hash = hashlib.sha256(archive).hexdigest()
    body = DeployRequest(archive_hash=archive_hash, commit_hash=commit, author=author, message=message)
    with open_client() as client:
        _upload(client, archive, archive_hash, is_quiet=as_json)
        try:
            done = client.call_until_answered(
                deployments.deploy_archive,
                name=called,
                body=body,
                dry_run=dry_run,
                if_match=None if expect_version is None else f'"{expect_version}"',
            ).record
        except BrokenFiles as error:
            if as_json:
                files = [each if isinstance(each, dict) else asdict(each) for each in error.verdicts]
                print_json({"deployment": called, "is_published": False, "files": files})
                raise typer.Exit(2) from None
            raise
    if as_json:
        return print_json({**asdict(done), "is_published": not dry_run})
    _show_result(done)


def _upload(client: Client, archive: bytes, archive_hash: str, *, is_quiet: bool) -> None:
    """Send the archive in pieces, from where an earlier upload ended. A piece whose answer is lost is sent again."""
    sent = client.call(deployments.show_upload, archive_hash=archive_hash).received
    has_progress = not is_quiet and sys.stderr.isatty() and len(archive) > PIECE_BYTES
    while sent < len(archive):
        piece = archive[sent : sent + PIECE_BYTES]
        sent = client.call_until_answered(
            deployments.put_upload, archive_hash=archive_hash, start=sent, content=piece
        ).received
        if has_progress:
            sys.stderr.write(f"\rUploaded {sent / 1e6:.1f} of {len(archive) / 1e6:.1f} MB")
    if has_progress:
        sys.stderr.write("\n")


def _show_result(done: DeployResult) -> None:
    rows: list[list[Cell]] = [
        [each.dag, each.file, "new version" if each.is_new else "unchanged", each.bundle[:12]] for each in done.dags
    ]
    show(table(("DAG", "FILE", "VERSION", "BUNDLE"), rows))
    for warning in done.warnings:
        show(line(f"Warning: {warning}", "yellow"))
    verb = "Would retire" if done.is_dry_run else "Retired"
    if done.retired:
        show(hint(f"{verb} {noun(len(done.retired), 'DAG')} no longer in the folder: {', '.join(done.retired)}"))
    if done.is_dry_run:
        show(hint(f"Nothing was published: deployment {done.deployment} stays at version {done.version}."))
    else:
        show(line(f"{done.deployment} is at version {done.version}{'' if done.is_new else ', as before'}."))


@deployments_app.command("list", epilog="Example: evertick deployments list")
def list_command(limit: Limit = 1000, as_json: Json = False) -> None:
    """List the deployments: where their DAGs come from, and their current version."""
    found, _ = read_pages(deployments.list_deployments, limit)
    if as_json:
        return print_json({"deployments": [document(each) for each in found]})
    if not found:
        return show(hint("No deployments yet. Publish a folder with: evertick deploy DIR"))
    rows: list[list[Cell]] = [
        [each.name, each.kind, each.version or None, each.dag_count, _origin(each), each.problem] for each in found
    ]
    show(table(("DEPLOYMENT", "FROM", "VERSION", "#DAGS", "SOURCE", "PROBLEM"), rows))


@deployments_app.command("show", epilog="Example: evertick deployments show shop")
def show_command(name: Name, limit: Limit = 10, as_json: Json = False) -> None:
    """Show one deployment: its DAGs and its newest versions."""
    with open_client() as client:
        found = client.call(deployments.show_deployment, name=name).record
        versions = client.pages(deployments.list_deployment_versions, limit, name=name)
        now = client.now
    if as_json:
        return print_json({**document(found), "versions": [document(each) for each in versions]})
    show(line(f"{found.name}: {noun(found.dag_count, 'DAG')} from {found.kind.about}", "bold"))
    if origin := _origin(found):
        show(line(origin))
    if found.problem:
        show(line(found.problem, "red"))
    if found.deleted_at:
        show(line(f"Deleted {relative(found.deleted_at, now)}.", "yellow"))
    show(line(", ".join(found.dags) or "No DAGs."))
    rows: list[list[Cell]] = [
        [
            f"{each.number}{' (current)' if each.is_current else ''}",
            relative(each.deployed_at, now),
            each.deployed_by,
            each.dag_count,
            each.commit_hash[:12] if each.commit_hash else None,
            each.author,
            _message(each),
        ]
        for each in versions
    ]
    if rows:
        show(table(("VERSION", "DEPLOYED", "BY", "#DAGS", "COMMIT", "AUTHOR", "MESSAGE"), rows))


@deployments_app.command("diff", epilog="Example: evertick deployments diff shop 5 7")
def diff_command(name: Name, number: Old = None, other: New = None, as_json: Json = False) -> None:
    """List the DAGs that differ between two versions. Without numbers: the current version and the one before."""
    found = call(deployments.diff_deployment_versions, name=name, old=number, new=other)
    if as_json:
        return print_json(document(found))
    show(line(f"{name}: version {found.old} to {found.new}", "bold"))
    if not found.dags:
        return show(hint("They have the same DAGs."))
    show(table(("DAG", "BEFORE", "AFTER"), [[each.name, each.before, each.after] for each in found.dags]))
    changed = next((each for each in found.dags if each.before and each.after), None)
    if changed:
        show(hint(f"See what changed with: evertick dags diff {changed.name} {changed.before} {changed.after}"))


@deployments_app.command("rollback", epilog="Example: evertick deployments rollback shop 7")
def rollback_command(name: Name, number: Number = None, yes: Yes = False, as_json: Json = False) -> None:
    """Publish all DAGs of an earlier version again, as a new version. Open runs keep their version."""
    confirm(f"Roll {name} back to {f'version {number}' if number else 'the version before'}?", yes=yes)
    done = call(deployments.roll_back_deployment, name=name, body=DeploymentRollback(number=number))
    if as_json:
        return print_json(document(done))
    show(line(f"{name} is at version {done.version}, which has the DAGs of version {done.restores}."))
    if done.retired:
        show(hint(f"Retired: {', '.join(done.retired)}"))


@deployments_app.command("delete", epilog="Example: evertick deployments delete shop --yes")
def delete_command(name: Name, yes: Yes = False) -> None:
    """Retire all DAGs of a deployment, as if its files were deleted. Their history is kept, and open runs continue."""
    with open_client() as client:
        found = client.call(deployments.show_deployment, name=name)
        confirm(f"Delete {name} with {noun(found.record.dag_count, 'DAG')}? Their history is kept.", yes=yes)
        client.call(deployments.delete_deployment, name=name, if_match=found.etag)
    show(line(f"Deleted {name}."))
    if found.record.version:
        show(hint(f"Restore it with: evertick deployments rollback {name}"))
    if found.record.kind is not DeploymentKind.UPLOAD:
        show(hint("Stop its publisher, too, or it publishes the next change."))


def _message(version: DeploymentVersion) -> str | None:
    if not version.dag_count:
        return "deleted"
    return f"restores version {version.restores}" if version.restores else version.message


def _origin(found: Deployment) -> str | None:
    parts: Sequence[Any] = (found.url, found.ref, found.path)
    return " ".join(str(each) for each in parts if each) or None
