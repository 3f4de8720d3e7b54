"""Which server may be written to, and which writes a failover may have lost. Pure: callers pass in what they observed.

A promoted standby has the system identifier of its primary and a higher timeline; the old primary, restarted, a lower one.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """The identity of a server's data: its cluster, and how many promotions led to it."""

    system_id: int
    timeline: int

    def __str__(self) -> str:
        return f"system {self.system_id}, timeline {self.timeline}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WalMark:
    """The position of a server's log when it acknowledged a commit. `lsn` is a byte position."""

    server: Server
    lsn: int
    is_synchronous: bool


class FailoverResult(StrEnum):
    """Whether acknowledged writes may be lost, judged after a reconnect."""

    SAME = "same"
    SAFE = "safe"
    UNPROVEN = "unproven"
    LOST = "lost"


def refusal(seen: Server | None, found: Server) -> str | None:
    """Why a process that has worked with `seen` must not write to `found`; None if it may."""
    if seen is None or found == seen:
        return None
    if found.system_id != seen.system_id:
        return (
            f"it belongs to another database cluster (system identifier {found.system_id}) than this"
            f" process has worked with ({seen.system_id}), so nothing is written to it. If the database was restored"
            " or moved on purpose, restart this process"
        )
    if found.timeline < seen.timeline:
        return (
            f"it is on timeline {found.timeline}, and this process has seen timeline {seen.timeline}: a standby was"
            " promoted and this is the old primary, so nothing is written to it. Shut it down or make it a standby of the"
            " new one; if it was put back on purpose, restart this process"
        )
    return None


def judge(remembered: WalMark, stored_lsn: int | None, found: Server) -> FailoverResult:
    """`stored_lsn` is the newest mark of the remembered server in the current database."""
    if stored_lsn is None or stored_lsn < remembered.lsn:
        return FailoverResult.LOST
    if found == remembered.server:
        return FailoverResult.SAME
    # The newest mark is there. Everything acknowledged after it is there too if each commit waited for the standby.
    return FailoverResult.SAFE if remembered.is_synchronous else FailoverResult.UNPROVEN


def lsn_text(lsn: int) -> str:
    """The position in PostgreSQL's notation."""
    return f"{lsn >> 32:X}/{lsn & 0xFFFFFFFF:X}"
