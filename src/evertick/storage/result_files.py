"""Results too large for the database, as files named by the hash of their content, one folder per run.

Written completely before the attempt reports, so that every file that the database names exists; checked on every read.
A file that no report named is deleted with its run's folder, when the run is gone from the database.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from evertick.domain.attempt import RESULT_TAG
from evertick.domain.errors import ResultLost
from evertick.processes.private_files import sync_folder, write_private


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultFiles:
    """Results larger than `spill_bytes` go to `folder`; results larger than `max_bytes` are refused. Without a folder,
    none is spilled."""

    folder: str = ""
    spill_bytes: int = 1024 * 1024
    max_bytes: int = 1024 * 1024

    def put(self, run_id: int, text: str) -> str:
        """Store it, and return the JSON that refers to it. Raises OSError."""
        raw = text.encode()
        digest = hashlib.sha256(raw).hexdigest()
        path = Path(self.folder) / str(run_id) / digest
        if not path.exists():
            write_private(path, raw)
            sync_folder(path.parent)
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
            raise ResultLost(f"the file of a large result, {path}, was changed. Clear the task that produced it.")
        return raw.decode()


def files_in(value: object) -> dict[str, int]:
    """The large results that this JSON refers to: their hashes and sizes."""
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
