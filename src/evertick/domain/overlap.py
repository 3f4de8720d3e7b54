"""The overlap policy: what a schedule does if a run that it started is still open. Decided at each fire, from the runs."""

from __future__ import annotations

from enum import StrEnum


class OverlapPolicy(StrEnum):
    """Start anyway; skip and record it; queue one and skip further ones; queue all; or cancel the open runs first.

    Except for `allow`, one run of the schedule is active at a time.
    """

    ALLOW = "allow"
    SKIP = "skip"
    QUEUE_ONE = "queue_one"
    QUEUE_ALL = "queue_all"
    CANCEL = "cancel"
