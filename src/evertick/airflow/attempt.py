"""Runs one attempt of an Airflow task: Airflow's SDK executes it, as under Airflow, and its messages become a report.

The names of the SDK used here are private to it: `task_runner.run`, `finalize`, `RuntimeTaskInstance` and the global
`SUPERVISOR_COMMS`, the same in Airflow 3.0 to 3.3.
"""

from __future__ import annotations

import json
import os
import signal
import traceback
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, redirect_stdout
from datetime import UTC, datetime
from functools import cache
from importlib import import_module
from io import StringIO
from typing import Any

from airflow.sdk import DAG, exceptions
from airflow.sdk.api.datamodels._generated import TaskInstanceState, TIRunContext
from airflow.sdk.bases.operator import BaseOperator
from airflow.sdk.definitions._internal.contextmanager import DagContext
from airflow.sdk.execution_time import comms, task_runner
from airflow.sdk.execution_time.comms import DagRun
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from evertick.airflow import shortcuts
from evertick.airflow.messages import Supervisor, by_key, encoder
from evertick.airflow.people import Resumed, question, resumption, still_waiting
from evertick.airflow.runs import Run
from evertick.airflow.schedules import interval_of, timed_part
from evertick.airflow.side_door import side_door
from evertick.airflow.tasks import growing_delay, has_on_kill, mapped_group_of
from evertick.airflow.timetables import manual_interval
from evertick.airflow.triggers import deferral_json, resume_fields, start_fields, wait_for_event
from evertick.attempts.body import described
from evertick.attempts.protocol import AskRefused, AttemptIO, Report, Start
from evertick.domain.attempt import OutcomeKind
from evertick.domain.dags.spec import DagSpec, TaskSpec
from evertick.domain.schedules.spec import ScheduleKind
from evertick.sdk.runtime import TaskContext, enter

_SPACE = uuid.UUID("5a4cd6ba-9e65-4a0f-9d34-2c6b19a3c1d5")


