"""The ids of traces and spans, derived from what they stand for: whoever knows a run can go on with its trace.

Nothing is stored and nobody has to agree with anybody. `installation` tells apart databases that report to one place.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

_TRACE_BYTES, _SPAN_BYTES = 16, 8


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceIds:
    """The ids of one run's trace."""

    installation: str
    run_id: int

    @property
    def trace(self) -> int:
        return _number(f"{self.installation}/run/{self.run_id}", _TRACE_BYTES)

    def span(self, *parts: object) -> int:
        """For instance ("attempt", idx, map_index, epoch)."""
        path = "/".join(str(part) for part in parts)
        return _number(f"{self.installation}/run/{self.run_id}/{path}", _SPAN_BYTES)


def _number(text: str, size: int) -> int:
    """Never zero: that means "none" in a trace."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1
