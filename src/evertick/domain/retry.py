"""The delay before a failed task is retried. Draws no random numbers: they are an argument."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import assert_never

from evertick.domain.errors import InvalidDag

_LONGEST_DELAY_SECONDS = 365.0 * 86_400
_MOST_RETRIES = 10_000
# Beyond these, any delay of a nanosecond or more has reached every cap, so no float can overflow.
_MULTIPLES_LIMIT = 10**15
_DOUBLINGS_LIMIT = 200


class Backoff(StrEnum):
    """How the delay grows with each failure: not at all, linearly, or exponentially."""

    FIXED = "fixed"
    LINEAR = "linear"
    EXPONENTIAL = "exponential"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryPolicy:
    """`max_delay_seconds` bounds the growth; it does not apply to a fixed delay. `jitter` shortens a delay at random by up to
    that fraction of it, so that tasks that failed together are not retried together. `retry_on` and `never_on` are names of
    exceptions, as `module.Class`: a failure without an exception (a kill, a time limit) is retried regardless of them."""

    retries: int = 0
    delay_seconds: float = 30.0
    backoff: Backoff = Backoff.FIXED
    max_delay_seconds: float | None = 3600.0
    jitter: float = 0.0
    retry_on: tuple[str, ...] = ()
    never_on: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        retries = self.retries
        if isinstance(retries, bool) or not isinstance(retries, int) or not 0 <= retries <= _MOST_RETRIES:
            raise InvalidDag(f"retries is {retries!r}: it must be a whole number from 0 to {_MOST_RETRIES}")
        if not isinstance(self.backoff, Backoff):
            raise InvalidDag(f"backoff is {self.backoff!r}: it must be one of {', '.join(Backoff)}")
        # Numbers are stored as floats, so that 30 and 30.0 give one canonical text.
        limits = {"delay_seconds": _LONGEST_DELAY_SECONDS, "max_delay_seconds": _LONGEST_DELAY_SECONDS, "jitter": 1.0}
        for name, most in limits.items():
            if (value := getattr(self, name)) is not None or name != "max_delay_seconds":
                object.__setattr__(self, name, _checked(name, value, most))
        cap = self.max_delay_seconds
        if cap is not None and cap < self.delay_seconds and self.backoff is not Backoff.FIXED:
            raise InvalidDag(
                f"max_delay_seconds is {cap:g}, less than delay_seconds {self.delay_seconds:g}: raise it, or use None"
            )

    def to_json(self) -> str:
        """Canonical text: equal policies give equal bytes, and the exception fields are omitted if empty."""
        given = {name: value for name, value in asdict(self).items() if value != ()}
        return json.dumps(given, sort_keys=True, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> RetryPolicy:
        """Parse and validate the policy that `to_json` wrote. Omitted fields have their defaults."""
        try:
            raw = json.loads(text)
            names = {name: tuple(raw[name]) for name in ("retry_on", "never_on") if name in raw}
            return cls(**raw | names | ({"backoff": Backoff(raw["backoff"])} if "backoff" in raw else {}))
        except (TypeError, ValueError, RecursionError):
            raise InvalidDag(f"{text[:40]!r} is not a retry policy: store the output of `to_json`") from None


def class_names(error: BaseException) -> set[str]:
    """The class names of the exception and its bases, as `module.Class`; for a group, also those of its members."""
    names = {f"{each.__module__}.{each.__qualname__}" for each in type(error).__mro__}
    for inner in error.exceptions if isinstance(error, BaseExceptionGroup) else ():
        names |= class_names(inner)
    return names


def may_retry(policy: RetryPolicy, raised: Collection[str]) -> bool:
    """Whether a failure by an exception of these classes, as `module.Class`, may be retried."""
    if any(name in raised for name in policy.never_on):
        return False
    return not policy.retry_on or any(name in raised for name in policy.retry_on)


def delay_before(policy: RetryPolicy, failures: int, unit_random: float) -> float:
    """Seconds to wait before the next attempt, after `failures` failed ones; `unit_random` is from 0 to 1, exclusive."""
    if failures < 1:
        raise ValueError(f"failures is {failures}: a retry follows at least one")
    cap = _LONGEST_DELAY_SECONDS if policy.max_delay_seconds is None else policy.max_delay_seconds
    match policy.backoff:
        case Backoff.FIXED:
            delay = policy.delay_seconds
        case Backoff.LINEAR:
            delay = min(policy.delay_seconds * min(failures, _MULTIPLES_LIMIT), cap)
        case Backoff.EXPONENTIAL:
            delay = min(math.ldexp(policy.delay_seconds, min(failures - 1, _DOUBLINGS_LIMIT)), cap)
        case _:
            assert_never(policy.backoff)
    return delay * (1 - policy.jitter * unit_random)


def _checked(name: str, value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise InvalidDag(f"{name} is {value!r}: it must be a number from 0 to {most:.0f}")
    return float(value)
