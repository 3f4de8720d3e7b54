"""Callbacks of a DAG, which Airflow calls when a run has ended. A notification of the run starts a run of a DAG of their own: it
is written when the run ends, and delivered until that run exists."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable
from typing import Any

from evertick.airflow.attempt import AirflowTask, supervised
from evertick.airflow.messages import Supervisor
from evertick.attempts.body import described
from evertick.attempts.protocol import AttemptIO, Report, Start
from evertick.domain.attempt import OutcomeKind
from evertick.domain.dags.params import ParamSpec, ParamType
from evertick.domain.dags.spec import DagSpec, TaskSpec
from evertick.domain.notifications import callback_dag
from evertick.sdk.runtime import BoundTask, CompiledDag, TaskContext

_REASONS = {"on_failure_callback": "task_failure", "on_success_callback": "success"}


def callback_dags(dag: Any, spec: DagSpec, names: Iterable[str]) -> dict[str, CompiledDag]:
    """The DAGs whose runs call the callbacks with these names, by their own names."""
    return {made.name: made for made in (_callback_dag(dag, spec, name) for name in names)}


def _callback_dag(dag: Any, spec: DagSpec, name: str) -> CompiledDag:
    task = TaskSpec(name=name, asks=True, summary="callback")
    made = DagSpec(
        name=callback_dag(spec.name, name),
        tasks=(task,),
        description=f"Calls {name} of {spec.name}.",
        tags=("callback",),
        params=(ParamSpec(name="event", type=ParamType.OBJECT, default={}),),
    )
    bound = BoundTask(name=name, retry=task.retry, report=DagCallback(dag, spec, name))
    return CompiledDag(spec=made, tasks={name: bound})


class DagCallback:
    """Calls the callbacks of one event, each with the context of the task that ended the run."""

    def __init__(self, dag: Any, spec: DagSpec, name: str) -> None:
        self._dag, self._spec, self._name = dag, spec, name

    def __call__(self, start: Start, _context: TaskContext, io: AttemptIO) -> Report:
        """A callback that fails does not keep the others from being called."""
        given = getattr(self._dag, self._name)
        failures: list[BaseException] = []
        try:
            context, supervisor = self._context(start, io)
            with supervised(supervisor):
                for callback in given if isinstance(given, list | tuple) else [given]:
                    self._call(callback, context, io, failures)
        except BaseException as error:  # the context itself, for example without its task
            io.say("ERROR", "".join(traceback.format_exception(error)))
            failures.append(error)
        if not failures:
            return Report(start.number, OutcomeKind.SUCCESS)
        return Report(start.number, OutcomeKind.FAILED, described(failures[0], io.hide), no_retry=True)

    def _call(
        self, callback: Callable[[Any], object], context: Any, io: AttemptIO, failures: list[BaseException]
    ) -> None:
        try:
            callback(context)
        except Exception as error:
            io.say("ERROR", "".join(traceback.format_exception(error)))
            failures.append(error)

    def _context(self, start: Start, io: AttemptIO) -> tuple[Any, Supervisor]:
        event = io.ask("run", {})["params"]["event"]
        facts = io.ask("ended_run", {"dag": self._dag.dag_id, "number": event["run"]})
        name, index, attempt = facts["last"] or ("", -1, 1)
        if name not in self._dag.task_dict:  # it ended before any task, or the task was removed since
            name, index, attempt = next(iter(self._dag.task_dict)), -1, 1
        task = AirflowTask(self._dag.task_dict[name], self._spec)
        run = task.run_of(facts)
        supervisor = Supervisor(run, self._dag.task_dict[name], index, io)
        with supervised(supervisor):
            context = task.instance(start._replace(map_index=index, attempt=attempt), run, {}).get_template_context()
        context["reason"] = _REASONS[self._name] if event.get("event") in ("failure", "success") else event["event"]
        return context, supervisor