class AirflowTask:
    """A task of a DAG that was loaded in this process."""

    def __init__(self, task: Any, spec: DagSpec) -> None:
        self._task, self._spec = task, spec

    def __call__(self, start: Start, context: TaskContext, io: AttemptIO) -> Report:
        """Never raises because of the task."""
        enter(context)
        supervisor: Supervisor | None = None
        error: BaseException | None = None
        try:
            # A version that was published by an earlier release is not given them.
            facts = json.loads(start.inputs_json).get(self._task.task_id) or io.ask("run", {})
            run = self.run_of(facts)
            supervisor = Supervisor(run, self._task, start.map_index, io)
            answer = resumption(facts.get("input"), start.attempt, datetime.now(UTC))
            if answer is not None and answer.event is None:
                return Report(start.number, OutcomeKind.DEFERRED, None, json.dumps(still_waiting(facts["input"])))
            error = self._execute(start, run, supervisor, io, (facts.get("resumed"), answer))
        except BaseException as failure:  # a param that does not fit, for example: before the SDK catches anything
            error = failure
            io.say("ERROR", "".join(traceback.format_exception(failure)))
        return self._report(start, supervisor, error, io)

    async def wait_for_trigger(self, start: Start, io: AttemptIO) -> Report:
        """Run the trigger that a deferral of this task waits for, next to others in this process."""
        given = json.loads(start.inputs_json)
        run = Run(given["run"])
        supervisor = Supervisor(run, self._task, start.map_index, io)
        return await wait_for_event(start.number, given, self.instance(start, run, {}), supervisor, io)

    def _execute(
        self,
        start: Start,
        run: Run,
        supervisor: Supervisor,
        io: AttemptIO,
        since: tuple[Mapping[str, Any] | None, Resumed | None],
    ) -> BaseException | None:
        """`since`: the event of its trigger and the answer of people that the task has waited for."""
        log, (resumed, answer) = TaskLog(io), since
        if has_on_kill(self._task) and not self._task.is_mapped:
            _end_after_on_kill(self._task)
        door = side_door(supervisor.send, io.say) if self._starts_interpreters() else nullcontext()
        fields = {} if resumed is None or "end" in resumed["event"] else resume_fields(resumed)
        if answer is not None:
            fields = _with_event(answer)
        with supervised(supervisor), door:
            instance = self.instance(start, run, fields, self._map_indexes(start, run, io))
            context = instance.get_template_context()
            if resumed is not None and "end" in resumed["event"]:
                state, error = self._end(resumed["event"], supervisor), None
            elif resumed is None and answer is None and getattr(self._task, "start_from_trigger", False):
                supervisor.kept.final = start_fields(self._task, context)
                return None
            else:
                state, _, error = task_runner.run(instance, context, log)
            context["exception"] = error
            task_runner.finalize(instance, state, context, log, error)
            return error

    def _end(self, event: Mapping[str, Any], supervisor: Supervisor) -> Any:
        """The trigger has decided how the task ends, which does not run again."""
        state = TaskInstanceState(event["end"])
        supervisor.kept.outputs |= event["xcoms"] or {}
        supervisor.kept.unstored = True
        now = datetime.now(UTC)
        ended = comms.SucceedTask(end_date=now) if state == "success" else comms.TaskState(state=state, end_date=now)
        supervisor.kept.final = ended
        return state

    def _starts_interpreters(self) -> bool:
        task = self._task
        kind = task.operator_class if task.is_mapped else type(task)
        return any(base.__name__ == "_BasePythonVirtualenvOperator" for base in kind.__mro__)

    def run_of(self, facts: Mapping[str, Any]) -> Run:
        return Run(facts, interval=self._interval(facts))

    def instance(
        self, start: Start, run: Run, resumed: Mapping[str, Any], map_indexes: dict[str, int | list[int]] | None = None
    ) -> Any:
        """The task's instance as the SDK sees it."""
        retries = next(each.retry.retries for each in self._spec.tasks if each.name == self._task.task_id)
        declared = {param.name: param.default for param in self._spec.params}
        known = {
            "dag_run": DagRun(**run.fields(declared)),
            "task_reschedule_count": run.polls,
            "max_tries": retries,
            "should_retry": start.attempt <= retries,
            # Airflow deletes those of earlier attempts when a task starts, but not when it resumes.
            "xcom_keys_to_clear": [] if resumed else list(by_key(run.outputs)),
            "upstream_map_indexes": map_indexes,
            **resumed,
        }
        return RuntimeTaskInstance.model_construct(
            id=uuid.uuid5(_SPACE, f"{start.run_id} {start.idx} {start.map_index}"),
            task_id=self._task.task_id,
            dag_id=self._task.dag_id,
            run_id=run.name,
            try_number=start.attempt,
            map_index=start.map_index,
            dag_version_id=uuid.UUID(int=0),
            task=self._task,
            bundle_instance=None,
            _ti_context_from_server=TIRunContext(
                **{name: value for name, value in known.items() if name in TIRunContext.model_fields}
            ),
            max_tries=retries,
            start_date=datetime.now(UTC),
            state=TaskInstanceState.RUNNING,
            hostname=os.uname().nodename,
        )

    def _map_indexes(self, start: Start, run: Run, io: AttemptIO) -> dict[str, int | list[int]] | None:
        """With which indexes it reads results of upstream tasks in mapped groups: of its own group with its own, of another with
        all. Newer releases find them themselves."""
        own, tasks = mapped_group_of(self._task), self._task.dag.task_dict
        groups = {name: mapped_group_of(tasks[name]) for name in self._task.upstream_task_ids}
        if "upstream_map_indexes" not in TIRunContext.model_fields or all(group is None for group in groups.values()):
            return None
        found: dict[str, int | list[int]] = {
            name: start.map_index for name, group in groups.items() if group is not None and group is own
        }
        if others := {name for name, group in groups.items() if group is not None and group is not own}:
            rows = io.ask("tasks", {"dag": self._task.dag_id, "runs": [run.name], "dates": None})
            found |= {name: [index for _, task, index, _ in rows if task == name] for name in others}
        return found

    def _interval(self, facts: Mapping[str, Any]) -> tuple[datetime, datetime] | None:
        if not self._spec.schedules:
            return None
        is_planned, schedule = facts["type"] in ("scheduled", "backfill"), self._spec.schedules[0].spec
        if schedule.kind is not ScheduleKind.COMPUTED:
            return interval_of(self._task.dag, schedule, Run(facts).due_at, is_planned=is_planned)
        if (stored := facts.get("interval")) is not None:
            return datetime.fromisoformat(stored[0]), datetime.fromisoformat(stored[1])
        return None if is_planned else manual_interval(timed_part(self._task.dag.timetable), Run(facts).due_at)

    def _report(
        self, start: Start, supervisor: Supervisor | None, error: BaseException | None, io: AttemptIO
    ) -> Report:
        number = start.number
        final = None if supervisor is None else supervisor.kept.final
        if supervisor is not None and type(final).__name__ != "SucceedTask":
            self._store(supervisor, io)
        if supervisor is None or final is None:
            why = described(error, io.hide) if error else "Airflow's SDK ended without a state"
            return Report(number, OutcomeKind.FAILED, why)
        name, state = type(final).__name__, str(getattr(final.state, "value", final.state))
        if name == "DeferTask":
            return self._deferred(number, supervisor, io)
        if name == "RescheduleTask":
            until = final.reschedule_date.astimezone(UTC).isoformat()
            return Report(number, OutcomeKind.DEFERRED, None, json.dumps({"poll_at": until}))
        if name == "AwaitInputTask":
            asked = question(supervisor.kept.question, final, start.attempt, datetime.now(UTC))
            return Report(number, OutcomeKind.DEFERRED, None, json.dumps(asked, default=str))
        if name == "SucceedTask":
            return self._success(start, supervisor, io)
        if name == "TaskState" and state == "skipped":
            return Report(number, OutcomeKind.SKIPPED)
        reason = described(error, io.hide) if error else None
        if name == "RetryTask":
            delay = getattr(final, "retry_delay_seconds", None) or growing_delay(self._task, start.attempt)
            reason = getattr(final, "retry_reason", None) or reason
            return Report(number, OutcomeKind.FAILED, reason, retry_after_seconds=delay)
        if name == "TaskState":
            return Report(number, OutcomeKind.FAILED, reason, no_retry=True)
        message = f"{name}: Evertick does not support this end of a task of Airflow yet"
        return Report(number, OutcomeKind.FAILED, message, no_retry=True)

    def _deferred(self, number: int, supervisor: Supervisor, io: AttemptIO) -> Report:
        final = supervisor.kept.final
        text = deferral_json(final)
        if len(text) > io.files.max_bytes:
            refusal = (
                f"the deferral to {final.classpath} has {len(text):,} bytes, at most {io.files.max_bytes:,} are kept"
            )
            return Report(number, OutcomeKind.FAILED, refusal, no_retry=True)
        io.say("INFO", f"Waits for the trigger {final.classpath}.")
        return Report(number, OutcomeKind.DEFERRED, None, text)

    def _success(self, start: Start, supervisor: Supervisor, io: AttemptIO) -> Report:
        encoded, number = supervisor.encoded(), start.number
        if encoded.refusal is not None:
            io.say("ERROR", encoded.refusal)
            return Report(number, OutcomeKind.FAILED, encoded.refusal, no_retry=True)
        kept = supervisor.kept
        return Report(
            number, OutcomeKind.SUCCESS, None, encoded.text, skips=(*kept.skips, *self._skipped(start, kept.outputs))
        )

    def _store(self, supervisor: Supervisor, io: AttemptIO) -> None:
        """A return value that was pushed before the attempt did not succeed; the other XComs are stored already."""
        try:
            supervisor.store()
        except (exceptions.AirflowRuntimeError, AskRefused) as failure:
            io.say("ERROR", f"Its XComs are not stored: {failure}")

    def _skipped(self, start: Start, outputs: Mapping[str, Any]) -> list[str]:
        """The tasks of its own mapped group that a branch has not chosen. For these the SDK sends no message: it leaves an XCom,
        which Airflow's scheduler reads before it starts a task with the same index."""
        chosen, group = outputs.get("skipmixin_key"), mapped_group_of(self._task)
        if start.map_index < 0 or group is None or not isinstance(chosen, Mapping):
            return []
        dag = self._task.dag
        inside = {name for name, task in dag.task_dict.items() if mapped_group_of(task) is group}
        if "followed" in chosen:
            return sorted(self._task.downstream_task_ids & inside - set(chosen["followed"]))
        return sorted(inside & set(chosen.get("skipped", ())))


