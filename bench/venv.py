"""Virtual environments for programs that Evertick does not depend on: other engines and py-spy."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.house import ROOT

PLACE = ROOT / ".venv-peers"


class CannotInstall(Exception):
    """The packages could not be installed; the message is pip's last line."""


def venv(name: str, packages: Sequence[str], *, within_seconds: float = 900.0) -> Path:
    """The bin folder of an environment with these packages, created on first use."""
    folder = PLACE / name
    stamp, wanted = folder / ".installed", "\n".join(packages)
    if stamp.exists() and stamp.read_text(encoding="utf-8") == wanted:
        return folder / "bin"
    try:
        _run([sys.executable, "-m", "venv", "--clear", str(folder)], within_seconds)
        pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        _run([*pip, *packages], within_seconds)
        # Compile byte code now, so that the first start does not include it.
        _run(
            [str(folder / "bin" / "python"), "-m", "compileall", "-q", "-j", "0", str(folder / "lib")],
            within_seconds,
            is_checked=False,
        )
    except subprocess.TimeoutExpired:
        raise CannotInstall(f"installing {', '.join(packages)} took more than {within_seconds:g} s") from None
    stamp.write_text(wanted, encoding="utf-8")
    return folder / "bin"


def _run(command: list[str], within_seconds: float, *, is_checked: bool = True) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=within_seconds)
    if is_checked and done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if "is ignored" not in line]
        raise CannotInstall(lines[-1] if lines else f"{command[0]} ended with exit code {done.returncode}")
