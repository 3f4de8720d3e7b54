"""Options of a task for the executors `docker`, `slurm` and `ray`: their names, and what each accepts.

Pure. The engine itself says whether an image, a partition or a resource exists.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from evertick.domain.errors import UserError, did_you_mean

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WORD = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.,:*/=@&|+-]*")
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?")
_TIME = re.compile(r"\d+|(\d+-)?\d{1,2}(:\d{2}){0,2}|\d+:\d{2}(:\d{2})?")


def memory_bytes(value: object) -> int:
    """`512Mi`, `2G`, or a number of bytes."""
    match = None if isinstance(value, bool) else _MEMORY.fullmatch(str(value))
    if match is None:
        raise ValueError("it must be a size, as in '512Mi' or '2Gi'")
    size = float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2] or " ")
    if size < 1:
        raise ValueError("it must be at least one byte")
    return int(size)


def environment_of(value: object) -> dict[str, str]:
    """Environment variables of a task. The TypeError or ValueError says what is wrong."""
    if not isinstance(value, Mapping) or not all(isinstance(text, str) for text in value.values()):
        raise TypeError('it must be a dict of texts, as in {"REGION": "eu"}')
    for name, text in value.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name) or name.startswith("EVERTICK_"):
            raise ValueError(
                f"{name!r:.100} cannot be set: use letters, digits and '_', and no name reserved by Evertick"
            )
        if "\0" in text:
            raise ValueError(f"the value of {name} contains a NUL character")
    return dict(value)


def check_image(value: object) -> None:
    if not isinstance(value, str) or not value.strip() or len(value) > 500 or any(c.isspace() for c in value):
        raise TypeError("it must be the name of an image, as in 'registry.example.com/etl:7'")


def _pull(value: object) -> None:
    if value not in ("always", "missing", "never"):
        raise ValueError("it must be always, missing or never")


def _number(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e6:
        raise TypeError("it must be a number above 0")


def _count(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TypeError("it must be a whole number above 0")


def _gpus(value: object) -> None:
    if value != "all":
        _count(value)


def _mounts(value: object) -> None:
    example = 'it must be a list of dicts, as in [{"source": "/data", "target": "/data", "read_only": True}]'
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError(example)
    for each in value:
        if not isinstance(each, Mapping) or not each.keys() <= {"source", "target", "read_only"}:
            raise TypeError(example)
        paths = (each.get("source"), each.get("target"))
        if not all(isinstance(path, str) and path for path in paths) or not str(paths[1]).startswith("/"):
            raise TypeError(f"{example}, with an absolute target")
        if not isinstance(each.get("read_only", False), bool):
            raise TypeError("read_only must be True or False")


def _word(value: object) -> None:
    if not isinstance(value, str) or not _WORD.fullmatch(value):
        raise TypeError("it must be a text without spaces, which does not begin with '-'")


def _time(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, str | int) or not _TIME.fullmatch(str(value)):
        raise TypeError("it must be minutes, as in 30, or a text such as '02:00:00' or '1-12:00:00'")


def slurm_seconds(time: object) -> float:
    """A time limit in seconds: minutes, MM:SS, HH:MM:SS, D-HH, D-HH:MM or D-HH:MM:SS."""
    days, dash, clock = str(time).rpartition("-")
    parts = [int(part) for part in clock.split(":")]
    if dash:
        hours, minutes, seconds = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, seconds = parts
    else:
        hours, (minutes, seconds) = 0, [*parts, 0][:2]
    return float(int(days or 0) * 86_400 + hours * 3600 + minutes * 60 + seconds)


def _arguments(value: object) -> None:
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise TypeError('it must be a list of texts, as in ["--exclusive"]')
    for each in value:
        if not isinstance(each, str) or not each.startswith("--") or not each.isprintable():
            raise ValueError(f"{each!r:.100} is not an option that begins with '--'")


def _resources(value: object) -> None:
    if not isinstance(value, Mapping) or not all(isinstance(name, str) and name for name in value):
        raise TypeError('it must be a dict of numbers, as in {"accelerator": 1}')
    for amount in value.values():
        _number(amount)


Check = Callable[[object], object]

_OPTIONS: dict[str, dict[str, Check]] = {
    "docker": {
        "image": check_image,
        "pull": _pull,
        "env": environment_of,
        "cpus": _number,
        "memory": memory_bytes,
        "gpus": _gpus,
        "mounts": _mounts,
        "network": _word,
        "user": _word,
    },
    "slurm": {
        "partition": _word,
        "account": _word,
        "qos": _word,
        "constraint": _word,
        "gres": _word,
        "time": _time,
        "cpus": _count,
        "memory": memory_bytes,
        "env": environment_of,
        "arguments": _arguments,
    },
    "ray": {"env": environment_of, "cpus": _number, "gpus": _number, "memory": memory_bytes, "resources": _resources},
}

ENGINE_OPTIONS = {engine: tuple(checks) for engine, checks in _OPTIONS.items()}

# Options that reach beyond the attempt's own container or account: an operator allows them explicitly.
PRIVILEGED = frozenset({"mounts", "network", "user", "arguments"})


def check_option_name(text: str) -> None:
    """Raises UserError if no engine has this option."""
    known = {name for names in ENGINE_OPTIONS.values() for name in names}
    if text not in known:
        raise UserError(f"{text!r} is unknown: use {', '.join(sorted(known))}.")


def check_engine_options(engine: str, options: Mapping[str, object]) -> None:
    """The TypeError or ValueError names an invalid option."""
    checks = _OPTIONS[engine]
    for name, value in options.items():
        if (check := checks.get(name)) is None:
            hint = did_you_mean(name, checks, f"known: {', '.join(checks)}")
            raise ValueError(f"{engine} has no option {name!r}; {hint}")
        try:
            check(value)
        except (TypeError, ValueError) as error:
            raise type(error)(f"its {name} is {value!r:.200}, where {error}") from None
