"""Request and response models of the agent API."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from evertick.domain.attempt import OutcomeKind

Text = Annotated[str, Field(max_length=300)]
# Ranges of PostgreSQL's integer types.
Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
Offset = Annotated[int, Field(ge=0, lt=2**63)]


class _Sent(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Place(_Sent):
    """The location of the agent's process."""

    host: Text
    boot_id: Text
    pid_namespace: Text
    uid: Annotated[int, Field(ge=0, lt=2**31)]
    pid: Annotated[int, Field(ge=0, lt=2**31)]
    pid_started: Annotated[float, Field(ge=0, le=1e18, allow_inf_nan=False)]


class StartRequest(_Sent):
    """`nonce` is a random value of the agent's process. It distinguishes two agents started for the same attempt."""

    nonce: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    version: Text
    place: Place


class Order(BaseModel):
    run_id: int
    idx: int
    map_index: int
    epoch: int
    session: int
    attempt: int
    dag: str
    task: str
    version_id: int
    bundle: str
    file: str
    fire_at: str | None
    params_json: str
    inputs_json: str
    timeout_seconds: float | None
    isolation: str
    command: str | None
    stops_on_lost_contact: bool
    granted_json: str


class Limits(BaseModel):
    heartbeat_seconds: float
    lost_after_seconds: float
    stop_grace_seconds: float
    log_head_bytes: int
    log_tail_bytes: int
    result_spill_bytes: int
    result_max_bytes: int


class StartAnswer(BaseModel):
    order: Order
    uses_threads: bool
    limits: Limits
    token: str
    renewal: str


class HeartbeatRequest(_Sent):
    """`wait_seconds`: how long the server may delay the response until there is something to report."""

    wait_seconds: Annotated[float, Field(ge=0, le=60, allow_inf_nan=False)] = 0.0


class HeartbeatAnswer(BaseModel):
    """`rest_seconds`: delay until the next heartbeat."""

    word: Literal["continue", "stop", "lost"]
    rest_seconds: float
    token: str
    renewal: str


class Chunk(_Sent):
    """Complete lines that cover the bytes `offset` to `end` of the attempt's log."""

    offset: Offset
    end: Offset
    content: Annotated[str, Field(max_length=1_000_000)]


class LogsRequest(_Sent):
    chunks: Annotated[list[Chunk], Field(max_length=100)]


class LogsAnswer(BaseModel):
    """`until`: the end of the stored part of the log."""

    until: int


class FinishRequest(_Sent):
    kind: OutcomeKind
    reason: Annotated[str | None, Field(max_length=20_000)] = None
    result_json: str | None = None
    exit_code: Int | None = None
    no_retry: bool = False
    retry_after_seconds: Annotated[float | None, Field(ge=0, le=1e12, allow_inf_nan=False)] = None
    start_seconds: Annotated[float | None, Field(ge=0, le=1e9, allow_inf_nan=False)] = None
    log: Chunk | None = None


class FinishAnswer(BaseModel):
    is_recorded: bool
