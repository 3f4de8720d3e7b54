"""Prefect: a server on PostgreSQL, flows served by one runner, a process per flow run. `python with_prefect.py [tuned]`."""

import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

TUNED = {"PREFECT_RUNNER_POLL_FREQUENCY": "1", "PREFECT_RUNNER_PROCESS_LIMIT": "8"}


def environment(port, is_tuned):
    url = os.environ["PEER_URL"].replace("postgresql://", "postgresql+asyncpg://")
    return {
        **os.environ,
        "PREFECT_HOME": os.environ["PEER_FOLDER"],
        "PREFECT_API_DATABASE_CONNECTION_URL": url,
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        **(TUNED if is_tuned else {}),
    }


def wait_until_healthy(url, within_seconds):
    deadline = time.monotonic() + within_seconds
    while time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=2).close()
            return
        except OSError:
            time.sleep(0.2)
    raise SystemExit(f"the server did not answer within {within_seconds} s")


def main():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = environment(port, sys.argv[1:] == ["tuned"])
    flows = [sys.executable, str(Path(__file__).with_name("prefect_flows.py"))]
    server = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    running = [subprocess.Popen(server, env=env)]
    try:
        wait_until_healthy(env["PREFECT_API_URL"], 90)
        running.append(subprocess.Popen([*flows, "serve"], env=env))
        subprocess.run([*flows, "measure"], env=env, check=True, timeout=400)
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    main()
