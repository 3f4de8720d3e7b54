"""Async functions inside an attempt's process: one alone, or many at once in a warm child. The only user of asyncio there."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

from evertick.authoring.context import TaskContext
from evertick.authoring.resolve import BoundTask
from evertick.domain.attempt import AttemptOrder, OutcomeKind
from evertick.execution import lines
from evertick.execution.body import Say, await_body, context_of, report_of_error
from evertick.execution.capture import SpoolWriter, finish_lines
from evertick.execution.child import _RECEIVE_BYTES, ChildSeat, leave_no_process, resident_bytes
from evertick.execution.loaded import Loaded
from evertick.execution.protocol import Frames, Report, frame, read_start
from evertick.execution.spool import open_spool


def run_alone(number: int, order: AttemptOrder, bound: BoundTask, context: TaskContext, say: Say) -> Report:
    """An async function in a process of its own. SIGTERM cancels it."""

    async def main() -> Report:
        body = asyncio.ensure_future(await_body(number, order, bound, context, say))

        def cancel() -> None:
            context.cancelled.set()
            body.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, cancel)
        return await body

    try:
        return asyncio.run(main())
    except BaseException as error:
        return report_of_error(number, error, say)
