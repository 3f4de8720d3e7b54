"""Passwords as argon2id hashes. Slow on purpose, so it runs on a thread, and only two at once: each takes 64 MiB."""

from __future__ import annotations

import asyncio
import threading
from functools import cache

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

# 64 MiB, three passes: well above the least that is advised (19 MiB, two), about a tenth of a second.
_HASHER = PasswordHasher(time_cost=3, memory_cost=64 * 1024, parallelism=1)
# A flood of logins must not take the memory of the machine.
_AT_ONCE = threading.BoundedSemaphore(2)


async def hashed(password: str) -> str:
    return await asyncio.to_thread(_hash, password)


async def is_right(password_hash: str | None, password: str) -> bool:
    """False, and as late, where there is no hash: who asks must not learn from the time which users exist."""
    return await asyncio.to_thread(_verify, password_hash, password)


def _hash(password: str) -> str:
    with _AT_ONCE:
        return _HASHER.hash(password)


def _verify(password_hash: str | None, password: str) -> bool:
    with _AT_ONCE:
        try:
            return _HASHER.verify(password_hash or _nobodys(), password) and password_hash is not None
        except (Argon2Error, InvalidHashError):
            return False


@cache
def _nobodys() -> str:
    return _HASHER.hash("nobody has this password")
