"""`make dist`, `make package-test` and `make sbom`: the package as users get it.

    python tools/package.py build           the wheel and the source distribution, into dist/
    python tools/package.py test [WHEEL]    installs the wheel into empty environments, works there, and prints sizes
    python tools/package.py sbom            the components of the image, with versions and licenses, into sbom/

The test needs the package index, `uv`, and no clone and no compiler: every step runs in an empty directory, with an
environment of a few variables. PYTHON=python3.13 tests with another interpreter.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[1]
DIST = ROOT / "dist"
LONGEST_INSTALL_SECONDS = 40.0
LONGEST_START_SECONDS = 10.0
SBOM_TOOL = "cyclonedx-bom==7.5.0"
_LONGEST_STOP_SECONDS = 60.0
# What a user's shell has. Nothing of this clone: no PYTHONPATH, no settings.
_KEPT = ("HOME", "LANG", "PATH", "SSL_CERT_FILE", "TMPDIR")
# How to reach the package index is a matter of the machine.
_PREFIXES = ("PIP_", "UV_", "HTTP", "NO_PROXY", "http", "no_proxy")


def build(folder: Path = DIST) -> Path:
    """Build both, the wheel from the source distribution as an index would. Returns the wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        sys.exit(f"The package could not be built:\n{done.stdout}")
    (wheel,) = folder.glob("*.whl")
    return wheel


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_PREFIXES)}


def run(command: Sequence[object], cwd: Path) -> str:
    words = [str(each) for each in command]
    done = subprocess.run(words, cwd=cwd, env=environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(words)} failed with exit status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def uv() -> str:
    """Of the tools for development; in a release workflow the one that is installed."""
    return shutil.which("uv", path=str(Path(sys.executable).parent)) or "uv"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def started(evertick: Sequence[object], folder: Path, *options: str) -> Iterator[float]:
    """`evertick up` in an empty folder, until its sign-in page is there. Yields the seconds until then."""
    port = free_port()
    command = [*map(str, evertick), "up", "--port", str(port), *options]
    log = folder / "up.log"
    began = time.monotonic()
    with log.open("w") as output:
        up = subprocess.Popen(command, cwd=folder, env=environment(), stdout=output, stderr=subprocess.STDOUT)
    try:
        while not _answers(f"http://127.0.0.1:{port}/login"):
            if up.poll() is not None or time.monotonic() - began > 10 * LONGEST_START_SECONDS:
                sys.exit(f"{' '.join(command)} does not answer:\n{log.read_text()}")
            time.sleep(0.05)
        yield time.monotonic() - began
        up.send_signal(signal.SIGINT)
        if up.wait(_LONGEST_STOP_SECONDS) != 0:
            sys.exit(f"{' '.join(command)} ended with exit status {up.returncode}:\n{log.read_text()}")
    finally:
        up.kill()
        up.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=LONGEST_START_SECONDS) as answer:
            return b"Evertick" in answer.read()
    except (urllib.error.URLError, OSError):
        return False


def size(environment_folder: Path) -> tuple[int, float]:
    """The number of installed distributions without pip and setuptools, and the megabytes of all files without byte code."""
    packages = environment_folder.glob("lib/python3*/site-packages/*.dist-info")
    files = [each for each in environment_folder.rglob("*") if each.is_file() and not each.is_symlink()]
    used = sum(each.stat().st_size for each in files if each.suffix != ".pyc")
    return len([each for each in packages if not each.name.startswith(("pip-", "setuptools-"))]), used / 1e6


def work(evertick: Sequence[object], folder: Path) -> float:
    """Start it, run an example to its end, and stop it. Returns the seconds until the sign-in page was there."""
    with started(evertick, folder) as seconds:
        run([*evertick, "dags", "trigger", "etl", "--wait"], folder)
        if "success" not in run([*evertick, "runs", "list", "etl"], folder):
            sys.exit("The example etl did not succeed.")
    return seconds


