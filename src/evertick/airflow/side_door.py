"""The way from a child interpreter of a task, as `@task.virtualenv` and `@task.external_python` start it, to the supervisor:
frames of msgpack over an inherited socket, as Airflow's SDK sends them."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec
from airflow.sdk import exceptions
from airflow.sdk.execution_time import comms
from pydantic import TypeAdapter

_VARIABLE = "__AIRFLOW_SUPERVISOR_FD"
_HEAD_BYTES = 4
_LONGEST_CLOSE_SECONDS = 2.0


@contextmanager
def side_door(send: Callable[[Any], Any], say: Callable[[str, str], None]) -> Iterator[None]:
    """Answer child interpreters while the block runs. `send` is the supervisor's, `say` writes their log lines."""
    ours, theirs = socket.socketpair()
    theirs.set_inheritable(True)
    os.environ[_VARIABLE] = str(theirs.fileno())
    thread = threading.Thread(target=_serve, args=(ours, send, say), name="evertick-side-door", daemon=True)
    thread.start()
    try:
        yield
    finally:
        os.environ.pop(_VARIABLE, None)
        theirs.close()
        with suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        thread.join(_LONGEST_CLOSE_SECONDS)
        ours.close()


def _serve(ours: socket.socket, send: Callable[[Any], Any], say: Callable[[str, str], None]) -> None:
    frames, messages = msgspec.msgpack.Decoder(comms._RequestFrame), TypeAdapter(comms.ToSupervisor)
    with suppress(OSError, EOFError), ours.makefile("rb") as stream:
        while head := stream.read(_HEAD_BYTES):
            frame = frames.decode(stream.read(int.from_bytes(head, "big")))
            message = messages.validate_python(frame.body)
            if isinstance(message, comms.ResendLoggingFD):
                _send_log(ours, frame.id, say)
                continue
            body = error = None
            try:
                answer = send(message)
                body = None if answer is None else answer.model_dump(by_alias=True)
            except exceptions.AirflowRuntimeError as failure:
                error = failure.error.model_dump(by_alias=True)
            ours.sendall(comms._ResponseFrame(id=frame.id, body=body, error=error).as_bytes())


def _send_log(ours: socket.socket, frame_id: int, say: Callable[[str, str], None]) -> None:
    """Send the child a descriptor for its log, and copy what it writes there."""
    reader, writer = os.pipe()
    body = comms.SentFDs(fds=[writer]).model_dump()
    socket.send_fds(ours, [comms._ResponseFrame(id=frame_id, body=body).as_bytes()], [writer])
    os.close(writer)
    threading.Thread(target=_copy_log, args=(reader, say), name="evertick-side-log", daemon=True).start()


def _copy_log(reader: int, say: Callable[[str, str], None]) -> None:
    with os.fdopen(reader, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                record = json.loads(line)
                say(str(record.get("level", "info")).upper(), str(record.get("event", "")))
            except (ValueError, AttributeError):
                say("INFO", line.rstrip())
