"""`evertick init`: a new project with a DAG, its tests, and their checks."""

from __future__ import annotations

import os
import re
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from evertick.cli.app import Single
from evertick.cli.output import heading, hint, line, show
from evertick.domain.errors import UserError

app = Single()

_TEMPLATES = Path(__file__).parents[1] / "project"
# The files of a project, and their templates.
_FILES = {
    "pyproject.toml": "pyproject.toml.txt",
    "dags/daily_report.py": "daily_report.py.txt",
    "tests/test_daily_report.py": "test_daily_report.py.txt",
    ".github/workflows/tests.yml": "ci.yml",
    ".pre-commit-config.yaml": "pre-commit-config.yaml",
    "AGENTS.md": "AGENTS.md",
    ".gitignore": "gitignore",
}

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="The folder of the project; created if it does not exist.")]


@app.command(epilog="Example: evertick init my-dags")
def init(folder: Folder = Path()) -> None:
    """Create a project: an example DAG, its tests, a CI file, a pre-commit hook, and rules for writing DAGs in AGENTS.md.

    Existing files are never changed.
    """
    created = [name for name, template in _FILES.items() if _create(folder / name, _text(template, folder))]
    for name in _FILES:
        show(line(f"created  {name}", "green") if name in created else hint(f"kept     {name}: it exists already"))
    if "pyproject.toml" not in created:
        settings = _text(_FILES["pyproject.toml"], folder).partition("[dependency-groups]")
        show(hint("Add to your pyproject.toml what it lacks of this:"), line("".join(settings[1:])))
    show(heading("Next"))
    enter = "" if folder.resolve() == Path.cwd() else f"cd {folder} && "
    show(line(f"  {enter}uv run pytest     (or: pip install evertick pytest && pytest)"))
    show(line(f"  {enter}uv run evertick up     (or: evertick up)"))


def _text(template: str, folder: Path) -> str:
    text = (_TEMPLATES / template).read_text(encoding="utf-8")
    name = re.sub(r"[^a-z0-9]+", "-", folder.resolve().name.lower()).strip("-")
    return text.replace("PROJECT_NAME", name or "dags").replace("EVERTICK_VERSION", version("evertick"))


def _create(path: Path, text: str) -> bool:
    """Whether the file is new. It appears complete or not at all, and never in place of another one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        raise UserError(f"{path.parent} is not a folder. Name another one: evertick init DIR") from None
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text, encoding="utf-8")
        os.link(part, path)
    except FileExistsError:
        return False
    finally:
        part.unlink(missing_ok=True)
    return True
