"""The findings of `evertick doctor` about this machine: folders, files, ports, limits. Needs no database."""

from __future__ import annotations

import os
import resource
import shutil
import stat
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path

from evertick.config import Settings, unknown_variables, variables
from evertick.doctor.database import Finding, error, warning
from evertick.domain.errors import InvalidRouting, InvalidSettings, StorageUnavailable
from evertick.publisher.routing_file import load_routing
from evertick.runtime.listen_socket import bound
from evertick.secrets.oidc_file import read_providers, secret_of
from evertick.storage.object_store import open_store
from evertick.supervisor.postgres_home import holder_of

LEAST_BYTES, FEW_BYTES = 200 * 1024**2, 2 * 1024**3
# Each attempt has a spool file, pipes and a socket; the rest is the runner's own.
DESCRIPTORS_PER_SLOT, OWN_DESCRIPTORS = 6, 200


def examine_machine(settings: Settings) -> list[Finding]:
    return [
        *check_folders(settings),
        *check_files(settings),
        *check_settings(settings),
        *check_variables(unknown_variables()),
        *check_storage_settings(settings),
        *check_providers(settings),
        *check_port(settings),
        *check_descriptors(settings, resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ]


def check_folders(settings: Settings) -> Iterator[Finding]:
    if not settings.dags_folder.is_dir():
        yield warning(
            "dags_folder",
            f"The DAGs folder {settings.dags_folder} does not exist.",
            "A publisher here has nothing to publish.",
            "Create it, or set EVERTICK_DAGS_FOLDER; `evertick up` creates one with examples.",
        )
    elif not os.access(settings.dags_folder, os.R_OK | os.X_OK):
        yield error(
            "dags_folder",
            f"The DAGs folder {settings.dags_folder} is not readable by this user.",
            "No DAG in it is published.",
            f"Make it readable: chmod u+rx {settings.dags_folder}",
        )
    seen: set[int] = set()
    for place, what in ((settings.home, "home"), (settings.result_place, "results folder")):
        there = _nearest(place)
        if not os.access(there, os.W_OK | os.X_OK):
            yield error(
                "folder",
                f"The {what} {place} is not writable by this user.",
                "Logs, unpacked code and large results cannot be stored.",
                f"Make {there} writable, or choose another with EVERTICK_HOME.",
            )
        if (device := there.stat().st_dev) not in seen:
            seen.add(device)
            yield from check_space(place, shutil.disk_usage(there).free)


def check_providers(settings: Settings) -> Iterator[Finding]:
    if settings.oidc_file is None:
        return
    impact = "No user can sign in with a provider; users with a password can."
    try:
        found = read_providers(settings.oidc_file)
        for each in found.values():
            secret_of(each)
    except InvalidSettings as wrong:
        yield error("oidc", str(wrong), impact, "Correct the file, and restart the API.")
        return
    if settings.public_url is None:
        yield error("oidc", "EVERTICK_PUBLIC_URL is not set.", impact, "Set it to the address of the web UI.")
    for each in found.values():
        secret = Path(each.client_secret_file) if each.client_secret_file else None
        if secret is not None and stat.S_IMODE(secret.stat().st_mode) & 0o077:
            yield warning(
                "oidc",
                f"The client secret of {each.name}, {secret}, is readable by other users of this machine.",
                "With it they can act as this installation at the provider.",
                f"Run chmod 600 {secret}, and make a new secret at the provider.",
            )


def check_space(place: Path, free_bytes: int) -> Iterator[Finding]:
    if free_bytes < FEW_BYTES:
        make = error if free_bytes < LEAST_BYTES else warning
        yield make(
            "disk",
            f"The disk of {place} has {free_bytes / 1024**2:,.0f} MB left.",
            "When it is full, logs are truncated, results are lost, and an embedded database stops.",
            "Free some space, or lower EVERTICK_RETENTION_DAYS; `evertick db status` shows the largest tables.",
        )


def check_files(settings: Settings) -> Iterator[Finding]:
    place = settings.secret_key_place
    if place.exists() and stat.S_IMODE(place.stat().st_mode) & 0o077:
        yield error(
            "key_file",
            f"The key file {place} is readable by other users.",
            "Anyone with the key can decrypt every stored secret; Evertick refuses to use it.",
            f"Run: chmod 600 {place}",
        )
    if settings.home.is_dir() and settings.home.stat().st_mode & 0o002:
        yield error(
            "home",
            f"Every user of this machine may write to the home {settings.home}.",
            "Others could put code there that your tasks run.",
            f"Run: chmod go-w {settings.home}",
        )


def check_settings(settings: Settings) -> Iterator[Finding]:
    if settings.retention_days == 0:
        yield warning(
            "retention",
            "Retention is off (EVERTICK_RETENTION_DAYS=0).",
            "Runs, logs, results and the audit log are kept without limit, and the disk fills up.",
            "Set it to the number of days that you need.",
        )
    try:
        load_routing(settings.routing_file)
    except InvalidRouting as wrong:
        yield error(
            "routing_file",
            str(wrong),
            "A publisher refuses to start; one that is running keeps its current rules.",
            "Fix the file or EVERTICK_ROUTING_FILE, and check it with: evertick routing list",
        )


def check_variables(unknown: Sequence[str]) -> Iterator[Finding]:
    """Reports only variables that resemble a setting: other programs may use the prefix, too."""
    for name in unknown:
        for meant in get_close_matches(name.upper(), variables(), n=1, cutoff=0.9):
            yield warning(
                "misspelled",
                f"{name} is set, but there is no such setting.",
                "It has no effect: the default applies.",
                f"Did you mean {meant}?",
            )


def check_storage_settings(settings: Settings) -> Iterator[Finding]:
    """Whether the object storage answers and grants access."""
    store = open_store(settings)
    if store is None:
        return
    try:
        next(store.folders(""), None)
    except StorageUnavailable as wrong:
        yield error(
            "storage",
            str(wrong),
            "Large results cannot be stored or read: their tasks wait, and fail after EVERTICK_STORAGE_RETRY_SECONDS.",
            "Fix EVERTICK_STORAGE, EVERTICK_STORAGE_ENDPOINT and the keys, or the permissions of that key.",
        )


def check_port(settings: Settings) -> Iterator[Finding]:
    """Only while no Evertick process runs in this home; otherwise the port is taken by that process."""
    if settings.api_port in (None, 0) or (not settings.database_url and holder_of(settings.home) is not None):
        return
    assert settings.api_port is not None
    try:
        bound(settings.api_host, settings.api_port).close()
    except InvalidSettings as wrong:
        yield warning(
            "api_port",
            str(wrong).split(". Choose")[0] + ".",
            "Unless Evertick itself uses it, the API cannot start.",
            "Choose another with EVERTICK_API_PORT, or stop the process that listens there.",
        )


def check_descriptors(settings: Settings, soft_limit: int) -> Iterator[Finding]:
    needed = DESCRIPTORS_PER_SLOT * settings.runner_slots + OWN_DESCRIPTORS
    if soft_limit != resource.RLIM_INFINITY and soft_limit < needed:
        yield error(
            "descriptors",
            f"A process here may open {soft_limit} files, and a runner with {settings.runner_slots} slots needs about {needed}.",
            "Under full load, attempts fail because no more files can be opened.",
            f"Raise it (ulimit -n {needed}, or LimitNOFILE= of the service), or lower EVERTICK_RUNNER_SLOTS.",
        )


def _nearest(place: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(each for each in (place.absolute(), *place.absolute().parents) if each.exists())
