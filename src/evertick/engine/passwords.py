"""Password hashes with argon2id. Slow on purpose, so hashing runs on a thread, and only two at once: each takes 64 MiB."""

from __future__ import annotations

import asyncio
import threading
from functools import cache

from argon2 import PasswordHasher
from argon2.exceptions import Argon2Error, InvalidHashError

# 64 MiB, three passes: well above the recommended minimum (19 MiB, two), about a tenth of a second.
_HASHER = PasswordHasher(time_cost=3, memory_cost=64 * 1024, parallelism=1)
# A flood of sign-ins must not exhaust the machine's memory.
_AT_ONCE = threading.BoundedSemaphore(2)


async def hashed(password: str) -> str:
    return await asyncio.to_thread(_hash, password)


async def is_right(password_hash: str | None, password: str) -> bool:
    """False without a hash, after the same time: the response time must not reveal which users exist."""
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
    return _HASHER.hash("no account has this password")