class TaskLog:
    """The SDK's own log lines. It has those of structlog's methods that the SDK calls."""

    def __init__(self, io: AttemptIO) -> None:
        self._io = io

    def bind(self, **_: object) -> TaskLog:
        return self

    def debug(self, event: object, *_args: object, **_given: object) -> None:
        pass

    def info(self, event: object, *args: object, **given: object) -> None:
        if not str(event).startswith("::"):  # groups of Airflow's log page
            self._say("INFO", event, args, given)

    def warning(self, event: object, *args: object, **given: object) -> None:
        self._say("WARNING", event, args, given)

    def error(self, event: object, *args: object, **given: object) -> None:
        self._say("ERROR", event, args, given)

    def exception(self, event: object, *args: object, **given: object) -> None:
        self._say("ERROR", event, args, given)
        self._io.say("ERROR", traceback.format_exc())

    def _say(self, level: str, event: object, args: tuple[object, ...], given: Mapping[str, object]) -> None:
        text = str(event) % args if args else str(event)
        shown = " ".join(f"{name}={value}" for name, value in given.items() if name not in ("ti", "exc_info"))
        self._io.say(level, f"{text} {shown}".rstrip())


@contextmanager
def supervised(supervisor: Any) -> Iterator[None]:
    """The SDK finds its supervisor in a global."""
    before = getattr(task_runner, "SUPERVISOR_COMMS", None)
    task_runner.SUPERVISOR_COMMS = supervisor
    try:
        yield
    finally:
        if before is None:
            del task_runner.SUPERVISOR_COMMS
        else:
            task_runner.SUPERVISOR_COMMS = before


