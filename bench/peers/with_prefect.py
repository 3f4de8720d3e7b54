"""Prefect: a server on PostgreSQL, flows served by one runner, a process per flow run. `python with_prefect.py [tuned]`."""

import os
import socket
import subprocess
import sys
import time
import urllib.request

import stamps

SINGLES = 12
TICKS = 4
TUNED = {"PREFECT_RUNNER_POLL_FREQUENCY": "1", "PREFECT_RUNNER_PROCESS_LIMIT": "8"}


def declare():
    """The flows. Imported late: the settings of the server must be in the environment before."""
    from prefect import flow, task
    from prefect.runtime import flow_run

    @task
    def light(label):
        stamps.body(label)

    @flow
    def chain():
        for _ in range(stamps.CHAIN):
            light("chain")

    @flow
    def fan():
        light("fan")
        for future in [light.submit("fan") for _ in range(stamps.WIDTH)]:
            future.result()
        light("fan")

    @flow
    def single(label: str = "single"):
        light(label)

    @flow
    def tick():
        stamps.tick(flow_run.scheduled_start_time.timestamp())

    return chain, fan, single, tick


chain, fan, single, tick = declare()


def serve():
    from prefect import serve as serve_all

    plain = [each.to_deployment(name="peer") for each in (chain, fan, single)]
    serve_all(*plain, tick.to_deployment(name="peer", interval=5, paused=True))


def measure():
    from prefect.deployments import run_deployment

    run_deployment("single/peer", parameters={"label": "warm-up"}, timeout=0)
    stamps.wait_for("warm-up", 1, 90)
    run_deployment("chain/peer", timeout=0)
    figures = stamps.chain_figures(stamps.wait_for("chain", stamps.CHAIN, 90))
    run_deployment("fan/peer", timeout=0)
    figures["fan_s"] = stamps.wall(stamps.wait_for("fan", stamps.WIDTH + 2, 90))
    for _ in range(SINGLES):
        run_deployment("single/peer", timeout=0)
    figures["runs_per_s"] = SINGLES / stamps.wall(stamps.wait_for("single", SINGLES, 120))
    subprocess.run([sys.executable, "-m", "prefect", "deployment", "schedule", "resume", "--all"], input=b"y\n")
    return figures | stamps.late_figures(TICKS, 90)


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
    here = os.path.abspath(__file__)
    server = [sys.executable, "-m", "prefect", "server", "start", "--host", "127.0.0.1", "--port", str(port)]
    running = [subprocess.Popen(server, env=env)]
    try:
        wait_until_healthy(env["PREFECT_API_URL"], 90)
        running.append(subprocess.Popen([sys.executable, here, "serve"], env=env))
        subprocess.run([sys.executable, here, "measure"], env=env, check=True, timeout=400)
    finally:
        for process in reversed(running):
            process.terminate()
            process.wait(60)


if __name__ == "__main__":
    if sys.argv[1:] == ["serve"]:
        serve()
    elif sys.argv[1:] == ["measure"]:
        import prefect

        stamps.tell(version=prefect.__version__, **measure())
    else:
        main()
