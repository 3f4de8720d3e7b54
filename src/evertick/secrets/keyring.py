"""The encryption keys of stored values: from the environment, or from a file that only its owner may read. Never in the
database or a log."""

from __future__ import annotations

from pathlib import Path

from evertick.config import Settings
from evertick.domain.encryption import Keyring, new_key
from evertick.domain.errors import InvalidSettings
from evertick.secrets.key_files import read_keys, write_keys


def load_keyring(settings: Settings) -> Keyring:
    """Read every time, so that an added key is known at once."""
    if settings.secret_keys:
        return Keyring(settings.secret_keys)
    return Keyring(_read(settings.secret_key_place))


def make_key(settings: Settings) -> bool:
    """Create the file with a first key, unless keys exist. Returns whether it did."""
    place = settings.secret_key_place
    if settings.secret_keys or place.exists():
        return False
    write_keys(place, [new_key()])
    return True


def add_key(settings: Settings) -> None:
    """Add a new key, which encrypts from now on; the older keys still decrypt."""
    if settings.secret_keys:
        raise InvalidSettings(
            "the keys come from EVERTICK_SECRET_KEYS: add a new one as the first, everywhere it is set, and rotate with --same-key."
        )
    place = settings.secret_key_place
    write_keys(place, [new_key(), *(_read(place) if place.exists() else [])])


def keep_first_key(settings: Settings) -> int:
    """Remove the keys that no value uses any more. Returns how many were removed."""
    if settings.secret_keys:
        return 0
    keys = _read(settings.secret_key_place)
    write_keys(settings.secret_key_place, keys[:1])
    return len(keys) - 1


def _read(place: Path) -> list[str]:
    missing = (
        f"no key for stored values exists at {place}: `evertick up` and `evertick secrets rotate` create one there; or set"
        " EVERTICK_SECRET_KEYS, or set EVERTICK_SECRET_KEY_FILE to the key's path."
    )
    return read_keys(place, if_missing=missing)
