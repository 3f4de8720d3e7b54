"""Masks values of variables and connections whose names indicate a secret."""

from __future__ import annotations

import json
from typing import Any

HIDDEN = "***"
# As in Airflow: a name that contains one of these is sensitive.
SENSITIVE = (
    "access_token",
    "api_key",
    "apikey",
    "authorization",
    "keyfile_dict",
    "passphrase",
    "passwd",
    "password",
    "private_key",
    "secret",
    "service_account",
    "token",
)


def is_sensitive(name: str) -> bool:
    plain = name.strip().lower()
    return any(word in plain for word in SENSITIVE)


def masked_text(name: str, text: str) -> str:
    """Mask a variable's value completely, or the sensitive fields of a JSON value."""
    if is_sensitive(name):
        return HIDDEN
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return text
    if not isinstance(found, dict | list):
        return text
    masked = _masked(found)
    return text if masked == found else json.dumps(masked)


def _masked(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: HIDDEN if is_sensitive(str(key)) and each else _masked(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_masked(each) for each in value]
    return value
