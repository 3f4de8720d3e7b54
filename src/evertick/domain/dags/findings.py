"""What Evertick does otherwise than the engine that a DAG file was written for."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

_REFUSAL = re.compile(r"AF\d{3} ")


class Severity(StrEnum):
    """A refused DAG is not published; a DAG that differs runs otherwise in one respect; an ignored option has no effect on
    what runs."""

    REFUSED = "refused"
    DIFFERS = "differs"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """`text` names the construct and says what happens instead."""

    code: str
    severity: Severity
    file: str
    line: int | None
    dag: str
    task: str | None = None
    text: str

    def __str__(self) -> str:
        return f"{self.place}: {self.code} {self.task or self.dag}: {self.text}"

    @property
    def place(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def is_refusal(message: str) -> bool:
    """Whether an import error is about one DAG of a file that is refused: the others are published."""
    return _REFUSAL.match(message) is not None


def read_finding(raw: dict[str, Any]) -> Finding:
    """The finding that `to_dict` wrote."""
    return Finding(**{**raw, "severity": Severity(raw["severity"])})
