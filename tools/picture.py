"""Draws the pictures of the documentation: real commands in a real terminal, as self-contained SVG.

python tools/picture.py     writes docs/pictures/*.svg; takes half a minute; the output is not edited
"""

from __future__ import annotations

import io
import os
import pty
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console
from rich.terminal_theme import DIMMED_MONOKAI
from rich.text import Text

ROOT = Path(__file__).parents[1]
PICTURES = ROOT / "docs" / "pictures"
PROGRAMS = Path(sys.executable).parent
# As many as fit into a picture.
EXAMPLES = ("etl.py", "heartbeat.py", "report.py")
ROWS, COLUMNS = 40, 92
LONGEST_WAIT_SECONDS = 60.0

_CONTROL = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])|([\r\n])|([^\x1b\r\n]+)")
_FONT_FILES = re.compile(r"\s*@font-face \{\{.*?\}\}", re.DOTALL)
_ORIGIN = re.compile(r"\s*<!--.*?-->", re.DOTALL)


class Terminal:
    """A command in a pseudo-terminal. Its output is read continuously, so it never blocks."""

    def __init__(self, command: list[str], folder: Path) -> None:
        self._master, slave = pty.openpty()
        termios.tcsetwinsize(slave, (ROWS, COLUMNS))
        environment = {**os.environ, "PATH": f"{PROGRAMS}:{os.environ['PATH']}", "TERM": "xterm-256color"}
        environment |= {"EVERTICK_RUNNER_ID": "runner-1", "EVERTICK_HEALTH": "off", "TZ": "UTC"}
        for name in ("COLUMNS", "LINES", "NO_COLOR", "EVERTICK_DATABASE_URL", "EVERTICK_HOME"):
            environment.pop(name, None)
        self._process = subprocess.Popen(
            command, cwd=folder, env=environment, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
        )
        os.close(slave)
        self._seen = bytearray()
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def wait_for(self, is_enough: Callable[[str], bool]) -> str:
        """Wait until the output satisfies `is_enough`, and return all of it."""
        with self._news:
            if not self._news.wait_for(lambda: is_enough(self._text()), LONGEST_WAIT_SECONDS):
                raise TimeoutError(f"no expected output within {LONGEST_WAIT_SECONDS:.0f} s:\n{self._text()}")
            return self._text()

    def wait_for_end(self) -> str:
        self._process.wait(LONGEST_WAIT_SECONDS)
        self._reader.join(LONGEST_WAIT_SECONDS)
        return self._text()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGINT)

    def _text(self) -> str:
        return self._seen.decode("utf-8", "replace")

    def _read(self) -> None:
        while True:
            try:
                chunk = os.read(self._master, 65536)
            except OSError:  # the other side is closed: the end of a pseudo-terminal
                chunk = b""
            with self._news:
                self._seen += chunk
                self._news.notify_all()
            if not chunk:
                os.close(self._master)
                return


def shown(stream: str) -> list[str]:
    """The lines on the screen at the end. Supports the sequences that Evertick prints: colors, cursor up, erase line."""
    lines, row = [""], 0
    for control, letter, ending, text in _CONTROL.findall(stream):
        if text:
            lines[row] += text
        elif ending == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif letter == "m":
            lines[row] += f"\x1b[{control}m"
        elif letter == "A":
            row = max(row - int(control or 1), 0)
        elif letter == "K":
            lines[row] = ""
    while lines and not lines[-1].strip():
        lines.pop()
    return lines


def draw(name: str, title: str, commands: list[tuple[str, str]]) -> None:
    """Draw one picture of commands with their output."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True, highlight=False)
    for number, (command, stream) in enumerate(commands):
        if number:
            console.print()
        console.print(Text("$ ", style="dim").append(f"evertick {command}", style="not dim bold"))
        for line in shown(stream):
            console.print(Text.from_ansi(line))
    made = console.export_svg(title=title, theme=DIMMED_MONOKAI, code_format=_frame(), unique_id=f"evertick-{name}")
    PICTURES.mkdir(parents=True, exist_ok=True)
    (PICTURES / f"{name}.svg").write_text("\n".join(line.rstrip() for line in made.splitlines()) + "\n")


def _frame() -> str:
    """Rich's SVG frame, with the reader's own monospace font instead of a font from the network."""
    plain = _ORIGIN.sub("", _FONT_FILES.sub("", CONSOLE_SVG_FORMAT))
    return plain.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace").replace(
        "arial", "sans-serif"
    )


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="evertick-picture-") as directory:
        folder = Path(directory)
        (folder / "dags").mkdir()
        for name in EXAMPLES:
            shutil.copy(ROOT / "src/evertick/examples" / name, folder / "dags")
        up = Terminal(["evertick", "up"], folder)
        try:
            first_minute = up.wait_for(lambda text: text.count("heartbeat.load") >= 2)
            looks = [(command, look(command, folder)) for command in ("dags list", "runs list")]
            trigger = ("dags trigger report --wait", look("dags trigger report --wait", folder))
        finally:
            up.interrupt()
            up.wait_for_end()
        draw_simulation(folder)
    draw("up", "one command", [("up", first_minute)])
    draw("lists", "DAGs and runs", looks)
    draw("trigger", "a manual run", [trigger])


def draw_simulation(folder: Path) -> None:
    """Needs no server."""
    command = "schedules simulate --cron '30 2 * * *' --tz Europe/Berlin --from 2025-01-01 --to 2025-12-31 --count 1"
    draw("simulate", "a year of a schedule", [(command, look(command, folder))])


def look(command: str, folder: Path) -> str:
    return Terminal(["evertick", *shlex.split(command)], folder).wait_for_end()


if __name__ == "__main__":
    main()
