"""Frames between a runner and an attempt's process."""

from __future__ import annotations

import random

from evertick.attempts.protocol import Frames, Report, Start, frame, read_report, start_frame
from evertick.domain.attempt import AttemptOrder, Isolation, OutcomeKind, TaskKey, Usage

ORDER = AttemptOrder(
    key=TaskKey(1, 2, 3),
    epoch=4,
    session=-5,
    attempt=6,
    dag="d",
    task="grüß",
    version_id=7,
    bundle="b",
    file="f.py",
    fire_at="2030-01-02T06:00:00+00:00",
    params_json='{"a": "\\u0000"}',
    inputs_json="{}",
    timeout_seconds=1.5,
    isolation=Isolation.WARM,
)


def test_frames_survive_any_cutting_of_the_stream() -> None:
    messages = [["a", 1], ["ü" * 1000, None], [[{"x": 2.5}]]]
    stream = b"".join(frame(message) for message in messages)
    for seed in range(20):
        cuts = sorted(random.Random(seed).sample(range(len(stream)), 5))
        pieces = [stream[a:b] for a, b in zip([0, *cuts], [*cuts, len(stream)], strict=True)]
        frames = Frames()
        assert [message for piece in pieces for message in frames.feed(piece)] == messages


def test_an_order_arrives_as_it_was_sent() -> None:
    (message,) = Frames().feed(start_frame(9, ORDER))
    start = Start._make(message)
    assert (start.verb, start.number, start.run_id, start.idx, start.map_index) == ("start", 9, 1, 2, 3)
    assert (start.epoch, start.session, start.attempt, start.task) == (4, -5, 6, "grüß")
    assert start.params_json == ORDER.params_json
    assert start.idempotency_key == ORDER.idempotency_key
    assert not start.is_single_use


def test_a_report_arrives_as_it_was_sent() -> None:
    report = Report(3, OutcomeKind.FAILED, "ValueError: ü", exit_code=2, retry_after_seconds=1.5, log_end=99)
    report = report._replace(usage=Usage(0.25, 1 << 20), skips=("a",))
    (message,) = Frames().feed(frame(report))
    assert read_report(message) == report


def test_frames_know_when_a_message_is_cut() -> None:
    frames, whole = Frames(), frame(["x" * 1000])
    assert frames.feed(whole[:500]) == [] and frames.is_cut
    assert frames.feed(whole[500:]) == [["x" * 1000]] and not frames.is_cut
