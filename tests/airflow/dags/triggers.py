"""Deferrable operators with triggers of their own."""

from __future__ import annotations

import asyncio
import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from airflow.sdk import BaseOperator, Variable, dag
from airflow.triggers.base import BaseTrigger, StartTriggerArgs, TaskSuccessEvent, TriggerEvent

try:
    from airflow.sdk import BaseHook
except ImportError:  # in 3.0
    from airflow.hooks.base import BaseHook


class Come(BaseTrigger):
    """Waits for a file, and notes in which process."""

    def __init__(self, folder, name, how="event"):
        super().__init__()
        self.folder, self.name, self.how = folder, name, how

    def serialize(self):
        return f"{type(self).__module__}.Come", {"folder": self.folder, "name": self.name, "how": self.how}

    async def run(self):
        folder = Path(self.folder)
        (folder / f"{self.name}.pid").write_text(str(os.getpid()))
        print(f"waits for {self.name} of {self.task_instance.task_id}")
        if self.how == "raise":
            raise ValueError("no such thing")
        if self.how == "block":
            time.sleep(1.5)  # noqa: ASYNC251
        told = {}
        if self.how == "ask":
            told = {"now": Variable.get("color"), "thread": await asyncio.to_thread(Variable.get, "color")}
            told["login"] = (await asyncio.to_thread(BaseHook.get_connection, "shop")).host
        while not (folder / self.name).exists():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        yield (
            TaskSuccessEvent(xcoms={"return_value": "ended"})
            if self.how == "end"
            else TriggerEvent({"came": self.name, **told})
        )

    async def cleanup(self):
        (Path(self.folder) / f"{self.name}.cleaned").touch()

    async def on_kill(self):
        (Path(self.folder) / f"{self.name}.killed").touch()


class Wait(BaseOperator):
    template_fields = ("folder",)

    def __init__(self, *, times=1, how="event", timeout=None, **given):
        super().__init__(**given)
        self.folder, self.times, self.how, self.wait_timeout = "{{ params.folder }}", times, how, timeout

    def execute(self, context):
        context["ti"].xcom_push(key="before", value=self.times)
        self._defer(1)

    def _defer(self, number):
        name = f"{self.task_id}{number}"
        self.defer(
            trigger=Come(self.folder, name, self.how),
            method_name="complete",
            kwargs={"number": number, "at": datetime(2030, 1, 1, tzinfo=UTC)},
            timeout=self.wait_timeout,
        )

    def complete(self, context, event, number, at):
        assert at == datetime(2030, 1, 1, tzinfo=UTC)
        if number < self.times:
            self._defer(number + 1)
        return [number, event, context["ti"].try_number]


class Gone(Wait):
    def _defer(self, number):
        trigger = Come(self.folder, "gone")
        trigger.serialize = lambda: ("no_such_module.Trigger", {"password": "s3cret-word"})
        self.defer(trigger=trigger, method_name="complete")


class FromTrigger(BaseOperator):
    start_from_trigger = True
    template_fields = ("folder",)

    def __init__(self, **given):
        super().__init__(**given)
        self.folder = "{{ params.folder }}"
        self.start_trigger_args = StartTriggerArgs(
            trigger_cls=f"{Come.__module__}.Come",
            trigger_kwargs={"folder": self.folder, "name": "start"},
            next_method="complete",
        )

    def complete(self, context, event):
        return event["came"]


@dag(schedule=None, params={"folder": ""}, is_paused_upon_creation=False)
def triggers():
    Wait(task_id="twice", times=2, retries=1)
    Wait(task_id="asks", how="ask")
    Wait(task_id="ends", how="end")
    Wait(task_id="fails", how="raise")
    Wait(task_id="blocks", how="block")
    Wait(task_id="late", timeout=timedelta(seconds=0.3))
    Wait(task_id="marked")
    Gone(task_id="gone")
    FromTrigger(task_id="from_trigger")


triggers()
