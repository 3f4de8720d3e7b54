"""Settings: one frozen record, every default visible here, read from the environment and validated once.

The only module that reads the environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_network
from math import isfinite
from pathlib import Path

from evertick.domain.errors import InvalidRouting, InvalidSettings, UserError
from evertick.domain.executor_options import POD_OPTIONS
from evertick.domain.notifications import parse_destination
from evertick.domain.routing import read_pattern
from evertick.domain.shards import MOST_SHARDS

LARGEST_PORT = 65_535


POD_CLEANUPS = ("always", "on_success", "never")


def check_pods(*, options: Iterable[str], cleanup: str, owner: str) -> None:
    if unknown := [name for name in options if name not in POD_OPTIONS]:
        raise InvalidSettings(f"EVERTICK_POD_OPTIONS: {unknown[0]!r} is unknown: use {', '.join(POD_OPTIONS)}.")
    if cleanup not in POD_CLEANUPS:
        raise InvalidSettings(f"EVERTICK_POD_CLEANUP={cleanup!r} is unknown: use {', '.join(POD_CLEANUPS)}.")
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?", owner):
        raise InvalidSettings(
            f"EVERTICK_POD_OWNER_LABEL={owner!r} is not a valid label: use letters, digits, '-' and '.'."
        )


def check_notifications(*, sinks: Mapping[str, Iterable[str]], networks: Iterable[str], sender: str | None) -> None:
    """`sinks` by the name of the variable that contains them."""
    for name, texts in sinks.items():
        for text in texts:
            try:
                parse_destination(text)
            except UserError as error:
                raise InvalidSettings(f"{name}: {error}") from None
    for text in networks:
        try:
            ip_network(text)
        except ValueError:
            raise InvalidSettings(
                f"EVERTICK_WEBHOOK_ALLOWED_NETWORKS: {text!r} is not a network: write one such as 10.0.0.0/8 or 127.0.0.1."
            ) from None
    if sender is not None and ("@" not in sender or not sender.isprintable()):
        raise InvalidSettings(
            f"EVERTICK_SMTP_FROM={sender!r} is not an email address: write one such as evertick@example.com."
        )


def check_storage(storage: str, *, keys: tuple[str | None, str | None], endpoint: str | None) -> None:
    is_place = re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]*)?", storage)
    # Servers and proxies resolve such path segments, which would address another object.
    if not is_place or {".", ".."} & set(storage.split("/")):
        raise InvalidSettings(
            f"EVERTICK_STORAGE={storage!r} is not a storage URL: write one such as s3://bucket/prefix."
        )
    if not all(keys):
        raise InvalidSettings("EVERTICK_STORAGE needs EVERTICK_STORAGE_KEY_ID and EVERTICK_STORAGE_SECRET_KEY.")
    address = re.fullmatch(r"https?://[\w.-]+(?::(\d{1,5}))?/?", endpoint) if endpoint else None
    if endpoint and (address is None or int(address[1] or 0) > LARGEST_PORT):
        raise InvalidSettings(
            f"EVERTICK_STORAGE_ENDPOINT={endpoint!r} is not a URL: write one such as https://s3.example:9000."
        )


# The executor of a runner that runs its tasks itself.
LOCAL = "local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Each field is set by EVERTICK_<NAME>, for instance EVERTICK_RUNNER_SLOTS."""

    database_url: str | None = None
    home: Path = Path(".evertick")
    dags_folder: Path = Path("dags")
    server: str | None = None
    # Not printed with the settings: anyone who has it can act as its owner.
    token: str | None = field(default=None, repr=False)

    tick_seconds: float = 1.0
    # Together with a tick before it and a standby's poll after it, another scheduler leads within six seconds, even if the server
    # received the last renewal and the leader did not receive the reply.
    leader_lease_seconds: float = 4.0
    fire_batch: int = 1000
    promote_batch: int = 1000
    reconcile_batch: int = 200
    reconcile_seconds: float = 30.0
    maintenance_timeout_seconds: float = 5.0
    orphan_after_seconds: float = 300.0
    max_active_retries: int | None = None
    shards: int | None = None
    release_after_seconds: float = 60.0
    retention_days: float = 90.0

    runner_id: str | None = None
    runner_name: str | None = None
    runner_slots: int = field(default_factory=lambda: max(32, 4 * (os.cpu_count() or 1)))
    runner_queues: tuple[str, ...] = ("default",)
    runner_task_patterns: tuple[str, ...] = ()
    priority_aging_seconds: float = 60.0
    executor: str = LOCAL
    dispatch_workers: int = 16
    dispatch_queue: int = 256
    dispatch_lost_seconds: float = 180.0
    agent_api_url: str | None = None
    heartbeat_seconds: float = 10.0
    lost_after_seconds: float = 90.0
    infra_retries: int = 3
    stop_grace_seconds: float = 10.0
    listen_notify: bool = True
    log: str = "text"
    health: bool = True
    health_host: str = "127.0.0.1"
    health_port: int | None = None
    api_host: str = "127.0.0.1"
    api_port: int | None = None
    api_trusted_proxies: tuple[str, ...] = ()
    api_rate_limit: float = 100.0
    api_connections: int = 256
    admin_password: str | None = field(default=None, repr=False)
    otlp_endpoint: str | None = None
    notify_on_failure: tuple[str, ...] = ()
    notify_on_deadline: tuple[str, ...] = ()
    notify_repeat: bool = False
    notify_attempts: int = 10
    notify_expire_hours: float = 24.0
    webhook_allowed_networks: tuple[str, ...] = ()
    smtp_connection: str = "smtp"
    smtp_from: str | None = None
    failpoint: str | None = None
    # Not printed with the settings: they decrypt every stored secret.
    secret_keys: tuple[str, ...] = field(default=(), repr=False)
    secret_key_file: Path | None = None
    secrets_backends: tuple[str, ...] = ("store",)
    # Not printed with the settings: anyone who has it can act as any agent.
    agent_key: tuple[str, ...] = field(default=(), repr=False)
    agent_key_file: Path | None = None
    start_token_seconds: float = 86_400.0
    attempt_token_seconds: float = 900.0
    agent_lost_after_seconds: float = 300.0
    # For the agent itself.
    agent_token: str | None = field(default=None, repr=False)
    agent_token_file: Path | None = None
    agent_outcome_file: Path | None = None
    agent_report_seconds: float = 600.0

    kubeconfig: Path | None = None
    kube_context: str | None = None
    kube_namespace: str | None = None
    kube_timeout_seconds: float = 30.0
    pod_template: Path | None = None
    pod_image: str | None = None
    pod_owner_label: str = "evertick"
    pod_options: tuple[str, ...] = ()
    pod_cleanup: str = "always"
    pod_keep_seconds: float = 0.0
    pod_start_timeout_seconds: float = 300.0

    load_timeout_seconds: float = 30.0
    routing_file: Path | None = None
    results_folder: Path | None = None
    storage: str | None = None
    storage_endpoint: str | None = None
    storage_region: str = "us-east-1"
    storage_key_id: str | None = None
    # Not printed with the settings.
    storage_secret_key: str | None = field(default=None, repr=False)
    storage_retry_seconds: float = 300.0
    log_archive: bool = False
    log_archive_after_seconds: float = 600.0
    result_spill_bytes: int = 1024 * 1024
    result_max_bytes: int = 256 * 1024 * 1024
    log_head_bytes: int = 4 * 1024 * 1024
    log_tail_bytes: int = 1024 * 1024

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            # Every comparison below is false for NaN, so it would pass them all.
            if isinstance(value, float) and not isfinite(value):
                raise InvalidSettings(f"{_variable(each.name)}={value} is not a finite number.")
        for name, lowest in _LOWEST.items():
            value = getattr(self, name)
            if value is not None and value < lowest:
                raise InvalidSettings(f"{_variable(name)}={value} is too small: the lowest is {lowest}.")
        if self.log not in _LOG_FORMATS:
            raise InvalidSettings(f"EVERTICK_LOG={self.log!r} is unknown: use {' or '.join(_LOG_FORMATS)}.")
        for name in ("health_port", "api_port"):
            port = getattr(self, name)
            if port is not None and port > LARGEST_PORT:
                raise InvalidSettings(f"{_variable(name)}={port} is not a valid port: the largest is {LARGEST_PORT}.")
        if self.shards is not None and self.shards > MOST_SHARDS:
            raise InvalidSettings(f"EVERTICK_SHARDS={self.shards} is too many: the maximum is {MOST_SHARDS}.")
        if not self.retention_days <= _LONGEST_RETENTION_DAYS:
            raise InvalidSettings(
                f"EVERTICK_RETENTION_DAYS={self.retention_days} is too long: the longest is {_LONGEST_RETENTION_DAYS}, and"
                " 0 keeps everything."
            )
        if not self.runner_queues:
            raise InvalidSettings("EVERTICK_RUNNER_QUEUES is empty: name at least one queue, for instance 'default'.")
        for pattern in self.runner_task_patterns:
            try:
                read_pattern(pattern)
            except InvalidRouting as error:
                raise InvalidSettings(f"EVERTICK_RUNNER_TASK_PATTERNS: {error}") from None
        sinks = {_variable(name): getattr(self, name) for name in ("notify_on_failure", "notify_on_deadline")}
        check_notifications(sinks=sinks, networks=self.webhook_allowed_networks, sender=self.smtp_from)
        check_pods(options=self.pod_options, cleanup=self.pod_cleanup, owner=self.pod_owner_label)
        if self.storage is not None:
            keys = (self.storage_key_id, self.storage_secret_key)
            check_storage(self.storage, keys=keys, endpoint=self.storage_endpoint)
        elif self.log_archive:
            raise InvalidSettings("EVERTICK_LOG_ARCHIVE=on needs an object storage: set EVERTICK_STORAGE.")
        for name, times, words, other, why in _AT_LEAST:
            value, than = getattr(self, name), getattr(self, other)
            # Without a remote executor no attempt is declared lost for what one reports.
            is_meant = name != "dispatch_lost_seconds" or self.executor != LOCAL
            if is_meant and value < times * than:
                bound = f"{_variable(name)}={value} must be at least {words} {_variable(other)}={than}"
                raise InvalidSettings(f"{bound}: {why}.")
        if self.agent_api_url is not None and not self.agent_api_url.startswith(("http://", "https://")):
            raise InvalidSettings(
                f"EVERTICK_AGENT_API_URL={self.agent_api_url!r} is not an API URL: write one such as https://evertick.example.com."
            )
        if self.tick_seconds >= self.lost_after_seconds:
            raise InvalidSettings(
                f"EVERTICK_TICK_SECONDS={self.tick_seconds} must be below "
                f"EVERTICK_LOST_AFTER_SECONDS={self.lost_after_seconds}: heartbeats are checked once per tick."
            )

    @property
    def result_place(self) -> Path:
        return self.results_folder or self.home / "results"

    @property
    def secret_key_place(self) -> Path:
        return self.secret_key_file or self.home / "secret.key"

    @property
    def agent_key_place(self) -> Path:
        return self.agent_key_file or self.home / "agent.key"

    @property
    def bundles_folder(self) -> Path:
        return self.home / "bundles"

    @property
    def spool_folder(self) -> Path:
        return self.home / "spool"


