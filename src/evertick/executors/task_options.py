"""The options of one attempt on an engine: the operator's defaults, then those of its DAG and task, as far as they are
allowed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from evertick.config import Settings
from evertick.domain.engine_options import ENGINE_OPTIONS, PRIVILEGED, check_engine_options
from evertick.domain.errors import InvalidSettings, SubmissionRefused
from evertick.executors.base import Order

Options = dict[str, Any]


class TaskOptions:
    """Of one engine. Raises InvalidSettings if the file with the defaults cannot be used."""

    def __init__(self, engine: str, settings: Settings) -> None:
        self._engine, self._defaults = engine, _defaults(engine, settings)
        self._allowed = set(settings.executor_options) or set(ENGINE_OPTIONS[engine]) - PRIVILEGED

    def of(self, order: Order) -> Options:
        """Raises SubmissionRefused for options that the engine does not have, or that DAGs may not set here."""
        engine, given = self._engine, order.place.get(self._engine) or {}
        if not isinstance(given, Mapping):
            raise SubmissionRefused(f"the {engine} options of {order.what} must be a dict.")
        try:
            check_engine_options(engine, given)
        except (TypeError, ValueError) as error:
            raise SubmissionRefused(f"the {engine} options of {order.what} are wrong: {error}.") from None
        if forbidden := sorted(given.keys() - self._allowed):
            raise SubmissionRefused(
                f"the {engine} options of {order.what} set {', '.join(forbidden)}, which EVERTICK_EXECUTOR_OPTIONS"
                " does not allow."
            )
        env = {**self._defaults.get("env", {}), **given.get("env", {})}
        return {**self._defaults, **given, **({"env": env} if env else {})}


def _defaults(engine: str, settings: Settings) -> Options:
    file = settings.executor_defaults
    if file is None:
        return {}
    try:
        found = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidSettings(f"EVERTICK_EXECUTOR_DEFAULTS={file} cannot be read: {error}.") from None
    if unknown := sorted(found.keys() - ENGINE_OPTIONS.keys()):
        tables = ", ".join(ENGINE_OPTIONS)
        raise InvalidSettings(f"EVERTICK_EXECUTOR_DEFAULTS={file}: {unknown[0]!r} is no table of it: use {tables}.")
    options = found.get(engine, {})
    try:
        if not isinstance(options, dict):
            raise TypeError("it must be a table")
        check_engine_options(engine, options)
    except (TypeError, ValueError) as error:
        raise InvalidSettings(f"EVERTICK_EXECUTOR_DEFAULTS={file}, table {engine!r}: {error}.") from None
    return options