def install(wheel: str, folder: Path) -> tuple[Path, float]:
    """Install into a new environment with pip. Returns the environment and the seconds."""
    venv = folder / "venv"
    run([os.environ.get("PYTHON") or sys.executable, "-m", "venv", venv], folder)
    began = time.monotonic()
    run([venv / "bin" / "pip", "install", "--quiet", "--disable-pip-version-check", wheel], folder)
    return venv, time.monotonic() - began


def sbom(folder: Path = ROOT / "sbom") -> None:
    """CycloneDX, from an environment with what the image has."""
    wheel = build()
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="evertick-sbom-") as name:
        venv = Path(name) / "venv"
        run([uv(), "venv", "--quiet", "--python", sys.executable, venv], ROOT)
        locked = ["--require-hashes", "--no-deps", "--requirement", ROOT / "deploy" / "requirements.lock"]
        run([uv(), "pip", "install", "--quiet", "--python", venv, *locked], ROOT)
        run([uv(), "pip", "install", "--quiet", "--python", venv, "--no-deps", wheel], ROOT)
        listed = ["--output-reproducible", "--pyproject", ROOT / "pyproject.toml", "--output-format", "JSON"]
        output = folder / f"{wheel.name.split('-py3')[0]}.cdx.json"
        tool = [uv(), "tool", "run", "--from", SBOM_TOOL, "cyclonedx-py", "environment"]
        run([*tool, *listed, "--output-file", output, venv / "bin" / "python"], ROOT)
    print(output)


def test(wheel: Path) -> None:
    rows = []
    with tempfile.TemporaryDirectory(prefix="evertick-package-") as name:
        folder = Path(name)
        for extras in ("", "[envs,kubernetes,otel]"):
            place = folder / f"install{extras}"
            place.mkdir()
            venv, seconds = install(f"{wheel}{extras}", place)
            packages, megabytes = size(venv)
            rows.append((f"pip install evertick{extras}", packages, megabytes, seconds))
        bin_folder = folder / "install" / "venv" / "bin"
        version = run([bin_folder / "evertick", "--version"], folder)
        if run([bin_folder / "python", "-m", "evertick", "--version"], folder) != version:
            sys.exit("`python -m evertick` is not `evertick`.")
        starts = []
        uvx = [uv(), "tool", "run", "--from", wheel, "evertick"]
        for title, command in (("evertick", [bin_folder / "evertick"]), ("uvx evertick", uvx)):
            run([*command, "--version"], folder)  # uvx installs it
            (folder / title).mkdir()
            starts.append((title, work(command, folder / title)))
    print(f"{version.strip()}: {wheel.name}, {wheel.stat().st_size / 1e6:.1f} MB\n")
    print(f"{'install':40} {'packages':>8} {'MB':>6} {'seconds':>8}")
    for title, packages, megabytes, seconds in rows:
        print(f"{title:40} {packages:8} {megabytes:6.0f} {seconds:8.1f}")
    print(f"\n{'start in an empty directory':40} {'seconds until the sign-in page':>31}")
    for title, seconds in starts:
        print(f"{title + ' up':40} {seconds:31.1f}")
    if rows[0][3] > LONGEST_INSTALL_SECONDS or max(seconds for _, seconds in starts) > LONGEST_START_SECONDS:
        sys.exit(f"Too slow: the limits are {LONGEST_INSTALL_SECONDS:.0f} s and {LONGEST_START_SECONDS:.0f} s.")


if __name__ == "__main__":
    # A shell starts background jobs with SIGINT ignored, and `evertick up` would inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    match sys.argv[1:]:
        case ["build"]:
            print(build())
        case ["test", *wheels] if len(wheels) <= 1:
            test(Path(wheels[0]).absolute() if wheels else build())
        case ["sbom"]:
            sbom()
        case _:
            sys.exit(__doc__)
