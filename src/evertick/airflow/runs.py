"""A run of Evertick in Airflow's words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from airflow.sdk.execution_time.comms import DagRun
from airflow.utils.types import DagRunType

from evertick.airflow.assets import consumed_events


def airflow_run_state(state: str) -> str:
    return "failed" if state == "canceled" else state


class Run:
    """The facts about a run, as the database tells them. `interval` overrides its data interval."""

    def __init__(self, facts: Mapping[str, Any], *, interval: tuple[datetime, datetime] | None = None) -> None:
        self._facts, self._interval = facts, interval
        self.dag: str = facts["dag"]
        self.name: str = facts["run"]
        self.number: int = facts["number"]
        self.state = airflow_run_state(facts["state"])

    @property
    def due_at(self) -> datetime:
        at = self._at("fire_at") or self._at("due_at")
        assert at is not None, "every run has a date"
        return at

    @property
    def logical_date(self) -> datetime:
        return self.due_at if self._interval is None else self._interval[0]

    @property
    def polling_since(self) -> datetime | None:
        polls = self._facts.get("polls")
        return None if polls is None else datetime.fromisoformat(polls[0])

    @property
    def polls(self) -> int:
        polls = self._facts.get("polls")
        return 0 if polls is None else int(polls[1])

    @property
    def outputs(self) -> Any:
        """The stored outputs of the attempts before; None if there are none."""
        return self._facts.get("outputs")

    def fields(self, declared: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """For the installed release's `DagRun`, which knows only some of them. `declared` are the defaults of the params:
        what equals them was not given."""
        defaults = declared or {}
        start, end = self._interval or (self.due_at, self.due_at)
        params = self._facts["params"] or {}
        kind = self._facts["type"]
        partition = self._facts.get("partition") or (None, None)
        known = {
            "dag_id": self.dag,
            "run_id": self.name,
            "logical_date": start,
            "data_interval_start": start,
            "data_interval_end": end,
            "run_after": self.due_at,
            "start_date": self._at("started_at") or self._at("created_at"),
            "end_date": self._at("finished_at"),
            "run_type": kind if kind in {each.value for each in DagRunType} else "manual",
            "state": self.state,
            "conf": {name: value for name, value in params.items() if name not in defaults or defaults[name] != value},
            "triggering_user_name": self._facts["triggered_by"],
            "consumed_asset_events": consumed_events(self._facts.get("events") or ()),
            "partition_key": partition[0],
            "partition_date": None if partition[1] is None else datetime.fromisoformat(partition[1]),
            "note": self._facts["note"],
        }
        return {name: value for name, value in known.items() if name in DagRun.model_fields}

    def _at(self, name: str) -> datetime | None:
        return datetime.fromisoformat(self._facts[name]) if self._facts.get(name) else None