_LOG_FORMATS = ("text", "json")


_LONGEST_RETENTION_DAYS = 36_500


# Minimum ratios between settings, and the reasons.
_AT_LEAST = (
    ("lost_after_seconds", 3, "three times", "heartbeat_seconds", "a runner would be lost between two heartbeats"),
    (
        "agent_lost_after_seconds",
        3,
        "three times",
        "heartbeat_seconds",
        "an agent would be declared lost between two heartbeats",
    ),
    ("dispatch_lost_seconds", 10, "ten times", "tick_seconds", "an executor is polled every five ticks"),
    ("orphan_after_seconds", 2, "twice", "reconcile_seconds", "a run is checked once per reconciliation"),
    ("leader_lease_seconds", 3, "three times", "tick_seconds", "the lease is renewed once per tick"),
)


_LOWEST: dict[str, float] = {
    "tick_seconds": 0.01,
    "fire_batch": 1,
    "promote_batch": 1,
    "reconcile_batch": 1,
    "reconcile_seconds": 0.01,
    "release_after_seconds": 0,
    "maintenance_timeout_seconds": 0.1,
    "dispatch_lost_seconds": 0.1,
    "max_active_retries": 1,
    "shards": 1,
    "retention_days": 0,
    "runner_slots": 1,
    "priority_aging_seconds": 0,
    "dispatch_workers": 1,
    "dispatch_queue": 0,
    "heartbeat_seconds": 0.05,
    "infra_retries": 0,
    "stop_grace_seconds": 0,
    "health_port": 0,
    "api_port": 0,
    "api_rate_limit": 0,
    "api_connections": 8,
    "notify_attempts": 1,
    "notify_expire_hours": 0,
    "kube_timeout_seconds": 0.1,
    "pod_keep_seconds": 0,
    "pod_start_timeout_seconds": 0,
    "load_timeout_seconds": 0.1,
    "start_token_seconds": 1,
    "attempt_token_seconds": 1,
    "agent_report_seconds": 0,
    "storage_retry_seconds": 0,
    "log_archive_after_seconds": 0,
    "result_spill_bytes": 1024,
    "result_max_bytes": 1024,
    "log_head_bytes": 4096,
    "log_tail_bytes": 4096,
}