class _AtImport:
    """While a file is imported, variables and connections come from the environment and from secrets backends alone."""

    def send(self, msg: Any) -> Any:
        kinds = {"GetVariable": "VARIABLE_NOT_FOUND", "GetConnection": "CONNECTION_NOT_FOUND"}
        if type(msg).__name__ == "MaskSecret":
            return None
        kind = exceptions.ErrorType[kinds.get(type(msg).__name__, "GENERIC_ERROR")]
        return comms.ErrorResponse(error=kind, detail={"message": f"{type(msg).__name__} is not possible at import"})

    async def asend(self, msg: Any) -> Any:
        return self.send(msg)


def values_at_import() -> Any:
    return supervised(_AtImport())


_WARM_UP_ROUNDS = 20
PYTHON_OPERATORS = "airflow.providers.standard.operators.python"
_ANY_DATE = "2030-01-01T00:00:00+00:00"


class Rehearsal:
    """A small task that goes the whole way of an attempt, without a runner. Plugins receive no notification of it.

    In a process that forks: what the SDK imports and caches at the first task is then there for all. In each process that
    was forked, before its order arrives: the pages that it writes are then copied.
    """

    def __init__(self) -> None:
        shortcuts.install()
        with DAG("evertick_rehearsal", auto_register=False) as dag:
            _rehearsed_task()
        DagContext.autoregistered_dags.clear()
        spec = DagSpec(name=dag.dag_id, tasks=(TaskSpec(name="rehearsal"),))
        self._task = AirflowTask(dag.task_dict["rehearsal"], spec)
        facts = dict.fromkeys(("fire_at", "started_at", "finished_at", "note", "triggered_by", "params"))
        facts |= {"dag": dag.dag_id, "run": "manual__1", "number": 0, "type": "manual", "state": "running"}
        facts |= dict.fromkeys(("due_at", "created_at"), _ANY_DATE)
        inputs = json.dumps({"rehearsal": facts})
        place = ("start", 0, 0, 0, -1, 1, 0, 1, dag.dag_id, "rehearsal")
        self._start = Start(*place, "", _ANY_DATE, "{}", inputs, True, None, "")
        self._context = TaskContext(run_id=0, dag=dag.dag_id, task="rehearsal")
        self._io = AttemptIO(lambda _level, _text: None)
        self._count = 0
        task_runner.get_listener_manager()

    def warm_up(self) -> None:
        """Until Python has specialized the code, which a zygote did for the processes that it forks."""
        self()
        while self._count < _WARM_UP_ROUNDS:
            self()

    def __call__(self) -> None:
        self._count += 1
        on_term = signal.getsignal(signal.SIGTERM)
        used = {name: getattr(task_runner, name) for name in _LEFT_OUT if hasattr(task_runner, name)}
        for name in used:
            setattr(task_runner, name, _LEFT_OUT[name])
        try:
            with redirect_stdout(StringIO()):
                self._task(self._start, self._context, self._io)
        finally:
            for name, function in used.items():
                setattr(task_runner, name, function)
            signal.signal(signal.SIGTERM, on_term)


