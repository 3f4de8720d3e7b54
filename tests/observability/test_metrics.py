"""The metrics themselves: each is documented as it is, and its labels are words, not ids."""

from __future__ import annotations

import re

from prometheus_client.metrics import MetricWrapperBase

from evertick.observability import metrics
from tests.source_tree import ROOT

PAGE = (ROOT / "docs" / "howto" / "monitor.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(evertick_\w+)` \| (\w+) \|([\w, ]*)\|", re.MULTILINE)
ALL = [each for each in vars(metrics).values() if isinstance(each, MetricWrapperBase)]


def described(metric: MetricWrapperBase) -> tuple[str, str, str]:
    (family,) = metric.collect()
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return name, family.type, ", ".join(metric._labelnames)


def test_the_page_has_every_metric_with_its_type_and_labels() -> None:
    rows = [(name, kind, labels.strip()) for name, kind, labels in ROW.findall(PAGE)]
    assert sorted(rows) == sorted(described(metric) for metric in ALL)


def test_the_alerts_ask_for_metrics_that_there_are() -> None:
    asked = set(re.findall(r"evertick_\w+", "\n".join(re.findall(r"expr: (.*)", PAGE))))
    known = {described(metric)[0] for metric in ALL}
    assert asked
    assert {name.removesuffix("_bucket") for name in asked} <= known


def test_every_metric_is_ours_and_says_what_it_counts() -> None:
    for metric in ALL:
        name, _, labels = described(metric)
        assert name.startswith("evertick_")
        assert metric._documentation.endswith(".") and len(metric._documentation) > 20
        assert not {"run", "task", "session", "runner"} & set(labels.split(", "))