def read_settings(environment: Mapping[str, str] | None = None, **overrides: object) -> Settings:
    """Settings from the environment; command line values (not None) take precedence."""
    env = os.environ if environment is None else environment
    known = {each.name: each for each in fields(Settings)}
    values: dict[str, object] = {}
    for name in known:
        raw = env.get(_variable(name))
        if raw:
            values[name] = _parse(name, raw)
    if "otlp_endpoint" not in values and (collector := _standard_collector(env)):
        values["otlp_endpoint"] = collector
    values.update({name: value for name, value in overrides.items() if value is not None})
    settings = Settings(**values)  # type: ignore[arg-type]
    return settings


def variables() -> list[str]:
    """The names of all settings, as environment variables."""
    return [_variable(each.name) for each in fields(Settings)]


def unknown_variables(environment: Mapping[str, str] | None = None) -> list[str]:
    """Variables with our prefix that are not settings. EVERTICK_SECRET__DB is a stored value."""
    env = os.environ if environment is None else environment
    ours = (name for name in sorted(env) if name.upper().startswith("EVERTICK_") and "__" not in name)
    return [name for name in ours if name not in variables()]


def _standard_collector(env: Mapping[str, str]) -> str | None:
    """The trace endpoint in OpenTelemetry's own variables."""
    return env.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT") or env.get("OTEL_EXPORTER_OTLP_ENDPOINT") or None


