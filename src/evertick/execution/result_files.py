"""Results too large for the database, as files named by the hash of what is in them, one folder per run.

Written whole before the attempt reports, so that what the database names is there; checked whenever it is read. A file that
no report ever named goes with its run's folder, and that goes when the run is gone from the database.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from evertick.domain.attempt import RESULT_TAG
from evertick.domain.errors import ResultLost


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """Results of more than `spill_bytes` go to `folder`; more than `max_bytes` are refused. Without a folder, none goes."""

    folder: str = ""
    spill_bytes: int = 1024 * 1024
    max_bytes: int = 1024 * 1024

    def put(self, run_id: int, text: str) -> str:
        """Store it, and give the JSON that stands for it. Raises OSError."""
        raw = text.encode()
        digest = hashlib.sha256(raw).hexdigest()
        folder = Path(self.folder) / str(run_id)
        path = folder / digest
        if not path.exists():
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            _write(folder, path, raw)
        return json.dumps({RESULT_TAG: "file", "sha256": digest, "bytes": len(raw)})

    def get(self, run_id: int, digest: str, size: int) -> str:
        path = Path(self.folder) / str(run_id) / digest
        try:
            raw = path.read_bytes()
        except OSError as error:
            raise ResultLost(
                f"the file of a large result, {path}, cannot be read: {error.strerror}. Runners on several machines need one"
                " EVERTICK_RESULTS_FOLDER that all of them share, or EVERTICK_STORAGE."
            ) from None
        if len(raw) != size or hashlib.sha256(raw).hexdigest() != digest:
            raise ResultLost(f"the file of a large result, {path}, was changed: clear the task that made it.")
        return raw.decode()


def _write(folder: Path, path: Path, raw: bytes) -> None:
    """Under another name first: whoever finds the file finds all of it, after a crash as well."""
    draft = folder / f".{os.getpid()}-{os.urandom(4).hex()}"
    fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(raw)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(path)
    except BaseException:
        with suppress(OSError):
            draft.unlink()
        raise
    place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def files_in(value: object) -> dict[str, int]:
    """The large results that this JSON stands for: their hashes and sizes."""
    found: dict[str, int] = {}
    rest = [value]
    while rest:
        each = rest.pop()
        if isinstance(each, list):
            rest += each
        elif isinstance(each, dict):
            digest, size = each.get("sha256"), each.get("bytes")
            if each.get(RESULT_TAG) == "file" and isinstance(digest, str) and isinstance(size, int):
                found[digest] = size
            else:
                rest += each.values()
    return found
