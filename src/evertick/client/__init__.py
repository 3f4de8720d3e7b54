"""How a program or a command reaches Evertick: the HTTP API of a server, or directly the database.

For programs: `from evertick.client import Evertick, AsyncEvertick`. Loaded when they are first used, as no command needs them.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from evertick.client.library import AsyncEvertick, Evertick

__all__ = ["AsyncEvertick", "Evertick"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("evertick.client.library"), name)