def environment_for(settings: Settings, environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """An environment from which `read_settings` reads the same settings again: used to start child processes."""
    env = dict(os.environ if environment is None else environment)
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value is not None:
            env[_variable(each.name)] = ",".join(value) if isinstance(value, tuple) else str(value)
    return env


def user_environment(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment that user code may see: everything but our own settings, which name the database."""
    env = os.environ if environment is None else environment
    return {name: value for name, value in env.items() if not name.startswith("EVERTICK_")}


def value_from_environment(kind: str, name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """A stored value from this process's environment: EVERTICK_SECRET__DB for secret `db`."""
    env = os.environ if environment is None else environment
    return env.get(f"EVERTICK_{kind.upper()}__{re.sub('[^A-Za-z0-9]', '_', name).upper()}")


def login_file(environment: Mapping[str, str] | None = None) -> Path:
    """The file in which `evertick login` keeps its tokens: next to the user's other configuration."""
    env = os.environ if environment is None else environment
    folder = env.get("XDG_CONFIG_HOME") or str(Path(env.get("HOME") or "~").expanduser() / ".config")
    return Path(folder) / "evertick" / "logins.json"


def _variable(name: str) -> str:
    return f"EVERTICK_{name.upper()}"


def _parse(name: str, raw: str) -> object:
    kind = Settings.__annotations__[name]
    try:
        match kind:
            case "int" | "int | None":
                return int(raw)
            case "float":
                return float(raw)
            case "bool":
                return {"1": True, "true": True, "on": True, "0": False, "false": False, "off": False}[raw.lower()]
            case "Path" | "Path | None":
                return Path(raw)
            case "tuple[str, ...]":
                return tuple(part.strip() for part in raw.split(",") if part.strip())
            case _:
                return raw
    except (ValueError, KeyError):
        wanted = kind.removesuffix(" | None")
        raise InvalidSettings(f"{_variable(name)}={raw!r} is not a {wanted}.") from None
