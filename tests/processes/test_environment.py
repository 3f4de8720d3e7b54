"""A password in the environment of a program is not left to the processes that it starts."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from evertick.processes.system import forget_variable
forget_variable("A_PASSWORD")
child = os.fork()
print(Path("/proc/self/environ").read_bytes().replace(b"\\0", b" "), os.environ.get("KEPT"), flush=True)
if child == 0:
    os.execv("/usr/bin/env", ["env"])
os.waitpid(child, 0)
"""


@pytest.mark.linux
def test_a_variable_is_forgotten_by_the_process_its_forks_and_its_programs() -> None:
    given = {**os.environ, "A_PASSWORD": "a secret", "KEPT": "kept", "Z": "last"}
    shown = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=given, capture_output=True, text=True, check=True
    ).stdout
    assert "a secret" not in shown and "A_PASSWORD" not in shown
    assert shown.count("KEPT=kept") == 3 and shown.count("Z=last") == 3
