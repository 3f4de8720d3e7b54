"""The container of one attempt: what is asked of the engine, and what its state means.

The fixed fields come last: no option changes the name, the labels, the command, or that it runs once. The token is in no
field and no variable, which everybody with access to the engine can list: it is a file that is put into the container.
"""

from __future__ import annotations

import io
import math
import tarfile
from collections.abc import Mapping
from datetime import datetime
from typing import Any

from evertick.config import Settings
from evertick.domain.agent_protocol import MOST_BYTES
from evertick.domain.attempt import session_text
from evertick.domain.engine_options import memory_bytes
from evertick.executors.base import Observed, Order, Phase
from evertick.executors.task_options import Options

OWNER_LABEL = "io.evertick.owner"
SESSION_LABEL = "io.evertick.session"
# A folder of the container's own, which the agent's user owns.
FOLDER = "/evertick"
OUTCOME_FILE = f"{FOLDER}/outcome"

Json = dict[str, Any]


def container_of(order: Order, options: Options, *, owner: str, image: str, settings: Settings) -> Json:
    """The body of the request that creates it."""
    ours = order.variables(token_file=f"{FOLDER}/token", outcome_file=OUTCOME_FILE)
    environment = {**options.get("env", {}), **ours, "EVERTICK_HOME": f"{FOLDER}/home"}
    found: Json = {
        "Image": options.get("image", image),
        # Whatever the image's entry point is.
        "Entrypoint": order.command(settings),
        "Cmd": [],
        "Env": [f"{name}={text}" for name, text in environment.items()],
        "WorkingDir": FOLDER,
        "Labels": {
            OWNER_LABEL: owner,
            SESSION_LABEL: session_text(order.session),
            **{f"io.evertick.{name}": text for name, text in order.labels.items()},
        },
        "HostConfig": _host_config(options),
    }
    if "user" in options:
        found["User"] = options["user"]
    return found


def _host_config(options: Options) -> Json:
    host: Json = {
        # A first process ignores SIGTERM until it asks for it: an init passes it on from the beginning.
        "Init": True,
        "RestartPolicy": {"Name": "no"},
        "AutoRemove": False,
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
    }
    if "cpus" in options:
        host["NanoCpus"] = int(options["cpus"] * 1_000_000_000)
    if "memory" in options:
        # Without swap: what is above the limit ends the attempt with a reason, and slows nothing else down.
        host["Memory"] = host["MemorySwap"] = memory_bytes(options["memory"])
    if "network" in options:
        host["NetworkMode"] = options["network"]
    if "gpus" in options:
        count = -1 if options["gpus"] == "all" else options["gpus"]
        host["DeviceRequests"] = [{"Driver": "", "Count": count, "Capabilities": [["gpu"]]}]
    if "mounts" in options:
        host["Mounts"] = [
            {
                # A name without a slash is a volume.
                "Type": "bind" if each["source"].startswith("/") else "volume",
                "Source": each["source"],
                "Target": each["target"],
                "ReadOnly": each.get("read_only", False),
            }
            for each in options["mounts"]
        ]
    return host


def files_of(order: Order, *, user: int, group: int) -> bytes:
    """The token and an empty home, which only that user can read, as an archive for the root of the container."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in (FOLDER, f"{FOLDER}/home"):
            folder = tarfile.TarInfo(name.lstrip("/"))
            folder.type, folder.mode, folder.uid, folder.gid = tarfile.DIRTYPE, 0o700, user, group
            tar.addfile(folder)
        token = order.token.encode("ascii")
        file = tarfile.TarInfo(f"{FOLDER}/token".lstrip("/"))
        file.size, file.mode, file.uid, file.gid = len(token), 0o600, user, group
        tar.addfile(file, io.BytesIO(token))
    return content.getvalue()


def file_in(archive: bytes, *, most_bytes: int = MOST_BYTES) -> bytes | None:
    """The only file of an archive that the engine sent."""
    try:
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for member in tar:
                file = tar.extractfile(member) if member.isfile() else None
                if file is not None:
                    return file.read(most_bytes + 1)
    except tarfile.TarError:
        return None
    return None


def user_in(accounts: bytes, user: str) -> tuple[int, int] | None:
    """The numbers of a user as an image names it: `etl`, `1000`, `1000:1000`. None if its accounts do not have it."""
    name, _, group = user.partition(":")
    if not name or name == "root":
        found = (0, 0)
    elif name.isascii() and name.isdigit():
        found = (int(name), int(name))
    else:
        lines = [line.split(":") for line in accounts.decode("utf-8", "replace").splitlines()]
        numbers = [line[2:4] for line in lines if line[0] == name and len(line) > 3]
        if not numbers or not all(number.isdigit() for number in numbers[0]):
            return None
        found = (int(numbers[0][0]), int(numbers[0][1]))
    return (found[0], int(group)) if group.isascii() and group.isdigit() else found


def listed(container: Mapping[str, Any]) -> Observed:
    """The state as a listing shows it: enough to decide what to look at."""
    return _observed(str(container.get("State") or ""), reason=container.get("Status"))


def inspected(container: Mapping[str, Any], outcome: bytes | None) -> Observed:
    """The state as an inspection shows it."""
    state = container.get("State") or {}
    code = state.get("ExitCode")
    if state.get("OOMKilled"):
        reason: str | None = "OOMKilled: it used more memory than its limit"
    else:
        # 137 is SIGKILL; an engine that starts again says in words what it found.
        reason = " ".join(str(state.get("Error") or "").split())[:500] or (f"exit code {code}" if code else None)
    return _observed(
        str(state.get("Status") or ""),
        reason=reason,
        exit_code=code,
        outcome=outcome,
        since=_time(state.get("StartedAt")),
    )


def has_started(container: Mapping[str, Any]) -> bool:
    """Starting a container that has ended would start it again."""
    return str((container.get("State") or {}).get("Status")) not in ("created", "configured", "initialized")


def _observed(
    status: str,
    *,
    reason: str | None,
    exit_code: int | None = None,
    outcome: bytes | None = None,
    since: datetime | None = None,
) -> Observed:
    match status:
        case "created" | "configured" | "initialized":
            # Every container is, for a moment: no reason to tell anybody.
            return Observed(phase=Phase.WAITING)
        case "running":
            return Observed(phase=Phase.RUNNING, outcome=outcome, since=since)
        case "exited" | "dead" | "removing" | "stopped":
            return Observed(
                phase=Phase.ENDED,
                reason=reason,
                exit_code=exit_code,
                outcome=outcome,
                is_being_deleted=status == "removing",
            )
    # Paused, restarting, stopping, unknown to this release: only an end is an end.
    return Observed(phase=Phase.RUNNING, reason=f"it is {status or 'in an unknown state'}", outcome=outcome)


def _time(text: object) -> datetime | None:
    """The engine writes nanoseconds."""
    if not isinstance(text, str) or text.startswith("0001"):
        return None
    try:
        return datetime.fromisoformat(text[:19] + "+00:00")
    except ValueError:
        return None


def whole_seconds(seconds: float) -> int:
    """For `stop`, where 0 kills at once."""
    return max(1, math.ceil(seconds))
