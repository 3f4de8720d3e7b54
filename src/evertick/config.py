"""Settings: one frozen record with every default, read from the environment and a file, and validated once.
The only module that reads the environment."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from ipaddress import ip_network
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from evertick.domain.deployments import DEFAULT, NAME
from evertick.domain.engine_options import check_option_name
from evertick.domain.errors import InvalidSettings, UserError, did_you_mean
from evertick.domain.executor_options import check_pod_option
from evertick.domain.notifications import parse_destination
from evertick.domain.routing import read_cell, read_pattern
from evertick.domain.shards import MOST_SHARDS

LARGEST_PORT = 65_535

T = TypeVar("T")


class Ratio(NamedTuple):
    """A setting is at least `times` the setting `other`; `why` is the reason."""

    times: int
    other: str
    why: str


class Checks(NamedTuple):
    """The values that a setting accepts. `each` raises a UserError for a part of a list. `form` returns whether a text is valid;
    otherwise it is not `what`."""

    minimum: float | None = None
    maximum: float | None = None
    choices: tuple[str, ...] = ()
    at_least: tuple[Ratio, ...] = ()
    each: Callable[[str], object] = str
    form: Callable[[str], object] = bool
    what: str = ""

    def check(self, name: str, value: object) -> None:
        told = f"{_variable(name)}={value}"
        if isinstance(value, int | float):
            # Every comparison is false for NaN, so it would pass them all.
            if not isfinite(value):
                raise InvalidSettings(f"{told} is not a finite number.")
            if self.minimum is not None and value < self.minimum:
                raise InvalidSettings(f"{told} is too small: the lowest is {self.minimum}.")
            if self.maximum is not None and value > self.maximum:
                raise InvalidSettings(f"{told} is too large: the highest is {self.maximum}.")
        elif isinstance(value, tuple):
            try:
                for part in value:
                    self.each(part)
            except UserError as error:
                raise InvalidSettings(f"{_variable(name)}: {error}") from None
        elif self.choices and value not in self.choices:
            raise InvalidSettings(f"{_variable(name)}={value!r} is unknown: use {', '.join(self.choices)}.")
        elif self.what and isinstance(value, str) and not self.form(value):
            raise InvalidSettings(f"{_variable(name)}={value!r} is not {self.what}.")

    def check_ratio(self, name: str, settings: Settings) -> None:
        for times, other, why in self.at_least:
            value, than = getattr(settings, name), getattr(settings, other)
            if value < times * than:
                words = {2: "twice", 3: "three times"}.get(times, f"{times} times")
                bound = f"{_variable(name)}={value} must be at least {words} {_variable(other)}={than}"
                raise InvalidSettings(f"{bound}: {why}.")


def setting(default: T, *, secret: bool = False, **checks: Any) -> T:
    """A field of the settings with its checks. A secret is not printed with the settings."""
    return field(default=default, repr=not secret, metadata={"checks": Checks(**checks)})


def _check_network(text: str) -> None:
    try:
        ip_network(text)
    except ValueError:
        raise UserError(f"{text!r} is not a network: write one such as 10.0.0.0/8 or 127.0.0.1.") from None


def _is_storage(text: str) -> bool:
    is_place = re.fullmatch(r"s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[A-Za-z0-9._/-]*)?", text)
    # Servers and proxies resolve such path segments, which would address another object.
    return is_place is not None and not {".", ".."} & set(text.split("/"))


def _check_access(key_id: str | None, secret_key: str | None, endpoint: str | None) -> None:
    if not (key_id and secret_key):
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
    """Each field is set by EVERTICK_<NAME>, for instance EVERTICK_RUNNER_SLOTS, or by its name in the configuration file."""

    config: str | None = None
    database_url: str | None = None
    home: Path = Path(".evertick")
    dags_folder: Path = Path("dags")
    deployment: str = setting(
        DEFAULT, form=NAME.fullmatch, what="a name for a deployment: use letters, digits, '_', '-' and '.'"
    )
    server: str | None = None
    token: str | None = setting(None, secret=True)

    tick_seconds: float = setting(1.0, minimum=0.01)
    # Together with a tick before it and a standby's poll after it, another scheduler leads within six seconds, even if the server
    # received the last renewal and the leader did not receive the reply.
    leader_lease_seconds: float = setting(
        4.0, at_least=(Ratio(3, "tick_seconds", "the lease is renewed once per tick"),)
    )
    fire_batch: int = setting(1000, minimum=1)
    promote_batch: int = setting(1000, minimum=1)
    reconcile_batch: int = setting(200, minimum=1)
    reconcile_seconds: float = setting(30.0, minimum=0.01)
    maintenance_timeout_seconds: float = setting(5.0, minimum=0.1)
    orphan_after_seconds: float = setting(
        300.0, at_least=(Ratio(2, "reconcile_seconds", "a run is checked once per reconciliation"),)
    )
    max_active_retries: int | None = setting(None, minimum=1)
    shards: int | None = setting(None, minimum=1, maximum=MOST_SHARDS)
    release_after_seconds: float = setting(60.0, minimum=0)
    retention_days: float = setting(90.0, minimum=0, maximum=36_500)

    runner_id: str | None = None
    runner_name: str | None = None
    runner_slots: int = setting(max(32, 4 * (os.cpu_count() or 1)), minimum=1)
    runner_triggers: int = setting(1000, minimum=0)
    # A runner that leaves by itself: after so long without work, or after so long at all; 0 for never.
    runner_idle_seconds: float = setting(0.0, minimum=0)
    runner_until_seconds: float = setting(0.0, minimum=0)
    runner_queues: tuple[str, ...] = ("default",)
    runner_task_patterns: tuple[str, ...] = setting((), each=read_pattern)
    priority_aging_seconds: float = setting(60.0, minimum=0)
    executor: str = LOCAL
    executor_owner: str = setting(
        "evertick",
        form=re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?").fullmatch,
        what="a valid label: use letters, digits, '-' and '.'",
    )
    executor_defaults: Path | None = None
    executor_options: tuple[str, ...] = setting((), each=check_option_name)
    agent_command: str = "evertick agent"
    launched_command: str = "evertick runner"
    fleets_file: Path | None = None
    fleet_lease_seconds: float = setting(15.0, minimum=0.1)
    dispatch_workers: int = setting(16, minimum=1)
    dispatch_queue: int = setting(256, minimum=0)
    dispatch_lost_seconds: float = setting(
        180.0, minimum=0.1, at_least=(Ratio(10, "tick_seconds", "an executor is polled every five ticks"),)
    )
    agent_api_url: str | None = setting(
        None,
        form=lambda url: url.startswith(("http://", "https://")),
        what="an API URL: write one such as https://evertick.example.com",
    )
    heartbeat_seconds: float = setting(10.0, minimum=0.05)
    lost_after_seconds: float = setting(
        90.0, at_least=(Ratio(3, "heartbeat_seconds", "a runner would be lost between two heartbeats"),)
    )
    infra_retries: int = setting(3, minimum=0)
    stop_grace_seconds: float = setting(10.0, minimum=0)
    listen_notify: bool = True
    log: str = setting("text", choices=("text", "json"))
    health: bool = True
    health_host: str = "127.0.0.1"
    health_port: int | None = setting(None, minimum=0, maximum=LARGEST_PORT)
    api_host: str = "127.0.0.1"
    api_port: int | None = setting(None, minimum=0, maximum=LARGEST_PORT)
    api_trusted_proxies: tuple[str, ...] = ()
    api_rate_limit: float = setting(100.0, minimum=0)
    api_connections: int = setting(256, minimum=8)
    api_connections_per_address: int = setting(192, minimum=1)
    api_slow_seconds: float = setting(20.0, minimum=0.1)
    public_url: str | None = setting(
        None,
        form=lambda url: re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url) is not None,
        what="the URL of the web UI: write one such as https://evertick.example.com",
    )
    cells: tuple[str, ...] = setting((), each=read_cell)
    admin_password: str | None = setting(None, secret=True)
    oidc_file: Path | None = None
    otlp_endpoint: str | None = None
    ping_url: str | None = setting(None, secret=True)
    openlineage_url: str | None = None
    notify_on_failure: tuple[str, ...] = setting((), each=parse_destination)
    notify_on_deadline: tuple[str, ...] = setting((), each=parse_destination)
    notify_repeat: bool = False
    notify_attempts: int = setting(10, minimum=1)
    notify_expire_hours: float = setting(24.0, minimum=0)
    webhook_allowed_networks: tuple[str, ...] = setting((), each=_check_network)
    smtp_connection: str = "smtp"
    smtp_from: str | None = setting(
        None,
        form=lambda sender: "@" in sender and sender.isprintable(),
        what="an email address: write one such as evertick@example.com",
    )
    failpoint: str | None = None
    secret_keys: tuple[str, ...] = setting((), secret=True)
    secret_key_file: Path | None = None
    secrets_backends: tuple[str, ...] = ("store",)
    agent_key: tuple[str, ...] = setting((), secret=True)
    agent_key_file: Path | None = None
    start_token_seconds: float = setting(86_400.0, minimum=1)
    attempt_token_seconds: float = setting(900.0, minimum=1)
    agent_lost_after_seconds: float = setting(
        300.0,
        at_least=(
            Ratio(3, "heartbeat_seconds", "an agent would be declared lost between two heartbeats"),
            Ratio(
                2, "agent_report_seconds", "an agent would be declared lost before it leaves its outcome to its runner"
            ),
        ),
    )
    # For the agent itself.
    agent_token: str | None = setting(None, secret=True)
    agent_token_file: Path | None = None
    # A runner that reaches Evertick over HTTPS, and not the database.
    runner_server: str | None = None
    runner_token: str | None = setting(None, secret=True)
    runner_token_file: Path | None = None
    runner_ca_file: Path | None = None
    agent_outcome_file: Path | None = None
    agent_report_seconds: float = setting(150.0, minimum=0)

    kubeconfig: Path | None = None
    kube_context: str | None = None
    kube_namespace: str | None = None
    kube_timeout_seconds: float = setting(30.0, minimum=0.1)
    docker_host: str = "unix:///var/run/docker.sock"
    docker_certs: Path | None = None
    slurm_folder: Path | None = None
    ray_address: str = "http://127.0.0.1:8265"
    ray_token: str | None = setting(None, secret=True)
    pod_template: Path | None = None
    pod_image: str | None = None
    pod_options: tuple[str, ...] = setting((), each=check_pod_option)
    pod_cleanup: str = setting("always", choices=("always", "on_success", "never"))
    pod_keep_seconds: float = setting(0.0, minimum=0)
    pod_start_timeout_seconds: float = setting(300.0, minimum=0)

    git_url: str | None = None
    git_ref: str = "main"
    git_path: str = "dags"
    git_secret: str | None = None
    git_webhook_secret: str | None = None
    git_poll_seconds: float = setting(30.0, minimum=1)
    airflow_python: Path | None = None
    load_timeout_seconds: float = setting(30.0, minimum=0.1)
    environments: bool = True
    environments_max_gb: float = setting(10.0, minimum=0)
    environment_build_seconds: float = setting(600.0, minimum=1)
    environment_retry_seconds: float = setting(3600.0, minimum=0)
    routing_file: Path | None = None
    results_folder: Path | None = None
    storage: str | None = setting(None, form=_is_storage, what="a storage URL: write one such as s3://bucket/prefix")
    storage_endpoint: str | None = None
    storage_region: str = "us-east-1"
    storage_key_id: str | None = None
    storage_secret_key: str | None = setting(None, secret=True)
    storage_retry_seconds: float = setting(300.0, minimum=0)
    log_archive: bool = False
    log_archive_after_seconds: float = setting(600.0, minimum=0)
    result_spill_bytes: int = setting(1024 * 1024, minimum=1024)
    result_max_bytes: int = setting(256 * 1024 * 1024, minimum=1024)
    log_head_bytes: int = setting(4 * 1024 * 1024, minimum=4096)
    log_tail_bytes: int = setting(1024 * 1024, minimum=4096)

    def __post_init__(self) -> None:
        checks = {each.name: each.metadata["checks"] for each in fields(self) if "checks" in each.metadata}
        for name, check in checks.items():
            check.check(name, getattr(self, name))
        if not self.runner_queues:
            raise InvalidSettings("EVERTICK_RUNNER_QUEUES is empty: name at least one queue, for instance 'default'.")
        if self.storage is not None:
            _check_access(self.storage_key_id, self.storage_secret_key, self.storage_endpoint)
        elif self.log_archive:
            raise InvalidSettings("EVERTICK_LOG_ARCHIVE=on needs an object storage: set EVERTICK_STORAGE.")
        for name, check in checks.items():
            # Without a remote executor no attempt is declared lost for what one reports.
            if name != "dispatch_lost_seconds" or self.executor != LOCAL:
                check.check_ratio(name, self)
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
    def environments_folder(self) -> Path:
        return self.home / "envs"

    @property
    def spool_folder(self) -> Path:
        return self.home / "spool"


class Given(NamedTuple):
    """The value of a setting, and the variable or file that it comes from."""

    value: object
    source: str


# The value of EVERTICK_CONFIG without a file: for child processes, whose environment has every setting already.
NO_FILE = "none"
_FILE, _PROJECT = "evertick.toml", "pyproject.toml"


def read_settings(environment: Mapping[str, str] = os.environ, **overrides: object) -> Settings:
    """Command line values (not None) take precedence over the environment, which takes precedence over the file."""
    given = given_settings(environment)
    values = {name: each.value for name, each in given.items()}
    try:
        return Settings(**values | {name: value for name, value in overrides.items() if value is not None})  # type: ignore[arg-type]
    except InvalidSettings as error:
        named = {_variable(name): name for name, each in given.items() if each.source != _variable(name)}
        from_file = [named[each] for each in dict.fromkeys(re.findall(r"EVERTICK_\w+", str(error))) if each in named]
        told = "".join(f" {_variable(name)} is {name} in {given[name].source}." for name in from_file)
        raise InvalidSettings(f"{error}{told}") from None


def given_settings(environment: Mapping[str, str] = os.environ) -> dict[str, Given]:
    """Every setting that is not a default."""
    found = _file_settings(environment.get(_variable("config")))
    # OpenTelemetry's own variables for the trace endpoint.
    for standard in ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"):
        if environment.get(standard):
            found["otlp_endpoint"] = Given(environment[standard], standard)
    for each in fields(Settings):
        if raw := environment.get(_variable(each.name)):
            found[each.name] = Given(_parse(each.name, raw), _variable(each.name))
    return found


def _file_settings(chosen: str | None) -> dict[str, Given]:
    """The settings of the chosen file, or of the one in the current directory. Paths in a file are relative to it."""
    if chosen == NO_FILE:
        return {}
    for path in [Path(chosen)] if chosen else [Path(_FILE), Path(_PROJECT)]:
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            if chosen:
                raise InvalidSettings(f"EVERTICK_CONFIG={chosen}: there is no such file.") from None
            continue
        except OSError as error:
            raise InvalidSettings(f"{path} cannot be read: {error.strerror}.") from None
        # Most projects have a pyproject.toml without settings, which is not parsed.
        if path.name != _PROJECT or b"evertick" in text:
            table = _parsed(path, text)
            if table is not None:
                return {name: Given(_from_file(path, name, value), str(path)) for name, value in table.items()}
    return {}


def _parsed(path: Path, text: bytes) -> Mapping[str, object] | None:
    """The table with the settings; None for a pyproject.toml without one."""
    from tomllib import TOMLDecodeError, loads

    try:
        found: Any = loads(text.decode())
    except (TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidSettings(f"{path} is not valid TOML: {error}.") from None
    if path.name == _PROJECT:
        found = found.get("tool", {}).get("evertick")
    if found is not None and not isinstance(found, dict):
        raise InvalidSettings(f"{path}: tool.evertick must be a table of settings: write [tool.evertick].")
    return found


def _from_file(path: Path, name: str, value: object) -> object:
    kinds = {each.name: str(each.type).removesuffix(" | None") for each in fields(Settings) if each.name != "config"}
    if name not in kinds:
        hint = did_you_mean(name.lower().removeprefix("evertick_"), kinds, "List all with `evertick config show`.")
        raise InvalidSettings(f"{path}: unknown setting {name!r}. {hint[0].upper()}{hint[1:]}")
    match kinds[name], value:
        case ("bool", bool()) | ("str", str()):
            return value
        case ("int", int()) | ("float", int() | float()) if not isinstance(value, bool):
            return value if kinds[name] == "int" else float(value)  # type: ignore[arg-type]
        case "Path", str():
            return path.parent / value
        case "tuple[str, ...]", list() if all(isinstance(each, str) for each in value):
            return tuple(value)
    wanted = {
        "int": "a whole number",
        "float": "a number",
        "bool": "true or false",
        "tuple[str, ...]": "a list of texts",
    }
    raise InvalidSettings(f"{path}: {name} is {value!r:.100}, but it must be {wanted.get(kinds[name], 'a text')}.")


def variables() -> list[str]:
    """The names of all settings, as environment variables."""
    return [_variable(each.name) for each in fields(Settings)]


def unknown_variables(environment: Mapping[str, str] = os.environ) -> list[str]:
    """Variables with our prefix that are not settings. EVERTICK_SECRET__DB is a stored value."""
    ours = (name for name in sorted(environment) if name.upper().startswith("EVERTICK_") and "__" not in name)
    return [name for name in ours if name not in variables()]


def environment_for(settings: Settings, environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """An environment from which `read_settings` reads the same settings again: used to start child processes."""
    env = dict(environment)
    for each in fields(settings):
        value = getattr(settings, each.name)
        if value is not None:
            env[_variable(each.name)] = ",".join(value) if isinstance(value, tuple) else str(value)
    return {**env, _variable("config"): NO_FILE}


def user_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment that user code may see: everything but our own settings, which name the database."""
    return {name: value for name, value in environment.items() if not name.startswith("EVERTICK_")}


