"""`make audit`: compares the versions in the lock file with the known vulnerabilities of Python packages.

python tools/audit.py [LOCK]     exits with 1 if a package is vulnerable, with 2 if nothing could be compared

Limits: only Python packages that are in the lock file, and only what the advisory database of the package index knows. It
does not cover the PostgreSQL, the interpreter and the base image of the container, nor code that a package brings in binary
form. It needs the network.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOCK = ROOT / "requirements.lock"
VULNERABLE, NOT_AUDITED = 1, 2
_OFFLINE = "Nothing was audited: the advisory database cannot be reached. `make audit` needs the network."


def verdict(report: Any) -> tuple[int, list[str]]:
    """The exit status, and what to print, for the report of pip-audit."""
    packages = report["dependencies"]
    audited = [each for each in packages if "vulns" in each]
    lines = [
        f"{each['name']} {each['version']}: {vuln['id']}, fixed in {', '.join(vuln['fix_versions']) or 'no version yet'}"
        for each in audited
        for vuln in each["vulns"]
    ]
    if not audited:
        return NOT_AUDITED, [_OFFLINE]
    skipped = sorted(each["name"] for each in packages if "vulns" not in each)
    if skipped:
        lines.append(f"Not audited, because the index does not know them: {', '.join(skipped)}.")
    vulnerable = sum(bool(each["vulns"]) for each in audited)
    lines.append(f"{len(audited)} packages audited, {vulnerable} vulnerable.")
    return (VULNERABLE if vulnerable else NOT_AUDITED if skipped else 0), lines


def run(lock: Path) -> tuple[int, list[str]]:
    # Without pip: the lock is complete, so there is nothing to resolve or to install.
    options = [
        "--requirement",
        str(lock),
        "--disable-pip",
        "--no-deps",
        "--format",
        "json",
        "--progress-spinner",
        "off",
    ]
    done = subprocess.run([sys.executable, "-m", "pip_audit", *options], capture_output=True, text=True, check=False)
    if "No module named pip_audit" in done.stderr:
        return NOT_AUDITED, [
            "pip-audit is not installed. Install the tools for development: make up, or any other target."
        ]
    try:
        return verdict(json.loads(done.stdout))
    except ValueError:
        last = done.stderr.strip().splitlines()[-1:] or ["no output"]
        return NOT_AUDITED, [_OFFLINE, f"pip-audit: {last[0][:300]}"]


def main() -> None:
    status, lines = run(Path(sys.argv[1]) if len(sys.argv) > 1 else LOCK)
    print("\n".join(lines))
    sys.exit(status)


if __name__ == "__main__":
    main()
