"""What the requests of runners have in common."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from evertick.api.agent.routes import Int

PREFIX = "/api/runner/v1"
# A runner splits reports that are larger together.
MOST_EXCHANGE_BYTES = 2 * 1024 * 1024
Big = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Session = Annotated[int, Field(ge=0, lt=2**63)]
# Run, index, map index and epoch.
Ref = tuple[Big, Int, Int, Int]


class Sent(BaseModel):
    """An unknown field is an error."""

    model_config = ConfigDict(extra="forbid")
