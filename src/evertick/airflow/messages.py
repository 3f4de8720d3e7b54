"""Answers the messages that a task sends to its supervisor: from memory, with the attempt's report, or by asking the runner.

The classes are those of the installed release. A message that this release of Evertick does not know, or cannot answer, is an
error of the task that names it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from typing import Any

from airflow.configuration import conf
from airflow.sdk import exceptions
from airflow.sdk.execution_time import comms

from evertick.airflow.assets import asset_answer, described_updates
from evertick.airflow.people import WAITING_TRIGGER, AwaitInputTask
from evertick.airflow.runs import Run
from evertick.airflow.state_stores import state_store_answer
from evertick.attempts.body import DEFAULT_RESULT_BYTES, EncodedResult, encode_result
from evertick.attempts.protocol import AskRefused, AttemptIO
from evertick.domain.attempt import RESULT_TAG
from evertick.domain.errors import UserError
from evertick.domain.state import StateScope
from evertick.domain.states import AIRFLOW_TASK_STATES
from evertick.domain.stored_values import read_connection, read_extra
from evertick.logs.format import RENDERED

RETURN_VALUE = "return_value"
# These end an attempt: `attempt.py` makes its report of them.
FINAL = frozenset(
    {"SucceedTask", "TaskState", "RetryTask", "RescheduleTask", "DeferTask", "AwaitInputTask", "SkipDownstreamTasks"}
)


@dataclass(slots=True)
class Kept:
    """Values that travel with the report: outputs by key, tasks to skip, and the message that ended the attempt. `unstored`: the
    database does not have all of these outputs yet."""

    outputs: dict[str, Any] = field(default_factory=dict)
    unstored: bool = False
    skips: list[str] = field(default_factory=list)
    final: Any = None
    question: Any = None


class Supervisor:
    """What the SDK calls its supervisor, in the process of the task."""

    def __init__(self, run: Run, task: Any, map_index: int, io: AttemptIO) -> None:
        self._run, self._task, self._map_index, self._io = run, task.task_id, map_index, io
        self._outlets = task.outlets or ()
        self.kept = Kept(outputs=by_key(run.outputs))

    def send(self, msg: Any) -> Any:
        name = type(msg).__name__
        if name in FINAL:
            return self._end(name, msg)
        answer: Callable[[Any], Any] | None = getattr(self, f"_on_{name}", None)
        answer = answer or state_store_answer(name, self._io.ask) or asset_answer(name, self._io.ask)
        if answer is None:
            raise self._failure(f"Evertick does not support {name} in tasks of Airflow yet")
        try:
            return answer(msg)
        except (AskRefused, UserError) as error:
            raise self._failure(f"{name}: {error}") from None

    async def asend(self, msg: Any) -> Any:
        return await asyncio.to_thread(self.send, msg)

    def _end(self, name: str, msg: Any) -> None:
        if name == "DeferTask" and msg.classpath == WAITING_TRIGGER:
            self.kept.final = self._awaiting(msg)
        elif name == "SkipDownstreamTasks":
            self.kept.skips += [each if isinstance(each, str) else each[0] for each in msg.tasks]
        else:
            self.kept.final = msg
            # Before 3.2 there is no message for it.
            if not hasattr(comms, "SetRenderedMapIndex") and getattr(msg, "rendered_map_index", None):
                self._name(msg.rendered_map_index)
        if name == "SucceedTask" and (updates := described_updates(msg, self._outlets)):
            self._io.ask("put_updates", {"updates": updates})
        if name == "SucceedTask" and _clears_state():
            self._io.ask("put_state", {"scope": StateScope.RUN.value, "asset": None, "key": None, "value": None})

    def _awaiting(self, msg: Any) -> AwaitInputTask:
        # Before 3.2 the message encodes these two when it is dumped.
        given = msg.model_dump(include={"trigger_kwargs", "next_kwargs"})
        until = encoder().deserialize(given["trigger_kwargs"]).get("timeout_datetime")
        timeout = None if until is None else until - datetime.now(UTC)
        return AwaitInputTask(msg.next_method, given["next_kwargs"], timeout)

    def _failure(self, message: str) -> Exception:
        kind = exceptions.ErrorType.GENERIC_ERROR
        error: Exception = exceptions.AirflowRuntimeError(
            error=comms.ErrorResponse(error=kind, detail={"message": message})
        )
        return error

    def _missing(self, kind: str, **detail: object) -> Any:
        return comms.ErrorResponse(error=exceptions.ErrorType[kind], detail=detail)

    def _ok(self) -> Any:
        return comms.OKResponse(ok=True)

    # Outputs

    def _on_SetXCom(self, msg: Any) -> Any:
        if not self._is_own(msg):
            raise self._failure(f"an XCom of another task ({msg.dag_id}.{msg.task_id}) cannot be set")
        self.kept.outputs[msg.key], self.kept.unstored = msg.value, True
        if msg.key != RETURN_VALUE:  # nearly always the last message of a successful attempt, whose report has it
            self.store()
        return self._ok()

    def _on_DeleteXCom(self, msg: Any) -> Any:
        if not self._is_own(msg):
            raise self._failure(f"an XCom of another task ({msg.dag_id}.{msg.task_id}) cannot be deleted")
        if msg.key in self.kept.outputs:
            del self.kept.outputs[msg.key]
            self.kept.unstored = True
            self.store()
        return self._ok()

    def store(self) -> None:
        """Store the outputs at once, so that they are there however the attempt ends."""
        if not self.kept.unstored:
            return
        encoded = self.encoded()
        if encoded.refusal is not None:
            raise self._failure(encoded.refusal)
        self._io.ask("put_outputs", {"value": encoded.text})
        self.kept.unstored = False

    def encoded(self) -> EncodedResult:
        named = {**self.kept.outputs}
        return encode_result(named.pop(RETURN_VALUE, None), DEFAULT_RESULT_BYTES, named)

    def _is_own(self, msg: Any) -> bool:
        index = getattr(msg, "map_index", None)
        own = (self._run.dag, self._run.name, self._task)
        is_same = index is None or index == self._map_index
        return is_same and (msg.dag_id, msg.run_id, msg.task_id) == own

    def _on_GetXCom(self, msg: Any) -> Any:
        if self._is_own(msg) and msg.key in self.kept.outputs:
            return comms.XComResult(key=msg.key, value=self.kept.outputs[msg.key])
        index = -1 if msg.map_index is None else msg.map_index
        found = dict(self._outputs(msg, is_latest=msg.include_prior_dates))
        return comms.XComResult(key=msg.key, value=found.get(index))

    def _on_GetXComCount(self, msg: Any) -> Any:
        return comms.XComCountResponse(len=len(self._outputs(msg)))

    def _on_GetXComSequenceItem(self, msg: Any) -> Any:
        found = [value for _, value in self._outputs(msg)]
        if not -len(found) <= msg.offset < len(found):
            return self._missing("XCOM_NOT_FOUND", key=msg.key, task_id=msg.task_id, offset=msg.offset)
        return comms.XComSequenceIndexResult(root=found[msg.offset])

    def _on_GetXComSequenceSlice(self, msg: Any) -> Any:
        found = [value for _, value in self._outputs(msg, is_latest=getattr(msg, "include_prior_dates", False))]
        return comms.XComSequenceSliceResult(root=found[msg.start : msg.stop : msg.step])

    def _outputs(self, msg: Any, *, is_latest: bool = False) -> list[tuple[int, Any]]:
        own = self._is_own(msg) and msg.key in self.kept.outputs
        key = None if msg.key == RETURN_VALUE else msg.key
        wanted: dict[str, Any] = {"dag": msg.dag_id, "run": msg.run_id, "task": msg.task_id, "key": key}
        if is_latest:
            wanted["until"] = self._run.logical_date.isoformat()
        asked = self._io.ask("latest_xcoms" if is_latest else "xcoms", wanted)
        found = [(index, value) for index, value in asked]
        return [(self._map_index, self.kept.outputs[msg.key]), *found] if own else found

    # People

    def _on_CreateHITLDetailPayload(self, msg: Any) -> Any:
        self.kept.question = msg
        asked = {name: getattr(msg, name) for name in comms.HITLDetailRequestResult.model_fields if name != "type"}
        return comms.HITLDetailRequestResult(**asked)

    # Values

    def _on_GetVariable(self, msg: Any) -> Any:
        value = self._value("variable", msg.key)
        if value is None:
            return self._missing("VARIABLE_NOT_FOUND", key=msg.key)
        return comms.VariableResult(key=msg.key, value=value)

    def _on_GetConnection(self, msg: Any) -> Any:
        text = self._value("connection", msg.conn_id)
        if text is None:
            return self._missing("CONNECTION_NOT_FOUND", conn_id=msg.conn_id)
        found = read_connection(text)
        extra = read_extra(text) if text.lstrip().startswith("{") else found.extra
        self._mask(found.password)
        return comms.ConnectionResult(
            conn_id=msg.conn_id,
            conn_type=found.type,
            host=found.host or None,
            schema=found.schema or None,
            login=found.login or None,
            password=found.password or None,
            port=found.port,
            extra=None if not extra else _to_json(extra),
        )

    def _value(self, kind: str, name: str) -> str | None:
        try:
            found: str = self._io.ask("value", {"kind": kind, "name": name})
        except AskRefused as error:
            if error.code == "not_found":
                return None
            raise
        return found

    def _on_PutVariable(self, msg: Any) -> Any:
        changed = {"name": msg.key, "value": msg.value, "description": msg.description}
        self._io.ask("put_variable", changed)
        return self._ok()

    def _on_DeleteVariable(self, msg: Any) -> Any:
        self._io.ask("put_variable", {"name": msg.key, "value": None})
        return self._ok()

    def _on_MaskSecret(self, msg: Any) -> None:
        """The SDK's own masker hides it in the SDK's log lines, the attempt's in everything else."""
        self._mask(msg.value)

    def _mask(self, value: object) -> None:
        if self._io.masks is not None and (found := [each for each in _texts_in(value) if each]):
            self._io.masks.add(found)

    # The attempt itself

    def _on_SetRenderedFields(self, msg: Any) -> Any:
        for name, value in msg.rendered_fields.items():
            self._io.say(RENDERED, f"{name} = {_to_json(value)[:4000]}")
        return self._ok()

    def _on_SetRenderedMapIndex(self, msg: Any) -> Any:
        self._name(msg.rendered_map_index)
        return self._ok()

    def _name(self, name: str) -> None:
        if self._map_index >= 0:
            self._io.ask("name_instance", {"name": name})

    def _on_ValidateInletsAndOutlets(self, _msg: Any) -> Any:
        return comms.InactiveAssetsResult(inactive_assets=[])

    def _on_GetTaskRescheduleStartDate(self, _msg: Any) -> Any:
        return comms.TaskRescheduleStartDate(start_date=self._run.polling_since)

    # Runs and tasks

    def _on_TriggerDagRun(self, msg: Any) -> Any:
        date = None if msg.logical_date is None else msg.logical_date.isoformat()
        wanted = {"dag": msg.dag_id, "run": msg.run_id, "params": msg.conf or {}, "fire_at": date}
        wanted |= {"note": getattr(msg, "note", None), "partition": getattr(msg, "partition_key", None)}
        made = self._io.ask("trigger", wanted)
        if not made["is_new"] and msg.reset_dag_run:
            raise self._failure(
                f"run {msg.run_id!r} of {msg.dag_id} exists, and reset_dag_run=True cannot clear it here"
            )
        if not made["is_new"]:
            return self._missing("DAGRUN_ALREADY_EXISTS", dag_id=msg.dag_id, run_id=msg.run_id)
        return self._ok()

    def _on_GetDagRun(self, msg: Any) -> Any:
        found = self._one_run(msg)
        return comms.DagRunResult(**found.fields()) if isinstance(found, Run) else found

    def _on_GetDagRunState(self, msg: Any) -> Any:
        found = self._one_run(msg)
        return comms.DagRunStateResult(state=found.state) if isinstance(found, Run) else found

    def _one_run(self, msg: Any) -> Any:
        found = self._runs(msg.dag_id, runs=[msg.run_id])
        return found[0] if found else self._missing("GENERIC_ERROR", message=f"there is no run {msg.run_id!r}")

    def _runs(self, dag: str, *, runs: list[str] | None = None, dates: list[datetime] | None = None) -> list[Run]:
        found = self._io.ask("runs", {"dag": dag, "runs": runs, "dates": _texts(dates)})
        return [Run(facts) for facts in found]

    def _on_GetPreviousDagRun(self, msg: Any) -> Any:
        state = msg.state and str(getattr(msg.state, "value", msg.state))
        asked = {"dag": msg.dag_id, "before": msg.logical_date.isoformat(), "state": state}
        found = self._io.ask("previous_run", asked)
        run = None if found is None else comms.DagRun(**Run(found).fields())
        return comms.PreviousDagRunResult(dag_run=run)

    def _on_GetPrevSuccessfulDagRun(self, _msg: Any) -> Any:
        before = self._run.logical_date.isoformat()
        found = self._io.ask("previous_run", {"dag": self._run.dag, "before": before, "state": "success"})
        fields = {} if found is None else Run(found).fields()
        names = ("data_interval_start", "data_interval_end", "start_date", "end_date")
        return comms.PrevSuccessfulDagRunResult(**{name: fields.get(name) for name in names})

    def _on_GetDRCount(self, msg: Any) -> Any:
        found = self._runs(msg.dag_id, runs=msg.run_ids, dates=msg.logical_dates)
        states = msg.states and {str(getattr(each, "value", each)) for each in msg.states}
        return comms.DRCount(count=sum(states is None or run.state in states for run in found))

    def _on_GetTICount(self, msg: Any) -> Any:
        states = msg.states and {str(getattr(each, "value", each)) for each in msg.states}
        return comms.TICount(count=sum(not states or state in states for *_, state in self._tasks(msg)))

    def _on_GetTaskStates(self, msg: Any) -> Any:
        found: dict[str, dict[str, Any]] = {}
        for run, task, index, state in self._tasks(msg):
            found.setdefault(run, {})[task if index < 0 else f"{task}_{index}"] = state
        return comms.TaskStatesResult(task_states=found)

    def _on_GetTaskBreadcrumbs(self, msg: Any) -> Any:
        asked = self._io.ask("tasks", {"dag": msg.dag_id, "runs": [msg.run_id], "dates": None})
        crumbs = [
            {
                "task_id": task,
                "map_index": index,
                "state": AIRFLOW_TASK_STATES.get(phase),
                "operator": None,
                "duration": None,
            }
            for _, task, index, phase in asked
        ]
        return comms.TaskBreadcrumbsResult(breadcrumbs=crumbs)

    def _tasks(self, msg: Any) -> Iterator[tuple[str, str, int, str | None]]:
        asked = {"dag": msg.dag_id, "runs": msg.run_ids, "dates": _texts(msg.logical_dates)}
        wanted, group = msg.task_ids, msg.task_group_id
        for run, task, index, phase in self._io.ask("tasks", asked):
            if wanted is not None and task not in wanted:
                continue
            if group is not None and not task.startswith(f"{group}."):
                continue
            if msg.map_index is not None and index != msg.map_index:
                continue
            yield run, task, index, AIRFLOW_TASK_STATES.get(phase)

    def _on_GetDag(self, msg: Any) -> Any:
        found = self._io.ask("dag", {"dag": msg.dag_id})
        if found is None:
            return self._missing("GENERIC_ERROR", message=f"there is no DAG {msg.dag_id!r}")
        known: Mapping[str, Any] = {
            "dag_id": msg.dag_id,
            "is_paused": found["is_paused"],
            "bundle_name": "evertick",
            "bundle_version": None,
            "relative_fileloc": found["file"],
            "owners": None,
            "tags": [],
            "next_dagrun": None,
        }
        return comms.DagResult(**{name: known.get(name) for name in comms.DagResult.model_fields if name != "type"})


@cache
def _clears_state() -> bool:
    return bool(conf.getboolean("state_store", "clear_on_success", fallback=False))


def by_key(value: Any) -> dict[str, Any]:
    """Stored outputs by their keys."""
    if isinstance(value, dict) and value.get(RESULT_TAG) == "outputs":
        returned, named = value["value"], value["named"]
    else:
        returned, named = value, {}
    return {**named, **({} if returned is None else {RETURN_VALUE: returned})}


def encoder() -> Any:
    """What the SDK encodes arguments with."""
    try:
        return import_module("airflow.sdk.serde")
    except ImportError:  # before 3.2
        return import_module("airflow.serialization.serialized_objects").BaseSerialization


def _texts_in(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from _texts_in(each)
    elif isinstance(value, list | tuple | set):
        for each in value:
            yield from _texts_in(each)


def _texts(dates: list[datetime] | None) -> list[str] | None:
    return None if dates is None else [each.isoformat() for each in dates]


def _to_json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False, default=str)
