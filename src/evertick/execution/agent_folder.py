"""The state of one agent that was started on this machine: its process, its token, its outcome. Enough to find the
agent again after the runner that started it is gone, and to distinguish it from a later process with the same pid."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from evertick.domain.agent_outcome import MOST_BYTES
from evertick.execution.kill import find_by_token
from evertick.execution.proc_stat import SESSION, START_TICKS, STATE, boot_id, stat_of

# Names the file with the agent's token; it also identifies the agent's process.
TOKEN_VARIABLE = "EVERTICK_AGENT_TOKEN_FILE"
# Prefix of a directory that is being removed.
GONE = ".gone-"


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentFolder:
    """The directory of one attempt's agent. Only the owner can read it."""

    path: Path

    @property
    def token_file(self) -> Path:
        return self.path / "token"

    @property
    def outcome_file(self) -> Path:
        return self.path / "outcome"

    @property
    def output_file(self) -> Path:
        return self.path / "output"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the directory, also against other processes. Creates it if it does not exist."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (self.path / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def keep_token(self, token: str) -> None:
        fd = os.open(self.token_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="ascii") as file:
            file.write(token)

    @property
    def was_started(self) -> bool:
        return (self.path / "pid").exists()

    def keep_pid(self, pid: int) -> None:
        self._keep("pid", f"{pid} {stat_of(str(pid))[START_TICKS]} {boot_id()}")

    def find_again(self) -> bool:
        """Whether a runner that was killed started the agent before it could record the process; if so, record it now."""
        if not self.token_file.exists():
            return False
        found: list[tuple[int, int]] = []
        for pid in find_by_token(f"{TOKEN_VARIABLE}={self.token_file}"):
            with suppress(OSError):
                stat = stat_of(str(pid))
                if stat[SESSION] == str(pid) and stat[STATE] not in ("Z", "X"):
                    found.append((int(stat[START_TICKS]), pid))
        if found:
            # Processes that the agent started itself are younger.
            self.keep_pid(min(found)[1])
        return bool(found)

    def living_pid(self) -> int | None:
        """The pid of its process, if that very process still lives. A zombie has ended."""
        try:
            pid, started, boot = (self.path / "pid").read_text(encoding="ascii").split()
            stat = stat_of(pid)
            if boot == boot_id() and started == stat[START_TICKS] and stat[STATE] not in ("Z", "X"):
                return int(pid)
        except (OSError, ValueError):
            return None
        return None

    def keep_exit(self, code: int) -> None:
        self._keep("exit", str(code))

    def exit_code(self) -> int | None:
        """None if no process observed it."""
        try:
            return int((self.path / "exit").read_text(encoding="ascii"))
        except (OSError, ValueError):
            return None

    def outcome(self) -> bytes | None:
        try:
            with self.outcome_file.open("rb") as file:
                return file.read(MOST_BYTES + 1)
        except OSError:
            return None

    def note_asked(self, now: float) -> float:
        """When it was first asked to stop, in seconds since boot."""
        file = self.path / "asked"
        with suppress(OSError, ValueError):
            return float(file.read_text(encoding="ascii"))
        self._keep("asked", str(now))
        return now

    def remove(self) -> None:
        """Removed in one step: another process could take a half-removed directory for missing, or write into it again."""
        gone = self.path.parent.parent / f"{GONE}{self.path.name}"
        shutil.rmtree(gone, ignore_errors=True)
        with suppress(FileNotFoundError):
            self.path.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)

    def _keep(self, name: str, text: str) -> None:
        """Write atomically."""
        draft = self.path / f".{name}"
        with suppress(FileNotFoundError):
            draft.write_text(text, encoding="ascii")
            draft.replace(self.path / name)
