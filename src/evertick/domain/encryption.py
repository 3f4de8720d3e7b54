"""Encryption of stored values: encrypted and authenticated (Fernet: AES-128-CBC and HMAC-SHA256), under a key with an id.

The first key of a keyring encrypts; every key decrypts. A value is bound to its kind and name: swapping two stored values fails.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from cryptography.fernet import Fernet, InvalidToken

from evertick.domain.errors import DecryptionFailed, InvalidSettings


class Keyring:
    def __init__(self, keys: Iterable[str]) -> None:
        """Raises InvalidSettings if a key is invalid."""
        self._keys: dict[str, Fernet] = {}
        for key in keys:
            try:
                self._keys[key_id(key)] = Fernet(key)
            except ValueError:
                raise InvalidSettings(
                    "a secret key is not 32 bytes in URL-safe base64: create one with `evertick secrets rotate`."
                ) from None
        if not self._keys:
            raise InvalidSettings("there is no secret key: create one with `evertick up` or `evertick secrets rotate`.")

    @property
    def first_id(self) -> str:
        return next(iter(self._keys))

    def knows(self, sealed_with: str) -> bool:
        return sealed_with in self._keys

    def seal(self, kind: str, name: str, value: str) -> str:
        text = json.dumps([kind, name, value])
        return self._keys[self.first_id].encrypt(text.encode()).decode()

    def open(self, kind: str, name: str, content: str, sealed_with: str) -> str:
        key = self._keys.get(sealed_with)
        if key is None:
            raise DecryptionFailed(
                f"{kind} {name!r} is encrypted with key {sealed_with}, which is not among the configured keys"
                f" ({', '.join(self._keys)}): add that key, or set the {kind} again."
            )
        try:
            found = json.loads(key.decrypt(content.encode()))
        except (InvalidToken, ValueError):
            found = None
        if not isinstance(found, list) or found[:2] != [kind, name]:
            raise DecryptionFailed(f"{kind} {name!r} was changed in the database and cannot be trusted: set it again.")
        return str(found[2])


def new_key() -> str:
    return Fernet.generate_key().decode()


def key_id(key: str) -> str:
    """The id of a key, which reveals nothing about the key."""
    return hashlib.sha256(key.encode()).hexdigest()[:8]
