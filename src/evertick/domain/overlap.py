"""What a schedule does when a run that it started is still open: decided at the fire, against the runs themselves."""

from __future__ import annotations

from enum import StrEnum


class OverlapPolicy(StrEnum):
    """Start beside it; skip, on record; let one wait and skip further ones; let all wait; or cancel what is open first.

    But for `allow`, one run of the schedule is active at a time.
    """

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE_ONE = "queue_one"
    QUEUE_ALL = "queue_all"
    CANCEL = "cancel"
