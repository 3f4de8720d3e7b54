"""A process of its own that uses a fork server as `evertick up` does, for test_fork_server.py: forking a test's process is unsafe.

`python -m tests.supervisor.fork_server_user SCENARIO` prints what it saw as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from evertick.processes.system import become_subreaper
from evertick.supervisor import fork_server
from evertick.supervisor.fork_server import ServiceForkServer, ServiceProcess
from tests.system.processes import is_running
from tests.waiting import eventually

ENVIRONMENT = {"PATH": os.environ["PATH"], "MINE": "a value"}


def main(arguments: list[str]) -> int:
    """A service: says what it is, then ends as it was told to."""
    seen = {
        "arguments": sys.argv,
        "environment": dict(os.environ),
        "command": Path("/proc/self/cmdline").read_bytes().rstrip(b"\0").decode(),
        "descriptors": sorted(int(fd.name) for fd in Path("/proc/self/fd").iterdir())[:3],
        "leads": os.getpgid(0) == os.getpid(),
        "hears": [signal.getsignal(each).__class__.__name__ for each in (signal.SIGINT, signal.SIGTERM)],
    }
    print(json.dumps(seen), flush=True)
    if arguments[0] == "raises":
        raise RuntimeError("a mistake of ours")
    if arguments[0] == "stays":
        signal.pause()
    return int(arguments[1])


async def started(parent: ServiceForkServer, *arguments: str) -> tuple[ServiceProcess, dict[str, Any]]:
    service = await parent.start(list(arguments), ENVIRONMENT)
    assert service.stdout is not None
    return service, json.loads(await service.stdout.readline())


async def lives(parent: ServiceForkServer) -> dict[str, Any]:
    ends, seen = await started(parent, "ends", "7")
    raises, _ = await started(parent, "raises")
    stays, _ = await started(parent, "stays")
    stays.send_signal(signal.SIGTERM)
    killed, _ = await started(parent, "stays")
    killed.kill()
    codes = [await each.wait() for each in (ends, raises, stays, killed)]
    killed.kill()
    parent.close()
    return {"seen": seen, "codes": codes, "returncode": killed.returncode}


async def dies(parent: ServiceForkServer) -> dict[str, Any]:
    lost: list[str] = []
    parent.lost = lambda: lost.append("lost")
    stays, _ = await started(parent, "stays")
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGKILL)
    code = await stays.wait()
    return {"code": code, "lost": lost, "pid": parent.pid, "next": await slow(parent)}


async def freezes(parent: ServiceForkServer) -> dict[str, Any]:
    stays, _ = await started(parent, "stays")
    assert parent.pid is not None
    os.kill(parent.pid, signal.SIGSTOP)
    fork_server._LONGEST_ANSWER_SECONDS = 0.2
    instead = await slow(parent)
    still = stays.returncode is None and is_running(stays.pid)
    os.kill(parent.pid, signal.SIGCONT)
    # What it forked late is one too many.
    await eventually(lambda: [*parent._forked] == [stays.pid] and not parent._asked)
    stays.kill()
    await stays.wait()
    return {"instead": instead, "still": still}


async def bursts(parent: ServiceForkServer) -> dict[str, Any]:
    ENVIRONMENT.update({f"LARGE_{number}": "x" * 100_000 for number in range(10)})
    return {"next": await slow(parent)}


async def slow(parent: ServiceForkServer) -> str:
    """Starts in a new interpreter, with the real command line: the forked one would not know this argument."""
    service = await parent.start(["--version"], {**os.environ, **ENVIRONMENT})
    assert service.stdout is not None
    said = (await service.stdout.read()).decode()
    return f"{said.split()[0]} {await service.wait()}"


async def leaves(parent: ServiceForkServer) -> dict[str, Any]:
    stays, _ = await started(parent, "stays")
    print(json.dumps({"fork_server": parent.pid, "service": stays.pid}), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


if __name__ == "__main__":
    become_subreaper()
    if sys.argv[1] == "bursts":
        fork_server.LONGEST_MESSAGE = 100_000
    print(json.dumps(asyncio.run(globals()[sys.argv[1]](ServiceForkServer(main)))))
