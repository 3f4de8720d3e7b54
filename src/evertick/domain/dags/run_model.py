"""A model of one run: trigger rules, mapping of tasks and groups, branches, retries of tasks and of groups, clear. It decides in
memory what the database decides; `dag.test()` uses it, and tests/engine/shapes.py compares both on generated DAGs, step by step.
At most 150 lines of code, so that a person can review it: it is the reference for the engine."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from typing import NamedTuple

from evertick.domain.dags.graph import group_leaves, groups_of, leaves, map_heads, mapping_at, skipped_by
from evertick.domain.dags.mapping import items_of
from evertick.domain.dags.spec import DagSpec
from evertick.domain.dags.trigger_rules import RuleDecision, UpstreamCounts, decide
from evertick.domain.states import FAILED_TASK_STATES

WHOLE, READY, WAITING = -1, "available", "waiting"


class TaskId(NamedTuple):
    idx: int
    map_index: int = WHOLE


class RunModel:
    """`items` are the arguments of mapped instances, `reasons` why some tasks have no instances."""

    def __init__(self, spec: DagSpec) -> None:
        self.spec, self._group, self._every = spec, groups_of(spec), range(len(spec.tasks))
        self._head = map_heads(spec)  # of tasks in mapped groups, which have instances before they may start
        self.results, self.reasons = dict[TaskId, object](), dict[TaskId, str]()
        self.items = dict[TaskId, list[object]]()
        self.attempts, self._retried = Counter[TaskId](), Counter[int | None]()
        self._released, self._unchosen = set[int | None](), dict[int, int]()
        self._place = {task.name: idx for idx, task in enumerate(spec.tasks)}
        self._up, self._down = defaultdict[int, list[int]](list), defaultdict[int, list[int]](list)
        for up, down in spec.edges:
            self._up[down].append(up)
            self._down[up].append(down)
        self._rows: list[dict[int, str]] = [{} for _ in self._every]  # by map index; an empty dict is a waiting task
        self.clear(())

    @property
    def states(self) -> dict[TaskId, str]:
        return {TaskId(idx, number): state for idx, rows in enumerate(self._rows) for number, state in rows.items()}

    def end(self, key: TaskId, state: str, value: object = None, *, no_retry: bool = False) -> None:
        """An attempt of a ready task ended. A failed one becomes ready again while it has retries."""
        self.attempts[key] += 1
        if state == "failed" and not no_retry and self.attempts[key] <= self.spec.tasks[key.idx].retry.retries:
            return
        self.results |= {key: value} if state == "success" and value is not None else {}
        skips = skipped_by(self.spec, key.idx, value) if state == "success" else []
        unchosen = {each for idx in skips for each in self._skippable(idx, key)}
        self._unchosen |= {each.idx: key.idx for each in unchosen}
        self._settle({key: state, **dict.fromkeys(unchosen, "skipped")})

    def run_state(self) -> str | None:
        """None while a task is open."""
        is_bad = leaves(self.spec) & self._in(FAILED_TASK_STATES)
        return None if self._in((READY, WAITING)) else "failed" if is_bad else "success"

    def clear(self, whole: Collection[int], instances: Collection[TaskId] = ()) -> None:
        """Reset tasks of an ended run so that they run again. An instance keeps its arguments unless one of its upstream tasks
        runs again, too: then its task is reset as a whole."""
        cleared = {key for key in self.states if key.idx in whole or key in instances}
        for idx in sorted({key.idx for key in cleared}):  # tasks are in topological order
            if (head := self._head[idx]) is not None:  # a mapped group reads its lists again, or keeps its instances
                again = self._lists(head) & {key.idx for key in cleared} or TaskId(idx) in cleared
                cleared |= {key for key in self.states if again and self._head[key.idx] == head}
                continue
            held = {self._group[up] for up in self._up[idx]} - {None, self._group[idx]}
            if any(key.idx in self._up[idx] or self._group[key.idx] in held for key in cleared):
                cleared |= {TaskId(idx, number) for number in self._rows[idx]}
        self._retried.clear()
        self._settle(self._reopened(cleared))

    def result_of(self, name: str, reader: TaskId | None = None) -> object:
        """A task's return value; for a mapped task the list of its instances' values, where there are any. A reader in the same
        mapped group gets that of its own index."""
        idx = self._place[name]
        is_same = reader is not None and self._head[idx] is not None and self._head[idx] == self._head[reader.idx]
        if is_same or mapping_at(self.spec, idx) is None:
            return self.results.get(TaskId(idx, reader.map_index if is_same and reader else WHOLE))
        return [self.results[key] for key in sorted(self.results) if key.idx == idx]

    def _skippable(self, idx: int, by: TaskId) -> list[TaskId]:
        """The waiting rows of a task that a branch has not chosen: in a mapped group only of its index, of another one all."""
        rows, head, inside = self._rows[idx], self._head[idx], self._head[by.idx]
        if inside is not None:
            return [TaskId(idx, by.map_index)] if head == inside and rows.get(by.map_index) == WAITING else []
        if rows or head is None:
            waiting = [TaskId(idx, number) for number, state in rows.items() if head is not None and state == WAITING]
            return waiting if rows else [TaskId(idx)]
        return [TaskId(each) for each in self._every if self._head[each] == head]

    def _in(self, states: Iterable[str]) -> set[int]:
        """The tasks that are, or have an instance, in one of these states."""
        return {i for i in self._every if not {*states}.isdisjoint((self._rows[i] or {WHOLE: WAITING}).values())}

    def _settle(self, ended: dict[TaskId, str]) -> None:
        """Decide the tasks downstream of the ended ones, level by level; then finished groups release their edges, and mapped
        tasks expand."""
        while True:
            for key, state in ended.items():
                self._rows[key.idx][key.map_index] = state
            ended = self._decided({down for key in ended for down in self._down[key.idx]})
            if not (ended := ended or (self._leave_groups() if self.spec.groups else {}) or self._expanded()):
                return

    def _decided(self, idxs: Iterable[int]) -> dict[TaskId, str]:
        """The tasks of these that end by their trigger rules. A task that may run becomes ready."""
        found: dict[TaskId, str] = {}
        for idx in idxs:
            rows = self._rows[idx] or ({WHOLE: WAITING} if self._head[idx] is None else {})
            for number in [number for number, state in rows.items() if state == WAITING]:
                decision = self._decision(TaskId(idx, number))
                if decision is RuleDecision.RUN:
                    self._rows[idx][number] = READY
                elif decision is not RuleDecision.WAIT:
                    found[TaskId(idx, number)] = "skipped" if decision is RuleDecision.SKIP else decision.value
        return found

    def _upstream_rows(self, up: int, key: TaskId) -> dict[int, str]:
        """What counts of an upstream task: in the same mapped group the instance with the same index."""
        if self._head[up] is None or self._head[up] != self._head[key.idx]:
            return self._rows[up]
        return {number: self._rows[up][number] for number in (key.map_index,) if number in self._rows[up]}

    def _decision(self, key: TaskId) -> RuleDecision:
        idx = key.idx
        counted = {up: self._group[up] in {None, self._group[idx], *self._released} for up in self._up[idx]}
        counts = Counter(state for up in counted if counted[up] for state in self._upstream_rows(up, key).values())
        setups = [self._rows[up].get(WHOLE) if counted[up] else None for up in counted if self.spec.tasks[up].is_setup]
        total = sum(max(len(self._upstream_rows(up, key)), 1) for up in counted)
        return decide(self.spec.tasks[idx].trigger_rule, UpstreamCounts.of(total, counts, setups))

    def _leave_groups(self) -> dict[TaskId, str]:
        """A group that ended releases all its edges at once; a group that failed with retries left starts again instead."""
        over = {*self._group} - self._released - {None} - {self._group[idx] for idx in self._in((READY, WAITING))}
        bad = self._in(FAILED_TASK_STATES) & group_leaves(self.spec)
        failed = {self._group[idx] for idx in self._in(["failed"])} & {self._group[idx] for idx in bad} & over
        again = {n for n, each in enumerate(self.spec.groups) if n in failed and self._retried[n] < each.retries}
        self._released |= over - again
        if ended := self._decided(self._every) if over - again else {}:
            return ended
        self._retried.update(again)
        # A task that a branch outside the group skipped stays skipped: the branch does not run again.
        kept = {idx for idx, by in self._unchosen.items() if self._group[by] != self._group[idx]}
        return self._reopened({key for key in self.states if self._group[key.idx] in again and key.idx not in kept})

    def _reopened(self, cleared: Collection[TaskId]) -> dict[TaskId, str]:
        self._released -= {self._group[key.idx] for key in cleared}
        for key in cleared:
            self._rows[key.idx][key.map_index] = WAITING
            self._unchosen.pop(key.idx, None)
            for known in (self.results, self.attempts):
                known.pop(key, None)
        for idx in {key.idx for key in cleared if {*self._rows[key.idx].values()} == {WAITING}}:
            group = [each for each in self._every if each == idx or self._head[each] == self._head[idx] is not None]
            if all({*self._rows[each].values()} <= {WAITING} for each in group):
                for each in group:
                    self._rows[each] = {}
        return self._decided(self._every)

    def _expanded(self) -> dict[TaskId, str]:
        """A mapped task that may start becomes its instances, or ends."""
        for idx in (idx for idx in self._every if self._rows[idx].get(WHOLE) == READY):
            if self._head[idx] is None and (mapping := self.spec.tasks[idx].mapping) is not None:
                found = items_of(mapping, self.result_of, lambda name: self._rows[self._place[name]].get(WHOLE))
                self._rows[idx] = dict.fromkeys(range(len(found.items)), READY)
                self.items |= {TaskId(idx, number): item for number, item in enumerate(found.items)}
                if found.instead is not None:
                    self.reasons[TaskId(idx)] = found.reason
                    return {TaskId(idx): found.instead}
        return self._expanded_groups()

    def _lists(self, head: int) -> set[int]:
        mapping = mapping_at(self.spec, head)
        return {self._place[name] for each in mapping.lists for name in each.tasks} if mapping else set()

    def _expanded_groups(self) -> dict[TaskId, str]:
        """A mapped group becomes its instances once its lists are known, or ends as a whole."""
        for head in (idx for idx in self._every if self._head[idx] == idx and not self._rows[idx]):
            mapping, open_ones = mapping_at(self.spec, head), self._in((READY, WAITING))
            assert mapping is not None
            lists = self._lists(head)
            if open_ones & lists or any(
                self._group[up] not in {None, self._group[head], *self._released} for up in lists
            ):
                continue
            found = items_of(mapping, self.result_of, lambda name: self._rows[self._place[name]].get(WHOLE))
            members = [idx for idx in self._every if self._head[idx] == head]
            if found.instead is not None:
                is_failed = bool(lists & self._in(FAILED_TASK_STATES))
                self.reasons |= {TaskId(idx): found.reason for idx in members}
                return {TaskId(idx): "upstream_failed" if is_failed else found.instead for idx in members}
            for idx in members:
                self._rows[idx] = dict.fromkeys(range(len(found.items)), WAITING)
                self.items |= {TaskId(idx, number): item for number, item in enumerate(found.items)}
            if ended := self._decided(members):
                return ended
        return {}
