"""Files of keys, one per line, that only their owner may read."""

from __future__ import annotations

from pathlib import Path

from evertick.domain.errors import InvalidSettings
from evertick.processes.private_files import write_private


def read_keys(place: Path, *, if_missing: str) -> list[str]:
    """Raises InvalidSettings, with the text `if_missing` if there is no file."""
    try:
        mode = place.stat().st_mode & 0o777
        text = place.read_text(encoding="ascii")
    except FileNotFoundError:
        raise InvalidSettings(if_missing) from None
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"the key file {place} cannot be read: {error}") from None
    if mode & 0o077:
        raise InvalidSettings(f"the key file {place} can be read by others: run `chmod 600 {place}`.")
    return text.split()


def write_keys(place: Path, keys: list[str], *, replaces: bool = True) -> None:
    """Never readable by other users, not even for a moment. `replaces`: otherwise an existing file stays."""
    write_private(place, "".join(f"{key}\n" for key in keys).encode("ascii"), replaces=replaces)
