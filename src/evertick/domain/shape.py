"""How the tasks of one run follow from each other: trigger rules, mapping, branches, retries, clear. Decided in memory, as the
database decides; `dag.test()` runs by it, and tests/engine/shapes.py compares both on generated DAGs, step by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from typing import NamedTuple

from evertick.domain.branching import skipped_by
from evertick.domain.dag import DagSpec
from evertick.domain.mapping import items_of
from evertick.domain.setups import leaves
from evertick.domain.states import FAILED_TASK_STATES
from evertick.domain.trigger_rules import Decision, UpstreamCounts, decide

WHOLE = -1
READY = "available"
_ENDED = {Decision.SKIP: "skipped", Decision.UPSTREAM_FAILED: "upstream_failed"}


class Key(NamedTuple):
    idx: int
    map_index: int = WHOLE


class Shape:
    """Where each task stands; one without a state waits. `items` are what instances were given, `reasons` why some have none."""

    def __init__(self, spec: DagSpec) -> None:
        self.spec = spec
        self.states: dict[Key, str] = {}
        self.results: dict[Key, object] = {}
        self.items: dict[Key, list[object]] = {}
        self.reasons: dict[Key, str] = {}
        self.attempts: Counter[Key] = Counter()
        self._place = {task.name: idx for idx, task in enumerate(spec.tasks)}
        self._up: list[list[int]] = [[up for up, down in spec.edges if down == idx] for idx in range(len(spec.tasks))]
        self._down: list[list[int]] = [[down for up, down in spec.edges if up == idx] for idx in range(len(spec.tasks))]
        self._recount()
        self._settle(self._decided(Key(idx) for idx in range(len(spec.tasks))))
        self._expand()

    def ready(self) -> list[Key]:
        return sorted(key for key, state in self.states.items() if state == READY)

    def end(self, key: Key, state: str, value: object = None, *, no_retry: bool = False) -> None:
        """An attempt at a ready task ended. A failed one is ready again while it has retries."""
        self.attempts[key] += 1
        if state == "failed" and not no_retry and self.attempts[key] <= self.spec.tasks[key.idx].retry.retries:
            return
        skips = skipped_by(self.spec, key.idx, value) if state == "success" else []
        unchosen = [Key(idx) for idx in skips if not self._rows[idx]]
        self._put(key, state)
        for each in unchosen:
            self._put(each, "skipped")
        if state == "success" and value is not None:
            self.results[key] = value
        self._settle([key])
        self._settle(unchosen)
        self._expand()

    def run_state(self) -> str | None:
        """None while something is open."""
        if READY in self.states.values() or len({key.idx for key in self.states}) < len(self.spec.tasks):
            return None
        failed = {key.idx for key, state in self.states.items() if state in FAILED_TASK_STATES}
        return "failed" if failed & leaves(self.spec) else "success"

    def clear(self, whole: Collection[int], instances: Collection[Key] = ()) -> None:
        """Tasks of an ended run that run again. An instance keeps what it was given, unless something above it runs again, too:
        then its task is taken back as a whole."""
        cleared = {key for key in self.states if key.idx in whole or key in instances}
        for idx, task in enumerate(self.spec.tasks):
            mine = {key for key in self.states if key.idx == idx}
            is_above = any(key.idx in self._up[idx] for key in cleared)
            if task.mapping is not None and mine & cleared and (is_above or mine <= cleared):
                cleared |= mine
                self.items = {key: item for key, item in self.items.items() if key.idx != idx}
        for key in cleared:
            for known in (self.states, self.results, self.attempts):
                known.pop(key, None)
        instances = sorted(key for key in cleared if key in self.items)
        self._recount()
        self._rows += Counter(key.idx for key in instances)
        waiting = [Key(idx) for idx in range(len(self.spec.tasks)) if not self._rows[idx]]
        self._settle(self._decided([*waiting, *instances]))
        self._expand()

    def result_of(self, name: str) -> object:
        """What a task returned; of a mapped one the list of what its instances returned, where they did."""
        idx = self._place[name]
        if self.spec.tasks[idx].mapping is None:
            return self.results.get(Key(idx))
        return [self.results[key] for key in sorted(self.results) if key.idx == idx]

    # ------------------------------------------------------------------------------------------------------------

    def _put(self, key: Key, state: str) -> None:
        self._rows[key.idx] += key not in self.states
        self.states[key] = state

    def _recount(self) -> None:
        self._counts: list[Counter[str]] = [Counter() for _ in self.spec.tasks]
        self._rows = Counter(key.idx for key in self.states)
        self._to_expand: list[int] = []
        for key, state in self.states.items():
            for down in self._down[key.idx]:
                self._counts[down][state] += state != READY

    def _settle(self, ended: list[Key]) -> None:
        """Count the ends for those after them, level by level."""
        while ended:
            touched: dict[Key, None] = {}
            for key in ended:
                for down in self._down[key.idx]:
                    self._counts[down][self.states[key]] += 1
                    touched[Key(down)] = None
            ended = self._decided(key for key in touched if not self._rows[key.idx])

    def _decided(self, waiting: Iterable[Key]) -> list[Key]:
        """What ended of these by their trigger rules. What may run is ready, or about to be expanded."""
        over: list[Key] = []
        for key, decision in [(key, self._decision(key.idx)) for key in waiting]:
            if decision is Decision.RUN and key.map_index == WHOLE and self.spec.tasks[key.idx].mapping is not None:
                self._rows[key.idx] += 1
                self._to_expand.append(key.idx)
            elif decision is not Decision.WAIT:
                if key.map_index != WHOLE:
                    self._rows[key.idx] -= 1
                self._put(key, _ENDED.get(decision, READY))
                over += [key] if decision is not Decision.RUN else []
        return over

    def _decision(self, idx: int) -> Decision:
        setups = [self.states.get(Key(up)) for up in self._up[idx] if self.spec.tasks[up].is_setup]
        total = sum(max(self._rows[up], 1) for up in self._up[idx])
        return decide(self.spec.tasks[idx].trigger_rule, UpstreamCounts.of(total, self._counts[idx], setups))

    def _expand(self) -> None:
        """Mapped tasks that may start become their instances. What ends instead may bring up others."""
        while self._to_expand:
            idxs, self._to_expand = self._to_expand, []
            for idx in idxs:
                self._rows[idx] -= 1
                mapping = self.spec.tasks[idx].mapping
                assert mapping is not None
                sources = [each.task for each in mapping.lists if each.task is not None]
                ends = {name: self.states.get(Key(self._place[name])) for name in sources}
                found = items_of(mapping, {name: self.result_of(name) for name in sources}, ends)
                if found.instead is not None:
                    self._put(Key(idx), found.instead)
                    self.reasons[Key(idx)] = found.reason
                    self._settle([Key(idx)])
                for number, item in enumerate(found.items):
                    self._put(Key(idx, number), READY)
                    self.items[Key(idx, number)] = item