def airflow_ignore_syntax(environment: Mapping[str, str] = os.environ) -> str:
    """Airflow's own setting: how a `.airflowignore` is written, `glob` or `regexp`."""
    chosen = environment.get("AIRFLOW__CORE__DAG_IGNORE_FILE_SYNTAX", "glob")
    if chosen not in ("glob", "regexp"):
        raise UserError(f"AIRFLOW__CORE__DAG_IGNORE_FILE_SYNTAX={chosen!r}: choose glob or regexp.")
    return chosen


def value_from_environment(kind: str, name: str, environment: Mapping[str, str] = os.environ) -> str | None:
    """A stored value from this process's environment: EVERTICK_SECRET__DB for secret `db`."""
    return environment.get(f"EVERTICK_{kind.upper()}__{re.sub('[^A-Za-z0-9]', '_', name).upper()}")


def login_file(environment: Mapping[str, str] = os.environ) -> Path:
    """The file in which `evertick login` keeps its tokens: next to the user's other configuration."""
    folder = environment.get("XDG_CONFIG_HOME") or str(Path(environment.get("HOME") or "~").expanduser() / ".config")
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
        wanted = {"int": "a whole number", "float": "a number", "bool": "true or false"}
        raise InvalidSettings(f"{_variable(name)}={raw!r} is not {wanted[kind.removesuffix(' | None')]}.") from None
