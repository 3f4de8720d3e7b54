"""The metrics themselves: each is documented as it is, and its labels are words, not ids."""

from __future__ import annotations

import re
from collections.abc import Iterator

import promql_parser as promql
import pytest
import yaml
from prometheus_client.metrics import MetricWrapperBase

from evertick.observability import metrics
from tests.source_tree import ROOT

PAGE = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
MONITORING = ROOT / "deploy" / "monitoring"
ROW = re.compile(r"^\| `(evertick_\w+)` \| (\w+) \|([\w, ]*)\|", re.MULTILINE)
ALL = [each for each in vars(metrics).values() if isinstance(each, MetricWrapperBase)]


def described(metric: MetricWrapperBase) -> tuple[str, str, str]:
    (family,) = metric.collect()
    name = f"{family.name}_total" if family.type == "counter" else family.name
    return name, family.type, ", ".join(metric._labelnames)


def test_the_page_has_every_metric_with_its_type_and_labels() -> None:
    rows = [(name, kind, labels.strip()) for name, kind, labels in ROW.findall(PAGE)]
    assert sorted(rows) == sorted(described(metric) for metric in ALL)


def series() -> set[str]:
    """Every name that a query may use."""
    families = [described(metric)[:2] for metric in ALL]
    ends = {"histogram": ("_bucket", "_sum", "_count")}
    return {name + end for name, kind in families for end in ends.get(kind, ("",))}


def expressions(node: object) -> Iterator[str]:
    """Every query of a document of Prometheus or Grafana."""
    if isinstance(node, dict):
        yield from (value for key, value in node.items() if key == "expr")
    for each in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        yield from expressions(each)


@pytest.mark.parametrize("name", ["alerts.yaml", "dashboard.json"])
def test_the_queries_of_the_shipped_files_ask_for_series_that_there_are(name: str) -> None:
    found = list(expressions(yaml.safe_load((MONITORING / name).read_text(encoding="utf-8"))))
    assert len(found) > 10
    for query in found:
        promql.parse(query.replace("$__rate_interval", "5m"))
        assert set(re.findall(r"evertick_\w+", query)) <= series(), query


def test_a_query_for_a_series_that_does_not_exist_would_be_found() -> None:
    assert "evertick_fire_lag_seconds_bucket" in series() and "evertick_fires_total" in series()
    assert not {"evertick_fires", "evertick_fire_lag_seconds", "evertick_nothing"} & series()


def test_labels_in_the_texts_of_alerts_are_labels_of_their_queries() -> None:
    rules = yaml.safe_load((MONITORING / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
    known = {name: set(labels.split(", ")) for name, _, labels in map(described, ALL)}
    for rule in rules:
        assert rule["annotations"].keys() == {"summary"}, rule["alert"]
        used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
        asked = set(re.findall(r"evertick_\w+", rule["expr"]))
        assert used <= {label for name in asked for label in known.get(name, set())}, rule["alert"]
        assert rule["labels"]["severity"] in ("critical", "warning"), rule["alert"]


def test_the_panels_of_the_dashboard_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in yaml.safe_load((MONITORING / "dashboard.json").read_text(encoding="utf-8"))["panels"]:
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken and at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells


def test_every_metric_is_ours_and_says_what_it_counts() -> None:
    for metric in ALL:
        name, _, labels = described(metric)
        assert name.startswith("evertick_")
        assert metric._documentation.endswith(".") and len(metric._documentation) > 20
        assert not {"run", "session", "runner"} & set(labels.split(", "))
