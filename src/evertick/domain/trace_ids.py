"""The ids of traces and spans, derived from the objects that they represent: any process that knows a run can continue its trace.

No id is stored or coordinated. `installation` distinguishes databases that report to the same collector.
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
        """The id of one span, such as ("attempt", idx, map_index, epoch)."""
        path = "/".join(str(part) for part in parts)
        return _number(f"{self.installation}/run/{self.run_id}/{path}", _SPAN_BYTES)


def _number(text: str, size: int) -> int:
    """Never zero: that means "none" in a trace."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:size]) or 1
