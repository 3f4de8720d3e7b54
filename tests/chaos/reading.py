"""Reads the nemesis log and the client log back. A torn last line is its writer's death, and no evidence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from tests.chaos.record import (
    Answer,
    ClientRequest,
    Fault,
    FaultWindow,
    Json,
    Nemesis,
    Placement,
    ProcessLife,
    Sample,
    TotalSample,
)


def read_nemesis(path: Path) -> Nemesis:
    begun: dict[int, Json] = {}
    ended: dict[int, Json] = {}
    alive: dict[tuple[str, int], int] = {}
    lives: list[ProcessLife] = []
    phases: list[tuple[str, int]] = []
    samples: list[Sample] = []
    totals: list[TotalSample] = []
    placed: dict[str, int] = {}
    placements: list[Placement] = []
    last = 0
    for line in _read_lines(path):
        what, at = line.pop("what"), line["at_ns"]
        line.pop("wall_ns", None)
        last = max(last, at)
        match what:
            case "began":
                begun[line["number"]] = line
            case "ended":
                known = ended.setdefault(line["number"], {"at_ns": at, "parameters": {}})
                known["parameters"] |= line["parameters"]
            case "started":
                alive[line["service"], line["pid"]] = at
            case "exited":
                start = alive.pop((line["service"], line["pid"]), None)
                if start is not None:
                    lives.append(
                        ProcessLife(
                            service=line["service"], pid=line["pid"], start_ns=start, exit_ns=at, status=line["status"]
                        )
                    )
            case "placed":
                placed[line["name"]] = at
            case "displaced":
                placements.append(Placement(name=line["name"], start_ns=placed.pop(line["name"]), stop_ns=at))
            case "phase":
                phases.append((line["name"], at))
            case "sample":
                samples.append(Sample(**line))
            case "total":
                totals.append(TotalSample(**line))
    lives += [
        ProcessLife(service=service, pid=pid, start_ns=start, exit_ns=None, status=None)
        for (service, pid), start in alive.items()
    ]
    placements += [Placement(name=name, start_ns=start, stop_ns=None) for name, start in placed.items()]
    return Nemesis(
        faults=tuple(_fault(line, ended.get(number), last) for number, line in sorted(begun.items())),
        lives=tuple(sorted(lives, key=lambda life: life.start_ns)),
        phases=tuple(sorted(phases, key=lambda phase: phase[1])),
        samples=tuple(samples),
        totals=tuple(totals),
        placements=tuple(sorted(placements, key=lambda placement: placement.start_ns)),
    )


def _fault(line: Json, end: Json | None, last: int) -> FaultWindow:
    return FaultWindow(
        number=line["number"],
        kind=Fault(line["kind"]),
        target=line["target"],
        start_ns=line["at_ns"],
        stop_ns=end["at_ns"] if end else last,
        disturbs=tuple(line["disturbs"]),
        parameters=line["parameters"] | (end["parameters"] if end else {}),
    )


def read_client(path: Path) -> tuple[ClientRequest, ...]:
    """Every request, in the order in which they were first sent. One without an answer is unknown; one that was sent
    again is known once any answer said so, and was surely refused only if every answer said that."""
    asked: dict[str, Json] = {}
    answers: dict[str, list[Json]] = {}
    for line in _read_lines(path):
        if line["what"] == "asked":
            asked.setdefault(line["request"], line)
        else:
            answers.setdefault(line["request"], []).append(line)
    return tuple(_request(line, answers.get(request, [])) for request, line in asked.items())


def _request(line: Json, answers: list[Json]) -> ClientRequest:
    said = [Answer(each["answer"]) for each in answers] or [Answer.UNKNOWN]
    answer = next((known for known in (Answer.OK, Answer.UNKNOWN) if known in said), Answer.ERROR)
    detail = dict(line["detail"])
    for each in answers:
        detail |= each["detail"]
    return ClientRequest(
        op=line["op"],
        request=line["request"],
        asked_ns=line["at_ns"],
        answered_ns=answers[-1]["at_ns"] if answers else None,
        answer=answer,
        detail=detail,
    )


def _read_lines(path: Path) -> Iterator[Json]:
    """Whole lines. The last one may be torn: its writer was killed."""
    if not path.exists():
        return
    text = path.read_bytes()
    for line in text[: text.rfind(b"\n") + 1].splitlines():
        yield json.loads(line)