@cache
def rehearsal() -> Rehearsal:
    return Rehearsal()


def _rehearsed_task() -> object:
    """Does what most operators do: it has a template, and returns something."""
    try:
        kind = import_module(PYTHON_OPERATORS).PythonOperator
    except ImportError:
        return _RehearsedTask(task_id="rehearsal", day="{{ ds }}")
    return kind(task_id="rehearsal", python_callable=list, op_args=["{{ ds }}"])


class _RehearsedTask(BaseOperator):  # type: ignore[misc]  # the class is Any without Airflow
    """In an environment without the standard provider."""

    template_fields = ("day",)

    def __init__(self, *, day: str, **given: Any) -> None:
        super().__init__(**given)
        self.day = day

    def execute(self, context: Any) -> list[str]:
        return [self.day]


class _NoListeners:
    """In place of the manager that tells plugins about task instances."""

    def __getattr__(self, _name: str) -> Any:
        return self

    def __call__(self, **_given: object) -> None:
        pass


# A rehearsal tells no plugin about its task, and leaves no environment variables that describe it.
_LEFT_OUT: Mapping[str, Any] = {"get_listener_manager": _NoListeners, "context_to_airflow_vars": lambda *_, **__: {}}


def _end_after_on_kill(task: Any) -> None:
    """When the task is stopped, the SDK calls `on_kill` and goes on; this ends its operator after that."""
    on_kill = type(task).on_kill

    def stop() -> None:
        on_kill(task)
        raise exceptions.AirflowFailException("the task was stopped")

    object.__setattr__(task, "on_kill", stop)


def _with_event(answer: Resumed) -> dict[str, Any]:
    """How an operator resumes with the answer of people, or without one."""
    serde = encoder()
    kwargs = dict(serde.deserialize(dict(answer.next_kwargs)) or {}) if answer.next_kwargs else {}
    return {"next_method": answer.next_method, "next_kwargs": serde.serialize({**kwargs, "event": answer.event})}
