"""Packs the commit, for `evertick --version`. Everything else about the package is in pyproject.toml."""

from __future__ import annotations

import runpy
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

COMMIT = runpy.run_path(str(Path(__file__).with_name("src") / "evertick" / "release.py"))["commit"]()


def pack_commit(package: Path) -> None:
    if COMMIT:
        (package / "commit.txt").write_text(f"{COMMIT}\n", encoding="utf-8")


class BuildWithCommit(build_py):
    def run(self) -> None:
        super().run()
        # An editable installation asks git.
        if not self.editable_mode:
            pack_commit(Path(self.build_lib, "evertick"))


class SourceWithCommit(sdist):
    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        super().make_release_tree(base_dir, files)
        pack_commit(Path(base_dir, "src", "evertick"))


setup(cmdclass={"build_py": BuildWithCommit, "sdist": SourceWithCommit})
